"""What commands print and write: tables and result files."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxfed._versions import versions
from jaxfed.cli._folder import RESULT, Folder
from jaxfed.core.store.arrays import write_entries


def write(folder: Folder, arrays: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Write `result.npz` and then `result.json`, which marks a run as complete.

    Args:
        folder: folder of the results.
        arrays: go into `result.npz`, except those that are None.
        summary: goes into `result.json`, together with the package versions.
    """
    with folder.writing(RESULT[0]) as part:
        present = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
        write_entries(part, present)
    with folder.writing(RESULT[1]) as part:
        text = json.dumps({**summary, "versions": versions()}, indent=2, default=_plain)
        part.write_text(text + "\n", encoding="utf-8")


def finish(
    folder: Folder,
    arguments: SimpleNamespace,
    arrays: Mapping[str, Any],
    summary: Mapping[str, Any],
    others: Mapping[str, Any] | None = None,
) -> None:
    """Write everything that a command found, and print the names of its files.

    Args:
        folder: folder of the results.
        arguments: values of the options, which go into `result.json` as `settings`.
        arrays: see `write`.
        summary: see `write`.
        others: figures and texts, by file name.
    """
    others = others or {}
    for name, content in others.items():
        with folder.writing(name) as part:
            if isinstance(content, str):
                part.write_text(content, encoding="utf-8")
            else:
                content.savefig(part, dpi=150)
    write(folder, arrays, {"settings": vars(arguments), **summary})
    print(f"Written to {folder.path}: {', '.join((*RESULT, *others))}.")


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as text, with text columns left-aligned and number columns right-aligned.

    Args:
        rows: cells by column name, the same columns in each row; None is left empty.
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
    """Print a table: with rich if it is installed and this is a terminal, else as `text_table`."""
    if not (sys.stdout.isatty() and find_spec("rich")):
        print(text_table(rows))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    names = list(rows[0])
    for name in names:
        left = isinstance(rows[0][name], str)
        grid.add_column(Text(_cell(name)), justify="left" if left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(_cell(row[name])) for name in names))  # names may look like markup
    Console().print(grid)


def on_terminal() -> bool:
    """Whether errors go to a terminal, where a progress bar is useful and fills no log."""
    return sys.stderr.isatty()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return f"{value:,}"
    # Names of files and results may contain control characters, which would move the cursor.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def _plain(value: Any) -> Any:
    """Convert arrays, NumPy and JAX scalars, and paths to JSON values."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return np.asarray(value).tolist()
