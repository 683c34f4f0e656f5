"""Heterogeneous matrix factorization: shared and local factors of clients' matrices.

min over U, U_i, V_i, W_i of  mean_i [ ‖Y_i - V_i Uᵀ - W_i U_iᵀ‖²
    + β (‖UᵀU - I‖² + ‖U_iᵀU_i - I‖²) ] / 2   with Uᵀ U_i = 0,

where Y_i has a client's samples in rows, and errors are those of its observed entries.

Source: Shi, Fattahi & Al Kontar (2023), Heterogeneous matrix factorization: when features differ by
datasets, arXiv:2305.17744.
"""

from typing import NamedTuple, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jaxfed.contract import (
    Algorithm,
    Bases,
    HasBases,
    HasRemarks,
    check_count,
    check_factor,
    check_positive,
    hyperparameter,
)
from jaxfed.core.clients import samples
from jaxfed.core.contract.reduction import Max
from jaxfed.linalg import Moment
from jaxfed.linalg.division import ratio
from jaxfed.linalg.precision import client_matmul, data_matmul
from jaxfed.pca.components import (
    Rows,
    beside,
    check_room,
    check_start,
    common_local,
    first_components,
    first_shared,
    moment_message,
    retract,
)

Scalar = Float[Array, ""]

# The automatic penalty in units of the curvature; the authors' synthetic example has these numbers.
PENALTY = 0.1


class Member(NamedTuple):
    """ONE client's prepared data."""

    values: Float[Array, "samples features"]  # zeros in place of what is missing
    observed: Bool[Array, "samples features"]
    curvature: Scalar  # the largest eigenvalue of YᵀY


class Message(NamedTuple):
    """Uplink and downlink: the shared components, and what the step rule needs."""

    components: Rows
    curvature: Scalar | None  # that of squared errors by them; None where nothing is automatic


class Server(NamedTuple):
    """The server's state."""

    components: Rows
    curvature: Scalar | None
    first: Scalar | None  # the curvature before the first round, the largest of any client


class Local(NamedTuple):
    """ONE client's state."""

    components: Rows
    shared_scores: Float[Array, "samples shared_rank"]
    scores: Float[Array, "samples local_rank"]  # of its own components


class Pace(NamedTuple):
    """How components move: down the gradient, which has the penalty's part."""

    step: Scalar
    penalty: Scalar


