"""The shared implementation of `HierarchicalPCA` and `AdaptivePCA`.

They differ only in where the prior variance comes from: it is given, or follows from the clients'
distances.
"""

from typing import Literal, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxfed.contract import (
    Algorithm,
    Bases,
    Diagnostics,
    check_flag,
    check_name,
    check_positive,
    hyperparameter,
)
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.reduction import Sum
from jaxfed.linalg import Moment, polar
from jaxfed.pca import likelihood
from jaxfed.pca._component_updates import SOLVERS, predicted_gain
from jaxfed.pca._quasi_newton import Evaluation, Memory, climb, for_other_data, initial_memory
from jaxfed.pca.components import Frame, Rows, check_warm_start
from jaxfed.pca.likelihood import (
    Member,
    Number,
    Scalar,
    Spread,
    Variances,
    aligned,
    at_rest,
    check_settings,
    extrapolated,
)

LEAST = 0.01  # prior variance, relative to the sampling variance
# Step in log σ². A longer one may end where clients that differ seem alike, and stay there.
LONGEST = 0.5


class Downlink(NamedTuple):
    """What clients receive."""

    shared: Rows
    prior_variance: Scalar | None  # if it is learned
    variances: Variances | None  # of noise and scores, if they were estimated
    share: Scalar | None  # 1 - 1/m for m clients, if it is learned without ξ


class Message(NamedTuple):
    """Uplink."""

    shared: PyTree  # the message about the shared components
    distance: Scalar | None  # d², if the prior variance is learned
    objective: Scalar | None  # for the quasi-Newton solver


class Server(NamedTuple):
    """The server's state."""

    shared: Rows
    prior_variance: Scalar | None = None  # if it is learned
    variances: Variances | None = None  # of noise and scores, if they were estimated
    spread: Spread | None = None  # if the prior variance is learned without ξ
    memory: Memory | None = None  # for the quasi-Newton solver


