"""Packs integers of few bits into bytes."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8, UInt32


def grouping(symbols: int) -> tuple[int, int]:
    """How many symbols to pack together, and into how many bits, at most 8.

    This is the smallest group with the fewest bits per symbol: 8 kinds of symbols one by one into 3
    bits, 5 kinds in threes into 7.
    """
    # A logarithm that is rounded up must not cost a bit.
    groups = [(k, math.ceil(k * math.log2(symbols) - 1e-12)) for k in range(1, 9)]
    return min((g for g in groups if g[1] <= 8), key=lambda g: (g[1] / g[0], g[0]))


def pack_symbols(codes: UInt8[Array, " n"], symbols: int) -> UInt8[Array, " bytes"]:
    """Pack integers below `symbols` into `ceil(groups * width / 8)` bytes."""
    together, width = grouping(symbols)
    if together > 1:
        parts = jnp.pad(codes, (0, -len(codes) % together)).reshape(together, -1)
        codes = _grouped(list(parts), symbols)
    return _pack(codes, width)


def unpack_symbols(
    packed: UInt8[Array | np.ndarray, " bytes"], count: int, symbols: int
) -> UInt8[Array, " n"]:
    """Inverse of `pack_symbols`, for `count` codes."""
    together, width = grouping(symbols)
    codes = _unpack(packed, -(-count // together), width)
    if together > 1:
        codes = _separated(codes, symbols, together)[:count]
    return codes


def stays_in_rows(shape: tuple[int, ...], symbols: int) -> bool:
    """Whether the symbols of each byte come from different rows of an array of this shape.

    A byte takes one symbol from each of several equal parts of the entries, which must be whole
    rows.
    """
    together, width = grouping(symbols)
    return len(shape) > 0 and shape[0] % (together * (8 if width < 8 else 1)) == 0


def pack_rows(codes: UInt8[Array, "d ..."], symbols: int) -> UInt8[Array, " bytes"]:
    """The bytes of `pack_symbols`, for an array that satisfies `stays_in_rows`.

    A TPU stores arrays in tiles; flattening one takes several times as long as packing.
    """
    together, width = grouping(symbols)
    if together > 1:
        codes = _grouped(jnp.split(codes, together), symbols)
    if width < 8:
        codes = jnp.concatenate(_bytes(jnp.split(codes, 8), width))
    return codes.reshape(-1)


def unpack_rows(
    packed: UInt8[Array | np.ndarray, " bytes"], shape: tuple[int, ...], symbols: int
) -> UInt8[Array, "d ..."]:
    """Inverse of `pack_rows`, for an array of this shape."""
    together, width = grouping(symbols)
    codes = jnp.asarray(packed).reshape(-1, *shape[1:])
    if width < 8:
        codes = jnp.concatenate(_codes(jnp.split(codes, width), width))
    if together > 1:
        codes = _separated(codes, symbols, together)
    return codes


def _grouped(parts: list[Array], symbols: int) -> Array:
    """One number per group of symbols, which are its digits."""
    return sum((x * jnp.uint8(symbols**i) for i, x in enumerate(parts[1:], 1)), start=parts[0])


def _separated(codes: Array, symbols: int, together: int) -> Array:
    """Inverse of `_grouped`, with the parts one after another."""
    powers = [jnp.uint8(symbols**i) for i in range(together)]
    return jnp.concatenate([codes // power % jnp.uint8(symbols) for power in powers])


def pack_wide(numbers: UInt32[Array, " n"], width: int) -> UInt8[Array, " bytes"]:
    """Pack the lowest `width` bits, up to 32, of integers: all first bytes, then the next."""
    return jnp.concatenate(
        [
            _pack((numbers >> low).astype(jnp.uint8) & jnp.uint8(2**some - 1), some)
            for low, some in _pieces(width)
        ]
    )


def unpack_wide(
    packed: UInt8[Array | np.ndarray, " bytes"], count: int, width: int
) -> UInt32[Array, " n"]:
    """Inverse of `pack_wide`, for `count` numbers."""
    ends = np.cumsum([-(-count * some // 8) for _, some in _pieces(width)])
    parts = jnp.split(packed, ends[:-1])
    return sum(
        (
            _unpack(part, count, some).astype(jnp.uint32) << low
            for part, (low, some) in zip(parts, _pieces(width), strict=True)
        ),
        start=jnp.zeros(count, jnp.uint32),
    )


def _pieces(width: int) -> list[tuple[int, int]]:
    """The bytes of a number of `width` bits: the first bit and the number of bits of each."""
    return [(low, min(8, width - low)) for low in range(0, width, 8)]


# Eight codes of `width` bits fill `width` bytes exactly. The k-th code of every group comes from
# the k-th eighth of the array, so that all operations are on long rows. Do not pack an empty
# remainder: on machines with one CPU core, jaxlib (up to 0.11 at least) cannot compile programs
# with both operations on empty arrays and matrix decompositions.
def _pack(codes: UInt8[Array, " n"], width: int) -> UInt8[Array, " bytes"]:
    if width == 8:
        return codes
    groups, more = divmod(len(codes), 8)
    main = jnp.stack(_bytes(codes[: 8 * groups].reshape(8, groups), width)).reshape(-1)
    if not more:
        return main
    rest = codes[8 * groups :]
    last = jnp.stack(_bytes(jnp.pad(rest, (0, 8 - len(rest))), width))
    return jnp.concatenate([main, last[: -(-len(rest) * width // 8)]])


def _unpack(
    packed: UInt8[Array | np.ndarray, " bytes"], count: int, width: int
) -> UInt8[Array, " n"]:
    if width == 8:
        return jnp.asarray(packed)
    groups, more = divmod(count, 8)
    main = jnp.stack(_codes(packed[: groups * width].reshape(width, groups), width)).reshape(-1)
    if not more:
        return main
    rest = packed[groups * width :]
    last = jnp.stack(_codes(jnp.pad(rest, (0, width - len(rest))), width))
    return jnp.concatenate([main, last[: count - 8 * groups]])


def _bytes(codes: Sequence[Array] | Array, width: int) -> list[Array]:
    """The bytes of eight codes of `width` bits."""
    rows = [jnp.zeros_like(codes[0])] * width
    for place in range(8):
        byte, offset = divmod(place * width, 8)
        rows[byte] = rows[byte] | (codes[place] << jnp.uint8(offset))
        if offset + width > 8:
            rows[byte + 1] = rows[byte + 1] | (codes[place] >> jnp.uint8(8 - offset))
    return rows


def _codes(rows: Sequence[Array] | Array | np.ndarray, width: int) -> list[Array]:
    """Inverse of `_bytes`."""
    codes = []
    for place in range(8):
        byte, offset = divmod(place * width, 8)
        code = rows[byte] >> jnp.uint8(offset)
        if offset + width > 8:
            code = code | (rows[byte + 1] << jnp.uint8(8 - offset))
        codes.append(code & jnp.uint8(2**width - 1))
    return codes
