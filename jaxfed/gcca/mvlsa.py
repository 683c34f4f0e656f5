"""GCCA in one exchange, from thin factors of the views."""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.core.aggregation import Stack
from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.clients import Clients
from jaxfed.gcca.views import check_count, check_views


class Truncated(NamedTuple):
    """One view's best approximation of some rank; singular vectors of nothing are zero."""

    values: Float[Array, "entities features"]
    left: Float[Array, "entities view_rank"]
    reciprocals: Float[Array, " view_rank"]  # of the singular values
    right: Float[Array, "features view_rank"]


class MVLSA(Algorithm):
    r"""Multiview latent semantic analysis: MAX-VAR GCCA of the views cut down to a small rank.

    Each client sends its view's first left singular vectors, `(entities, view_rank)`; the first
    ones of them all, side by side, are the representation, and each map is the least-squares fit
    of the truncated view to it. No `entities x entities` matrix is formed. One round
    (`rounds=1`); more change nothing. Meant as the `warm_start` of `jf.gcca.MaxVar`.

    The server sees every client's factor, so there is no secure aggregation of it. Derivatives
    need singular values of each view that differ.

    Source: Rastogi, Van Durme & Arora (2015), Multiview LSA, without regularization.
    """

    rank: int = eqx.field(static=True)
    view_rank: int | None = eqx.field(static=True)

    def __init__(self, rank: int, *, view_rank: int | None = None):
        """Set up the algorithm.

        Args:
            rank: number of components of the common representation.
            view_rank: rank to which each view is cut; None for twice `rank`, as far as views allow.

        Raises:
            ValueError: for ranks that are not positive whole numbers.
        """
        check_count("rank", rank)
        if view_rank is not None:
            check_count("view_rank", view_rank)
        self.rank, self.view_rank = rank, view_rank

    def check(self, clients: Clients, start: Personalized | None) -> None:
        """Refuse data and ranks that do not fit.

        Raises:
            ValueError: as said above.
        """
        del start
        check_views(clients, self.rank)
        views, *shape = clients.data.values.shape
        if self.view_rank is not None and self.view_rank > min(shape):
            raise ValueError(
                f"view_rank: {self.view_rank} singular vectors of views of shape {tuple(shape)}"
            )
        if self._width(*shape) * views < self.rank:
            raise ValueError(
                f"rank: {self.rank} components from {views} views cut to rank {self._width(*shape)}"
            )

    def _width(self, entities: int, features: int) -> int:
        return min(self.view_rank or 2 * self.rank, entities, features)

    def prepare(self, data, client_id, rounds):
        """The view's truncated singular value decomposition."""
        del client_id, rounds
        width = self._width(*data.values.shape)
        left, singular, right = jnp.linalg.svd(data.values, full_matrices=False)
        left, singular, right = left[:, :width], singular[:width], right[:width].T
        kept = positive(singular, data.values.shape)
        reciprocals = jnp.where(kept, 1 / jnp.where(kept, singular, 1), 0)
        return Truncated(data.values, left * kept, reciprocals, right)

    @property
    def start_aggregation(self):
        """All factors side by side."""
        return Stack()

    def client_init(self, key, data, start):
        """Send the left singular vectors."""
        del key, start
        return data.left, ()

    def server_init(self, key, uplink, start):
        """The first left singular vectors of all of them."""
        del key, start
        views, entities, width = uplink.shape
        together = uplink.transpose(1, 0, 2).reshape(entities, views * width)
        return jnp.linalg.svd(together, full_matrices=False)[0][:, : self.rank]

    def downlink(self, server):
        """The representation."""
        return server

    def client_begin(self, downlink, local, data):
        """The least-squares map of the truncated view."""
        del local
        root = jnp.sqrt(jnp.asarray(len(data.values), data.values.dtype))
        return data.right @ (data.reciprocals[:, None] * (data.left.T @ downlink)) * root

    def client_step(self, key, downlink, local, data):
        """Report the distance; nothing is sent any more."""
        del key
        root = jnp.sqrt(jnp.asarray(len(data.values), data.values.dtype))
        objective = jnp.sum((data.values @ local / root - downlink) ** 2) / 2
        return (), local, {"objective": objective}

    def server_step(self, key, server, uplink):
        """Nothing changes."""
        del key, uplink
        return server

    def client_result(self, downlink, local, data):
        """The map."""
        del downlink, data
        return local


def positive(singular: Float[Array, " k"], shape: tuple[int, ...]) -> Array:
    """Which singular values, in descending order, are more than rounding."""
    return singular > jnp.finfo(singular.dtype).eps * max(shape) * singular[0]
