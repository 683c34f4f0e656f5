"""GCCA in one exchange, from thin factors of the views."""

import equinox as eqx
import jax.numpy as jnp

from jaxfed.core.aggregation import Stack
from jaxfed.core.algorithm import OneExchange, Personalized
from jaxfed.core.checks import check_count
from jaxfed.core.clients import Clients
from jaxfed.gcca.views import check_views, factorize
from jaxfed.linalg import svd


class MVLSA(OneExchange):
    r"""Multiview latent semantic analysis: MAX-VAR GCCA of the views cut down to a small rank.

    Each client sends its view's first left singular vectors, `(entities, view_rank)`; the first
    ones of them all, side by side, are the representation, and each map is the least-squares fit
    of the truncated view to it. No `entities x entities` matrix is formed. One round
    (`rounds=1`); more change nothing. Meant as the `warm_start` of `jf.gcca.MaxVar`. Sparse views
    are cut down by a subspace iteration, which is approximate.

    The server sees every client's factor, so there is no secure aggregation of it. Derivatives
    are those of `jf.linalg.svd`: right where the singular values that are kept, of each view and of
    all factors side by side, differ from those left out; zero in the directions lost elsewhere.

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
        views, shape = len(clients), clients.data.shape
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
        return factorize(data, self._width(*data.shape))

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
        return svd(together)[0][:, : self.rank]

    def client_begin(self, downlink, local, data):
        """The least-squares map of the truncated view."""
        del local
        return data.solve(downlink)

    def left_over(self, downlink, local, data):
        """Half the squared distance; what the view has beyond its first triples counts nowhere."""
        scores = data.mv(local) / len(downlink) ** 0.5
        return jnp.sum((scores - downlink) ** 2) / 2
