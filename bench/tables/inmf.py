"""Integrative NMF: sweeps in one program, and samples that stay on disk.

    python -m bench.tables.inmf sweep
    python -m bench.tables.inmf memory
    python -m bench.tables.inmf starts

`sweep`: seconds of 32 pairs of a rank and a penalty in one program, and of one run, 50 rounds each;
the first time, with compilation, and again.

`memory`: eight clients with 100,000 samples of 2,000 features in all, read from a temporary folder
of 800 MB: seconds of ten rounds, and the largest memory of the process.

`starts`: the objective from the default start, after 100 and 1,000 rounds, over the best of twenty
random starts after 1,000 rounds; the largest of eight draws, and how many draws end within 2 %. The
same for random starts. The other two parts start at random.
"""

import itertools
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import jaxfed as jf
from bench.common import choose, machine, table
from papers.neighbours.inmf import draw


def timed(function: Callable[[], jax.Array]) -> tuple[float, float]:
    """Seconds of the first call and of another."""
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - began)
    return seconds[0], seconds[1]


def by_size() -> list[dict[str, object]]:
    """One row a size."""
    found = []
    for count, features, rank in ((50, 40, 8), (300, 200, 16)):
        clients = jf.Clients.from_samples(draw(0, (count,) * 3, features))
        pairs = itertools.product(np.linspace(2, rank, 8).round(), (1.0, 3.0, 5.0, 10.0))
        algorithms = [jf.nmf.INMF(rank, p, active_rank=float(k), start="random") for k, p in pairs]
        common = {"rounds": 50, "keys": jax.random.key(0)}

        def one(algorithms=algorithms, clients=clients, common=common):
            return jf.sweep(algorithms[-1], clients, **common).history["objective"]

        def all_(algorithms=algorithms, clients=clients, common=common):
            return jf.sweep(algorithms, clients, runs_at_once=1, **common).history["objective"]

        alone, together = timed(one), timed(all_)
        found.append(
            {
                "samples": f"3 x {count} x {features}",
                "one, first time": f"{alone[0]:.1f} s",
                "32, first time": f"{together[0]:.1f} s",
                "one, again": f"{alone[1]:.2f} s",
                "32, again": f"{together[1]:.2f} s",
            }
        )
    return found


def by_source() -> list[dict[str, object]]:
    """One row."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(8):
            np.save(Path(folder) / f"client{i}.npy", draw(i, (12_500,), 2_000, 20)[0])
        return [of_source(jf.data.NpyFolder(folder))]


def of_source(source: jf.data.NpyFolder) -> dict[str, object]:
    """Its row."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clients = jf.Clients.from_source(source)
    began = time.perf_counter()
    run = jf.fit(jf.nmf.INMF(20, start="random"), clients, rounds=10, key=jax.random.key(0))
    jax.block_until_ready(run.result)
    seconds = time.perf_counter() - began
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    objectives = np.asarray(run.history["objective"])
    return {
        "seconds, with compilation": f"{seconds:.0f}",
        "memory before": f"{before / 2**20:.2f} GiB",
        "largest memory": f"{largest / 2**20:.2f} GiB",
        "objective, first and last": f"{objectives[0]:.4g} / {objectives[-1]:.4g}",
    }


# --- starts --------------------------------------------------------------------------------------

DRAWS, RANDOM, SHORT, LONG, CLOSE = 8, 20, 100, 1000, 1.02


def planted(
    rng: np.random.Generator,
    *,
    clients: int = 4,
    count: int = 40,
    features: int = 30,
    rank: int = 4,
    own: float = 0.3,
    spread: float = 0.0,
) -> list[np.ndarray]:
    """Clients' samples: loadings of shared parts and of own ones, and normal noise.

    Features' scales differ by 10 to the power of `spread`.
    """
    shared, samples = rng.gamma(0.5, size=(rank, features)), []
    scales = 10 ** rng.uniform(-spread / 2, spread / 2, features)
    for _ in range(clients):
        parts = shared + own * rng.gamma(0.5, size=shared.shape)
        signal = rng.gamma(0.7, size=(count, rank)) @ parts
        samples.append(np.maximum(signal + 0.1 * rng.normal(size=signal.shape), 0) * scales)
    return samples


