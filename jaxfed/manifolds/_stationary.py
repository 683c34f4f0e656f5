"""Derivatives of a point where a slope is zero, with respect to the slope's parameters."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxfed.linalg.derivatives import with_rule

Slope = Callable[[PyTree, Any, PyTree], PyTree]


def stationary(point: PyTree, parameters: PyTree, slope: Slope) -> PyTree:
    """The point, with the derivatives that follow from its slope being zero.

    The slope `(point, parameters, base) -> slope` has the shapes of the point, depends only on the
    parameters and closes over no traced arrays; its derivative with respect to the point is
    symmetric and positive there. The base is the point itself, around which the slope may use
    coordinates.
    """
    arrays, others = eqx.partition(parameters, eqx.is_array)

    def rule(point, arrays, changes):
        # With the same rule, for derivatives of every order.
        point = with_rule(point, arrays, rule)
        # Only parameters that change: those that do not need no zeros of their size.
        moving = jax.tree.map(
            lambda c, x: None if c is None else x, changes, arrays, is_leaf=lambda c: c is None
        )

        def of(moved):
            return slope(point, eqx.combine(moved, arrays, others), point)

        _, right = jax.jvp(of, (moving,), (changes,))
        parameters = eqx.combine(arrays, others)
        _, product = jax.linearize(lambda x: slope(x, parameters, point), point)
        found = jax.lax.custom_linear_solve(
            product, jax.tree.map(jnp.negative, right), conjugate_gradients, symmetric=True
        )
        return point, found

    return with_rule(point, arrays, rule)


def conjugate_gradients(product: Callable[[PyTree], PyTree], right: PyTree) -> PyTree:
    """Solve a symmetric positive system, to rounding if 200 steps are enough.

    NaN if the system or its right-hand side is not finite.
    """
    eps = max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(right))
    found = jax.scipy.sparse.linalg.cg(product, right, tol=10 * eps, maxiter=200)[0]
    # If the residual is NaN, the method stops at once, at its start.
    rest = jax.tree.map(jnp.subtract, right, product(found))
    finite = jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(rest)]))
    return jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), found)
