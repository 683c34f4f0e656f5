"""Heterogeneous matrix factorization: shared and local factors of the clients' matrices.

min over U, U_i, V_i, W_i of  mean_i [ ‖Y_i - V_i Uᵀ - W_i U_iᵀ‖²
    + β (‖UᵀU - I‖² + ‖U_iᵀU_i - I‖²) ] / 2   with Uᵀ U_i = 0,

where the rows of Y_i are a client's samples, and errors are summed over its observed entries.

Source: Shi, Fattahi & Al Kontar (2023), Heterogeneous matrix factorization: when features differ by
datasets, arXiv:2305.17744.
"""

import warnings
from typing import Literal, NamedTuple, Self, final, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed._names import caller
from jaxfed._numbers import UnitsWarning
from jaxfed.contract import (
    Algorithm,
    Bases,
    ClientsLike,
    check_count,
    check_factor,
    check_name,
    check_positive,
    hyperparameter,
    refuse,
)
from jaxfed.core.clients import samples
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.energies import energies
from jaxfed.core.common.printing import is_known
from jaxfed.core.contract.reduction import Max
from jaxfed.linalg import Moment
from jaxfed.linalg.division import ratio
from jaxfed.linalg.precision import client_matmul, data_matmul
from jaxfed.pca import _ascent
from jaxfed.pca._alternating import Alternated, evaluate
from jaxfed.pca._ascent import ascend, fingerprint, first_state, message
from jaxfed.pca._shared_and_local import SharedAndLocal
from jaxfed.pca._starts import StartName, first_shared, start_message
from jaxfed.pca.components import (
    Rows,
    beside,
    check_room,
    check_warm_start,
    first_components,
    mean_energies,
    retract,
    warn_of_few,
)

Scalar = Float[Array, ""]

# The automatic penalty, relative to the curvature, as in the authors' synthetic example.
PENALTY = 0.1
# How many times a client's term of the objective may exceed another one's in single precision: at
# 1,000 times, components are .002 off, at 10,000 times up to .1.
OUTWEIGHED = 1e3
# Pairs that the quasi-Newton server keeps.
PAIRS = 20


class HMFMember(NamedTuple):
    """ONE client's prepared data."""

    values: Float[Array, "samples features"]  # missing entries are zero
    observed: Bool[Array, "samples features"] | None  # None if no entry is missing
    curvature: Scalar  # the largest eigenvalue of YᵀY
    fingerprint: Scalar  # pseudo-random, derived from the client's id and its data


class Message(NamedTuple):
    """Uplink and downlink: the shared components, and what the step rule needs."""

    components: Rows
    curvature: Scalar | None  # of the squared error; None if nothing is automatic


class HMFServer(NamedTuple):
    """The server's state."""

    components: Rows
    curvature: Scalar | None
    first: Scalar | None  # the largest curvature of any client before the first round


class HMFLocal(NamedTuple):
    """ONE client's state for gradient steps; `"quasi_newton"` keeps the components alone."""

    components: Rows
    shared_scores: Float[Array, "samples shared_rank"]
    scores: Float[Array, "samples local_rank"]  # in the local components


class Pace(NamedTuple):
    """Step size and penalty of a gradient step."""

    step: Scalar
    penalty: Scalar


