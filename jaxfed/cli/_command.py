"""Descriptions of commands, from which parsers and the options of `--config` files come."""

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxfed.cli._options import Option, option

_ABOUT = (
    "TOML file with further options, by their names without --, such as rounds = 100; those on the "
    "command line take precedence"
)
CONFIG = option("--config", Path, _ABOUT, None, metavar="FILE")


class Command(NamedTuple):
    """What a command takes and does."""

    description: str  # the first lines of its help, and its line in a list of commands
    # Does its work, given the values of the options; a `ValueError`, `OSError`, `ImportError` or
    # `FloatingPointError` that it raises is printed in one line.
    run: Callable[[argparse.Namespace], None] | None = None
    # Its options, by the title of their group in the help; `""` for no group.
    options: Mapping[str, Sequence[Option]] = {}
    defaults: Mapping[str, Any] = {}  # values for options that it does not have
    commands: Mapping[str, Self] = {}  # further commands, instead of all this
    metavar: str = "ALGORITHM"  # what the help calls one of these
    summary: str = ""  # its line in a list of commands, where that is not the description

    @property
    def named(self) -> dict[str, Option]:
        """The options with a flag, by their names without `--`, as `--config` files have them."""
        options = [each for group in self.options.values() for each in group]
        return {each.flag[2:]: each for each in options if each.flag.startswith("--")}

    def add_to(self, parser: argparse.ArgumentParser, files: Any = None) -> None:
        """Add the options, or the further commands, to the parser of this command.

        Args:
            parser: the parser.
            files: how shtab completes names of files.
        """
        if self.commands:
            below = parser.add_subparsers(metavar=self.metavar, required=True)
            for name, command in self.commands.items():
                about = command.description
                nested = below.add_parser(name, help=command.summary or about, description=about)
                command.add_to(nested, files)
            return
        # Before the options, whose own defaults take precedence.
        parser.set_defaults(run=self.run, **self.defaults)
        plain = [*self.options.get("", []), *([CONFIG] if self.named else [])]
        for title, options in {**self.options, "": plain}.items():
            group = parser.add_argument_group(title) if title else parser
            for flag, keywords in options:
                action: Any = group.add_argument(flag, **keywords)
                if action.type is Path:
                    action.complete = files

    def with_config(self, arguments: Sequence[str]) -> list[str]:
        """Insert the options of the file that `--config` names before the others.

        Args:
            arguments: those behind the name of this command.

        Raises:
            ValueError: for a file that is no TOML, and for names and values that do not fit.
            OSError: if the file cannot be read.
        """
        for place, word in enumerate(arguments):
            if word in self.commands:
                rest = self.commands[word].with_config(arguments[place + 1 :])
                return [*arguments[: place + 1], *rest]
        if not self.named:
            return list(arguments)
        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument(CONFIG.flag, **CONFIG.keywords)
        path = parser.parse_known_args(arguments)[0].config
        # argparse takes the last of several values: that of the command line.
        return [*([] if path is None else self._read(path)), *arguments]

    def _read(self, path: Path) -> list[str]:
        """Write the options of a file as on a command line."""
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{CONFIG.flag}: {path} is no TOML file: {error}") from error
        words: list[str] = []
        for name, value in values.items():
            if name not in self.named:
                names = ", ".join(sorted(self.named))
                raise ValueError(f"{CONFIG.flag}: {path} has {name!r}, wanted some of {names}")
            try:
                words += _words(self.named[name], value)
            except ValueError as error:
                raise ValueError(f"{CONFIG.flag}: {path} has {name} = {error}") from error
        return words


def _words(option: Option, value: Any) -> list[str]:
    """Write an option and its value as on a command line."""
    flag, keywords = option
    if "action" in keywords:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r}, wanted true or false")
        can_be_negated = keywords["action"] is argparse.BooleanOptionalAction
        return [flag] if value else [f"--no-{flag[2:]}"] * can_be_negated
    takes_several = keywords.get("nargs", "?") != "?"
    if isinstance(value, list) and not takes_several:
        raise ValueError(f"{value!r}, wanted one value")
    values = value if isinstance(value, list) else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int | float | str):
            raise ValueError(f"{each!r}, wanted a number or a text")
    if takes_several:
        return [flag, *map(str, values)]
    return [f"{flag}={values[0]}"]  # one word, as the value may begin with a dash
