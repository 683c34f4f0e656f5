"""The command line: `jaxfed COMMAND`, the same as `python -m jaxfed COMMAND`."""

import argparse
import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Container, Iterator, Sequence
from importlib import metadata
from typing import Any

from jaxfed.cli._config import add_config, with_config

# Each command is the module of its name in this package, with an `add_parser(subparsers)`.
COMMANDS = {
    "completion": "what your shell needs to complete commands and options",
    "demo": "shared and local components of real handwritten digits, in under a minute",
    "deploy": "run on separate machines, by Flower",
    "fit": "fit an algorithm to your own files",
    "info": "what a result holds",
    "personalize": "local components of new clients beside shared ones that were learned before",
    "plan": "what a run takes on TPUs or GPUs, before anything is rented",
    "reproduce": "reproduce a table or figure of a paper",
    "sweep": "a grid over settings, samples, clients and seeds, compiled once",
    "transform": "scores of samples in components that were learned before",
}

# Those that take their options from a file too.
CONFIGURED = {"demo", "fit", "personalize", "plan", "sweep", "transform"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit status: 0, 2 for what the user can put right (told in one line), 130 after an
        interruption (SIGINT), or 143 after SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Orbax tells of every checkpoint that an interruption left incomplete, which it passes over,
    # and of what it raises besides.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        # Only the command that is asked for is imported.
        parser = parser_of(set(_first_words(arguments)))
        parsed = parser.parse_args(with_config(parser, arguments))
        if not parsed.no_compilation_cache:
            from jaxfed.core.run.compiling import enable_compilation_cache

            with contextlib.suppress(OSError, RuntimeError):  # no home, no room: only slower
                enable_compilation_cache()
        with _interruptible(), _plain_warnings():
            return parsed.run(parsed)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:  # the system's own
            text = f"{error.filename}: {error.strerror}"
        print(f"jaxfed: {' '.join(text.split())}", file=sys.stderr)
        return 2
    except _Terminated:
        print("jaxfed: terminated", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("jaxfed: interrupted", file=sys.stderr)
        return 130


class _Terminated(KeyboardInterrupt):
    """What SIGTERM raises."""

    number = signal.SIGTERM


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end a command as SIGINT does, wherever in it they arrive."""
    others = sys.unraisablehook

    def again(swallowed: Any) -> None:
        """Send a signal once more that fell into the collection of garbage, which goes on."""
        if not issubclass(swallowed.exc_type, KeyboardInterrupt):
            return others(swallowed)
        number = getattr(swallowed.exc_value, "number", signal.SIGINT)
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()

    def terminate(*_: object) -> None:
        raise _Terminated

    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # somebody else sees to signals
        return
    sys.unraisablehook = again
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.unraisablehook = others


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print a warning as an error is printed, in one line and without the code it comes from."""
    others = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"jaxfed: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = others


def parser_of(wanted: Container[str]) -> argparse.ArgumentParser:
    """The command line's parser.

    Args:
        wanted: names of commands whose own options are wanted; they are imported.

    Raises:
        ValueError: if one of them cannot be used here.
        ImportError: if a package is missing for one.
    """
    parser = argparse.ArgumentParser(
        prog="jaxfed",
        description="Federated, personalized, unsupervised learning in JAX.",
        epilog="jaxfed demo shows what this is about; jaxfed fit --help lists the algorithms; "
        "jaxfed COMMAND --help says more of each.",
    )
    parser.add_argument("--version", action="version", version=metadata.version("jaxfed"))
    parser.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="do not keep compiled programs on disk (in ~/.cache/jaxfed, or XDG_CACHE_HOME)",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name in wanted:
            importlib.import_module(f"jaxfed.cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=summary)
        if name in wanted and name in CONFIGURED:
            add_config(commands.choices[name])
    return parser


def _first_words(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments up to the first that is no option: the command."""
    for number, word in enumerate(arguments):
        if not word.startswith("-"):
            return arguments[: number + 1]
    return arguments
