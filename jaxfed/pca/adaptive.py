r"""Hierarchical-Bayes PCA that learns the prior variance together with the components.

Source: Ozkara, Huang, Zhou & Diggavi, ADEPT: hierarchical Bayes approach to personalized federated
unsupervised learning.
"""

from typing import Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from jaxfed.contract import Algorithm, Diagnostics, check_name, check_positive, hyperparameter
from jaxfed.pca._personalized import SOLVERS, PersonalizedPCA
from jaxfed.pca._quasi_newton import Evaluation, Memory, climb, initial_memory, refuse_implicit
from jaxfed.pca.components import Rows, check_warm_start
from jaxfed.pca.likelihood import (
    Member,
    Scalar,
    check_proper_rank,
    initial_shared,
    pooled_message,
    precision,
    squared_distance,
)

# --- updates of the variance: (variance, mean d², ξ, D, η or None) -> variance --------------------


def _closed_form(variance, distance, hyper_prior, dimension, step=None):
    """The minimizer of D log σ + (2ξ + d²) / (2σ²)."""
    return (2 * hyper_prior + distance) / dimension


def _log_step(variance, distance, hyper_prior, dimension, step):
    # dR/d(log σ²) = D (1 - B/(D σ²)) / 2 with B = 2ξ + mean d², and `wanted` is B/D. A step in the
    # logarithm keeps the variance positive.
    step = 1 / dimension if step is None else step.astype(variance.dtype)
    wanted = _closed_form(variance, distance, hyper_prior, dimension)
    return variance * jnp.exp(-step * dimension * (1 - wanted / variance) / 2)


def _gradient_step(variance, distance, hyper_prior, dimension, step):
    # Line 7 of Algorithm 1 with dR/dσ = D (1 - B/(D σ²)) / σ. The default is the largest step for
    # which Lemma 3.2 keeps σ² at ξ/(2D) or above.
    step = hyper_prior / dimension**2 if step is None else step.astype(variance.dtype)
    deviation = jnp.sqrt(variance)
    wanted = _closed_form(variance, distance, hyper_prior, dimension)
    return (deviation - step * dimension * (1 - wanted / variance) / deviation) ** 2


SPREADS = {"closed_form": _closed_form, "log": _log_step, "gradient": _gradient_step}


class Message(NamedTuple):
    """Uplink and downlink."""

    shared: PyTree  # up: the message about the shared components; down: these
    scalar: Float[Array, ""]  # up: d²; down: the prior variance
    objective: Scalar | None = None  # up, for the quasi-Newton solver


class Server(NamedTuple):
    """The server's state."""

    shared: Rows
    prior_variance: Scalar
    hyper_prior: Scalar
    memory: Memory | None = None  # for the quasi-Newton solver


