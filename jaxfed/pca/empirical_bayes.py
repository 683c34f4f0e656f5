r"""Hierarchical PCA whose prior variance is estimated from the marginal likelihood.

In a joint maximum over the clients' components and the prior variance, the variance collapses or
follows a hyperprior, because a point estimate of the components ignores their uncertainty. Here the
components are integrated out.

Given the shared components V, the prior and the posterior of a client's subspace are both matrix
Bingham distributions on the Grassmannian, with density proportional to exp(½ tr UᵀAU): A = κ VVᵀ
with κ = 1/σ² for the prior, A = c S_i + κ VVᵀ for the posterior. So the marginal likelihood is a
ratio of their normalizing constants, C(c S_i + κ VVᵀ) / C(κ VVᵀ), and an EM step needs their
derivatives, the mean projectors E[UUᵀ]. These have the eigenvectors of A, so the most probable
subspace is also the best one on average.

Source: the prior is that of Ozkara, Huang & Diggavi (2023), as a distribution of subspaces (see
`jaxfed.pca.bingham`).
"""

from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxfed.contract import (
    Algorithm,
    Bases,
    Diagnostics,
    check_count,
    check_name,
    check_positive,
    hyperparameter,
)
from jaxfed.core.clients.samples import Samples
from jaxfed.linalg import Moment, polar
from jaxfed.linalg.division import ratio
from jaxfed.pca import bingham
from jaxfed.pca._quasi_newton import (
    Evaluation,
    Memory,
    climb,
    for_other_data,
    initial_memory,
    refuse_implicit,
)
from jaxfed.pca.components import (
    Frame,
    change_within,
    check_warm_start,
    deflate,
    moment_message,
    moment_of,
    moment_received,
)
from jaxfed.pca.likelihood import (
    Scalar,
    Variances,
    aligned,
    at_rest,
    check_estimable,
    check_proper_rank,
    diagnostics_of,
    estimated,
    extrapolated,
    joint_moment,
    objective_scale,
    precision,
    variances_message,
    variances_of,
)

LARGEST_RATIO = 100.0  # of the concentration to the mean precision of the samples


class Downlink(NamedTuple):
    """The shared components and the concentration."""

    shared: Frame
    concentration: Scalar
    variances: Variances | None  # of noise and scores, if they were estimated


class Uplink(NamedTuple):
    """The posterior mean projector times V, and the expected distance from V."""

    product: Frame
    distance: Scalar
    objective: Scalar | None  # for the quasi-Newton solver


class EmpiricalBayesServer(NamedTuple):
    """The server's state."""

    shared: Frame
    concentration: Scalar
    previous: Float[Array, " 2"]  # log κ of the last round, and EM's step from there
    most: Scalar  # the largest concentration allowed
    variances: Variances | None = None  # of noise and scores, if they were estimated
    memory: Memory | None = None  # for the quasi-Newton solver


