"""Division that neither zeros nor the scale of the data can break."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxfed._checks import checked_array


def ratio(
    numerator: Float[ArrayLike, "..."], denominator: Float[ArrayLike, "..."]
) -> Float[Array, "..."]:
    """The quotient of two arrays, zero where the denominator is zero, with a derivative to match.

    The derivative of a plain quotient x / y squares y, which second moments do not bear: those of
    data of 1e10 overflow in single precision, those of 1e-10 vanish, and the derivative is no
    number. This one divides twice instead, in both modes and at every order, and is zero where the
    denominator is. Numbers too small for full precision (`tiny` of `jnp.finfo`) count as zero; for
    the derivative, those below 1e5 times that, whose reciprocals are near overflow.

    Args:
        numerator: x.
        denominator: y, of a shape that goes with that of x.

    Raises:
        ValueError: if one of them is no array of real numbers, or their shapes do not go together.
    """
    x, y = (
        checked_array(name, given, "...")
        for name, given in (("numerator", numerator), ("denominator", denominator))
    )
    try:
        jnp.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        shapes = f"{x.shape} and {y.shape}"
        raise ValueError(
            f"denominator: wanted a shape that goes with the numerator, got {shapes}"
        ) from None
    return _ratio(x, y)


@jax.custom_jvp
def _ratio(x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
    known = jnp.abs(y) > jnp.finfo(y.dtype).tiny
    return jnp.where(known, x / jnp.where(known, y, 1), 0)


@_ratio.defjvp
def _(primals, tangents):
    (x, y), (x_change, y_change) = primals, tangents
    quotient = _ratio(x, y)
    clear = jnp.abs(y) > 1e5 * float(jnp.finfo(y.dtype).tiny)
    return quotient, _ratio(x_change - quotient * y_change, jnp.where(clear, y, 0))


def reciprocal(x: Float[Array, "..."], wanted: Bool[Array, "..."]) -> Float[Array, "..."]:
    """`1 / x` where it is wanted, else zero, with a finite derivative."""
    return jnp.where(wanted, 1 / jnp.where(wanted, x, 1), 0)
