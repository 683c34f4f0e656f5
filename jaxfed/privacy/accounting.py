r"""What the noise of `jaxfed.channel.gaussian` guarantees, by the package `dp-accounting`.

For those who use the library. What a server can compute where nothing is guaranteed is in
`jaxfed.privacy.attacks`.
"""

from typing import Any, Literal

from jaxfed._optional import require
from jaxfed.core.checks import check_count, check_flag, check_name, check_number, shown

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
    server that drew them. Leave the numbers out for that one.

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

    Source: Balle & Wang (2018), Theorem 8, where all take part; else Wang, Balle & Kasiviswanathan
    (2019), Theorem 27.
    """
    _check_positive(noise_multiplier=noise_multiplier)
    share = _checked_share(rounds, delta, participants, clients, adjacency, first_message)
    return _epsilon(noise_multiplier, rounds, delta, share, adjacency, first_message)


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
    enough = needed
    while _epsilon(enough / 2, rounds, delta, share, adjacency, first_message) <= epsilon:
        enough /= 2
    low = enough / 2
    while enough / low > 1.001:
        middle = (low * enough) ** 0.5
        if _epsilon(middle, rounds, delta, share, adjacency, first_message) <= epsilon:
            enough = middle
        else:
            low = middle
    return enough


def _epsilon(
    multiplier: float,
    rounds: int,
    delta: float,
    share: float,
    adjacency: Adjacency,
    first_message: bool,
) -> float:
    package = require("dp_accounting", extra="privacy")
    deviation = multiplier / _distance(adjacency)
    # As many messages with this noise are one with so much less.
    known = package.get_epsilon_gaussian(deviation / (rounds + first_message) ** 0.5, delta)
    if share == 1 or known == 0:
        return float(known)
    rdp = require("dp_accounting.rdp", extra="privacy")
    accountant = rdp.RdpAccountant(neighboring_relation=package.NeighboringRelation.REPLACE_ONE)
    event = package.GaussianDpEvent(deviation)
    accountant.compose(package.SampledWithoutReplacementDpEvent(1, share, event), rounds)
    if first_message:  # of everybody
        accountant.compose(event)
    # The bound is loose where there is much noise, and a draw never harms.
    return float(min(known, accountant.get_epsilon(delta)))


def _distance(adjacency: Adjacency) -> int:
    """How far a client can move a sum of messages that are clipped to norm one."""
    return 2 if adjacency == "replace" else 1


def _check_positive(**numbers: Any) -> None:
    for name, value in numbers.items():
        check_number(name, value, "a positive number", lambda x: x > 0)


def _checked_share(
    rounds: int, delta: float, participants: int | None, clients: int | None, adjacency: Adjacency,
    first_message: bool,
) -> float:  # fmt: skip
    """The share of clients that take part, once all that says what is asked is checked."""
    check_count("rounds", rounds)
    check_number("delta", delta, "a number between 0 and 1", lambda x: (x > 0) & (x < 1))
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
