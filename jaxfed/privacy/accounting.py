r"""Differential privacy of runs with `jaxfed.channel.gaussian`, computed with `dp-accounting`.

For what a server can compute without such noise, see `jaxfed.privacy.attacks`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.core import Tracer

from jaxfed._checks import (
    check_count,
    check_instance,
    check_name,
    check_positive,
    check_probability,
    shown,
)
from jaxfed._optional import require
from jaxfed.core.run.solution import Solution
from jaxfed.core.run.status import Status
from jaxfed.core.wire.release import Release
from jaxfed.privacy._losses import composed, losses_of, step_of

Adjacency = Literal["replace", "zero_out"]
TRAINED = (
    "jaxfed.privacy.training_guarantee computes how the noise in its gradients protects persons"
)


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

    The run's messages are \((\varepsilon, \delta)\)-differentially private with respect to all data
    of one client: any two data sets of a client give messages with nearly the same distribution.
    This holds for single messages if the channel has `clients=1`, and else only for their sums.

    With numbers of participants and clients, participants are drawn by
    `jaxfed.participation.uniform`, and \(\varepsilon\) is smaller. This holds only against an
    observer who sees sums but does not know who took part, and thus not against the server that
    drew them. Leave the numbers out against the server, and if clients keep a state between rounds
    or have unequal weights, because messages then reveal when a client took part. `spent` refuses
    such runs.

    If an algorithm sends something before the first round and the start has no channel of its own,
    all clients send one more message through the noise: set `first_message`. If the start has
    another channel than `gaussian`, there is no guarantee.

    Not covered are a warm start, weights and settings that depend on the clients' data; the
    history's diagnostics, which have no noise, and a tolerance that stops by them; the clients'
    personal results; and effects of floating-point noise or, after `secure_sum`, of rounding and
    clipping noisy numbers.

    Args:
        noise_multiplier: z, the standard deviation of the noise relative to the clipping norm, in
            each round.
        rounds: number of rounds.
        delta: the probability with which the guarantee may fail, for example below one over the
            number of clients.
        participants: number of clients drawn in each round, without replacement.
        clients: number of all clients.
        adjacency: what one client may change: `"replace"` its data by any other, or `"zero_out"`
            its messages, if all clients participate, which is half the distance.
        first_message: whether clients also send a message with the same noise before the rounds, as
            in all algorithms whose `first_message` is not empty.

    Returns:
        \(\varepsilon\): exact if all take part, else an upper bound.

    Raises:
        ValueError: if an argument is out of range, or `"zero_out"` is combined with a draw.
        ImportError: if dp-accounting is not installed.

    Source: Balle & Wang (2018), Theorem 8, if all take part; else Balle, Barthe & Gaboardi
    (2018), Privacy amplification by subsampling (without replacement), composed by privacy loss
    distributions as in Zhu, Dong & Wang (2022), Optimal accounting of differential privacy via
    characteristic function, and Doroshenko et al. (2022), Connect the dots; the tilt is Esscher's
    (1932), On the probability function in the collective theory of risk.
    """
    check_positive("noise_multiplier", noise_multiplier, single=True)
    share = _checked_share(rounds, delta, participants, clients, adjacency, first_message)
    parts = _parts(noise_multiplier, rounds, share, first_message)
    return epsilon_of_parts(parts, delta, _distance(adjacency))


