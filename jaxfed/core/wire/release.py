"""Records the messages that clients sent in a run, for privacy accounting."""

import equinox as eqx
from jaxtyping import Array, Float, Int

from jaxfed.core.clients.guarantee import Guarantee
from jaxfed.core.contract.participation import Participation
from jaxfed.core.wire.channel import Channel


class Release(eqx.Module):
    """Messages of one kind, such as first messages or those of the rounds.

    Attributes:
        channel: the channel of the messages.
        participation: which clients sent them.
        bits: mean length of one message's parts of fixed length; 0 if nothing was sent.
        times: number of rounds in which they were sent.
        weights: the clients' weights in a mean.
        stateless: whether a message depends only on its client's data and the broadcasts, not on
            the client's earlier messages.
        guarantee: of the noise in the data that the messages were computed from, if it was added
            by `jaxfed.privacy.release_moments`.
    """

    channel: Channel
    participation: Participation
    bits: int | float = eqx.field(static=True)
    times: int | Int[Array, ""]
    weights: Float[Array, " clients"]
    stateless: bool = eqx.field(static=True)
    guarantee: Guarantee | None = eqx.field(static=True, default=None)
