"""What a message goes through on its way, and what that costs.

A channel encodes a message into the payload that really travels, and decodes from nothing but
that payload; bits are counted from the payload. A channel may keep memory at both ends (for
difference coding); the memory of the aggregating end is fed with aggregates only.

There are three: one for the uplinks of the rounds, one for their downlinks, and one for the
exchange before the rounds, the first messages and the first downlink.
"""

import abc
import math
from typing import Any, ClassVar, NamedTuple, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree, UInt16, UInt32

from jaxfed.core.contract.algorithm import ClientsLike
from jaxfed.linalg.derivatives import with_rule


class Context(NamedTuple):
    """What a client knows of its place among the others."""

    position: Int[Array, ""]  # clients that are only there to fill up devices come last
    weight: Float[Array, ""]  # its share in a mean
    secret: Key[Array, ""]  # what all clients have in common and the server has not
    round: Int[Array, ""]  # 0 before the first


class Channel(eqx.Module):
    """One direction of the wire."""

    cumulative: ClassVar[bool] = False
    """Whether a message can only be understood by who has received all earlier ones."""
    settles: ClassVar[bool] = False
    """Whether messages that no longer change arrive, after some rounds, as they are."""
    private: ClassVar[bool] = False
    """Whether it hides what a client sends. It is then for uplinks alone."""

    one_time: ClassVar[bool] = False
    """Whether it hides nothing from who sees two runs with one key."""

    @abc.abstractmethod
    def memory(self, message: PyTree) -> PyTree:
        """The sender's first memory.

        Args:
            message: for a cumulative channel, what the receiver has already, zeros if that is
                nothing of this kind; else only its shapes count.
        """

    @abc.abstractmethod
    def encode(self, key: Key[Array, ""], message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """The payload, and the sender's next memory."""

    @abc.abstractmethod
    def decode(self, payload: PyTree) -> PyTree:
        """What the payload says, from nothing but the payload; reduced like the message."""

    @abc.abstractmethod
    def differentiable(self, decoded: PyTree, message: PyTree, memory: PyTree) -> PyTree:
        """What was decoded, with the derivative that this channel has; see `straight_through`.

        Args:
            decoded: what `decode` gives.
            message: what was sent.
            memory: the sender's memory before.
        """

    @abc.abstractmethod
    def receive(self, decoded: PyTree, last: PyTree) -> PyTree:
        """The message, from the decoded payload or the reduction of many.

        Args:
            decoded: what was decoded.
            last: for a cumulative channel the message before; else anything.
        """

    # --- with defaults -------------------------------------------------------------------------

    def check(self, clients: ClientsLike, participants: int | None, message: PyTree) -> None:
        """Refuse a run in which this channel cannot be the uplink.

        Args:
            clients: whom the run is with.
            participants: how many of them take part in each round; None if that varies.
            message: shapes of one message, and how it is reduced.

        Raises:
            ValueError: saying what this channel needs.
        """

    def bind(self, context: Context) -> Self:
        """This channel at one client's place, where it needs to know that."""
        del context
        return self

    def noise(self) -> float | None:
        """The deviation of its Gaussian noise over the norm that messages are clipped to, if any.

        It is that of single messages, or, where clients share it, of their sum.
        """

    def for_start(self) -> "Channel":
        """What the exchange before the rounds goes through where nothing else is said."""
        return self


class Link(eqx.Module):
    """One direction of a run: its channel, and what the two ends remember.

    For the uplink `sender` has a leading axis of clients and `receiver` is the server's, None
    unless the channel is cumulative. For the downlink `sender` is the server's and `receiver` what
    the clients have, the last message.
    """

    channel: Channel
    sender: PyTree
    receiver: PyTree


def straight_through(value: PyTree, standin: PyTree) -> PyTree:
    """The value, with the derivative of what it stands for.

    Args:
        value: what was computed; no derivative passes through it.
        standin: arrays of the same shapes and types, such as the mean over all draws.

    Source: Bengio, Leonard & Courville (2013), Estimating or propagating gradients through
    stochastic neurons.
    """

    def one(value, standin):
        inexact = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
        return with_rule(value, standin, rule) if inexact else value

    def rule(value, standin, change):
        return with_rule(value, standin, rule), change

    return jax.tree.map(one, value, standin)


class _Lossless(Channel):
    settles = True

    def memory(self, message):
        del message

    def encode(self, key, message, memory):
        del key
        return message, memory

    def decode(self, payload):
        return payload

    def differentiable(self, decoded, message, memory):
        del message, memory
        return decoded

    def receive(self, decoded, last):
        del last
        return decoded


def lossless() -> Channel:
    """The message itself, in its own precision; derivatives pass."""
    return _Lossless()


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
    return fixed_bits(payload) + (8 * variable_bytes(payload) if varies(payload) else 0)


def varies(payload: PyTree) -> bool:
    """Whether a payload has parts of variable length."""
    return any(isinstance(part, Variable) for part in _parts(payload))


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


class Delimited(eqx.Module):
    """A part of a payload whose decoder can tell where its words of variable length end."""

    @abc.abstractmethod
    def end(self) -> UInt32[Array, ""]:
        """How many words its decoder takes; those behind them may be anything."""


def from_bytes(data: bytes, like: PyTree) -> PyTree:
    """The payload that `to_bytes` wrote.

    Args:
        data: what travelled.
        like: a payload of the same kind of message, or its shapes (`jax.eval_shape`).

    Returns:
        The payload, of NumPy arrays.

    Raises:
        ValueError: for too few bytes, or too many.
    """
    view, place = memoryview(data), 0

    def array(like: Any, count: int | None = None) -> np.ndarray:
        nonlocal place
        shape = tuple(like.shape) if count is None else (count,)
        size = math.prod(shape) * like.dtype.itemsize
        if place + size > len(view):
            raise ValueError(
                f"data: wanted at least {place + size} bytes for {shape} of {like.dtype}, got "
                f"{len(view)}"
            )
        found = np.frombuffer(view[place : place + size], np.uint8).view(like.dtype)
        place += size
        return found.reshape(shape)

    def variable(like: Variable, used: int | None = None) -> Variable:
        capacity, width = like.words.shape[0], like.words.dtype.itemsize
        most = min(capacity, (len(view) - place) // width)
        words = np.zeros(capacity, like.words.dtype)
        used = most if used is None else used
        words[:used] = array(like.words, used)
        return Variable(jnp.asarray(words), jnp.uint32(used))

    def delimited(like: Delimited) -> Delimited:
        nonlocal place
        fixed = [array(x) if not isinstance(x, Variable) else None for x in _parts(like)]
        start, structure = place, jax.tree.structure(like, is_leaf=_is_variable)
        (open_end,) = [x for x in _parts(like) if isinstance(x, Variable)]
        rest = variable(open_end)
        whole = [rest if x is None else jnp.asarray(x) for x in fixed]
        used = int(jax.tree.unflatten(structure, whole).end())
        place = start
        exact = variable(open_end, used)
        return jax.tree.unflatten(structure, [exact if x is rest else x for x in whole])

    def one(part: Any) -> Any:
        if isinstance(part, Delimited):
            return delimited(part)
        return variable(part) if isinstance(part, Variable) else array(part)

    known = jax.tree.map(one, like, is_leaf=lambda x: isinstance(x, Delimited | Variable))
    if place != len(view):
        raise ValueError(f"data: wanted {place} bytes, got {len(view)}")
    return known


def _is_variable(part: Any) -> bool:
    return isinstance(part, Variable)


def _parts(payload: PyTree) -> list[Any]:
    return jax.tree.leaves(payload, is_leaf=_is_variable)
