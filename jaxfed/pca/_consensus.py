"""What the federated eigensolvers share: one subspace for all clients, found by sums of messages.

Client i holds `A_i` with its samples as columns. Wanted is an orthonormal Z that maximizes
`f(Z) = sum_i |A_iᵀ Z|_F²`: the top eigenvectors of `sum_i A_i A_iᵀ`, so that every sample counts
the same and the clients' weights play no part, but that a client of weight zero is left out.

In a round that some clients miss, the sum is over the others, and the components follow theirs: the
result scatters around what all would give, by as much as the clients differ.
"""

import abc
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxfed.core.aggregation import Aggregation, Sum
from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.checks import check_count, check_name
from jaxfed.core.clients import Clients, Samples
from jaxfed.linalg import Moment, orthonormalize
from jaxfed.pca._components import Frame, check_data, check_fits, check_start, deflate, moment_of


class Member(NamedTuple):
    """One client's prepared data."""

    moment: Moment  # A_i A_iᵀ: the sum over the samples, not their mean
    count: Float[Array, ""]


class Server(NamedTuple):
    """The server's state."""

    shared: Frame  # Z
    captured: Float[Array, ""]  # f at the Z before, which the last messages were made at
    kkt: Float[Array, ""] | None  # the scaled KKT violation there, and
    energy: Float[Array, ""] | None  # |A|_F², where a tolerance is for it


class Eigensolver(Algorithm):
    """A federated eigensolver; what is left to say is a round."""

    rank: int = eqx.field(static=True)
    stop: Literal["objective", "kkt"] = eqx.field(static=True)

    def __init__(self, rank: int, stop: Literal["objective", "kkt"]):
        """Keep what all eigensolvers have.

        Args:
            rank: number of components.
            stop: what a tolerance is compared with.

        Raises:
            ValueError: if `rank` is not a positive whole number or `stop` is unknown.
        """
        check_count("rank", rank)
        check_name("stop", stop, ("objective", "kkt"))
        self.rank, self.stop = rank, stop

    @property
    @abc.abstractmethod
    def _products(self) -> int:
        """About how many products with the client's matrix a round takes."""

    def check(self, clients: Clients, start: Personalized | None) -> None:
        """Refuse a rank or a warm start that do not fit.

        Raises:
            ValueError: as said above.
        """
        check_data(clients)
        check_fits("rank", self.rank, clients)
        check_start(start, clients.features, self.rank)

    def prepare(self, data, client_id, rounds):
        """The client's matrix A_i A_iᵀ, or the samples behind it, whichever is cheaper."""
        del client_id
        # A second moment with the divisor one is the sum.
        one = jnp.ones_like(data.count)
        if isinstance(data, Samples):
            summed = moment_of(
                Samples(data.values, one), rank=self.rank, rounds=rounds * self._products
            )
        elif data.dense is not None:
            summed = Moment(data.count * data.dense, None, one, data.count * data.trace)
        else:
            summed = Moment(None, data.samples, one, data.count * data.trace)
        return Member(summed, data.count)

    @property
    def start_aggregation(self) -> PyTree[Aggregation]:
        """A plain sum over the clients."""
        return Sum()

    @property
    def aggregation(self) -> PyTree[Aggregation]:
        """A plain sum over the clients."""
        return Sum()

    def client_init(self, key, data, start):
        """The samples' energy if the scaled KKT violation needs it.

        The empty frame says how many features there are.
        """
        del key, start
        energy = data.moment.trace if self.stop == "kkt" else None
        return (jnp.zeros((data.moment.dim, 0), data.moment.trace.dtype), energy), ()

    def server_init(self, key, uplink, start):
        """The first components, random but for a warm start."""
        frame, energy = uplink
        if start is None:
            shared = jax.random.uniform(key, (len(frame), self.rank), frame.dtype, -1, 1)
        else:
            shared = start.shared.astype(frame.dtype)
        unknown = jnp.full((), jnp.nan, frame.dtype)
        kkt = unknown if self.stop == "kkt" else None
        return Server(orthonormalize(shared), captured=unknown, kkt=kkt, energy=energy)

    def downlink(self, server):
        """The components."""
        return server.shared

    def server_diagnostics(self, server):
        """What a tolerance is compared with is made of these."""
        measured = {"captured": server.captured}
        return measured if server.kkt is None else measured | {"kkt_violation": server.kkt}

    def stopping_measure(self, previous, current):
        """The relative change of f, or the scaled KKT violation."""
        if self.stop == "kkt":
            return current["kkt_violation"]
        change = jnp.abs(current["captured"] - previous["captured"])
        tiny = jnp.finfo(change.dtype).tiny
        return change / jnp.maximum(current["captured"], tiny)

    def client_result(self, downlink, local, data):
        """No own components."""
        del local, data
        return self._components(downlink)[:, :0]

    def shared_result(self, server):
        """The components."""
        return server.shared

    def _components(self, downlink: PyTree) -> Frame:
        """Z in what came down the wire."""
        return downlink

    def _renewed(
        self, server: Server, total: Frame, captured: Float[Array, ""], product: Frame | None
    ) -> Server:
        """The next state: an orthonormal basis of the clients' sum.

        Args:
            server: the state before.
            total: what the next components are to span.
            captured: f at the components before.
            product: A Aᵀ Z for the components before, which the KKT violation needs.
        """
        kkt = None
        if self.stop == "kkt":
            assert product is not None and server.energy is not None
            tiny = jnp.finfo(product.dtype).tiny
            rest = deflate(product, server.shared)
            kkt = jnp.linalg.norm(rest) / jnp.maximum(server.energy, tiny)
        return Server(orthonormalize(total), captured, kkt, server.energy)


def left_over(data: Member, captured: Float[Array, ""]) -> Float[Array, ""]:
    """A client's mean squared reconstruction error of a sample, which goes into the history."""
    return (data.moment.trace - captured) / jnp.maximum(data.count, 1)
