"""`jaxfed completion SHELL`: print a script for shell completion of commands and options."""

import argparse
from contextlib import suppress

from jaxfed._optional import require
from jaxfed.cli import SUMMARIES, load_command, parser_of
from jaxfed.cli._command import Command
from jaxfed.cli._options import option


def command() -> Command:
    """Describe the command."""
    about = (
        "Print a script for shell completion of commands, options and their choices. Save it where "
        "the shell looks for such scripts. "
        "bash: ~/.local/share/bash-completion/completions/jaxfed; zsh: a folder of $fpath, as "
        "_jaxfed; fish: ~/.config/fish/completions/jaxfed.fish."
    )
    shell = option("shell", ("bash", "zsh", "fish"), "your shell")
    return Command(about, run, {"": [shell]})


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    shtab = require("shtab", extra="cli")
    # The script lists the options of every command, so that completion imports nothing.
    commands = {}
    for name in SUMMARIES:
        with suppress(ValueError):  # outside a checkout there is nothing to reproduce
            commands[name] = load_command(name)
    print(shtab.complete(parser_of(commands, shtab.FILE), arguments.shell))
