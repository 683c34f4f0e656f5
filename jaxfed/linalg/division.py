"""Division that is safe against zeros and against very large or small data."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float


def ratio(
    numerator: Float[ArrayLike, "..."], denominator: Float[ArrayLike, "..."]
) -> Float[Array, "..."]:
    """The quotient of two arrays, zero where the denominator is zero, with a derivative to match.

    The derivative of a plain quotient x / y squares y. In single precision, the squared second
    moments of data of size 1e10 overflow and those of size 1e-10 vanish, and the derivative is NaN.
    This function divides twice instead, in both modes and at every order, and its derivative is
    zero where the denominator is. Numbers too small for full precision (`tiny` of `jnp.finfo`)
    count as zero; in the derivative, so do those below 1e5 times that, whose reciprocals are near
    overflow.

    Args:
        numerator: x.
        denominator: y, of a shape that broadcasts with that of x.
    """
    return _ratio(jnp.asarray(numerator), jnp.asarray(denominator))


@jax.custom_jvp
def _ratio(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    nonzero = jnp.abs(y) > jnp.finfo(y.dtype).tiny
    # The inner choice keeps the division by zero out of the derivative too.
    return jnp.where(nonzero, x / jnp.where(nonzero, y, 1), 0)


@_ratio.defjvp
def _(primals, tangents):
    (x, y), (x_change, y_change) = primals, tangents
    quotient = _ratio(x, y)
    clear = jnp.abs(y) > 1e5 * float(jnp.finfo(y.dtype).tiny)
    return quotient, _ratio(x_change - quotient * y_change, jnp.where(clear, y, 0))


def reciprocal(x: Float[Array, "..."], wanted: Bool[Array, "..."]) -> Float[Array, "..."]:
    """`1 / x` where wanted, zero elsewhere, with a finite derivative."""
    return jnp.where(wanted, 1 / jnp.where(wanted, x, 1), 0)
