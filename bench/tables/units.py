"""One feature in a unit of its own: how far components in single precision are from double.

    python -m bench.tables.units

Five clients have sixty samples of ten features, with two shared components of standard deviations
3 and 2.5, one local component of 1.7, and noise of 0.3. One feature is multiplied by a factor, or
another one has an offset, and everything is rounded to single precision. Entries are the largest
distance of projectors, of shared or local components, from those of the same run in double
precision: of `rollout`, which stays in single precision, and after the slash of `fit`. Then how
much longer `fit` takes for the factor of 1,000 than without it: second calls of 40 rounds of
`PerPCA` with 40 clients of 1,000 samples and 100 features, median of nine turns.
"""

import warnings
from functools import partial

import jax
import numpy as np

import jaxfed as jf
from bench.common import every_turn, machine, table

KEY = jax.random.key(0)
UNITS = {"x 100": (1e2, 0.0), "x 1e3": (1e3, 0.0), "x 1e6": (1e6, 0.0), "+ 1e3": (1.0, 1e3)}
# Each algorithm, and its rounds.
ALGORITHMS = {
    "PerPCA": (jf.pca.PerPCA(2, 1), 40),
    "HMF": (jf.pca.HMF(2, 1), 40),
    "TCMF": (jf.pca.TCMF(2, 1, 5.0), 40),
    "HierarchicalPCA": (jf.pca.HierarchicalPCA(3, solver="quasi_newton"), 40),
    "EmpiricalBayesPCA": (jf.pca.EmpiricalBayesPCA(3), 40),
    "Local": (jf.pca.Local(3), 1),
    "Pooled": (jf.pca.Pooled(3), 1),
    "OneShot": (jf.pca.OneShot(2, 1), 1),
    "SubspaceIteration": (jf.pca.SubspaceIteration(3), 30),
    "BlockLanczos": (jf.pca.BlockLanczos(3), 8),
    "LocalPower": (jf.pca.LocalPower(3), 20),
    "FAPS": (jf.pca.FAPS(3), 40),
}


def samples(factor: float, offset: float) -> np.ndarray:
    """Samples in single precision, `(clients, samples, features)`."""
    rng = np.random.default_rng(1)
    basis = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    own = rng.normal(size=(5, 1, 8))
    own = 1.7 * own / np.linalg.norm(own, axis=2, keepdims=True) @ basis[:, 2:].T
    x = rng.normal(size=(5, 60, 2)) * [3, 2.5] @ basis[:, :2].T
    x += rng.normal(size=(5, 60, 1)) * own + 0.3 * rng.normal(size=x.shape)
    x[..., 3] *= factor
    x[..., 4] += offset
    return x.astype(np.float32)


def projectors(result: jf.Personalized) -> list[np.ndarray]:
    """Projectors on the shared and on each client's components."""
    bases = [np.asarray(part, float) for part in result if part is not None]
    return [np.einsum("...dr,...er->...de", x, x) for x in bases]


def in_double(name: str, x: np.ndarray) -> jf.Solution:
    """The run in double precision."""
    algorithm, rounds = ALGORITHMS[name]
    with jax.enable_x64(True):
        clients = jf.Clients.from_samples(x.astype(float))
        return jf.fit(algorithm, clients, rounds=rounds, key=KEY)


def row_of(name: str) -> dict[str, object]:
    """The row of an algorithm."""
    algorithm, rounds = ALGORITHMS[name]
    row: dict[str, object] = {"algorithm": name}
    for unit, (factor, offset) in UNITS.items():
        x = samples(factor, offset)
        wanted = in_double(name, x)
        clients, found = jf.Clients.from_samples(x), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jf.UnitsWarning)
            for run in (jf.rollout, jf.fit):
                found.append(run(algorithm, clients, rounds=rounds, key=KEY))
        row[unit] = " / ".join(
            f"{max(map(distance, projectors(each.result), projectors(wanted.result))):.0e}"
            for each in found
        )
    return row


def distance(one: np.ndarray, two: np.ndarray) -> float:
    """The largest spectral distance of projectors."""
    return float(np.linalg.norm(one - two, 2, axis=(-2, -1)).max())


def slowdown() -> float:
    """Processor time of a fit in double precision, by that of one in single precision."""
    x = np.random.default_rng(0).normal(size=(40, 1000, 100)).astype(np.float32)
    x[..., :3] *= 3
    unlike = x.copy()
    unlike[..., 0] *= 1000
    pair = {
        name: partial(
            jf.fit,
            jf.pca.PerPCA(2, 2),
            jf.Clients.from_samples(each),
            rounds=40,
            key=KEY,
            backend=jf.backend.vmap(),
        )
        for name, each in (("single", x), ("double", unlike))
    }
    taken = every_turn({name: lambda run=run: run().result for name, run in pair.items()}, 9)
    return float(np.median(taken["double"]["cpu"] / taken["single"]["cpu"]))


if __name__ == "__main__":
    print(machine())
    print(table([row_of(name) for name in ALGORITHMS]))
    print(f"a fit in double precision takes {slowdown():.2g} times as long")
