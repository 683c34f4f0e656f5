r"""Convergence theorems of the papers, as functions of a problem's own constants.

Personalized and hierarchical PCA have bounds on the mean of the squared gradients of the first
rounds, which hold for step sizes below a limit. FAPS has one for penalties above a limit. For
generalized CCA, the distance to the optimal subspace falls geometrically, up to noise.

Where a paper leaves a constant open or prints it wrong, the function says what it takes instead.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

Scalar = Float[Array, "..."]


def mean_gradient_bound(decrease: ArrayLike, step_size: ArrayLike, rounds: ArrayLike) -> Scalar:
    r"""The most that squared gradients of so many rounds are on average: \(2 \Delta / (R \eta)\).

    It follows from rounds that each lower the objective by half the step size times the squared
    gradient, and so also bounds the smallest of the squared gradients.

    Args:
        decrease: \(\Delta\), of the objective in these rounds.
        step_size: \(\eta\); for hierarchical PCA the smaller of the two.
        rounds: R.

    Source:
        Shi & Kontar (2024), Theorem 8 with the constant of its proof; Ozkara, Huang & Diggavi
        (2023), Theorem 1.
    """
    return 2 * jnp.asarray(decrease) / (jnp.asarray(rounds) * jnp.asarray(step_size))


def perpca_step_limit(
    largest: ArrayLike, rank: int, *, tangent: float = 253 / 4, normal: float = 253 / 8
) -> Scalar:
    r"""The largest step size that the proof for personalized PCA allows, \(\eta_c\).

    Args:
        largest: G, the largest eigenvalue of any client's second moment.
        rank: the larger of the numbers of shared and of local components.
        tangent: \(M_1\) of the retraction; by default that of the polar factor.
        normal: \(M_2\) of the retraction; by default that of the polar factor.

    Source:
        Shi & Kontar (2024), equations (54) and (63), Lemmas 15 and 16, and Appendix F.1, which
        wants \(3 \|\xi\| \le 1/2\) and so has \(M_3 = 1/6\).
    """
    m1, m2, m3 = tangent, normal, 1 / 6
    c0, c1 = 3 / 2 + 3 * m1 + m1**2 / 4, 1 / 2 + 2 * m1
    shared = 2 * m1 * (c0 + c1) * c0 + 2 * m1 + m2 * c0 + c0
    local = 2 * m1 * (c0 + c1) * c1 + m2 * c1 + m1 + c1
    root = rank**0.5
    smooth = 9 * 2**0.5
    by_shared = 2 * root * (m1 + shared) + smooth * ((1 + m2 / 2) ** 2 + 2 * (1 + shared / 2) ** 2)
    by_local = 2 * root * local + 2 * smooth * (1 + local / 2) ** 2
    near = min(m3 / 2, (m3 / (6 + 12 * m1 + m1**2)) ** 0.5) / root
    return min(1 / by_shared, 1 / by_local, near) / jnp.asarray(largest)


class LearningRates(NamedTuple):
    """Step sizes of hierarchical PCA."""

    local: Scalar
    shared: Scalar


def hierarchical_learning_rates(
    largest: ArrayLike,
    samples: ArrayLike,
    noise_variance: ArrayLike,
    prior_variance: ArrayLike,
    rank: int,
) -> LearningRates:
    r"""The step sizes for which the theorem on hierarchical PCA holds.

    The paper's Fact 1 has half of the likelihood's gradient; its constants are doubled here. The
    polar retraction has the constant \(C = 1/2\) in Lemma 1, because
    \(\sqrt{1 + s^2} - 1 \le s^2 / 2\).

    Args:
        largest: the largest eigenvalue of any client's second moment.
        samples: n, of a client.
        noise_variance: \(\sigma_\epsilon^2\).
        prior_variance: \(\sigma_U^2\).
        rank: r.

    Source:
        Ozkara, Huang & Diggavi (2023), Theorem 1 with Lemmas 3 and 4.
    """
    s, prior, top = jnp.asarray(noise_variance), jnp.asarray(prior_variance), jnp.asarray(largest)
    gradient = samples * (top / s**2 + 1 / s) + 2 / prior
    smooth = samples * (1 / s + top / s**2 + (1 + 2 * top / s) * 2 / s**2) + 2 / prior

    def rate(gradient, smooth):
        moved = rank**0.5 * gradient / 2  # C times the Frobenius norm of a gradient
        return jnp.minimum(1 / (2 * moved + (smooth + gradient) * (moved**2 + 1)), 1)

    return LearningRates(rate(gradient, smooth), rate(6 / prior, 24 / prior))


class ConsensusBound(NamedTuple):
    r"""What the theorem on FAPS takes and gives.

    Attributes:
        least_penalty: the smallest \(\beta_i\) of Assumption 6.
        constant: C, so that the smallest of the first N squared violations is at most C / N. NaN
            where penalties are so small that the proof's constants are negative.
    """

    least_penalty: Scalar
    constant: Scalar


def consensus_tolerance(clients: int, ratio: ArrayLike = 1.0) -> Scalar:
    r"""The \(\delta_i\) below which local solutions are accurate enough, (14).

    Args:
        clients: d.
        ratio: \(\rho\), the largest penalty over the smallest.

    Source:
        Wang, Liu & Zhang (2022), Assumption 6 (i).
    """
    spread = jnp.asarray(ratio) * clients
    return jnp.sqrt(1 - 1 / (2 * spread)) / (2 * jnp.sqrt(spread))


def consensus_bound(
    norms: Float[ArrayLike, "... clients"],
    energy: ArrayLike,
    penalties: Float[ArrayLike, "... clients"],
    tolerance: ArrayLike,
    decrease: ArrayLike,
    rank: int,
) -> ConsensusBound:
    r"""The least penalty, and the constant of the rate of FAPS.

    The paper leaves the constants of sufficient decrease open. A step of subspace iteration with a
    positive semidefinite matrix of norm \(\lambda\) raises half the captured energy by at least the
    squared violation over \(2 \lambda\). That gives \(c_1 = 1/2\) and \(c_1' = 3/2\) in (13), and
    \(c_2 = 1 / \sum_i (2 \beta_i + |A_i|_2^2)\) in (30), because multipliers have norms of at most
    \(|A_i|_2^2 / 2\).

    Args:
        norms: \(|A_i|_2^2\), of the clients.
        energy: \(|A|_F^2\).
        penalties: \(\beta_i\).
        tolerance: \(\delta_i\).
        decrease: of the Lagrangian in all rounds: half of what the optimum captures more than the
            start, where \(X_i = Z\).
        rank: p.

    Source:
        Wang, Liu & Zhang (2022), Theorem 8, Assumption 6 and Appendix B.
    """
    a, beta, c1 = jnp.asarray(norms), jnp.asarray(penalties), 0.5
    clients = a.shape[-1]
    spread = clients * beta.max(-1) / beta.min(-1)
    squared = 1 - 1 / (2 * spread)  # of the least cosine
    far = 1 + jnp.sqrt(2 * spread)
    allowed = jnp.sqrt(squared) - 2 * jnp.sqrt(spread) * jnp.asarray(tolerance)
    factors = (
        12 * spread * rank**0.5 / (c1 * squared),
        4 * 2**0.5 * far / allowed,
        16 * spread * rank**0.5,
        4 * far / (c1 * squared * spread),
    )
    least = jnp.stack(jnp.broadcast_arrays(1.5, *factors)).max(0) * jnp.asarray(energy)
    c2 = 1 / (2 * beta + a).sum(-1)
    c4 = (c1 * squared[..., None] * beta / 4 - far[..., None] * a / spread[..., None]).min(-1)
    c3 = ((beta + 4 * a).sum(-1) / jnp.sqrt(2 * spread * c4) + c2**-0.5) ** -2
    return ConsensusBound(least, jnp.asarray(decrease) * (1 / c3 + 1 / c4))


def subspace_distance_bound(
    tangent: ArrayLike, kept: ArrayLike, left_out: ArrayLike, noise: Float[ArrayLike, " rounds"]
) -> Float[Array, " rounds"]:
    r"""The most that the representation is from the optimal subspace after each round.

    A round is one of orthogonal iteration with \(M = \sum_j X_j X_j^+\), up to noise of compression
    and of inexact maps. Tangent t and cosine c of the largest angle then obey
    \(t \leftarrow (\lambda_{K+1} t + \epsilon / c) / (\lambda_K - \epsilon / c)\), so without noise
    the distance, the sine, is at most \((\lambda_{K+1} / \lambda_K)^r \tan \theta\). The paper
    bounds the noise of all rounds by one number, and so has a constant beside this.

    Args:
        tangent: \(\tan \theta\), of the largest angle at the start.
        kept: \(\lambda_K\), the K-th eigenvalue of M.
        left_out: \(\lambda_{K+1}\), the next one.
        noise: \(\epsilon\) of each round, a spectral norm.

    Returns:
        The distances; one where the noise is too large for a bound.

    Source:
        Shrestha & Fu (2023), Theorem 3 and its proof.
    """

    def step(tangent, noise):
        lost = jnp.where(noise > 0, noise * jnp.sqrt(1 + tangent**2), 0)
        moved = (left_out * tangent + lost) / (kept - lost)
        tangent = jnp.where(lost < kept, moved, jnp.inf)
        return tangent, jnp.sin(jnp.arctan(tangent))

    return jax.lax.scan(step, jnp.asarray(tangent), jnp.asarray(noise))[1]
