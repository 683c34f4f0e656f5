r"""Hierarchical-Bayes PCA: each client has its own components, tied together by a common prior.

A sample of client i is y = U_i x + e with normal scores x of variance l, here one, and noise of
variance s in every feature, and the components U_i scatter around shared ones V. Maximizing the
joint density means

    min over V, U_i of  mean_i  n_i/2 (log det W_i + tr W_i⁻¹ S_i) + d²(V, U_i) / (2 σ²),
    W_i = U_i U_iᵀ + s I,     d²(V, U) = ‖U - V sym(VᵀU)‖²

over matrices with orthonormal columns; d is the length of the projection of U onto the tangent
space at V. W is never formed or inverted: by Woodbury's identity W⁻¹ = (I - UUᵀ / (1 + s)) / s, and
log det W is constant. Scores of variance l are those of samples divided by √l, with noise s/l.

The prior's variance σ² is given, or learned together with the components.

Source: Ozkara, Huang & Diggavi (2023), Personalized PCA for federated heterogeneous data; for the
hyperprior, Ozkara, Huang, Zhou & Diggavi, ADEPT: hierarchical Bayes approach to personalized
federated unsupervised learning.
"""

import dataclasses
from typing import Literal, final

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxfed.contract import (
    Algorithm,
    Bases,
    Diagnostics,
    check_flag,
    check_name,
    check_positive,
    hyperparameter,
    refuse,
)
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.reduction import Sum
from jaxfed.linalg import Moment, polar
from jaxfed.pca import likelihood
from jaxfed.pca._component_updates import (
    SOLVERS,
    Downlink,
    HierarchicalServer,
    Message,
    climbed,
    first_memory,
    predicted_gain,
)
from jaxfed.pca._prior_variance import UPDATES, Learning
from jaxfed.pca._quasi_newton import (
    for_other_data,
    refuse_implicit,
)
from jaxfed.pca.components import Frame, Rows, check_warm_start
from jaxfed.pca.likelihood import (
    LikelihoodMember,
    Scalar,
    aligned,
    at_rest,
    check_settings,
)


