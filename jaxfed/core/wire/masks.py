"""Pairwise masks, which cancel in the sum over all clients."""

import abc

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Key, PyTree, UInt32

from jaxfed.core.wire.channel import Channel


class MaskedChannel(Channel):
    """A channel that hides messages under masks that cancel in the sum.

    Its payloads are integers, summed modulo 2^32. Within one program the channel adds the masks
    itself. On separate machines, `jaxfed.deploy` uses the unmasked channel and adds masks from a
    key agreement to the numbers of a payload.
    """

    @abc.abstractmethod
    def unmasked(self) -> Channel:
        """The same channel without masks."""

    @property
    @abc.abstractmethod
    def largest(self) -> float:
        """The largest magnitude of a number that it does not clip."""

    @property
    @abc.abstractmethod
    def step(self) -> float | None:
        """The distance between numbers to which it rounds a message; None if it changes more."""

    @abc.abstractmethod
    def numbers(self, payload: PyTree) -> UInt32[np.ndarray, " n"]:
        """All numbers of a payload."""

    @abc.abstractmethod
    def clipped(self, payload: PyTree) -> int:
        """How many entries of a payload without masks are at the bound, so probably clipped."""

    @abc.abstractmethod
    def with_numbers(self, payload: PyTree, numbers: UInt32[np.ndarray, " n"]) -> PyTree:
        """The payload with its numbers replaced."""


def without_masks(channel: Channel) -> Channel:
    """The channel without masks of its own."""
    return channel.unmasked() if isinstance(channel, MaskedChannel) else channel


def pairwise_mask(
    key: Key[Array, ""], position: Int[Array, ""], size: int, *, clients: int, reach: int
) -> UInt32[Array, " n"]:
    """The sum of all masks of one client, modulo 2^32.

    Clients form a ring. Each shares a mask with every client at most `reach` places away; it adds
    the masks shared with later clients and subtracts those shared with earlier ones.

    Args:
        key: shared by all clients, different for each array and round.
        position: the client's place in the ring.
        size: number of entries.
        clients: number of clients in the ring.
        reach: largest distance between partners.
    """

    def shared(first, second):
        # The order of the two matters: partners on both sides of each other, such as the two of a
        # ring of two, would otherwise share equal masks, which cancel at once.
        pair = jax.random.fold_in(jax.random.fold_in(key, first), second)
        return jax.random.bits(pair, (size,), jnp.uint32)

    def add_pair(total, distance):
        # If `reach` is half of an even number of clients, the farthest partner is on both sides;
        # the two share a mask each way.
        after = (position + distance) % clients
        before = (position - distance) % clients
        # Unsigned integers wrap around, which is arithmetic modulo 2^32: masks cancel exactly.
        return total + shared(position, after) - shared(before, position), None

    # Add one pair at a time, since all masks together may take more memory than the message.
    return lax.scan(add_pair, jnp.zeros(size, jnp.uint32), jnp.arange(1, reach + 1))[0]