@final
class HMF(SharedAndLocal):
    r"""Heterogeneous matrix factorization.

    A client's matrix of samples is \(Y \approx V U^\top + W U_i^\top\), with shared components U,
    local components \(U_i\) orthogonal to them, and the client's scores V and W. Two solvers find
    the factors:

    * `"quasi_newton"`: each round, a client improves its local components and all scores by a few
      steps of alternating least squares, and the server takes a step of limited-memory BFGS in the
      shared components, as in `PerPCA`. It needs a small fraction of the rounds.
    * `"gradient"`, the paper's: a client makes its local components orthogonal to the shared ones
      without changing the approximation, \(V \leftarrow V + W U_i^\top U (U^\top U)^{-1}\) and
      \(U_i \leftarrow U_i - U (U^\top U)^{-1} U^\top U_i\), and takes a gradient step with all four
      factors. The server averages the clients' U.

    Samples may have missing entries (`Clients.from_samples(missing="mask")`): only observed
    entries count, and `jaxfed.pca.complete` fills in the others. Without missing entries, the
    solutions are those of `PerPCA` with each client's second moment times its number of samples,
    because errors are sums over entries, not means over samples.

    The components of the result are orthonormal, as they are at a solution for any positive
    penalty. With `"gradient"`, clients keep scores of their samples, so the data may not be in
    buckets.

    Derivatives through the rounds of `"quasi_newton"` can be wrong, in double precision too, if
    one feature is 10,000 times as large as others: standardize features.

    Source: Shi, Fattahi & Al Kontar (2023), arXiv:2305.17744. The automatic step sizes, which
    differ between clients, and `"quasi_newton"` are not in the paper; alternating least squares for
    missing entries is that of Hastie, Mazumder, Lee & Zadeh (2015), Matrix completion and low-rank
    SVD via fast alternating least squares, without its penalty.
    """

    quadratic_in_samples = True

    step_size: Float[Array, ""] | None
    penalty: Float[Array, ""] | None
    shared_rank: int = eqx.field(static=True)
    local_rank: int = eqx.field(static=True)
    solver: Literal["quasi_newton", "gradient"] = eqx.field(static=True)
    start: StartName = eqx.field(static=True)
    number: Int[Array, ""] | None = eqx.field(init=False)  # of the round; None before

    def __init__(
        self,
        shared_rank: int,
        local_rank: int,
        *,
        solver: Literal["quasi_newton", "gradient"] = "quasi_newton",
        step_size: float | Array | None = None,
        penalty: float | Array | None = None,
        start: StartName = "common",
    ):
        """Set up the algorithm.

        Args:
            shared_rank: number of shared components.
            local_rank: number of each client's local components.
            solver: `"quasi_newton"` or `"gradient"`; see the class.
            step_size: one step size for all gradient steps, as in the paper. It has to be below one
                and below about one over the largest eigenvalue of any YᵀY. By default steps are
                relative to the curvature: the largest such eigenvalue of any client for the shared
                components, the client's own eigenvalue for its local components, and one for
                scores, because components have unit length. A client of small scale then learns
                its local factors as fast as the others.
            penalty: weight β of the penalty that keeps components nearly orthonormal; solutions do
                not depend on it. 0 disables it. By default a tenth of the curvature above.
            start: where to start without a warm start, as in `PerPCA`; missing entries count as
                zeros.

        Raises:
            ValueError: if a rank is not a positive whole number, the solver or the start is
                unknown, the step size is not positive and finite, the penalty is negative or not
                finite, or one of the last two is given for `"quasi_newton"`.
        """
        check_count("shared_rank", shared_rank)
        check_count("local_rank", local_rank)
        check_name("solver", solver, ("quasi_newton", "gradient"))
        check_positive("step_size", step_size, optional=True)
        check_factor("penalty", penalty, optional=True)
        for name, value in (("step_size", step_size), ("penalty", penalty)):
            if solver == "quasi_newton" and value is not None:
                raise refuse(name, "None with solver='quasi_newton', which has no steps", value)
        check_name("start", start, get_args(StartName))
        self.shared_rank, self.local_rank = shared_rank, local_rank
        self.solver, self.start, self.number = solver, start, None
        self.step_size, self.penalty = hyperparameter(step_size), hyperparameter(penalty)

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the data, the ranks or the warm start do not fit.

        Warns:
            jaxfed.UnitsWarning: if one client outweighs another so far that single precision loses
                what the other one contributes.
        """
        samples.check_rows(clients)
        check_room("shared_rank + local_rank", self.shared_rank + self.local_rank, clients)
        warn_of_few(self.local_rank, clients)
        check_warm_start(warm_start, clients, self.shared_rank, self.local_rank)
        if self.solver == "quasi_newton":
            _warn_of_unlike_clients(clients)

    def prepare(self, data: samples.SampleRows, client_id, rounds) -> HMFMember:
        """Replace missing entries by zeros, and compute the largest eigenvalue."""
        values = jnp.where(data.observed, data.values, 0).astype(data.count.dtype)
        moment = Moment.from_samples(values, 1)
        inner = moment.row_products(first_components(moment, self.local_rank))[1]
        curvature = Moment.from_dense(inner).largest_eigenvalue()
        observed = None if isinstance(data, samples.Samples) else data.observed
        if observed is not None:
            # Missing entries are zeros here, which makes the eigenvalue too small by about the
            # observed share.
            share = jnp.sum(observed) / (data.count * observed.shape[1])
            curvature = ratio(curvature, share)
        return HMFMember(values, observed, curvature, fingerprint(client_id, moment.trace))

    def at_round(self, number: Int[Array, ""]) -> Self:
        """Return the algorithm with the number of a round, which marks its messages."""
        return eqx.tree_at(lambda x: x.number, self, number, is_leaf=lambda x: x is None)

    def first_message(self, key, data: HMFMember, warm_start):
        """Return what the server starts from: a deflated moment and the largest eigenvalue."""
        first: dict[str, PyTree] = {}
        if self._needs_curvature:
            first["curvature"] = Max(data.curvature)
        if warm_start is None:
            moment = Moment.from_samples(data.values, 1)
            first["moment"] = start_message(self.start, moment, self.shared_rank, self.local_rank)
        return first

    def server_init(self, key, first, like, warm_start) -> HMFServer | _ascent.AscentServer:
        """Return the shared components and, for gradient steps, the largest curvature."""
        if warm_start is not None:
            shared = warm_start.shared.T
        else:
            dim, dtype = like.values.shape[1], like.values.dtype
            shared = first_shared(first.get("moment"), self.shared_rank, key, dim, dtype)
        if self.solver == "quasi_newton":
            return first_state(shared, PAIRS)
        curvature = first.get("curvature")
        return HMFServer(shared, curvature, curvature)

    def client_init(self, key, downlink: Message, data: HMFMember, warm_start) -> HMFLocal | Rows:
        """Return the warm start's local components, or the top ones; for gradient steps, scores."""
        shared = downlink.components
        if warm_start is not None and warm_start.local is not None:
            components = warm_start.local.T
        else:
            first = Moment.from_samples(data.values, 1)
            components = first_components(first, self.local_rank, None, shared)
        components = beside(shared.T, components.T).T
        if self.solver == "quasi_newton":
            return components
        together = jnp.concatenate([shared, components])
        return HMFLocal(components, *self._split(data_matmul(data.values, together.T)))

    def downlink(self, server: HMFServer | _ascent.AscentServer) -> Message:
        """Return the shared components, and the curvature unless nothing is automatic."""
        return Message(server.components, getattr(server, "curvature", None))

    def feasible(self, downlink: Message, data) -> Message:
        """Return the downlink with orthonormal components; gradient steps work with others."""
        if self.solver == "gradient":
            return downlink
        return downlink._replace(components=retract(downlink.components, "polar"))

    def client_step(self, key, downlink: Message, local: HMFLocal | Rows, data: HMFMember):
        """Take the solver's step."""
        if isinstance(local, HMFLocal):
            return self._descend(downlink, local, data)
        return self._alternate(downlink.components, local, data)

    def _alternate(self, shared: Rows, local: Rows, data: HMFMember):
        """Improve the local components, and evaluate the objective and its gradient."""
        found = evaluate(data.values, data.observed, shared, local)
        uplink = message(found.ascent, shared.T, -found.objective, data.fingerprint, self.number)
        energies = mean_energies(found.energies, self.shared_rank, None)
        return uplink, found.local, {"objective": found.objective, **energies}

    def _descend(self, downlink: Message, local: HMFLocal, data: HMFMember):
        """Make the local components orthogonal to the shared ones, and take a gradient step."""
        shared = downlink.components
        components, *scores = _corrected(local, shared)
        together, scores = jnp.concatenate([shared, components]), jnp.concatenate(scores, axis=1)
        seen = 1 if data.observed is None else data.observed
        rest = seen * (data.values - client_matmul(scores, together))
        # Minus the gradient of the squared error by all components, as rows.
        rise = data_matmul(scores.T, rest)

        # A sample with few observed entries may have large scores.
        curvature = jnp.maximum(data.curvature, _size(client_matmul(scores.T, scores)))
        own_pace = self._pace(curvature)
        pace = own_pace if downlink.curvature is None else self._pace(downlink.curvature)
        objective = jnp.sum(rest**2) + pace.penalty * jnp.sum(_excess(shared) ** 2)
        objective += own_pace.penalty * jnp.sum(_excess(components) ** 2)

        copy = _moved(shared, rise[: self.shared_rank], pace)
        moved = _moved(components, rise[self.shared_rank :], own_pace)
        # Scores have curvature one while components are orthonormal; half, as in `_pace`.
        step = jnp.asarray(0.5 if self.step_size is None else self.step_size, rest.dtype)
        climb = data_matmul(rest, together.T)
        local = HMFLocal(moved, *self._split(scores + step * climb))
        uplink = Message(copy, None if downlink.curvature is None else curvature)
        gap = ratio(jnp.sum((moved - components) ** 2), own_pace.step) + step * jnp.sum(climb**2)
        energies = mean_energies(jnp.sum(scores**2, axis=0), self.shared_rank, None)
        return uplink, local, {"objective": objective / 2, "gap": gap, **energies}

    def server_step(self, key, server, uplink):
        """Take the solver's step; for gradients, of which `uplink` is the mean copy.

        The curvature stays at least the first one.
        """
        if self.solver == "quasi_newton":
            return ascend(server, uplink, self.number)
        square = jnp.sum((uplink.components - server.components) ** 2)
        if server.first is None or uplink.curvature is None:
            assert self.step_size is not None
            gap = square / self.step_size.astype(square.dtype)
            return HMFServer(uplink.components, None, None), {"gap": gap}
        # The averaged step in U has at most the mean of the clients' curvatures, which grows where
        # large scores follow from few observed entries: see `client_step`.
        curvature = jnp.maximum(server.first, uplink.curvature)
        gap = ratio(square, self._pace(server.curvature).step)
        return HMFServer(uplink.components, curvature, server.first), {"gap": gap}

    def for_other_data(
        self, server: HMFServer | _ascent.AscentServer
    ) -> _ascent.AscentServer | None:
        """Return a quasi-Newton state without a value to compare the next one with."""
        return _ascent.for_other_data(server) if isinstance(server, _ascent.AscentServer) else None

    def client_result(self, downlink: Message, local: HMFLocal | Rows, data: HMFMember):
        """Return the local components, orthonormal and orthogonal to the shared ones."""
        own = local.components if isinstance(local, HMFLocal) else local
        return beside(retract(downlink.components, "polar").T, own.T)

    def shared_result(self, server: HMFServer | _ascent.AscentServer):
        """Return the shared components, orthonormal."""
        return retract(server.components, "polar").T

    def bases(self, server: PyTree, local: PyTree) -> Bases:
        """Return the components, each with its scores; none for `"quasi_newton"`."""
        if self.solver == "quasi_newton":  # its state remembers earlier rounds: see `through`
            return Bases()
        own = jnp.concatenate([local.components.T, local.scores])
        return Bases((server.components.T,), (local.shared_scores,), (own,))

    def through(self) -> Algorithm:
        """Return the algorithm itself, or for `"quasi_newton"` one whose state is a point."""
        return self if self.solver == "gradient" else Alternated(self)

    @property
    def _needs_curvature(self) -> bool:
        return self.solver == "gradient" and (self.step_size is None or self.penalty is None)

    def _pace(self, curvature: Scalar) -> Pace:
        """Return the step size and the penalty of components with this curvature."""
        penalty = PENALTY * curvature if self.penalty is None else self.penalty
        if self.step_size is not None:
            step = jnp.asarray(self.step_size)
        else:
            # A step in components and scores together has up to twice the curvature; the penalty's
            # is 4 β at orthonormal components.
            step = ratio(jnp.ones_like(curvature), 2 * curvature + 4 * penalty)
        return Pace(step.astype(curvature.dtype), jnp.asarray(penalty, curvature.dtype))

    def _split(self, scores: Float[Array, "samples rank"]) -> list[Array]:
        return jnp.split(scores, [self.shared_rank], axis=1)


