"""`jaxfed completion SHELL`: what a shell needs to complete commands and options."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxfed._optional import require
from jaxfed.cli import COMMANDS, parser_of
from jaxfed.cli._config import commands_of

SHELLS = ("bash", "zsh", "fish")
WHERE = {
    "bash": "~/.local/share/bash-completion/completions/jaxfed",
    "zsh": "a folder of $fpath, as _jaxfed",
    "fish": "~/.config/fish/completions/jaxfed.fish",
}


def add_parser(subparsers) -> None:
    """Add the command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    places = "; ".join(f"{shell}: {place}" for shell, place in WHERE.items())
    parser = subparsers.add_parser(
        "completion",
        help="what your shell needs to complete commands and options",
        description="Print a script that lets a shell complete commands, options and their "
        f"choices. Write it to where the shell looks for such scripts, once. {places}.",
    )
    parser.add_argument("shell", choices=SHELLS, help="your shell")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status, 0.

    Raises:
        ImportError: if shtab is not installed.
    """
    shtab = require("shtab", extra="cli")
    # All commands with all of their options, which is why this is not done while one types.
    whole = _whole()
    for action in _actions(whole):
        if action.type is Path:
            action.complete = shtab.FILE
    print(shtab.complete(whole, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """All that a parser and those of its commands take."""
    yield from parser._actions
    for below in (commands_of(parser) or {}).values():
        yield from _actions(below)


def _whole() -> argparse.ArgumentParser:
    try:
        return parser_of(COMMANDS)
    except ValueError:  # no checkout, which reproductions need
        return parser_of(COMMANDS.keys() - {"reproduce"})
