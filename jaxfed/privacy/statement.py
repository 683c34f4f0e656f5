"""What a release guarantees, in words."""

import math
from typing import Any

from scipy.stats import norm

from jaxfed._checks import refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import DISCRETE, Guarantee
from jaxfed.core.run.solution import Solution, guarantees_of
from jaxfed.core.store.saved import Saved
from jaxfed.privacy._gaussian import composed, epsilon_of

ALARMS = 0.05  # the share of false alarms that statements assume of an attacker

UNITS = {
    "row": "one row of a client's table. Each row counts as another person.",
    "person": "one person, with all rows that the person has at a client.",
}
CHANGES = {
    "replace": "the data of one person are replaced by any other data",
    "add_remove": "the data of one person are there or missing, while the number of persons is "
    "public",
}
BECOMES = {
    "pairs": "the direction of the difference of two persons' rows",
    "directions": "its direction",
    "clip": "itself, shortened to length {bound:g} if it is longer",
    "ranges": "itself, each number moved into the public range of its feature",
}
OWN = (
    "Who: each person behind the data, from everybody who sees what the clients released or "
    "anything that was computed from it: the server, other clients, readers of the result. Each "
    "client added its noise itself, so nobody else need be trusted."
)
SHARED = (
    "Who: each person behind the data, from everybody who sees sums over at least {sharers} "
    "clients or anything that was computed from them: the server, other clients, readers of the "
    "result. Each client added its share of the noise itself. {sharers} of them are trusted to do "
    "so and to keep it secret; masks hide what a single client sent."
)
NOT_COVERED = (
    "numbers of persons, of features and of clients, and the clients' weights: they are public",
    "scales, centres, bounds and ranks that somebody chose by looking at the data, except those "
    "that jaxfed.privacy.release_units released",
    "what is computed at home from the raw data, such as local components of jaxfed.pca.fit_local "
    "and scores: it must stay at home",
    "a refusal of data that cannot be released, such as rows that are all equal",
    "anything else that is sent, such as another release, which counts once more: keep a "
    "jaxfed.privacy.Ledger",
    "a person with data at several clients, whose releases add up",
)
ALONE = (
    "the moment of a single client, and the history of a simulated run, which masks must hide; a "
    "second sum of the same moments, over other clients, from which the first could be subtracted"
)
SIMULATED = (
    "whoever knows the random key, which can subtract the noise. This noise is from a generator "
    "for simulations, in floating-point numbers; real data need that of noise='opendp'"
)


def statement(*released: Solution | Clients | Guarantee | Any) -> str:
    r"""Say who is protected from whom, how far, and what is not covered, for a protocol.

    Args:
        released: clients of `release_moments`, their guarantee, the solution of a run on them, an
            estimator that was fitted with `epsilon`, or what `jaxfed.load` returned of one of both;
            or several of them, and of `release_units`, whose guarantees add up.

    Returns:
        Sentences in plain text, one paragraph a line.

    Raises:
        ValueError: if it is something else, or there is no guarantee: clients were not released, or
            a run or its warm start used other data.
    """
    if not released:
        raise ValueError("released: wanted what was released, got nothing")
    # The same release counts once; another one with the same numbers is another one.
    guarantees = list({id(x): x for each in released for x in _guarantees(each)}.values())
    first = guarantees[0]
    sharers = max(each.sharers for each in guarantees)
    lines = [
        SHARED.format(sharers=sharers) if sharers > 1 else OWN,
        f"Unit: {UNITS[first.unit]}",
    ]
    lines += [f"Release: {_release(each)}" for each in guarantees]
    epsilon, delta, sigma = _together(guarantees)
    if len(guarantees) > 1:
        lines.append(
            f"Together: epsilon {epsilon:.4g} at delta {delta:g} if {CHANGES['replace']}. "
            "Releases of different data of the same persons add up."
        )
    exact = all(each.mechanism == DISCRETE for each in guarantees)
    more = [ALONE] * (sharers > 1) + [SIMULATED] * (not exact)
    odds = math.exp(min(epsilon, 700))
    detected = float(norm.cdf(norm.ppf(ALARMS) + 1 / sigma))
    lines += [
        f"In odds: whatever somebody knew before, the release changes the odds of any statement "
        f"about one person by a factor of at most {odds:.3g}, but for a probability of {delta:g}. "
        f"Even odds, 50 %, become at most {odds:.3g} : 1, or {_percent(odds / (1 + odds))}. A test "
        f"of whether one person's data were used that errs in {_percent(ALARMS)} of the cases "
        f"where they were not finds at most {_percent(detected)} of the cases where they were.",
        f"Not covered: {'; '.join([*NOT_COVERED, *more])}.",
    ]
    return "\n".join(lines)


def _release(guarantee: Guarantee) -> str:
    becomes = BECOMES[guarantee.rows].format(bound=guarantee.bound or 1)
    what = "means and mean squares" if guarantee.rows == "ranges" else "second moments"
    return (
        f"{what} with noise of the {guarantee.mechanism} mechanism, {guarantee.epsilon:g} "
        f"for epsilon and {guarantee.delta:g} for delta, if {CHANGES[guarantee.neighbours]}. A row "
        f"became {becomes}. The noise has {guarantee.noise_multiplier:.4g} times the standard "
        "deviation of the largest change."
    )


def _guarantees(released: object) -> list[Guarantee]:
    """The guarantees of all that was released.

    Raises:
        ValueError: if something has no guarantee.
    """
    if isinstance(released, Guarantee):
        return [released]
    for name in ("guarantee", "guarantee_"):  # of units, and of an estimator
        if isinstance(own := getattr(released, name, None), Guarantee):
            return [own]
    if isinstance(released, Saved) and released.guarantees:
        return list(released.guarantees)
    if isinstance(released, Solution):
        if found := guarantees_of(released.releases):
            return list(found)
        sent = [each.guarantee for each in released.releases if each.bits]
        if None in sent:
            also = any(each is not None for each in sent)
            raise ValueError(
                "released: wanted a run on clients of release_moments, and a warm start of one, "
                f"got messages that were computed from {'also' if also else 'only'} other data"
            )
    wanted = (
        "clients of release_moments, the solution of a run on them, what jaxfed.load returned of "
        "it, or an estimator with epsilon"
    )
    raise refuse("released", wanted, released)


def _together(guarantees: list[Guarantee]) -> tuple[float, float, float]:
    """Epsilon, delta and the noise multiplier of all guarantees, which have one unit.

    Raises:
        ValueError: if they have several.
    """
    if len(guarantees) == 1:
        (one,) = guarantees
        return one.epsilon, one.delta, one.noise_multiplier
    units = {each.unit for each in guarantees}
    if len(units) > 1:
        raise ValueError("released: wanted releases of one unit, got per row and per person")
    # Replacing a person moves a moment √2 times as far as adding or removing one.
    sigma = composed(
        [x.noise_multiplier * (1 if x.neighbours == "replace" else 2**-0.5) for x in guarantees]
    )
    delta = max(each.delta for each in guarantees)
    return epsilon_of(sigma, delta), delta, sigma


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 0.995 else f"{100 * share:.4g} %"
