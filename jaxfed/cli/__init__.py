"""The command line: `jaxfed COMMAND`, the same as `python -m jaxfed COMMAND`."""

import argparse
import contextlib
import importlib
import logging
import sys
from collections.abc import Sequence
from importlib import metadata

# Each command is the module of its name in this package, with an `add_parser(subparsers)`.
COMMANDS = {
    "demo": "shared and unique components of real handwritten digits, in under a minute",
    "deploy": "run on separate machines, by Flower",
    "fit": "fit an algorithm to your own files",
    "info": "what a result holds",
    "reproduce": "reproduce a table or figure of a paper",
    "sweep": "a grid over settings, samples, clients and seeds, compiled once",
    "transform": "scores of samples in components that were learned before",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit status: 0, 2 for what the user can put right (told in one line), or 130 after an
        interruption.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="jaxfed", description="Federated, personalized, unsupervised learning in JAX."
    )
    parser.add_argument("--version", action="version", version=metadata.version("jaxfed"))
    parser.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="do not keep compiled programs on disk (in ~/.cache/jaxfed, or XDG_CACHE_HOME)",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Orbax tells of every checkpoint that an interruption left incomplete, which it passes over,
    # and of what it raises besides.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        for name, summary in COMMANDS.items():
            if name in _first_words(arguments):
                # Only the command that is asked for is imported.
                importlib.import_module(f"jaxfed.cli.{name}").add_parser(commands)
            else:
                commands.add_parser(name, help=summary)
        parsed = parser.parse_args(arguments)
        if not parsed.no_compilation_cache:
            from jaxfed.core.compiling import enable_compilation_cache

            with contextlib.suppress(OSError, RuntimeError):  # no home, no room: only slower
                enable_compilation_cache()
        return parsed.run(parsed)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print(f"jaxfed: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("jaxfed: interrupted", file=sys.stderr)
        return 130


def _first_words(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments up to the first that is no option: the command."""
    for number, word in enumerate(arguments):
        if not word.startswith("-"):
            return arguments[: number + 1]
    return arguments
