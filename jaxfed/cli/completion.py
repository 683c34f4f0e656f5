"""`jaxfed completion SHELL`: print a script for shell completion of commands and options."""

from types import SimpleNamespace

from jaxfed.cli import _app
from jaxfed.cli._options import define, option


def run(arguments: SimpleNamespace) -> None:
    """Run the command."""
    # The script lists the options of every command, so that completion imports nothing.
    print(_app.app.meta.generate_completion(prog_name="jaxfed", shell=arguments.shell))


command = define(run, {"": [option("shell", ("bash", "zsh", "fish"), "your shell")]})
