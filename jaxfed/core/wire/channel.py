"""A channel: what a message becomes on its way, and the bits of what travels.

A channel encodes a message into a payload and decodes from nothing but that payload, whose bits are
counted. It may remember earlier messages at both ends, for difference coding; the server then
remembers aggregates only.
"""

import abc
import math
from typing import Any, ClassVar, NamedTuple, Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree, UInt16, UInt32

from jaxfed.core.contract.algorithm import ClientsLike
from jaxfed.linalg.derivatives import with_rule


class Context(NamedTuple):
    """What a channel may know of the client that it is bound to."""

    position: Int[Array, ""]  # among all clients; copies that only fill up devices come last
    weight: Float[Array, ""]  # its share in a mean
    secret: Key[Array, ""]  # known to all clients and not to the server
    round: Int[Array, ""]  # 0 before the first


class Channel(eqx.Module):
    """What messages go through in one direction.

    Pure functions of one message. A subclass writes `encode` and `decode`; the other functions have
    defaults, for a channel without memory.
    """

    cumulative: ClassVar[bool] = False
    """Whether decoding a message requires all earlier ones."""
    settles: ClassVar[bool] = False
    """Whether messages that stop changing arrive without loss after some rounds."""
    private: ClassVar[bool] = False
    """Whether it hides what a client sends. It is then for uplinks alone."""

    one_time: ClassVar[bool] = False
    """Whether using a key in two runs destroys its protection."""

    @abc.abstractmethod
    def encode(self, key: Key[Array, ""], message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """The payload, and the sender's next memory."""

    @abc.abstractmethod
    def decode(self, payload: PyTree) -> PyTree:
        """What the payload says; over clients it is reduced as the message would be."""

    # --- with defaults -------------------------------------------------------------------------

    def memory(self, message: PyTree) -> PyTree:
        """The sender's first memory; None by default.

        Args:
            message: for a cumulative channel, what the receiver has already, or zeros. For any
                other, only its shapes count.
        """
        del message

    def differentiable(self, decoded: PyTree, message: PyTree, memory: PyTree) -> PyTree:
        """What was decoded, with a derivative; by default that of `decode` after `encode`.

        Where these round, they have none: see `straight_through`.

        Args:
            decoded: what `decode` returned.
            message: what was sent.
            memory: the sender's memory before.
        """
        del message, memory
        return decoded

    def receive(self, decoded: PyTree, last: PyTree) -> PyTree:
        """The message, like the one that was sent; by default what was decoded.

        Args:
            decoded: what was decoded, or the reduction of what all clients' payloads say.
            last: the message before, for a cumulative channel; None for any other.
        """
        del last
        return decoded

    def check(self, clients: ClientsLike, participants: int | None, message: PyTree) -> None:
        """Refuse runs in which this channel cannot be the uplink.

        Args:
            clients: the clients of the run.
            participants: how many of them take part in each round; None if that varies.
            message: shapes of one message, in its reductions.

        Raises:
            ValueError: saying what this channel needs.
        """

    def bind(self, context: Context) -> Self:
        """This channel for one client; by default all clients have the same."""
        del context
        return self

    def noise(self) -> float | None:
        """Standard deviation of its Gaussian noise over the norm that messages are clipped to.

        That of single messages, or of their sum where clients share the noise. None without noise.
        """

    def for_start(self) -> "Channel":
        """The channel of the exchange before the rounds, unless the run names another."""
        return self


class Link(eqx.Module):
    """A channel in use, with the memories of its two ends.

    Attributes:
        channel: what messages go through.
        sender: the senders' memory; for the uplink with a leading axis of clients.
        receiver: the last message: of the uplink only where the channel is cumulative, else None;
            of the downlink always.
    """

    channel: Channel
    sender: PyTree
    receiver: PyTree


def straight_through(value: PyTree, standin: PyTree) -> PyTree:
    """A value that is differentiated as if it were another.

    Args:
        value: what was computed; no derivative passes through it.
        standin: arrays of the same shapes and types, such as the mean over all draws, whose
            derivatives the result has.

    Source: Bengio, Leonard & Courville (2013), Estimating or propagating gradients through
    stochastic neurons.
    """

    def one(value, standin):
        inexact = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
        return with_rule(value, standin, rule) if inexact else value

    # The rule is applied to itself, so that there are derivatives of every order.
    def rule(value, standin, change):
        return with_rule(value, standin, rule), change

    return jax.tree.map(one, value, standin)


@final
class _Lossless(Channel):
    settles = True

    def encode(self, key, message, memory):
        del key
        return message, memory

    def decode(self, payload):
        return payload


def lossless() -> Channel:
    """The message itself, in its own precision; derivatives pass."""
    return _Lossless()


# --- payloads: their bits and bytes --------------------------------------------------------------


class Variable(eqx.Module):
    """A part of a payload of which only the first `used` words travel.

    Compiled arrays have fixed shapes, so that the buffer is as long as the longest message. `used`
    does not travel: a decoder that cannot find the end by itself needs it as another part.
    """

    words: UInt16[Array, " capacity"]
    used: UInt32[Array, ""]


def bits(payload: PyTree) -> int | Array:
    """Bits of a payload, from the shapes and types of its arrays.

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
    """The `bits(payload) / 8` bytes that travel, one part after the other.

    Args:
        payload: concrete arrays, as of one `encode` outside of compiled functions.
    """
    return b"".join(
        np.asarray(part.words[: int(part.used)] if isinstance(part, Variable) else part).tobytes()
        for part in _parts(payload)
    )


class Delimited(eqx.Module):
    """A part of a payload whose decoder finds the end of its words by itself."""

    @abc.abstractmethod
    def end(self) -> UInt32[Array, ""]:
        """How many words its decoder reads, whatever follows them."""


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
        # Read all that is left as its words, ask the decoder for their end, and go back there.
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
