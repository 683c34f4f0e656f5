r"""Hierarchical-Bayes PCA: every client its own components, tied together by a common prior.

A sample of client i is y = U_i x + e with standard normal x and noise of variance s in every
feature, and the components U_i scatter around common ones V. Maximizing the joint density means

    min over V, U_i of  mean_i  n_i/2 (log det W_i + tr W_i⁻¹ S_i) + d²(V, U_i) / (2 σ²),
    W_i = U_i U_iᵀ + s I,     d²(V, U) = ‖U - V sym(VᵀU)‖²

over matrices with orthonormal columns; d² is the length of the projection of U onto the tangent
space at V. W is never formed or inverted: by Woodbury's identity W⁻¹ = (I - UUᵀ / (1 + s)) / s and
log det W is constant.

Source: Ozkara, Huang & Diggavi (2023), Personalized PCA for federated heterogeneous data;
Ozkara, Huang, Zhou & Diggavi, ADEPT: hierarchical Bayes approach to personalized federated
unsupervised learning (`AdaptivePCA`).
"""

from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from jaxfed.core.aggregation import Gram, Mean
from jaxfed.core.algorithm import Algorithm, Personalized, hyperparameter
from jaxfed.core.checks import check_count, check_name, check_positive
from jaxfed.core.clients import Clients
from jaxfed.linalg import Moment, matmul, orthonormalize, polar
from jaxfed.manifolds import stiefel
from jaxfed.pca._components import (
    MEAN_MOMENT,
    Frame,
    MomentMessage,
    check_data,
    check_fits,
    check_start,
    moment_behind,
    moment_message,
    moment_of,
    moment_received,
)
from jaxfed.pca.hierarchical_theory import spread_gradient, spread_minimizer

Scalar = Float[Array, ""]
Number = float | Scalar
# Here components are rows, and what the formulas call U is the transpose of the arrays: batches of
# such small matrices are multiplied two to four times as fast.
Rows = Float[Array, "rank features"]


# --- the terms of the objective ------------------------------------------------------------------


def precision(count: Scalar, noise_variance: Number) -> Scalar:
    """How strongly n samples hold the components: c = n / (s (1 + s)), the inverse variance v.

    The likelihood is exp(c/2 tr UᵀSU) but for a constant.
    """
    return count / (noise_variance * (1 + noise_variance))


def negative_log_likelihood(moment: Moment, frame: Rows, noise_variance: Number) -> Scalar:
    """n/2 (log det W + tr W⁻¹S) for orthonormal components, without the normal law's constant."""
    (rank, features), s = frame.shape, noise_variance
    log_det = (features - rank) * jnp.log(s) + rank * jnp.log1p(s)
    energy = jnp.trace(moment.row_products(frame)[1])
    return moment.count / 2 * (log_det + (moment.trace - energy / (1 + s)) / s)


def likelihood_gradient(moment: Moment, frame: Rows, noise_variance: Number) -> Rows:
    """Riemannian gradient of `negative_log_likelihood`, -c (I - UUᵀ) S U.

    It is the projection of n (W⁻¹U - W⁻¹SW⁻¹U), of which Ozkara et al. (2023), Fact 1, print half.
    """
    product, within = moment.row_products(frame)
    return -precision(moment.count, noise_variance) * (product - matmul(within, frame))


def overlap(frame: Rows, shared: Rows) -> Float[Array, "r r"]:
    """UᵀV, in this order because it is then one product for all clients."""
    return matmul(frame, shared.T)


def tangent_part(shared: Rows, frame: Rows) -> Rows:
    """Projection of a client's components onto the tangent space at V, U - V sym(VᵀU).

    Its squared length is d²(V, U) = r - ‖sym(VᵀU)‖².
    """
    return frame - matmul(_symmetric(overlap(frame, shared)), shared)


def distance_gradients(shared: Rows, frame: Rows) -> tuple[Rows, Rows]:
    """Halves of the Riemannian gradients of d² by V and by U, which are alike.

    By U it is the projection of `tangent_part`, by V that of -(U - V sym(VᵀU)) sym(VᵀU).
    """
    inner = overlap(frame, shared)
    symmetric = _symmetric(inner)
    by_shared = matmul(_symmetric(matmul(symmetric, inner)), shared) - matmul(symmetric, frame)
    by_frame = matmul(_symmetric(matmul(inner, symmetric)), frame) - matmul(symmetric, shared)
    return by_shared, by_frame


