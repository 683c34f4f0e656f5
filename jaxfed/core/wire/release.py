"""What left the clients in a run, for an account of what it tells of them."""

import equinox as eqx
from jaxtyping import Array, Float, Int

from jaxfed.core.contract.participation import Participation
from jaxfed.core.wire.channel import Channel


class Release(eqx.Module):
    """Messages of one kind that clients sent.

    Attributes:
        channel: what each of them went through.
        participation: who sent them.
        bits: of one of them, on average, as far as its length is fixed; 0 where nothing is sent.
        times: how many rounds they were sent in.
        weights: the clients' shares in a mean.
        stateless: whether each depended on its client's data and the broadcasts alone, and not on
            what else the client had sent, or when.
    """

    channel: Channel
    participation: Participation
    bits: int | float = eqx.field(static=True)
    times: int | Int[Array, ""]
    weights: Float[Array, " clients"]
    stateless: bool = eqx.field(static=True)
