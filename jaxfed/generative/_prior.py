"""The Gaussian prior of personal models: its penalty, its gradients, and how those are clipped."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from jaxfed.core.common.checks import check_name, check_positive, is_list, refuse


class Prior(NamedTuple):
    """The global model and how far personal weights are expected from it; also the message."""

    mean: PyTree  # μ, the global model's parameters
    spread: PyTree  # σ, one per scalar weight


def regularizer(personal: PyTree, prior: Prior, hyper_prior: Float[Array, ""]) -> Float[Array, ""]:
    """R(θ; μ, σ), the prior's negative logarithm up to a constant.

    Source: ADEPT, (2), with a spread for each scalar weight.
    """

    def one(w, m, s):
        return jnp.sum(jnp.log(s) + (2 * hyper_prior.astype(w.dtype) + (w - m) ** 2) / (2 * s**2))

    # Not from zero, whose type need not be that of the weights.
    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(one, personal, *prior)))


def spread_gradient(personal: PyTree, prior: Prior, hyper_prior: Float[Array, ""]) -> PyTree:
    """∂R/∂σ = 1/σ - (2ξ + (θ - μ)²)/σ³, for each scalar weight."""

    def one(w, m, s):
        return (1 - (2 * hyper_prior.astype(w.dtype) + (w - m) ** 2) / s**2) / s

    return jax.tree.map(one, personal, *prior)


def scaled_to_norm(gradient: PyTree, threshold: Float[Array, ""]) -> PyTree:
    """The gradient, scaled down where its norm over all arrays is above the threshold."""
    square = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient))
    limit = jnp.square(threshold.astype(jnp.asarray(square).dtype))
    # Nothing is divided by a norm of zero, whose derivative would be NaN.
    factor = jnp.sqrt(limit / jnp.where(square > limit, square, limit))
    return jax.tree.map(lambda g: factor.astype(g.dtype) * g, gradient)


def scaled_to_largest(gradient: PyTree, threshold: Float[Array, ""], *, each: bool) -> PyTree:
    """The gradient, scaled down where its largest absolute entry is above the threshold.

    Args:
        gradient: arrays.
        threshold: what the largest entry may be.
        each: whether arrays are scaled on their own, and not all alike.
    """
    sizes = jax.tree.map(lambda g: jnp.max(jnp.abs(g)), gradient)
    if not each:
        largest = jnp.max(jnp.stack(jax.tree.leaves(sizes)))
        sizes = jax.tree.map(lambda _: largest, sizes)

    def scaled(g, size):
        limit = threshold.astype(g.dtype)
        return limit / jnp.maximum(size, limit).astype(g.dtype) * g

    return jax.tree.map(scaled, gradient, sizes)


def proximal_map(
    personal: PyTree, mean: PyTree, precision: PyTree, factor: Float[Array, ""]
) -> PyTree:
    """The proximal map of so much of R in θ: (θ + t μ)/(1 + t) with t = factor/σ²."""

    def one(w, m, p):
        t = factor.astype(w.dtype) * p
        return w + t / (1 + t) * (m - w)

    return jax.tree.map(one, personal, mean, precision)


def bounded(spread: PyTree, bounds: tuple[float, float]) -> PyTree:
    """The spread, kept within bounds."""
    return jax.tree.map(lambda s: jnp.clip(s, *bounds), spread)


def check_bounds(bounds: Any, initial_spread: Any) -> None:
    """Refuse bounds that are none, and an initial spread outside of them."""
    if not is_list(bounds) or len(bounds) != 2:
        raise refuse("bounds", "a least and a largest positive spread", bounds)
    for bound in bounds:
        check_positive("bounds", bound, single=True)
    values = bounds
    if not values[0] <= values[1]:
        raise refuse("bounds", "a least and a largest positive spread", bounds)
    if isinstance(initial_spread, Tracer):
        return
    given = np.asarray(initial_spread)
    if (given < values[0]).any() or (given > values[1]).any():
        raise ValueError(
            f"initial_spread: wanted a number within the bounds {bounds}, got {initial_spread!r}"
        )


def check_prior_step(
    prior_step: Any, preset: str, global_step_size: Any, spread_step_size: Any
) -> None:
    """Refuse unknown kinds of steps, and what does not go with proximal ones."""
    check_name("prior_step", prior_step, ("gradient", "proximal"))
    if prior_step == "gradient":
        return
    if preset == "published":
        raise ValueError('prior_step: wanted gradient with the published preset, got "proximal"')
    for name, given in (
        ("global_step_size", global_step_size),
        ("spread_step_size", spread_step_size),
    ):
        if not isinstance(given, Tracer) and (np.asarray(given) > 1).any():
            raise ValueError(f"{name}: wanted at most 1 with proximal steps, got {given!r}")
