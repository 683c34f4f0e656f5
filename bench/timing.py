"""Ratios within one run: the rivals take turns, and medians are compared."""

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version

import jax
import numpy as np


def turns(
    rivals: dict[str, Callable[[], object]], repeats: int = 15
) -> dict[str, dict[str, float]]:
    """Median wall and processor seconds of each rival, measured in turns after one warm-up.

    Args:
        rivals: name to a function of no arguments; what it returns is waited for.
        repeats: turns of each.

    Returns:
        `{name: {"wall": ..., "cpu": ...}}`.
    """
    return {
        name: {clock: float(np.median(taken)) for clock, taken in clocks.items()}
        for name, clocks in every_turn(rivals, repeats).items()
    }


def every_turn(
    rivals: dict[str, Callable[[], object]], repeats: int = 15
) -> dict[str, dict[str, np.ndarray]]:
    """Wall and processor seconds of each rival in each turn, after one warm-up.

    Ratios of one turn, and then their median, hold where the machine's load comes and goes.

    Args:
        rivals: name to a function of no arguments; what it returns is waited for.
        repeats: turns of each.

    Returns:
        `{name: {"wall": ..., "cpu": ...}}`, arrays `(repeats,)`.
    """
    for run in rivals.values():
        jax.block_until_ready(run())
    wall: dict[str, list[float]] = {name: [] for name in rivals}
    cpu: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(repeats):
        for name, run in rivals.items():
            cpu_start, start = time.process_time(), time.perf_counter()
            jax.block_until_ready(run())
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - cpu_start)
    return {name: {"wall": np.asarray(wall[name]), "cpu": np.asarray(cpu[name])} for name in rivals}


def single_threaded_blas() -> None:
    """Give NumPy one thread; only works before NumPy is first imported."""
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"


def machine() -> str:
    """What the numbers depend on, in one line."""
    devices = jax.devices()
    return (
        f"jax {version('jax')}, jaxlib {version('jaxlib')}, numpy {version('numpy')}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"{len(devices)} × {devices[0].device_kind}"
    )


def table(rows: list[dict[str, object]]) -> str:
    """Rows as aligned text."""
    columns = list(rows[0])
    cells = [columns, *[[_text(row[name]) for name in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
