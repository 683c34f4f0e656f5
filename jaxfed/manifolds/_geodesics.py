"""Geodesics of the Stiefel manifold, in the Euclidean and the canonical metric."""

from functools import partial

import jax
import jax.numpy as jnp

from jaxfed._checks import check_name
from jaxfed.manifolds._exponential import expm
from jaxfed.manifolds._frames import Frame, Matrix, frames, full_precision, polish
from jaxfed.manifolds._stationary import conjugate_gradients, stationary

METRICS = ("euclidean", "canonical")


@full_precision
def exp(x: Matrix, v: Matrix, metric: str = "euclidean") -> Frame:
    """Exponential map: the end of the geodesic from ``x`` with velocity ``v`` at time one.

    With A = xᵀv it is exp(v xᵀ - x vᵀ) x exp(-A) in the Euclidean metric and
    exp(v xᵀ - x vᵀ - x A xᵀ) x in the canonical one. Both exponents are a bᵀ with a and b of 2r
    columns, and exp(a bᵀ) x = x + a f(bᵀa) bᵀx with f(z) = (eᶻ - 1)/z. Since f is entire, a ``v``
    of lower rank is no special case, even in the derivative.

    Args:
        x: Point, (d, r) with orthonormal columns.
        v: Tangent vector, ``x.T @ v`` skew, (d, r).
        metric: ``"euclidean"`` or ``"canonical"``.

    Returns:
        Point of the manifold, (d, r).

    Raises:
        ValueError: If ``x`` is not a tall matrix, ``v`` has another shape or the metric is unknown.

    Source: Edelman et al. (1998), Sections 2.2.2 and 2.4.1; Hüper, Markina & Silva Leite (2021), A
    Lagrangian approach to extremal curves on Stiefel manifolds, for both at once.
    """
    x, v = frames(x=x, v=v)
    check_name("metric", metric, METRICS)
    return _exp(x, v, metric)


def _exp(x: Frame, v: Frame, metric: str) -> Frame:
    rank, turn = x.shape[1], x.T @ v
    # A is skew, so with this p, p xᵀ - x pᵀ is the canonical metric's exponent.
    p = v - x @ turn / 2 if metric == "canonical" else v
    a, b = jnp.concatenate([p, x], axis=1), jnp.concatenate([x, -p], axis=1)
    # The upper right block of exp([[Z, C], [0, 0]]) is f(Z) C.
    blocks = jnp.zeros((3 * rank, 3 * rank), x.dtype)
    blocks = blocks.at[: 2 * rank].set(b.T @ jnp.concatenate([a, x], axis=1))
    y = x + a @ expm(blocks)[: 2 * rank, 2 * rank :]
    if metric == "euclidean":
        y = y @ expm(-turn)
    return polish(y)


@full_precision
def log(x: Matrix, y: Matrix, metric: str = "euclidean") -> Frame:
    """Logarithm: the velocity at ``x`` of the shortest geodesic to ``y``.

    It uses Newton's method on the end of the geodesic, which finds the shortest one up to about the
    injectivity radius: π in the Euclidean metric, 0.91 π in the canonical one.

    Args:
        x: Point, (d, r) with orthonormal columns.
        y: Point of the same shape.
        metric: ``"euclidean"`` or ``"canonical"``.

    Returns:
        Tangent vector v at x, (d, r): ``exp(x, v, metric)`` is ``y``. NaN if none was found, such
        as between points that no path connects: square ones with determinants of opposite sign.

    Raises:
        ValueError: If ``x`` is not a tall matrix, ``y`` has another shape or the metric is unknown.

    Source: Bryner (2017), Endpoint geodesics on the Stiefel manifold embedded in Euclidean space,
    with Newton's method in place of its fixed-point iteration; Absil & Mataigne (2024), The
    ultimate upper bound on the injectivity radius of the Stiefel manifold.
    """
    x, y = frames(x=x, y=y)
    check_name("metric", metric, METRICS)
    return _log(x, y, metric)


# A loop outside of `jit` would be compiled at every call.
@partial(jax.jit, static_argnums=2)
def _log(x: Frame, y: Frame, metric: str) -> Frame:
    tol = 10 * float(jnp.finfo(x.dtype).eps)

    def end(v, points):
        return _exp(points[0], _tangent(points[0], v), metric) - points[1]

    def slope(v, points, _=None):
        """The gradient of half the squared miss, plus the normal part of v."""
        missed, pull = jax.vjp(lambda v: end(v, points), v)
        # The normal part keeps v tangent, and makes the system positive definite along normals too.
        return pull(missed)[0] + v - _tangent(points[0], v)

    # Gauss-Newton steps for the miss of the end point, damped until it falls.
    def step(state):
        v, missed, length, count = state
        _, push = jax.linearize(lambda v: end(v, still), v)
        pull = jax.linear_transpose(push, v)
        move = conjugate_gradients(
            lambda u: pull(push(u))[0] + u - _tangent(still[0], u), slope(v, still)
        )
        moved = v - length * _tangent(still[0], move)
        new = jnp.linalg.norm(end(moved, still))
        better = new < missed
        # Full steps again as soon as they help, for Newton's convergence near the solution.
        length = jnp.where(better, jnp.minimum(2 * length, 1), length / 4)
        return jnp.where(better, moved, v), jnp.minimum(new, missed), length, count + 1

    # The iteration has no derivative; `stationary` adds that of the solution.
    still = jax.lax.stop_gradient((x, y))
    start = _tangent(still[0], still[1] - still[0])
    first = start, jnp.linalg.norm(end(start, still)), jnp.ones((), x.dtype), 0
    v, missed, *_ = jax.lax.while_loop(
        lambda state: (state[1] > tol) & (state[2] > 1e-2) & (state[3] < 50), step, first
    )
    v = stationary(v, (x, y), slope)
    # A larger miss than rounding explains means that no geodesic was found.
    return jnp.where(missed < 0.1 * jnp.finfo(x.dtype).eps ** 0.5, v, jnp.nan)


def _tangent(x: Frame, g: Frame) -> Frame:
    inside = x.T @ g
    return g - x @ ((inside + inside.T) / 2)
