"""What every command does besides computing: its files, its table."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from jaxfed._versions import versions
from jaxfed.cli._folder import RESULT, Folder


def write(folder: Folder, arrays: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Write `result.npz` and then `result.json`, whose presence says that a run is complete.

    Args:
        folder: where to.
        arrays: what goes into `result.npz`; parts that do not exist, None, are left out.
        summary: what goes into `result.json`, beside the versions that made it.
    """
    with folder.writing(RESULT[0]) as part:
        there = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
        np.savez(part, **there)  # pyright: ignore[reportArgumentType]
    with folder.writing(RESULT[1]) as part:
        text = json.dumps({**summary, "versions": versions()}, indent=2, default=_plain)
        part.write_text(text + "\n", encoding="utf-8")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text, columns aligned: words to the left, numbers to the right.

    Args:
        rows: cells by the name of their column, the same columns in each; None is left empty.
    """
    names = list(rows[0])
    heads, cells = [*map(_cell, names)], [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    words = [isinstance(rows[0][name], str) for name in names]

    def line(row: Sequence[str]) -> str:
        padded = (
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(row, widths, words, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), "  ".join("-" * width for width in widths), *map(line, cells)])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table: by rich where somebody watches and it is installed, else as `table` has it.

    Args:
        rows: as those of `table`.
    """
    if not (sys.stdout.isatty() and find_spec("rich")):
        print(table(rows))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = list(rows[0])
    for name in names:
        left = isinstance(rows[0][name], str)
        drawn.add_column(Text(_cell(name)), justify="left" if left else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(_cell(row[name])) for name in names))  # names are no markup
    Console().print(drawn)


def on_terminal() -> bool:
    """Whether somebody watches, so that a progress bar is of use and does not fill a log."""
    return sys.stderr.isatty()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    # What would move a terminal's cursor comes from names of files, and from files of results.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def _plain(value: Any) -> Any:
    """NumPy and JAX scalars and arrays, and paths, as JSON knows them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return np.asarray(value).tolist()