def _symmetric(x: Float[Array, "r r"]) -> Float[Array, "r r"]:
    return (x + x.T) / 2


def aligned(frame: Rows, shared: Rows) -> Rows:
    """The basis of a client's components that is nearest to V: UQ with VᵀUQ symmetric, PSD.

    d²(V, UQ) is then the least over all bases, r - ‖VᵀU‖², a distance of subspaces.
    """
    return matmul(polar(overlap(frame, shared).T), frame)


def joint_moment(moment: Moment, weight: Number, shared: Frame, prior_variance: Number) -> Moment:
    """The matrix c S + VVᵀ/σ² whose top eigenvectors are a client's best components."""
    if moment.dense is not None:
        return Moment.from_dense(weight * moment.dense + shared @ shared.T / prior_variance)
    assert moment.samples is not None
    rows = jnp.sqrt(weight / jnp.maximum(moment.count, 1)) * moment.samples
    return Moment.from_samples(jnp.concatenate([rows, shared.T / jnp.sqrt(prior_variance)]), 1)


def weighted_moment_message(moment: Moment, weight: Number) -> MomentMessage:
    """The exact message of a multiple of a second moment."""
    message = moment_message(moment)
    if message.factor is not None:
        return MomentMessage(factor=message.factor * jnp.sqrt(weight))
    return MomentMessage(triangle=message.triangle * weight)


def check_proper_rank(rank: int, clients: Clients) -> None:
    """Refuse as many components as there are features, or more."""
    check_fits("rank", rank, clients)
    if rank == clients.features:
        raise ValueError(f"rank: wanted less than the {clients.features} features, got {rank}")


# --- the algorithm -------------------------------------------------------------------------------


class Member(NamedTuple):
    """One client's prepared data."""

    moment: Moment
    curvature: Scalar | None  # c times the largest eigenvalue, where a step size comes from it


class Message(NamedTuple):
    """Uplink and downlink; the same structure holds the aggregations.

    Up: the client's copy of the shared components (its own components where the server takes
    eigenvectors, its gradient in global training) and its distance from them; down: the shared
    components and the prior's variance. What everybody knows is None.
    """

    frame: Any
    scalar: Any


class Server(NamedTuple):
    """The server's state."""

    shared: Rows
    prior_variance: Number | None  # None: given and fixed
    hyper_prior: Scalar | None  # None: given, or there is none
    step_size: Scalar | None  # of global training, where it is not given


