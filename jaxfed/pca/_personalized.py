"""The shared implementation of `HierarchicalPCA` and `AdaptivePCA`.

They differ only in where the prior variance comes from. Their server states and downlinks are the
shared components, or records with a field `shared`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, final

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from jaxfed.contract import (
    Algorithm,
    Bases,
    Diagnostics,
    DifferentiatedThrough,
    HasBases,
    check_flag,
    check_name,
    check_positive,
    hyperparameter,
)
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.reduction import Gram
from jaxfed.linalg import Moment, polar
from jaxfed.pca import likelihood
from jaxfed.pca.components import Frame, Rows, moment_received
from jaxfed.pca.likelihood import Member, Number, Scalar, aligned, check_settings


class Solver(NamedTuple):
    """How components are updated; a step size of None is automatic."""

    # (data, local components, shared components, prior variance, step size) -> local components
    local_step: Callable[[Member, Rows, Rows, Scalar, Array | None], Rows]
    # (shared components, local components, prior variance, global step size) -> uplink
    message: Callable[[Rows, Rows, Scalar, Array | None], PyTree]
    # (shared components, reduced uplink) -> shared components
    shared_step: Callable[[Rows, Array], Rows]


def _descend(data, local, shared, variance, step_size):
    # d² enters the objective as d²/(2 σ²), so half its gradient, divided by σ², is the prior's
    # part.
    gradient = likelihood.likelihood_gradient(data.moment, local, data.precision)
    gradient = gradient + likelihood.distance_gradients(shared, local)[1] / variance
    curvature = None if data.curvature is None else data.curvature + 1 / variance
    return likelihood.stepped(local, gradient, step_size, curvature)


def _descended_copy(shared, local, variance, step_size):
    # The automatic step size σ² cancels the 1/σ² of the gradient. The copy is not retracted here:
    # for polar factors, the server's retraction of mean V_i - V at V is the polar factor of mean
    # V_i.
    ratio = 1 if step_size is None else step_size.astype(variance.dtype) / variance
    return shared - ratio * likelihood.distance_gradients(shared, local)[0]


def _best_local(data, local, shared, variance, step_size):
    # For an aligned basis the objective is -tr Uᵀ(c S + VVᵀ/σ²)U / 2 plus a constant.
    joint = likelihood.joint_moment(data.moment, data.precision, shared.T, variance)
    return aligned(joint.top(len(local))[1].T, shared)


def _best_shared(shared, received):
    # The basis nearest to the previous one spares clients from following a rotation.
    return aligned(moment_received(received).top(len(shared))[1].T, shared)


def _attraction(shared, local, variance, step_size):
    # Minus the derivative of d²/(2 σ²) by V for aligned bases, up to its part along V.
    return likelihood.overlap(local, shared).T @ local / variance


SOLVERS = {
    "gradient": Solver(_descend, _descended_copy, lambda shared, received: polar(received)),
    # The server receives mean U_iU_iᵀ, whose top eigenvectors minimize the mean of r - ‖VᵀU_i‖²,
    # which is d² for aligned bases.
    "eigenvectors": Solver(_best_local, lambda shared, local, *_: Gram(local.T), _best_shared),
    # The shared step uses earlier rounds: see `_quasi_newton`.
    "quasi_newton": Solver(_best_local, _attraction, lambda shared, received: received),
}


class PersonalizedPCA(Algorithm, DifferentiatedThrough, HasBases):
    """Local components around shared ones, under a prior whose variance a subclass provides."""

    quadratic_in_samples = True

    noise_variance: Float[Array, ""]
    prior_variance: Float[Array, ""]
    step_size: Float[Array, ""] | None
    global_step_size: Float[Array, ""] | None
    rank: int = eqx.field(static=True)
    solver: Literal["gradient", "eigenvectors", "quasi_newton"] = eqx.field(static=True)
    likelihood: Literal["exact", "half"] = eqx.field(static=True)
    start: Literal["pooled", "random"] = eqx.field(static=True)
    align: bool = eqx.field(static=True)

    @final
    def _set(
        self,
        rank: int,
        noise_variance: Number,
        prior_variance: Number,
        step_size: Number | None,
        global_step_size: Number | None,
        solver,
        likelihood,
        start,
        align: bool,
    ) -> None:
        check_settings(rank, noise_variance, step_size)
        check_positive("prior_variance", prior_variance)
        check_positive("global_step_size", global_step_size, optional=True)
        check_name("solver", solver, tuple(SOLVERS))
        check_name("likelihood", likelihood, ("exact", "half"))
        check_name("start", start, ("pooled", "random"))
        if solver == "quasi_newton" and likelihood == "half":
            # Half the gradient does not match the objective, whose values the server compares.
            raise ValueError("likelihood: solver='quasi_newton' wants 'exact', got 'half'")
        check_flag("align", align)
        self.rank, self.solver, self.likelihood = rank, solver, likelihood
        self.start, self.align = start, align
        self.noise_variance = hyperparameter(noise_variance)
        self.prior_variance = hyperparameter(prior_variance)
        self.step_size = hyperparameter(step_size)
        self.global_step_size = hyperparameter(global_step_size)

    @property
    def needs_everybody(self) -> bool:
        """Whether every client must take part in each round, as the quasi-Newton solver needs."""
        return self.solver == "quasi_newton"

    @final
    def prepare(self, data: Samples | Moment, client_id, rounds) -> Member:
        """Return the client's second moment, with its curvature if the step size is automatic."""
        factor = 0.5 if self.likelihood == "half" else 1.0
        automatic = self.solver == "gradient" and self.step_size is None
        return likelihood.member(
            data, self.noise_variance, self.rank, rounds, factor=factor, curvature=automatic
        )

    @final
    def client_init(self, key, downlink: Any, data: Member, warm_start) -> Rows:
        """Return the first local components: the warm start's, random, or the shared ones."""
        from_shared = self.start == "pooled" if warm_start is None else warm_start.local is None
        return (
            shared_of(downlink)
            if from_shared
            else likelihood.initial_local(self.rank, key, data, warm_start)
        )

    @final
    def _step(
        self, shared: Rows, variance: Scalar, local: Rows, data: Member
    ) -> tuple[PyTree, Rows, Diagnostics]:
        """Update the local components, then compute the message about the shared ones."""
        local = aligned(local, shared) if self.align else local
        noise = self.noise_variance.astype(local.dtype)
        distance = likelihood.squared_distance(shared, local)
        objective = likelihood.negative_log_likelihood(data.moment, local, noise)
        objective = objective + distance / (2 * variance)
        solver = SOLVERS[self.solver]
        moved = solver.local_step(data, local, shared, variance, self.step_size)
        if self.solver == "quasi_newton":
            # The server climbs -min_U f(V, U) as a function of V, so the value must be that of the
            # best components beside the V that it sent.
            distance = likelihood.squared_distance(shared, moved)
            objective = likelihood.negative_log_likelihood(data.moment, moved, noise)
            objective = objective + distance / (2 * variance)
        uplink = solver.message(shared, moved, variance, self.global_step_size)
        return uplink, moved, {"objective": objective, "distance": distance}

    @final
    def client_result(self, downlink: Any, local: Rows, data: Member) -> Frame:
        """Return the local components, aligned with the shared ones."""
        # Runs once, so compile time matters more than speed.
        return (aligned(local, shared_of(downlink), "svd") if self.align else local).T

    @final
    def shared_result(self, server: Any) -> Frame:
        """Return the shared components."""
        return shared_of(server).T

    @final
    def bases(self, server: Any, local: Rows) -> Bases:
        """Return the components, which all rotate together."""
        return Bases(shared=(shared_of(server).T,), along=(local.T,))


def shared_of(state: Any) -> Rows:
    """Return the shared components in a server state or a downlink."""
    return getattr(state, "shared", state)
