"""What is taken for constant, and an error where that would make a derivative wrong."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from jaxfed.linalg._rule import with_rule


def constant(x: Num[Array, "*shape"], name: str, orders: int = 1) -> Num[Array, "*shape"]:
    """The same with derivative zero, as `jax.lax.stop_gradient`, but only so many times.

    For what makes no difference to a first derivative, and would be missed in a second one.

    Args:
        x: the array.
        name: what has no more derivatives, for the error.
        orders: how often it may be differentiated; 0 within a rule that is itself differentiated.

    Raises:
        NotImplementedError: where it is differentiated more often.
    """

    def rule(value, given, change):
        del given, change
        if not orders:
            raise NotImplementedError(f"{name}: derivatives of this order are not available")
        return constant(value, name, orders - 1), jnp.zeros_like(value)

    return lax.stop_gradient(with_rule(x, x, rule))


def zero_with_derivative(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Zero, with the first derivative of what is given, and no second one."""
    return with_rule(jnp.zeros_like(x), x, _as_of)


def _as_of(zero, x, change):
    # A second derivative would lack what turns the eigenvectors. Nothing is ever added.
    fixed = constant(x, "what tells eigenvectors apart (empirical Bayes, shrinkage, ranks)", 0)
    nothing = jnp.where(jnp.zeros_like(zero, bool), fixed, 0)
    return nothing, change + nothing
