r"""What the noise of `jaxfed.channel.gaussian` guarantees, by the package `dp-accounting`.

For those who use the library. What a server can compute where nothing is guaranteed is in
`jaxfed.privacy.attacks`.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.core import Tracer
from jaxtyping import Float
from scipy.stats import norm

from jaxfed._optional import require
from jaxfed.core.common.checks import check_count, check_flag, check_name, check_number, shown
from jaxfed.core.run.solution import Solution, Status
from jaxfed.core.wire.release import Release

Adjacency = Literal["replace", "zero_out"]


def epsilon(
    noise_multiplier: float,
    rounds: int,
    *,
    delta: float,
    participants: int | None = None,
    clients: int | None = None,
    adjacency: Adjacency = "replace",
    first_message: bool = False,
) -> float:
    r"""The \(\varepsilon\) of a run whose uplink is `jaxfed.channel.gaussian`.

    The run's messages are \((\varepsilon, \delta)\)-differentially private with respect to all
    that one client has: any two data sets of a client give them nearly the same distribution.
    Single messages are, with `clients=1` in that channel; else only their sums are.

    With the number of participants, those of a round are drawn by `jaxfed.participation.uniform`,
    and \(\varepsilon\) is smaller, but only for who sees sums and does not know whose: not for the
    server that drew them. Leave the numbers out for that one, and wherever clients keep a state
    between rounds or have unequal weights: messages then tell when a client took part. `spent`
    refuses these.

    Algorithms that send something before the first round send one message more through the noise,
    all clients together, where the start has no channel of its own: say so with `first_message`.
    Where it has one that is not `gaussian`, nothing is guaranteed at all.

    Not covered are the warm start, weights and settings, if the clients' data had a say in them;
    the history's diagnostics, which have no noise, and a tolerance that stops by them; the clients'
    own, personal results; and what is special to floating-point noise or, after `secure_sum`, to
    rounding and clipping noisy numbers.

    Args:
        noise_multiplier: z, the standard deviation of the noise over the norm that messages are
            clipped to, in each round.
        rounds: how many there are.
        delta: the probability that is tolerated of no guarantee, say below one over the number of
            clients.
        participants: how many of the clients are drawn in each round, without replacement.
        clients: how many there are.
        adjacency: what one client may do: `"replace"` its data by any other, or `"zero_out"` its
            messages, with all participating, which is half as far.
        first_message: whether the clients send a message before the rounds too, with the same
            noise, as all algorithms do whose `first_message` is not empty.

    Returns:
        \(\varepsilon\): exact where all take part, else an upper bound.

    Raises:
        ValueError: for arguments outside their ranges, and a zero-out together with a draw.
        ImportError: if dp-accounting is missing.

    Source: Balle & Wang (2018), Theorem 8, where all take part; else Balle, Barthe & Gaboardi
    (2018), Privacy amplification by subsampling (without replacement), composed by privacy loss
    distributions as in Zhu, Dong & Wang (2022), Optimal accounting of differential privacy via
    characteristic function, and Doroshenko et al. (2022), Connect the dots.
    """
    _check_positive(noise_multiplier=noise_multiplier)
    share = _checked_share(rounds, delta, participants, clients, adjacency, first_message)
    return _epsilon(_parts(noise_multiplier, rounds, share, first_message), delta, adjacency)


def spent(
    *solutions: Solution,
    delta: float,
    adjacency: Adjacency = "replace",
    drawn: bool = False,
) -> float:
    r"""The \(\varepsilon\) of runs that were made, from what their solutions say was sent.

    What left the clients in all of these runs together, first messages included, is
    \((\varepsilon, \delta)\)-differentially private with respect to all that one client has; see
    `epsilon` for what that means and what is not covered. Runs are on the same clients, in the same
    order. A solution counts the one that was its warm start, so the last of such a chain is enough;
    where several solutions count the same run, it counts once. A copy of a solution, such as one
    that `jax.jit` returned, counts as a run of its own.

    A client counts as often as it may have taken part: in every round under `everybody` and
    `uniform`, in its own ones under `mask`.

    Args:
        *solutions: of `jaxfed.fit`, or of `jaxfed.rollout` once it is computed.
        delta: as in `epsilon`.
        adjacency: as in `epsilon`.
        drawn: count a draw by `uniform` as chance, for who sees the sums of messages and does not
            know whose. That holds only where a message depends on its client's data and the
            broadcasts alone: of algorithms whose clients keep a state it is refused.

    Returns:
        \(\varepsilon\), exact without `drawn`, else an upper bound; 0 if nothing was sent.

    Raises:
        ValueError: for no solution, one that is traced or of several runs, other numbers of
            clients, a message that was sent without noise, a run that numbers without noise have
            ended (a tolerance, a callback, a divergence), or a draw that cannot be counted.
        ImportError: if dp-accounting is missing.

    Source: as in `epsilon`; for drawn participants, messages that depend on nothing else are what
    adaptive composition asks for (Dwork & Roth 2014, Section 3.5).
    """
    _check_delta(delta)
    check_name("adjacency", adjacency, ("replace", "zero_out"))
    if not solutions:
        raise ValueError("solutions: wanted at least one, got none")
    releases = {id(each): each for solution in solutions for each in _releases(solution)}.values()
    sizes = {len(release.weights) for release in releases}
    if len(sizes) > 1:
        raise ValueError(f"solutions: wanted runs on the same clients, got {sorted(sizes)} of them")
    sent = [release for release in releases if release.bits and release.times]
    parts, turns = [], np.zeros(1)
    for release in sent:
        noise, times, clients = _noise(release), int(release.times), len(release.weights)
        if drawn and _share(release) < 1:
            _check_draw(release, adjacency)
            parts.append(_Part(noise, times, _share(release)))
        else:
            turns = turns + release.participation.turns(times, clients) / noise**2
    if turns.max() > 0:  # the worst client's
        parts.append(_Part(float(turns.max()) ** -0.5, 1))
    return _epsilon(parts, delta, adjacency) if parts else 0.0


def _releases(solution: Solution) -> tuple[Release, ...]:
    if not isinstance(solution, Solution):
        raise ValueError(f"solutions: wanted those of jaxfed.fit, got {solution!r}")
    last = solution.releases[-1].times
    if isinstance(last, Tracer) or np.ndim(last):
        raise ValueError(
            "solutions: wanted each of one run, and computed, got a traced or stacked one"
        )
    if not bool(solution.status == Status.round_limit):
        raise ValueError(
            "solutions: wanted runs of a given number of rounds, got one that ended by numbers "
            f"without noise: {Status[solution.status]}"
        )
    return solution.releases


def _noise(release: Release) -> float:
    noise = release.channel.noise()
    if noise is None:
        raise ValueError(
            f"solutions: wanted messages with noise, got {release.bits} bits through "
            f"{release.channel!r}"
        )
    return noise


def _share(release: Release) -> float:
    clients = len(release.weights)
    return (release.participation.number(clients) or clients) / clients


def _check_draw(release: Release, adjacency: Adjacency) -> None:
    if adjacency != "replace":
        raise ValueError(f"adjacency: wanted replace with drawn=True, got {adjacency!r}")
    if not release.stateless:
        raise ValueError(
            "drawn: wanted an algorithm whose clients keep nothing between rounds; by what they "
            "keep, messages tell when a client took part"
        )
    if np.ptp(release.weights) > 1e-5 * np.max(release.weights):
        raise ValueError(
            "drawn: wanted clients of equal weights; with others, noise tells who took part"
        )


def noise_multiplier(
    epsilon: float,
    rounds: int,
    *,
    delta: float,
    participants: int | None = None,
    clients: int | None = None,
    adjacency: Adjacency = "replace",
    first_message: bool = False,
) -> float:
    r"""The noise multiplier that gives a run a wanted \(\varepsilon\), see `epsilon`.

    Args:
        epsilon: \(\varepsilon\), positive.
        rounds: as in `epsilon`, like all others.
        delta: as there.
        participants: as there.
        clients: as there.
        adjacency: as there.
        first_message: as there; that message has the same noise multiplier.

    Returns:
        z: exact where all take part, else at most a thousandth above what is needed.

    Raises:
        ValueError: as there; in particular for an epsilon or a delta of zero, which no Gaussian
            noise has.
        ImportError: if dp-accounting is missing.
    """
    _check_positive(epsilon=epsilon)
    share = _checked_share(rounds, delta, participants, clients, adjacency, first_message)
    package = require("dp_accounting", extra="privacy")
    needed = (
        package.get_sigma_gaussian(epsilon, delta)
        * _distance(adjacency)
        * (rounds + first_message) ** 0.5
    )
    if share == 1:
        return needed

    def suffices(multiplier: float) -> bool:
        parts = _parts(multiplier, rounds, share, first_message)
        return _epsilon(parts, delta, adjacency) <= epsilon

    enough = needed
    while suffices(enough / 2):
        enough /= 2
    low = enough / 2
    while enough / low > 1.001:
        middle = (low * enough) ** 0.5
        if suffices(middle):
            enough = middle
        else:
            low = middle
    return enough


class _Part(NamedTuple):
    """Messages of one kind."""

    multiplier: float  # of the noise
    times: int  # that one client sends one
    share: float = 1.0  # of the clients, drawn anew each time; one if it may be known who sends


def _parts(multiplier: float, rounds: int, share: float, first_message: bool) -> tuple[_Part, ...]:
    first = (_Part(multiplier, 1),) if first_message else ()  # of everybody
    return (_Part(multiplier, rounds, share), *first)


def _epsilon(parts: Sequence[_Part], delta: float, adjacency: Adjacency) -> float:
    package = require("dp_accounting", extra="privacy")
    distance = _distance(adjacency)
    # As many messages with this noise are one with so much less.
    squares = [part.times * (distance / part.multiplier) ** 2 for part in parts]
    known = float(package.get_epsilon_gaussian(sum(squares) ** -0.5, delta))
    if known == 0 or all(part.share == 1 for part in parts):
        return known
    step = min(1e-3, known / 1e3)
    losses = [_losses(distance / part.multiplier, part, step, delta) for part in parts]
    composed = functools.reduce(lambda one, other: one.compose(other), losses)
    # The bound is rounded upwards, and a draw never harms.
    return float(min(known, composed.get_epsilon_for_delta(delta)))


def _losses(ratio: float, part: _Part, step: float, delta: float) -> Any:
    """The distribution of a part's privacy loss, on multiples of a step, rounded upwards.

    Args:
        ratio: how far a client can move the sum, over the noise's deviation.
        part: what is sent, and how often.
        step: between the losses.
        delta: of which what is beyond the largest loss is a millionth.
    """
    pld = require("dp_accounting.pld", extra="privacy")
    longest = ratio * (ratio / 2 - norm.ppf(1e-6 * delta / part.times))
    places = np.arange(-(most := int(np.ceil(longest / step))), most + 1)
    one = pld.pld_pmf.create_pmf_pessimistic_connect_dots(
        step, places, _profile(places * step, ratio, part.share)
    )
    whole = pld.privacy_loss_distribution.PrivacyLossDistribution(one)
    with np.errstate(over="ignore"):  # of bounds on the losses, infinite ones are passed over
        return whole.self_compose(part.times)


def _profile(
    epsilon: Float[np.ndarray, " n"], ratio: float, share: float
) -> Float[np.ndarray, " n"]:
    r"""The smallest \(\delta\) for each \(\varepsilon\), of whatever sign, of one message."""
    size = np.abs(epsilon)
    # That of an undrawn message, at the epsilon which the draw brings down to this one.
    undrawn = size + np.log1p(-(1 - share) * np.exp(-size)) - np.log(share)
    above = norm.cdf(ratio / 2 - undrawn / ratio)
    below = np.exp(undrawn + norm.logcdf(-ratio / 2 - undrawn / ratio))
    delta = share * np.maximum(above - below, 0)
    # Of two data sets each may be the first.
    return np.clip(np.where(epsilon >= 0, delta, -np.expm1(-size) + np.exp(-size) * delta), 0, 1)


def _distance(adjacency: Adjacency) -> int:
    """How far a client can move a sum of messages that are clipped to norm one."""
    return 2 if adjacency == "replace" else 1


def _check_positive(**numbers: Any) -> None:
    for name, value in numbers.items():
        check_number(name, value, "a positive number", lambda x: x > 0)


def _check_delta(delta: Any) -> None:
    check_number("delta", delta, "a number between 0 and 1", lambda x: (x > 0) & (x < 1))


def _checked_share(
    rounds: int, delta: float, participants: int | None, clients: int | None, adjacency: Adjacency,
    first_message: bool,
) -> float:  # fmt: skip
    """The share of clients that take part, once all that says what is asked is checked."""
    check_count("rounds", rounds)
    _check_delta(delta)
    check_name("adjacency", adjacency, ("replace", "zero_out"))
    check_flag("first_message", first_message)
    if participants is None and clients is None:
        return 1.0
    if not (isinstance(participants, int) and isinstance(clients, int)) or not (
        1 <= participants <= clients
    ):
        raise ValueError(
            "participants, clients: wanted two whole numbers, the first from 1 to the second, got "
            f"{shown(participants)} and {shown(clients)}"
        )
    if participants < clients and adjacency != "replace":
        raise ValueError(
            f"adjacency: wanted replace where {participants} of {clients} clients are drawn, "
            f"got {adjacency!r}"
        )
    return participants / clients
