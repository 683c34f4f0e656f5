"""What a message goes through on its way, and what that costs.

A channel encodes a message into the payload that really travels, and decodes from nothing but
that payload; bits are counted from the payload. A channel may keep memory at both ends (for
difference coding); the memory of the aggregating end is fed with aggregates only.

Channels are for the rounds. The one exchange before them, the first uplink and the first downlink,
is exact whatever the channel.
"""

import abc
import math

import equinox as eqx
import jax
from jaxtyping import Array, Key, PyTree


class Channel(eqx.Module):
    """One direction of the wire."""

    @property
    def cumulative(self) -> bool:
        """Whether a message can only be understood by who has received all earlier ones."""
        return False

    @abc.abstractmethod
    def memory(self, message: PyTree) -> PyTree:
        """The first memory of either end.

        Args:
            message: for a cumulative channel, what both ends have from the exact exchange before
                the rounds, zeros if that is nothing of this kind; else only its shapes count.
        """

    @abc.abstractmethod
    def encode(self, key: Key[Array, ""], message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """The payload, and the sender's next memory."""

    @abc.abstractmethod
    def decode(self, payload: PyTree) -> PyTree:
        """What the payload says, from nothing but the payload."""

    @abc.abstractmethod
    def receive(self, decoded: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """The message, from the decoded payload or the mean of many, and the next memory."""


class _Lossless(Channel):
    def memory(self, message):
        del message
        return ()

    def encode(self, key, message, memory):
        del key
        return message, memory

    def decode(self, payload):
        return payload

    def receive(self, decoded, memory):
        return decoded, memory


def lossless() -> Channel:
    """The message itself, in its own precision."""
    return _Lossless()


def pair(channel: Channel | tuple[Channel, Channel]) -> tuple[Channel, Channel]:
    """The uplink's and the downlink's channel, from one for both or from the two.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(channel, Channel):
        return channel, channel
    if (
        isinstance(channel, tuple)
        and len(channel) == 2
        and all(isinstance(way, Channel) for way in channel)
    ):
        return channel
    raise ValueError(f"channel: wanted a channel or a pair (uplink, downlink), got {channel!r}")


def bits(payload: PyTree) -> int:
    """Bits of a payload, counted from its arrays' shapes and types."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize * 8 for leaf in jax.tree.leaves(payload))