@final
class HMF(Algorithm, HasBases, HasRemarks):
    r"""Heterogeneous matrix factorization by regularized gradient descent.

    A client's matrix of samples is \(Y \approx V U^\top + W U_i^\top\), with shared components U,
    its own components \(U_i\) orthogonal to them, and scores V and W of its own. Each round a
    client makes its components orthogonal to the shared ones without a change of what it
    approximates, \(V \leftarrow V + W U_i^\top U (U^\top U)^{-1}\) and
    \(U_i \leftarrow U_i - U (U^\top U)^{-1} U^\top U_i\), and takes a gradient step with all four;
    the server averages the clients' U.

    Of samples with missing entries, `Clients.from_samples(missing="mask")`, the observed entries
    count; `jaxfed.pca.complete` fills in the others. Without any, solutions are those of `PerPCA`
    with each client's second moment times its number of samples: errors are sums over entries, and
    not means over samples.

    Components of the result are orthonormal, as they are at a solution for any positive penalty.
    Clients keep scores of their samples, so they may not be in buckets.

    Source: Shi, Fattahi & Al Kontar (2023), arXiv:2305.17744. The automatic step sizes, a client's
    own for its own factors, are not in the paper.
    """

    step_size: Float[Array, ""] | None
    penalty: Float[Array, ""] | None
    shared_rank: int = eqx.field(static=True)
    local_rank: int = eqx.field(static=True)

    def __init__(
        self,
        shared_rank: int,
        local_rank: int,
        *,
        step_size: float | Array | None = None,
        penalty: float | Array | None = None,
    ):
        """Set up the algorithm.

        Without a warm start each client's own components come first, from its top ones, then the
        shared ones from the mean deflated products YᵀY, as in `OneShot(method="local_first")`.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's own components.
            step_size: one for all gradient steps, as in the paper, which has to be below about one
                over the largest eigenvalue of any YᵀY and below one. None for steps in units of the
                curvature: of the shared components by the largest such eigenvalue of any client, of
                a client's own by its own eigenvalue, of scores by the unit length of components. So
                a client of small scale does not wait for its own factors.
            penalty: the weight β of the penalty that holds components near orthonormal ones, which
                no solution depends on; 0 for none. None for a tenth of the eigenvalues in place of
                which `step_size` has none.

        Raises:
            ValueError: for ranks that are not positive whole numbers, a step size that is not
                positive and finite, and a penalty that is negative or not finite.
        """
        check_count("shared_rank", shared_rank)
        check_count("local_rank", local_rank)
        check_positive("step_size", step_size, optional=True)
        check_factor("penalty", penalty, optional=True)
        self.shared_rank, self.local_rank = shared_rank, local_rank
        self.step_size, self.penalty = hyperparameter(step_size), hyperparameter(penalty)

    def check(self, clients, start) -> None:
        """Raise a `ValueError` for no samples, and for ranks or a warm start that do not fit."""
        samples.check_rows(clients)
        check_room("shared_rank + local_rank", self.shared_rank + self.local_rank, clients)
        check_start(start, clients, self.shared_rank, self.local_rank)

    def prepare(self, data: samples.Rows, client_id, rounds) -> Member:
        """Zeros in place of what is missing, and the largest eigenvalue."""
        observed = data.observed
        values = jnp.where(observed, data.values, 0).astype(data.count.dtype)
        moment = Moment.from_samples(values, 1)
        inner = moment.row_products(first_components(moment, self.local_rank))[1]
        share = jnp.sum(observed) / (data.count * observed.shape[1])
        # As if the missing entries were like the others.
        curvature = ratio(Moment.from_dense(inner).largest_eigenvalue(), share)
        return Member(values, observed, curvature)

    def first_message(self, key, data: Member, start):
        """What the server needs for its start: deflated moments, and the largest eigenvalue."""
        first: dict[str, PyTree] = {}
        if self.step_size is None or self.penalty is None:
            first["curvature"] = Max(data.curvature)
        if start is None:
            moment = Moment.from_samples(data.values, 1)
            deflated = moment.deflate(first_components(moment, self.local_rank).T)
            first["moment"] = moment_message(deflated)
        return first

    def server_init(self, key, first, like, start) -> Server:
        """The shared components and the largest curvature."""
        curvature = first.get("curvature")
        if start is not None:
            return Server(start.shared.T, curvature, curvature)
        return Server(first_shared(first["moment"], self.shared_rank), curvature, curvature)

    def client_init(self, key, downlink: Message, data: Member, start) -> Local:
        """A warm start's own components or the top ones beside the shared, and all scores."""
        shared = downlink.components
        if start is not None and start.local is not None:
            components = start.local.T
        else:
            first = Moment.from_samples(data.values, 1)
            components = first_components(first, self.local_rank, None, shared)
        components = beside(shared.T, components.T).T
        together = jnp.concatenate([shared, components])
        return Local(components, *self._split(data_matmul(data.values, together.T)))

    def downlink(self, server: Server) -> Message:
        """The shared components, and the curvature unless nothing is automatic."""
        return Message(server.components, server.curvature)

    def client_step(self, key, downlink: Message, local: Local, data: Member):
        """Make the client's components orthogonal to the shared ones, and take a step."""
        shared = downlink.components
        components, *scores = _corrected(local, shared)
        together, scores = jnp.concatenate([shared, components]), jnp.concatenate(scores, axis=1)
        rest = data.observed * (data.values - client_matmul(scores, together))
        rise = data_matmul(scores.T, rest)

        # Where few entries of a sample are observed, its scores may be large.
        curvature = jnp.maximum(data.curvature, _size(client_matmul(scores.T, scores)))
        own_pace = self._pace(curvature)
        pace = own_pace if downlink.curvature is None else self._pace(downlink.curvature)
        objective = jnp.sum(rest**2) + pace.penalty * jnp.sum(_excess(shared) ** 2)
        objective += own_pace.penalty * jnp.sum(_excess(components) ** 2)

        copy = _moved(shared, rise[: self.shared_rank], pace)
        components = _moved(components, rise[self.shared_rank :], own_pace)
        step = jnp.asarray(0.5 if self.step_size is None else self.step_size, rest.dtype)
        local = Local(components, *self._split(scores + step * data_matmul(rest, together.T)))
        uplink = Message(copy, None if downlink.curvature is None else curvature)
        return uplink, local, {"objective": objective / 2}

    def server_step(self, key, server: Server, uplink: Message):
        """The mean of the copies; the mean curvature unless the first one is larger."""
        if server.first is None or uplink.curvature is None:
            return Server(uplink.components, None, None), {}
        curvature = jnp.maximum(server.first, uplink.curvature)
        return Server(uplink.components, curvature, server.first), {}

    def client_result(self, downlink: Message, local: Local, data: Member):
        """The client's own components, orthonormal and orthogonal to the shared ones."""
        return beside(retract(downlink.components, "polar").T, local.components.T)

    def shared_result(self, server: Server):
        """The shared components, orthonormal."""
        return retract(server.components, "polar").T

    @property
    def energy_weighted(self) -> bool:
        """Whether clients of large variance count more: yes, by a mean of squared errors."""
        return True

    def remarks(self, result, history):
        """Whether the local components are common to all clients."""
        return common_local(result)

    def bases(self, server: Server, local: Local) -> Bases:
        """Components along with their scores."""
        own = jnp.concatenate([local.components.T, local.scores])
        return Bases((server.components.T,), (local.shared_scores,), (own,))

    def _pace(self, curvature: Scalar) -> Pace:
        """The step size and the penalty of components, by which errors have this curvature."""
        penalty = PENALTY * curvature if self.penalty is None else self.penalty
        if self.step_size is not None:
            step = jnp.asarray(self.step_size)
        else:
            # Of components and scores together, the squared error has twice the curvature.
            step = ratio(jnp.ones_like(curvature), 2 * curvature + 4 * penalty)
        return Pace(step.astype(curvature.dtype), jnp.asarray(penalty, curvature.dtype))

    def _split(self, scores: Float[Array, "samples rank"]) -> list[Array]:
        return jnp.split(scores, [self.shared_rank], axis=1)


