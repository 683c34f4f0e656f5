"""Personalized Tucker decomposition: which pattern an image shows, by the local cores' energy.

Images as in the simulation of Hu, Shi, Al Kontar & Yan (2023), Figure 5: three clients, whose
50 x 50 images show a cross, an oval or a rectangle of varying width, before a background of random
scores in five shared directions of each mode. A new image is assigned to the client whose local
components hold most of its energy.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxfed as jf
from jaxfed.pca import PerPCA, PerTucker
from papers.intervals import at_least
from papers.report import Found, Labels
from papers.runs import Seeds

SIZE, RANKS, MODES = 50, (5, 5), (0, 1)
PATTERNS = ("cross", "oval", "rectangle")
IMAGES, ROUNDS = (5, 10, 50), 60
TUCKER, PERPCA = "PerTucker, 5 x 5 shared, 5 x 5 local", "PerPCA, 25 shared, 5 local"
RIGHT = "% right"


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
    return jf.fit(algorithm, clients, rounds=ROUNDS, key=jax.random.key(0)).result


def cores(components: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Energy of images, `(clients, images, features)`, in the local components of each client."""
    return np.sum(np.einsum("cnd,ldr->cnlr", values, components) ** 2, axis=-1)


def flat(values: np.ndarray) -> np.ndarray:
    """Images as rows of features."""
    return values.reshape(*values.shape[:2], -1)


def scores(energy: np.ndarray) -> dict[str, float]:
    """The percentage of right clients, and by how much images show whose they are.

    `energy` is `(clients, images, components)`, as `cores` has it.
    """
    right = energy.argmax(-1) == np.arange(len(PATTERNS))[:, None]
    found = {RIGHT: 100 * float(right.mean())}
    for i, name in enumerate(PATTERNS):
        others = np.delete(energy[i], i, axis=-1).max(-1)
        found[by_own(name)] = float(np.median(energy[i, :, i] / others))
    return found


def by_own(name: str) -> str:
    """The label of a pattern's energy in its client's components, relative to any other's."""
    return f"energy of a new {name} by own components / by others"


def run(seeds: Seeds, *, counts: Sequence[int] = IMAGES) -> Found:
    """Both methods with few and with many images."""
    perpca = PerPCA(25, 5, start="local_first", local_penalty=0.0)
    methods = {TUCKER: PerTucker((SIZE, SIZE), RANKS, RANKS), PERPCA: perpca}
    measured: dict[Labels, Any] = {}
    with jax.enable_x64(True):
        for seed in seeds:
            for count in counts:
                drawn = images(seed, count)
                clients = jf.Clients.from_samples(flat(drawn.train))
                for method, algorithm in methods.items():
                    own = np.asarray(solved(algorithm, clients).local)
                    found = scores(cores(own, flat(drawn.test)))
                    for quantity, value in found.items():
                        # Energies as in the figure, of the paper's method and number of images.
                        if quantity == RIGHT or (method == TUCKER and count == counts[-1]):
                            measured.setdefault((method, count, quantity), []).append(value)
    few, most = counts[0], counts[-1]
    claims = {
        f"percentage right ahead of PerPCA, {few} images each": (
            np.subtract(measured[TUCKER, few, RIGHT], measured[PERPCA, few, RIGHT]),
            at_least(0),
        )
    }
    for name in PATTERNS:
        claims[by_own(name)] = (measured[TUCKER, most, by_own(name)], at_least(1))
    return Found(measured, claims=claims)
