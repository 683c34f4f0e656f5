"""Minimises functions on manifolds, by methods that need no step size."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed._checks import check_callable, check_count, check_name, check_positive, refuse
from jaxfed.linalg.platforms import OLD_EMITTERS, processor_options
from jaxfed.linalg.sums import unit_of
from jaxfed.manifolds import _descent, _trust_regions
from jaxfed.manifolds._space import (
    Space,
    broadcast,
    check_manifold_names,
    check_points,
    linear_combination,
    norm,
    over,
    scaled,
    times,
)
from jaxfed.manifolds._stationary import stationary
from jaxfed.manifolds._surface import Ended, Surface, met
from jaxfed.manifolds.stiefel import RETRACTIONS

# Of a point's length: how far from it the function's gradient tells its unit. Of the way to where
# the function would be zero: how far it tells an array's unit.
NEAR = 0.1

# How many times its gradients near by a function's value may tell its unit. What is larger is a
# constant, which says nothing about its shape. With less, single precision could not meet the
# tolerance where eigenvalues lie close together.
MOST = 100

Pure = Callable[..., Array]

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
            with d >= r; each matrix of the leading axes is a point. Solvers divide Euclidean arrays
            by a number near their largest entry, so that their unit does not change the result.
        solver: one of `SOLVERS`.
        retraction: a key of `jaxfed.manifolds.stiefel.RETRACTIONS`.
        tol: length of the Riemannian gradient at which to stop, in the function's unit: the largest
            entry of its gradients at the point and a tenth of the point's length away, or the
            function's value, up to a hundred times that entry. A larger constant in the function
            changes nothing more. By default 1e-6 in double and 1e-4 in single precision. The
            tolerance is met too early where entries of one array are in unlike units or far from
            zero: subtract offsets from data, and give entries of another unit an array of their
            own.
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

    # Arrays in the function's closure become arguments, to differentiate with respect to them.
    pure, closed = _pure(function, start)
    return _compiled(**processor_options(OLD_EMITTERS, (start, closed)))(
        start,
        closed,
        pure=pure,
        names=tuple(jax.tree.leaves(names)),
        solver=solver,
        retraction=retraction,
        tol=float(tol),
        max_steps=max_steps,
    )


@cache
def _compiled(**options: bool | int) -> Callable[..., Minimum]:
    """The program with these compiler options."""
    static = "pure", "names", "solver", "retraction", "tol", "max_steps"
    given: Any = options
    return jax.jit(_minimum, static_argnames=static, compiler_options=given)


def _minimum(
    start: PyTree,
    closed: list[Any],
    *,
    pure: Pure,
    names: tuple[str, ...],
    solver: str,
    retraction: str,
    tol: float,
    max_steps: int,
) -> Minimum:
    space = Space(jax.tree.unflatten(jax.tree.structure(start), names), retraction)
    still = jax.lax.stop_gradient(closed)

    def function(point):
        return pure(point, *still)

    def on(state):
        """Walk in the unit of where the last walk ended, so that numbers are moderate."""
        units, unit, counts = state.next_units, state.next_unit, state.counts
        surface = Surface(lambda point: function(times(point, units)) / unit, space)
        start = over(state.point, units)
        walk = SOLVERS[solver](surface, start, tol=tol, max_steps=max_steps - counts[0])
        here, taken = walk.here, jnp.stack([walk.steps, walk.evaluations, walk.products])
        size, point = norm(over(here.gradient, units)), times(here.point, units)
        units_there = space.units(point)
        unit_there = unit_at(point, units_there)
        # Units that are far off are those of a start far from here.
        pairs = zip(*map(jax.tree.leaves, (units_there, units)), strict=True)
        near = (4 * unit_there >= unit) & jnp.stack([a <= 4 * b for a, b in pairs]).all()
        ended = ~met(here, tol) | near
        finite = jnp.isfinite(size) & jnp.isfinite(here.value)
        status = Ended.where(walk.stalled, Ended.stalled, Ended.step_limit)
        status = Ended.where(met(here, tol), Ended.converged, status)
        status = Ended.where(finite, status, Ended.diverged)
        return _State(
            point, units, units_there, unit, unit_there, size * unit, counts + taken, status, ended
        )

    def unit_at(point, units):
        inside = Surface(lambda point: function(times(point, units)), space)
        return _unit(inside, over(point, units))

    start = jax.lax.stop_gradient(start)
    units = space.units(start, _reaches(function, start) if "euclidean" in names else None)
    unit = unit_at(start, units)
    nothing = jnp.zeros(3, jnp.int32)
    state = _State(
        start, units, units, unit, unit, unit, nothing, Ended.step_limit, jnp.asarray(False)
    )
    state = jax.lax.while_loop(lambda state: ~state.ended, on, state)
    converged = state.status == Ended.converged
    # The walk itself was computed with constants, and has no derivatives.
    parameters = closed, state.units, state.unit, converged
    point = stationary(over(state.point, state.units), parameters, partial(_slope, pure, space))
    point = times(point, state.units)
    steps, evaluations, products = state.counts
    # Evaluate once more, for a value with derivatives.
    value = pure(point, *closed)
    return Minimum(point, value, state.gradient_norm, steps, evaluations, products, state.status)


class _State(NamedTuple):
    point: PyTree
    units: PyTree[Float[Array, ""]]  # of Euclidean arrays in the last walk
    next_units: PyTree[Float[Array, ""]]
    unit: Float[Array, ""]  # of the function in the last walk
    next_unit: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    counts: Int[Array, "3"]  # steps, evaluations, products
    status: Ended
    ended: Bool[Array, ""]


def _reaches(function: Callable[[PyTree], Array], point: PyTree) -> PyTree[Float[Array, ""]]:
    """A tenth of how far a function would reach zero along each array's slope; 0 if nowhere.

    It tells the size of what is sought if the start is zero, or much smaller.
    """
    value, slopes = jax.value_and_grad(function)(point)

    def reach(slope):
        found = NEAR * jnp.abs(value) / jnp.max(jnp.abs(slope), initial=0)
        return jnp.where(jnp.isfinite(found), found, 0)

    return jax.tree.map(reach, slopes)


def _unit(surface: Surface, point: PyTree) -> Float[Array, ""]:
    """A power of two near the largest of the function and its gradients at a point and near it.

    Near it, since at a minimum that is zero, as of least squares, both are rounding.
    """
    here = surface.at(point)
    direction = scaled(1 / unit_of(*jax.tree.leaves(here.gradient)), here.gradient)
    length = NEAR * norm(point) / jnp.maximum(norm(direction), 1)
    near = surface.gradient(surface.space.retract_once(point, scaled(length, direction)))
    known = [jnp.where(jnp.isfinite(x), x, 0) for x in jax.tree.leaves((here.gradient, near))]
    value = jnp.where(jnp.isfinite(here.value), jnp.abs(here.value), 0)
    return unit_of(*known, jnp.minimum(value, MOST * unit_of(*known))).astype(value.dtype)


# By a function's code and what it computes: the oldest go first.
_KNOWN: dict[tuple[object, str], Pure] = {}
MOST_KNOWN = 128


def _pure(function: Callable[[PyTree], Array], start: PyTree) -> tuple[Pure, list[Any]]:
    """The function of a point and of the arrays in its closure, and these arrays.

    It is the same object as in an earlier call if the function computes the same with arrays of the
    same shapes, so that nothing is compiled again, also of a function that is made anew in a loop.
    """
    # Anew each time, since the function may read variables that have changed.
    traced = jax.make_jaxpr(lambda point: function(point))(start)
    program = traced.jaxpr

    def pure(point: PyTree, *closed: Array) -> Array:
        (value,) = jaxpr_as_fun(ClosedJaxpr(program, closed))(*jax.tree.leaves(point))
        return value

    # The text tells programs apart, since it names objects in them by their addresses, and a
    # known program keeps these objects alive.
    known = getattr(function, "__code__", type(function)), f"{jax.tree.structure(start)} {program}"
    if len(_KNOWN) >= MOST_KNOWN and known not in _KNOWN:
        _KNOWN.pop(next(iter(_KNOWN)), None)
    return _KNOWN.setdefault(known, pure), list(traced.consts)


def _slope(
    pure: Callable[..., Array],
    space: Space,
    point: PyTree,
    parameters: tuple[Any, PyTree, Float[Array, ""], Bool[Array, ""]],
    base: PyTree,
) -> PyTree:
    """The gradient plus the normal part of the move from the base; NaN if nothing converged.

    It is zero at a minimum. Its derivative there is the Riemannian Hessian along tangents and the
    identity along normals.
    """
    closed, units, unit, converged = parameters
    move = linear_combination(1, point, -1, base)
    tangent = space.project(base, move)
    surface = Surface(lambda x: pure(times(x, units), *closed) / unit, space)
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
