"""What every command does besides computing: its folder, its files, its table."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfed._versions import versions
from jaxfed.core.files import replacing

RESULT = ("result.npz", "result.json")
CHECKPOINT = "checkpoint"


def refuse(out: str | os.PathLike[str], *, force: bool, resumable: bool = False) -> Path:
    """Make sure that nothing of value is overwritten, before anything is computed.

    Args:
        out: the folder that results go to.
        force: whether earlier results may be overwritten.
        resumable: whether a folder that an interrupted run left is taken up again.

    Returns:
        The folder.

    Raises:
        ValueError: if the folder is in use and may not be overwritten, or is a file.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out: {folder} is a file, wanted a folder")
    taken = folder.exists() and any(folder.iterdir())
    if taken and not force and not (resumable and interrupted(folder)):
        raise ValueError(
            f"--out: {folder} is not empty; name another folder, or overwrite with --force"
        )
    return folder


def interrupted(folder: Path) -> bool:
    """Whether a run was begun here and did not end: checkpoints, but no results."""
    return (folder / CHECKPOINT).is_dir() and not (folder / "result.json").exists()


def take(folder: Path, pictures: Iterable[str], *, resume: bool = False) -> None:
    """Make the folder, without the results of an earlier run.

    Only what a command writes is removed, never another file.

    Args:
        folder: the folder, of which `refuse` had nothing to say.
        pictures: names of the pictures that the command writes.
        resume: whether checkpoints stay, for the run to be taken up again.
    """
    if not resume and (folder / CHECKPOINT).is_dir():
        shutil.rmtree(folder / CHECKPOINT)
    for name in (*RESULT, *pictures):
        (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def write(folder: Path, arrays: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    """Write `result.npz` and then `result.json`, whose presence says that a run is complete.

    Args:
        folder: where to.
        arrays: what goes into `result.npz`; parts that do not exist, None, are left out.
        summary: what goes into `result.json`, beside the versions that made it.
    """
    with replacing(folder / "result.npz") as part:
        there = {name: np.asarray(x) for name, x in arrays.items() if x is not None}
        np.savez(part, **there)  # pyright: ignore[reportArgumentType]
    with replacing(folder / "result.json") as part:
        text = json.dumps({**summary, "versions": versions()}, indent=2, default=_plain)
        part.write_text(text + "\n", encoding="utf-8")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text, columns aligned: words to the left, numbers to the right.

    Args:
        rows: cells by the name of their column, the same columns in each; None is left empty.
    """
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    words = [isinstance(rows[0][name], str) for name in names]

    def line(row: Sequence[str]) -> str:
        padded = (
            text.ljust(width) if left else text.rjust(width)
            for text, width, left in zip(row, widths, words, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(names), "  ".join("-" * width for width in widths), *map(line, cells)])


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
    return str(value)


def _plain(value: Any) -> Any:
    """NumPy and JAX scalars and arrays, and paths, as JSON knows them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return np.asarray(value).tolist()
