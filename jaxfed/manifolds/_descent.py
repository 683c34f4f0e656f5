"""Conjugate gradients and L-BFGS on manifolds: directions of descent, and a search along each."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed.manifolds._line_search import Trial, search
from jaxfed.manifolds._space import Space, chosen, inner, linear_combination, norm, scaled
from jaxfed.manifolds._surface import Place, Surface, Walk, unfinished

PAIRS = 10


class _Memory(NamedTuple):
    direction: PyTree
    guess: Float[Array, ""]  # the length to try first
    fresh: Bool[Array, ""]  # whether the direction is that of steepest descent
    kept: PyTree  # state of the rule that chooses directions


class DirectionRule(NamedTuple):
    """A solver's rule for choosing directions."""

    flatness: float  # of the line search
    start: Callable[[Place], PyTree]  # the rule's initial state
    # (space, last place, its direction, accepted trial, the rule's state)
    # -> (next direction, length to try first or None for a guess from the last step, next state)
    turn: Callable[[Space, Place, PyTree, Trial, PyTree], tuple[PyTree, Any, PyTree]]


def line_search_descent(
    surface: Surface, start: PyTree, kind: DirectionRule, tol: float, max_steps: Int[Array, ""]
) -> Walk:
    """Descend until the gradient is small.

    If a search finds nothing lower, the next direction is that of steepest descent; if the search
    along that finds nothing lower either, the walk has stalled.
    """

    def steepest(here):
        direction = scaled(-1, here.gradient)
        size = norm(direction)
        return direction, (1 / jnp.where(size > 0, size, 1)).astype(here.value.dtype)

    def step(walk):
        here, (direction, guess, fresh, kept) = walk.here, walk.memory
        trial, lower, tried = search(surface, here, direction, guess, kind.flatness)
        # Within rounding, a search may end where neither value nor gradient is smaller.
        lower &= (trial.place.value < here.value) | (
            norm(trial.place.gradient) < norm(here.gradient)
        )
        # The rule sees the trial even if it is refused; its answer is then dropped.
        turned, length, kept = kind.turn(surface.space, here, direction, trial, kept)
        there = chosen(lower, trial.place, here)
        slope = inner(there.gradient, turned)
        if length is None:  # guess the length that would decrease the function as the last step did
            length = 2 * (here.value - there.value) / -slope
        # A direction that ascends, or is orthogonal to the gradient up to rounding, is of no use.
        down = -slope > 1e-8 * norm(there.gradient) * norm(turned)
        # The rule may divide by zero or overflow; then start it anew, along steepest descent.
        again = lower & down & jnp.isfinite(slope)
        usable = jnp.isfinite(length) & (length > 0)
        straight, first = steepest(there)
        memory = _Memory(
            chosen(again, turned, straight),
            jnp.where(again & usable, length, first).astype(first.dtype),
            ~again,
            chosen(again, kept, kind.start(there)),
        )
        steps, evaluations = walk.steps + lower, walk.evaluations + tried
        return Walk(there, memory, steps, evaluations, walk.products, stalled=~lower & fresh)

    here = surface.at(start)
    none, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    first = Walk(here, _Memory(*steepest(here), ~no, kind.start(here)), none, none + 1, none, no)
    return jax.lax.while_loop(lambda walk: unfinished(walk, tol, max_steps), step, first)


# --- conjugate gradients -------------------------------------------------------------------------


