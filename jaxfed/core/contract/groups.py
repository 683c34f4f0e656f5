"""A reduction to the sums of groups of clients."""

from dataclasses import replace
from typing import Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jaxfed.core.contract.reduction import Additive, Sum, scaled


@final
class Groups(Additive):
    """Sums by groups of clients, `(number, ...)`: each client sends one message, to its own group.

    A client's group is its id modulo the number of groups, in each round the same. Contributions
    are scaled by the clients' weights, so that one group is `Mean` but for a division; without
    weights they are plain. A message of a one in the same reduction sums up what each group weighs;
    with a limit of one, no client can claim to weigh more.

    Numbers that are not finite count as zero, so that they stay within their group.
    """

    value: PyTree
    number: int = eqx.field(static=True)
    weighted: bool = eqx.field(static=True, default=True)
    limit: float | None = eqx.field(static=True, default=None)  # larger numbers are clipped
    group: Int[Array, "*clients"] | None = None  # known to the server, and never sent

    linear = True

    @property
    def is_mean(self) -> bool:
        """If it is weighted."""
        return self.weighted

    def of_client(self, client_id: Int[Array, ""]) -> Self:
        """With the group of a client."""
        return replace(self, group=client_id % self.number)

    def contribution(self, weight: Float[Array, ""]) -> Self:
        """The weighted part, or zero from an absent client, whatever it made."""
        scale = weight if self.weighted else jnp.ones_like(weight)

        def one(x: Array) -> Array:
            # In the product below, zero times what is not finite would reach every group.
            counts = (weight > 0) & jnp.isfinite(x)
            if self.limit is not None:
                x = jnp.clip(x, -self.limit, self.limit)
            return jnp.where(counts, scaled(scale, x), 0)

        return replace(self, value=jax.tree.map(one, self.value))

    def over_clients(self) -> Sum:
        """The sums of the groups."""
        assert self.group is not None
        which = self.group == jnp.arange(self.number)[:, None]

        def sums(x):
            # A sum over sorted rows, as of `jax.ops.segment_sum`, is slower than this product.
            highest = jax.lax.Precision.HIGHEST
            return jnp.tensordot(which.astype(x.dtype), x, 1, precision=highest)

        return Sum(jax.tree.map(sums, self.value))
