"""`jaxfed info`: print what a file or a folder of results holds."""

import json
from pathlib import Path
from types import SimpleNamespace

from jaxfed.cli import _report
from jaxfed.cli._common import EARLIER_RESULT
from jaxfed.cli._folder import RESULT
from jaxfed.cli._options import define
from jaxfed.core.store.saved import load


def run(arguments: SimpleNamespace) -> None:
    """Run the command."""
    path = file_of(arguments.result)
    print(load(path).summary())
    rows = _rows(path.with_name(RESULT[1]))
    if rows:
        print()
        _report.show(rows)


def file_of(path: Path) -> Path:
    """Return the result file, given its path or its folder."""
    return path / RESULT[0] if path.is_dir() else path


def _rows(path: Path) -> list[dict]:
    """Read the table that a command printed, if it is still beside its result."""
    try:
        rows = json.loads(path.read_bytes())["table"] if path.is_file() else []
        rows = [dict(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return rows if all(row.keys() == rows[0].keys() for row in rows) else []


command = define(run, {"": [EARLIER_RESULT]})