def _conjugate(
    space: Space, before: Place, direction: PyTree, trial: Trial, kept: None
) -> tuple[PyTree, None, None]:
    """The hybrid of Hestenes & Stiefel's and Dai & Yuan's directions.

    Source: Sakai & Iiduka (2020), Hybrid Riemannian conjugate gradient methods with global
    convergence properties; Sato (2022), Riemannian conjugate gradient methods, for scaling down
    transported vectors that are longer than before.
    """
    there = trial.place
    # The retraction's differential may leave the tangent space: on the Grassmann manifold by a
    # rotation of the basis, elsewhere by rounding.
    carried = space.project(there.point, trial.velocity)
    longer = norm(carried) / norm(direction)
    carried = scaled(1 / jnp.maximum(longer, 1), carried)
    change = linear_combination(1, there.gradient, -1, space.project(there.point, before.gradient))
    rise = inner(there.gradient, carried) - inner(before.gradient, direction)
    hestenes_stiefel = inner(there.gradient, change) / rise
    dai_yuan = inner(there.gradient, there.gradient) / rise
    share = jnp.maximum(0, jnp.minimum(hestenes_stiefel, dai_yuan))
    return linear_combination(-1, there.gradient, share, carried), None, kept


CONJUGATE_GRADIENTS = DirectionRule(0.1, lambda here: None, _conjugate)


# --- L-BFGS --------------------------------------------------------------------------------------


class _Pairs(NamedTuple):
    """Steps and the changes of the gradient along them, newest last; zeros for missing pairs."""

    steps: PyTree
    changes: PyTree
    weights: Float[Array, " pairs"]  # one over their inner products


def _no_pairs(here: Place) -> _Pairs:
    empty = jax.tree.map(lambda x: jnp.zeros((PAIRS, *x.shape), x.dtype), here.gradient)
    return _Pairs(empty, empty, jnp.zeros(PAIRS, here.value.dtype))


def _quasi_newton(
    space: Space, before: Place, direction: PyTree, trial: Trial, pairs: _Pairs
) -> tuple[PyTree, Array, _Pairs]:
    """Minus the inverse of the estimated Hessian times the gradient; transports all pairs.

    Source: Huang, Gallivan & Absil (2015), A Broyden class of quasi-Newton methods for Riemannian
    optimization; Nocedal & Wright (2006), Numerical optimization, Algorithm 7.4.
    """
    there = trial.place
    carry = partial(space.project, there.point)
    step = carry(scaled(trial.length, trial.velocity))
    change = linear_combination(1, there.gradient, -1, carry(before.gradient))
    product = inner(step, change)
    # A pair without positive curvature would make the estimate indefinite: keep the old ones.
    sound = product > 1e-10 * norm(step) * norm(change)
    # Pairs belong to earlier points' tangent spaces. Projecting them changes their inner products
    # slightly, whose inverses are kept as they were.
    olds = jax.vmap(carry)(pairs.steps), jax.vmap(carry)(pairs.changes)
    newest = jax.tree.map(
        lambda old, new: jnp.concatenate([old[1:], new[None]]), olds, (step, change)
    )
    weights = jnp.append(pairs.weights[1:], (1 / product).astype(pairs.weights.dtype))
    pairs = chosen(
        sound, _Pairs(newest[0], newest[1], weights), _Pairs(olds[0], olds[1], pairs.weights)
    )

    # The two-loop recursion, from the newest pair to the oldest and back.
    def back(vector, pair):
        step, change, weight = pair
        share = weight * inner(step, vector)
        return linear_combination(1, vector, -share, change), share

    def forth(vector, pair):
        (step, change, weight), share = pair
        return linear_combination(1, vector, share - weight * inner(change, vector), step), None

    vector, shares = jax.lax.scan(back, there.gradient, pairs, reverse=True)
    last = jax.tree.map(lambda x: x[-1], (pairs.changes, pairs.weights))
    # Scale by the newest pair, as the first estimate of the Hessian.
    curvature = last[1] * inner(last[0], last[0])
    vector = scaled(1 / jnp.where(curvature > 0, curvature, 1), vector)
    vector, _ = jax.lax.scan(forth, vector, (pairs, shares))
    # A quasi-Newton step has its own length, so try one.
    return carry(scaled(-1, vector)), jnp.ones_like(product), pairs


LBFGS = DirectionRule(0.9, _no_pairs, _quasi_newton)
