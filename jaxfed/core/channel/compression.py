"""Compressors: channels that turn the arrays of a message into fewer bits.

Each maps over the message's floating-point arrays of more than one number; single numbers (a step
size, an objective) and integers travel as they are. Payloads are really packed: an array of `n`
codes of `b` bits is `ceil(n b / 8)` bytes. Nothing here has memory: see `jaxfed.channel.difference`
and `jaxfed.channel.error_feedback` for what makes coarse compression converge.

Payloads have no derivative. What is decoded is differentiated as what it is on average, straight
through: for `quantize` with random rounding and for `random_k` that is the derivative of the mean
over all draws; for the others, which are biased, it is the usual estimator and no more.
"""

import abc
import math
from typing import Literal, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PyTree, UInt8, UInt32

from jaxfed.core.channel.base import Channel, straight_through
from jaxfed.core.channel.entropy import Stream, decode_symbols, encode_symbols
from jaxfed.core.channel.packing import pack_symbols, unpack_symbols
from jaxfed.core.checks import (
    check_flag,
    check_name,
    check_number,
    checked_dtype,
    is_whole,
    refuse,
    shown,
)


class Payload(eqx.Module):
    """One compressed array; shape and type are known to both ends."""


class Compressor(Channel):
    """A channel without memory that compresses one array at a time."""

    @final
    def memory(self, message: PyTree) -> None:
        """None is needed."""
        del message

    @final
    def encode(self, key: Key[Array, ""], message: PyTree, memory: PyTree) -> tuple[PyTree, PyTree]:
        """The message with its larger arrays compressed."""
        leaves, structure = jax.tree.flatten(lax.stop_gradient(message))
        keys = jax.random.split(key, max(len(leaves), 1))
        packed = [
            self.compress(keys[i], leaf) if compressible(leaf) else leaf
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, packed), memory

    @final
    def decode(self, payload: PyTree) -> PyTree:
        """The message, as far as it can be told."""
        return jax.tree.map(
            lambda x: self.decompress(x) if isinstance(x, Payload) else x,
            payload,
            is_leaf=lambda x: isinstance(x, Payload),
        )

    @final
    def differentiable(self, decoded: PyTree, message: PyTree, memory: PyTree) -> PyTree:
        """Straight through, as the mean of what arrives."""
        del memory
        mean = jax.tree.map(lambda x: self.mean(x) if compressible(x) else x, message)
        return straight_through(decoded, mean)

    @final
    def receive(self, decoded: PyTree, last: PyTree) -> PyTree:
        """The decoded message itself."""
        del last
        return decoded

    @final
    def through(self, key: Key[Array, ""], message: PyTree) -> tuple[PyTree, PyTree]:
        """The payload, and what the other end will make of it, which can be differentiated."""
        payload, _ = self.encode(key, message, None)
        return payload, self.differentiable(self.decode(payload), message, None)

    @abc.abstractmethod
    def compress(self, key: Key[Array, ""], array: Float[Array, "..."]) -> Payload:
        """What travels in place of one array."""

    @abc.abstractmethod
    def decompress(self, payload: Payload) -> Float[Array, "..."]:
        """The array that a payload stands for."""

    @abc.abstractmethod
    def mean(self, array: Float[Array, "..."]) -> Float[Array, "..."]:
        """What becomes of an array on average, or is taken for that: it is differentiated."""


