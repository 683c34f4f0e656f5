"""Federated eigensolvers: one subspace for all clients, found from sums of messages.

Client i holds `A_i` with its samples as columns. Wanted is an orthonormal Z that maximizes
`f(Z) = sum_i |A_iᵀ Z|_F²`: the top eigenvectors of `sum_i A_i A_iᵀ`. Every sample counts the same;
the clients' weights are ignored, except that a client of weight zero is left out.

In a round that some clients miss, the sum is over the others and the components follow theirs. The
result then scatters around what all clients would give, by as much as the clients differ.
"""

import abc
from typing import Literal, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxfed.contract import Algorithm, Diagnostics, DifferentiatedThrough, check_count, check_name
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.reduction import Sum
from jaxfed.linalg import Moment, orthonormalize
from jaxfed.linalg.division import ratio
from jaxfed.pca.components import (
    Frame,
    RandomKey,
    Start,
    check_fits,
    check_start,
    deflate,
    moment_of,
    uncaptured,
)


class Member(NamedTuple):
    """One client's prepared data."""

    moment: Moment  # A_i A_iᵀ: the sum over the samples, not their mean
    count: Float[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    client_id: Int[Array, ""]


class Server(NamedTuple):
    """The server's state."""

    shared: Frame  # Z
    captured: Float[Array, ""]  # f at the previous Z, at which the last messages were computed
    energy: Float[Array, ""] | None  # |A|_F², where the scaled KKT violation is measured


class Eigensolver(Algorithm, DifferentiatedThrough):
    """A federated eigensolver: its clients' data and its checks."""

    rank: int = eqx.field(static=True)
    stop: Literal["objective", "kkt"] = eqx.field(static=True)

    @final
    def _set(self, rank: int, stop: Literal["objective", "kkt"]) -> None:
        check_count("rank", rank)
        check_name("stop", stop, ("objective", "kkt"))
        self.rank, self.stop = rank, stop

    @abc.abstractmethod
    def _products(self, rounds: int) -> int:
        """About how many products with the client's matrix so many rounds take."""

    @final
    def check(self, clients, start) -> None:
        """Raise a `ValueError` for a rank or a warm start that does not fit."""
        check_fits("rank", self.rank, clients)
        check_start(start, clients, self.rank, None)

    @final
    def prepare(self, data: Samples | Moment, client_id, rounds) -> Member:
        """The client's matrix A_i A_iᵀ, or the samples behind it, whichever is cheaper."""
        # A second moment whose number of samples is one is the sum.
        one = jnp.ones_like(data.count)
        if isinstance(data, Samples):
            samples = Samples(data.values, one)
            summed = moment_of(samples, rank=self.rank, rounds=self._products(rounds))
        elif data.dense is not None:
            summed = Moment(data.count * data.dense, None, one, data.count * data.trace)
        else:
            summed = Moment(None, data.samples, one, data.count * data.trace)
        return Member(summed, data.count, client_id)


class Measured(Eigensolver):
    """An eigensolver whose server measures the components that its messages were computed at."""

    @final
    def first_message(self, key, data: Member, start) -> Sum | None:
        """The samples' energy |A_i|_F² if the stopping rule needs it."""
        return Sum(data.moment.trace) if self.stop == "kkt" else None

    @final
    def _first(self, key: RandomKey, energy: Array | None, like: Member, start: Start) -> Server:
        """The server's first state: random components, or those of a warm start."""
        dtype = like.moment.trace.dtype
        if start is None:
            shared = jax.random.uniform(key, (like.moment.dim, self.rank), dtype, -1, 1)
        else:
            shared = start.shared.astype(dtype)
        return Server(orthonormalize(shared), jnp.full((), jnp.nan, dtype), energy)

    @final
    def _measures(
        self,
        server: Server,
        captured: Array,
        product: Frame | None,
        exact: Bool[Array, ""] | None = None,
    ) -> Diagnostics:
        """What the server knows about the components Z that entered a round, with f(Z).

        The scaled KKT violation |(I - ZZᵀ) A Aᵀ Z|_F / |A|_F² comes from the product A Aᵀ Z; where
        the product is not exactly that, it is infinite.
        """
        if product is None or server.energy is None:
            change = relative_change(server.captured, captured)
            return {"captured": captured, "stopping_measure": change}
        violation = norm(ratio(deflate(product, server.shared), server.energy))
        if exact is not None:
            violation = jnp.where(exact, violation, jnp.inf)
        return {"captured": captured, "kkt_violation": violation, "stopping_measure": violation}


class HoldsBasis(Measured):
    """An eigensolver whose server holds the components alone, and whose clients get them."""

    @final
    def server_init(self, key, first: Array | None, like: Member, start) -> Server:
        """The first components."""
        return self._first(key, first, like, start)

    @final
    def downlink(self, server: Server) -> Frame:
        """The components."""
        return server.shared


def residual_variance(data: Member, captured: Float[Array, ""]) -> Float[Array, ""]:
    """A client's mean squared reconstruction error of a sample, which goes into the history."""
    return uncaptured(data.moment, captured) / jnp.maximum(data.count, 1)


def relative_change(before: Float[Array, ""], now: Float[Array, ""]) -> Float[Array, ""]:
    """The change of the captured energy as a share of it, rule (27) of Wang, Liu & Zhang (2022)."""
    return jnp.abs(now - before) / positive(now)


def positive(x: Array) -> Array:
    """The numbers, with one in place of zero."""
    return jnp.where(x > 0, x, 1)


def norm(x: Array) -> Float[Array, ""]:
    """Frobenius norm, with a derivative of zero where it is zero."""
    square = jnp.sum(x**2)
    return jnp.where(square > 0, jnp.sqrt(positive(square)), 0)
