"""`--config file.toml`: options of a command from a file."""

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OPTION = "--config"


def add_config(parser: argparse.ArgumentParser) -> None:
    """Let a command, and those below it, take their options from a file too."""
    below = commands_of(parser)
    if below is not None:
        for each in below.values():
            add_config(each)
        return
    parser.add_argument(
        OPTION,
        type=Path,
        metavar="FILE",
        help="take options from a TOML file, by their names without --, such as rounds = 100; "
        "what is said here counts before what is said there",
    )


def with_config(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments with those of the file that they name before them.

    Args:
        parser: of all commands.
        arguments: of the command line; returned as they are where they name no file.

    Raises:
        ValueError: for a file that is no TOML, and for names and values that are none of the
            command's.
        OSError: if the file cannot be read.
    """
    own, place = _command(parser, arguments)
    known = {name: action for action in own._actions for name in action.option_strings}
    if OPTION not in known:
        return list(arguments)
    path = _named(arguments[place:])
    if path is None:
        return list(arguments)
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{OPTION}: {path} is no TOML file: {error}") from error
    words: list[str] = []
    for name, value in found.items():
        option = f"--{name}"
        if option not in known or option in (OPTION, "--help"):
            names = sorted(each[2:] for each in known if each.startswith("--"))
            close = ", ".join(each for each in names if each not in ("config", "help"))
            raise ValueError(f"{OPTION}: {path} has {name!r}, wanted some of {close}")
        words += _words(path, option, value, known[option])
    # Later ones count, which are those of the command line.
    return [*arguments[:place], *words, *arguments[place:]]


def _command(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.ArgumentParser, int]:
    """The parser of the command that is asked for, and where its own arguments begin."""
    place = 0
    while (below := commands_of(parser)) is not None:
        words = [i for i in range(place, len(arguments)) if arguments[i] in below]
        if not words:
            break
        parser, place = below[arguments[words[0]]], words[0] + 1
    return parser, place


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser] | None:
    """The commands of a parser by name; None if it is a command's own."""
    nested = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(nested[0].choices) if nested else None


def _named(arguments: Sequence[str]) -> Path | None:
    """The file that the arguments name, if they do."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(OPTION, type=Path)
    return parser.parse_known_args(arguments)[0].config


def _words(path: Path, option: str, value: Any, action: argparse.Action) -> list[str]:
    """What would be written on a command line."""
    name = option[2:]
    if action.nargs == 0:  # a flag
        if not isinstance(value, bool):
            raise ValueError(f"{OPTION}: {path} has {name} = {value!r}, wanted true or false")
        negative = f"--no-{name}"
        return [option] if value else [negative] if negative in action.option_strings else []
    values = value if isinstance(value, list) else [value]
    several = isinstance(action.nargs, int) or action.nargs in ("+", "*")
    if isinstance(value, list) and not several:
        raise ValueError(f"{OPTION}: {path} has {name} = {value!r}, wanted one value")
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int | float | str):
            raise ValueError(f"{OPTION}: {path} has {name} = {each!r}, wanted a number or a text")
    if not several:
        return [f"{option}={values[0]}"]  # as one word: a value may begin with -
    return [option, *map(str, values)]
