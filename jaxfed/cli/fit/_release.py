"""`jaxfed fit ... --epsilon`: components from moments whose noise protects each person."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np

from jaxfed import channel, participation, pca
from jaxfed._checks import check_positive, check_probability
from jaxfed.cli._common import DELTA, PERSON, taken_out
from jaxfed.cli._options import flag_of, option
from jaxfed.cli.fit import _ranges
from jaxfed.cli.fit._split import Split
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.run.arguments import check_loop, check_rounds
from jaxfed.core.run.solution import Solution
from jaxfed.core.wire.release import Release
from jaxfed.participation import everybody
from jaxfed.privacy import Ledger, ReleasedUnits, release_moments, release_units
from jaxfed.privacy.releases import guarantee_of

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
    *_ranges.OPTIONS,
]
NAMES = ("person", "ledger", "budget", "noise", "ranges", "ranges_epsilon")


class Sent(NamedTuple):
    """What clients released."""

    moments: Clients
    split: Split  # the samples behind them, in released units if there are such units
    units: ReleasedUnits | None


def check(arguments: SimpleNamespace) -> None:
    """Refuse options that would send something else, before any file is read.

    Raises:
        ValueError: names the option.
    """
    if getattr(arguments, "epsilon", None) is None:
        for name in NAMES:
            if getattr(arguments, name, None) is not None:
                raise ValueError(f"{flag_of(name)}: is for --epsilon, which is not given")
        return
    check_positive("--epsilon", arguments.epsilon)
    check_probability("--delta", arguments.delta)
    if arguments.ranges is not None:
        _ranges.read(arguments.ranges)
        check_positive("--ranges-epsilon", arguments.ranges_epsilon, optional=True)
    elif arguments.ranges_epsilon is not None:
        raise ValueError("--ranges-epsilon: is for --ranges, which is not given")
    if (arguments.ledger is None) != (arguments.budget is None):
        raise ValueError("--ledger: wanted both --ledger and --budget, or neither, got one")
    for name, kept in (("center", ("none", "local")), ("scale", ("none",))):
        given = getattr(arguments, name)
        if given not in kept:
            raise ValueError(
                f"--{name}: wanted {' or '.join(kept)} with --epsilon, which does not cover what "
                f"is computed from the data beforehand (--ranges releases units), got {given}"
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


def released(arguments: SimpleNamespace, split: Split, algorithms: Sequence[Algorithm]) -> Sent:
    """Release the clients' moments, and before them the units of the features if they have ranges.

    Noise is such that nobody can draw it again, whatever the seed.

    Args:
        arguments: values of the options.
        split: the samples; if there are ranges, as they were read.
        algorithms: what will run on the moments.

    Raises:
        ValueError: if an option is unsuitable or the budget does not suffice, before anything is
            released.
    """
    clients = split.clients()
    check_rounds(arguments.rounds)
    check_loop(arguments.tol, None, 1)
    if arguments.participation is not None:
        participation.uniform(arguments.participation).check(len(clients))
    for algorithm in algorithms:
        algorithm.check(clients, None)
    ledger = ledger_of(arguments)
    who = {"delta": arguments.delta, "person": split.persons}
    how = {"noise": arguments.noise or "jax", "ledger": ledger, **who}
    if arguments.ranges is None:
        moments = release_moments(clients, epsilon=arguments.epsilon, **how)
        return Sent(moments, split, None)
    ranges = _ranges.of_features(arguments.ranges, split.features, clients.features)
    epsilons = arguments.ranges_epsilon or arguments.epsilon / _ranges.SHARE, arguments.epsilon
    if ledger is not None:
        several = split.persons is not None
        ledger.check(*(guarantee_of(x, arguments.delta, several=several) for x in epsilons))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What this refuses, it refuses before units are released. Nothing of it leaves.
        release_moments(clients, epsilon=arguments.epsilon, **who)
    units = release_units(clients, *ranges, epsilon=epsilons[0], **how)
    own = split.in_units(units.units, own_means=arguments.center == "local")
    moments = release_moments(own.clients(), epsilon=epsilons[1], **how)
    return Sent(moments, own, units)


def finished(solution: Solution, sent: Sent, clients: Clients) -> Solution:
    """Record the release of units, and replace local components by those of the clients' own data.

    Args:
        solution: of the run on the moments.
        sent: what was released.
        clients: the samples in their units.
    """
    if sent.units is not None:
        bits = 8 * 2 * clients.features * solution.result.shared.dtype.itemsize
        first = Release(
            channel.lossless(),
            everybody(),
            bits,
            1,
            clients.weights,
            stateless=True,
            guarantee=sent.units.guarantee,
        )
        solution = replace(solution, releases=(first, *solution.releases))
    if solution.result.local is None:
        return solution
    return replace(solution, result=pca.fit_local(solution, clients))
