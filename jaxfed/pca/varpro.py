"""Personalized PCA with the local components eliminated, solved by a quasi-Newton server.

For given shared components the best local components are known: the top eigenvectors of the
client's second moment deflated by the shared ones. What is left is a function of the shared
subspace alone, F of `jaxfed.pca._reduced`. Its value and its gradient take one thin message per
client and round, of which the server needs only the mean. It climbs by limited-memory BFGS, see
`jaxfed.pca._quasi_newton`.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.contract import Algorithm, Diagnostics, DifferentiatedThrough, HasRemarks, check_count
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.reduction import Gram, Mean, Symmetric
from jaxfed.linalg import Moment
from jaxfed.linalg.division import ratio
from jaxfed.pca._quasi_newton import Evaluation, Memory, begin, climb
from jaxfed.pca._reduced import evaluate
from jaxfed.pca.components import Frame, best_local, check_start, common_local, first_shared
from jaxfed.pca.perpca import Member as Prepared
from jaxfed.pca.perpca import PerPCA

# Means of fingerprints that differ by less, in units of rounding, are of the same participants.
ORDER = 32

Scalar = Float[Array, ""]


class Member(NamedTuple):
    """One client's prepared data."""

    prepared: Prepared  # as for `PerPCA`
    fingerprint: Scalar  # pseudo-random, of the client's id


class Uplink(NamedTuple):
    """A client's part of the gradient and of the objective.

    The mean of the fingerprints tells the server whether two rounds had the same participants.
    """

    product: Frame  # (I - V Vᵀ) S U
    captured: Scalar
    fingerprint: Any  # sent as a named `Mean`, so that no other aggregate takes its place


class Server(NamedTuple):
    """What is known of F, in multiples of `unit`, so that squares neither overflow nor vanish."""

    memory: Memory
    fingerprint: Scalar  # of the participants at the last accepted point; NaN before the first
    unit: Scalar  # a power of two near the first gradients


class VarProPerPCA(Algorithm, DifferentiatedThrough, HasRemarks):
    """The objective of personalized PCA by limited-memory BFGS, its local components eliminated.

    Its stationary points are those of `PerPCA(variant="tangent")`, there is no step size to choose,
    and it takes a small part of the rounds. Its messages are two numbers larger. Clients do more
    work: an eigendecomposition each round.

    Values and gradients are compared between rounds of the same participants only. A trial that
    other clients evaluate cannot be compared with the base and is accepted, and steps become
    shorter with the number of such rounds. If a few clients are absent now and then, the pairs of
    the rounds in between still give the direction. If participants are drawn anew each round, there
    are no pairs, and the steps are those of gradient ascent with momentum.
    """

    shared_rank: int = eqx.field(static=True)
    local_rank: int | tuple[int, ...] = eqx.field(static=True)
    memory: int = eqx.field(static=True)
    shrinkage: bool = eqx.field(static=True)

    def __init__(
        self,
        shared_rank: int,
        local_rank: int | tuple[int, ...],
        *,
        memory: int = 20,
        shrinkage: bool = False,
    ):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's local components, one for all or one per client
                (in the order of the clients' ids).
            memory: how many pairs of steps and gradient changes the server keeps, each as large as
                two messages.
            shrinkage: take the noise out of the second moments before the iteration, as in
                `PerPCA`.

        Raises:
            ValueError: for ranks and a memory that are not positive whole numbers (a local rank
                may be 0 for some clients), and a `shrinkage` that is neither True nor False.
        """
        check_count("memory", memory)
        model = PerPCA(shared_rank, local_rank, shrinkage=shrinkage)
        self.shared_rank, self.local_rank = model.shared_rank, model.local_rank
        self.memory, self.shrinkage = memory, shrinkage

    @property
    def _model(self) -> PerPCA:
        """Prepares the data; with a step size given, it does not ask clients for one."""
        return PerPCA(self.shared_rank, self.local_rank, step_size=1.0, shrinkage=self.shrinkage)

    @property
    def _width(self) -> int:
        return self.local_rank if isinstance(self.local_rank, int) else max(self.local_rank)

    def check(self, clients, start) -> None:
        """Raise a `ValueError` for ranks or a warm start that do not fit."""
        self._model.check(clients, None)
        check_start(start, clients, self.shared_rank, None)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> Member:
        """The client's second moment, its mask where ranks differ, and its fingerprint."""
        prepared = self._model.prepare(data, client_id, rounds)
        fingerprint = jax.random.uniform(jax.random.fold_in(jax.random.key(0), client_id))
        return Member(prepared, fingerprint.astype(prepared.moment.trace.dtype))

    def first_message(self, key, data: Member, start) -> Gram | Symmetric | None:
        """The deflated second moment, for the local-first start of `OneShot`."""
        return self._model.first_message(key, data.prepared, start).get("moment")

    def server_init(self, key, first: Array | None, like, start) -> Server:
        """The first trial is the start itself."""
        if start is not None:
            shared = start.shared
        else:
            assert first is not None
            shared = first_shared(first, self.shared_rank).T
        one = jnp.ones((), shared.dtype)
        return Server(begin(shared, pairs=self.memory), jnp.nan * one, one)

    def downlink(self, server: Server) -> Frame:
        """The trial point, which as a result is one step beyond the last accepted one."""
        return server.memory.trial.frame

    def client_init(self, key, downlink: Frame, data: Member, start) -> None:
        """Nothing: the local components are found anew each round."""

    def client_step(self, key, downlink: Frame, local: None, data: Member):
        """Evaluate the gradient and the objective with the best local components."""
        moment, _, active = data.prepared
        part, rest = evaluate(moment, downlink, self._width, active)
        return (
            Uplink(part.product, part.captured, Mean(data.fingerprint)),
            local,
            {"objective": rest},
        )

    def server_step(self, key, server: Server, uplink: Uplink) -> tuple[Server, Diagnostics]:
        """Accept the trial or reject it, and step on."""
        first = jnp.isnan(server.fingerprint)
        # The order of a sum over clients may change from round to round, as from a source.
        rounding = ORDER * jnp.finfo(server.fingerprint.dtype).eps
        same = jnp.abs(uplink.fingerprint - server.fingerprint) <= rounding
        unit = jnp.where(first, _power_near(uplink.product), server.unit)
        found = Evaluation(ratio(uplink.product, unit), ratio(uplink.captured, unit))
        memory, accepted, left = climb(server.memory, found, same=same)
        fingerprint = jnp.where(accepted, uplink.fingerprint, server.fingerprint)
        return Server(memory, fingerprint, unit), {"stopping_measure": left}

    def client_result(self, downlink: Frame, local: None, data: Member):
        """The best local components for the final shared ones, and for the observed moments."""
        moment, unshrunk, active = data.prepared
        return best_local(moment if unshrunk is None else unshrunk, downlink, self._width, active)

    @property
    def energy_weighted(self) -> bool:
        """Whether clients of large variance count more: yes, by a mean of second moments."""
        return True

    def remarks(self, result, history) -> tuple[str, ...]:
        """Whether the local components are common to all clients."""
        return common_local(result)

    def through(self) -> Algorithm:
        """Gradient ascent of the same function, whose state is a point alone."""
        return self._model.through()


def _power_near(matrix: Frame) -> Scalar:
    """A power of two near the largest entry, by which division is exact; one if all are zero."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(matrix)))
    normal = largest > jnp.finfo(largest.dtype).tiny
    return jnp.ldexp(jnp.ones_like(largest), jnp.where(normal, jnp.frexp(largest)[1], 0))
