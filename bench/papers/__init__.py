"""The tables and figures of the papers, each reproduced by `jaxfed reproduce PAPER/NAME`.

A paper's folder holds `targets.toml`, which lists its targets: the function that runs each, its
title, the columns of its table, and the intervals that count as the same. Modules whose names begin
with an underscore are shared by several targets.
"""

import functools
import importlib
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from papers import intervals
from papers.intervals import Interval
from papers.report import Labels, Target

_ROOT = Path(__file__).parent


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    """The entries of all `targets.toml`, by the targets' names."""
    return {
        f"{file.parent.name}/{name}": table
        for file in _ROOT.glob("*/targets.toml")
        for name, table in tomllib.loads(file.read_text(encoding="utf-8")).items()
    }


def names() -> list[str]:
    """The names of all targets, such as `perpca/table2`."""
    return sorted(_tables())


def description(name: str) -> str:
    """The line that `--list` prints for a target."""
    return _tables()[name]["shows"]


def find(name: str) -> Target:
    """The target of this name; its module is imported only now.

    Raises:
        ValueError: if there is no such target; the message lists those there are.
    """
    if name not in _tables():
        raise ValueError(f"TARGET: wanted one of {', '.join(names())}, got {name!r}")
    table, paper = _tables()[name], name.partition("/")[0]
    columns, experiment = table["columns"], table.get("experiment")
    return Target(
        _function(paper, table["run"]),
        title=table["title"],
        columns=columns,
        reference=_rows(table.get("reference", []), len(columns)),
        paper=_rows(table.get("paper", []), len(columns)),
        notes=table.get("notes", []),
        experiment=None if experiment is None else _function(paper, experiment),
    )


def known(name: str) -> dict[Labels, float]:
    """The values of a target's reference, without their intervals."""
    return {
        labels: interval.middle
        for labels, interval in find(name).reference.items()
        if isinstance(interval, Interval)
    }


def _function(paper: str, place: str) -> Callable[..., Any]:
    """A function of a paper's folder, from `module.function`."""
    module, _, function = place.partition(".")
    return getattr(importlib.import_module(f"papers.{paper}.{module}"), function)


def _rows(rows: list[list[Any]], width: int) -> dict[Labels, Any]:
    """Intervals by labels; a row is labels, then a number, or a kind of interval and numbers."""
    return {tuple(row[:width]): _interval(*row[width:]) for row in rows}


def _interval(kind: str | float, *numbers: Any) -> Interval | float:
    """A number as it is, else what a function of `papers.intervals` makes of the numbers."""
    return getattr(intervals, kind)(*numbers) if isinstance(kind, str) else kind
