r"""AJIVE: joint and individual parts of views, from the angles between their signals.

.. math:: X_i = J_i + I_i + E_i, \qquad J_i = V V^T X_i, \quad V^T I_i = 0

View i has a joint part, whose scores `V` all views share, an individual part and noise.

Source: Feng, Jiang, Hannig & Marron (2018), Angle-based joint and individual variation explained,
Journal of Multivariate Analysis 166. Their matrices have samples as columns, ours entities as rows.
"""

from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxfed.contract import Algorithm, Personalized, check_count
from jaxfed.core.common.printing import is_known
from jaxfed.core.contract.algorithm import nothing_left
from jaxfed.core.contract.reduction import Gather, Sum
from jaxfed.gcca._signal import (
    Ranks,
    check_fit,
    checked_ranks,
    concatenated,
    rank_of,
    signal_of,
    widest,
)
from jaxfed.gcca.views import Scores, View, check_views
from jaxfed.linalg import matmul, svd, transposed_product
from jaxfed.linalg.division import reciprocal
from jaxfed.linalg.svd import leading_triples, not_rounding


class Joint(NamedTuple):
    """The part that all views share; columns of dropped directions are zero.

    Attributes:
        scores: scores of the entities, with orthonormal columns: `V`.
        singular_values: singular values of all views' bases side by side. A direction that lies
            in every view's signal has the largest possible one, the root of the number of views.
    """

    scores: Float[Array, "entities rank"]
    singular_values: Float[Array, " rank"]


class ViewScores(NamedTuple):
    """Scores of entities, computed from one view."""

    joint: Float[Array, "entities rank"]
    individual: Float[Array, "entities width"]


class ViewParts(NamedTuple):
    """The joint and the individual part of one view; missing directions are zero columns.

    Attributes:
        joint_loadings: `X' V`; rows are zero where a view has fewer features than the widest.
        individual_scores: orthonormal columns, orthogonal to the joint scores.
        individual_loadings: orthogonal columns, whose norms are the individual singular values.
    """

    joint_loadings: Float[Array, "*views features rank"]
    individual_scores: Float[Array, "*views entities width"]
    individual_loadings: Float[Array, "*views features width"]

    def joint(self, joint: Joint) -> Float[Array, "*views entities features"]:
        """Return the joint part, `V V' X`."""
        return matmul(joint.scores, self.joint_loadings.mT)

    def individual(self) -> Float[Array, "*views entities features"]:
        """Return the individual part."""
        return matmul(self.individual_scores, self.individual_loadings.mT)

    def transform(self, values: Float[Array, "new features"]) -> ViewScores:
        """Compute least-squares scores of other entities from ONE view.

        Args:
            values: the view's features of these entities, centred like the original ones.

        Returns:
            Scores in the units of the learned ones. To estimate an entity's joint scores, average
            them over the views that have seen it.
        """
        loadings = jnp.concatenate([self.joint_loadings, self.individual_loadings], axis=1)
        left, singular, right = svd(loadings)
        inverse = reciprocal(singular, not_rounding(singular, loadings.shape))
        # The two kinds of loadings need not be orthogonal to each other, so scores are found
        # together.
        scores = matmul(matmul(values, left) * inverse, right)
        rank = self.joint_loadings.shape[1]
        return ViewScores(scores[:, :rank], scores[:, rank:])


class AJIVEMember(NamedTuple):
    """ONE client's prepared view."""

    values: Float[Array, "entities features"]
    basis: Float[Array, "entities width"]
    threshold: Float[Array, ""]  # minimum norm of a joint direction's loadings
    least: Float[Array, ""]  # minimum singular value of an individual direction
    individual_rank: Int[Array, ""]