class HierarchicalPCA(Algorithm):
    r"""Personalized components around shared ones, by alternating Stiefel gradient descent.

    Each round a client takes a step with its own components, \(U \leftarrow GR(U - \alpha\,
    \mathrm{grad}_U f)\), then one with its copy of the shared ones, and sends that; the server
    averages the copies and retracts. `result.local` are the clients' components, which is what a
    client reconstructs with; `result.shared` is the prior's centre V, which overlaps with them.
    Local and global training leave the other of the two without columns.

    The likelihood sees the subspace of U_i only, but d²(V, U_i) sees its basis: a randomly turned
    basis of V's own subspace is (r-1)/2 away from V on average, and where VᵀU_i is not positive
    semi-definite a descent crawls along flat valleys. So each client turns its basis as near to V
    as it goes before it steps (`align=True`): the minimum is the same, the prior is one of
    subspaces, and the frames of the result mean something. `align=False` is the printed algorithm.

    Columns stay orthonormal at every step size: the retraction is the orthonormal polar factor,
    and not (U + X)(I + XᵀX)^(-1/2), whose rounding errors grow exponentially for long steps.

    Source: Ozkara, Huang & Diggavi (2023), Algorithm 1 and (4).
    """

    noise_variance: Array
    prior_variance: Array
    step_size: Array | None
    global_step_size: Array | None
    rank: int = eqx.field(static=True)
    solver: Literal["gradient", "eigenvectors"] = eqx.field(static=True)
    likelihood: Literal["exact", "half"] = eqx.field(static=True)
    training: Literal["personalized", "local", "global"] = eqx.field(static=True)
    start: Literal["pooled", "random"] = eqx.field(static=True)
    align: bool = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        noise_variance: float | Array,
        prior_variance: float | Array,
        *,
        step_size: float | Array | None = None,
        global_step_size: float | Array | None = None,
        solver: Literal["gradient", "eigenvectors"] = "gradient",
        likelihood: Literal["exact", "half"] = "exact",
        training: Literal["personalized", "local", "global"] = "personalized",
        start: Literal["pooled", "random"] | None = None,
        align: bool = True,
    ):
        """Set up the algorithm.

        Args:
            rank: number of components of each client, less than the number of features.
            noise_variance: variance s of the noise in each feature; the latent variance is one.
            prior_variance: variance σ² of the clients' components around the shared ones.
            step_size: of the clients' own components; None for 1 / (c λ + 1/σ²) with the
                client's precision c = n / (s (1 + s)) and largest eigenvalue λ, which is stable
                up to twice that. In global training it is the server's: 1 / (c λ) with the
                largest eigenvalue of the mean.
            global_step_size: of the shared components; None for σ², stable up to three times
                that.
            solver: `"gradient"` steps, or `"eigenvectors"`: in turn the best own components for
                given shared ones, top eigenvectors of c S_i + VVᵀ/σ², and the best shared ones,
                top eigenvectors of the mean U_iU_iᵀ. Needs an order of magnitude fewer rounds
                and no step size, and an eigendecomposition of each client per round.
            likelihood: `"exact"`, or `"half"`: its gradient as printed in Fact 1, too small by a
                factor of two. That solves the problem with half the prior variance, with step
                sizes half as long.
            training: `"personalized"`; `"local"`: no prior and no exchange; `"global"`: the
                same components for all, by likelihood gradients that are averaged before
                projection and retraction.
            start: `"pooled"` (default): everybody starts at the top eigenvectors of the mean
                second moment, weighted by the numbers of samples. `"random"` frames (default of
                local training, where nothing is exchanged).
            align: turn the basis of each client's components towards the shared ones every
                round; see the class.

        Raises:
            ValueError: for a rank that is not a positive whole number, variances and step sizes
                that are not positive and finite, unknown names, and options that exclude each
                other.
        """
        check_count("rank", rank)
        check_positive("noise_variance", noise_variance)
        check_positive("prior_variance", prior_variance)
        check_positive("step_size", step_size, optional=True)
        check_positive("global_step_size", global_step_size, optional=True)
        check_name("solver", solver, ("gradient", "eigenvectors"))
        check_name("likelihood", likelihood, ("exact", "half"))
        check_name("training", training, ("personalized", "local", "global"))
        start = ("random" if training == "local" else "pooled") if start is None else start
        check_name("start", start, ("pooled", "random"))
        if training == "local" and start == "pooled":
            raise ValueError("start: local training needs 'random', got 'pooled', an exchange")
        if training == "global" and solver == "eigenvectors":
            raise ValueError(
                "solver: global training needs 'gradient'; Pooled has the eigenvectors"
            )
        self.rank, self.solver, self.likelihood = rank, solver, likelihood
        self.training, self.start, self.align = training, start, align
        self.noise_variance = jnp.asarray(noise_variance)
        self.prior_variance = jnp.asarray(prior_variance)
        self.step_size = hyperparameter(step_size)
        self.global_step_size = hyperparameter(global_step_size)

    def check(self, clients: Clients, start: Personalized | None) -> None:
        """Refuse a rank or a warm start that does not fit.

        Raises:
            ValueError: as said above.
        """
        check_data(clients)
        check_proper_rank(self.rank, clients)
        columns = None if self.training == "local" else self.rank
        check_start(start, clients.features, columns)
        if start is not None and start.local.shape[-1] not in (0, self.rank):
            raise ValueError(
                f"warm_start: wanted {self.rank} local components (or none), "
                f"got {start.local.shape[-1]}"
            )

    def prepare(self, data, client_id, rounds):
        """The client's second moment, and its curvature where a step size needs it."""
        del client_id
        moment = moment_of(data, rank=self.rank, rounds=rounds)
        curvature = None
        if self.solver == "gradient" and self.step_size is None:
            curvature = self._weight(moment) * moment_behind(data).largest_eigenvalue()
        return Member(moment, curvature)

    # --- start ---------------------------------------------------------------------------------

    @property
    def start_aggregation(self):
        """Means."""
        rule = MEAN_MOMENT if self.start == "pooled" else Mean()
        return {"start": rule, "curvature": Mean(), "precision": Mean()}

    def client_init(self, key, data, start):
        """The second moment for the pooled start; own components where they are given or random."""
        moment = data.moment
        uplink: dict[str, PyTree] = {"start": MomentMessage(), "curvature": (), "precision": ()}
        if self.training == "global" and data.curvature is not None:
            uplink["curvature"] = data.curvature
        if self._needs_precision:
            uplink["precision"] = precision(moment.count, self._noise(moment))
        local = None  # until the shared components are known
        if start is not None and start.local.shape[-1] > 0:
            local = start.local.T
        elif self.training == "local" or (self.start == "random" and start is None):
            local = stiefel.random(key, moment.dim, self.rank, moment.trace.dtype).T
        if self.training == "local":
            uplink["start"] = jnp.zeros((0, moment.dim), moment.trace.dtype)
        elif self.start == "random":
            # The mean of random frames is a random direction; the server alone could draw it as
            # well, but only the clients know how many features there are.
            uplink["start"] = () if start is not None else local
        elif start is None:
            uplink["start"] = weighted_moment_message(moment, self._weight(moment))
        return uplink, local

    def server_init(self, key, uplink, start):
        """The shared components, and in global training the step size."""
        del key
        step_size = None
        if self.training == "global" and self.step_size is None:
            step_size = 1 / uplink["curvature"]
        if self.training == "local":
            shared = uplink["start"]
        elif start is not None:
            shared = start.shared.T
        elif self.start == "random":
            shared = orthonormalize(uplink["start"].T).T
        else:
            values, top = moment_received(uplink["start"]).top(self.rank)
            shared = top.T
            if step_size is not None:
                step_size = 1 / values[0]
        return Server(shared, None, None, step_size)

    def client_begin(self, downlink, local, data):
        """Who has no components of its own yet starts at the shared ones."""
        del data
        if self.training == "global":
            return ()
        return downlink.frame if local is None else local

    # --- a round (Algorithm 1) -----------------------------------------------------------------

    @property
    def aggregation(self):
        """A mean, of the projectors where the server takes eigenvectors."""
        by_products = self.solver == "eigenvectors" and self.training == "personalized"
        return Message(Gram() if by_products else Mean(), Mean())

    def downlink(self, server):
        """The shared components, and the prior's variance where it is learned."""
        return Message(server.shared, server.prior_variance)

    def client_step(self, key, downlink, local, data):
        """A step with the own components, then one with the copy of the shared ones."""
        del key
        moment, shared = data.moment, downlink.frame
        noise = self._noise(moment)
        if self.training == "global":
            objective = negative_log_likelihood(moment, shared, noise)
            gradient = self._factor * likelihood_gradient(moment, shared, noise)
            return Message(gradient, None), local, {"objective": objective}

        personalized = self.training == "personalized"
        variance = self.prior_variance if downlink.scalar is None else downlink.scalar
        variance = variance.astype(noise.dtype)
        frame, distance = local, jnp.zeros_like(noise)
        if personalized:
            frame = aligned(frame, shared) if self.align else frame
            distance = jnp.sum(tangent_part(shared, frame) ** 2)
        objective = negative_log_likelihood(moment, frame, noise) + distance / (2 * variance)

        if self.solver == "eigenvectors":
            prior = shared.T if personalized else shared.T[:, :0]
            moved = joint_moment(moment, self._weight(moment), prior, variance).top(self.rank)[1].T
            moved = aligned(moved, shared) if personalized else moved
            copy = moved.T  # whose products are averaged
        else:
            gradient = self._factor * likelihood_gradient(moment, frame, noise)
            holding = jnp.zeros_like(variance)
            if personalized:
                gradient = gradient + distance_gradients(shared, frame)[1] / variance
                holding = 1 / variance
            if self.step_size is None:
                step = 1 / jnp.maximum(data.curvature + holding, jnp.finfo(noise.dtype).tiny)
            else:
                step = self.step_size.astype(noise.dtype)
            moved = polar(frame - step * gradient)
            copy = None
            if personalized:
                given = self.global_step_size
                ratio = 1 if given is None else given.astype(noise.dtype) / variance
                copy = shared - ratio * distance_gradients(shared, moved)[0]
        uplink = Message(copy if personalized else None, None)
        diagnostics = {"objective": objective}
        if personalized:
            diagnostics["distance"] = distance
        return uplink, moved, diagnostics

    def server_step(self, key, server, uplink):
        """Retract the mean of the copies, or take the eigenvectors of the mean projector."""
        del key
        if self.training == "local":
            return server
        return server._replace(shared=self._moved(server, uplink.frame))

    def _moved(self, server, received):
        if self.training == "global":
            step = server.step_size if self.step_size is None else self.step_size
            step = step.astype(received.dtype)
            return polar(server.shared - step * received)
        if self.solver == "eigenvectors":
            top = Moment.from_dense(received).top(self.rank)[1].T
            # The nearest basis to the one before, so that the clients need not follow a rotation.
            return aligned(top, server.shared)
        return polar(received)

    # --- result --------------------------------------------------------------------------------

    def client_result(self, downlink, local, data):
        """The client's components, turned towards the shared ones; none in global training."""
        del data
        if self.training == "global":
            return downlink.frame[:0].T
        if self.training == "local" or not self.align:
            return local.T
        return aligned(local, downlink.frame).T

    def shared_result(self, server):
        """The shared components; none in local training."""
        return server.shared.T

    # -------------------------------------------------------------------------------------------

    @property
    def _factor(self) -> float:
        return 0.5 if self.likelihood == "half" else 1.0

    @property
    def _needs_precision(self) -> bool:
        return False

    def _noise(self, moment: Moment) -> Scalar:
        return self.noise_variance.astype(moment.trace.dtype)

    def _weight(self, moment: Moment) -> Scalar:
        return self._factor * precision(moment.count, self._noise(moment))


