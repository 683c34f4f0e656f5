"""What default arguments find: errors of every method on ordinary problems with known answers.

    python -m bench.tables.answers personalized
    python -m bench.tables.answers others

`personalized`: algorithms with shared and local components, after 100 rounds in single precision.
A cell contains the squared distance ‖P_U − P‖² from the true shared components, and how far the
objective lies above the best one known, of twenty random starts with ten times the rounds; each is
the largest of three draws. Beside these stand the errors of PCA of all samples in one place, and
of each client alone: the mean over clients, largest of three draws.

`others`: see `bench.tables.other_answers`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

import jaxfed as jf
from bench.common import choose, machine, table
from bench.tables.other_answers import rows as others

SEEDS, ROUNDS, RANDOM = 3, 100, 20


class Family(NamedTuple):
    """Clients drawn from the model of personalized PCA."""

    clients: int
    samples: int | None  # of each; None for exact second moments
    features: int
    shared: Sequence[float]  # variances
    local: Sequence[float]
    noise: float = 0.25
    tails: float | None = None  # degrees of freedom of t; None for normal samples
    alike: bool = False  # whether all clients have the same local components
    spread: float = 0.0  # of the logarithms of clients' scales
    offset: float = 0.0  # added to each entry, so that the samples are not centred


FAMILIES = {
    "balanced": Family(40, 60, 30, (4, 2), (2, 1)),
    "shared strong": Family(40, 60, 30, (50, 20), (2, 1)),
    "local strong": Family(40, 60, 30, (2, 1), (50, 20)),
    "exact moments": Family(12, None, 10, (4, 2), (1.5,)),
    "three clients": Family(3, 60, 30, (4, 2), (2, 1)),
    "three clients, local strong": Family(3, 200, 30, (2, 1), (50, 20)),
    "alike": Family(40, 60, 20, (4, 3, 2), (1.5, 1), 0.1, alike=True),
    "alike, many samples": Family(40, 500, 20, (4, 3, 2), (1.5, 1), 0.1, alike=True),
    "heavy tails": Family(40, 60, 30, (4, 2), (2, 1), tails=3.0),
    "fewer samples than features": Family(40, 20, 60, (8, 4), (4, 2)),
    "scales over 1e3": Family(40, 60, 30, (4, 2), (2, 1), spread=1.5),
    "not centred": Family(40, 60, 30, (4, 2), (2, 1), offset=2.0),
}


class Drawn(NamedTuple):
    """Clients of a family, and what is true of them."""

    samples: np.ndarray  # (clients, samples, features)
    shared: np.ndarray  # (features, rank)


def draw(family: Family, seed: int) -> Drawn:
    """Draw clients; the mean, if samples are not centred, is one of the shared components."""
    rng = np.random.default_rng(seed)
    d, shared_rank, rank = family.features, len(family.shared), len(family.local)
    mean = np.full((d, 1), family.offset)
    fixed = mean if family.offset else mean[:, :0]
    shared = np.linalg.qr(np.hstack([fixed, rng.normal(size=(d, shared_rank))]))[0]
    samples, local = [], None
    for _ in range(family.clients):
        if local is None or not family.alike:
            joint = np.linalg.qr(np.hstack([shared, rng.normal(size=(d, rank))]))[0]
            local = joint[:, shared.shape[1] :]
        scaled = [shared[:, fixed.shape[1] :] * np.sqrt(family.shared)]
        scaled += [local * np.sqrt(family.local), np.sqrt(family.noise) * np.eye(d)]
        factor = np.hstack(scaled)
        if family.samples is None:
            # As many samples as features, whose second moment is the exact one.
            root = np.linalg.cholesky(factor @ factor.T)
            rows = np.sqrt(d) * np.linalg.qr(rng.normal(size=(d, d)))[0] @ root.T
        else:
            shape = family.samples, factor.shape[1]
            scores = rng.normal(size=shape)
            if family.tails is not None:
                scores = rng.standard_t(family.tails, size=shape)
            rows = scores @ factor.T
        scale = np.exp(family.spread * rng.normal())
        samples.append((rows + mean.T) * scale)
    return Drawn(np.stack(samples).astype(np.float32), shared)


def ranks(family: Family) -> tuple[int, int]:
    """Numbers of shared and local components; a mean counts as a shared one."""
    return len(family.shared) + bool(family.offset), len(family.local)


def threshold(family: Family) -> float:
    """Four standard deviations of the noise, as the guide to gross errors says."""
    return 4 * family.noise**0.5


METHODS: dict[str, Callable[[Family], jf.Algorithm]] = {
    "PerPCA, gradient": lambda family: jf.pca.PerPCA(*ranks(family), solver="gradient"),
    "PerPCA": lambda family: jf.pca.PerPCA(*ranks(family)),
    "HMF": lambda family: jf.pca.HMF(*ranks(family)),
    "TCMF": lambda family: jf.pca.TCMF(*ranks(family), threshold(family)),
    "MultiStart(PerPCA, 4)": lambda family: jf.MultiStart(jf.pca.PerPCA(*ranks(family)), 4),
}


def error(found: jax.Array, shared: np.ndarray) -> float:
    """‖P_U − P‖²."""
    basis = np.asarray(found, float)
    return float(np.sum((basis @ basis.T - shared @ shared.T) ** 2))


def residual(samples: np.ndarray, shared: np.ndarray, rank: int) -> float:
    """The mean variance that shared components and the best local ones beside them leave."""
    shared = np.asarray(shared, float)
    rest = np.asarray(samples, float) @ (np.eye(len(shared)) - shared @ shared.T)
    values = np.linalg.svd(rest, compute_uv=False) ** 2 / samples.shape[1]
    return float(values[:, rank:].sum(axis=1).mean())


def best_known(drawn: Drawn, family: Family, candidates: Sequence[float]) -> float:
    """The lowest residual of the candidates and of random starts with ten times the rounds."""
    model = jf.pca.PerPCA(*ranks(family), start="random", local_penalty=0.0)
    clients = jf.Clients.from_samples(drawn.samples)

    @jax.jit
    def end(key):
        found = jf.rollout(model, clients, rounds=10 * ROUNDS, key=key, tol=1e-7)
        return found.result.shared

    keys = jax.random.split(jax.random.key(1), RANDOM)
    bases = [np.asarray(end(key)) for key in keys]
    finite = [x for x in bases if np.isfinite(x).all()]
    return min(*candidates, *(residual(drawn.samples, x, ranks(family)[1]) for x in finite))


def personalized() -> list[dict[str, object]]:
    """One row a family, one column a method."""
    rows = []
    for name, family in FAMILIES.items():
        errors: dict[str, list[float]] = {}
        gaps: dict[str, list[float]] = {}
        for seed in range(SEEDS):
            drawn = draw(family, seed)
            clients = jf.Clients.from_samples(drawn.samples)
            ends = {}
            for method, make in METHODS.items():
                run = jf.fit(make(family), clients, rounds=ROUNDS, key=jax.random.key(seed))
                errors.setdefault(method, []).append(error(run.result.shared, drawn.shared))
                found = np.asarray(run.result.shared)
                ends[method] = residual(drawn.samples, found, ranks(family)[1])
            pooled = jf.fit(
                jf.pca.Pooled(ranks(family)[0]), clients, rounds=1, key=jax.random.key(seed)
            )
            errors.setdefault("Pooled", []).append(error(pooled.result.shared, drawn.shared))
            own = jf.fit(
                jf.pca.Local(ranks(family)[0]), clients, rounds=1, key=jax.random.key(seed)
            )
            alone = float(np.mean([error(x, drawn.shared) for x in own.result.local]))
            errors.setdefault("Local", []).append(alone)
            best = best_known(drawn, family, list(ends.values()))
            for method, end in ends.items():
                gaps.setdefault(method, []).append(end / best - 1)
        cells = {m: f"{max(errors[m]):.2g}, {100 * max(gaps[m]):.1g} %" for m in METHODS}
        cells |= {m: f"{max(errors[m]):.2g}" for m in ("Pooled", "Local")}
        rows.append({"problem": name, **cells})
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    chosen = choose({"personalized": personalized, "others": partial(others, SEEDS)}, __doc__)
    print(machine())
    print(table(chosen.part()))
