"""Two compressors that round: to a few levels, and to signs."""

import math
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Key, UInt8, UInt32

from jaxfed._checks import check_name, check_number, check_whole, is_whole, refuse, shown
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.compressor import Compressor, Payload
from jaxfed.core.wire.entropy import Stream, decode_symbols, encode_symbols
from jaxfed.core.wire.packing import (
    pack_rows,
    pack_symbols,
    stays_in_rows,
    unpack_rows,
    unpack_symbols,
)
from jaxfed.linalg.platforms import per_platform
from jaxfed.linalg.sums import scaled_norm


class _Codes(Payload):
    packed: UInt8[Array, " bytes"]
    scale: Float[Array, ""]


class _Entropy(Payload):
    stream: Stream
    scale: Float[Array, ""]


class _Quantize(Compressor):
    factory = "quantize"
    levels: int = eqx.field(static=True)
    norm: Literal["max", "frobenius"] = eqx.field(static=True)
    contraction: float = eqx.field(static=True)
    rounding: Literal["stochastic", "nearest"] = eqx.field(static=True)
    coding: Literal["fixed", "entropy"] = eqx.field(static=True)
    scale_bits: Literal[16, 32] = eqx.field(static=True)

    def compress(self, key, array):
        # In half precision there are too few numbers between two levels for unbiased rounding.
        wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
        largest = self.norm == "max"
        scale = jnp.max(jnp.abs(wide)) if largest else scaled_norm(wide)
        scale = _rounded_up(scale, jnp.float32 if self.scale_bits == 32 else jnp.bfloat16)
        used = scale.astype(wide.dtype)
        # Divide by the scale as it is sent, by which the receiver multiplies, or the mean would be
        # off. An array of zeros has scale 0, with which everything is decoded to zero.
        factor = self.levels / jnp.where(used > 0, used, 1)
        seed = _seed(key) if self.rounding == "stochastic" else None
        if self.coding == "entropy":
            code = _codes(wide.reshape(-1), factor, seed, self.levels)
            stream = encode_symbols(code, 2 * self.levels + 1)
            return _Entropy(array.shape, array.dtype, stream, scale)
        packed = _quantized(wide, factor, seed, levels=self.levels)
        return _Codes(array.shape, array.dtype, packed, scale)

    def decompress(self, payload):
        assert isinstance(payload, _Entropy | _Codes)
        wide = jnp.promote_types(payload.dtype, jnp.float32)
        unit = payload.scale.astype(wide) / (self.levels * self.contraction)
        if isinstance(payload, _Entropy):
            code = decode_symbols(payload.stream, payload.size, 2 * self.levels + 1)
            array = _multiples(code, unit, self.levels).reshape(payload.shape)
        else:
            array = _restored(payload.packed, unit, shape=payload.shape, levels=self.levels)
        return array.astype(payload.dtype)

    def mean(self, array):
        return array / self.contraction

    def for_start(self):
        return quantize(8)


def _codes(
    x: Float[Array, "..."], factor: Float[Array, ""], seed: UInt32[Array, "2"] | None, levels: int
) -> UInt8[Array, "..."]:
    """Entries times a factor, rounded to integers and counted from the lowest level."""
    # Counted from the lowest level, positions are not negative, so the conversion to integers
    # rounds down. Adding one half rounds to nearest; adding a number between 0 and 1 at random
    # rounds up as often as the mean needs.
    position = x * factor + levels
    chance = 0.5 if seed is None else _hashed(seed, x.shape)
    code = jnp.clip(position.astype(jnp.float32) + chance, 0, 2 * levels)
    # CPUs convert to int32 directly, but not to uint8. Without the barrier, XLA would recompute the
    # codes for every byte that packing takes from them.
    return lax.optimization_barrier(code.astype(jnp.int32).astype(jnp.uint8))


def _multiples(
    code: UInt8[Array, "..."], unit: Float[Array | np.ndarray | np.floating, ""], levels: int
) -> Float[Array, "..."]:
    """The values of codes."""
    return (code.astype(unit.dtype) - levels) * unit


def _quantized_in_turn(x, factor, seed, *, levels):
    return pack_symbols(_codes(x.reshape(-1), factor, seed, levels), 2 * levels + 1)


def _quantized_in_rows(x, factor, seed, *, levels):
    if not stays_in_rows(x.shape, 2 * levels + 1):
        return _quantized_in_turn(x, factor, seed, levels=levels)
    return pack_rows(_codes(x, factor, seed, levels), 2 * levels + 1)


def _restored_in_turn(packed, unit, *, shape, levels):
    code = unpack_symbols(packed, math.prod(shape), 2 * levels + 1)
    return _multiples(code, unit, levels).reshape(shape)


def _restored_in_rows(packed, unit, *, shape, levels):
    if not stays_in_rows(shape, 2 * levels + 1):
        return _restored_in_turn(packed, unit, shape=shape, levels=levels)
    return _multiples(unpack_rows(packed, shape, 2 * levels + 1), unit, levels)


# Both ways give the same bytes. Only on TPUs is flattening an array expensive.
_quantized = per_platform(_quantized_in_turn, tpu=_quantized_in_rows)
_restored = per_platform(_restored_in_turn, tpu=_restored_in_rows)


def chances(key: Key[Array, ""], count: int) -> Float[Array, " count"]:
    """Numbers strictly between 0 and 1 for random rounding: seeded hashes of the positions.

    The generator of `jax.random` would take over nine tenths of the encoding time. Rounding needs
    little: a mean of one half at every position, and no pattern across positions.
    """
    return _hashed(_seed(key), (count,))


