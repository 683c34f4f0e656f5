"""The command line: `jaxfed COMMAND`, or `python -m jaxfed COMMAND`."""

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from jaxfed import _names
from jaxfed._optional import require


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
        require("cyclopts", extra="cli")
        from jaxfed.cli import _app

        with _interruptible(), _plain_warnings():
            if _app.run(arguments):
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
