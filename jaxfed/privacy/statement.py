"""What a release guarantees, in words."""

import math
from typing import Any, NamedTuple

from scipy.stats import norm

from jaxfed._checks import refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.guarantee import DISCRETE, GRADIENTS, Guarantee
from jaxfed.core.run.solution import Solution, guarantees_of
from jaxfed.core.store.saved import Saved
from jaxfed.privacy._gaussian import composed, epsilon_of
from jaxfed.privacy.accounting import TRAINED, has_gradient_noise

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
    GRADIENTS: "the gradient of its own loss, shortened to length {bound:g} if it is longer",
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
PUBLIC = "numbers of persons, of features and of clients, and the clients' weights: they are public"
SEVERAL = "a person with data at several clients, whose releases add up"
NOT_COVERED = (
    PUBLIC,
    "scales, centres, bounds and ranks that somebody chose by looking at the data, except those "
    "that jaxfed.privacy.release_units released",
    "what is computed at home from the raw data, such as local components of jaxfed.pca.fit_local "
    "and scores: it must stay at home",
    "a refusal of data that cannot be released, such as rows that are all equal",
    "anything else that is sent, such as another release, which counts once more: keep a "
    "jaxfed.privacy.Ledger",
    SEVERAL,
)
ALONE = (
    "the moment of a single client, and the history of a simulated run, which masks must hide; a "
    "second sum of the same moments, over other clients, from which the first could be subtracted"
)
NOT_COVERED_IN_TRAINING = (
    PUBLIC,
    "scales, clips, step sizes and other settings that somebody chose by looking at the data",
    "losses in the history, which clients report without noise, metrics, and a tolerance, a "
    "callback or a choice of the best round by them",
    "a first model from these data, unless its own guarantee is added",
    "models that clients fine-tune at home, from their raw samples: they must stay at home",
    "rounds beyond those of the guarantee, and a person with more rows at a client than it counts",
    "anything else that is sent, such as another run, which counts once more",
    SEVERAL,
)
KEY = (
    "whoever knows the random key, which can subtract the noise. This noise is from a generator "
    "for simulations, in floating-point numbers; real data need "
)
OF_MOMENTS, OF_GRADIENTS = "that of noise='opendp'", "a cryptographic one, and exact noise"


def statement(*released: Solution | Clients | Guarantee | Any) -> str:
    r"""Say who is protected from whom, how far, and what is not covered, for a protocol.

    Args:
        released: clients of `release_moments`, their guarantee, the solution of a run on them, an
            estimator that was fitted with `epsilon`, or what `jaxfed.load` returned of one of both;
            or several of them, and of `release_units`, whose guarantees add up. Or guarantees of
            `training_guarantee`, whose epsilons and deltas add up.

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
    epsilon, delta, detected = _together(guarantees)
    if len(guarantees) > 1:
        lines.append(
            f"Together: epsilon {epsilon:.4g} at delta {delta:g} if {CHANGES['replace']}. "
            "Releases of different data of the same persons add up."
        )
    odds = math.exp(min(epsilon, 700))
    lines += [
        f"In odds: whatever somebody knew before, the release changes the odds of any statement "
        f"about one person by a factor of at most {odds:.3g}, but for a probability of {delta:g}. "
        f"Even odds, 50 %, become at most {odds:.3g} : 1, or {_percent(odds / (1 + odds))}. A test "
        f"of whether one person's data were used that errs in {_percent(ALARMS)} of the cases "
        f"where they were not finds at most {_percent(detected)} of the cases where they were.",
        f"Not covered: {'; '.join(_not_covered(guarantees))}.",
    ]
    return "\n".join(lines)


def _not_covered(guarantees: list[Guarantee]) -> tuple[str, ...]:
    trained = {each.rows == GRADIENTS for each in guarantees}
    known = NOT_COVERED * (False in trained) + NOT_COVERED_IN_TRAINING * (True in trained)
    if any(each.sharers > 1 for each in guarantees):
        known = *known, ALONE
    if not all(each.mechanism == DISCRETE for each in guarantees):
        known = *known, KEY + (OF_GRADIENTS if True in trained else OF_MOMENTS)
    return tuple(dict.fromkeys(known))


def _release(guarantee: Guarantee) -> str:
    becomes = BECOMES[guarantee.rows].format(bound=guarantee.bound or 1)
    if guarantee.rows == GRADIENTS:
        return (
            "gradients of few rows, which were drawn anew in each step, with noise of the "
            f"{guarantee.mechanism} mechanism, {guarantee.epsilon:.4g} for epsilon and "
            f"{guarantee.delta:g} for delta in all steps together, if "
            f"{CHANGES[guarantee.neighbours]}. A row became {becomes}. The noise of a step has "
            f"{guarantee.noise_multiplier:.4g} times this length as its standard deviation. "
            "Messages, the shared model and personal models under a prior were computed from these "
            "gradients."
        )
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
        if has_gradient_noise(released):
            raise ValueError(f"released: wanted a guarantee, got a solution; {TRAINED}")
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


class _Together(NamedTuple):
    epsilon: float
    delta: float
    detected: float  # of cases, at most, by a test with `ALARMS` false alarms


def _together(guarantees: list[Guarantee]) -> _Together:
    """What all guarantees, which have one unit, say together.

    Raises:
        ValueError: if they have several.
    """
    if len({each.unit for each in guarantees}) > 1:
        raise ValueError("released: wanted releases of one unit, got per row and per person")
    trained = [each for each in guarantees if each.rows == GRADIENTS]
    normal = [each for each in guarantees if each.rows != GRADIENTS]
    epsilon, delta = sum(x.epsilon for x in trained), sum(x.delta for x in trained)
    if not trained and len(normal) == 1:
        (one,) = normal
        return _Together(one.epsilon, one.delta, _found(one.noise_multiplier))
    if normal:
        # Replacing a person moves a moment √2 times as far as adding or removing one.
        sigma = composed(
            [x.noise_multiplier * (1 if x.neighbours == "replace" else 2**-0.5) for x in normal]
        )
        own = max(each.delta for each in normal)
        if not trained:
            return _Together(epsilon_of(sigma, own), own, _found(sigma))
        epsilon, delta = epsilon + epsilon_of(sigma, own), delta + own
    # Sampled noise is not as good as normal noise at every delta, so that epsilons and deltas add
    # up, and a test is bounded by these two alone.
    power = math.exp(min(epsilon, 700)) * ALARMS + delta
    others = math.exp(-epsilon) * (1 - ALARMS - delta)
    return _Together(epsilon, delta, min(power, 1 - others))


def _found(sigma: float) -> float:
    """The share of cases that the best test with `ALARMS` false alarms finds."""
    return float(norm.cdf(norm.ppf(ALARMS) + 1 / sigma))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 0.995 else f"{100 * share:.4g} %"
