"""What a message goes through on its way, and what that costs.

A channel encodes a message into the payload that really travels, and decodes from nothing but
that payload; bits are counted from the payload. A channel may keep memory at both ends (for
difference coding); the memory of the aggregating end is fed with aggregates only.

Channels are for the rounds. The one exchange before them, the first uplink and the first downlink,
is exact whatever the channel; channels that are there to hide what a client sends therefore refuse
an algorithm that sends anything before its rounds.
"""

import abc
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree, UInt16, UInt32

from jaxfed.core.aggregation import Aggregation
from jaxfed.core.clients import Clients


class Seat(NamedTuple):
    """What a client knows of its place among the others."""

    position: Int[Array, ""]  # clients that are only there to fill up devices come last
    share: PyTree[Float[Array, ""]]  # of each part of its message in the aggregate
    secret: Key[Array, ""]  # what all clients have in common and the server has not


class Channel(eqx.Module):
    """One direction of the wire."""

    @property
    def cumulative(self) -> bool:
        """Whether a message can only be understood by who has received all earlier ones."""
        return False

    @property
    def private(self) -> bool:
        """Whether it hides what a client sends. It is then for uplinks and has no first message."""
        return False

    @property
    def adds_up(self) -> bool:
        """Whether only the sum of all clients' decoded payloads tells anything.

        Such a channel is for sums and means, and multiplies a message by its share itself.
        """
        return False

    def check(self, clients: Clients, participants: int | None, rules: PyTree[Aggregation]) -> None:
        """Refuse a run in which this channel cannot be the uplink.

        Args:
            clients: whom the run is with.
            participants: how many of them take part in each round; None if that varies.
            rules: how the messages are aggregated.

        Raises:
            ValueError: saying what this channel needs.
        """

    def seated(self, memory: PyTree, seat: Seat) -> PyTree:
        """A client's first memory, once it knows its place."""
        del seat
        return memory

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


class Variable(eqx.Module):
    """A part of a payload of which only the first `used` words travel.

    The rest is there because compiled arrays have fixed shapes. What has no other way to tell where
    its words end must send their number too; `used` is not sent.
    """

    words: UInt16[Array, " capacity"]
    used: UInt32[Array, ""]


def bits(payload: PyTree) -> int | Array:
    """Bits of a payload, counted from its arrays' shapes and types, and from what of them is used.

    Returns:
        A whole number; an array of one if parts of the payload are of variable length.
    """
    varying = any(isinstance(part, Variable) for part in _parts(payload))
    return fixed_bits(payload) + (8 * variable_bytes(payload) if varying else 0)


def fixed_bits(payload: PyTree) -> int:
    """Bits of the parts of fixed length."""
    return sum(
        math.prod(part.shape) * part.dtype.itemsize * 8
        for part in _parts(payload)
        if not isinstance(part, Variable)
    )


def variable_bytes(payload: PyTree) -> UInt32[Array, ""]:
    """Bytes of the parts of variable length."""
    parts = [part for part in _parts(payload) if isinstance(part, Variable)]
    return sum((2 * part.used for part in parts), start=jnp.uint32(0))


def to_bytes(payload: PyTree) -> bytes:
    """What travels, one part after the other; it has `bits(payload) / 8` bytes.

    Args:
        payload: concrete arrays, as of one `encode` outside of compiled functions.
    """
    return b"".join(
        np.asarray(part.words[: int(part.used)] if isinstance(part, Variable) else part).tobytes()
        for part in _parts(payload)
    )


def _parts(payload: PyTree) -> list[Any]:
    return jax.tree.leaves(payload, is_leaf=lambda part: isinstance(part, Variable))