def _corrected(local: HMFLocal, shared: Rows) -> HMFLocal:
    """Make local components orthogonal to the shared ones without changing the approximation."""
    gram = client_matmul(shared, shared.T)
    # A lossy channel may turn a component into zeros.
    least = jnp.finfo(gram.dtype).eps * jnp.trace(gram) + jnp.finfo(gram.dtype).tiny
    gram += least * jnp.eye(len(gram), dtype=gram.dtype)
    overlap = jnp.linalg.solve(gram, client_matmul(shared, local.components.T))
    return HMFLocal(
        local.components - client_matmul(overlap.T, shared),
        local.shared_scores + client_matmul(local.scores, overlap.T),
        local.scores,
    )


def _moved(components: Rows, rise: Rows, pace: Pace) -> Rows:
    """Take a gradient step of the squared error and the penalty."""
    by_penalty = 2 * pace.penalty * client_matmul(_excess(components), components)
    return components + pace.step * (rise - by_penalty)


def _excess(components: Rows) -> Float[Array, "rank rank"]:
    """Return UᵀU - I, which is zero for orthonormal components."""
    gram = client_matmul(components, components.T)
    return gram - jnp.eye(len(gram), dtype=gram.dtype)


def _size(second: Float[Array, "rank rank"]) -> Scalar:
    """Return the 8-mean of the eigenvalues: nearly the largest, but smooth if some are equal."""
    unit = jnp.trace(second)
    fourth = jnp.linalg.matrix_power(ratio(second, unit), 4)
    mean = jnp.sum(fourth**2) / len(second)
    return unit * jnp.where(mean > 0, mean, 1) ** (1 / 8)


def _warn_of_unlike_clients(clients: ClientsLike) -> None:
    """Warn if single precision loses a client's term of the objective beside another one's."""
    if not isinstance(clients, Clients) or not clients.layout.in_memory:
        return
    if not all(map(is_known, jax.tree.leaves(clients))):
        return
    rows = clients.layout.rows(len(clients))
    with jax.ensure_compile_time_eval():  # within `jit`, which closes over the clients, too
        squares = np.asarray(clients.counts, float) * energies(clients)
    terms = np.asarray(clients.weights)[rows] * squares
    least = np.min(terms, where=terms > 0, initial=np.inf)
    if clients.weights.dtype != np.float64 and terms.max() > OUTWEIGHED * least:
        warnings.warn(
            "clients: wanted weights times sums of squares that differ by a factor of at most "
            f"{OUTWEIGHED:.0f} in single precision, got {terms.max() / least:.3g}; enable double "
            "precision (JAX_ENABLE_X64=1), or change weights=",
            UnitsWarning,
            stacklevel=caller(),
        )
