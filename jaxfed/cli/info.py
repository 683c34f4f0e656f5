"""`jaxfed info`: what a file or a folder of results holds."""

import argparse
import json
from pathlib import Path

from jaxfed.cli import _report
from jaxfed.cli._folder import RESULT
from jaxfed.core.store.saved import load


def add_parser(subparsers) -> None:
    """Add the command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    about = "Say what ran, how it ended, what it cost and what it found."
    parser = subparsers.add_parser("info", help="what a result holds", description=about)
    parser.add_argument(
        "result", type=Path, metavar="RESULT", help="a folder of results, or a file result.npz"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for a file that is no result.
        OSError: if there is nothing to read.
    """
    path = file_of(arguments.result)
    saved = load(path)
    print(saved.summary())
    rows = _rows(path.with_name(RESULT[1]))
    if rows:
        print()
        _report.show(rows)
    return 0


def file_of(path: Path) -> Path:
    """The file of a result, from its own path or that of its folder."""
    return path / RESULT[0] if path.is_dir() else path


def _rows(path: Path) -> list[dict]:
    """The table that a command printed, if it is still beside its result."""
    try:
        rows = json.loads(path.read_bytes())["table"] if path.is_file() else []
        rows = [dict(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return rows if all(row.keys() == rows[0].keys() for row in rows) else []
