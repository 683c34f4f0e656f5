"""How often confidence intervals contain the truth, and what resamples cost.

    python -m bench.tables.confidence [coverage | clients | gaps | cost]

`coverage`: four hundred draws of six clients with eight features, ranks 2 + 2. A cell contains the
share of draws whose 95 % interval or bound contains the truth of infinitely many samples; of the
distance, the mean over clients. Sizes are those of each client, or between half and one and a half
of that. `clients`: the same for resamples of twenty clients, where the truth is that of infinitely
many clients. `gaps`: twenty-five draws of ten clients with 100 samples of 15 features, some entries
of which are missing, with the means of the true angle and of its bound.

`cost`: seconds of 200 resamples and of one fit, and the standard errors of both versions.
"""

import time
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from sklearn.datasets import load_digits

import jaxfed as jf
from bench.common import choose, machine, table, turns

FEATURES, RANKS = 8, (2, 2)
SHARED, LOCAL, NOISE = (1.5, 1.0), (1.2, 0.8), 0.3  # standard deviations
RESAMPLES = 200
DRAWS, SEED = 400, 20261126
GAP_DRAWS, GAP_RESAMPLES = 25, 100


class Kind(NamedTuple):
    """A kind of clients."""

    samples: int
    heavy: bool = False  # noise is t with 5 degrees of freedom, of the same variance
    unequal: bool = False  # from half to one and a half of the samples
    varied: bool = False  # standard deviations of local components differ between clients
    features: int = FEATURES
    missing: float = 0.0  # share of entries


class Shares(NamedTuple):
    """True shares of energy."""

    shared: float | np.ndarray
    local: float | np.ndarray


def shares(factor: float | np.ndarray, features: int) -> Shares:
    """Shares of a client whose local standard deviations are multiplied by a factor."""
    parts = np.sum(np.square(SHARED)), np.sum(np.square(LOCAL)) * factor**2
    total = sum(parts) + features * NOISE**2
    return Shares(*((e + r * NOISE**2) / total for e, r in zip(parts, RANKS, strict=True)))


class Draw(NamedTuple):
    """Clients, and the truth about them."""

    samples: list[np.ndarray]
    basis: np.ndarray  # of the shared subspace
    shares: Shares  # of each client
    mean: Shares


def orthonormal(rng: np.random.Generator, rank: int, beside: np.ndarray) -> np.ndarray:
    """Random orthonormal columns, orthogonal to others."""
    columns = np.concatenate([beside, rng.standard_normal((len(beside), rank))], axis=1)
    return np.linalg.qr(columns)[0][:, beside.shape[1] :]


def with_missing(rng: np.random.Generator, table: np.ndarray, share: float) -> np.ndarray:
    """Remove a share of the entries; a row keeps its first one if it would lose all."""
    gaps = rng.random(table.shape) < share
    gaps[:, 0] &= ~gaps[:, 1:].all(axis=1)
    return np.where(gaps, np.nan, table)


def drawn(rng: np.random.Generator, clients: int, kind: Kind) -> Draw:
    """Draw components and samples."""
    basis = orthonormal(rng, RANKS[0], np.zeros((kind.features, 0)))
    factors = rng.uniform(0.5, 1.5, clients) if kind.varied else np.ones(clients)
    tables = []
    for i, factor in enumerate(factors):
        local = orthonormal(rng, RANKS[1], basis)
        count = int(kind.samples * (0.5 + i / (clients - 1))) if kind.unequal else kind.samples
        shape = (count, kind.features)
        noise = rng.standard_t(5, shape) * 0.6**0.5 if kind.heavy else rng.standard_normal(shape)
        tables.append(
            (rng.standard_normal((count, RANKS[0])) * SHARED) @ basis.T
            + (rng.standard_normal((count, RANKS[1])) * LOCAL) @ local.T * factor
            + NOISE * noise
        )
    if kind.missing:
        tables = [with_missing(rng, x, kind.missing) for x in tables]
    every = np.linspace(0.5, 1.5, 10_001) if kind.varied else np.ones(1)
    of_all = Shares(*(x.mean() for x in shares(every, kind.features)))
    return Draw(tables, basis, shares(factors, kind.features), of_all)


def covered(draw: Draw, seed: int, **options: object) -> dict[str, float]:
    """Whether the intervals of a fit contain the truth, by what they are about."""
    key = jax.random.key(seed)
    clients = jf.Clients.from_samples(draw.samples)
    solution = jf.fit(jf.pca.PerPCA(*RANKS), clients, rounds=40, key=key)
    sizes = {"resamples": RESAMPLES, "runs_at_once": RESAMPLES}
    found = jf.inference.confidence(solution, clients, key=key, **sizes, **options)
    return compared(draw, solution, found)


def covered_with_gaps(draw: Draw, seed: int) -> dict[str, float]:
    """The same for samples with gaps, and the true angle with its bound in degrees."""
    key = jax.random.key(seed)
    clients = jf.Clients.from_samples(draw.samples, missing="mask")
    imputed = jf.fit(jf.preprocess.Impute(*RANKS), clients, rounds=50, key=key)
    moments = imputed.result.local.moments(clients)
    solution = jf.fit(jf.pca.PerPCA(*RANKS), moments, rounds=60, key=key)
    start = time.perf_counter()
    found = jf.inference.confidence(
        solution, clients, key=key, impute=imputed, resamples=GAP_RESAMPLES
    )
    return compared(draw, solution, found) | {
        "true angle": np.degrees(true_angle(draw, solution)),
        "bound": np.degrees(found.angle),
        "seconds": time.perf_counter() - start,
    }


