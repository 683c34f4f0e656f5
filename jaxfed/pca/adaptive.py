r"""Hierarchical-Bayes PCA that learns the prior variance together with the components.

Source: Ozkara, Huang, Zhou & Diggavi, ADEPT: hierarchical Bayes approach to personalized federated
unsupervised learning.
"""

from typing import Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxfed.contract import Algorithm, check_name, check_positive, hyperparameter
from jaxfed.pca._personalized import PersonalizedPCA
from jaxfed.pca._quasi_newton import refuse_implicit
from jaxfed.pca.likelihood import Scalar

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


class AdaptivePCA(PersonalizedPCA):
    r"""`HierarchicalPCA` that learns the prior variance together with the components.

    Without a hyperprior, the default, it learns the variance as `HierarchicalPCA` does. The
    hyperprior of ADEPT keeps the variance from vanishing: the objective gains \(R(\sigma) = D \log
    \sigma + (2\xi + \text{mean}\, d^2) / (2\sigma^2)\), which is minimal at \(\sigma^2 = (2\xi +
    \text{mean}\, d^2)/D\). Clients send their d² with their message.

    In this joint maximum over components and variance, ξ decides: for small ξ the variance
    collapses to 2ξ/D, for large ξ it follows the hyperprior. With n samples, 2ξ/D should exceed
    0.17 v, v = s (1 + s)/n (Corollary 4.6 for Gaussian means); at v/3, alike clients have two to
    six times the error of the default.

    Source: Ozkara et al., ADEPT, Algorithm 1 and Lemma 3.2.
    """

    hyper_prior: Float[Array, ""] | None
    spread_step_size: Float[Array, ""] | None
    spread: Literal["closed_form", "log", "gradient"] = eqx.field(static=True)
    dimension: Literal["subspace", "frame"] = eqx.field(static=True)

    def __init__(
        self,
        rank: int,
        noise_variance: float | Array | None = None,
        prior_variance: float | Array | None = None,
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
            noise_variance: variance s of the noise in each feature, if scores have variance one. By
                default the server estimates both.
            prior_variance: initial variance σ², at least ξ/(2D). By default 1/d + 2ξ/D, or with no
                ξ the sampling variance, but at most 1/d.
            hyper_prior: ξ. By default there is no hyperprior.
            spread: how the variance is updated: the `"closed_form"` minimizer; a `"log"` step, in
                log σ²; or a `"gradient"` step in σ as in the paper, which takes σ²/(2 η D) rounds
                and needs a hyperprior.
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
                is not positive and finite, or the hyperprior is missing.
        """
        steps = step_size, global_step_size
        self._set(rank, noise_variance, prior_variance, *steps, solver, likelihood, start, align)
        check_positive("hyper_prior", hyper_prior, optional=True)
        check_name("spread", spread, tuple(SPREADS))
        if spread == "gradient" and hyper_prior is None:
            raise ValueError("hyper_prior: spread='gradient' wants a number, got None")
        if solver == "quasi_newton" and spread != "closed_form":
            raise ValueError(f"spread: solver='quasi_newton' wants 'closed_form', got {spread!r}")
        check_positive("spread_step_size", spread_step_size, optional=True)
        check_name("dimension", dimension, ("subspace", "frame"))
        self.spread, self.dimension = spread, dimension
        self.hyper_prior = hyperparameter(hyper_prior)
        self.spread_step_size = hyperparameter(spread_step_size)

    def check(self, clients, warm_start) -> None:
        """Raise a `ValueError` if arguments do not fit the data or violate Lemma 3.2."""
        super().check(clients, warm_start)
        dimension = self._dimension(clients.features)
        settings = (self.hyper_prior, self.prior_variance, self.spread_step_size)
        if self.hyper_prior is None or any(isinstance(x, Tracer) for x in settings):
            return
        hyper_prior = np.asarray(self.hyper_prior)
        start = np.inf if self.prior_variance is None else np.asarray(self.prior_variance)
        if (start < hyper_prior / (2 * dimension)).any():
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

    def through(self) -> Algorithm:
        """Return the algorithm itself.

        Raises:
            ValueError: for the quasi-Newton solver.
        """
        return refuse_implicit(self, self.solver == "quasi_newton")

    @property
    def _xi(self) -> Array | None:
        return self.hyper_prior

    @property
    def _learns(self) -> bool:
        return True

    @property
    def _measures_first(self) -> bool:
        # The gradient step uses the components from before the round (line 7 comes before lines 8
        # and 9); the other rules are block steps and use the new ones. Clients send d² instead of
        # steps of their own: R is linear in d², so the mean of their steps is one step with the
        # mean.
        return self.spread == "gradient"

    def _dimension(self, features: int) -> int:
        free = features - self.rank if self.dimension == "subspace" else features
        return free * self.rank

    def _updated(self, variance: Scalar, distance: Scalar, dimension: int) -> Scalar:
        xi = 0.0 if self.hyper_prior is None else self.hyper_prior.astype(variance.dtype)
        return SPREADS[self.spread](variance, distance, xi, dimension, self.spread_step_size)
