"""Compare every algorithm on the accelerator that JAX finds to the same run on the processor.

    python -m bench.tables.accelerator_digits  # everything, with one process per core
    python -m bench.tables.accelerator_digits --algorithms PerPCA # only these

Each run is one from `accelerator_matrix.py`: ten rounds, forward or the gradient with respect to
the data, with messages of one kind. Both machines use single precision, the same key and the same
data. The table shows how much they differ:

    objective  the last objective, relative
    subspace   the sine of the largest angle between the shared components, if there are any
    gradient   the gradient with respect to the data, relative, in the Frobenius norm
    rounding   the change of the same figure on the processor alone if each number of the data is
               rounded differently in its last bit; expect this much between any two machines
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "")  # all there are; the matrix asks for none but this
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share it

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from bench.common import machine, table
from bench.tables.accelerator_matrix import DIRECTIONS, WAYS, Program, program
from bench.tables.channels import CASES
from bench.tables.precision import measured
from jaxfed.core.run.compiling import GPU_OPTIONS

CPU = jax.local_devices(backend="cpu")[0]
FIGURES = {"forward": ("objective", "subspace"), "gradient": ("gradient",)}


def on(device: jax.Device, given: Program) -> tuple[Any, dict[str, float]]:
    """What a program returns on a device, and by the clock what that takes."""
    arrays, rest = eqx.partition(given.arguments, eqx.is_array)
    arguments = eqx.combine(jax.device_put(arrays, device), rest)
    with jax.default_device(device):
        start_time = time.perf_counter()
        options = GPU_OPTIONS if device.platform == "gpu" else {}  # as in `jaxfed.fit`
        run = given.function.lower(*arguments).compile(compiler_options=options)
        compiled = time.perf_counter() - start_time
        jax.block_until_ready(run(*arguments))
        start_time = time.perf_counter()
        found = jax.block_until_ready(run(*arguments))
        return found, {"compile s": compiled, "run ms": 1e3 * (time.perf_counter() - start_time)}


def otherwise_rounded(given: Program) -> Program:
    """The same program with data that differ in the last bit."""
    rng = np.random.default_rng(0)
    first, *rest = given.arguments

    def moved(x):
        towards = rng.choice([-np.inf, np.inf], size=x.shape).astype(x.dtype)
        return jnp.where(x == 0, x, jnp.nextafter(x, towards))

    return Program(given.function, (jax.tree.map(moved, first), *rest))


def differences(direction: str, found: Any, reference: Any) -> dict[str, float]:
    """The figures of the table."""
    if direction == "gradient":
        pairs = [
            (np.asarray(x, np.float64), np.asarray(y, np.float64))
            for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True)
        ]
        off = np.sqrt(sum(np.sum((x - y) ** 2) for x, y in pairs))
        return {"gradient": float(off / np.sqrt(sum(np.sum(y**2) for _, y in pairs)))}

    def end(outcome):
        objective, result = outcome
        shared = result.shared
        matrix = isinstance(shared, jax.Array) and shared.ndim == 2
        return float(objective), np.asarray(shared, np.float64) if matrix else None

    off, sine, _ = measured(end(found), end(reference))
    return {"objective": off} | ({} if np.isnan(sine) else {"subspace": sine})


def row(name: str, way: str, direction: str) -> dict[str, Any]:
    """One line of the table."""
    cells: dict[str, Any] = {"run": name, "messages": way, "": direction}
    try:
        given = program(name, way, direction)
        reference, _ = on(CPU, given)
    except ValueError as refused:  # what the library itself refuses, before anything is compiled
        return cells | {"note": str(refused).split(";")[0]}
    except Exception as failed:
        return cells | {"note": f"FAILS on the processor: {failed}"[:160]}
    try:
        found, taken = on(jax.devices()[0], given)
    except Exception as failed:
        return cells | {"note": f"FAILS: {type(failed).__name__}: {failed}"[:300]}
    moved, _ = on(CPU, otherwise_rounded(given))
    rounding = differences(direction, moved, reference)
    cells |= differences(direction, found, reference) | taken
    return cells | {"rounding": max(rounding.values())}


def worker(cells: list[tuple[str, str, str]]) -> None:
    """Print a line of JSON for each."""
    for cell in cells:
        print(json.dumps(row(*cell)), flush=True)
        jax.clear_caches()


def in_process(cells: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """The rows from a process of their own, as many as it gives before it ends."""
    command = [sys.executable, "-m", __spec__.name, "--cells", json.dumps(cells)]
    ended = subprocess.run(command, capture_output=True, text=True)
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    for name, way, direction in cells[len(rows) :]:
        note = f"FAILS: process ended with {ended.returncode}: {ended.stderr[-200:]}"
        rows.append({"run": name, "messages": way, "": direction, "note": note})
    return rows


def all_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows as they come, so many processes at a time."""
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        parts = [
            pool.submit(in_process, [(name, way, direction) for way in options.messages])
            for direction in options.directions
            for name in options.algorithms
        ]
        for part in concurrent.futures.as_completed(parts):
            yield from part.result()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--cells", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--messages", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--algorithms", nargs="+", default=list(CASES))
    options = parser.parse_args()
    if options.cells:
        worker(options.cells)
        return
    print(machine())
    columns = ["run", "messages", "", "objective", "subspace", "gradient", "rounding"]
    columns += ["compile s", "run ms", "note"]
    rows = []
    for found in all_rows(options):
        print(found, file=sys.stderr, flush=True)
        rows.append({name: found.get(name, "") for name in columns})
    rows.sort(key=lambda x: (DIRECTIONS.index(x[""]), list(WAYS).index(x["messages"])))
    print(table(rows))


if __name__ == "__main__":
    main()