def compressible(leaf: Array) -> bool:
    """Whether compressors touch this array: more than one floating-point number."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 1


class _Static(Payload):
    shape: tuple[int, ...] = eqx.field(static=True)
    dtype: np.dtype = eqx.field(static=True)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


# ---------------------------------------------------------------------------------------------
# Quantization.


class _Codes(_Static):
    packed: UInt8[Array, " bytes"]
    scale: Float[Array, ""]


class _Entropy(_Static):
    stream: Stream
    scale: Float[Array, ""]


class _Quantize(Compressor):
    levels: int = eqx.field(static=True)
    norm: Literal["max", "frobenius"] = eqx.field(static=True)
    contraction: float = eqx.field(static=True)
    rounding: Literal["stochastic", "nearest"] = eqx.field(static=True)
    coding: Literal["fixed", "entropy"] = eqx.field(static=True)
    scale_bits: Literal[16, 32] = eqx.field(static=True)

    def compress(self, key, array):
        # In half precision too few numbers lie between two levels for a chance to be right.
        flat = array.reshape(-1).astype(jnp.promote_types(array.dtype, jnp.float32))
        scale = jnp.max(jnp.abs(flat)) if self.norm == "max" else jnp.linalg.norm(flat)
        scale = _rounded_up(scale, jnp.float32 if self.scale_bits == 32 else jnp.bfloat16)
        used = scale.astype(flat.dtype)
        position = flat * (self.levels / jnp.where(used > 0, used, 1)) + self.levels
        chance = chances(key, flat.size) if self.rounding == "stochastic" else 0.5
        code = jnp.clip(position.astype(jnp.float32) + chance, 0, 2 * self.levels)
        # By way of whole numbers that processors convert to; the packing must not do it all again.
        code = lax.optimization_barrier(code.astype(jnp.int32).astype(jnp.uint8))
        if self.coding == "entropy":
            stream = encode_symbols(code, 2 * self.levels + 1)
            return _Entropy(array.shape, array.dtype, stream, scale)
        packed = pack_symbols(code, 2 * self.levels + 1)
        return _Codes(array.shape, array.dtype, packed, scale)

    def decompress(self, payload):
        if isinstance(payload, _Entropy):
            code = decode_symbols(payload.stream, payload.size, 2 * self.levels + 1)
        else:
            assert isinstance(payload, _Codes)
            code = unpack_symbols(payload.packed, payload.size, 2 * self.levels + 1)
        wide = jnp.promote_types(payload.dtype, jnp.float32)
        level = code.astype(wide) - self.levels
        unit = payload.scale.astype(wide) / (self.levels * self.contraction)
        return (level * unit).astype(payload.dtype).reshape(payload.shape)

    def mean(self, array):
        return array / self.contraction

    def for_start(self):
        return quantize(8)


def chances(key: Key[Array, ""], count: int) -> Float[Array, " count"]:
    """Numbers strictly between 0 and 1 to round by: a hash of each place, seeded by the key.

    The generator behind `jax.random` would take more than nine tenths of the time of encoding, and
    rounding asks for little: a mean of one half at every place, and no pattern along them.
    """
    seed = jax.random.bits(key, (2,), jnp.uint32)
    # Fibonacci hashing of the place (Knuth 1973), then a multiplication of MurmurHash3's finalizer.
    x = jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9) + seed[0]
    x = (x ^ (x >> 15) ^ seed[1]) * jnp.uint32(0x85EBCA6B)
    # The middle of each of the 2^16 intervals: no bias, and a whole number stays what it is.
    return ((x >> 16).astype(jnp.int32).astype(jnp.float32) + 0.5) * jnp.float32(2**-16)


def _rounded_up(scale: Float[Array, ""], dtype) -> Float[Array, ""]:
    """The next number of a type that is not smaller: what travels must bound all entries."""
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
    r"""Quantization: each entry becomes one of a few multiples of the scale.

    With scale \(c\) and \(s\) levels, \(x\) becomes \(\operatorname{sign}(x) \ell c / (s \tau)\)
    where \(\ell\) is \(s|x|/c\) rounded up or down at random, so that the mean is \(x / \tau\).
    In the largest entry the error is at most \(c / s\): with `difference` and two levels or more it
    shrinks geometrically at \(\tau = 1\). With one level it does not shrink; a contraction of two
    makes it. Rounding to the nearest has half that error, shrinks it with any number of levels and
    has more zeros, but a bias: use it inside `difference` or `error_feedback`. The derivative is
    straight through, that of \(x / \tau\).

    Args:
        bits: per entry at most, 2 to 8, sign included: \(s = 2^{b-1} - 1\).
        levels: \(s\) itself, 1 to 127, in place of `bits`. The \(2s + 1\) symbols are packed as
            tightly as groups within a byte allow: one level takes 1.6 bits (five symbols in eight
            bits), two take 2.33 (three in seven).
        norm: the scale: `"max"`, the largest entry; or `"frobenius"`, which needs many levels.
        contraction: \(\tau \geq 1\), by which decoded values are divided.
        rounding: `"stochastic"` or `"nearest"`.
        coding: `"fixed"`, as many bits for each symbol, or `"entropy"`: fewer for the frequent
            ones. Then a payload holds \(2s\) frequencies of 16 bits, and its length is counted anew
            in each message. It takes many times as long, see `jaxfed.core.channel.entropy`, and
            pays from some hundreds of entries on.
        scale_bits: of the scale, 32 or 16 (bfloat16, rounded up, so that errors are at most a
            hundredth larger), which pays where arrays are small.

    Returns:
        The channel; a payload is the packed codes and a scale.

    Raises:
        ValueError: for bits or levels outside their ranges, both or neither of them, a contraction
            below one, or an unknown norm, rounding, coding or number of bits of the scale.

    Source: Alistarh, Grubic, Li, Tomioka & Vojnovic (2017), QSGD; with the largest entry as the
    scale and the contraction, Shrestha & Fu (2023), Section III.
    """
    if (bits is None) == (levels is None):
        raise ValueError(
            f"bits, levels: wanted one of the two, got {shown(bits)} and {shown(levels)}"
        )
    if bits is not None:
        if not is_whole(bits) or not 2 <= bits <= 8:
            raise refuse("bits", "a whole number from 2 to 8", bits)
        levels = 2 ** (bits - 1) - 1
    if not is_whole(levels) or not 1 <= levels <= 127:  # pyright: ignore[reportOptionalOperand]
        raise refuse("levels", "a whole number from 1 to 127", levels)
    for name, value, known in (
        ("norm", norm, ("max", "frobenius")),
        ("rounding", rounding, ("stochastic", "nearest")),
        ("coding", coding, ("fixed", "entropy")),
    ):
        check_name(name, value, known)
    check_number("contraction", contraction, "a number of at least 1", lambda x: x >= 1)
    if not is_whole(scale_bits) or scale_bits not in (16, 32):
        raise refuse("scale_bits", "16 or 32", scale_bits)
    return _Quantize(int(levels), norm, float(contraction), rounding, coding, scale_bits)


# ---------------------------------------------------------------------------------------------
# Signs.


class _Sign(Compressor):
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
    """The signs of the entries, one bit each, times their mean magnitude.

    Biased: use it inside `difference` or `error_feedback`. The derivative is straight through, the
    usual estimator: that of the entries themselves.

    Source: Karimireddy, Rebjock, Stich & Jaggi (2019), Error feedback fixes SignSGD.
    """
    return _Sign()


# ---------------------------------------------------------------------------------------------
# Sparsification.


class _Sparse(_Static):
    values: Array
    indices: Array


class _TopK(Compressor):
    fraction: float = eqx.field(static=True)

    def compress(self, key, array):
        del key
        flat = array.reshape(-1)
        _, indices = jax.lax.top_k(jnp.abs(flat), _kept(flat.size, self.fraction))
        small = jnp.uint16 if flat.size <= 2**16 else jnp.uint32
        return _Sparse(array.shape, array.dtype, flat[indices], indices.astype(small))

    def decompress(self, payload):
        assert isinstance(payload, _Sparse)
        return _scattered(payload, payload.values, payload.indices.astype(jnp.uint32))

    def mean(self, array):
        return array

    def for_start(self):
        return quantize(8)


def _scattered(payload: _Static, values: Array, indices: UInt32[Array, " kept"]) -> Array:
    flat = jnp.zeros(payload.size, payload.dtype)
    return flat.at[indices].set(values.astype(payload.dtype)).reshape(payload.shape)


def top_k(fraction: float) -> Channel:
    """The entries of largest magnitude, each with its place (16 bits up to 65,536 entries, or 32).

    Biased: use it inside `difference` or `error_feedback`. The derivative is straight through, the
    usual estimator: that of all entries, sent or not.

    Args:
        fraction: share of an array's entries that are kept, rounded up.

    Raises:
        ValueError: if `fraction` is not in (0, 1].

    Source: Stich, Cordonnier & Jaggi (2018), Sparsified SGD with memory.
    """
    return _TopK(_checked_fraction(fraction))


class _Drawn(_Static):
    values: Array
    seed: UInt32[Array, " words"]


class _RandomK(Compressor):
    fraction: float = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)

    def compress(self, key, array):
        flat = array.reshape(-1)
        seed = jax.random.key_data(key)
        kept = self._places(seed, flat.size)
        values = flat[kept]
        return _Drawn(array.shape, array.dtype, values, seed)

    def decompress(self, payload):
        assert isinstance(payload, _Drawn)
        places = self._places(payload.seed, payload.size)
        factor = payload.size / len(places) if self.scaled else 1.0
        return _scattered(payload, payload.values * factor, places)

    def mean(self, array):
        share = 1 if self.scaled else _kept(array.size, self.fraction) / array.size
        return share * array

    def for_start(self):
        return quantize(8)

    def _places(self, seed, size: int):
        order = jax.random.permutation(jax.random.wrap_key_data(seed), size)
        return order[: _kept(size, self.fraction)].astype(jnp.uint32)


def random_k(fraction: float, *, scaled: bool = True) -> Channel:
    """Entries drawn at random; the places travel as the seed of the draw.

    The derivative is straight through, that of the mean over all draws.

    Args:
        fraction: share of an array's entries that are kept, rounded up.
        scaled: multiply by the inverse share, so that the mean is right. Inside `difference` or
            `error_feedback` do not: what comes back must be a contraction.

    Raises:
        ValueError: if `fraction` is not in (0, 1].

    Source: Stich, Cordonnier & Jaggi (2018), Sparsified SGD with memory.
    """
    check_flag("scaled", scaled)
    return _RandomK(_checked_fraction(fraction), bool(scaled))


def _checked_fraction(fraction: float) -> float:
    check_number("fraction", fraction, "a number in (0, 1]", lambda x: (x > 0) & (x <= 1))
    return float(fraction)


def _kept(size: int, fraction: float) -> int:
    return max(1, math.ceil(round(fraction * size, 9)))


# ---------------------------------------------------------------------------------------------
# Lower precision.


class _Rounded(_Static):
    values: Array


class _Cast(Compressor):
    to: np.dtype = eqx.field(static=True)

    def compress(self, key, array):
        del key
        return _Rounded(array.shape, array.dtype, array.astype(self.to))

    def decompress(self, payload):
        assert isinstance(payload, _Rounded)
        return payload.values.astype(payload.dtype)

    def mean(self, array):
        return array


def cast(dtype: DTypeLike) -> Channel:
    """Rounding to a lower precision; the derivative is straight through.

    Args:
        dtype: `"float16"`, `"bfloat16"` or `"float32"`, or these types themselves. On processors
            older than 2012 (without F16C) XLA compiles no `"float16"`.

    Raises:
        ValueError: for any other type.
    """
    found = checked_dtype("dtype", dtype)
    if found not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise refuse("dtype", "float16, bfloat16 or float32", dtype)
    return _Cast(found)


# ---------------------------------------------------------------------------------------------
# One after the other.


class _Chain(Compressor):
    first: Compressor
    second: Compressor

    def compress(self, key, array):
        mine, its = jax.random.split(key)
        payload = self.first.compress(mine, array)
        leaves, structure = jax.tree.flatten(payload)
        packed = [
            self.second.compress(jax.random.fold_in(its, i), leaf) if compressible(leaf) else leaf
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, packed)

    def decompress(self, payload):
        outer = jax.tree.map(
            lambda x: self.second.decompress(x) if isinstance(x, Payload) else x,
            payload,
            is_leaf=lambda x: isinstance(x, Payload) and x is not payload,
        )
        return self.first.decompress(outer)

    def mean(self, array):
        return self.second.mean(self.first.mean(array))

    def for_start(self):
        return quantize(8)


def chain(*compressors: Channel) -> Channel:
    """Compressors one after the other: each works on the arrays of the payload before.

    `chain(top_k(0.1), quantize(4))` sends a tenth of the entries, at four bits each.

    Raises:
        ValueError: if there is none, or one is not a compressor.
    """
    if not compressors:
        raise ValueError("compressors: wanted at least one, got none")
    *before, combined = map(checked_compressor, compressors)
    for compressor in reversed(before):
        combined = _Chain(compressor, combined)
    return combined


def checked_compressor(compressor: Channel) -> Compressor:
    """Refuse what is not a compressor.

    Raises:
        ValueError: if it is not one.
    """
    if not isinstance(compressor, Compressor):
        raise refuse("compressor", "one without memory, such as quantize(3)", compressor)
    return compressor
