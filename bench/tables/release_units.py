"""Measure what units with noise, and a prior of released moments, are good for.

    python -m bench.tables.release_units units
    python -m bench.tables.release_units prior

`units`: the share of variance that five components of breast cancer data explain, of what the best
five do on rows divided by their true deviations, over eight draws. Units are released first, from
ranges of zero to 1.2 times the largest number, with a share of the budget in 1/σ², then moments in
these units with the rest.

`prior`: the mean distance √(r - ‖UᵀÛ‖²) of the clients' two components from the true ones, over
three draws from the model of `jf.pca.HierarchicalPCA` with the prior variance 0.01: of each
client's own PCA, and of `jf.estimators.HierarchicalBayesPCA` with epsilon.

Delta is 1e-5.
"""

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
from sklearn import datasets

import jaxfed as jf
from bench.common import choose, machine, table
from jaxfed.core.clients.guarantee import Rows
from jaxfed.estimators import HierarchicalBayesPCA
from jaxfed.privacy._gaussian import epsilon_of, noise_of

DELTA, RANK, DRAWS = 1e-5, 5, 8
COMPONENTS, PRIOR, NOISE = 2, 0.01, 0.3
TRIED: list[tuple[Rows, float]] = [
    ("pairs", 0.05),
    ("pairs", 0.1),
    ("pairs", 0.35),
    ("directions", 0.1),
    ("directions", 0.35),
]
# Clients, rows, features, noise
MODELS = (12, 500, 20, 0.1), (50, 100, 10, NOISE), (200, 30, 10, NOISE)


def explained(clients: int, total: float, share: float, rows: Rows, seed: int) -> float:
    """The share of what the best components explain, of a draw."""
    x = datasets.load_breast_cancer().data
    sigma, key = noise_of(total, DELTA), jax.random.key(seed)
    parts = np.array_split(x[np.random.default_rng(seed).permutation(len(x))], clients)
    raw = jf.Clients.from_samples(parts)
    cost = {"delta": DELTA, "key": key}
    first = epsilon_of(sigma / share**0.5, DELTA)
    found = jf.privacy.release_units(raw, 0.0, 1.2 * x.max(axis=0), epsilon=first, **cost)
    rest = epsilon_of(sigma / (1 - share) ** 0.5, DELTA)
    scaled = found.units.transform(raw)
    released = jf.privacy.release_moments(scaled, rows=rows, epsilon=rest, **cost)
    shared = jf.fit(jf.pca.Pooled(RANK), released, rounds=1, key=key).result.shared
    true = (x - x.mean(axis=0)) / x.std(axis=0)
    best = np.linalg.svd(true, compute_uv=False)[:RANK]
    return float(np.sum((true @ np.asarray(shared)) ** 2) / np.sum(best**2))


def units(seed: int) -> Iterator[dict[str, object]]:
    """Shares of variance by the share of the budget."""
    for rows, share in TRIED:
        row: dict[str, object] = {"share for units": f"{share:.0%}, {rows}"}
        for total in (1.0, 3.0):
            for clients in (1, 6):
                found = [explained(clients, total, share, rows, seed + i) for i in range(DRAWS)]
                row[f"{clients} clients, ε = {total:g}"] = f"{np.mean(found):.2f}"
        yield row


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The distance of two subspaces."""
    return max(0.0, one.shape[1] - float(np.sum((one.T @ other) ** 2))) ** 0.5


def drawn(sizes: tuple[int, int, int, float], seed: int) -> tuple[list, list]:
    """Clients' components and rows."""
    clients, rows, features, noise = sizes
    rng = np.random.default_rng(seed)
    centre = np.linalg.qr(rng.normal(size=(features, COMPONENTS)))[0]
    bases, tables = [], []
    for _ in range(clients):
        move = rng.normal(size=centre.shape) * PRIOR**0.5
        left, _, right = np.linalg.svd(
            centre + move - centre @ (centre.T @ move), full_matrices=False
        )
        bases.append(left @ right)
        scores, rest = rng.normal(size=(rows, COMPONENTS)), rng.normal(size=(rows, features))
        tables.append(scores @ bases[-1].T + noise**0.5 * rest)
    return bases, tables


def prior(seed: int) -> Iterator[dict[str, object]]:
    """Errors of the clients' components."""

    def mean(sizes: tuple[int, int, int, float], epsilon: float | None, draw: int) -> float:
        bases, tables = drawn(sizes, draw)
        if epsilon == 0:
            svd = partial(np.linalg.svd, full_matrices=False)
            own = [svd(x)[2][:COMPONENTS] for x in tables]
        else:
            model = HierarchicalBayesPCA(
                COMPONENTS, rounds=60, center=False, epsilon=epsilon, random_state=draw
            )
            groups = np.repeat(np.arange(len(tables)), [len(x) for x in tables])
            own = model.fit(np.concatenate(tables), groups=groups).local_components_
        return float(np.mean([distance(u, v.T) for u, v in zip(bases, own, strict=True)]))

    ways = {"own PCA": 0.0, "ε = 1": 1.0, "ε = 3": 3.0, "ε = 10": 10.0, "no noise": None}
    for sizes in MODELS:
        row: dict[str, object] = {"clients, rows, features": f"{sizes[0]} × {sizes[1]}, {sizes[2]}"}
        for name, epsilon in ways.items():
            row[name] = f"{np.mean([mean(sizes, epsilon, seed + i) for i in range(3)]):.3f}"
        yield row


def main() -> None:
    """Print a table."""
    chosen = choose({"units": units, "prior": prior}, __doc__)
    print(machine(), flush=True)
    with jax.enable_x64(True):
        print(table(list(chosen.part(chosen.seed))))


if __name__ == "__main__":
    main()