def spent(
    *solutions: Solution,
    delta: float,
    adjacency: Adjacency = "replace",
    drawn: bool = False,
) -> float:
    r"""The \(\varepsilon\) of completed runs, from the messages recorded in their solutions.

    All messages of these runs together, including first messages, are
    \((\varepsilon, \delta)\)-differentially private with respect to all data of one client; see
    `epsilon` for the meaning and what is not covered. The runs must be on the same clients in the
    same order. A solution includes the run of its warm start, so pass only the last of a chain; a
    run that several solutions include counts once. A copy of a solution, such as one returned by
    `jax.jit`, counts as a separate run.

    A client is counted in every round in which it may have taken part: all rounds under
    `everybody` and `uniform`, its own rounds under `mask`.

    Args:
        *solutions: from `jaxfed.fit`, or from `jaxfed.rollout` outside of transformations.
        delta: as in `epsilon`.
        adjacency: as in `epsilon`.
        drawn: whether to use the randomness of draws by `uniform`, against an observer who sees
            sums of messages but does not know who took part. This requires that a message depends
            only on its client's data and the broadcasts, and is refused for algorithms whose
            clients keep a state.

    Returns:
        \(\varepsilon\), exact without `drawn`, else an upper bound; 0 if nothing was sent.

    Raises:
        ValueError: if there is no solution; one is traced, or of several runs; the numbers of
            clients differ; a message was sent without noise; a run was ended by numbers without
            noise (a tolerance, a callback, a divergence); or a draw cannot be counted.
        ImportError: if dp-accounting is not installed.

    Source: as in `epsilon`; for drawn participants, adaptive composition requires that messages
    depend on nothing else (Dwork & Roth 2014, Section 3.5).
    """
    _check_delta(delta)
    check_name("adjacency", adjacency, ("replace", "zero_out"))
    if not solutions:
        raise ValueError("solutions: wanted at least one, got none")
    releases = {id(each): each for solution in solutions for each in _releases(solution)}.values()
    trained = any(map(has_gradient_noise, solutions))
    sizes = {len(release.weights) for release in releases}
    if len(sizes) > 1:
        raise ValueError(f"solutions: wanted runs on the same clients, got {sorted(sizes)} of them")
    sent = [release for release in releases if release.bits and release.times]
    parts, turns = [], np.zeros(1)
    for release in sent:
        noise, times = _noise(release, trained), int(release.times)
        clients = len(release.weights)
        if drawn and _share(release) < 1:
            _check_draw(release, adjacency)
            parts.append(Part(noise, times, (_share(release),)))
        else:
            # For Gaussian messages 1/z² adds up, here for each client by itself.
            turns = turns + release.participation.turns(times, clients) / noise**2
    if turns.max() > 0:  # the worst client's
        parts.append(Part(float(turns.max()) ** -0.5, 1))
    return epsilon_of_parts(parts, delta, _distance(adjacency)) if parts else 0.0


def _releases(solution: Solution) -> tuple[Release, ...]:
    check_instance("solutions", solution, Solution, "what fit or rollout returned")
    last = solution.releases[-1].times
    if isinstance(last, Tracer) or np.ndim(last):
        raise ValueError(
            "solutions: wanted computed solutions of one run each, got a traced or stacked one"
        )
    ended = [Status.diverged, Status.stopped, Status.unmeasured]
    if solution.stops:
        ended.append(Status.converged)
    if any(bool(solution.status == early) for early in ended):
        raise ValueError(
            "solutions: wanted runs of a fixed number of rounds, got one that ended by numbers "
            f"without noise: {Status[solution.status]}"
        )
    return solution.releases


def has_gradient_noise(solution: Solution) -> bool:
    """Whether the run added noise to the gradients of single samples."""
    return getattr(solution.algorithm, "gradient_noise", None) is not None


