"""Two compressors: rounding to a lower precision, and a chain of compressors."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from jaxfed._checks import checked_dtype, refuse
from jaxfed.core.wire.channel import Channel, Delimited, Variable
from jaxfed.core.wire.compressor import (
    Compressor,
    Payload,
    checked_compressor,
    compressed,
    compressible,
    decompressed,
    mean_of,
)
from jaxfed.core.wire.quantization import quantize
from jaxfed.linalg.sums import unit_of


class _Rounded(Payload):
    values: Array
    unit: Array | None  # a power of two, by which the values were divided


class _Cast(Compressor):
    factory = "cast"
    dtype: np.dtype = eqx.field(static=True)

    def compress(self, key, array):
        del key
        unit = None
        if self.dtype == jnp.float16:  # which ends at 6e-8 and 65,504
            unit = unit_of(array)
            array = array / unit
            unit = unit.astype(jnp.bfloat16)
        return _Rounded(array.shape, array.dtype, array.astype(self.dtype), unit)

    def decompress(self, payload):
        assert isinstance(payload, _Rounded)
        values = payload.values.astype(payload.dtype)
        return values if payload.unit is None else values * payload.unit.astype(payload.dtype)

    def mean(self, array):
        return array


def cast(dtype: DTypeLike) -> Channel:
    """Round to a lower precision; the derivative is straight through.

    Arrays travel as float16 in a unit of their own, a power of two, since squares of ordinary
    numbers leave its range.

    Args:
        dtype: `"float16"`, `"bfloat16"` or `"float32"`, or these types. XLA cannot compile
            `"float16"` on CPUs from before 2012 (without F16C).

    Raises:
        ValueError: for any other type.
    """
    found = checked_dtype("dtype", dtype)
    if found not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise refuse("dtype", "float16, bfloat16 or float32", dtype)
    return _Cast(found)


class _Chained(Payload):
    """The payload of one compressor, some of whose arrays are payloads of the next."""

    parts: list[PyTree]
    structure: Any = eqx.field(static=True)  # of the first compressor's payload


class _Chain(Compressor):
    factory = "chain"
    first: Compressor
    second: Compressor

    def bind(self, context):
        return replace(self, first=self.first.bind(context), second=self.second.bind(context))

    def compress(self, key, array):
        mine, its = jax.random.split(key)
        payload = compressed(self.first, mine, array)
        # Keep parts of variable length whole, since not all of their words are sent.
        parts, structure = jax.tree.flatten(payload, is_leaf=_is_indivisible)
        for i, part in enumerate(parts):
            if not _is_indivisible(part) and compressible(part):
                parts[i] = compressed(self.second, jax.random.fold_in(its, i), part)
        return _Chained(array.shape, array.dtype, parts, structure)

    def decompress(self, payload):
        assert isinstance(payload, _Chained)
        parts = [
            decompressed(self.second, part) if isinstance(part, Payload) else part
            for part in payload.parts
        ]
        return decompressed(self.first, jax.tree.unflatten(payload.structure, parts))

    def mean(self, array):
        return mean_of(self.second, mean_of(self.first, array))

    def for_start(self):
        return quantize(8)

    def unscaled(self):
        return _Chain(self.first.unscaled(), self.second.unscaled())


def _is_indivisible(part: object) -> bool:
    return isinstance(part, Variable | Delimited)


def chain(*compressors: Channel) -> Channel:
    """Apply compressors in sequence: each compresses the arrays of the previous payload.

    `chain(top_k(0.1), quantize(4))` sends a tenth of the entries, at four bits each. Any channel
    without memory is allowed; one that is not a `Compressor` gets one array at a time.

    Raises:
        ValueError: if there is no compressor, or one has memory or hides messages.
    """
    if not compressors:
        raise ValueError("compressors: wanted at least one, got none")
    each = (checked_compressor(given, "compressors") for given in compressors)
    *before, combined = each
    for compressor in reversed(before):
        combined = _Chain(compressor, combined)
    return combined
