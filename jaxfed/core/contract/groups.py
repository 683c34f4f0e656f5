"""Reduces messages to one sum for each group of clients."""

from dataclasses import replace
from typing import Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jaxfed.core.contract.reduction import Additive, Sum, scaled_part


@final
class Groups(Additive):
    """Sums by groups of clients, `(number, ...)`: each client sends one message, to its own group.

    A client's group is its id modulo the number of groups, the same in every round. Contributions
    are scaled by the clients' weights unless `weighted=False`; a single weighted group is `Mean`
    without the division. To get each group's total weight, send a one in the same reduction; with
    `limit=1`, no client can claim more.

    Numbers that are not finite count as zero, so they cannot spoil other groups.
    """

    value: PyTree
    number: int = eqx.field(static=True)
    weighted: bool = eqx.field(static=True, default=True)
    limit: float | None = eqx.field(static=True, default=None)  # larger numbers are clipped
    group: Int[Array, "*clients"] | None = None  # known to the server, never sent

    linear = True

    @property
    def is_mean(self) -> bool:
        """Whether it is weighted."""
        return self.weighted

    def of_client(self, client_id: Int[Array, ""]) -> Self:
        """This part with the client's group."""
        return replace(self, group=client_id % self.number)

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The weighted part, or zero from an absent client."""
        scale = weight if self.weighted else jnp.ones_like(weight)

        def one(x: Array) -> Array:
            # In `over_clients`, zero times a NaN would reach every group.
            counts = (weight > 0) & jnp.isfinite(x)
            if self.limit is not None:
                x = jnp.clip(x, -self.limit, self.limit)
            return jnp.where(counts, scaled_part(scale, x), 0)

        return replace(self, value=jax.tree.map(one, self.value))

    def over_clients(self) -> Sum:
        """The sum of each group."""
        assert self.group is not None
        which = self.group == jnp.arange(self.number)[:, None]

        def sums(x):
            # A product with the indicator matrix is faster than a sum over sorted rows such as
            # `jax.ops.segment_sum`.
            highest = jax.lax.Precision.HIGHEST
            return jnp.tensordot(which.astype(x.dtype), x, 1, precision=highest)

        return Sum(jax.tree.map(sums, self.value))
