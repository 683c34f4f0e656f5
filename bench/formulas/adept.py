r"""Closed forms for a Gaussian prior around a common mean.

This Gaussian model underlies the theory of hierarchical Bayes personalization. Client i has the
mean of n samples of variance s² around \(\theta_i\). The \(\theta_i\), vectors of D numbers,
scatter around a common \(\mu\) with variance \(\sigma_*^2\). Only \(v = s^2 / n\) matters. The
personalized estimate assumes a variance \(\sigma^2\), which is given, or learned under a hyper
prior of strength \(\xi\). For components of PCA, v is \(s (1 + s) / n\) with noise variance s.

Source: Ozkara et al., ADEPT, Sections 3 and 4.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

Scalar = Float[Array, "..."]


class GaussianMeans(NamedTuple):
    """The common mean and the clients' personalized ones."""

    shared: Float[Array, " dimension"]
    local: Float[Array, "clients dimension"]


def personalized_means(
    means: Float[Array, "clients dimension"],
    sampling_variance: ArrayLike,
    prior_variance: ArrayLike,
) -> GaussianMeans:
    r"""Minimizer of \(\sum_i \|\bar x_i - \theta_i\|^2/(2v) + \|\theta_i - \mu\|^2/(2\sigma^2)\).

    The common mean is the mean of the means, and every client's lies between it and its own:
    \(\theta_i = a \bar x_i + (1 - a) \mu\) with \(a = \sigma^2 / (\sigma^2 + v)\).

    Args:
        means: the clients' sample means.
        sampling_variance: v, variance of a sample mean in each dimension.
        prior_variance: the assumed σ².

    Returns:
        The common and the personalized means.

    Source:
        ADEPT, Lemma 4.3.
    """
    shared = means.mean(axis=0)
    variance = jnp.asarray(prior_variance)
    own = variance / (variance + sampling_variance)
    return GaussianMeans(shared, own * means + (1 - own) * shared)


def collaboration_gain(
    true_variance: ArrayLike, prior_variance: ArrayLike, sampling_variance: ArrayLike
) -> Scalar:
    r"""Share of a lone client's squared error that personalized means save, for many clients.

    \(v (2\sigma^2 + v - \sigma_*^2) / (\sigma^2 + v)^2\), negative where collaboration hurts, and
    largest, \(v / (\sigma_*^2 + v)\), where the assumed variance is the true one.

    Args:
        true_variance: σ*², of the clients' means around the common one.
        prior_variance: the assumed σ².
        sampling_variance: v.

    Returns:
        The relative gain, at most one.

    Source:
        ADEPT, Theorem 4.5.
    """
    v, assumed = jnp.asarray(sampling_variance), jnp.asarray(prior_variance)
    return v * (2 * assumed + v - true_variance) / (assumed + v) ** 2


def collaboration_helps(
    true_variance: ArrayLike, prior_variance: ArrayLike, sampling_variance: ArrayLike
) -> Bool[Array, "..."]:
    """Whether the gain is positive: σ*² < 2σ² + v.

    Args:
        true_variance: σ*², of the clients' means around the common one.
        prior_variance: the assumed σ².
        sampling_variance: v.

    Source:
        ADEPT, Theorem 4.5.
    """
    return jnp.asarray(true_variance) < 2 * jnp.asarray(prior_variance) + sampling_variance


def spread_minimizer(distance: ArrayLike, hyper_prior: ArrayLike, dimension: ArrayLike) -> Scalar:
    r"""The variance that minimizes \(D \log \sigma + (2\xi + d^2) / (2\sigma^2)\): (2ξ + d²)/D.

    Args:
        distance: the clients' mean squared distance d² from the common parameters.
        hyper_prior: ξ.
        dimension: D, of a client's parameters.

    Source:
        ADEPT, Section 3.
    """
    bound = 2 * jnp.asarray(hyper_prior) + jnp.asarray(distance)
    return bound / jnp.asarray(dimension)


def spread_gradient(
    deviation: ArrayLike, distance: ArrayLike, hyper_prior: ArrayLike, dimension: ArrayLike
) -> Scalar:
    r"""Derivative of \(D \log \sigma + (2\xi + d^2) / (2\sigma^2)\) by the deviation σ.

    Args:
        deviation: σ.
        distance: the clients' mean squared distance d² from the common parameters.
        hyper_prior: ξ.
        dimension: D, of a client's parameters.

    Source:
        ADEPT, Section 3.
    """
    deviation = jnp.asarray(deviation)
    wanted = spread_minimizer(distance, hyper_prior, dimension)
    return jnp.asarray(dimension) * (1 - wanted / deviation**2) / deviation


