"""The command line: `jaxfed COMMAND`, or `python -m jaxfed COMMAND`."""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jaxfed import __version__, _names
from jaxfed._refusals import closest
from jaxfed.cli._command import CONFIG, Command

# Listed here so that `jaxfed --help` need not import the commands, and with them JAX.
SUMMARIES = {
    "completion": "print a script for shell completion of commands and options",
    "demo": "learn shared and local components of handwritten digits, in under a minute",
    "deploy": "run on separate machines with Flower",
    "fit": "fit an algorithm to your own files",
    "info": "show what a result holds",
    "personalize": "learn local components of new clients, given shared ones from an earlier fit",
    "plan": "predict memory and messages of a run on TPUs or GPUs without renting them",
    "reproduce": "reproduce a table or figure of a paper",
    "sweep": "compare settings, numbers of samples and of clients, and seeds on a grid",
    "transform": "compute scores of samples in the components of an earlier fit",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; by default those of the process.

    Returns:
        The exit status: 0, 2 after a user error (printed in one line), 3 if results were written
        but the run did not converge, 130 after SIGINT, or 143 after SIGTERM.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parsed = parse(arguments)
        if not parsed.no_compilation_cache:
            from jaxfed.core.run.compiling import enable_compilation_cache

            # Without a home folder or disk space, programs are compiled anew each time.
            with contextlib.suppress(OSError, RuntimeError):
                enable_compilation_cache()
        with _interruptible(), _plain_warnings():
            if parsed.run(parsed):
                return 3
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:  # raised by the system
            text = f"{error.filename}: {error.strerror}"
        print(f"jaxfed: {' '.join(text.split())}", file=sys.stderr)
        return 2
    except _Terminated:
        print("jaxfed: terminated", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print("jaxfed: interrupted", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments and those of a `--config` file; imports only one command."""
    for place, word in enumerate(arguments):
        if word in SUMMARIES:
            command = load_command(word)
            rest = command.with_config(arguments[place + 1 :])
            _check_options(command, rest)
            return parser_of({word: command}).parse_args([*arguments[: place + 1], *rest])
    _check_name(SUMMARIES, arguments)
    return parser_of({}).parse_args(arguments)


def _check_options(command: Command, arguments: Sequence[str]) -> None:
    """Refuse names of subcommands and options that a command does not have.

    argparse would report a missing option before it reports a misspelt one.

    Raises:
        ValueError: with the closest name.
    """
    if command.commands:
        name = next((word for word in arguments if word in command.commands), None)
        if name is None:
            return _check_name(command.commands, arguments)
        return _check_options(command.commands[name], arguments)
    known = ["--help", CONFIG.flag, *(f"--{name}" for name in command.named)]
    for word in arguments:
        given = word.partition("=")[0]
        # argparse accepts the beginning of a name, and negations of some.
        beginnings = (given, given.replace("--no-", "--", 1))
        if given[:2] == "--" and not any(option.startswith(beginnings) for option in known):
            raise ValueError(f"{given}: no such option{closest(given, known)}")


def _check_name(known: Collection[str], arguments: Sequence[str]) -> None:
    """Refuse a first word that is no name, unless it is an option."""
    if arguments and arguments[0][:1] != "-":
        (given, *_) = arguments
        raise ValueError(f"wanted one of {', '.join(known)}, got {given!r}{closest(given, known)}")


def load_command(name: str) -> Command:
    """Import the description of a command."""
    return importlib.import_module(f"jaxfed.cli.{name}").command()


def parser_of(commands: Mapping[str, Command], files: Any = None) -> argparse.ArgumentParser:
    """Make the parser of the command line.

    Args:
        commands: commands whose options it knows; the others are only listed.
        files: how shtab completes file names.
    """
    parser = argparse.ArgumentParser(
        prog="jaxfed",
        description="Federated, personalized, unsupervised learning in JAX.",
        epilog="Start with jaxfed demo. jaxfed fit --help lists the algorithms, and "
        "jaxfed COMMAND --help the options of a command.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="do not keep compiled programs on disk (in ~/.cache/jaxfed, or XDG_CACHE_HOME)",
    )
    below = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in SUMMARIES.items():
        about = commands[name].description if name in commands else None
        nested = below.add_parser(name, help=summary, description=about)
        if name in commands:
            commands[name].add_to(nested, files)
    return parser


class _Terminated(KeyboardInterrupt):
    """SIGTERM has arrived."""

    number = signal.SIGTERM


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM end a command like SIGINT, and lose neither signal in a finalizer."""
    previous = sys.unraisablehook

    def send_again(unraisable: Any) -> None:
        """Repeat a signal whose exception was raised, and dropped, during garbage collection."""
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            return previous(unraisable)
        number = getattr(unraisable.exc_value, "number", signal.SIGINT)
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()

    def terminate(*_: object) -> None:
        raise _Terminated

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield  # the program that called `main` handles signals
        return
    sys.unraisablehook = send_again
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.unraisablehook = previous


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings in one line like errors, without the line of code they come from."""
    previous = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"jaxfed: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = previous


__dir__ = _names.public_names(__name__)
