"""Two compressors that send few entries: the largest ones, or random ones."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from jaxfed._checks import check_flag, check_number, threefry
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.compressor import Compressor, Payload
from jaxfed.core.wire.quantization import quantize


class _Sparse(Payload):
    values: Array
    indices: Array


class _TopK(Compressor):
    factory = "top_k"
    fraction: float = eqx.field(static=True)

    def compress(self, key, array):
        del key
        flat = array.reshape(-1)
        _, indices = jax.lax.top_k(jnp.abs(flat), _count(flat.size, self.fraction))
        # In single precision, positions are half of what is sent, so their width matters.
        small = jnp.uint16 if flat.size <= 2**16 else jnp.uint32
        return _Sparse(array.shape, array.dtype, flat[indices], indices.astype(small))

    def decompress(self, payload):
        assert isinstance(payload, _Sparse)
        return _scattered(payload, payload.values, payload.indices.astype(jnp.uint32))

    def mean(self, array):
        return array

    def for_start(self):
        return quantize(8)


def _scattered(
    payload: Payload,
    values: Float[Array | np.ndarray, " sent"],
    indices: UInt32[Array | np.ndarray, " sent"],
) -> Array:
    flat = jnp.zeros(payload.size, payload.dtype)
    return flat.at[indices].set(values.astype(payload.dtype)).reshape(payload.shape)


def top_k(fraction: float) -> Channel:
    """Send the entries of largest magnitude and their positions.

    Positions take 16 bits in arrays of up to 65,536 entries, else 32. Biased: use it inside
    `difference` or `error_feedback`. The derivative is straight through, the usual estimator: that
    of all entries, whether sent or not.

    Args:
        fraction: fraction of an array's entries to send, rounded up.

    Raises:
        ValueError: if `fraction` is not in (0, 1].

    Source: Stich, Cordonnier & Jaggi (2018), Sparsified SGD with memory.
    """
    return _TopK(_checked_fraction(fraction))


class _Drawn(Payload):
    values: Array
    seed: UInt32[Array, " words"]


class _RandomK(Compressor):
    factory = "random_k"
    fraction: float = eqx.field(static=True)
    scaled: bool = eqx.field(static=True)

    def compress(self, key, array):
        flat = array.reshape(-1)
        seed = jax.random.key_data(threefry(key))
        # Positions follow from the key, so a seed is sent in place of them.
        places = self._places(seed, flat.size)
        values = flat[places]
        return _Drawn(array.shape, array.dtype, values, seed)

    def decompress(self, payload):
        assert isinstance(payload, _Drawn)
        places = self._places(payload.seed, payload.size)
        factor = payload.size / len(places) if self.scaled else 1.0
        return _scattered(payload, payload.values * factor, places)

    def mean(self, array):
        share = 1 if self.scaled else _count(array.size, self.fraction) / array.size
        return share * array

    def for_start(self):
        return quantize(8)

    def unscaled(self):
        return _RandomK(self.fraction, False)

    def _places(self, seed, size: int):
        order = jax.random.permutation(jax.random.wrap_key_data(seed, impl="threefry2x32"), size)
        return order[: _count(size, self.fraction)].astype(jnp.uint32)


def random_k(fraction: float, *, scaled: bool = True) -> Channel:
    """Send random entries, and their positions as the seed of the draw.

    The derivative is straight through, that of the mean over all draws.

    Args:
        fraction: fraction of an array's entries to send, rounded up.
        scaled: multiply by the inverse fraction, so that the mean is unbiased. Inside `difference`
            and `error_feedback`, which diverge with it, entries are never scaled.

    Raises:
        ValueError: if `fraction` is not in (0, 1].

    Source: Stich, Cordonnier & Jaggi (2018), Sparsified SGD with memory.
    """
    check_flag("scaled", scaled)
    return _RandomK(_checked_fraction(fraction), bool(scaled))


def _checked_fraction(fraction: float) -> float:
    check_number("fraction", fraction, "a number in (0, 1]", lambda x: (x > 0) & (x <= 1))
    return float(fraction)


def _count(size: int, fraction: float) -> int:
    # In floating point, 0.07 * 100 is slightly more than 7, which must not become 8 entries.
    return max(1, math.ceil(round(fraction * size, 9)))
