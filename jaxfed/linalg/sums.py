"""Sums over many rows, and squares of numbers of any magnitude, without loss of digits."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from jaxfed.linalg._factor import matmul
from jaxfed.linalg.basis import orthonormalize_once

# Blocks of at least this many rows are decomposed at once.
BLOCK = 1024
# Numbers that are added one after another.
FEW = 32


def sum_of_rows(x: Float[Array, "n ..."]) -> Float[Array, "..."]:
    """Sum over the first axis in blocks of blocks: errors grow with the logarithm of its length."""
    while len(x) > FEW:
        padded = jnp.pad(x, ((0, -len(x) % FEW), *((0, 0),) * (x.ndim - 1)))
        x = padded.reshape(-1, FEW, *x.shape[1:]).sum(axis=1)
    return x.sum(axis=0)


@jax.jit
def mean_of_rows(x: Float[Array, "n ..."]) -> Float[Array, "..."]:
    """Mean over the first axis, to rounding of the mean even if the spread is small beside it."""
    about = x[0]
    return about + sum_of_rows(x - about) / len(x)


@jax.jit
def few_rows(x: Float[Array, "n d"]) -> Float[Array, "k d"]:
    """At most d rows with the same second moment XᵀX: QᵀX for orthonormal Q that span X.

    Q is found block by block, so errors do not grow with the number of rows. It is held fixed:
    derivatives are those of functions of XᵀX.
    """
    d = x.shape[1]
    size = max(BLOCK, 4 * d)
    while len(x) > size:
        padded = jnp.pad(x, ((0, -len(x) % size), (0, 0)))
        x = lax.map(_folded, padded.reshape(-1, size, d)).reshape(-1, d)
    return _folded(x) if len(x) > d else x


def _folded(x: Float[Array, "n d"]) -> Float[Array, "d d"]:
    return matmul(orthonormalize_once(lax.stop_gradient(x)).T, x)


def unit_of(*arrays: ArrayLike) -> Float[Array, ""]:
    """The power of two just above the largest magnitude, by which division is exact; 1 of zeros.

    Squares of numbers in this unit neither overflow nor, for numbers that count, vanish.
    """
    given = [jnp.asarray(x) for x in arrays]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(lax.stop_gradient(x)), initial=0) for x in given]))
    limits = jnp.finfo(largest.dtype)
    exponent = jnp.frexp(largest)[1]
    # Neither the unit nor its reciprocal may leave the normal numbers.
    exponent = jnp.clip(exponent, limits.minexp + 1, limits.maxexp - 2)
    unit = jnp.ldexp(jnp.ones((), largest.dtype), exponent)
    return jnp.where((largest > 0) & jnp.isfinite(largest), unit, 1)


def norm_of(arrays: Sequence[Float[Array, "..."]]) -> Float[Array, ""]:
    """The Euclidean norm of all entries of some arrays, of any magnitude; 0 of none."""
    return scaled_norm(jnp.stack([scaled_norm(x) for x in arrays])) if arrays else jnp.zeros(())


def scaled_norm(x: Float[Array, "..."], axis: int | tuple[int, ...] | None = None) -> Array:
    """The Euclidean norm over all or some axes, for numbers of any magnitude.

    Its derivative is zero where the norm is.
    """
    unit = unit_of(x)
    squares = scaled_sum_of_squares(x, unit, axis)
    nonzero = squares != 0  # or NaN
    return jnp.where(nonzero, jnp.sqrt(jnp.where(nonzero, squares, 1)), 0) * unit


def scaled_sum_of_squares(
    x: Float[Array, "..."], unit: Float[Array, ""], axis: int | tuple[int, ...] | None = None
) -> Array:
    """The sum of squares over all or some axes, divided by the square of a unit (`unit_of`)."""
    return jnp.sum((x / unit) ** 2, axis=axis)


def sum_of_squares(x: Float[Array, "..."], axis: int | tuple[int, ...] | None = None) -> Array:
    """The sum of squares over all or some axes, for numbers whose squares would vanish."""
    unit = unit_of(x)
    return scaled_sum_of_squares(x, unit, axis) * unit * unit
