"""Rounds on a federation that is read from a file: how fast, against reading alone, in what memory.

python bench/larger_than_memory.py [--gigabytes 2] [--folder DIR] [--turns 3]

The file is written first and removed in the end. Files that fit into the system's cache are read
from there but for the first time; larger ones come from the disk each time.
"""

import argparse
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from timing import machine, table

import jaxfed as jf

SAMPLES, FEATURES, RANK = 1000, 512, 8


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


def seconds(function: Callable[[], object]) -> float:
    """How long something takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(machine())
        path = Path(folder) / "federation"
        measure(path, written(path, options.gigabytes), options.turns)


def measure(path: Path, data: np.ndarray, turns: int) -> None:
    """Rounds and reading alone, in turns; each begins with a cold cache."""
    clients = jf.Clients.from_source(data)
    reader, read = clients.data.reader, []
    original = reader.read
    reader.read = lambda number, slot: (read.append(number), original(number, slot))[1]
    half = RANK // 2
    runs = {
        "PerPCA, a round": (jf.pca.PerPCA(half, half, start="random", step_size=0.05), 1),
        "BlockLanczos, ten rounds": (jf.pca.BlockLanczos(RANK), 10),
    }
    rows = []
    for name, (algorithm, rounds) in runs.items():

        def run(algorithm=algorithm, rounds=rounds):
            return jf.fit(algorithm, clients, rounds=rounds, key=jax.random.key(0))

        run()  # compiles
        ratios, speeds, colds, warms = [], [], [], []
        for _ in range(turns):
            forget(path)
            colds.append(
                data.nbytes
                / seconds(lambda: subprocess.run(["cat", path], stdout=subprocess.DEVNULL))
            )
            warms.append(
                data.nbytes
                / seconds(lambda: subprocess.run(["cat", path], stdout=subprocess.DEVNULL))
            )
            forget(path)
            read.clear()
            taken = seconds(run)
            passes = len(read) / len(reader.blocks)
            speeds.append(passes * data.nbytes / taken)
            # What the first pass finds is cold, what the others find is what a second reader finds.
            alone = data.nbytes / colds[-1] + (passes - 1) * data.nbytes / warms[-1]
            ratios.append(alone / taken)
        rows.append(
            {
                "run": name,
                "passes": passes,
                "GB / s": float(np.median(speeds)) / 1e9,
                "cat, cold": float(np.median(colds)) / 1e9,
                "cat, again": float(np.median(warms)) / 1e9,
                "of reading alone": float(np.median(ratios)),
                "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            }
        )
    print(
        f"{data.nbytes / 1e9:.1f} GB, {len(data):,} clients of {SAMPLES:,} × {FEATURES}, "
        f"{len(reader.blocks)} blocks"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
