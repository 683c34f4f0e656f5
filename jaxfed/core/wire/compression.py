"""Lower precision, and compressors one after the other."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxfed.core.common.checks import checked_dtype, refuse
from jaxfed.core.wire.channel import Channel
from jaxfed.core.wire.compressor import Compressor, Payload, checked_compressor, compressible
from jaxfed.core.wire.quantization import quantize


class _Rounded(Payload):
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
