"""How far points are from the first-order conditions that convergence theorems are about.

Written from the papers' conditions, not from the algorithms' steps.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Scalar = Float[Array, ""]


class Violation(NamedTuple):
    """A point's violation of the first-order conditions, and its objective."""

    squared: Scalar
    objective: Scalar


def perpca_violation(
    moments: Float[Array, "clients d d"],
    shared: Float[Array, "d shared_rank"],
    local: Float[Array, "clients d local_rank"],
) -> Violation:
    r"""\(N \|\square U\|_F^2 + \sum_i \|\square V_i\|_F^2\), and minus the objective f.

    Args:
        moments: second moments \(S_i\).
        shared: U, orthonormal.
        local: \(V_i\), of any columns; they are deflated by U and orthonormalized first.

    Source:
        Shi & Kontar (2024), equations (7), (56) and (60).
    """
    local = jnp.linalg.qr(local - shared @ (shared.T @ local)).Q
    both = jnp.concatenate([jnp.broadcast_to(shared, (len(local), *shared.shape)), local], axis=2)
    product = moments @ both
    gradient = product - both @ (both.mT @ product)
    by_shared = gradient[..., : shared.shape[1]].mean(0)
    squared = len(local) * jnp.sum(by_shared**2) + jnp.sum(gradient[..., shared.shape[1] :] ** 2)
    return Violation(squared, -jnp.sum(both * product) / 2)


def hierarchical_objective(
    moments: Float[Array, "clients d d"],
    shared: Float[Array, "d rank"],
    local: Float[Array, "clients d rank"],
    samples: int,
    noise_variance: float,
    prior_variance: Float[Array, ""],
) -> Scalar:
    r"""The mean over clients of the negative log density (4), but for a constant.

    For orthonormal components, the likelihood is \(-c\, \mathrm{tr}\, U^T S U / 2\) with the
    precision \(c = n / (\sigma_\epsilon^2 (1 + \sigma_\epsilon^2))\).

    Args:
        moments: second moments \(S_i\).
        shared: V, orthonormal.
        local: \(U_i\), orthonormal.
        samples: n, of a client.
        noise_variance: \(\sigma_\epsilon^2\).
        prior_variance: \(\sigma_U^2\).

    Source:
        Ozkara, Huang & Diggavi (2023), equation (4).
    """
    precision = samples / (noise_variance * (1 + noise_variance))
    inner = shared.T @ local
    apart = local - shared @ (inner + inner.mT) / 2
    energy = jnp.sum(local * (moments @ local))
    total = jnp.sum(apart**2) / (2 * prior_variance) - precision * energy / 2
    return total / len(local)


def hierarchical_violation(
    moments: Float[Array, "clients d d"],
    shared: Float[Array, "d rank"],
    local: Float[Array, "clients d rank"],
    moved: Float[Array, "clients d rank"],
    samples: int,
    noise_variance: float,
    prior_variance: Float[Array, ""],
) -> Violation:
    r"""\(\|g_V\|_F^2 + \frac1m \sum_i \|g_{U_i}\|_F^2\) of one round, and the objective before it.

    Args:
        moments: second moments \(S_i\).
        shared: V before the round.
        local: \(U_i\) before the round, where their gradients are.
        moved: \(U_i\) after their step, where the gradient by V is.
        samples: n, of a client.
        noise_variance: \(\sigma_\epsilon^2\).
        prior_variance: \(\sigma_U^2\).

    Source:
        Ozkara, Huang & Diggavi (2023), Theorem 1.
    """

    def objective(shared, local):
        return hierarchical_objective(
            moments, shared, local, samples, noise_variance, prior_variance
        )

    def tangent(frame, gradient):
        inner = frame.mT @ gradient
        return gradient - frame @ (inner + inner.mT) / 2

    before, by_local = jax.value_and_grad(objective, 1)(shared, local)
    by_local = len(local) * tangent(local, by_local)
    by_shared = tangent(shared, jax.grad(objective)(shared, moved))
    return Violation(jnp.sum(by_shared**2) + jnp.sum(by_local**2) / len(local), before)


def consensus_violation(
    matrices: Float[Array, "clients n n"],
    shared: Float[Array, "n rank"],
    local: Float[Array, "clients n rank"],
) -> Violation:
    r"""\(\|P_Z^\perp A A^T Z\|_F^2 + \frac1d \sum_i \|X_i X_i^T - Z Z^T\|_F^2\), and minus f(Z)/2.

    Args:
        matrices: \(A_i A_i^T\).
        shared: Z, orthonormal.
        local: \(X_i\), orthonormal.

    Source:
        Wang, Liu & Zhang (2022), Theorem 8.
    """
    product = matrices.sum(0) @ shared
    residual = product - shared @ (shared.T @ product)
    # From a residual, since inner products lose all digits of a small distance.
    apart = shared - local @ (local.mT @ shared)
    distance = 2 * jnp.sum(apart**2) / len(local)
    return Violation(jnp.sum(residual**2) + distance, -jnp.sum(shared * product) / 2)


def correlation_violation(
    views: Float[Array, "views entities d"],
    maps: Float[Array, "views d rank"],
    shared: Float[Array, "entities rank"],
) -> Violation:
    r"""The squared length of the gradient of MAX-VAR GCCA, and the cost.

    By \(Q_j\) it is \(X_j^T (M_j - G) / \sqrt L\) with \(M_j = X_j Q_j / \sqrt L\), and by G the
    part of \(\sum_j M_j\) tangent to the orthonormal matrices.

    Args:
        views: \(X_j\).
        maps: \(Q_j\).
        shared: G, orthonormal.

    Source:
        Shrestha & Fu (2023), equations (7) and (23).
    """
    root = shared.shape[0] ** 0.5
    scores = views @ maps / root
    misfit = scores - shared
    total = scores.sum(0)
    inner = shared.T @ total
    by_shared = total - shared @ (inner + inner.T) / 2
    by_maps = views.mT @ misfit / root
    return Violation(jnp.sum(by_shared**2) + jnp.sum(by_maps**2), jnp.sum(misfit**2) / 2)