def spread_floor(hyper_prior: ArrayLike, dimension: ArrayLike) -> Scalar:
    """The variance ξ/(2D) below which gradient steps with σ, of at most ξ/D², never fall.

    It holds from any start above it.

    Args:
        hyper_prior: ξ.
        dimension: D, of a client's parameters.

    Source:
        ADEPT, Lemma 3.2.
    """
    return jnp.asarray(hyper_prior) / (2 * jnp.asarray(dimension))


def stationary_spread(
    true_variance: ArrayLike,
    sampling_variance: ArrayLike,
    hyper_prior: ArrayLike,
    dimension: ArrayLike,
    *,
    start: ArrayLike,
    steps: int = 1000,
) -> Scalar:
    r"""Where alternating minimization over means and variance ends, for many clients.

    Iterates \(x \leftarrow 2\xi/D + x^2 (\sigma_*^2 + v) / (x + v)^2\). For a weak hyper prior
    there are two ends, and the joint optimum is the one where the variance has collapsed to about
    2ξ/D.

    Args:
        true_variance: σ*².
        sampling_variance: v.
        hyper_prior: ξ.
        dimension: D.
        start: the variance to start from.
        steps: how many iterations.

    Source:
        ADEPT, Lemma 4.3 and Theorem 4.5.
    """
    v = jnp.asarray(sampling_variance)

    def step(_, spread):
        distance = dimension * spread**2 * (true_variance + v) / (spread + v) ** 2
        return spread_minimizer(distance, hyper_prior, dimension)

    shape = jnp.broadcast_shapes(*map(jnp.shape, (true_variance, v, hyper_prior, start)))
    return jax.lax.fori_loop(0, steps, step, jnp.broadcast_to(jnp.asarray(start, float), shape))


def safe_hyper_prior(sampling_variance: ArrayLike, dimension: ArrayLike) -> Scalar:
    r"""The ξ above which collaboration helps whatever the true variance: (3 - 2√2) v D / 2.

    Every stationary point of the joint objective, which solves
    \(\sigma^2 = 2\xi/D + \sigma^4 (\sigma_*^2 + v) / (\sigma^2 + v)^2\), then has
    \(\sigma_*^2 < 2\sigma^2 + v\). It is also the only one: that takes v D / 16.

    Args:
        sampling_variance: v.
        dimension: D.

    Source:
        ADEPT, Corollary 4.6, with the constant worked out.
    """
    return (3 - 2 * 2**0.5) * jnp.asarray(sampling_variance) * dimension / 2


def denoising_weight(variance: ArrayLike, horizon: ArrayLike) -> Scalar:
    r"""What the evidence bound weighs a wrong mean by: \(1/s^2 - 1/(s^2 + T)\).

    The bound is the integral of half the squared error of the score over the times from 0 to T. For
    a Gaussian target of variance s² and a model that differs in its mean alone, that is half of
    this weight times \(\|\theta - \mu\|^2\); for large T it is the negative log-likelihood's 1/s².

    Args:
        variance: s², of the target in each dimension.
        horizon: T, when the noise that is added ends; its variance grows as the time.

    Source:
        ADEPT, equation 9 for the targets of Section 4.
    """
    s = jnp.asarray(variance)
    return 1 / s - 1 / (s + jnp.asarray(horizon))


def generated_mean(
    mean: Float[ArrayLike, "... dimension"], variance: ArrayLike, horizon: ArrayLike
) -> Float[Array, "... dimension"]:
    r"""The mean of what a learned diffusion generates: \(\theta T / (T + s^2)\).

    It starts at \(N(0, (s^2 + T) I)\), which has forgotten the mean, and so stays short of it. The
    variance comes out as s².

    Args:
        mean: θ, of the learned score.
        variance: s², of the target in each dimension.
        horizon: T.

    Source:
        ADEPT, Lemma 4.2.
    """
    share = jnp.asarray(horizon) / (jnp.asarray(horizon) + jnp.asarray(variance))
    return share * jnp.asarray(mean)


def generation_divergence(
    mean: Float[ArrayLike, "... dimension"],
    target: Float[ArrayLike, "... dimension"],
    variance: ArrayLike,
    horizon: ArrayLike,
) -> Scalar:
    r"""Kullback-Leibler divergence of the target from what is generated.

    \(\|\mu - \theta T / (T + s^2)\|^2 / (2 s^2)\): both are Gaussian with variance s².

    Args:
        mean: θ, of the learned score.
        target: μ, the true mean.
        variance: s², of the target in each dimension.
        horizon: T.

    Source:
        ADEPT, Lemma 4.2.
    """
    short = jnp.asarray(target) - generated_mean(mean, variance, horizon)
    return jnp.sum(short**2, axis=-1) / (2 * jnp.asarray(variance))
