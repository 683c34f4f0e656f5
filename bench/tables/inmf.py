"""Integrative NMF: sweeps in one program, and samples that stay on disk.

    python -m bench.tables.inmf sweep
    python -m bench.tables.inmf memory

`sweep`: seconds of 32 pairs of a rank and a penalty in one program, and of one run, 50 rounds each;
the first time, with compilation, and again.

`memory`: eight clients with 100,000 samples of 2,000 features in all, read from a temporary folder
of 800 MB: seconds of ten rounds, and the largest memory of the process.
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
        algorithms = [jf.nmf.INMF(rank, p, active_rank=float(k)) for k, p in pairs]
        common = {"rounds": 50, "keys": jax.random.key(0)}

        def one(algorithms=algorithms, clients=clients, common=common):
            return jf.sweep(algorithms[-1], clients, **common).history["objective"]

        def all_(algorithms=algorithms, clients=clients, common=common):
            return jf.sweep(algorithms, clients, chunk_size=1, **common).history["objective"]

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
    run = jf.fit(jf.nmf.INMF(20), clients, rounds=10, key=jax.random.key(0))
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


if __name__ == "__main__":
    parts: dict[str, Callable[..., object]] = {
        "sweep": by_size,
        "memory": by_source,
    }
    print(machine())
    print(table(choose(parts, __doc__).part()))