class AdaptivePCA(PersonalizedPCA):
    r"""`HierarchicalPCA` that learns the prior variance together with the components.

    A hyperprior keeps the variance from vanishing: the objective gains \(R(\sigma) = D \log
    \sigma + (2\xi + \text{mean}\, d^2) / (2\sigma^2)\), which is minimal at \(\sigma^2 = (2\xi +
    \text{mean}\, d^2)/D\). Clients send their d² with their message.

    In the joint maximum over components and variance, ξ decides: for small ξ the variance collapses
    to 2ξ/D, for large ξ it follows the hyperprior. `EmpiricalBayesPCA` needs no ξ.

    Source: Ozkara et al., ADEPT, Algorithm 1 and Lemma 3.2.
    """

    hyper_prior: Float[Array, ""] | None
    spread_step_size: Float[Array, ""] | None
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
        solver: Literal["gradient", "eigenvectors", "quasi_newton"] = "gradient",
        likelihood: Literal["exact", "half"] = "exact",
        start: Literal["pooled", "random"] = "pooled",
        align: bool = True,
    ):
        """Set up the algorithm; arguments not described here are those of `HierarchicalPCA`.

        Args:
            rank: number of components of each client, less than the number of features.
            noise_variance: variance s of the noise in each feature.
            prior_variance: initial variance σ², at least ξ/(2D).
            hyper_prior: ξ. By default D v / 6 with v = s (1 + s) / n, the variance with which n
                samples determine a component.
            spread: how the variance is updated: the `"closed_form"` minimizer; a `"log"` step, in
                log σ²; or a `"gradient"` step in σ as in the paper, which takes σ²/(2 η D) rounds.
            spread_step_size: η of the steps. By default 1/D for `"log"` (Newton's is 2/D) and ξ/D²
                for `"gradient"`.
            dimension: D. `"subspace"` means r(d - r); `"frame"` means d·r as in the paper, which
                also counts rotations within the subspace. Alignment removes these, so `"frame"`
                makes the variance too small.
            step_size: step size of the local components.
            global_step_size: step size of the shared components.
            solver: `"gradient"`, `"eigenvectors"` or `"quasi_newton"`. The last updates the
                variance together with the shared components, so `spread` must keep its default. It
                has no implicit derivative.
            likelihood: `"exact"` or `"half"`.
            start: `"pooled"` or `"random"`.
            align: whether to rotate the basis of each client's components every round.

        Raises:
            ValueError: as `HierarchicalPCA`, and if the hyperprior or the step size of the variance
                is not positive and finite.
        """
        steps = step_size, global_step_size
        self._set(rank, noise_variance, prior_variance, *steps, solver, likelihood, start, align)
        check_positive("hyper_prior", hyper_prior, optional=True)
        check_name("spread", spread, tuple(SPREADS))
        if solver == "quasi_newton" and spread != "closed_form":
            raise ValueError(f"spread: solver='quasi_newton' wants 'closed_form', got {spread!r}")
        check_positive("spread_step_size", spread_step_size, optional=True)
        check_name("dimension", dimension, ("subspace", "frame"))
        self.spread, self.dimension = spread, dimension
        self.hyper_prior = hyperparameter(hyper_prior)
        self.spread_step_size = hyperparameter(spread_step_size)

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if arguments do not fit the data or violate Lemma 3.2."""
        check_proper_rank(self.rank, clients)
        check_warm_start(warm_start, clients, self.rank, self.rank)
        dimension = self._dimension(clients.features)
        settings = (self.hyper_prior, self.prior_variance, self.spread_step_size)
        if self.hyper_prior is None or any(isinstance(x, Tracer) for x in settings):
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

    def first_message(self, key, data: Member, warm_start) -> dict[str, PyTree]:
        """Return the second moment for a pooled start, and the precision for an automatic ξ."""
        first = pooled_message(data, self.start, warm_start)
        if self.hyper_prior is None:
            noise = self.noise_variance.astype(data.precision.dtype)
            first["precision"] = precision(data.moment.count, noise)
        return first

    def server_init(self, key, first: dict[str, PyTree], like, warm_start) -> Server:
        """Return the first shared components, the first variance and the hyperprior."""
        shared = initial_shared(self.rank, key, first, like, warm_start)
        hyper_prior = self.hyper_prior
        if hyper_prior is None:
            # With the sampling variance v = 1/c, 2ξ/D is v/3. In the Gaussian model of ADEPT,
            # collaboration helps at every stationary point if it exceeds 0.17 v (Corollary 4.6).
            hyper_prior = self._dimension(shared.shape[1]) / (6 * first["precision"])
        variance, memory = self.prior_variance.astype(shared.dtype), None
        if self.solver == "quasi_newton":
            # The hyperprior's curvature is D/2 along log σ², that of the distances 1/σ² along V.
            curvature = self._dimension(shared.shape[1]) / 2 * variance
            memory = initial_memory(shared.T, jnp.log(variance)[None], curvature[None])
        return Server(shared, variance, hyper_prior.astype(shared.dtype), memory)

    def downlink(self, server: Server) -> Message:
        """Return the shared components and the prior variance."""
        return Message(server.shared, server.prior_variance)

    def client_step(self, key, downlink: Message, local: Rows, data: Member):
        """Take the step of `HierarchicalPCA`, and measure the distance that the variance needs."""
        sent, moved, diagnostics = self._step(downlink.shared, downlink.scalar, local, data)
        # The gradient step uses the components from before the round (line 7 comes before lines 8
        # and 9); the other rules are block steps and use the new ones. Clients send d² instead of
        # steps of their own: R is linear in d², so the mean of their steps is one step with the
        # mean.
        distance = diagnostics["distance"]
        if self.spread != "gradient":
            distance = squared_distance(downlink.shared, moved)
        objective = diagnostics["objective"] if self.solver == "quasi_newton" else None
        return Message(sent, distance, objective), moved, diagnostics

    def server_step(self, key, server: Server, uplink: Message) -> tuple[Server, Diagnostics]:
        """Update the shared components and the variance."""
        shared, variance, hyper_prior, memory = server
        dimension = self._dimension(shared.shape[1])
        if memory is not None:
            return self._climbed(server, memory, uplink)
        variance = SPREADS[self.spread](
            variance, uplink.scalar, hyper_prior, dimension, self.spread_step_size
        )
        shared = SOLVERS[self.solver].shared_step(shared, uplink.shared)
        return Server(shared, variance, hyper_prior), {"prior_variance": variance}

    def _climbed(
        self, server: Server, memory: Memory, uplink: Message
    ) -> tuple[Server, Diagnostics]:
        """Take a quasi-Newton step in the shared components and log σ² together."""
        assert uplink.objective is not None
        half = self._dimension(server.shared.shape[1]) / 2
        pull = server.hyper_prior / server.prior_variance
        slope = uplink.scalar / (2 * server.prior_variance) - half + pull
        # R = D/2 log σ² + ξ/σ² + d²/(2σ²), whose last term is part of the clients' objective
        # already. `slope` is minus the derivative by log σ².
        value = -uplink.objective - half * memory.numbers[0] - pull
        anywhere = jnp.full(1, jnp.inf, slope.dtype)
        found = Evaluation(uplink.shared.T, value, slope[None])
        memory, _, left = climb(memory, found, -anywhere, anywhere)
        variance = jnp.exp(memory.numbers[0])
        server = Server(memory.shared, variance, server.hyper_prior, memory)
        return server, {"prior_variance": variance, "stopping_measure": left}

    def through(self) -> Algorithm:
        """Return the algorithm itself.

        Raises:
            ValueError: for the quasi-Newton solver.
        """
        return refuse_implicit(self, self.solver == "quasi_newton")

    def _dimension(self, features: int) -> int:
        free = features - self.rank if self.dimension == "subspace" else features
        return free * self.rank
