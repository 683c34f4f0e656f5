"""How often confidence intervals contain the truth, and what resamples cost.

    python -m bench.tables.confidence [coverage | clients | cost]

`coverage`: a thousand draws of six clients with eight features, ranks 2 + 2. A cell contains the
share of draws whose 95 % interval or bound contains the truth of infinitely many samples; of the
distance, the mean over clients. Sizes are those of each client, or between half and one and a half
of that. `clients`: the same for resamples of twenty clients, where the truth is that of infinitely
many clients.

`cost`: seconds of 200 resamples and of one fit, and the standard errors of both versions.
"""

from typing import NamedTuple

import jax
import numpy as np

import jaxfed as jf

FEATURES, RANKS = 8, (2, 2)
SHARED, LOCAL, NOISE = (1.5, 1.0), (1.2, 0.8), 0.3  # standard deviations
RESAMPLES, ROUNDS = 200, 5
DRAWS, SEED = 1000, 20261126


class Draw(NamedTuple):
    """Clients, and the truth about them."""

    samples: list[np.ndarray]
    shared: np.ndarray
    shared_energy: np.ndarray  # of each client
    local_energy: np.ndarray


def orthonormal(
    rng: np.random.Generator, rank: int, beside: np.ndarray | None = None
) -> np.ndarray:
    """Random orthonormal columns, orthogonal to others."""
    columns = rng.standard_normal((FEATURES, rank))
    width = 0 if beside is None else beside.shape[1]
    stacked = columns if beside is None else np.concatenate([beside, columns], axis=1)
    return np.linalg.qr(stacked)[0][:, width:]


def drawn(rng: np.random.Generator, clients: int, samples: int, heavy: bool, unequal: bool) -> Draw:
    """Draw components and samples; noise is normal, or t with 5 degrees of the same variance."""
    shared = orthonormal(rng, RANKS[0])
    energies = np.sum(np.square(SHARED)), np.sum(np.square(LOCAL)), FEATURES * NOISE**2
    tables = []
    for i in range(clients):
        local = orthonormal(rng, RANKS[1], shared)
        count = samples if not unequal else int(samples * (0.5 + i / (clients - 1)))
        shape = (count, FEATURES)
        noise = rng.standard_t(5, shape) * 0.6**0.5 if heavy else rng.standard_normal(shape)
        tables.append(
            (rng.standard_normal((count, RANKS[0])) * SHARED) @ shared.T
            + (rng.standard_normal((count, RANKS[1])) * LOCAL) @ local.T
            + NOISE * noise
        )
    shares = [(e + r * NOISE**2) / sum(energies) for e, r in zip(energies, RANKS, strict=False)]
    return Draw(tables, shared, *(np.full(clients, share) for share in shares))


def covered(draw: Draw, seed: int, **options: object) -> dict[str, float]:
    """Whether the intervals of a fit contain the truth, by what they are about."""
    key = jax.random.key(seed)
    clients = jf.Clients.from_samples(draw.samples)
    model = jf.pca.VarProPerPCA(*RANKS)
    solution = jf.fit(model, clients, rounds=40, key=key)
    options = {"resamples": RESAMPLES, "block": RESAMPLES, "rounds": ROUNDS} | options
    found = jf.inference.confidence(solution, clients, key=key, **options)
    cosines = np.linalg.svd(draw.shared.T @ np.asarray(solution.result.shared), compute_uv=False)
    angle = np.arccos(np.clip(cosines.min(), 0, 1))

    def holds(interval: jf.inference.Interval, truth: np.ndarray) -> float:
        return float(np.mean((interval.lower <= truth) & (truth <= interval.upper)))

    return {
        "angle": float(angle <= found.angle),
        "shared energy": holds(found.shared_energy, draw.shared_energy.mean()),
        "local energy": holds(found.local_energy, draw.local_energy.mean()),
        "distance": holds(found.distance, 1 - draw.shared_energy),
    }


def settings() -> dict[str, dict[str, object]]:
    """The kinds of clients, by name."""
    return {
        f"{samples} samples, {noise} noise, {sizes} sizes": {
            "samples": samples,
            "heavy": noise == "t",
            "unequal": sizes == "unequal",
        }
        for samples in (20, 200)
        for noise in ("normal", "t")
        for sizes in ("equal", "unequal")
    }


def rows(clients: int, **options: object) -> list[dict[str, object]]:
    """One row for each kind of clients."""
    jax.config.update("jax_enable_x64", True)
    found = []
    for name, kind in settings().items():
        rng = np.random.default_rng(SEED)
        each = [covered(drawn(rng, clients, **kind), seed, **options) for seed in range(DRAWS)]
        shares = {key: np.mean([one[key] for one in each]) for key in each[0]}
        found.append({"clients": name, **{key: f"{x:.1%}" for key, x in shares.items()}})
    return found
