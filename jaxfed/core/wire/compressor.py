"""The base class of compressors: channels that encode each array of a message in fewer bits.

Single numbers (a step size, an objective) and integers are sent unchanged. Payloads are packed: `n`
codes of `b` bits take `ceil(n b / 8)` bytes.

Payloads have no derivative. A decoded message has the straight-through derivative of its mean. For
`quantize` with random rounding and for `random_k`, that is the mean over all draws; for the other
compressors, which are biased, it is the usual estimator.
"""

import abc
import math
from dataclasses import replace
from functools import partial
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Key, PyTree

from jaxfed._checks import refuse
from jaxfed.core.common.returned import returned
from jaxfed.core.wire import calls
from jaxfed.core.wire.channel import Channel, straight_through


class Payload(eqx.Module):
    """What is sent in place of one array, as arrays in fields of a subclass.

    Attributes:
        shape: the array's shape. Both ends know shape and type, which take no bits.
        dtype: the array's type.
    """

    shape: tuple[int, ...] = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    @property
    def size(self) -> int:
        """The number of entries of the array."""
        return math.prod(self.shape)

    @property
    def like(self) -> jax.ShapeDtypeStruct:
        """The array's shape and type."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


class Compressor(Channel):
    """A channel without memory that compresses one array at a time.

    A subclass defines `compress`, `decompress` and `mean`: pure functions of one array, whose
    results have shapes that depend only on the array's shape.
    """

    @final
    def encode(self, key: Key[Array, ""], message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """The message with its arrays compressed."""
        # Rounding has no useful derivative; `differentiable` provides one.
        leaves, structure = jax.tree.flatten(lax.stop_gradient(message))
        keys = jax.random.split(key, max(len(leaves), 1))
        packed = [
            compressed(self, keys[i], leaf) if compressible(leaf) else leaf
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, packed), memory

    @final
    def decode(self, payload: PyTree) -> PyTree:
        """The message with its arrays decompressed."""
        return jax.tree.map(
            lambda x: decompressed(self, x) if isinstance(x, Payload) else x,
            payload,
            is_leaf=lambda x: isinstance(x, Payload),
        )

    @final
    def differentiable(self, decoded: PyTree, message: PyTree, memory: PyTree) -> PyTree:
        """The decoded message, with the derivative of its mean."""
        del memory
        mean = jax.tree.map(lambda x: mean_of(self, x) if compressible(x) else x, message)
        return straight_through(decoded, mean)

    @final
    def through(self, key: Key[Array, ""], message: PyTree) -> tuple[PyTree, PyTree]:
        """The payload, and its decoded message with a derivative."""
        payload, _ = self.encode(key, message, None)
        return payload, self.differentiable(self.decode(payload), message, None)

    @abc.abstractmethod
    def compress(self, key: Key[Array, ""], array: Float[Array, "..."]) -> Payload:
        """Compress one array.

        Args:
            key: random key, different for each array, client and round.
            array: at least two floating-point numbers, of any shape.
        """

    @abc.abstractmethod
    def decompress(self, payload: Payload) -> Float[Array | np.ndarray, "..."]:
        """Decompress a payload; from bytes, its arrays are NumPy arrays."""

    @abc.abstractmethod
    def mean(self, array: Float[Array, "..."]) -> Float[Array, "..."]:
        """The mean of the decoded array, or what replaces it in derivatives."""

    def unscaled(self) -> "Compressor":
        """The compressor as memory around it needs it; by default itself.

        What it loses must be less than the array, so a compressor that enlarges entries to be
        unbiased returns one that does not.
        """
        return self


def compressible(leaf: Array) -> bool:
    """Whether an array is compressed: it has two or more floating-point numbers of over a byte."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1 and leaf.size > 1


# --- call a compressor's functions and check their results while they are traced -----------------


def compressed(compressor: Compressor, key: Key[Array, ""], array: Float[Array, "..."]) -> Payload:
    """The payload of an array."""
    payload = compressor.compress(key, array)
    returned(compressor, "compress", payload, Payload, "a jaxfed.channel.Payload")
    returned(compressor, "compress", payload.like, array, "the array's shape and type, {}")
    return payload


def decompressed(compressor: Compressor, payload: Payload) -> Float[Array | np.ndarray, "..."]:
    """The array of a payload."""
    array = compressor.decompress(payload)
    return returned(compressor, "decompress", array, payload.like, "{} as was sent")


def mean_of(compressor: Compressor, array: Float[Array, "..."]) -> Float[Array, "..."]:
    """The array that is differentiated in place of the decoded one."""
    return returned(compressor, "mean", compressor.mean(array), array)


# --- channels that are not compressors -----------------------------------------------------------


class _Whole(Payload):
    payload: PyTree  # of the channel


class _OneByOne(Compressor):
    """A channel that is not a compressor, applied to one array at a time."""

    channel: Channel

    def bind(self, context):
        return replace(self, channel=calls.bind(self.channel, context))

    def compress(self, key, array):
        memory = calls.memory(self.channel, array)
        payload, _ = calls.encode(self.channel, key, array, memory)
        # Only for the checks, whose messages must name the channel's own functions.
        jax.eval_shape(partial(calls.decode, self.channel), payload, array, memory)
        return _Whole(array.shape, array.dtype, payload)

    def decompress(self, payload):
        assert isinstance(payload, _Whole)
        return self.channel.receive(self.channel.decode(payload.payload), None)

    def mean(self, array):
        # Any draw will do, since only the derivative of the mean is used.
        memory = self.channel.memory(array)
        payload, _ = self.channel.encode(jax.random.key(0), array, memory)
        return self.channel.receive(calls.decode(self.channel, payload, array, memory), None)

    def for_start(self):
        return self.channel.for_start()


def checked_compressor(channel: Channel, argument: str = "compressor") -> Compressor:
    """The channel as a compressor; if it is not one, it is applied to one array at a time.

    Raises:
        ValueError: if it has memory, hides messages or is not a channel.
    """
    if isinstance(channel, Compressor):
        return channel
    if (
        not isinstance(channel, Channel)
        or channel.cumulative
        or channel.private
        or jax.tree.leaves(channel.memory(jnp.zeros(2)))
    ):
        wanted = "a channel without memory that hides nothing, such as quantize(3)"
        raise refuse(argument, wanted, channel)
    return _OneByOne(channel)
