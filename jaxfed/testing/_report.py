"""Runs named checks and reports which of them passed."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxfed._checks import check_flag


class Report(NamedTuple):
    """The outcome of checks.

    Attributes:
        checked: names of the checks that ran and passed.
        skipped: reasons why other checks, or parts of them, did not run, by name.
    """

    checked: tuple[str, ...]
    skipped: dict[str, str]


class Skipped(Exception):
    """Raised by a check that does not apply; the message says why."""


def chosen(
    names: Sequence[str] | None, known: Sequence[str], progress: bool | None
) -> tuple[Sequence[str], bool]:
    """Return the names of the checks to run, and whether to print them.

    Raises:
        ValueError: if a check is unknown, or `progress` is not a flag.
    """
    shown = sys.stderr.isatty() if progress is None else progress
    check_flag("progress", shown)
    if unknown := set(known if names is None else names) - set(known):
        raise ValueError(f"checks: wanted some of {', '.join(known)}, got {sorted(unknown)}")
    return known if names is None else names, shown


def reported(
    caller: str,
    checks: Mapping[str, Callable[[], None]],
    progress: bool,
    skipped: dict[str, str] | None = None,
) -> Report:
    """Run checks in their order.

    Args:
        caller: the public function that runs them.
        checks: by name.
        progress: whether to print each check's name and duration to standard error.
        skipped: reasons that checks add themselves.

    Raises:
        AssertionError: of the first check that fails, with a note on how to repeat it.
    """
    skipped = {} if skipped is None else skipped
    checked = []
    for name, check in checks.items():
        started = time.perf_counter()
        if progress:
            print(f"{name} ...", end=" ", file=sys.stderr, flush=True)
        try:
            check()
            checked.append(name)
        except Skipped as reason:
            skipped[name] = str(reason)
        except AssertionError as error:
            error.add_note(f"This check alone: {caller}(..., checks=[{name!r}]).")
            raise
        if progress:
            how = "skipped" if name in skipped else "passed"
            print(f"{how}, {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return Report(tuple(checked), skipped)
