"""The Gaussian prior of personal models: its penalty, its gradients, and gradient clipping."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


class Prior(NamedTuple):
    """The global model and the expected deviation of personal weights; also the message."""

    mean: PyTree  # μ, the global model's parameters
    spread: PyTree  # σ, one per scalar weight


def regularizer(personal: PyTree, prior: Prior, hyper_prior: Float[Array, ""]) -> Float[Array, ""]:
    """R(θ; μ, σ), the negative log of the prior up to a constant.

    Source: ADEPT, (2), with a spread for each scalar weight.
    """

    def one(w, m, s):
        return jnp.sum(jnp.log(s) + (2 * hyper_prior.astype(w.dtype) + (w - m) ** 2) / (2 * s**2))

    # `reduce` without a start: a zero may be of another type than the weights.
    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(one, personal, *prior)))


def pull(personal: PyTree, mean: PyTree, precision: PyTree) -> PyTree:
    """∂R/∂θ = (θ - μ)/σ², for each scalar weight."""
    return jax.tree.map(lambda w, m, p: (w - m) * p, personal, mean, precision)


def spread_gradient(personal: PyTree, prior: Prior, hyper_prior: Float[Array, ""]) -> PyTree:
    """∂R/∂σ = 1/σ - (2ξ + (θ - μ)²)/σ³, for each scalar weight."""

    def one(w, m, s):
        return (1 - (2 * hyper_prior.astype(w.dtype) + (w - m) ** 2) / s**2) / s

    return jax.tree.map(one, personal, *prior)


def proximal_map(
    personal: PyTree, mean: PyTree, precision: PyTree, factor: Float[Array, ""]
) -> PyTree:
    """The proximal map of `factor` times R in θ: (θ + t μ)/(1 + t) with t = factor/σ²."""

    def one(w, m, p):
        t = factor.astype(w.dtype) * p
        return w + t / (1 + t) * (m - w)

    return jax.tree.map(one, personal, mean, precision)


def bounded(spread: PyTree, bounds: tuple[float, float]) -> PyTree:
    """The spread clipped to its bounds."""
    return jax.tree.map(lambda s: jnp.clip(s, *bounds), spread)


def scaled_to_norm(gradient: PyTree, threshold: Float[Array, ""]) -> PyTree:
    """Scale a gradient down so that its norm over all arrays is at most the threshold."""
    square = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient))
    limit = jnp.square(threshold.astype(jnp.asarray(square).dtype))
    # Never divide by the norm itself: at zero the derivative would be NaN.
    factor = jnp.sqrt(limit / jnp.where(square > limit, square, limit))
    return jax.tree.map(lambda g: factor.astype(g.dtype) * g, gradient)


def scaled_to_largest(gradient: PyTree, threshold: Float[Array, ""], *, each: bool) -> PyTree:
    """Scale a gradient down so that its largest absolute entry is at most the threshold.

    All arrays alike, or each by its own largest entry.
    """
    sizes = jax.tree.map(lambda g: jnp.max(jnp.abs(g)), gradient)
    if not each:
        largest = jnp.max(jnp.stack(jax.tree.leaves(sizes)))
        sizes = jax.tree.map(lambda _: largest, sizes)

    def scaled(g, size):
        limit = threshold.astype(g.dtype)
        return limit / jnp.maximum(size, limit).astype(g.dtype) * g

    return jax.tree.map(scaled, gradient, sizes)