@final
class HierarchicalPCA(Algorithm):
    r"""Personalized components around shared ones, by alternating Stiefel gradient descent.

    Each round, a client takes a step with its local components, \(U \leftarrow GR(U - \alpha\,
    \mathrm{grad}_U f)\), then one with its copy of the shared ones, and sends the copy. The server
    averages the copies and retracts. `result.local` holds the clients' components, which
    reconstruct their samples; `result.shared` is the prior's centre V, which overlaps with them.

    The likelihood depends only on the subspace of U_i, but d²(V, U_i) depends on its basis. A
    random basis of V's own subspace is (r-1)/2 away from V on average, and where VᵀU_i is not
    positive semi-definite, descent is slow along flat valleys. So before its step, each client
    rotates its basis as near to V as possible (`align=True`). The minimum is the same, the prior
    becomes one of subspaces, and the bases of different clients are comparable. `align=False` is
    the algorithm as printed.

    By default, nothing depends on the units of the samples: the server estimates s and l (see
    `jaxfed.pca.likelihood.estimated`), and σ² is learned by expectation maximization. For that, the
    posterior of U_i and V is taken as normal, with the variances v σ²/(v + σ²) and (v + σ²)/m in
    each of D = r(d - r) directions; v = s (1 + s/l) / (n l) is the sampling variance and m the
    number of clients. Then mean d²/D + v σ²/(v + σ²) + σ⁴/((v + σ²) m) is the next σ². It is at
    least v/100, and for a single client it stays at its start, min(v, 1/d). If samples are fewer
    than features and the noise is strong, so that v is near 1/d, σ² comes out too large, because
    subspaces have no distances that large; `EmpiricalBayesPCA` is then better.

    The hyperprior of ADEPT (`hyper_prior`) keeps the variance from vanishing: the objective gains
    \(R(\sigma) = D \log \sigma + (2\xi + \text{mean}\, d^2) / (2\sigma^2)\), which is minimal at
    \(\sigma^2 = (2\xi + \text{mean}\, d^2)/D\). Clients send their d² with their message. In this
    joint maximum over components and variance, ξ decides: for small ξ the variance collapses to
    2ξ/D, for large ξ it follows the hyperprior. With n samples, 2ξ/D should exceed 0.17 v,
    v = s (1 + s)/n (Corollary 4.6 for Gaussian means); at v/3, alike clients have two to six times
    the error of the default.

    Columns stay orthonormal at every step size, because the retraction is the orthonormal polar
    factor and not (U + X)(I + XᵀX)^(-1/2), whose rounding errors grow exponentially for long steps.

    Source: Ozkara, Huang & Diggavi (2023), Algorithm 1 and (4); the variance of V makes σ² that of
    restricted maximum likelihood: Laird & Ware (1982), Random-effects models for longitudinal data.
    With a hyperprior: Ozkara et al., ADEPT, Algorithm 1 and Lemma 3.2.
    """

    quadratic_in_samples = True

    noise_variance: Scalar | None
    prior_variance: Scalar | None
    hyper_prior: Scalar | None
    initial_variance: Scalar | None
    variance_step_size: Scalar | None
    step_size: Scalar | None
    global_step_size: Scalar | None
    rank: int = eqx.field(static=True)
    solver: Literal["gradient", "eigenvectors", "quasi_newton"] = eqx.field(static=True)
    variance_update: Literal["closed_form", "log", "gradient"] = eqx.field(static=True)
    dimension: Literal["subspace", "frame"] = eqx.field(static=True)
    likelihood: Literal["exact", "half"] = eqx.field(static=True)
    start: Literal["pooled", "random"] = eqx.field(static=True)
    align: bool = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        noise_variance: float | Array | None = None,
        prior_variance: float | Array | None = None,
        *,
        solver: Literal["gradient", "eigenvectors", "quasi_newton"] = "gradient",
        hyper_prior: float | Array | None = None,
        initial_variance: float | Array | None = None,
        variance_update: Literal["closed_form", "log", "gradient"] = "closed_form",
        variance_step_size: float | Array | None = None,
        dimension: Literal["subspace", "frame"] = "subspace",
        step_size: float | Array | None = None,
        global_step_size: float | Array | None = None,
        likelihood: Literal["exact", "half"] = "exact",
        start: Literal["pooled", "random"] = "pooled",
        align: bool = True,
    ):
        """Set up the algorithm.

        Args:
            rank: number of components of each client, less than the number of features.
            noise_variance: variance s of the noise in each feature, if scores have the variance l =
                1. By default the server estimates both from sums over the clients, before the
                first round; this needs a client with more than `rank` samples.
            prior_variance: variance σ² of the clients' components around the shared ones, whatever
                the units of the samples. By default it is learned from the data.
            solver: how components are updated. `"gradient"` takes gradient steps. `"eigenvectors"`
                alternates between the best local components, top eigenvectors of c S_i + VVᵀ/σ²,
                and the best shared ones, top eigenvectors of the mean U_iU_iᵀ. It takes an order of
                magnitude fewer rounds and no step size, but an eigendecomposition per client and
                round. `"quasi_newton"` takes the best local components, and limited-memory BFGS for
                the shared ones, and for σ² if that is learned. It takes still fewer rounds if the
                prior is tight. It needs every client in each round and `likelihood="exact"`, sends
                one more number, and has no implicit derivative if σ² is learned.
            hyper_prior: ξ, if σ² is learned. By default there is no hyperprior.
            initial_variance: σ² before the first round, if it is learned, at least ξ/(2D). By
                default 1/d + 2ξ/D, or with no ξ the sampling variance, but at most 1/d.
            variance_update: how σ² is learned: by the `"closed_form"` minimizer; a `"log"` step, in
                log σ²; or a `"gradient"` step in σ as in the paper, which takes σ²/(2 η D) rounds
                and needs a hyperprior. The quasi-Newton solver learns σ² together with the shared
                components, so it has `"closed_form"` alone.
            variance_step_size: η of the steps of σ². By default 1/D for `"log"` (Newton's is 2/D)
                and ξ/D² for `"gradient"`.
            dimension: D. `"subspace"` means r(d - r); `"frame"` means d·r as in the paper, which
                also counts rotations within the subspace. Alignment removes these, so `"frame"`
                makes σ² too small.
            step_size: step size of the local components. By default 1 / (c λ + 1/σ²) with the
                client's precision c = n / (s (1 + s/l)) and largest eigenvalue λ; steps up to twice
                that are stable.
            global_step_size: step size of the shared components. By default σ²; steps up to three
                times that are stable.
            likelihood: `"exact"`, or `"half"` for the gradient as printed in Fact 1, which is too
                small by a factor of two. That solves the problem with half the prior variance, with
                steps half as long.
            start: `"pooled"`: server and clients start at the top eigenvectors of the mean second
                moment, weighted by the numbers of samples. `"random"`: each starts at its own
                random components.
            align: whether each client rotates its basis towards the shared components every round;
                see the class.

        Raises:
            ValueError: if the rank is not a positive whole number, a variance, the hyperprior or a
                step size is not positive and finite, a name is unknown, a setting of learning σ² is
                given beside `prior_variance`, or the hyperprior is missing. A run raises it if the
                noise variance is to be estimated and no client has more than `rank` samples, or if
                settings violate Lemma 3.2.
        """
        check_settings(rank, noise_variance, step_size)
        check_name("solver", solver, tuple(SOLVERS))
        check_name("variance_update", variance_update, tuple(UPDATES))
        check_name("dimension", dimension, ("subspace", "frame"))
        check_name("likelihood", likelihood, ("exact", "half"))
        check_name("start", start, ("pooled", "random"))
        check_flag("align", align)
        learning = {
            "hyper_prior": hyper_prior,
            "initial_variance": initial_variance,
            "variance_step_size": variance_step_size,
        }
        others = {"prior_variance": prior_variance, "global_step_size": global_step_size}
        for name, value in (learning | others).items():
            check_positive(name, value, optional=True)
            if name in learning and value is not None and prior_variance is not None:
                raise refuse(name, "None with a prior_variance, which is not learned", value)
        if variance_update == "gradient" and hyper_prior is None:
            raise ValueError("hyper_prior: variance_update='gradient' wants a number, got None")
        if solver == "quasi_newton" and variance_update != "closed_form":
            wanted = "'closed_form' with solver='quasi_newton'"
            raise refuse("variance_update", wanted, variance_update)
        if solver == "quasi_newton" and likelihood == "half":
            # Half the gradient does not match the objective, whose values the server compares.
            raise ValueError("likelihood: solver='quasi_newton' wants 'exact', got 'half'")
        self.rank, self.solver, self.likelihood = rank, solver, likelihood
        self.variance_update, self.dimension = variance_update, dimension
        self.start, self.align = start, align
        self.noise_variance = hyperparameter(noise_variance)
        self.step_size = hyperparameter(step_size)
        for name, value in (learning | others).items():
            setattr(self, name, hyperparameter(value))

    @property
    def needs_everybody(self) -> bool:
        """Whether every client must take part in each round, as the quasi-Newton solver needs."""
        return self.solver == "quasi_newton"

    @property
    def _learning(self) -> Learning | None:
        """How the prior variance is learned; None if it is given."""
        if self.prior_variance is not None:
            return None
        update, start = self.variance_update, self.initial_variance
        steps = self.hyper_prior, start, self.variance_step_size
        return Learning(self.rank, self.dimension, update, *steps)

    @property
    def eigenvectors(self) -> int:
        """The rank."""
        return self.rank

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if arguments do not fit the data or violate Lemma 3.2."""
        likelihood.check_proper_rank(self.rank, clients)
        likelihood.check_estimable(self.noise_variance, self.rank, clients, warm_start)
        check_warm_start(warm_start, clients, self.rank, self.rank)
        if self._learning is not None:
            self._learning.check(clients.features)

    def prepare(self, data: Samples | Moment, client_id, rounds) -> LikelihoodMember:
        """Return the client's second moment, with its curvature if the step size is automatic."""
        factor = 0.5 if self.likelihood == "half" else 1.0
        automatic = self.solver == "gradient" and self.step_size is None
        return likelihood.member(
            data, self.noise_variance, self.rank, rounds, factor=factor, curvature=automatic
        )

    def first_message(self, key, data: LikelihoodMember, warm_start) -> dict[str, PyTree]:
        """Return what the start, the variances and the first prior variance need."""
        first = likelihood.pooled_message(data, self.start, warm_start)
        if self.noise_variance is None:
            first["variances"] = likelihood.variances_message(data.moment, self.rank)
        if self._learning is not None and self.hyper_prior is None:
            first["precision"] = data.precision
            first["clients"] = Sum(jnp.ones_like(data.precision))
        return first

    def server_init(self, key, first: dict[str, PyTree], like, warm_start) -> HierarchicalServer:
        """Return the first shared components, and what is estimated or learned."""
        shared = likelihood.initial_shared(self.rank, key, first, like, warm_start)
        features, variance, variances, spread, memory = shared.shape[1], None, None, None, None
        if self.noise_variance is None:
            variances = likelihood.estimated(first["variances"], self.rank, features)
        if self._learning is not None:
            variance, spread = self._learning.first(first, variances, features, shared.dtype)
        if self.solver == "quasi_newton":
            memory = first_memory(shared, variance, self._learning)
        return HierarchicalServer(shared, variance, variances, spread, memory)

    def for_other_data(self, server: HierarchicalServer) -> HierarchicalServer:
        """Return the state without steps, which extrapolations continue."""
        spread, memory, variance = server.spread, server.memory, server.prior_variance
        if spread is not None and variance is not None:
            spread = spread._replace(previous=at_rest(variance))
        return server._replace(spread=spread, memory=memory and for_other_data(memory))

    def downlink(self, server: HierarchicalServer) -> Downlink:
        """Return the shared components and the variances that the clients do not know."""
        share = None if server.spread is None else server.spread.share
        return Downlink(server.shared, server.prior_variance, server.variances, share)

    def client_init(self, key, downlink: Downlink, data: LikelihoodMember, warm_start) -> Rows:
        """Return the first local components: the warm start's, random, or the shared ones."""
        from_shared = self.start == "pooled" if warm_start is None else warm_start.local is None
        if from_shared:
            return downlink.shared
        return likelihood.initial_local(self.rank, key, data, warm_start)

    def feasible(self, downlink: Downlink, data) -> Downlink:
        """Return the downlink with orthonormal components."""
        return downlink._replace(shared=polar(downlink.shared))

    def client_step(
        self, key, downlink: Downlink, local: Rows, data: LikelihoodMember
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
            # The gradient step uses the components from before the round (line 7 comes before
            # lines 8 and 9); the other updates are block steps and use the new ones. Clients send
            # d² instead of steps of their own: R is linear in d², so the mean of their steps is
            # one step with the mean.
            if self.variance_update != "gradient":
                sent = likelihood.squared_distance(shared, moved)
            if share is not None and self._learning is not None:
                # About V, the components' posterior is nearly normal, with the variance σ²/(1 + k)
                # in each of D entries. That of V itself adds k/(1 + k) σ²/m.
                degrees = self._learning.degrees(shared.shape[1])
                k = data.precision * variances.scores * variance
                sent = sent + degrees * variance * (1 - share * k / (1 + k))
                objective = objective + share * degrees / 2 * jnp.log1p(k)
        uplink = Message(
            solver.message(shared, moved, variance, self.global_step_size),
            sent,
            objective if self.solver == "quasi_newton" else None,
        )
        scale = likelihood.objective_scale(data.moment)
        found = {"objective": objective, "distance": distance, "objective_scale": scale}
        if self.solver != "quasi_newton":
            found["gap"] = predicted_gain(data, local, moved, variance, self.step_size)
        return uplink, moved, found

    def server_step(
        self, key, server: HierarchicalServer, uplink: Message
    ) -> tuple[HierarchicalServer, Diagnostics]:
        """Update the shared components, and the prior variance if it is learned."""
        known = likelihood.diagnostics_of(server.variances)
        if self.solver == "quasi_newton":
            server, diagnostics = climbed(server, uplink, self._learning)
            return server, {**diagnostics, **known}
        shared = SOLVERS[self.solver].shared_step(server.shared, uplink.shared)
        given = self.prior_variance if server.prior_variance is None else server.prior_variance
        assert given is not None
        gap = jnp.sum((shared - server.shared) ** 2) / (2 * given.astype(shared.dtype))
        server = server._replace(shared=shared)
        if self._learning is None:
            return server, {"gap": gap, **known}
        assert server.prior_variance is not None and uplink.distance is not None
        moved = server.prior_variance, uplink.distance, server.spread, shared.shape[1]
        variance, spread, change = self._learning.next(*moved)
        known |= {"prior_variance": variance, "gap": gap + change}
        return server._replace(prior_variance=variance, spread=spread), known

    def client_result(self, downlink: Downlink, local: Rows, data: LikelihoodMember) -> Frame:
        """Return the local components, aligned with the shared ones."""
        # Runs once, so compile time matters more than speed.
        return (aligned(local, downlink.shared, "svd") if self.align else local).T

    def shared_result(self, server: HierarchicalServer) -> Frame:
        """Return the shared components."""
        return server.shared.T

    def bases(self, server: HierarchicalServer, local: Rows) -> Bases:
        """Return the components, which all rotate together."""
        return Bases(shared=(server.shared.T,), along=(local.T,))

    def through(self) -> Algorithm:
        """Return the algorithm itself; for the quasi-Newton solver, alternating eigenvectors.

        Both have the same stationary points, and the latter's state is a single point.

        Raises:
            ValueError: for the quasi-Newton solver, if the prior variance is learned.
        """
        if self.solver != "quasi_newton":
            return self
        refuse_implicit(self, self.prior_variance is None)
        return dataclasses.replace(self, solver="eigenvectors")
