"""Checks of points with orthonormal columns, and the precision of operations on them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jaxfed._checks import checked_array, refuse

Matrix = Float[ArrayLike, "d r"]  # an argument
Frame = Float[Array, "d r"]  # a result

# By default, accelerators shorten the factors of single precision products to 10 bits of mantissa
# or fewer, which alone would move a point off the manifold by about 1e-3.
full_precision = jax.default_matmul_precision("highest")


def frame(name: str, x: ArrayLike) -> Array:
    """One point as an array; a `ValueError` if it cannot have orthonormal columns."""
    point = checked_array(name, x, "d r", half=True)
    if point.shape[0] < point.shape[1]:
        raise refuse(name, "one matrix (d, r) with d >= r; map over several with jax.vmap", x)
    return point


def frames(**matrices: ArrayLike) -> list[Array]:
    """A point and matrices of its shape, by name; a `ValueError` if a shape differs."""
    (name, x), *others = matrices.items()
    point = frame(name, x)
    shape = f"{point.shape[0]} {point.shape[1]}"
    return [point, *(checked_array(name, other, shape, half=True) for name, other in others)]


def polish(y: Frame) -> Frame:
    """One Newton-Schulz step from a nearly orthonormal ``y`` to the nearest orthonormal matrix.

    A map that only rotates its point keeps the point's rounding errors, which add up over many
    steps; this step squares them.
    """
    return y + y @ (jnp.eye(y.shape[1], dtype=y.dtype) - y.T @ y) / 2


def safe_norm(x: Float[Array, "..."]) -> Float[Array, ""]:
    """The Frobenius norm, with derivative zero where it is zero."""
    zero = jnp.linalg.norm(x) == 0  # even if only the squares of the entries vanish
    # The inner choice keeps the root's infinite slope at zero out of the derivative.
    return jnp.where(zero, 0, jnp.linalg.norm(jnp.where(zero, 1, x)))
