"""Personalized PCA without local components as unknowns, solved by a quasi-Newton server.

For given shared components, the best local components are known: the top eigenvectors of the
client's second moment deflated by the shared ones. What remains is a function of the shared
subspace, F of `jaxfed.pca._reduced`. Its value and gradient take one thin message per client and
round, of which the server needs only the mean. The server maximizes F by limited-memory BFGS (see
`jaxfed.pca._quasi_newton`).
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.contract import (
    Algorithm,
    Diagnostics,
    DifferentiatedThrough,
    HasRemarks,
    check_count,
)
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.reduction import Gram, Mean, Symmetric
from jaxfed.linalg import Moment
from jaxfed.linalg.division import ratio
from jaxfed.pca._quasi_newton import Evaluation, Memory, climb, initial_memory
from jaxfed.pca._reduced import evaluate
from jaxfed.pca.components import (
    Frame,
    StartName,
    best_local,
    check_warm_start,
    common_local,
    deflate,
    frobenius_norm,
)
from jaxfed.pca.perpca import Member as Prepared
from jaxfed.pca.perpca import PerPCA

# Mean fingerprints that differ by less, in units of rounding error, are of the same participants.
ORDER = 32

Scalar = Float[Array, ""]


class Member(NamedTuple):
    """One client's prepared data."""

    prepared: Prepared  # as for `PerPCA`
    fingerprint: Scalar  # pseudo-random, derived from the client's id and its data


class Uplink(NamedTuple):
    """A client's part of the gradient and of the objective.

    The gradient leaves out the part of (I - V Vᵀ) S U along U. Clients differ more in that part
    than in their gradients, so a robust aggregate could not tell small lies from it. The mean
    fingerprint tells the server whether two rounds had the same participants.
    """

    gradient: Frame  # (I - U Uᵀ - V Vᵀ) S U
    curvature: Scalar  # ‖(I - V Vᵀ) S U‖, an upper bound of F's curvature
    captured: Scalar
    fingerprint: Any  # wrapped in `Mean`, so that no robust aggregate replaces it


class Server(NamedTuple):
    """The server's state, in multiples of `unit`, so that squares neither over- nor underflow."""

    memory: Memory
    fingerprint: Scalar  # of the participants at the last accepted point; NaN before the first
    unit: Scalar  # a power of two near the first gradients