class AdaptivePCA(HierarchicalPCA):
    r"""`HierarchicalPCA` whose prior variance is learned together with the components.

    A hyper prior keeps it from vanishing: the objective gains \(R(\sigma) = D \log \sigma +
    (2\xi + \text{mean}\, d^2) / (2\sigma^2)\), minimal at \(\sigma^2 = (2\xi + \text{mean}\,
    d^2)/D\). Clients send their d² along with their message.

    Maximizing jointly over components and variance, the variance collapses to what the hyper
    prior leaves, 2ξ/D, where ξ is small, and echoes the hyper prior where it is large: ξ is the
    regularization. `EmpiricalBayesPCA` needs none.

    Source: Ozkara et al., ADEPT, Algorithm 1 and Lemma 3.2.
    """

    hyper_prior: Array | None
    spread_step_size: Array | None
    spread: Literal["closed_form", "log", "gradient"] = eqx.field(static=True)
    dimension: Literal["subspace", "frame"] = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        noise_variance: float | Array,
        prior_variance: float | Array = 0.1,
        *,
        hyper_prior: float | Array | None = None,
        spread: Literal["closed_form", "log", "gradient"] = "closed_form",
        spread_step_size: float | Array | None = None,
        dimension: Literal["subspace", "frame"] = "subspace",
        step_size: float | Array | None = None,
        global_step_size: float | Array | None = None,
        solver: Literal["gradient", "eigenvectors"] = "gradient",
        likelihood: Literal["exact", "half"] = "exact",
        start: Literal["pooled", "random"] = "pooled",
        align: bool = True,
    ):
        """Set up the algorithm; arguments not listed are those of `HierarchicalPCA`.

        Args:
            rank: number of components of each client, less than the number of features.
            noise_variance: variance s of the noise in each feature.
            prior_variance: variance σ² to start from, at least ξ/(2D).
            hyper_prior: ξ; None for D v / 6 with v = s (1 + s) / n, the variance with which n
                samples determine a component.
            spread: how the variance is updated: `"closed_form"` minimizer; a `"log"` step, with
                log σ²; a `"gradient"` step with σ, the paper's, which takes σ²/(2 η D) rounds.
            spread_step_size: η of the last two; None for 1/D (Newton's is 2/D) and ξ/D².
            dimension: D, of the `"subspace"`, r(d - r), or of the `"frame"`, d·r, the paper's.
                Rotations within the subspace, which the alignment takes away, bias the latter
                down.
            step_size: of the clients' own components.
            global_step_size: of the shared components.
            solver: `"gradient"` or `"eigenvectors"`.
            likelihood: `"exact"` or `"half"`.
            start: `"pooled"` or `"random"`.
            align: turn the basis of each client's components every round.

        Raises:
            ValueError: as `HierarchicalPCA`, and for a hyper prior, or step size of the
                variance, that is not positive and finite.
        """
        super().__init__(
            rank, noise_variance, prior_variance, step_size=step_size,
            global_step_size=global_step_size, solver=solver, likelihood=likelihood, start=start,
            align=align,
        )  # fmt: skip
        check_positive("hyper_prior", hyper_prior, optional=True)
        check_name("spread", spread, ("closed_form", "log", "gradient"))
        check_positive("spread_step_size", spread_step_size, optional=True)
        check_name("dimension", dimension, ("subspace", "frame"))
        self.spread, self.dimension = spread, dimension
        self.hyper_prior = hyperparameter(hyper_prior)
        self.spread_step_size = hyperparameter(spread_step_size)

    def check(self, clients: Clients, start: Personalized | None) -> None:
        """Refuse what `HierarchicalPCA` refuses, and settings that Lemma 3.2 does not cover.

        Raises:
            ValueError: as said above.
        """
        super().check(clients, start)
        dimension = self._dimension(clients.features)
        if _unknown(self.hyper_prior, self.prior_variance, self.spread_step_size):
            return
        hyper_prior = np.asarray(self.hyper_prior)
        if (np.asarray(self.prior_variance) < hyper_prior / (2 * dimension)).any():
            raise ValueError(
                f"prior_variance: wanted at least hyper_prior / (2 D) with D = {dimension} to "
                f"start from, got {self.prior_variance}"
            )
        if self.spread == "gradient" and self.spread_step_size is not None:
            least = np.asarray(self.spread_step_size) * dimension**2
            if (hyper_prior < least * (1 - 1e-6)).any():
                raise ValueError(
                    f"hyper_prior: wanted at least spread_step_size D² = {least:.3g}, lest the "
                    f"variance vanish (Lemma 3.2), got {self.hyper_prior}"
                )

    @property
    def _needs_precision(self) -> bool:
        return self.hyper_prior is None

    def server_init(self, key, uplink, start):
        """The shared components, the first variance and the hyper prior."""
        server = super().server_init(key, uplink, start)
        shared = server.shared
        hyper_prior = None
        if self.hyper_prior is None:
            hyper_prior = self._dimension(shared.shape[1]) / (6 * uplink["precision"])
        return server._replace(
            prior_variance=self.prior_variance.astype(shared.dtype), hyper_prior=hyper_prior
        )

    def client_step(self, key, downlink, local, data):
        """The step of `HierarchicalPCA`, and the distance that the variance is learned from."""
        uplink, moved, diagnostics = super().client_step(key, downlink, local, data)
        # The paper's gradient step looks at the components that entered the round. The other
        # rules are block steps, and look at the newest.
        distance = diagnostics["distance"]
        if self.spread != "gradient":
            distance = jnp.sum(tangent_part(downlink.frame, moved) ** 2)
        return uplink._replace(scalar=distance), moved, diagnostics

    def server_step(self, key, server, uplink):
        """The step of `HierarchicalPCA`, and one of the variance."""
        del key
        dimension, variance = self._dimension(server.shared.shape[1]), server.prior_variance
        hyper_prior = server.hyper_prior if self.hyper_prior is None else self.hyper_prior
        hyper_prior = hyper_prior.astype(variance.dtype)
        distance = uplink.scalar
        step = self.spread_step_size
        if self.spread == "closed_form":
            variance = spread_minimizer(distance, hyper_prior, dimension)
        elif self.spread == "log":
            step = 1 / dimension if step is None else step.astype(variance.dtype)
            wanted = spread_minimizer(distance, hyper_prior, dimension)
            variance = variance * jnp.exp(-step * dimension * (1 - wanted / variance) / 2)
        else:
            step = hyper_prior / dimension**2 if step is None else step.astype(variance.dtype)
            deviation = jnp.sqrt(variance)
            slope = spread_gradient(deviation, distance, hyper_prior, dimension)
            variance = (deviation - step * slope) ** 2
        return server._replace(shared=self._moved(server, uplink.frame), prior_variance=variance)

    def server_diagnostics(self, server):
        """The learned variance."""
        return {"prior_variance": server.prior_variance}

    def _dimension(self, features: int) -> int:
        free = features - self.rank if self.dimension == "subspace" else features
        return free * self.rank


def _unknown(hyper_prior, *others) -> bool:
    return hyper_prior is None or any(isinstance(x, Tracer) for x in (hyper_prior, *others))
