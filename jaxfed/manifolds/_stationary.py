"""Derivatives of a point where a slope is zero, by the parameters that the slope depends on."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree


@eqx.filter_custom_jvp
def stationary(point: PyTree, parameters: PyTree, slope: Callable[[PyTree, Any], PyTree]) -> PyTree:
    """The point, with the derivatives that the equation slope(point, parameters) = 0 gives it.

    Args:
        point: where the slope is zero, a tree of arrays.
        parameters: all that the point depends on.
        slope: has the shapes of the point; its derivative by the point is symmetric there, and
            positive.
    """
    del parameters, slope
    return point


@stationary.def_jvp
def _(primals: tuple, tangents: tuple) -> tuple[PyTree, PyTree]:
    (point, parameters, slope), (_, change, _) = primals, tangents
    # With a derivative of its own, for derivatives of this one.
    point = stationary(point, parameters, slope)
    moving, fixed = eqx.partition(
        parameters, jax.tree.map(lambda x: x is not None, change, is_leaf=lambda x: x is None)
    )
    if not jax.tree.leaves(change):
        return point, jax.tree.map(jnp.zeros_like, point)
    _, right = jax.jvp(lambda p: slope(point, eqx.combine(p, fixed)), (moving,), (change,))
    _, product = jax.linearize(lambda x: slope(x, parameters), point)
    found = jax.lax.custom_linear_solve(
        product, jax.tree.map(jnp.negative, right), conjugate_gradients, symmetric=True
    )
    return point, found


def conjugate_gradients(product: Callable[[PyTree], PyTree], right: PyTree) -> PyTree:
    """The solution of a symmetric positive system, to rounding if 200 steps reach that."""
    eps = max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(right))
    return jax.scipy.sparse.linalg.cg(product, right, tol=10 * eps, maxiter=200)[0]
