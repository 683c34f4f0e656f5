"""Sums of small probabilities: an example of a reduction for jaxfed in a package of its own."""

from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

import jaxfed as jf


class LogSumExp(jf.reduction.Reduction):
    """The logarithm of the weighted mean of exponentials, log Σ wᵢ exp(xᵢ), entry by entry.

    Clients send logarithms, for example of likelihoods that are too small for floating-point
    numbers.
    """

    value: PyTree

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """Add the logarithm of the weight; minus infinity for an absent client."""
        present = weight > 0
        log_weight = jnp.log(jnp.where(present, weight, 1))
        return jax.tree.map(
            lambda x: jnp.where(present, x + log_weight.astype(x.dtype), -jnp.inf), self
        )

    def over_clients(self) -> Self:
        """Reduce the leading axis."""
        return jax.tree.map(lambda x: jax.nn.logsumexp(x, axis=0), self)

    def neutral(self) -> Self:
        """Return the logarithm of zero."""
        return jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), self)

    def combined(self, other: Self) -> Self:
        """Return the logarithm of the sum of two."""
        return jax.tree.map(jnp.logaddexp, self, other)

    @staticmethod
    def over_devices(parts: list["LogSumExp"], axis: str) -> list["LogSumExp"]:
        """Gather and reduce the parts of all devices."""
        return jax.tree.map(lambda x: jax.nn.logsumexp(jax.lax.all_gather(x, axis), axis=0), parts)
