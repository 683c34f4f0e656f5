"""Trust regions on manifolds, with truncated conjugate gradients inside."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed.manifolds._space import chosen, inner, linear_combination, norm, scaled
from jaxfed.manifolds._surface import Surface, Walk, unfinished

LEAST_SHARE = 0.1  # of the decrease that the model predicts, for a step to be accepted
INNER_TOL = 0.1
INNER_MOST = 500


def walk(surface: Surface, start: PyTree, tol: float, max_steps: Int[Array, ""]) -> Walk:
    """Minimize a quadratic model within a radius, step by step, until the gradient is small.

    Source: Absil, Baker & Gallivan (2007), Trust-region methods on Riemannian manifolds.
    """
    here = surface.at(start)
    eps = jnp.finfo(here.value.dtype).eps
    first_size, reach = norm(here.gradient), surface.space.reach(start)

    def step(walk):
        here, radius = walk.here, walk.memory
        hessian = surface.hessian(here.point)
        size = norm(here.gradient)
        # Converge superlinearly near the end, whatever the function's scale.
        enough = size * jnp.minimum(INNER_TOL, size / first_size)
        inside = _truncated(
            hessian, here.gradient, lambda v: surface.space.project(here.point, v), radius, enough
        )
        there = surface.at(surface.space.retract(here.point, inside.step))
        predicted = -inner(here.gradient, inside.step) - inner(inside.step, inside.image) / 2
        # If both differences are rounding, the share is one and the step is accepted.
        noise = 1e3 * eps * jnp.abs(here.value) + jnp.finfo(here.value.dtype).tiny
        share = (here.value - there.value + noise) / (predicted + noise)
        # A step to where the function is not finite is refused, and the radius shrinks.
        share = jnp.where(jnp.isfinite(share), share, -1.0)
        taken = share > LEAST_SHARE
        length = norm(inside.step)
        radius = jnp.where(
            share < 0.25,
            length / 4,
            jnp.where((share > 0.75) & inside.at_edge, jnp.minimum(4 * radius, reach), radius),
        ).astype(radius.dtype)
        return Walk(
            chosen(taken, there, here),
            radius,
            walk.steps + 1,
            walk.evaluations + 1,
            walk.products + inside.products,
            stalled=~taken & (length <= eps * norm(here.point)),
        )

    none, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    # The length of steepest descent to the model's lowest point; for negative curvature, use its
    # magnitude.
    bend = inner(here.gradient, surface.hessian(here.point)(here.gradient))
    radius = jnp.minimum(first_size**3 / jnp.where(bend == 0, 1, jnp.abs(bend)), reach)
    first = Walk(here, radius.astype(here.value.dtype), none, none + 1, none + 1, no)
    return jax.lax.while_loop(lambda walk: unfinished(walk, tol, max_steps), step, first)


class _Inner(NamedTuple):
    step: PyTree
    image: PyTree  # the Hessian times the step
    rest: PyTree  # the model's gradient there
    direction: PyTree
    at_edge: Bool[Array, ""]
    products: Int[Array, ""]


def _truncated(
    hessian: Callable[[PyTree], PyTree],
    gradient: PyTree,
    project: Callable[[PyTree], PyTree],
    radius: Float[Array, ""],
    enough: Float[Array, ""],
) -> _Inner:
    """An approximate minimum of the model within the radius, by truncated conjugate gradients.

    Source: Steihaug (1983), The conjugate gradient method and trust regions in large scale
    optimization; Toint (1981), Towards an efficient sparsity exploiting Newton method.
    """

    def step(state):
        direction, rest = state.direction, state.rest
        image = hessian(direction)
        bend, size = inner(direction, image), inner(rest, rest)
        length = size / bend
        ahead = linear_combination(1, state.step, length, direction)
        # Along a direction without curvature the model falls without end, so its lowest point is at
        # the edge.
        leaves = (bend <= 0) | (norm(ahead) >= radius)
        # Go to the edge: the positive root of |step + length direction| = radius, in the form in
        # which nothing cancels.
        a, b = inner(direction, direction), inner(state.step, direction)
        c = radius**2 - inner(state.step, state.step)
        to_edge = c / (b + jnp.sqrt(jnp.maximum(b**2 + a * c, 0)))
        length = jnp.where(leaves, to_edge, length)
        # Sums of tangent vectors leave the tangent space by rounding.
        rest = project(linear_combination(1, rest, length, image))
        return _Inner(
            linear_combination(1, state.step, length, direction),
            linear_combination(1, state.image, length, image),
            rest,
            linear_combination(-1, rest, inner(rest, rest) / size, direction),
            leaves,
            state.products + 1,
        )

    zero = jax.tree.map(jnp.zeros_like, gradient)
    start = scaled(-1, gradient)
    first = _Inner(zero, zero, gradient, start, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(
        lambda state: ~state.at_edge & (norm(state.rest) > enough) & (state.products < INNER_MOST),
        step,
        first,
    )