def _noise(release: Release, trained: bool) -> float:
    noise = release.channel.noise()
    if noise is None:
        persons = ""
        if release.guarantee is not None:
            persons = "; jaxfed.privacy.statement says how the noise in the data protects persons"
        elif trained:
            persons = f"; {TRAINED}"
        raise ValueError(
            f"solutions: wanted messages with noise, got {release.bits} bits through "
            f"{release.channel!r}{persons}"
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
            "drawn: wanted an algorithm whose clients keep no state between rounds; from their "
            "state, messages reveal when a client took part"
        )
    if np.ptp(release.weights) > 1e-5 * np.max(release.weights):
        raise ValueError(
            "drawn: wanted clients of equal weights; otherwise the noise reveals who took part"
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
    r"""The noise multiplier that gives a run the wanted \(\varepsilon\).

    Args:
        epsilon: \(\varepsilon\), positive.
        rounds: as in `epsilon`, like all other arguments.
        delta: the probability with which the guarantee may fail.
        participants: number of clients drawn in each round.
        clients: number of all clients.
        adjacency: what one client may change.
        first_message: whether clients send a message with the same noise before the rounds.

    Returns:
        z: exact if all take part, else at most 0.1 % above what is needed.

    Raises:
        ValueError: as in `epsilon`; no Gaussian noise gives an epsilon or delta of zero.
        ImportError: if dp-accounting is not installed.
    """
    check_positive("epsilon", epsilon, single=True)
    share = _checked_share(rounds, delta, participants, clients, adjacency, first_message)
    package = require("dp_accounting", extra="privacy")
    # The noise for one message that a client moves by 1, times how far it moves the sum, times √k
    # for k messages.
    needed = (
        package.get_sigma_gaussian(epsilon, delta)
        * _distance(adjacency)
        * (rounds + first_message) ** 0.5
    )
    if share == 1:
        return needed

    def suffices(multiplier: float) -> bool:
        parts = _parts(multiplier, rounds, share, first_message)
        return epsilon_of_parts(parts, delta, _distance(adjacency)) <= epsilon

    return least_noise(suffices, needed)


def least_noise(suffices: Callable[[float], bool], enough: float) -> float:
    """The smallest noise multiplier that suffices, or up to 0.1 % more.

    Args:
        suffices: whether a multiplier does; a draw has no closed form, so this is a bisection.
        enough: one that does, such as that without a draw, which needs the most noise.
    """
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


class Part(NamedTuple):
    """Messages of one kind."""

    multiplier: float  # noise multiplier
    times: int  # messages of one client
    # The probabilities that one, two ... of what is protected, clients or rows, move a message; 1
    # if an observer may know which do.
    shares: tuple[float, ...] = (1.0,)

    def ratio(self, distance: float) -> float:
        """How far one moves a message, relative to the noise's standard deviation."""
        return distance / self.multiplier

    def drawn(self) -> bool:
        """Whether less than all of them move every message."""
        return self.shares[-1] < 1


def _parts(multiplier: float, rounds: int, share: float, first_message: bool) -> tuple[Part, ...]:
    first = (Part(multiplier, 1),) if first_message else ()  # sent by all clients
    return (Part(multiplier, rounds, (share,)), *first)


def epsilon_of_parts(parts: Sequence[Part], delta: float, distance: float) -> float:
    r"""The \(\varepsilon\) of all messages together.

    Args:
        parts: the messages.
        delta: \(\delta\).
        distance: how far one client or row moves a message, where the noise multiplier is one.
    """
    package = require("dp_accounting", extra="privacy")
    # k Gaussian messages compose to one whose noise is smaller by the factor √k.
    squares = [part.times * (len(part.shares) * part.ratio(distance)) ** 2 for part in parts]
    known = float(package.get_epsilon_gaussian(sum(squares) ** -0.5, delta))
    if known == 0 or not any(part.drawn() for part in parts):
        return known
    # A thousandth of the bound, so that rounding the losses up hardly matters. Drawing participants
    # never weakens the guarantee.
    fine = [step_of(part.ratio(distance), part.shares, part.times, delta) for part in parts]
    step = min(1e-3, known / 1e3, *fine)
    losses = [
        losses_of(part.ratio(distance), part.shares, part.times, step, delta) for part in parts
    ]
    return min(known, max(0.0, composed(losses, step, delta)))


def _distance(adjacency: Adjacency) -> int:
    """How far a client can move a sum of messages that are clipped to norm 1."""
    return 2 if adjacency == "replace" else 1


def _check_delta(delta: Any) -> None:
    check_probability("delta", delta)


def _checked_share(
    rounds: int,
    delta: float,
    participants: int | None,
    clients: int | None,
    adjacency: Adjacency,
    first_message: bool,
) -> float:
    """Check the arguments, and return the share of clients that take part in a round."""
    check_count("rounds", rounds)
    _check_delta(delta)
    check_name("adjacency", adjacency, ("replace", "zero_out"))
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
            f"adjacency: wanted replace if {participants} of {clients} clients are drawn, "
            f"got {adjacency!r}"
        )
    return participants / clients
