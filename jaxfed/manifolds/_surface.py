"""A function on a space with its gradient and Hessian, and the state of a solver on it."""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from jaxfed.manifolds._space import Space, norm


class Place(NamedTuple):
    """A point, and the function and its gradients there."""

    point: PyTree
    value: Float[Array, ""]
    slope: PyTree  # the Euclidean gradient
    gradient: PyTree  # the Riemannian one


class Surface(eqx.Module):
    """A function on a space."""

    function: Callable[[PyTree], Float[Array, ""]]
    space: Space

    def at(self, point: PyTree) -> Place:
        """The point with the function's value and gradients."""
        value, slope = jax.value_and_grad(self.function)(point)
        return Place(point, value, slope, self.space.project(point, slope))

    def gradient(self, point: PyTree) -> PyTree:
        """The Riemannian gradient, tangent at the point."""
        return self.space.project(point, jax.grad(self.function)(point))

    def hessian(self, point: PyTree) -> Callable[[PyTree], PyTree]:
        """The Riemannian Hessian's product with tangent vectors.

        Source: Absil, Mahony & Sepulchre (2008), Optimization algorithms on matrix manifolds,
        Proposition 5.3.2: the projected derivative of the gradient.
        """
        _, product = jax.linearize(self.gradient, point)
        return lambda vector: self.space.project(point, product(vector))


class Ended(eqx.Enumeration):
    """How a minimization ended."""

    converged = "The gradient met the tolerance."
    step_limit = "All steps were taken."
    stalled = "Nothing lower was found, though the gradient does not meet the tolerance."
    diverged = "The function or its gradient is no longer finite."


class Walk(NamedTuple):
    """The state of a solver."""

    here: Place
    memory: PyTree
    steps: Array
    evaluations: Array
    products: Array
    stalled: Array


def unfinished(walk: Walk, tol: float, max_steps: Int[Array, ""]) -> Array:
    """Whether the solver must continue."""
    size = norm(walk.here.gradient)
    # An infinite or NaN gradient ends the walk.
    return ~met(walk.here, tol) & (size < float("inf")) & (walk.steps < max_steps) & ~walk.stalled


def met(here: Place, tol: float) -> Array:
    """Whether the gradient is small enough."""
    return norm(here.gradient) <= tol
