"""Rounding to powers of two: an example of a channel for jaxfed in a package of its own."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt8

import jaxfed as jf

SMALLEST = 6  # exponents from 0 to -6; the eighth code is for zero


class Codes(jf.channel.Payload):
    """The payload of an array: a sign and an exponent for each entry, and the scale."""

    pairs: UInt8[Array, " bytes"]  # two codes of four bits each
    scale: Float[Array, ""]


class PowersOfTwo(jf.channel.Compressor):
    """Rounds each entry to a power of two times the largest entry, in four bits.

    The relative error of an entry is at most 41 % down to 1/128 of the largest one; smaller entries
    become zero. The rounding is biased: use it inside `jaxfed.channel.difference` or
    `error_feedback`.

    Source: Miyashita, Lee & Murmann (2016), Convolutional neural networks using logarithmic data
    representation.
    """

    def compress(self, key: Key[Array, ""], array: Float[Array, "..."]) -> Codes:
        """Return the codes of the entries, and the largest magnitude."""
        del key
        sizes = jnp.abs(array).reshape(-1)
        scale = sizes.max()
        # Zero has the logarithm -inf, which is clipped to the code for zero.
        exponents = -jnp.log2(sizes / jnp.where(scale > 0, scale, 1))
        codes = jnp.clip(jnp.round(exponents), 0, SMALLEST + 1).astype(jnp.uint8)
        codes = codes + 8 * (array.reshape(-1) < 0).astype(jnp.uint8)
        pairs = jnp.pad(codes, (0, codes.size % 2)).reshape(2, -1)
        return Codes(array.shape, array.dtype, pairs[0] + 16 * pairs[1], scale.astype(jnp.float32))

    def decompress(self, payload: Codes) -> Float[Array, "..."]:
        """Return the powers of two of the codes."""
        codes = jnp.concatenate([payload.pairs % 16, payload.pairs // 16])[: payload.size]
        exponents = (codes % 8).astype(payload.dtype)
        sizes = jnp.where(exponents > SMALLEST, 0, jnp.exp2(-exponents))
        values = jnp.where(codes >= 8, -sizes, sizes) * payload.scale.astype(payload.dtype)
        return values.reshape(payload.shape)

    def mean(self, array: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the array itself: derivatives ignore the rounding."""
        return array
