"""Personalized PCA without local components as unknowns, solved by a quasi-Newton server.

For given shared components, the best local components are known: the top eigenvectors of the
client's second moment deflated by the shared ones. What remains is a function of the shared
subspace, F of `jaxfed.pca._reduced`. Its value and gradient take one thin message per client and
round, of which the server needs only the mean. The server maximizes F by limited-memory BFGS (see
`jaxfed.pca._quasi_newton`).
"""

from typing import Any, NamedTuple, Self

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxfed._checks import check_number
from jaxfed.contract import Algorithm, Diagnostics, check_count, hyperparameter
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.reduction import Gram, Symmetric
from jaxfed.linalg import Moment, polar
from jaxfed.pca._ascent import (
    Server,
    Uplink,
    ascend,
    fingerprint,
    first_state,
    for_other_data,
    message,
)
from jaxfed.pca._reduced import Penalty, Reduced, evaluate
from jaxfed.pca._starts import StartName, common_message, with_starts
from jaxfed.pca.components import (
    Frame,
    Rows,
    best_local,
    check_warm_start,
    common_local,
    first_components,
)
from jaxfed.pca.perpca import Member as Prepared
from jaxfed.pca.perpca import PerPCA

Scalar = Float[Array, ""]

# The limit of the penalty, relative to the weakest of a client's components.
LIMIT = 10.0


class Member(NamedTuple):
    """One client's prepared data."""

    moment: Moment  # these three as for `PerPCA`
    unshrunk: Moment | None
    active: Float[Array, " local_rank"] | None
    limit: Scalar  # of the local penalty, a variance
    fingerprint: Scalar  # pseudo-random, derived from the client's id and its data
    rows: Rows | None  # the first components, if the start's message is made of the same ones


