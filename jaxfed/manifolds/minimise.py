"""Minimises functions on manifolds, by methods that need no step size."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed._checks import check_callable, check_count, check_name, check_positive, refuse
from jaxfed.manifolds import _descent, _trust_regions
from jaxfed.manifolds._space import (
    Space,
    broadcast,
    check_manifold_names,
    check_points,
    linear_combination,
    norm,
)
from jaxfed.manifolds._stationary import stationary
from jaxfed.manifolds._surface import Ended, Surface, met
from jaxfed.manifolds.stiefel import RETRACTIONS

SOLVERS: dict[str, Callable[..., Any]] = {
    "conjugate_gradients": partial(_descent.line_search_descent, kind=_descent.CONJUGATE_GRADIENTS),
    "lbfgs": partial(_descent.line_search_descent, kind=_descent.LBFGS),
    "trust_regions": _trust_regions.walk,
}


class Minimum(NamedTuple):
    """The result of `minimise`.

    Attributes:
        point: the minimum, a tree like the start.
        value: the function there.
        gradient_norm: length of its Riemannian gradient there.
        steps: number of steps.
        evaluations: number of evaluations of the function with its gradient.
        products: number of products with its Hessian; zero except for trust regions.
        status: how it ended, one of `jaxfed.manifolds.Ended`.
    """

    point: PyTree
    value: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    steps: Int[Array, ""]
    evaluations: Int[Array, ""]
    products: Int[Array, ""]
    status: Ended


def minimise(
    function: Callable[[PyTree], Float[Array, ""]],
    start: PyTree,
    *,
    manifold: PyTree[str] = "stiefel",
    solver: str = "conjugate_gradients",
    retraction: str = "polar",
    tol: float | None = None,
    max_steps: int = 1000,
) -> Minimum:
    """Find a local minimum of a function of points on manifolds.

    Works under `jax.jit` and `jax.vmap`. The point is differentiable with respect to everything
    that the function depends on, in both modes, because its gradient is zero; its derivative with
    respect to the start is zero. If the tolerance was not met, derivatives of every order are NaN.

    | solver | needs | use it |
    | --- | --- | --- |
    | `"conjugate_gradients"` | gradients | first; it needs the least memory |
    | `"lbfgs"` | gradients, and ten pairs of vectors | if the function is costly |
    | `"trust_regions"` | products with the Hessian | for exact minima, or to leave saddles |

    Args:
        function: the function, differentiable; twice for `"trust_regions"` and derivatives.
        start: the initial point, a tree of floating-point arrays.
        manifold: ``"stiefel"``, ``"grassmann"`` or ``"euclidean"`` for all arrays, or a tree of
            these names that is a prefix of the start. Points on a manifold have shape (..., d, r)
            with d >= r; each matrix of the leading axes is a point.
        solver: one of `SOLVERS`.
        retraction: a key of `jaxfed.manifolds.stiefel.RETRACTIONS`.
        tol: length of the Riemannian gradient at which to stop, relative to the function's value if
            that is above one; by default 1e-6 in double and 1e-4 in single precision.
        max_steps: largest number of steps.

    Returns:
        The minimum, and what it took to find it.

    Raises:
        ValueError: if the function is not callable or does not return a real number, points are not
            floating-point arrays, cannot be on their manifold or are off it, a name is unknown, or
            `tol` or `max_steps` is not positive.

    Source: Absil, Mahony & Sepulchre (2008), Optimization algorithms on matrix manifolds; Sakai &
    Iiduka (2020), Hybrid Riemannian conjugate gradient methods with global convergence properties;
    Huang, Gallivan & Absil (2015), A Broyden class of quasi-Newton methods for Riemannian
    optimization; Absil, Baker & Gallivan (2007), Trust-region methods on Riemannian manifolds.
    """
    check_callable("function", function)
    check_manifold_names(manifold)
    check_name("solver", solver, sorted(SOLVERS))
    check_name("retraction", retraction, sorted(RETRACTIONS))
    check_positive("tol", tol, optional=True, single=True)
    check_count("max_steps", max_steps)
    start, names = _checked(start, manifold)
    out = jax.eval_shape(function, start)
    if not hasattr(out, "dtype") or out.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        raise refuse("function", "one that returns a real number", out)
    if tol is None:
        tol = 1e-6 if out.dtype == jnp.float64 else 1e-4

    space = Space(names, retraction)
    # Arrays in the function's closure become arguments, to differentiate with respect to them.
    pure, closed = jax.closure_convert(function, start)
    still = jax.lax.stop_gradient(closed)
    surface = Surface(lambda point: pure(point, *still), space)
    walk = SOLVERS[solver](surface, jax.lax.stop_gradient(start), tol=tol, max_steps=max_steps)
    converged, size = met(walk.here, tol), norm(walk.here.gradient)
    # The walk itself was computed with constants, and has no derivatives.
    point = stationary(walk.here.point, (closed, converged), partial(_slope, pure, space))
    status = Ended.where(walk.stalled, Ended.stalled, Ended.step_limit)
    status = Ended.where(converged, Ended.converged, status)
    finite = jnp.isfinite(size) & jnp.isfinite(walk.here.value)
    status = Ended.where(finite, status, Ended.diverged)
    # Evaluate once more, for a value with derivatives.
    return Minimum(
        point, pure(point, *closed), size, walk.steps, walk.evaluations, walk.products, status
    )


def _slope(
    pure: Callable[..., Array],
    space: Space,
    point: PyTree,
    parameters: tuple[Any, Bool[Array, ""]],
    base: PyTree,
) -> PyTree:
    """The gradient plus the normal part of the move from the base; NaN if nothing converged.

    It is zero at a minimum. Its derivative there is the Riemannian Hessian along tangents and the
    identity along normals.
    """
    closed, converged = parameters
    move = linear_combination(1, point, -1, base)
    tangent = space.project(base, move)
    surface = Surface(lambda x: pure(x, *closed), space)
    gradient = space.project(base, surface.gradient(linear_combination(1, base, 1, tangent)))
    slope = linear_combination(1, gradient, 1, linear_combination(1, move, -1, tangent))
    # Multiply by a factor, since the derivatives of `jnp.where` would be zero instead of NaN.
    return jax.tree.map(lambda x: x * jnp.where(converged, 1, jnp.nan).astype(x.dtype), slope)


def _checked(start: PyTree, manifold: PyTree[str]) -> tuple[PyTree, PyTree[str]]:
    """The start as arrays, and each one's manifold; a `ValueError` for an unusable start."""
    leaves = jax.tree.leaves(start)
    if not leaves:
        raise refuse("start", "a tree of at least one floating-point array", start)
    for leaf in leaves:
        if not eqx.is_array_like(leaf) or not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            raise refuse("start", "floating-point arrays", leaf)
    start = jax.tree.map(jnp.asarray, start)
    names = broadcast("manifold", manifold, start)
    check_points("start", start, names)
    return start, names
