"""Federated eigensolvers: one subspace for all clients, computed from sums of messages.

Client i holds `A_i`, whose columns are its samples. The solvers find an orthonormal Z that
maximizes `f(Z) = sum_i |A_iᵀ Z|_F²`: the top eigenvectors of `sum_i A_i A_iᵀ`. All samples count
equally; clients' weights are ignored, except that clients of weight zero are left out.

If clients miss a round, the sum runs over the others and the components follow them. The result
then scatters around that of all clients, by as much as the clients differ.
"""

import abc
import math
import warnings
from typing import ClassVar, Literal, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxfed._names import caller
from jaxfed.contract import Algorithm, Diagnostics, Personalized, check_count, check_name
from jaxfed.core.clients.samples import Samples
from jaxfed.core.clients.units import ratio_of_axes
from jaxfed.core.contract.reduction import Sum
from jaxfed.linalg import Moment, orthonormalize
from jaxfed.linalg.division import ratio
from jaxfed.pca.components import (
    Frame,
    RandomKey,
    check_fits,
    check_warm_start,
    deflate,
    frobenius_norm,
    moment_of,
    positive,
    uncaptured,
)


class ConsensusMember(NamedTuple):
    """One client's prepared data."""

    moment: Moment  # A_i A_iᵀ: the sum over the samples, not their mean
    size: Float[Array, ""]  # number of samples
    client_id: Int[Array, ""]


class ConsensusServer(NamedTuple):
    """The server's state."""

    shared: Frame  # Z
    captured: Float[Array, ""]  # f at the previous Z, for which the last messages were computed
    energy: Float[Array, ""] | None  # |A|_F², if the KKT violation is measured


class Eigensolver(Algorithm):
    """Base of the federated eigensolvers: their checks and the clients' data."""

    quadratic_in_samples = True

    rank: int = eqx.field(static=True)
    stop: Literal["objective", "kkt"] | None = eqx.field(static=True)

    @property
    @final
    def eigenvectors(self) -> int:
        """The rank."""
        return self.rank

    @final
    def _set(self, rank: int, stop: Literal["objective", "kkt"] | None) -> None:
        check_count("rank", rank)
        if stop is not None:
            check_name("stop", stop, ("objective", "kkt"))
        self.rank, self.stop = rank, stop

    @abc.abstractmethod
    def _products(self, rounds: int) -> int:
        """Estimate the number of products with the client's matrix in so many rounds."""

    most_unlike: ClassVar[float] = math.inf
    """How many times stronger one component may be than another, for both to be found."""

    @final
    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the rank or the warm start does not fit.

        Warns:
            UserWarning: if some components are too strong beside others.
        """
        check_fits("rank", self.rank, clients)
        check_warm_start(warm_start, clients, self.rank, None)
        if self.most_unlike < math.inf and ratio_of_axes(clients, self.rank) > self.most_unlike:
            warnings.warn(
                f"clients: {type(self).__name__} wants components at most {self.most_unlike:.0f} "
                "times as strong as others, got stronger ones, beside which others hardly move, so "
                "that a run may end before it has found them; subtract means, standardize features "
                "in unlike units, or use BlockLanczos",
                stacklevel=caller(),
            )

    @final
    def prepare(self, data: Samples | Moment, client_id, rounds) -> ConsensusMember:
        """Return the client's matrix A_i A_iᵀ, or its samples, whichever is cheaper."""
        # A `Moment` divides by its count. With a count of one it is the sum A_i A_iᵀ, as in the
        # paper; the number of samples is kept beside it.
        one = jnp.ones_like(data.count)
        if isinstance(data, Samples):
            samples = Samples(data.values, one)
            summed = moment_of(samples, rank=self.rank, rounds=self._products(rounds))
        elif data.dense is not None:
            summed = Moment(data.count * data.dense, None, one, data.count * data.trace)
        else:
            summed = Moment(None, data.samples, one, data.count * data.trace)
        return ConsensusMember(summed, data.count, client_id)


class Measured(Eigensolver):
    """An eigensolver whose server measures how good the components of a round were."""

    @final
    def first_message(self, key, data: ConsensusMember, warm_start) -> Sum | None:
        """Return the energy |A_i|_F² of the samples if the stopping rule needs it."""
        return Sum(data.moment.trace) if self.stop == "kkt" else None

    @final
    def _first(
        self,
        key: RandomKey,
        energy: Array | None,
        like: ConsensusMember,
        warm_start: Personalized | None,
    ) -> ConsensusServer:
        """Return the server's first state, with random components or the warm start's."""
        dtype = like.moment.trace.dtype
        if warm_start is None:
            # As in Section 5.2 of Wang, Liu & Zhang (2022): entries uniform in [-1, 1].
            shared = jax.random.uniform(key, (like.moment.dim, self.rank), dtype, -1, 1)
        else:
            shared = warm_start.shared.astype(dtype)
        # NaN for f makes the first relative change NaN, which is below no tolerance.
        return ConsensusServer(orthonormalize(shared), jnp.full((), jnp.nan, dtype), energy)

    @final
    def _measures(
        self,
        server: ConsensusServer,
        captured: Array,
        product: Frame | None,
        exact: Bool[Array, ""] | None = None,
    ) -> Diagnostics:
        """Return what the server knows about the components Z of a round, with f(Z).

        The scaled KKT violation |(I - ZZᵀ) A Aᵀ Z|_F / |A|_F² is computed from `product`, A Aᵀ Z.
        It is infinite where `exact` is false.
        """
        if self.stop is None:
            return {"captured": captured}
        if product is None or server.energy is None:
            change = relative_change(server.captured, captured)
            return {"captured": captured, "stopping_measure": change}
        # Scaled as in Section 5.2. The paper does not stop by it because that takes extra messages
        # (Remark 9); subspace iteration has A Aᵀ Z from its own sum.
        violation = frobenius_norm(ratio(deflate(product, server.shared), server.energy))
        if exact is not None:
            violation = jnp.where(exact, violation, jnp.inf)
        return {"captured": captured, "kkt_violation": violation, "stopping_measure": violation}


class HoldsBasis(Measured):
    """An eigensolver whose server holds and sends only the components."""

    @final
    def server_init(
        self, key, first: Array | None, like: ConsensusMember, warm_start
    ) -> ConsensusServer:
        """Return the first components."""
        return self._first(key, first, like, warm_start)

    @final
    def downlink(self, server: ConsensusServer) -> Frame:
        """Return the components."""
        return server.shared

    @final
    def feasible(self, downlink: Frame, data) -> Frame:
        """Return orthonormal components."""
        return orthonormalize(downlink)


def residual_variance(data: ConsensusMember, captured: Float[Array, ""]) -> Float[Array, ""]:
    """Return a client's mean squared reconstruction error per sample, for the history."""
    return uncaptured(data.moment, captured) / jnp.maximum(data.size, 1)


def relative_change(before: Float[Array, ""], now: Float[Array, ""]) -> Float[Array, ""]:
    """Return the relative change of the captured energy, rule (27) of Wang, Liu & Zhang (2022)."""
    return jnp.abs(now - before) / positive(now)
