"""`jaxfed fit ... --epsilon`: components from moments whose noise protects each person."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

from jaxfed import pca
from jaxfed._checks import check_number, check_positive
from jaxfed.cli._common import DELTA, PERSON, taken_out
from jaxfed.cli._options import option
from jaxfed.core.clients.clients import Clients
from jaxfed.core.run.solution import Solution
from jaxfed.privacy.ledger import Ledger

OPTIONS = [
    option(
        "--epsilon",
        float,
        "release each client's second moment once, with noise that protects each person; local "
        "components then come from the client's own data; default: no noise",
        None,
    ),
    DELTA,
    PERSON,
    option(
        "--ledger",
        Path,
        "file that counts all releases from these data, with --epsilon; needs --budget",
        None,
        metavar="FILE",
    ),
    option(
        "--noise",
        ("jax", "opendp"),
        "generator of the noise, with --epsilon: jax for simulations, or opendp for real data, "
        "exactly sampled from the system's randomness (needs 'jaxfed[privacy]'); default: jax",
        None,
    ),
    option("--budget", float, "epsilon of all releases in the --ledger together", None),
]
NAMES = ("person", "ledger", "budget", "noise")


def check(arguments: SimpleNamespace) -> None:
    """Refuse options that would send something else, before any file is read.

    Raises:
        ValueError: names the option.
    """
    if getattr(arguments, "epsilon", None) is None:
        for name in NAMES:
            if getattr(arguments, name, None) is not None:
                raise ValueError(f"--{name}: is for --epsilon, which is not given")
        return
    check_positive("--epsilon", arguments.epsilon)
    check_number(
        "--delta", arguments.delta, "a number between 0 and 1", lambda x: (x > 0) & (x < 1)
    )
    if (arguments.ledger is None) != (arguments.budget is None):
        raise ValueError("--ledger: wanted both --ledger and --budget, or neither, got one")
    for name, kept in (("center", ("none", "local")), ("scale", ("none",))):
        given = getattr(arguments, name)
        if given not in kept:
            raise ValueError(
                f"--{name}: wanted {' or '.join(kept)} with --epsilon, which does not cover what "
                f"is computed from the data beforehand, got {given}"
            )
    for name in ("impute", "bootstrap"):
        if getattr(arguments, name, None) is not None:
            raise ValueError(f"--{name}: is not for --epsilon, which does not cover it")
    if jax.process_count() > 1:
        raise ValueError("--epsilon: wanted one process, got several")


def ledger_of(arguments: SimpleNamespace) -> Ledger | None:
    """What counts the releases, if the command names a file for it.

    Raises:
        ValueError: if the file is no ledger with this budget.
        OSError: if it cannot be read.
    """
    if arguments.ledger is None:
        return None
    return Ledger(arguments.ledger, epsilon=arguments.budget, delta=arguments.delta)


def persons_of(
    arguments: SimpleNamespace, tables: Sequence[np.ndarray], features: list[str] | None
) -> tuple[list[np.ndarray], list[np.ndarray], list[str] | None]:
    """Take the column of persons out of tables.

    Returns:
        The persons, the tables without the column, and the names of the other features.

    Raises:
        ValueError: if there is no such column.
    """
    taken = taken_out("person", arguments.person, tables, features)
    return taken.column, taken.tables, taken.features


def at_home(solution: Solution, clients: Clients) -> Solution:
    """Replace local components, if there are any, by those of the clients' own data."""
    if solution.result.local is None:
        return solution
    return replace(solution, result=pca.fit_local(solution, clients))