class PersonalizedPCA(Algorithm):
    """Local components around shared ones, under a prior whose variance is given or learned."""

    quadratic_in_samples = True

    noise_variance: Float[Array, ""] | None
    prior_variance: Float[Array, ""] | None
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
        noise_variance: Number | None,
        prior_variance: Number | None,
        step_size: Number | None,
        global_step_size: Number | None,
        solver,
        likelihood,
        start,
        align: bool,
    ) -> None:
        check_settings(rank, noise_variance, step_size)
        check_positive("prior_variance", prior_variance, optional=True)
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

    # How a subclass learns the prior variance.

    @property
    def _xi(self) -> Array | None:
        """ξ of the hyperprior; None without one."""
        return None

    @property
    def _learns(self) -> bool:
        """Whether the prior variance is learned."""
        return self.prior_variance is None

    @property
    def _measures_first(self) -> bool:
        """Whether the distance is that of the components before the round."""
        return False

    def _dimension(self, features: int) -> int:
        """Return D, the number of entries of the components that the prior scatters."""
        return self.rank * (features - self.rank)

    def _updated(self, variance: Scalar, distance: Scalar, dimension: int) -> Scalar:
        """Return the next prior variance."""
        return distance / dimension

    # The algorithm.

    @property
    def needs_everybody(self) -> bool:
        """Whether every client must take part in each round, as the quasi-Newton solver needs."""
        return self.solver == "quasi_newton"

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the rank, the warm start or an estimate does not fit the data."""
        likelihood.check_proper_rank(self.rank, clients)
        likelihood.check_estimable(self.noise_variance, self.rank, clients, warm_start)
        check_warm_start(warm_start, clients, self.rank, self.rank)

    @final
    def prepare(self, data: Samples | Moment, client_id, rounds) -> Member:
        """Return the client's second moment, with its curvature if the step size is automatic."""
        factor = 0.5 if self.likelihood == "half" else 1.0
        automatic = self.solver == "gradient" and self.step_size is None
        return likelihood.member(
            data, self.noise_variance, self.rank, rounds, factor=factor, curvature=automatic
        )

    @final
    def first_message(self, key, data: Member, warm_start) -> dict[str, PyTree]:
        """Return what the start, the variances and the first prior variance need."""
        first = likelihood.pooled_message(data, self.start, warm_start)
        if self.noise_variance is None:
            first["variances"] = likelihood.variances_message(data.moment, self.rank)
        if self._learns and self._xi is None:
            first["precision"], first["clients"] = (
                data.precision,
                Sum(jnp.ones_like(data.precision)),
            )
        return first

    @final
    def server_init(self, key, first: dict[str, PyTree], like, warm_start) -> Server:
        """Return the first shared components, and what is estimated or learned."""
        shared = likelihood.initial_shared(self.rank, key, first, like, warm_start)
        features, variance, variances = shared.shape[1], None, None
        if self.noise_variance is None:
            variances = likelihood.estimated(first["variances"], self.rank, features)
        spread = None
        if self._learns and self._xi is None:
            weight = first["precision"]
            if variances is not None:
                weight = variances.scores * likelihood.precision(weight, *variances)
            # Subspaces that have nothing in common scatter by 1/d.
            variance = jnp.minimum(1 / weight, 1 / features)
            # A coarse channel changes the number of clients.
            share = 1 - 1 / jnp.maximum(first["clients"], 1)
            spread = Spread(share, LEAST / weight, at_rest(variance))
        elif self._xi is not None:
            xi = self._xi.astype(shared.dtype)
            variance = 1 / features + 2 * xi / self._dimension(features)
        if self._learns and self.prior_variance is not None:
            variance = self.prior_variance.astype(shared.dtype)
        memory = None
        if self.solver == "quasi_newton" and variance is not None:
            # The hyperprior's curvature is D/2 along log σ², that of the distances 1/σ² along V.
            curvature = self._dimension(features) / 2 * variance
            memory = initial_memory(shared.T, jnp.log(variance)[None], curvature[None])
        elif self.solver == "quasi_newton":
            memory = initial_memory(shared.T)
        return Server(shared, variance, variances, spread, memory)

    @final
    def for_other_data(self, server: Server) -> Server:
        """Return the state without steps, which extrapolations continue."""
        spread, memory, variance = server.spread, server.memory, server.prior_variance
        if spread is not None and variance is not None:
            spread = spread._replace(previous=at_rest(variance))
        return server._replace(spread=spread, memory=memory and for_other_data(memory))

    @final
    def downlink(self, server: Server) -> Downlink:
        """Return the shared components and the variances that the clients do not know."""
        share = None if server.spread is None else server.spread.share
        return Downlink(server.shared, server.prior_variance, server.variances, share)

    @final
    def client_init(self, key, downlink: Downlink, data: Member, warm_start) -> Rows:
        """Return the first local components: the warm start's, random, or the shared ones."""
        from_shared = self.start == "pooled" if warm_start is None else warm_start.local is None
        if from_shared:
            return downlink.shared
        return likelihood.initial_local(self.rank, key, data, warm_start)

    @final
    def feasible(self, downlink: Downlink, data) -> Downlink:
        """Return the downlink with orthonormal components."""
        return downlink._replace(shared=polar(downlink.shared))

    @final
    def client_step(
        self, key, downlink: Downlink, local: Rows, data: Member
    ) -> tuple[Message, Rows, Diagnostics]:
        """Update the local components, then compute the message about the shared ones."""
        shared, learned, found, share = downlink
        variance = learned
        if variance is None:
            assert self.prior_variance is not None
            variance = self.prior_variance.astype(shared.dtype)
        data = data.under(found)
        variances = likelihood.variances_of(self.noise_variance, found, shared.dtype)
        local = aligned(local, shared) if self.align else local
        distance = likelihood.squared_distance(shared, local)
        objective = likelihood.negative_log_likelihood(data.moment, local, variances)
        objective = objective + distance / (2 * variance)
        solver = SOLVERS[self.solver]
        moved = solver.local_step(data, local, shared, variance, self.step_size)
        if self.solver == "quasi_newton":
            # The server climbs -min_U f(V, U) as a function of V, so the value must be that of the
            # best components beside the V that it sent.
            distance = likelihood.squared_distance(shared, moved)
            objective = likelihood.negative_log_likelihood(data.moment, moved, variances)
            objective = objective + distance / (2 * variance)
        sent = None
        if learned is not None:
            sent = distance
            if not self._measures_first:
                sent = likelihood.squared_distance(shared, moved)
            if share is not None:
                # About V, the components' posterior is nearly normal, with the variance σ²/(1 + k)
                # in each of D entries. That of V itself adds k/(1 + k) σ²/m.
                dimension = self._dimension(shared.shape[1])
                k = data.precision * variances.scores * variance
                sent = sent + dimension * variance * (1 - share * k / (1 + k))
                objective = objective + share * dimension / 2 * jnp.log1p(k)
        uplink = Message(
            solver.message(shared, moved, variance, self.global_step_size),
            sent,
            objective if self.solver == "quasi_newton" else None,
        )
        found = {"objective": objective, "distance": distance}
        if self.solver != "quasi_newton":
            found["gap"] = predicted_gain(data, local, moved, variance, self.step_size)
        return uplink, moved, found

    @final
    def server_step(self, key, server: Server, uplink: Message) -> tuple[Server, Diagnostics]:
        """Update the shared components, and the prior variance if it is learned."""
        known = likelihood.diagnostics_of(server.variances)
        if server.memory is not None:
            server, diagnostics = self._climbed(server, server.memory, uplink)
            return server, {**diagnostics, **known}
        shared = SOLVERS[self.solver].shared_step(server.shared, uplink.shared)
        given = self.prior_variance if server.prior_variance is None else server.prior_variance
        assert given is not None
        gap = jnp.sum((shared - server.shared) ** 2) / (2 * given.astype(shared.dtype))
        server = server._replace(shared=shared)
        if server.prior_variance is None:
            return server, {"gap": gap, **known}
        assert uplink.distance is not None
        dimension = self._dimension(shared.shape[1])
        variance = self._updated(server.prior_variance, uplink.distance, dimension)
        gap += dimension / 4 * jnp.log(variance / server.prior_variance) ** 2
        if server.spread is not None:
            place = jnp.log(server.prior_variance)
            move = jnp.log(variance) - place
            variance = jnp.exp(extrapolated(place, move, server.spread.previous, LONGEST))
            variance = jnp.maximum(variance, jax.lax.stop_gradient(server.spread.least))
            spread = server.spread._replace(previous=jnp.stack([place, move]))
            server = server._replace(spread=spread)
        known |= {"prior_variance": variance, "gap": gap}
        return server._replace(prior_variance=variance), known

    def _climbed(
        self, server: Server, memory: Memory, uplink: Message
    ) -> tuple[Server, dict[str, Array]]:
        """Take a quasi-Newton step in the shared components, and in log σ² if it is learned."""
        assert uplink.objective is not None
        value, slope, least, most = -uplink.objective, None, None, None
        variance = server.prior_variance
        if variance is not None:
            assert uplink.distance is not None
            half = self._dimension(server.shared.shape[1]) / 2
            # Minus the derivative by log σ² of D/2 log σ² + ξ/σ² + d²/(2σ²), whose last term is in
            # the clients' objective already. Without ξ, D/2 log(1 + k) of each client takes the
            # place of the first two, and the clients' distance accounts for its derivative.
            slope = uplink.distance / (2 * variance) - half
            if self._xi is not None:
                pull = self._xi.astype(variance.dtype) / variance
                slope, value = slope + pull, value - half * memory.numbers[0] - pull
            slope = slope[None]
            most = jnp.full(1, jnp.inf, slope.dtype)
            least = -most
            if server.spread is not None:
                least = jnp.log(jax.lax.stop_gradient(server.spread.least))[None]
        memory, _, left = climb(memory, Evaluation(uplink.shared.T, value, slope), least, most)
        diagnostics = {"gap": left}
        if variance is not None:
            variance = jnp.exp(memory.numbers[0])
            diagnostics = {"prior_variance": variance} | diagnostics
        return server._replace(
            shared=memory.shared, prior_variance=variance, memory=memory
        ), diagnostics

    @final
    def client_result(self, downlink: Downlink, local: Rows, data: Member) -> Frame:
        """Return the local components, aligned with the shared ones."""
        # Runs once, so compile time matters more than speed.
        return (aligned(local, downlink.shared, "svd") if self.align else local).T

    @final
    def shared_result(self, server: Server) -> Frame:
        """Return the shared components."""
        return server.shared.T

    @final
    def bases(self, server: Server, local: Rows) -> Bases:
        """Return the components, which all rotate together."""
        return Bases(shared=(server.shared.T,), along=(local.T,))
