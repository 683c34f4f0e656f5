"""The tables and figures of the papers, each by one command: `jaxfed reproduce PAPER/NAME`.

A target is a module of a paper's folder, such as `papers/perpca/table2.py`: its docstring begins
with the line that `--list` prints, and it defines a `papers.report.Target` called `TARGET`. What
begins with an underscore is shared by the targets of a paper, or by all.
"""

import ast
import importlib
from pathlib import Path

from papers.report import Target

_ROOT = Path(__file__).parent


def names() -> list[str]:
    """The names of all targets, such as `perpca/table2`."""
    return sorted(f"{path.parent.name}/{path.stem}" for path in _ROOT.glob("*/[!_]*.py"))


def description(name: str) -> str:
    """The first line of a target's docstring, without importing the target."""
    source = (_ROOT / f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def find(name: str) -> Target:
    """The target of this name; its module is imported only now.

    Raises:
        ValueError: if there is none; the message lists those there are.
    """
    if name not in (known := names()):
        raise ValueError(f"TARGET: wanted one of {', '.join(known)}, got {name!r}")
    return importlib.import_module(f"papers.{name.replace('/', '.')}").TARGET
