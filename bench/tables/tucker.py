"""Which pattern an image shows, by the energy in each client's local Tucker components.

    python -m bench.tables.tucker patterns
    python -m bench.tables.tucker cores
    python -m bench.tables.tucker digits

`patterns` and `cores`: images as in the simulation of Hu, Shi, Al Kontar & Yan (2023), Figure 5:
three clients, whose 50 x 50 images show a cross, an oval or a rectangle of varying width, before a
background of random scores in five shared directions of each mode. `patterns`: the percentage of
150 new images whose energy in the local components is largest for the right client; means of three
draws. `PerPCA` has as many shared components, and a fifth of the local ones, which cannot be more
than images. `cores`: that energy, the squared norm of the local core, relative to the median of all
images of a pattern: quartiles for the images of each pattern and the components of each client, one
draw.

`digits`: the 8 x 8 digits of scikit-learn, one client for each digit: the percentage of energy of
all other images that the components miss; means of five draws.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

import jaxfed as jf
from bench.common import choose, machine, table

SIZE, RANKS, MODES, DRAWS = 50, (5, 5), (0, 1), 3
PATTERNS = ("cross", "oval", "rectangle")
IMAGES, DIGITS = (5, 10, 50), (5, 10, 20, 50)


class Images(NamedTuple):
    """Images of each client, `(clients, images, height, width)`."""

    train: np.ndarray
    test: np.ndarray


def pattern(name: str, ratio: float) -> np.ndarray:
    """An image of a pattern, as much wider as it is lower."""
    y, x = np.meshgrid(*[np.linspace(-1, 1, SIZE)] * 2, indexing="ij")
    y, x = np.abs(y * ratio), np.abs(x / ratio)
    inside = {
        "cross": (np.maximum(x, y) < 0.65) & (np.minimum(x, y) < 0.2),
        "oval": x**2 + y**2 < 0.65**2,
        "rectangle": np.maximum(x, y) < 0.5,
    }
    return 5.0 * inside[name]


def images(seed: int, count: int, new: int = 50) -> Images:
    """A draw of the simulation."""
    rng = np.random.default_rng(seed)
    rows, columns = (np.linalg.qr(rng.normal(size=(SIZE, 5)))[0] for _ in range(2))

    def draw(number: int) -> np.ndarray:
        shown = [[pattern(p, rng.uniform(0.7, 1.3)) for _ in range(number)] for p in PATTERNS]
        scores = rng.normal(size=(len(PATTERNS), number, 5, 5))
        return np.array(shown) + 50 * rows @ scores @ columns.T

    return Images(draw(count), draw(new))


def solved(algorithm: jf.Algorithm, clients: jf.Clients) -> jf.Personalized:
    """The components after sixty rounds."""
    return jf.fit(algorithm, clients, rounds=60, key=jax.random.key(0)).result


def cores(found: jf.Personalized, values: np.ndarray) -> np.ndarray:
    """Energy of images, `(clients, images, features)`, in the local components of each client."""
    scores = np.einsum("cnd,ldr->cnlr", values, np.asarray(found.local))
    return np.sum(scores**2, axis=-1)


def flat(values: np.ndarray) -> np.ndarray:
    """Images as rows of features."""
    return values.reshape(*values.shape[:2], -1)


def by_patterns() -> list[dict[str, object]]:
    """One row an algorithm, one column a number of images."""
    algorithms = {
        "`PerTucker`, 5 x 5 shared, 5 x 5 local": jf.pca.PerTucker((SIZE, SIZE), RANKS, RANKS),
        "`PerPCA`, 25 shared, 5 local": jf.pca.VarProPerPCA(25, 5),
    }
    rows: list[dict[str, object]] = []
    for name, algorithm in algorithms.items():
        row: dict[str, object] = {"": name}
        for count in IMAGES:
            right = []
            for seed in range(DRAWS):
                drawn = images(seed, count)
                found = solved(algorithm, jf.Clients.from_samples(flat(drawn.train)))
                best = cores(found, flat(drawn.test)).argmax(-1)
                right.append(np.mean(best == np.arange(len(PATTERNS))[:, None]))
            row[f"{count} images each"] = f"{100 * np.mean(right):.1f}"
        rows.append(row)
    return rows


def by_cores() -> list[dict[str, object]]:
    """One row a pattern, one column the components of a client."""
    drawn = images(0, 50)
    clients = jf.Clients.from_samples(flat(drawn.train))
    energy = cores(solved(jf.pca.PerTucker((SIZE, SIZE), RANKS, RANKS), clients), flat(drawn.test))
    energy = energy / np.median(energy, axis=(1, 2), keepdims=True)
    rows: list[dict[str, object]] = []
    for name, own in zip(PATTERNS, energy, strict=True):
        quartiles = np.percentile(own, [25, 50, 75], axis=0).T
        row: dict[str, object] = {"images of": name}
        for client, three in zip(PATTERNS, quartiles, strict=True):
            row[f"components of {client}"] = ", ".join(f"{x:.2f}" for x in three)
        rows.append(row)
    return rows


def by_digits() -> list[dict[str, object]]:
    """One row an algorithm, one column a number of images."""
    from sklearn.datasets import load_digits

    data = load_digits()
    algorithms = {
        "`PerTucker`, 4 x 4 shared, 2 x 2 local": jf.pca.PerTucker((8, 8), (4, 4), (2, 2)),
        "`PerPCA`, 16 shared, 4 local": jf.pca.VarProPerPCA(16, 4),
        "`PerPCA`, 4 shared, 4 local": jf.pca.VarProPerPCA(4, 4),
    }
    rows: list[dict[str, object]] = []
    for name, algorithm in algorithms.items():
        row: dict[str, object] = {"": name}
        for count in DIGITS:
            missed = []
            for seed in range(5):
                rng = np.random.default_rng(seed)
                own = [rng.permutation(data.data[data.target == k]) for k in range(10)]
                clients = jf.Clients.from_samples(np.stack([x[:count] for x in own]))
                found = solved(algorithm, clients)
                rest = energy = 0.0
                for x, local in zip(own, np.asarray(found.local), strict=True):
                    for w in (np.asarray(found.shared), local):
                        rest -= np.sum((x[count:] @ w) ** 2)
                    energy += np.sum(x[count:] ** 2)
                missed.append(1 + rest / energy)
            row[f"{count} images each"] = f"{100 * np.mean(missed):.1f}"
        rows.append(row)
    return rows


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    parts: dict[str, Callable[..., object]] = {
        "patterns": by_patterns,
        "cores": by_cores,
        "digits": by_digits,
    }
    print(machine())
    print(table(choose(parts, __doc__).part()))
