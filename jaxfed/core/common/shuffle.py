"""Evaluates random permutations at some positions, without sorting or storing them whole."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, UInt32

ROUNDS = 16  # enough to make all permutations of even five items equally frequent


def shuffled(
    keys: Key[Array, " orders"], places: Int[Array, "orders places"], count: Int[Array, ""]
) -> Int[Array, "orders places"]:
    """The items at some positions of random permutations of `count` items, one per key.

    A Feistel network on pairs of numbers up to about the square root of `count` permutes slightly
    more than `count` numbers; results beyond `count` go through the network again.

    Source: Black & Rogaway (2002), Ciphers with arbitrary finite domains, generalized Feistel
    cipher and cycle walking.

    Args:
        keys: random keys; equal keys give the same permutation.
        places: positions from 0 to `count` - 1.
        count: number of items, from 1 to 2^30.
    """
    bits = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)
    seeds = bits[:, :1], bits[:, 1:]
    count = count.astype(jnp.uint32)
    width, height = _sides(count)

    def once(x):
        # Division is slow, so do only one per walk.
        high = x // width
        low = x - high * width
        for number in range(ROUNDS):
            if number % 2:
                high = _added(high, _scrambled(low, seeds, number), height)
            else:
                low = _added(low, _scrambled(high, seeds, number), width)
        return high * width + low

    def walk(state):
        x, found = state
        x = jnp.where(found, x, once(x))
        return x, x < count

    start = places.astype(jnp.uint32), jnp.zeros(places.shape, bool)
    x, _ = jax.lax.while_loop(lambda state: ~state[1].all(), walk, start)
    return x.astype(jnp.int32)


def _sides(count: UInt32[Array, ""]) -> tuple[UInt32[Array, ""], UInt32[Array, ""]]:
    """The sides of a nearly square rectangle with at least, and few more than, `count` cells."""
    least = jnp.ceil(jnp.sqrt(count.astype(jnp.float32))).astype(jnp.uint32)
    widths = least + jnp.arange(16, dtype=jnp.uint32)
    heights = (count + widths - 1) // widths
    # At most half as wide again as a square, so that both sides stay below 2^16, as `_added` needs.
    beyond = jnp.where(2 * widths <= 3 * least, widths * heights - count, jnp.uint32(2**32 - 1))
    best = jnp.argmin(beyond)
    return widths[best], heights[best]


def _added(x: UInt32[Array, "..."], scrambled: UInt32[Array, "..."], size: UInt32[Array, ""]):
    """Add a number below `size`, modulo `size`."""
    # The upper 16 bits, scaled to the range by a multiplication instead of a slow remainder. The
    # product fits in 32 bits, since a side is below 2^16.
    total = x + ((scrambled >> 16) * size >> 16)
    return jnp.where(total >= size, total - size, total)


def _scrambled(x: UInt32[Array, "..."], seeds, number: int) -> UInt32[Array, "..."]:
    """Pseudorandom bits from a number, seeds and the round.

    Source: the constants are those of MurmurHash3's finalizer (Appleby, public domain).
    """
    x = (x + jnp.uint32(number * 0x9E3779B9 % 2**32)) ^ seeds[0]
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13) ^ seeds[1]) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