class EmpiricalBayesPCA(Algorithm):
    r"""Personalized components around shared ones, with a prior variance learned from the data.

    This is expectation maximization of the marginal likelihood, with the clients' components
    integrated out. Each round, a client sends E[UUᵀ]V, a d x r matrix, and the expected distance
    r - tr VᵀE[UUᵀ]V. The server orthonormalizes the mean matrix, which gives the shared components,
    and finds the concentration at which the prior expects the mean distance. There is no step size
    and no hyperprior to choose.

    The prior is a distribution of subspaces with density proportional to exp(κ/2 ‖VᵀU‖²), so the
    learned σ² = 1/κ is also the best `prior_variance` of `HierarchicalPCA`. It grows without bound
    as the clients' subspaces become unrelated, whereas the one that `HierarchicalPCA` learns hardly
    exceeds 1/d. If
    samples show no spread, it falls to its lower limit, a hundredth of the mean sampling variance
    1/c, below which a client's components no longer change; `history["at_lower_limit"]` is 1 in
    such rounds. With very few clients, it comes out too small, as V takes up part of the scatter.

    The noise variance decides how much of the scatter is due to sampling. By default it is
    estimated, with that of the scores, so that nothing depends on the units of the samples. If it
    is given twice too large and samples are few, sampling explains all of the scatter, and the
    learned variance falls to its limit although the clients differ.
    `history["residual_variance"]` is the variance that the components leave per remaining feature,
    which is near the noise variance if that is right.

    The likelihood is an approximation. Compared with numerical integration (one component of three
    features, 100 clients of 20 samples), κ is 3, 11 and 15 % too small for clients that scatter
    with variances of 0.03, 0.1 and 0.3.
    """

    quadratic_in_samples = True

    noise_variance: Float[Array, ""] | None
    rank: int = eqx.field(static=True)
    solver: Literal["em", "quasi_newton"] = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        noise_variance: float | Array | None = None,
        *,
        solver: Literal["em", "quasi_newton"] = "em",
    ):
        """Set up the algorithm.

        Args:
            rank: number of components of each client, less than the number of features.
            noise_variance: variance of the noise in each feature, if scores have variance one. By
                default the server estimates both from sums over the clients, before the first
                round; this needs a client with more than `rank` samples.
            solver: `"em"`, or `"quasi_newton"`: limited-memory BFGS on the same likelihood, in the
                shared components and log κ together, which takes a fraction of the rounds. It needs
                every client in each round, sends one more number, and has no implicit derivative.

        Raises:
            ValueError: if the rank is not a positive whole number, the variance is not positive and
                finite, or the solver is unknown.
        """
        check_count("rank", rank)
        check_positive("noise_variance", noise_variance, optional=True)
        check_name("solver", solver, ("em", "quasi_newton"))
        self.solver = solver
        self.rank, self.noise_variance = rank, hyperparameter(noise_variance)

    @property
    def needs_everybody(self) -> bool:
        """Whether every client must take part in each round, as the quasi-Newton solver needs."""
        return self.solver == "quasi_newton"

    @property
    def eigenvectors(self) -> int:
        """The rank."""
        return self.rank

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if the rank or the warm start does not fit."""
        check_proper_rank(self.rank, clients)
        check_estimable(self.noise_variance, self.rank, clients, warm_start)
        check_warm_start(warm_start, clients, self.rank, None)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> Moment:
        """Return the client's second moment."""
        return moment_of(data, rank=self.rank, rounds=rounds)

    def first_message(self, key, data: Moment, warm_start) -> dict[str, PyTree]:
        """Return what the variances, the first concentration and a pooled start need."""
        first: dict[str, PyTree] = {}
        if self.noise_variance is None:
            weight = data.count
            first["variances"] = variances_message(data, self.rank)
        else:
            weight = self._precision(data, None)
        first["precision"] = weight
        return first if warm_start is not None else first | {"moment": moment_message(data, weight)}

    def server_init(self, key, first: dict[str, PyTree], like, warm_start) -> EmpiricalBayesServer:
        """Return the first components and a prior as strong as the samples."""
        top = (
            moment_received(first["moment"]).top(self.rank)[1]
            if warm_start is None
            else warm_start.shared
        )
        weight, variances = first["precision"], None
        if self.noise_variance is None:
            variances = estimated(first["variances"], self.rank, like.dim)
            weight = variances.scores * precision(weight, *variances)
        place = jnp.log(weight)
        limit = bingham.concentrations(like.dim, self.rank, weight.dtype)[1]
        most = jnp.minimum(LARGEST_RATIO * weight, limit)
        memory = None
        if self.solver == "quasi_newton":
            # An expected distance of about r(d - r)/κ has the curvature r(d - r)/(2κ) along log κ;
            # the posterior has κ along V.
            curvature = self.rank * (like.dim - self.rank) / (2 * weight)
            memory = initial_memory(top, place[None], curvature[None])
        return EmpiricalBayesServer(top, weight, at_rest(weight), most, variances, memory)

    def for_other_data(self, server: EmpiricalBayesServer) -> EmpiricalBayesServer:
        """Return the state without steps, which extrapolations continue."""
        memory = server.memory and for_other_data(server.memory)
        return server._replace(previous=at_rest(server.concentration), memory=memory)

    def downlink(self, server: EmpiricalBayesServer) -> Downlink:
        """Return the shared components and the concentration."""
        return Downlink(server.shared, server.concentration, server.variances)

    def client_init(self, key, downlink: Downlink, data: Moment, warm_start) -> None:
        """Return None: each round computes the posterior anew."""

    def feasible(self, downlink: Downlink, data) -> Downlink:
        """Return the downlink with orthonormal components."""
        return downlink._replace(shared=polar(downlink.shared))

    def client_step(self, key, downlink: Downlink, local: None, data: Moment):
        """Apply the posterior mean projector to the shared components."""
        shared, concentration, found = downlink
        joint = self._posterior(data, downlink)
        rows = data.dim if joint.samples is None else len(joint.samples)
        top, vectors = joint.top(min(rows, data.dim))
        count = len(top)
        # The remaining eigenvalues are zero.
        values = jnp.pad(top, (0, data.dim - count))
        features, rank = data.dim, self.rank
        s, scores = variances_of(self.noise_variance, found, values.dtype)
        weights = bingham.mean_projector_weights(values, rank)
        # Outside the span of samples and shared components all eigenvalues are zero, so one weight
        # serves all of these directions, and they need no eigenvectors.
        rest = weights[-1] if count < features else 0.0
        inside = vectors.T @ shared
        # The derivative of eigenvectors leaves out their rotations towards each other.
        differences = bingham.divided_differences(values, weights)[:count, :count]
        turned = differences * change_within(joint, vectors)
        within = (weights[:count, None] - rest) * inside + turned @ inside
        product = rest * shared + vectors @ within
        # Computed here: a difference of two rounded messages would have no correct digit.
        distance = jnp.vdot(shared, shared - product)

        gaps = values[:rank, None] - values[rank:]
        posterior = bingham.log_normalizer(gaps, features, rank).mean() + values[:rank].sum() / 2
        # `log_normalizer` leaves out tr κVᵀV / 2, which is κr/2 for orthonormal V. But V arrives
        # not quite orthonormal, and a large κ amplifies the error.
        prior = bingham.log_normalizer(concentration, features, rank)
        prior += concentration / 2 * jnp.vdot(shared, shared)
        # n/2 (log det W + tr W⁻¹S) without its part in U, which is in the posterior's c S.
        constant = features * jnp.log(s) + rank * jnp.log1p(ratio(scores, s)) + ratio(data.trace, s)
        objective = data.count / 2 * constant - posterior + prior
        # The variance along the components: tr E[UUᵀ]S from E[UUᵀ](cS + κVVᵀ).
        held = jnp.vdot(weights[:count], top) - concentration * jnp.vdot(shared, product)
        left = (data.trace - ratio(held, self._precision(data, found))) / (features - rank)
        sent = objective if self.solver == "quasi_newton" else None
        diagnostics = {
            "objective": objective,
            "objective_scale": objective_scale(data),
            "residual_variance": left,
        }
        return Uplink(product, distance, sent), local, diagnostics

    def server_step(
        self, key, server: EmpiricalBayesServer, uplink: Uplink
    ) -> tuple[EmpiricalBayesServer, Diagnostics]:
        """Update the shared components and the concentration from the mean posterior."""
        known = diagnostics_of(server.variances)
        if server.memory is not None:
            server, diagnostics = self._climbed(server, server.memory, uplink)
            return server, {**diagnostics, **known}
        features = len(server.shared)
        place = jnp.log(server.concentration)
        # EM's own step. κ spans orders of magnitude, so steps and extrapolation are in log κ.
        move = jnp.log(bingham.fitted_concentration(uplink.distance, features, self.rank)) - place
        place_next = extrapolated(place, move, server.previous)
        least, _ = bingham.concentrations(features, self.rank, place.dtype)
        # As part of the state, the limit would have no implicit derivative.
        most = jax.lax.stop_gradient(server.most)
        concentration = jnp.clip(jnp.exp(place_next), least, most)
        rest = deflate(uplink.product, server.shared)
        gap = server.concentration * jnp.sum(rest**2)
        gap += self.rank * (features - self.rank) / 4 * move**2
        # The basis nearest to the previous one, so that it converges with the subspace.
        server = server._replace(
            shared=polar(uplink.product),
            concentration=concentration,
            previous=jnp.stack([place, move]),
        )
        at_limit = (concentration >= most).astype(concentration.dtype)
        found = {"prior_variance": 1 / concentration, "at_lower_limit": at_limit, "gap": gap}
        return server, {**found, **known}

    def _climbed(
        self, server: EmpiricalBayesServer, memory: Memory, uplink: Uplink
    ) -> tuple[EmpiricalBayesServer, dict[str, Array]]:
        """Take a quasi-Newton step in the shared components and log κ together."""
        assert uplink.objective is not None
        concentration, features = server.concentration, len(server.shared)
        farther = bingham.prior_distance(concentration, features, self.rank) - uplink.distance
        # d log C / d log κ is κ/2 (r - expected distance) for prior and posterior alike, so the
        # slope vanishes where EM stops.
        slope = concentration * farther / 2
        found = Evaluation(concentration * uplink.product, -uplink.objective, slope[None])
        limit = jnp.asarray(bingham.concentrations(features, self.rank, slope.dtype)[0])
        least, most = jnp.log(limit), jnp.log(jax.lax.stop_gradient(server.most))
        memory, _, left = climb(memory, found, least[None], most[None])
        place = memory.numbers[0]
        concentration = jnp.exp(place)
        at_limit = (place >= most).astype(place.dtype)
        server = server._replace(
            shared=memory.trial.frame, concentration=concentration, memory=memory
        )
        return server, {
            "prior_variance": 1 / concentration,
            "at_lower_limit": at_limit,
            "gap": left,
        }

    def client_result(self, downlink: Downlink, local: None, data: Moment) -> Frame:
        """Return the most probable subspace, in the basis nearest to V."""
        top = self._posterior(data, downlink).top(self.rank)[1]
        # Runs once, so compile time matters more than speed.
        return aligned(top.T, downlink.shared.T, "svd").T

    def shared_result(self, server: EmpiricalBayesServer) -> Frame:
        """Return the shared components."""
        return server.shared

    def remarks(self, result, history) -> tuple[str, ...]:
        """Warn if the learned variance is at its lower limit, with the noise that remains."""
        if not history["at_lower_limit"].size or not history["at_lower_limit"][-1]:
            return ()
        left = history["residual_variance"][-1]
        if self.noise_variance is None:
            assumed = history["noise_variance"][-1]
        else:
            assumed = float(self.noise_variance)
        return (
            "The learned prior variance is at its lower limit: the clients are alike, or "
            f"noise_variance ({assumed:.3g}) is too large; the components leave a variance of "
            f"{left:.3g} per remaining feature.",
        )

    def through(self) -> Algorithm:
        """Return the algorithm itself.

        Raises:
            ValueError: for the quasi-Newton solver.
        """
        return refuse_implicit(self, self.solver == "quasi_newton")

    def bases(self, server: EmpiricalBayesServer, local: None) -> Bases:
        """Return the shared components."""
        return Bases(shared=(server.shared,))

    def _precision(self, moment: Moment, found: Variances | None) -> Scalar:
        return precision(
            moment.count, *variances_of(self.noise_variance, found, moment.trace.dtype)
        )

    def _posterior(self, moment: Moment, downlink: Downlink) -> Moment:
        """Return the posterior's matrix, c S + κ VVᵀ."""
        weight = self._precision(moment, downlink.variances)
        return joint_moment(moment, weight, downlink.shared, 1 / downlink.concentration)
