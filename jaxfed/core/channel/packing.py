"""Whole numbers of few bits, packed into bytes."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8, UInt32


def grouping(symbols: int) -> tuple[int, int]:
    """How many symbols of this many kinds are written together, and in how many bits (at most 8).

    The fewest bits a symbol, the smallest group among equals: 8 kinds one by one in 3 bits, 5 kinds
    by threes in 7.
    """
    groups = [(k, math.ceil(k * math.log2(symbols) - 1e-12)) for k in range(1, 9)]
    return min((g for g in groups if g[1] <= 8), key=lambda g: (g[1] / g[0], g[0]))


def pack_symbols(codes: UInt8[Array, " n"], symbols: int) -> UInt8[Array, " bytes"]:
    """Whole numbers below `symbols`, packed into `ceil(groups * width / 8)` bytes."""
    together, width = grouping(symbols)
    if together > 1:
        rows = jnp.pad(codes, (0, -len(codes) % together)).reshape(together, -1)
        codes = sum((rows[i] * jnp.uint8(symbols**i) for i in range(1, together)), start=rows[0])
    return _pack(codes, width)


def unpack_symbols(packed: UInt8[Array, " bytes"], count: int, symbols: int) -> UInt8[Array, " n"]:
    """Inverse of `pack_symbols`, for `count` codes."""
    together, width = grouping(symbols)
    codes = _unpack(packed, -(-count // together), width)
    if together > 1:
        digits = [codes // jnp.uint8(symbols**i) % jnp.uint8(symbols) for i in range(together)]
        codes = jnp.concatenate(digits)[:count]
    return codes


def pack_wide(numbers: UInt32[Array, " n"], width: int) -> UInt8[Array, " bytes"]:
    """The lowest `width` bits, up to 32, of whole numbers: byte after byte of all of them."""
    return jnp.concatenate(
        [
            _pack((numbers >> low).astype(jnp.uint8) & jnp.uint8(2**some - 1), some)
            for low, some in _pieces(width)
        ]
    )


def unpack_wide(packed: UInt8[Array, " bytes"], count: int, width: int) -> UInt32[Array, " n"]:
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
    """The bytes that numbers of so many bits are cut into: where each begins, and its bits."""
    return [(low, min(8, width - low)) for low in range(0, width, 8)]


# Eight codes of `width` bits fill `width` bytes exactly. The k-th code of every group comes from
# the k-th eighth of the array, so that all is done in whole rows. Where no rest is left nothing is
# done with it: on machines with one processor jaxlib (up to 0.11 at least) cannot compile programs
# in which operations on an empty rest and a decomposition meet.
def _pack(codes: UInt8[Array, " n"], width: int) -> UInt8[Array, " bytes"]:
    if width == 8:
        return codes
    groups, more = divmod(len(codes), 8)
    main = _bytes(codes[: 8 * groups].reshape(8, groups), width).reshape(-1)
    if not more:
        return main
    rest = codes[8 * groups :]
    last = _bytes(jnp.pad(rest, (0, 8 - len(rest)))[:, None], width)[:, 0]
    return jnp.concatenate([main, last[: -(-len(rest) * width // 8)]])


def _unpack(packed: UInt8[Array, " bytes"], count: int, width: int) -> UInt8[Array, " n"]:
    if width == 8:
        return packed
    groups, more = divmod(count, 8)
    main = _codes(packed[: groups * width].reshape(width, groups), width).reshape(-1)
    if not more:
        return main
    rest = packed[groups * width :]
    last = _codes(jnp.pad(rest, (0, width - len(rest)))[:, None], width)[:, 0]
    return jnp.concatenate([main, last[: count - 8 * groups]])


def _bytes(codes: UInt8[Array, "8 groups"], width: int) -> UInt8[Array, "width groups"]:
    rows = [jnp.zeros_like(codes[0])] * width
    for place in range(8):
        byte, offset = divmod(place * width, 8)
        rows[byte] = rows[byte] | (codes[place] << jnp.uint8(offset))
        if offset + width > 8:
            rows[byte + 1] = rows[byte + 1] | (codes[place] >> jnp.uint8(8 - offset))
    return jnp.stack(rows)


def _codes(rows: UInt8[Array, "width groups"], width: int) -> UInt8[Array, "8 groups"]:
    codes = []
    for place in range(8):
        byte, offset = divmod(place * width, 8)
        code = rows[byte] >> jnp.uint8(offset)
        if offset + width > 8:
            code = code | (rows[byte + 1] << jnp.uint8(8 - offset))
        codes.append(code & jnp.uint8(2**width - 1))
    return jnp.stack(codes)