def _corrected(local: Local, shared: Rows) -> Local:
    """The same approximation with components orthogonal to the shared ones."""
    gram = client_matmul(shared, shared.T)
    # Lossy channels may leave nothing of a component.
    least = jnp.finfo(gram.dtype).eps * jnp.trace(gram) + jnp.finfo(gram.dtype).tiny
    gram += least * jnp.eye(len(gram), dtype=gram.dtype)
    overlap = jnp.linalg.solve(gram, client_matmul(shared, local.components.T))
    return Local(
        local.components - client_matmul(overlap.T, shared),
        local.shared_scores + client_matmul(local.scores, overlap.T),
        local.scores,
    )


def _moved(components: Rows, rise: Rows, pace: Pace) -> Rows:
    """Components after a step, down the gradient of what they miss and of the penalty."""
    by_penalty = 2 * pace.penalty * client_matmul(_excess(components), components)
    return components + pace.step * (rise - by_penalty)


def _excess(components: Rows) -> Float[Array, "rank rank"]:
    """What is orthonormal has none."""
    gram = client_matmul(components, components.T)
    return gram - jnp.eye(len(gram), dtype=gram.dtype)


def _size(second: Float[Array, "rank rank"]) -> Scalar:
    """The 8-mean of the eigenvalues: nearly the largest, and smooth where some are equal."""
    unit = jnp.trace(second)
    fourth = jnp.linalg.matrix_power(ratio(second, unit), 4)
    mean = jnp.sum(fourth**2) / len(second)
    return unit * jnp.where(mean > 0, mean, 1) ** (1 / 8)
