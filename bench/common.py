"""Helpers for measuring scripts: timing, printing and the command line.

Scripts compare times within one run, in which the rivals take turns.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

import jaxfed as jf


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


def machine() -> str:
    """The versions and devices that timings depend on, in one line."""
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


def choose(parts: dict[str, Callable[..., object]], description: str | None) -> argparse.Namespace:
    """Read the command line of a script of several parts.

    Args:
        parts: functions by the name of the part.
        description: the script's docstring, printed by `--help`.

    Returns:
        The chosen function as `part`, and a `seed`, 0 where none is given.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=parts)
    parser.add_argument("seed", nargs="?", type=int, default=0)
    chosen = parser.parse_args()
    chosen.part = parts[chosen.part]
    return chosen


def replace_table(page: Path, marks: tuple[str, str], rows: list[dict[str, object]]) -> None:
    """Put a table between two marks of a page, in place of what is there."""
    before, rest = page.read_text(encoding="utf-8").split(marks[0])
    after = rest.partition(marks[1])[2]
    text = "\n".join(line.rstrip() for line in table(rows).splitlines())
    page.write_text(
        f"{before}{marks[0]}\n```text\n{text}\n```\n\n{marks[1]}{after}", encoding="utf-8"
    )


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def label(algorithm: jf.Algorithm) -> str:
    """Return an algorithm's name in a table, with the solver if that is `PerPCA`'s gradient."""
    gradient = isinstance(algorithm, jf.pca.PerPCA) and algorithm.solver == "gradient"
    return type(algorithm).__name__ + (", gradient" if gradient else "")
