"""Entropy coding of symbols, in hardly more bits than their entropy.

It uses asymmetric numeral systems (rANS) with the symbol frequencies of the message, which are
sent with it. Several independent coders, the lanes, take turns at the symbols, so that encoding and
decoding are scans of at most `_STEPS` steps for any length, and run under `jit` and `vmap`.

Source: Duda (2013), Asymmetric numeral systems; Giesen (2014), Interleaved entropy coders.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt8, UInt16, UInt32

from jaxfed.core.wire.channel import Delimited, Variable

_STEPS = 1024  # each further lane costs 16 bits
_PRECISION = 12  # frequencies are whole multiples of 2^-12
_LOWEST = 1 << 16  # a coder's state is from here to 2^32; it emits 16 bits at a time


class Stream(Delimited):
    """Coded symbols. The decoder knows their number and the number of kinds."""

    frequencies: UInt16[Array, " kinds_minus_1"]  # their sum with the last one is 2^12
    states: UInt32[Array, " lanes"]
    words: Variable

    def end(self) -> UInt32[Array, ""]:
        """The number of words its decoder reads."""
        count, kinds = len(self.words.words), len(self.frequencies) + 1
        return _decoded(self, count, kinds)[1]


def encode_symbols(codes: UInt8[Array, " n"], kinds: int) -> Stream:
    """Encode symbols: integers below `kinds`, which is at most 256."""
    count = len(codes)
    lanes, steps = _layout(count)
    frequencies = _frequencies(codes, kinds)
    first = jnp.cumsum(frequencies) - frequencies
    # All lanes take equally many steps; those at the padding leave the coder's state unchanged.
    symbols = jnp.pad(codes, (0, steps * lanes - count)).reshape(steps, lanes)
    real = (jnp.arange(steps * lanes) < count).reshape(steps, lanes)

    def step(state, place):
        symbol, real = place
        frequency, start = frequencies[symbol], first[symbol]
        # Every other kind has at least one of the 2^12, so the bound fits in 32 bits. A state above
        # it is too large to take this symbol; one word less makes it small enough, so no symbol
        # emits two.
        full = real & (state >= frequency << (32 - _PRECISION))
        word = state.astype(jnp.uint16)
        low = jnp.where(full, state >> 16, state)
        high = (low // frequency << _PRECISION) + low % frequency + start
        return jnp.where(real, high, state), (full, word)

    # A coder's state is a stack: the decoder gets back last what was encoded first. So encode
    # backwards, and both the symbols and the words lie in the order in which the decoder needs
    # them.
    blank = jnp.full(lanes, _LOWEST, jnp.uint32)
    states, (full, words) = lax.scan(step, blank, (symbols, real), reverse=True)
    full, words = full.reshape(-1), words.reshape(-1)
    # At most one word per symbol, so the buffer has room for `count`; steps without a word write
    # beyond its end, which drops them.
    place = jnp.where(full, jnp.cumsum(full) - 1, count)
    buffer = jnp.zeros(count, jnp.uint16).at[place].set(words, mode="drop")
    used = full.sum(dtype=jnp.uint32)
    return Stream(frequencies[:-1].astype(jnp.uint16), states, Variable(buffer, used))


def decode_symbols(stream: Stream, count: int, kinds: int) -> UInt8[Array, " n"]:
    """Inverse of `encode_symbols`, for `count` symbols."""
    return _decoded(stream, count, kinds)[0]


@partial(jax.jit, static_argnums=(1, 2))
def _decoded(
    stream: Stream, count: int, kinds: int
) -> tuple[UInt8[Array, " n"], UInt32[Array, ""]]:
    """The symbols, and the number of words read for them."""
    lanes, steps = _layout(count)
    frequencies = stream.frequencies.astype(jnp.uint32)
    frequencies = jnp.append(frequencies, (1 << _PRECISION) - frequencies.sum(dtype=jnp.uint32))
    first = jnp.cumsum(frequencies) - frequencies
    # The symbol for each of the 2^12 values of a state's low bits.
    starts = jnp.zeros(1 << _PRECISION, jnp.int32).at[first[1:]].add(1)
    symbol_at = jnp.cumsum(starts).astype(jnp.uint8)
    real = (jnp.arange(steps * lanes) < count).reshape(steps, lanes)

    def step(carry, real):
        state, read = carry
        place = state & ((1 << _PRECISION) - 1)
        symbol = symbol_at[place]
        low = frequencies[symbol] * (state >> _PRECISION) + place - first[symbol]
        empty = real & (low < _LOWEST)
        # Lanes that need no word read one as well, at any place; it is not used.
        word = stream.words.words[read + jnp.cumsum(empty) - 1].astype(jnp.uint32)
        filled = jnp.where(empty, low << 16 | word, low)
        read = read + empty.sum(dtype=jnp.int32)
        return (jnp.where(real, filled, state), read), symbol

    (_, read), symbols = lax.scan(step, (stream.states, jnp.int32(0)), real)
    return symbols.reshape(-1)[:count], read.astype(jnp.uint32)


def _layout(count: int) -> tuple[int, int]:
    """The numbers of lanes and steps."""
    lanes = -(-count // _STEPS)
    return lanes, -(-count // lanes)


def _frequencies(codes: UInt8[Array, " n"], kinds: int) -> UInt32[Array, " kinds"]:
    """The symbols' frequencies as positive multiples of 2^-12 that sum to one."""
    counts: Int[Array, " kinds"] = jax.vmap(lambda k: (codes == k).sum())(jnp.arange(kinds))
    total = 1 << _PRECISION
    # Give each symbol one, since rounding to zero would make rare ones impossible to encode, and
    # share the others in proportion to the counts. The most frequent symbol gets the remainder,
    # where it costs least.
    shares = (counts / len(codes) * (total - kinds)).astype(jnp.uint32)
    rest = (total - kinds) - shares.sum(dtype=jnp.uint32)
    return (1 + shares).at[jnp.argmax(counts)].add(rest)
