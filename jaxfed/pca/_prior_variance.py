"""How hierarchical PCA learns the variance of its prior.

Source: Ozkara, Huang, Zhou & Diggavi, ADEPT: hierarchical Bayes approach to personalized federated
unsupervised learning, Algorithm 1 and Lemma 3.2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxfed.pca.likelihood import Scalar, Variances, at_rest, extrapolated, precision

LEAST = 0.01  # variance, relative to the sampling variance
# Step in log σ². A longer one may end where clients that differ seem alike, and stay there.
LONGEST = 0.5


class Spread(NamedTuple):
    """What learning the variance without ξ takes."""

    share: Scalar  # 1 - 1/m for m clients
    least: Scalar  # the smallest variance allowed
    previous: Float[Array, " 2"]  # log σ² of the last round, and EM's step from there


# Updates: (variance, mean d², ξ, D, η or None) -> variance


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


UPDATES = {"closed_form": _closed_form, "log": _log_step, "gradient": _gradient_step}


class Learning(NamedTuple):
    """How the variance is learned, with the settings of `HierarchicalPCA`."""

    rank: int
    dimension: str
    update: str
    hyper_prior: Scalar | None  # ξ
    initial: Scalar | None
    step_size: Scalar | None  # η

    def degrees(self, features: int) -> int:
        """Return D, the number of entries of the components that the prior scatters."""
        return self.rank * (features - self.rank if self.dimension == "subspace" else features)

    def check(self, features: int) -> None:
        """Raise a `ValueError` if a hyperprior is too weak for the variance (Lemma 3.2)."""
        given = (self.hyper_prior, self.initial, self.step_size)
        if self.hyper_prior is None or any(isinstance(x, Tracer) for x in given):
            return
        xi, degrees = np.asarray(self.hyper_prior), self.degrees(features)
        if self.initial is not None and (np.asarray(self.initial) < xi / (2 * degrees)).any():
            raise ValueError(
                f"initial_variance: wanted at least hyper_prior / (2 D) with D = {degrees}, "
                f"got {self.initial}"
            )
        if self.update == "gradient" and self.step_size is not None:
            least = np.asarray(self.step_size) * degrees**2
            if (xi < least * (1 - 1e-6)).any():
                raise ValueError(
                    f"hyper_prior: wanted at least variance_step_size D² = {least:.3g}, lest the "
                    f"variance vanish (Lemma 3.2), got {self.hyper_prior}"
                )

    def first(
        self, received: Any, variances: Variances | None, features: int, dtype: jnp.dtype
    ) -> tuple[Scalar, Spread | None]:
        """Return the variance before the first round, and what learning it without ξ takes.

        Args:
            received: the reduced first messages.
            variances: those of noise and scores, if they were estimated.
            features: number of features.
            dtype: type of the variance.
        """
        spread = None
        if self.hyper_prior is None:
            weight = received["precision"]
            if variances is not None:
                weight = variances.scores * precision(weight, *variances)
            # Subspaces that have nothing in common scatter by 1/d.
            variance = jnp.minimum(1 / weight, 1 / features)
            # A coarse channel changes the number of clients.
            share = 1 - 1 / jnp.maximum(received["clients"], 1)
            spread = Spread(share, LEAST / weight, at_rest(variance))
        else:
            variance = 1 / features + 2 * self.hyper_prior.astype(dtype) / self.degrees(features)
        if self.initial is not None:
            variance = self.initial.astype(dtype)
        return variance, spread

    def next(
        self, variance: Scalar, distance: Scalar, spread: Spread | None, features: int
    ) -> tuple[Scalar, Spread | None, Scalar]:
        """Return the next variance, what learning it takes, and the gap that it closes."""
        xi = 0.0 if self.hyper_prior is None else self.hyper_prior.astype(variance.dtype)
        degrees = self.degrees(features)
        updated = UPDATES[self.update](variance, distance, xi, degrees, self.step_size)
        gap = degrees / 4 * jnp.log(updated / variance) ** 2
        if spread is not None:
            place = jnp.log(variance)
            move = jnp.log(updated) - place
            updated = jnp.exp(extrapolated(place, move, spread.previous, LONGEST))
            updated = jnp.maximum(updated, jax.lax.stop_gradient(spread.least))
            spread = spread._replace(previous=jnp.stack([place, move]))
        return updated, spread, gap

    def slope(
        self, variance: Scalar, distance: Scalar, logarithm: Scalar, features: int
    ) -> tuple[Scalar, Scalar]:
        """Return what log σ² adds to the value that the server climbs, and the whole slope by it.

        The slope is minus the derivative of D/2 log σ² + ξ/σ² + d²/(2σ²), whose last term is in the
        clients' objective already. Without ξ, D/2 log(1 + k) of each client takes the place of the
        first two, and the clients' distance accounts for its derivative.
        """
        half = self.degrees(features) / 2
        slope = distance / (2 * variance) - half
        if self.hyper_prior is None:
            return jnp.zeros_like(slope), slope
        pull = self.hyper_prior.astype(variance.dtype) / variance
        return -half * logarithm - pull, slope + pull
