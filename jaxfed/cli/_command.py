"""Descriptions of commands, which define the parsers and the options of `--config` files."""

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxfed.cli._options import Option, option

_ABOUT = (
    "TOML file with further options, by their names without --, such as rounds = 100; options on "
    "the command line take precedence"
)
CONFIG = option("--config", Path, _ABOUT, None, metavar="FILE")


class Command(NamedTuple):
    """What a command takes and does."""

    description: str  # the first lines of its help, and its line in a list of commands
    # Runs the command, given the values of the options. A `ValueError`, `OSError`, `ImportError` or
    # `FloatingPointError` that it raises is printed in one line.
    # Returns True if it wrote results of a run that did not converge.
    run: Callable[[argparse.Namespace], bool | None] | None = None
    # Its options, by the title of their group in the help; `""` for no group.
    options: Mapping[str, Sequence[Option]] = {}
    defaults: Mapping[str, Any] = {}  # values for options that it does not have
    commands: Mapping[str, Self] = {}  # subcommands, instead of all of the above
    metavar: str = "ALGORITHM"  # what the help calls a subcommand
    summary: str = ""  # its line in a list of commands, if that is not the description

    @property
    def named(self) -> dict[str, Option]:
        """The options with a flag, by name without `--`, as in `--config` files."""
        options = [each for group in self.options.values() for each in group]
        return {each.flag[2:]: each for each in options if each.flag.startswith("--")}

    def add_to(self, parser: argparse.ArgumentParser, files: Any = None) -> None:
        """Add the options, or the subcommands, to the parser of this command.

        Args:
            parser: the parser.
            files: how shtab completes file names.
        """
        if self.commands:
            if "\n" in self.description:
                parser.formatter_class = argparse.RawDescriptionHelpFormatter
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
        """Insert the options of a `--config` file before the others.

        Args:
            arguments: the arguments after the name of this command.

        Raises:
            ValueError: if the file is not TOML, or names or values are invalid.
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
        # argparse uses the last of several values: that on the command line.
        return [*([] if path is None else self._read(path)), *arguments]

    def _read(self, path: Path) -> list[str]:
        """Return the options of a file as command-line arguments."""
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
    """Return an option and its value as command-line arguments."""
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
    return [f"{flag}={values[0]}"]  # one word, since the value may begin with a dash
