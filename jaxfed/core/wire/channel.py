"""The base class of channels, and the bits and bytes of payloads.

A channel encodes a message into a payload and decodes it from that payload alone, whose bits are
counted. For difference coding it may remember earlier messages at both ends; the server then
remembers only aggregates.
"""

import abc
import math
from typing import Any, ClassVar, NamedTuple, Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree, UInt16, UInt32

from jaxfed.core.common.printing import as_call
from jaxfed.core.contract.algorithm import ClientsLike
from jaxfed.linalg.derivatives import with_rule


class Context(NamedTuple):
    """What a channel may know about its client."""

    position: Int[Array, ""]  # among all clients; padding comes last
    weight: Float[Array, ""]  # in a mean
    secret: Key[Array, ""]  # known to all clients, unknown to the server
    round: Int[Array, ""]  # 0 before the first round


class Channel(eqx.Module):
    """Encodes and decodes messages in one direction.

    Its methods are pure functions of one message. A subclass defines `encode` and `decode`; the
    defaults of the other methods suit a channel without memory.
    """

    # Not annotated, so that a channel can replace them by values or by properties.
    cumulative = False
    """Whether decoding a message requires all earlier ones."""
    needs_sum = False
    """Whether one sum over clients must reduce all that it carries."""
    sharers = 1
    """Number of clients that a sum needs for what the channel promises of it."""
    settles: ClassVar[bool] = False
    """Whether a message that stops changing arrives without loss after some rounds."""
    private: ClassVar[bool] = False
    """Whether it hides what a client sends. Such channels are for uplinks only."""

    one_time: ClassVar[bool] = False
    """Whether reusing a key across two runs destroys its protection."""
    factory: ClassVar[str] = ""
    """Name of the function that makes it; empty for the class itself."""

    def __repr__(self) -> str:
        return as_call(self)

    @abc.abstractmethod
    def encode(self, key: Key[Array, ""], message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """The payload, and the sender's next memory."""

    @abc.abstractmethod
    def decode(self, payload: PyTree) -> PyTree:
        """Decode the payload; over clients, the result is reduced as the message would be."""

    # --- optional methods ----------------------------------------------------------------------

    def memory(self, message: PyTree) -> PyTree:
        """The sender's initial memory; None by default.

        Args:
            message: for a cumulative channel, what the receiver already has, or zeros; for other
                channels only its shapes matter.
        """
        del message

    def differentiable(self, decoded: PyTree, message: PyTree, memory: PyTree) -> PyTree:
        """The decoded message with a derivative; by default that of `decode` after `encode`.

        Rounding has no useful derivative: see `straight_through`.

        Args:
            decoded: the result of `decode`.
            message: the original message.
            memory: the sender's memory before.
        """
        del message, memory
        return decoded

    def receive(self, decoded: PyTree, last: PyTree) -> PyTree:
        """The message in its original form; by default the decoded one.

        Args:
            decoded: the decoded message, or the reduction of all clients' decoded messages.
            last: the previous message for a cumulative channel, else None.
        """
        del last
        return decoded

    def check(self, clients: ClientsLike, participants: int | None, message: PyTree) -> None:
        """Refuse runs in which this channel cannot be the uplink.

        Args:
            clients: clients of the run.
            participants: number of clients in each round; None if it varies.
            message: shapes of one message, in its reductions.

        Raises:
            ValueError: says what this channel needs.
        """

    def bind(self, context: Context) -> Self:
        """This channel for one client; by default the same for all clients."""
        del context
        return self

    def noise(self) -> float | None:
        """Standard deviation of its Gaussian noise, relative to the clipping norm of messages.

        The noise is that of single messages, or of their sum if clients share it. None without
        noise.
        """

    def for_start(self) -> "Channel":
        """The channel of the exchange before the rounds, unless the run names another."""
        return self


class Link(eqx.Module):
    """A channel in use, with the memories of both ends.

    Attributes:
        channel: the channel.
        sender: the senders' memory; for the uplink with a leading axis of clients.
        receiver: the last message of the downlink, or of a cumulative uplink; None for any other
            uplink.
    """

    channel: Channel
    sender: PyTree
    receiver: PyTree


def straight_through(value: PyTree, standin: PyTree) -> PyTree:
    """A value that is differentiated as if it were another one.

    Args:
        value: the value; no derivative passes through it.
        standin: arrays of the same shapes and types, which provide the derivatives, such as the
            mean over all draws.

    Source: Bengio, Leonard & Courville (2013), Estimating or propagating gradients through
    stochastic neurons.
    """

    def one(value, standin):
        inexact = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
        return with_rule(value, standin, rule) if inexact else value

    # Apply the rule to itself, for derivatives of every order.
    def rule(value, standin, change):
        return with_rule(value, standin, rule), change

    return jax.tree.map(one, value, standin)


@final
class _Lossless(Channel):
    factory = "lossless"
    settles = True

    def encode(self, key, message, memory):
        del key
        return message, memory

    def decode(self, payload):
        return payload


def lossless() -> Channel:
    """Send the message unchanged, in its own precision; derivatives pass."""
    return _Lossless()


# --- payloads: their bits and bytes --------------------------------------------------------------


class Variable(eqx.Module):
    """A part of a payload of which only the first `used` words are sent.

    Compiled arrays have fixed shapes, so the buffer has the length of the longest message. `used`
    is not sent: a decoder that cannot find the end itself needs it as another part.
    """

    words: UInt16[Array, " capacity"]
    used: UInt32[Array, ""]


def bits(payload: PyTree) -> int | Array:
    """Bits of a payload, from the shapes and types of its arrays.

    Returns:
        An integer; as an array if parts of the payload have variable length.
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
    # Words have 16 bits.
    return sum((2 * part.used for part in parts), start=jnp.uint32(0))


def to_bytes(payload: PyTree) -> bytes:
    """The `bits(payload) / 8` bytes to send, part after part.

    Args:
        payload: concrete arrays, such as those of one `encode` outside of compiled functions.
    """
    return b"".join(
        np.asarray(part.words[: int(part.used)] if isinstance(part, Variable) else part).tobytes()
        for part in _parts(payload)
    )


class Delimited(eqx.Module):
    """A part of a payload whose decoder finds the end of its words itself."""

    @abc.abstractmethod
    def end(self) -> UInt32[Array, ""]:
        """The number of words its decoder reads, whatever follows them."""


def from_bytes(data: bytes, like: PyTree) -> PyTree:
    """Read the payload that `to_bytes` wrote.

    Args:
        data: the bytes.
        like: a payload of the same kind of message, or its shapes (`jax.eval_shape`).

    Returns:
        The payload, of NumPy arrays.

    Raises:
        ValueError: if there are too few bytes, or too many.
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
        # Read all the rest as its words, let the decoder find their end, and return there.
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