class VarProPerPCA(Algorithm):
    r"""Personalized PCA by limited-memory BFGS in the shared components alone.

    With `local_penalty=0`, its stationary points are those of `PerPCA(variant="tangent")`. There is
    no step size to choose, and it takes a small fraction of the rounds. Its messages are four
    numbers longer. Clients do more work: an eigendecomposition each round.

    Local variance counts \(g(\lambda) = \lambda - \tau c (1 - (1 + \lambda / 2c)^{-2})\), where
    τ is the penalty and c is ten times the variance of the weakest of the client's top
    `shared_rank + local_rank` components. Weak components count the fraction τ less; strong ones
    count τ c less, whatever their variance. The penalty is not in the paper.

    Values and gradients are compared only between rounds with the same participants. A trial that
    other clients evaluate cannot be compared with the base and is accepted, and steps become
    shorter with the number of such rounds. If a few clients are absent occasionally, pairs from the
    rounds in between still determine the direction. If participants are drawn anew each round,
    there are no pairs, and the steps are those of gradient ascent with momentum.
    """

    quadratic_in_samples = True

    local_penalty: Scalar
    shared_rank: int = eqx.field(static=True)
    local_rank: int | tuple[int, ...] = eqx.field(static=True)
    memory: int = eqx.field(static=True)
    shrinkage: bool = eqx.field(static=True)
    start: StartName = eqx.field(static=True)
    number: Int[Array, ""] | None = eqx.field(init=False)  # of the round; None before

    def __init__(
        self,
        shared_rank: int,
        local_rank: int | tuple[int, ...],
        *,
        memory: int = 20,
        shrinkage: bool = False,
        start: StartName = "common",
        local_penalty: float | Array = 0.03,
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
            local_penalty: the fraction τ, from 0 to below 1, by which weak local variance counts
                less than shared variance; 0 gives the objective of the paper. If clients are alike,
                all splits of the same components explain the same variance, and without a penalty
                the optimum fits the noise. The default then shares the larger components, and
                hardly changes the result where clients differ. The reported objective is the
                variance that is left, without the penalty.

        Raises:
            ValueError: if a rank or the memory is not a positive whole number (a local rank may be
                0 for some clients), `shrinkage` is neither True nor False, the start is unknown, or
                the penalty is negative or not below one.
        """
        check_count("memory", memory)
        model = PerPCA(shared_rank, local_rank, shrinkage=shrinkage, start=start)
        wanted = "a number of at least 0 and below 1"
        check_number("local_penalty", local_penalty, wanted, lambda x: (x >= 0) & (x < 1))
        self.local_penalty = hyperparameter(local_penalty)
        self.shared_rank, self.local_rank = model.shared_rank, model.local_rank
        self.memory, self.shrinkage, self.start = memory, shrinkage, start
        self.number = None

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
        """Return the client's second moment, with a mask if ranks differ, and its fingerprint."""
        prepared = self._model.prepare(data, client_id, rounds)
        moment, _, active = prepared
        total = self.shared_rank + self._width
        rows = first_components(moment, total)
        variances = jnp.diagonal(moment.row_products(rows)[1])
        if active is not None:
            used = jnp.concatenate([jnp.ones(self.shared_rank, bool), active > 0])
            variances = jnp.where(used, variances, variances[0])
        # Rounding alone is no variance.
        least = jnp.finfo(variances.dtype).eps * moment.dim * variances.max()
        weakest = variances.min()
        limit = LIMIT * jnp.where(weakest > least, weakest, 0)
        same = self.start == "common" and active is None and not self.shrinkage
        mark = fingerprint(client_id, moment.trace)
        return Member(*prepared, limit, mark, rows if same else None)

    def at_round(self, number: Int[Array, ""]) -> Self:
        """Return the algorithm with the number of a round, which marks its messages."""
        return eqx.tree_at(lambda x: x.number, self, number, is_leaf=lambda x: x is None)

    def first_message(self, key, data: Member, warm_start) -> Gram | Symmetric | None:
        """Return what the server starts from, as in `PerPCA`."""
        if warm_start is None and self.start == "common" and data.rows is not None:
            return common_message(data.moment, data.rows)
        # The model has a step size, so it sends no curvature.
        return self._model.first_message(key, Prepared(*data[:3]), warm_start).get("moment")

    def server_init(self, key, first: Any, like: Member, warm_start) -> Server:
        """Return a state whose first trial is the start."""
        model = self._model.server_init(key, {"moment": first}, like, warm_start)
        return first_state(model.shared, self.memory)

    def downlink(self, server: Server) -> Frame:
        """Return the trial point."""
        return server.components.T

    def feasible(self, downlink: Frame, data):
        """Return the downlink with orthonormal components."""
        return polar(downlink)

    def client_init(self, key, downlink: Frame, data: Member, warm_start) -> None:
        """Return None: each round computes the local components anew."""

    def client_step(self, key, downlink: Frame, local: None, data: Member):
        """Evaluate the gradient and the objective with the best local components."""
        penalty = Penalty(self.local_penalty, data.limit)
        part, found = evaluate(data.moment, downlink, self._width, data.active, penalty)
        uplink = message(part.product, downlink, part.value, data.fingerprint, self.number)
        return uplink, local, found

    def server_step(self, key, server: Server, uplink: Uplink) -> tuple[Server, Diagnostics]:
        """Accept or reject the trial, and take the next step."""
        return ascend(server, uplink, self.number)

    def for_other_data(self, server: Server) -> Server:
        """Return the state with its pairs, but without a value to compare the next one with."""
        return for_other_data(server)

    def client_result(self, downlink: Frame, local: None, data: Member):
        """Return the best local components for the final shared ones and the observed moments."""
        moment = data.moment if data.unshrunk is None else data.unshrunk
        return best_local(moment, downlink, self._width, data.active)

    def different_starts(self, count: int) -> list[Self]:
        """Return copies with different starts; all but a few are random."""
        return with_starts(self, count)

    @property
    def energy_weighted(self) -> bool:
        """True: a mean of second moments weights clients by their variance."""
        return True

    def remarks(self, result, history) -> tuple[str, ...]:
        """Warn if the local components are common to all clients."""
        return common_local(result)

    def through(self) -> Algorithm:
        """Return gradient ascent of the same function, whose state is a single point."""
        return Reduced(self, self.local_penalty, self._width)
