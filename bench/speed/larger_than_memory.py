"""Time and memory of rounds on data read from a file, relative to reading the file alone.

python -m bench.speed.larger_than_memory [--gigabytes 2] [--folder DIR] [--turns 3]

The script writes the file first and removes it at the end. If the file fits into the system's
cache, all reads but the first come from the cache; otherwise all come from the disk. On a busy
machine, use the processor seconds. The script prints the tables in bench/RESULTS.md: first the time
per GB of each operation alone, with data in the system's cache, as the minimum of several turns;
then the rounds.
"""

import argparse
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from bench.common import machine

SAMPLES, FEATURES, RANK = 1000, 512, 8
RUNS = {
    "`PerPCA`, gradient, one round": (
        jf.pca.PerPCA(RANK // 2, RANK // 2, solver="gradient", start="random", step_size=0.05),
        1,
    ),
    "`BlockLanczos`, ten rounds": (jf.pca.BlockLanczos(RANK), 10),
}
# Of more than so many bytes only the first blocks are read merely to have the programs compiled.
MUCH = 3e10


def written(path: Path, gigabytes: float) -> np.ndarray:
    """A memory map of so many bytes of clients, no two alike."""
    rng = np.random.default_rng(0)
    scales = np.linspace(2, 0.1, FEATURES, dtype=np.float32)
    base = rng.normal(size=(32, SAMPLES, FEATURES)).astype(np.float32) * scales
    clients = max(1, round(gigabytes * 1e9 / base[0].nbytes))
    with path.open("wb") as file:
        for first in range(0, clients, len(base)):
            file.write((base * rng.uniform(0.5, 1.5))[: clients - first].tobytes())
        file.flush()
        os.fsync(file.fileno())
    return np.memmap(path, np.float32, "r", shape=(clients, SAMPLES, FEATURES))


def forget(path: Path) -> None:
    """Have the system drop what it keeps of a file."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(function: Callable[[], object]) -> np.ndarray:
    """How long something takes by the clock, and of processors, its children's included."""
    start_time = time.perf_counter(), sum(os.times()[:4])
    function()
    return np.subtract((time.perf_counter(), sum(os.times()[:4])), start_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "federation"
        data = written(path, options.gigabytes)
        floor(path, data)
        measure(path, data, options.turns)


def floor(path: Path, data: np.ndarray) -> None:
    """What reading takes, and the two products with each client's samples."""
    some = data[: max(1, round(5e8 / data[0].nbytes))]
    own, size = np.array(some), some.nbytes / 1e9
    w = np.linalg.qr(np.random.default_rng(0).normal(size=(FEATURES, RANK)))[0].astype(np.float32)
    ours = jax.vmap(lambda x: jf.linalg.Moment.from_samples(x).mv(w))
    programs = {
        "squared norms, JAX": jax.vmap(lambda x: jnp.sum(x * x)),
        "`X W`, JAX": jax.vmap(lambda x: x @ w),
        "`Xᵀ (X W)`, JAX": jax.vmap(lambda x: x.T @ (x @ w)),
        "`Xᵀ (X W)`, jaxfed": ours,
    }
    own = jnp.asarray(own)
    each = {
        "`head` of the file": lambda: subprocess.run(
            ["head", "-c", str(some.nbytes), path], stdout=subprocess.DEVNULL
        ),
        "sum of a memory map, NumPy": some.sum,
        "`Xᵀ (X W)`, NumPy": lambda: [x.T @ (x @ w) for x in np.asarray(own)],
    } | {
        name: partial(lambda run: jax.block_until_ready(run(own)), jax.jit(program))
        for name, program in programs.items()
    }
    print("| of a GB in memory | s | processor s |\n| --- | ---: | ---: |")
    for name, run in each.items():
        run()
        taken = np.min([seconds(run) for _ in range(7)], axis=0) / size
        print(f"| {name} | {taken[0]:.2f} | {taken[1]:.2f} |", flush=True)
    print()


def measure(path: Path, data: np.ndarray, turns: int) -> None:
    """Rounds and reading alone, in turns; each begins with a cold cache."""
    clients = jf.Clients.from_source(data)
    reader, read = clients.data.reader, []
    original = reader.read
    reader.read = lambda number, slot: (read.append(number), original(number, slot))[1]
    first_blocks = jf.Clients.from_source(data[: sum(len(b.places) for b in reader.blocks[:2])])
    size = data.nbytes / 1e9
    print(
        f"{size:.1f} GB, {len(data):,} clients of {SAMPLES:,} samples of {FEATURES} features, "
        f"{len(reader.blocks)} blocks; {machine()}\n\n"
        "| | passes | GB/s | `cat`, cold | `cat`, again | share of `cat`'s speed (goal 0.7) "
        "| processor s/GB | of `cat` | peak memory (goal 4 GiB) |\n"
        "| --- " + "| ---: " * 8 + "|",
        flush=True,
    )
    for name, (algorithm, rounds) in RUNS.items():

        def run(clients=clients, algorithm=algorithm, rounds=rounds):
            return jf.fit(algorithm, clients, rounds=rounds, key=jax.random.key(0))

        if rounds * data.nbytes < MUCH:
            run()  # compiles all there is
        else:
            run(first_blocks)  # compiles what works on blocks, which is nearly all
        found = []
        for _ in range(turns):
            forget(path)
            cold, again = (
                seconds(lambda: subprocess.run(["cat", path], stdout=subprocess.DEVNULL))
                for _ in range(2)
            )
            forget(path)
            read.clear()
            taken = seconds(run)
            passes = len(read) / len(reader.blocks)
            # What the first pass finds is cold, what the others find is what a second reader finds.
            alone = cold[0] + (passes - 1) * again[0]
            found.append(
                [
                    passes,
                    passes * size / taken[0],
                    size / cold[0],
                    size / again[0],
                    alone / taken[0],
                    taken[1] / (passes * size),
                    cold[1] / size,
                ]
            )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        cells = [*np.median(found, axis=0), peak]
        print(f"| {name} | " + " | ".join(f"{x:.3g}" for x in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
