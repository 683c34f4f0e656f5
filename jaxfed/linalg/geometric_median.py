"""The geometric median of points, for robust aggregates and one-shot estimates."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxfed.linalg.division import ratio

Weights: TypeAlias = Float[Array, " points"]
Gram: TypeAlias = Callable[[PyTree, Weights], Float[Array, "points points"]]
Squares: TypeAlias = Callable[[PyTree, Weights], Weights]

# The iteration stops at this relative gap, in roots of the rounding error, or after so many steps.
TOLERANCE = 4
MOST = 1000


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def median_weights(
    gram: Gram, squares: Squares, smooth: float, points: PyTree, shares: Weights, start: Weights
) -> Weights:
    r"""Weights \(w\) by which \(\sum_i w_i x_i\) has the least sum of distances to the points.

    It repeats Weiszfeld's step, \(w_i \propto s_i / |x_i - \sum_j w_j x_j|\), until the sum is near
    its least value: by convexity, a step that changes the weights by \(\Delta w\) shows that the
    sum is too large by at most the share \(2 U \sum_i |\Delta w_i| D_i\), with the distances
    \(D_i\) and \(U = \sum_i s_i / D_i\). Derivatives are those of the fixed point. Where points
    coincide with the median, they are those of the smoothed distances.

    Source: Weiszfeld (1937), Sur le point pour lequel la somme des distances de n points donnés est
    minimum; with smoothed distances, Pillutla, Kakade & Harchaoui (2022), Robust aggregation for
    federated learning, Algorithm 1.

    Args:
        gram: returns the inner products of the points minus their mean by the weights.
        squares: returns the squared distances of the points to their mean by the weights.
        smooth: what squared distances grow by, so that none is zero; small beside those of most
            points.
        points: the points, in any form.
        shares: s, at least 0, with the sum one.
        start: weights to start from, with the sum one.
    """
    limit = TOLERANCE * jnp.finfo(shares.dtype).eps ** 0.5

    def unfinished(carry: tuple[Weights, Array, Array]) -> Array:
        _, gap, number = carry
        return (gap > limit) & (number < MOST)

    def body(carry: tuple[Weights, Array, Array]) -> tuple[Weights, Array, Array]:
        weights, _, number = carry
        inverse, found = _inverse(squares, smooth, points, shares, weights)
        after = inverse / inverse.sum()
        # Distances may overflow; such points have the weight zero.
        moved = jnp.where(inverse > 0, jnp.abs(after - weights) * found, 0)
        return after, 2 * inverse.sum() * moved.sum(), number + 1

    first = start, jnp.full((), jnp.inf, shares.dtype), jnp.zeros((), jnp.int32)
    return jax.lax.while_loop(unfinished, body, first)[0]


def _inverse(
    squares: Squares, smooth: float, points: PyTree, shares: Weights, weights: Weights
) -> tuple[Weights, Weights]:
    """Return shares divided by distances, and the distances."""
    found = jnp.sqrt(jnp.maximum(squares(points, weights), 0) + smooth)
    return shares / found, found


@median_weights.defjvp
def _(gram, squares, smooth, primals, tangents):
    points, shares, _ = primals
    weights = median_weights(gram, squares, smooth, *primals)

    def step(points, shares):
        inverse, _ = _inverse(squares, smooth, points, shares, weights)
        return inverse / inverse.sum()

    after, change = jax.jvp(step, primals[:2], tangents[:2])
    found = _inverse(squares, smooth, points, shares, weights)[1]
    # With q_i = |x_i - c|² and c = Σ w_j x_j, dq_i = -2 Σ_j ⟨x_i - c, x_j - c⟩ dw_j for changes
    # that add up to zero, and the step's are those of s_i / √q_i, relative to their sum.
    near = (after > 0) & jnp.isfinite(found)
    turn = after[:, None] * ratio(ratio(gram(points, weights), found[:, None]), found[:, None])
    turn = jnp.where(near[:, None] & near, turn, 0)
    turn = turn - after[:, None] * turn.sum(axis=0)
    return weights, jnp.linalg.solve(jnp.eye(len(turn), dtype=turn.dtype) - turn, change)