def _seed(key: Key[Array, ""]) -> UInt32[Array, "2"]:
    return jax.random.bits(key, (2,), jnp.uint32)


def _hashed(seed: UInt32[Array, "2"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    # The position in the flattened array, whatever the shape: the two ways of `_quantized` must
    # give the same bytes.
    place = jnp.uint32(0)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]))
        place = place + lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    # Fibonacci hashing of the position (Knuth 1973), then a multiplication of MurmurHash3's
    # finalizer.
    x = place * jnp.uint32(0x9E3779B9) + seed[0]
    x = (x ^ (x >> 15) ^ seed[1]) * jnp.uint32(0x85EBCA6B)
    # Take the middle of each of the 2^16 intervals: no bias, and integers stay unchanged.
    return ((x >> 16).astype(jnp.int32).astype(jnp.float32) + 0.5) * jnp.float32(2**-16)


def _rounded_up(scale: Float[Array, ""], dtype) -> Float[Array, ""]:
    """The smallest number of a type that is at least the scale, and so bounds all entries."""
    rounded = scale.astype(dtype)
    above = jnp.nextafter(rounded, jnp.asarray(jnp.inf, dtype))
    return jnp.where(rounded.astype(scale.dtype) < scale, above, rounded)


def quantize(
    bits: int | None = None,
    *,
    levels: int | None = None,
    norm: Literal["max", "frobenius"] = "max",
    contraction: float = 1.0,
    rounding: Literal["stochastic", "nearest"] = "stochastic",
    coding: Literal["fixed", "entropy"] = "fixed",
    scale_bits: Literal[16, 32] = 32,
) -> Channel:
    r"""Quantize each entry to one of a few multiples of a scale.

    With scale \(c\) and \(s\) levels, \(x\) becomes \(\operatorname{sign}(x) \ell c / (s \tau)\)
    where \(\ell\) is \(s|x|/c\) rounded up or down at random, so that the mean is \(x / \tau\).
    The error of an entry is at most \(c / s\). Inside `difference`, it shrinks geometrically with
    two or more levels at \(\tau = 1\), and with one level only at a contraction of two. Rounding
    to nearest has half that error, which shrinks with any number of levels, and gives more zeros,
    but it is biased: use it inside `difference` or `error_feedback`. The derivative is straight
    through, that of \(x / \tau\).

    Args:
        bits: largest number of bits per entry, 2 to 8, including the sign: \(s = 2^{b-1} - 1\).
        levels: \(s\) itself, 1 to 127, in place of `bits`. The \(2s + 1\) symbols are packed as
            tightly as groups within a byte allow: one level takes 1.6 bits (five symbols in eight
            bits), two take 2.33 (three in seven).
        norm: the scale: `"max"`, the largest entry; or `"frobenius"`, which needs many levels.
        contraction: \(\tau \geq 1\), by which decoded values are divided.
        rounding: `"stochastic"` or `"nearest"`.
        coding: `"fixed"`, the same number of bits for each symbol, or `"entropy"`, fewer bits for
            frequent symbols. A payload then includes \(2s\) frequencies of 16 bits, and messages
            differ in length. It is many times slower, see `jaxfed.core.wire.entropy`, and saves
            bits only for arrays of more than some hundreds of entries.
        scale_bits: bits of the scale, 32 or 16 (bfloat16, rounded up, which increases errors by at
            most a hundredth); 16 saves bits in small arrays.

    Returns:
        The channel, whose payload is the packed codes and a scale.

    Raises:
        ValueError: if bits or levels are out of range, both or neither are given, the contraction
            is below one, or the norm, rounding, coding or `scale_bits` is unknown.

    Source: Alistarh, Grubic, Li, Tomioka & Vojnovic (2017), QSGD; with the largest entry as the
    scale and the contraction, Shrestha & Fu (2023), Section III.
    """
    if (bits is None) == (levels is None):
        raise ValueError(
            f"bits, levels: wanted one of the two, got {shown(bits)} and {shown(levels)}"
        )
    if bits is not None:
        check_whole("bits", bits, least=2, most=8)
        levels = 2 ** (bits - 1) - 1
    check_whole("levels", levels, most=127)
    assert levels is not None
    check_name("norm", norm, ("max", "frobenius"))
    check_name("rounding", rounding, ("stochastic", "nearest"))
    check_name("coding", coding, ("fixed", "entropy"))
    check_number("contraction", contraction, "a number of at least 1", lambda x: x >= 1)
    if not is_whole(scale_bits) or scale_bits not in (16, 32):
        raise refuse("scale_bits", "16 or 32", scale_bits)
    return _Quantize(int(levels), norm, float(contraction), rounding, coding, scale_bits)


class _Sign(Compressor):
    factory = "sign"

    def compress(self, key, array):
        del key
        flat = array.reshape(-1)
        packed = pack_symbols((flat >= 0).astype(jnp.uint8), 2)
        return _Codes(array.shape, array.dtype, packed, jnp.mean(jnp.abs(flat)).astype(jnp.float32))

    def decompress(self, payload):
        assert isinstance(payload, _Codes)
        positive = unpack_symbols(payload.packed, payload.size, 2).astype(payload.dtype)
        return ((2 * positive - 1) * payload.scale.astype(payload.dtype)).reshape(payload.shape)

    def mean(self, array):
        return array

    def for_start(self):
        return quantize(8)


def sign() -> Channel:
    """Send the signs of the entries, one bit each, and their mean magnitude.

    Biased: use it inside `difference` or `error_feedback`. The derivative is straight through, the
    usual estimator: that of the entries themselves.

    Source: Karimireddy, Rebjock, Stich & Jaggi (2019), Error feedback fixes SignSGD.
    """
    return _Sign()