def counts(rng: np.random.Generator, rank: int = 5) -> list[np.ndarray]:
    """Sparse counts."""
    shared, samples = 3 * rng.gamma(0.2, size=(rank, 40)), []
    for _ in range(4):
        parts = shared + 0.9 * rng.gamma(0.2, size=shared.shape)
        samples.append(rng.poisson(rng.gamma(0.3, size=(60, rank)) @ parts).astype(float))
    return samples


def cells(rng: np.random.Generator, rank: int = 6) -> list[np.ndarray]:
    """Counts of single cells, normalized and scaled as by LIGER."""
    programs, samples = rng.gamma(0.2, size=(rank, 60)), []
    for _ in range(3):
        own = programs * rng.gamma(4, 1 / 4, size=programs.shape)
        usage = rng.dirichlet(np.full(rank, 0.2), size=100)
        depth = rng.lognormal(6, 0.4, size=(100, 1))
        found = rng.poisson(depth * (usage @ (own / own.sum(1, keepdims=True)))).astype(float)
        found /= np.maximum(found.sum(1, keepdims=True), 1)
        samples.append(found / np.maximum(np.sqrt(np.mean(found**2, axis=0)), 1e-12))
    return samples


KINDS: dict[str, tuple[int, Callable[[np.random.Generator], list[np.ndarray]]]] = {
    "dense": (4, planted),
    "sparse counts": (5, counts),
    "single cells": (6, cells),
    "scales over 1e3": (4, lambda rng: planted(rng, spread=3.0)),
    "two clients": (4, lambda rng: planted(rng, clients=2)),
    "8 samples a client": (4, lambda rng: planted(rng, clients=6, count=8)),
    "alike clients": (4, lambda rng: planted(rng, own=0.0)),
    "large own parts": (4, lambda rng: planted(rng, own=1.5)),
    "80 features": (6, lambda rng: planted(rng, count=100, features=80, rank=6)),
}


def by_start() -> list[dict[str, object]]:
    """One row a kind of samples."""
    found = []
    for name, (rank, drawn) in KINDS.items():
        ends = np.stack([of_draw(rank, drawn(np.random.default_rng(i))) for i in range(DRAWS)])
        best = ends[:, 1:, 1].min(axis=1)[:, None, None]
        ends /= best
        own, late, random = ends[:, 0, 0], ends[:, 0, 1], ends[:, 1:, 0]
        found.append(
            {
                "samples": name,
                "default, largest": f"{own.max():.3f}",
                "after 1,000": f"{late.max():.3f}",
                "within 2 %": f"{np.sum(own <= CLOSE)} of {DRAWS}",
                "random, largest": f"{random.max():.2f}",
                "random, within 2 %": f"{np.mean(random <= CLOSE):.0%}",
            }
        )
    return found


def of_draw(rank: int, samples: list[np.ndarray]) -> np.ndarray:
    """Objectives after few and after many rounds, from the default start and random ones."""
    clients = jf.Clients.from_samples([x.astype(np.float32) for x in samples])
    kept = np.array([SHORT, LONG]) - 1

    def ends(algorithm: jf.nmf.INMF, keys: jax.Array) -> np.ndarray:
        runs = jf.sweep(algorithm, clients, rounds=LONG, keys=keys)
        return np.asarray(runs.history["objective"])[:, kept]

    one, many = jax.random.split(jax.random.key(0), 1), jax.random.split(jax.random.key(1), RANDOM)
    random = jf.nmf.INMF(rank, start="random")
    return np.concatenate([ends(jf.nmf.INMF(rank), one), ends(random, many)])


if __name__ == "__main__":
    parts: dict[str, Callable[..., object]] = {
        "sweep": by_size,
        "memory": by_source,
        "starts": by_start,
    }
    print(machine())
    print(table(choose(parts, __doc__).part()))
