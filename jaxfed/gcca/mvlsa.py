"""MVLSA: GCCA in one exchange, from truncated singular value decompositions of the views."""

import equinox as eqx
import jax.numpy as jnp

from jaxfed.contract import OneExchange, check_count
from jaxfed.core.contract.reduction import Gather
from jaxfed.gcca.factors import Factors, factorize
from jaxfed.gcca.shares import divided, root_of, seen_rows
from jaxfed.gcca.views import (
    FactoredView,
    First,
    Scores,
    SparseView,
    View,
    Weights,
    check_all_seen,
    check_views,
)
from jaxfed.linalg import svd


class MVLSA(OneExchange):
    r"""Multiview latent semantic analysis: MAX-VAR GCCA of views truncated to a small rank.

    Each client sends the leading left singular vectors of its view, `(entities, view_rank)`. The
    leading left singular vectors of all of them side by side are the representation, and each map
    is the least-squares fit of the truncated view to it. No `entities x entities` matrix is formed.
    One round (`rounds=1`) is enough; further rounds change nothing. The result is meant as the
    `warm_start` of `jf.gcca.MaxVar`. Sparse views are truncated by subspace iteration, which is
    approximate. Clients may have seen different entities (see `jf.gcca.align`); the representation
    is then scaled like that of `MaxVar`.

    The server sees every client's factor, so secure aggregation cannot be used. Derivatives are
    those of `jf.linalg.svd`, for each view and for all factors side by side.

    Source: Rastogi, Van Durme & Arora (2015), Multiview LSA, without regularization.
    """

    quadratic_in_samples = True

    rank: int = eqx.field(static=True)
    view_rank: int | None = eqx.field(static=True)

    def __init__(self, rank: int, *, view_rank: int | None = None):
        """Set up the algorithm.

        Args:
            rank: number of components of the common representation.
            view_rank: rank to which each view is truncated; by default twice `rank` if possible.

        Raises:
            ValueError: if a rank is not a positive whole number.
        """
        check_count("rank", rank)
        check_count("view_rank", 1 if view_rank is None else view_rank)
        self.rank, self.view_rank = rank, view_rank

    @property
    def eigenvectors(self) -> int:
        """The rank."""
        return self.rank

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if data or ranks do not fit."""
        check_views(clients, self.rank)
        check_all_seen(clients, warm_start)
        views, shape = len(clients), clients.data.shape
        if self.view_rank is not None and self.view_rank > min(shape):
            raise ValueError(f"view_rank: wanted at most {min(shape)}, got {self.view_rank}")
        most = self._width(*shape) * views
        if most < self.rank:
            raise ValueError(f"rank: wanted at most the views' {most} together, got {self.rank}")

    def _width(self, entities: int, features: int) -> int:
        return min(self.view_rank or 2 * self.rank, entities, features)

    def prepare(self, data: View | FactoredView | SparseView, client_id, rounds) -> Factors:
        """Return the view's truncated singular value decomposition."""
        return factorize(data, self._width(*data.shape))

    def first_message(self, key, data: Factors, warm_start) -> First:
        """Return the left singular vectors, for the server to collect."""
        return First(Gather(data.left), data.observed)

    def server_init(self, key, first: First, like, warm_start) -> Scores:
        """Combine the views' bases, `(views, entities, k)`, to the common representation."""
        root, bases = root_of(first.observed), first.scores
        together = bases.transpose(1, 0, 2).reshape(bases.shape[1], -1)
        # G = W^(-1/2) H with the top left singular vectors H of W^(-1/2) times the bases: see
        # `shares`.
        return divided(svd(divided(together, root))[0][:, : self.rank], root)

    def client_init(self, key, downlink: Scores, data: Factors, warm_start) -> Weights:
        """Return the least-squares map of the truncated view."""
        return data.solve(downlink)

    def residual_variance(self, downlink: Scores, local: Weights, data: Factors):
        """Return half the squared distance of the truncated view's scores."""
        scores = data.mv(local) / len(downlink) ** 0.5
        return jnp.sum(seen_rows(data.observed, scores - downlink) ** 2) / 2