class AJIVE(Algorithm):
    r"""Angle-based joint and individual variation explained, in one exchange and one round.

    Each client sends an orthonormal basis of its signal's scores: the left singular vectors of its
    view, up to the view's signal rank. The first left singular vectors of all bases side by side
    are the joint scores. In the round, each client reports which of these directions its view
    lacks: those whose loadings are at most as long as the view's threshold, midway between the
    singular values of signal and noise. Directions that some view lacks are dropped, and so are
    those in which the views agree no more than a single one does with itself (singular value 1).
    The rest of a view, \((I - V V^T) X_i\), is individual where its singular values exceed the
    same threshold.
    One round (`rounds=1`) with all clients is enough; further rounds change nothing.

    `solution.result.shared` is a `Joint`, `solution.result.local` the `ViewParts` of all views,
    `(views, ...)`. Directions are in order of decreasing agreement of the bases.
    `jf.gcca.joint_rank` estimates the number of joint directions by the paper's two bounds. Means
    are not subtracted; `Views.from_arrays(..., center=True)` does that. `jf.personalize` computes
    the parts of another view of the same entities.

    The server sees every client's basis, so secure aggregation cannot be used. Messages have
    `signal_rank` numbers per entity; if ranks differ, all have the size of the largest. Derivatives
    are those of `jf.linalg.svd`, with the directions and ranks held fixed.

    Source: Feng, Jiang, Hannig & Marron (2018), Section 2.
    """

    quadratic_in_samples = True

    rank: int = eqx.field(static=True)
    signal_rank: Ranks = eqx.field(static=True)
    individual_rank: Ranks | None = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        signal_rank: int | tuple[int, ...],
        *,
        individual_rank: int | tuple[int, ...] | None = None,
    ):
        """Set up the algorithm.

        Args:
            rank: number of joint directions before those that some view lacks are dropped.
            signal_rank: number of directions of a view that are not noise, joint and individual
                ones together; one number for all views or one per view.
            individual_rank: number of a view's individual directions, one for all views or one per
                view. By default those above the view's threshold, at most its signal rank.

        Raises:
            ValueError: if a rank is not a positive whole number; an individual rank may be 0 for
                some views.
        """
        check_count("rank", rank)
        self.rank = rank
        self.signal_rank = checked_ranks("signal_rank", signal_rank, least=1)
        self.individual_rank = None
        if individual_rank is not None:
            self.individual_rank = checked_ranks("individual_rank", individual_rank, least=0)

    @property
    def eigenvectors(self) -> int:
        """The rank."""
        return self.rank

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if data or ranks do not fit."""
        check_views(clients, self.rank, dense="AJIVE needs", complete="AJIVE needs")
        check_fit("signal_rank", self.signal_rank, clients)
        if self.individual_rank is not None:
            check_fit("individual_rank", self.individual_rank, clients)
        signals = self.signal_rank
        most = sum(signals) if isinstance(signals, tuple) else signals * len(clients.ids)
        if self.rank > most:
            raise ValueError(f"rank: wanted at most the views' {most} together, got {self.rank}")

    def prepare(self, data: View, client_id, rounds) -> AJIVEMember:
        """Return the view's signal, its thresholds and its individual rank."""
        signal = signal_of(data, self.signal_rank, client_id)
        width, least = widest(self.signal_rank), signal.threshold
        individual_rank = jnp.asarray(width)
        if self.individual_rank is not None:
            # A given rank replaces the threshold, so directions count down to rounding errors.
            individual_rank = rank_of(self.individual_rank, client_id)
            least = signal.rounding
        return AJIVEMember(data.values, signal.left, signal.threshold, least, individual_rank)

    def first_message(self, key, data: AJIVEMember, warm_start) -> Gather:
        """Return the basis of the signal's scores, for the server to collect."""
        return Gather(data.basis)

    def server_init(
        self, key, first: Float[Array, "views entities width"], like, warm_start
    ) -> Joint:
        """Return the directions nearest to all views' signals."""
        bases = concatenated(first)
        left, singular, _ = svd(bases)
        # A direction that only one view has gets the value 1. If several have it, the decomposition
        # may return mixtures in which every view has a part, so no client would miss them.
        # Errors of singular values of orthonormal columns do not grow with the number of entities.
        rounding = jnp.finfo(singular.dtype).eps * min(bases.shape) * singular[0]
        kept = (singular > 1 + rounding) | (len(first) == 1)
        return Joint((left * kept)[:, : self.rank], (singular * kept)[: self.rank])

    def downlink(self, server: Joint) -> Scores:
        """Return the joint scores."""
        return server.scores

    def client_init(self, key, downlink: Scores, data: AJIVEMember, warm_start) -> None:
        """Return None: the parts depend on the joint scores that remain after the round."""

    def client_step(self, key, downlink: Scores, local: None, data: AJIVEMember):
        """Report which directions the view lacks."""
        loadings = transposed_product(data.values, downlink)
        # Columns of directions dropped before are zero, so they stay dropped.
        lacks = jnp.linalg.norm(loadings, axis=0) <= data.threshold
        rest = data.values - matmul(downlink, loadings.T)
        objective = jnp.sum(rest**2) / len(rest)
        return Sum(lacks.astype(rest.dtype)), None, {"objective": objective}

    def server_step(self, key, server: Joint, uplink: Float[Array, " rank"]):
        """Drop the directions that some view lacks."""
        kept = uplink < 0.5  # a number of views, up to the channel's error
        return Joint(*(jnp.where(kept, part, 0) for part in server)), nothing_left()

    def shared_result(self, server: Joint) -> Joint:
        """Return the joint scores and singular values."""
        return server

    def client_result(self, downlink: Scores, local: None, data: AJIVEMember) -> ViewParts:
        """Return the view's parts."""
        loadings = transposed_product(data.values, downlink)
        ranks = self.signal_rank if self.individual_rank is None else self.individual_rank
        width, rest = widest(ranks), data.values - matmul(downlink, loadings.T)
        left, singular, right = leading_triples(rest, width)
        singular = singular[:width]
        kept = (singular > data.least) & (jnp.arange(width) < data.individual_rank)
        return ViewParts(loadings, left * kept, right.T * singular * kept)

    def through(self) -> Algorithm:
        """Refuse implicit derivatives: the result is not a fixed point of rounds.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "adjoint: wanted an algorithm of converging rounds for an implicit derivative, got "
            "AJIVE, which needs only one round; use adjoint.unrolled(), which is exact"
        )

    def remarks(self, result: Personalized, history: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Warn if directions were dropped."""
        if not is_known(result.shared.singular_values):
            return ()
        dropped = int(np.sum(np.asarray(result.shared.singular_values) == 0))
        if not dropped:
            return ()
        return (
            f"Some view lacks {dropped} of the {self.rank} joint directions, which were dropped: "
            "their loadings were within its noise, or no two views agree in them.",
        )