def true_angle(draw: Draw, solution: jf.Solution) -> float:
    """The largest angle between the shared subspace and the true one."""
    cosines = np.linalg.svd(draw.basis.T @ np.asarray(solution.result.shared), compute_uv=False)
    return np.arccos(np.clip(cosines.min(), 0, 1))


def compared(draw: Draw, solution: jf.Solution, found: jf.inference.Confidence) -> dict[str, float]:
    """Whether intervals contain the truth, by what they are about."""

    def holds(interval: jf.inference.Interval, truth: np.ndarray) -> float:
        return float(np.mean((interval.lower <= truth) & (truth <= interval.upper)))

    return {
        "angle": float(true_angle(draw, solution) <= found.angle),
        "shared energy": holds(found.shared_energy, draw.mean.shared),
        "local energy": holds(found.local_energy, draw.mean.local),
        "distance": holds(found.distance, 1 - draw.shares.shared),
    }


def coverage(clients: int, of: str, kinds: dict[str, Kind]) -> list[dict[str, object]]:
    """One row for each kind of clients."""
    jax.config.update("jax_enable_x64", True)
    rows = []
    for name, kind in kinds.items():
        rng = np.random.default_rng(SEED)
        each = [covered(drawn(rng, clients, kind), seed, of=of) for seed in range(DRAWS)]
        names = list(each[0])[: 3 if of == "clients" else 4]  # a client's own samples do not vary
        rows.append({"clients": name} | {x: f"{np.mean([e[x] for e in each]):.1%}" for x in names})
    return rows


def of_samples() -> list[dict[str, object]]:
    """Six clients whose samples are drawn again."""
    kinds = {
        f"{samples} samples, {noise} noise, {sizes} sizes": Kind(
            samples, noise == "t", sizes == "unequal"
        )
        for samples in (20, 200)
        for noise in ("normal", "t")
        for sizes in ("equal", "unequal")
    }
    return coverage(6, "samples", kinds)


def of_clients() -> list[dict[str, object]]:
    """Twenty clients who are drawn again."""
    kinds = {f"{n} samples each": Kind(n, varied=True) for n in (20, 200)}
    return coverage(20, "clients", kinds)


def with_gaps() -> list[dict[str, object]]:
    """One row for each share of missing entries."""
    jax.config.update("jax_enable_x64", True)
    rows = []
    for missing in (0.0, 0.1, 0.4):
        rng = np.random.default_rng(SEED)
        kind = Kind(100, features=15, missing=missing)
        each = [covered_with_gaps(drawn(rng, 10, kind), seed) for seed in range(GAP_DRAWS)]
        row = {"missing": f"{missing:.0%}", "angle": f"{sum(e['angle'] for e in each):.0f} draws"}
        for name in list(each[0])[1:4]:
            row[name] = f"{np.mean([e[name] for e in each]):.1%}"
        for name in ("true angle", "bound"):
            row[f"mean {name}"] = f"{np.mean([e[name] for e in each]):.2f} degrees"
        row["first call"] = f"{each[0]['seconds']:.1f} s"
        row["later calls"] = f"{np.median([e['seconds'] for e in each]):.1f} s"
        rows.append(row)
    return rows


def cost() -> list[dict[str, object]]:
    """One row for each way, in turns with one fit."""
    rng, key = np.random.default_rng(0), jax.random.key(0)
    digits, labels = load_digits(return_X_y=True)
    digits = (digits - digits.mean(axis=0)) / 16
    made = {
        "six clients of 200 samples": drawn(rng, 6, Kind(200)).samples,
        "digits by class": [digits[labels == i] for i in range(10)],
    }
    rows = []
    for name, tables in made.items():
        clients = jf.Clients.from_samples([np.float32(x) for x in tables])
        model = jf.pca.PerPCA(*RANKS)
        fit = partial(jf.fit, model, clients, rounds=200, key=key, tol=1e-7)
        solution = fit()
        sure = partial(
            jf.inference.confidence,
            solution,
            clients,
            key=key,
            resamples=RESAMPLES,
            runs_at_once=50,
        )
        ways = {
            "refit": sure,
            "refit, 10 rounds": partial(sure, rounds=10),
            "one step": partial(sure, method="one_step"),
        }
        first = {}
        for way, run in ways.items():
            start = time.perf_counter()
            first[way] = (run(), time.perf_counter() - start)
        taken = turns({"fit": fit} | ways, repeats=3)
        for way, (found, seconds) in first.items():
            rows.append(
                {
                    "clients": name,
                    "way": way,
                    "first call": f"{seconds:.1f} s",
                    "times one fit": f"{taken[way]['cpu'] / taken['fit']['cpu']:.0f}",
                    "seconds": f"{taken[way]['wall']:.2f}",
                    "largest angle": f"{np.degrees(found.angle):.1f} degrees",
                    "standard error of shared energy": f"{_error(found.shared_energy):.4f}",
                }
            )
    return rows


def _error(interval: jf.inference.Interval) -> float:
    return float(interval.upper - interval.lower) / 4


if __name__ == "__main__":
    chosen = choose(
        {"coverage": of_samples, "clients": of_clients, "gaps": with_gaps, "cost": cost}, __doc__
    )
    print(machine())
    print(table(chosen.part()))