class VarProPerPCA(Algorithm, DifferentiatedThrough, HasRemarks):
    """Personalized PCA by limited-memory BFGS in the shared components alone.

    Its stationary points are those of `PerPCA(variant="tangent")`, there is no step size to choose,
    and it takes a small fraction of the rounds. Its messages are three numbers longer. Clients do
    more work: an eigendecomposition each round.

    Values and gradients are compared only between rounds with the same participants. A trial that
    other clients evaluate cannot be compared with the base and is accepted, and steps become
    shorter with the number of such rounds. If a few clients are absent occasionally, pairs from the
    rounds in between still determine the direction. If participants are drawn anew each round,
    there are no pairs, and the steps are those of gradient ascent with momentum.
    """

    quadratic_in_samples = True

    shared_rank: int = eqx.field(static=True)
    local_rank: int | tuple[int, ...] = eqx.field(static=True)
    memory: int = eqx.field(static=True)
    shrinkage: bool = eqx.field(static=True)
    start: StartName = eqx.field(static=True)

    def __init__(
        self,
        shared_rank: int,
        local_rank: int | tuple[int, ...],
        *,
        memory: int = 20,
        shrinkage: bool = False,
        start: StartName = "local_first",
    ):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components.
            local_rank: number of local components, one number for all clients or one per client
                (in the order of the clients' ids).
            memory: number of pairs of steps and gradient changes that the server keeps, each as
                large as two messages.
            shrinkage: remove the noise from the second moments before the iteration, as in
                `PerPCA`.
            start: where to start without a warm start, as in `PerPCA`. To try several starts, see
                `jaxfed.MultiStart`.

        Raises:
            ValueError: if a rank or the memory is not a positive whole number (a local rank may be
                0 for some clients), `shrinkage` is neither True nor False, or the start is unknown.
        """
        check_count("memory", memory)
        model = PerPCA(shared_rank, local_rank, shrinkage=shrinkage, start=start)
        self.shared_rank, self.local_rank = model.shared_rank, model.local_rank
        self.memory, self.shrinkage, self.start = memory, shrinkage, start

    @property
    def _model(self) -> PerPCA:
        """Prepares the data; with a given step size, clients need not compute one."""
        return PerPCA(
            self.shared_rank,
            self.local_rank,
            step_size=1.0,
            start=self.start,
            shrinkage=self.shrinkage,
        )

    @property
    def _width(self) -> int:
        return self.local_rank if isinstance(self.local_rank, int) else max(self.local_rank)

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the ranks or the warm start do not fit."""
        self._model.check(clients, None)
        check_warm_start(warm_start, clients, self.shared_rank, None)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> Member:
        """Return the client's second moment, with a mask if ranks differ, and its fingerprint.

        A state may go on with other data, on which the value at its base is another one.
        """
        prepared = self._model.prepare(data, client_id, rounds)
        trace = jax.lax.stop_gradient(prepared.moment.trace).astype(jnp.float32)
        key = jax.random.fold_in(jax.random.key(0), client_id)
        key = jax.random.fold_in(key, jax.lax.bitcast_convert_type(trace, jnp.uint32))
        fingerprint = jax.random.uniform(key)
        return Member(prepared, fingerprint.astype(prepared.moment.trace.dtype))

    def first_message(self, key, data: Member, warm_start) -> Gram | Symmetric | None:
        """Return what the server starts from, as in `PerPCA`."""
        # The model has a step size, so it sends no curvature.
        return self._model.first_message(key, data.prepared, warm_start).get("moment")

    def server_init(self, key, first: Any, like: Member, warm_start) -> Server:
        """Return a state whose first trial is the start."""
        model = self._model.server_init(key, {"moment": first}, like.prepared, warm_start)
        shared = model.shared.T
        one = jnp.ones((), shared.dtype)
        return Server(initial_memory(shared, pairs=self.memory), jnp.nan * one, one)

    def downlink(self, server: Server) -> Frame:
        """Return the trial point, which as a result is one step beyond the last accepted point."""
        return server.memory.trial.frame

    def client_init(self, key, downlink: Frame, data: Member, warm_start) -> None:
        """Return None: each round computes the local components anew."""

    def client_step(self, key, downlink: Frame, local: None, data: Member):
        """Evaluate the gradient and the objective with the best local components."""
        moment, _, active = data.prepared
        part, rest = evaluate(moment, downlink, self._width, active)
        unit = _power_near(part.product)
        return (
            Uplink(
                deflate(part.product, downlink),
                unit * frobenius_norm(part.product / unit),
                part.captured,
                Mean(data.fingerprint),
            ),
            local,
            {"objective": rest},
        )

    def server_step(self, key, server: Server, uplink: Uplink) -> tuple[Server, Diagnostics]:
        """Accept or reject the trial, and take the next step."""
        first = jnp.isnan(server.fingerprint)
        # The order of a sum over clients may change from round to round, for example with a source.
        rounding = ORDER * jnp.finfo(server.fingerprint.dtype).eps
        same = jnp.abs(uplink.fingerprint - server.fingerprint) <= rounding
        unit = jnp.where(first, _power_near(uplink.curvature), server.unit)
        gradient, curvature, captured, _ = (ratio(x, unit) for x in uplink)
        found = Evaluation(gradient, captured, curvature=curvature)
        memory, accepted, left = climb(server.memory, found, same=same)
        fingerprint = jnp.where(accepted, uplink.fingerprint, server.fingerprint)
        return Server(memory, fingerprint, unit), {"stopping_measure": left}

    def client_result(self, downlink: Frame, local: None, data: Member):
        """Return the best local components for the final shared ones and the observed moments."""
        moment, unshrunk, active = data.prepared
        return best_local(moment if unshrunk is None else unshrunk, downlink, self._width, active)

    @property
    def energy_weighted(self) -> bool:
        """True: a mean of second moments weights clients by their variance."""
        return True

    def remarks(self, result, history) -> tuple[str, ...]:
        """Warn if the local components are common to all clients."""
        return common_local(result)

    def through(self) -> Algorithm:
        """Return gradient ascent of the same function, whose state is a single point."""
        return self._model.through()


def _power_near(numbers: Array) -> Scalar:
    """Return a power of two near the largest number; division by it is exact; one for zeros."""
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(numbers)))
    normal = largest > jnp.finfo(largest.dtype).tiny
    return jnp.ldexp(jnp.ones_like(largest), jnp.where(normal, jnp.frexp(largest)[1], 0))
