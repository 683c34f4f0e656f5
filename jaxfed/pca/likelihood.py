"""Likelihood, prior and initial components of hierarchical-Bayes PCA."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxfed.contract import ClientsLike, Personalized, check_count, check_positive
from jaxfed.core.clients.samples import Samples
from jaxfed.linalg import Moment, matmul, polar
from jaxfed.linalg.division import ratio
from jaxfed.manifolds import stiefel
from jaxfed.pca.components import (
    Frame,
    RandomKey,
    Rows,
    check_fits,
    moment_behind,
    moment_message,
    moment_of,
    moment_received,
)

Scalar = Float[Array, ""]
Number = float | Scalar


# --- the terms of the objective ------------------------------------------------------------------


def precision(count: Scalar, noise_variance: Number) -> Scalar:
    """Return the precision with which n samples determine the components, c = n / (s (1 + s)).

    Up to a constant factor, the likelihood is exp(c/2 tr UᵀSU).
    """
    return count / (noise_variance * (1 + noise_variance))


def negative_log_likelihood(moment: Moment, frame: Rows, noise_variance: Number) -> Scalar:
    """n/2 (log det W + tr W⁻¹S) for orthonormal components, without the normal's constant."""
    (rank, features), s = frame.shape, noise_variance
    log_det = (features - rank) * jnp.log(s) + rank * jnp.log1p(s)
    energy = jnp.trace(moment.row_products(frame)[1])
    return moment.count / 2 * (log_det + (moment.trace - energy / (1 + s)) / s)


def likelihood_gradient(moment: Moment, frame: Rows, precision: Number) -> Rows:
    """Riemannian gradient of `negative_log_likelihood`, -c (I - UUᵀ) S U.

    It is the projection of n (W⁻¹U - W⁻¹SW⁻¹U); Ozkara et al. (2023), Fact 1, print half of it.
    """
    product, within = moment.row_products(frame)
    return -precision * (product - matmul(within, frame))


def overlap(frame: Rows, shared: Rows) -> Float[Array, "r r"]:
    """UᵀV."""
    # Mapped over clients, this order makes one large product, which is faster. But on a GPU, XLA
    # cannot tile that product if its transpose is used, as in `aligned`.
    return lax.platform_dependent(
        frame,
        shared,
        cuda=lambda frame, shared: matmul(shared, frame.T).T,
        default=lambda frame, shared: matmul(frame, shared.T),
    )


def squared_distance(shared: Rows, frame: Rows) -> Scalar:
    """d²(V, U) = ‖U - V sym(VᵀU)‖², with the projection of U onto the tangent space at V."""
    return jnp.sum((frame - matmul(_symmetric(overlap(frame, shared)), shared)) ** 2)


def distance_gradients(shared: Rows, frame: Rows) -> tuple[Rows, Rows]:
    """Half the Riemannian gradients of d², with respect to V and to U.

    They are the projections of -(U - V sym(VᵀU)) sym(VᵀU) and of U - V sym(VᵀU).
    """
    inner = overlap(frame, shared)
    symmetric = _symmetric(inner)
    # With S = sym(VᵀU), P_V((V S - U) S) = V sym(VᵀU S) - U S: the terms in V S² cancel. Here and
    # in the next line it is transposed, as frames are rows.
    by_shared = matmul(_symmetric(matmul(symmetric, inner)), shared) - matmul(symmetric, frame)
    by_frame = matmul(_symmetric(matmul(inner, symmetric)), frame) - matmul(symmetric, shared)
    return by_shared, by_frame


def _symmetric(x: Float[Array, "r r"]) -> Float[Array, "r r"]:
    # Without the barrier, XLA fuses the transpose into the next product, which it then cannot tile
    # on a GPU.
    return lax.optimization_barrier((x + x.T) / 2)


def aligned(frame: Rows, shared: Rows, method: Literal["svd"] | None = None) -> Rows:
    """Return the basis UQ of a client's components that is nearest to V: VᵀUQ symmetric PSD.

    d²(V, UQ) is then the minimum over all bases, r - ‖VᵀU‖², a distance between subspaces.
    """
    return matmul(polar(overlap(frame, shared).T, method), frame)


def joint_moment(moment: Moment, weight: Number, shared: Frame, prior_variance: Number) -> Moment:
    """Return c S + VVᵀ/σ², whose top eigenvectors are a client's best components."""
    if moment.dense is not None:
        return Moment.from_dense(weight * moment.dense + shared @ shared.T / prior_variance)
    assert moment.samples is not None
    rows = jnp.sqrt(weight / jnp.maximum(moment.count, 1)) * moment.samples
    return Moment.from_samples(jnp.concatenate([rows, shared.T / jnp.sqrt(prior_variance)]), 1)


# --- checks, prepared data and the start ---------------------------------------------------------


def check_settings(rank: int, noise_variance: Number, step_size: Number | None) -> None:
    """Raise a `ValueError` if the rank, the variance or the step size is not positive."""
    check_count("rank", rank)
    check_positive("noise_variance", noise_variance)
    check_positive("step_size", step_size, optional=True)


def check_proper_rank(rank: int, clients: ClientsLike) -> None:
    """Raise a `ValueError` if PCA cannot use the data, or `rank` is not below the features."""
    check_fits("rank", rank, clients)
    if rank == clients.features:
        raise ValueError(f"rank: wanted less than the {clients.features} features, got {rank}")


class Member(NamedTuple):
    """One client's prepared data."""

    moment: Moment
    precision: Scalar  # c
    curvature: Scalar | None  # c times the largest eigenvalue, if it sets the step size


def member(
    data: Samples | Moment,
    noise_variance: Array,
    rank: int,
    rounds: int,
    *,
    factor: float = 1.0,
    curvature: bool = False,
) -> Member:
    """Prepare one client's data.

    Args:
        data: the client's samples or second moment.
        noise_variance: variance of the noise in each feature.
        rank: number of components.
        rounds: number of rounds.
        factor: factor on the precision.
        curvature: whether to compute the curvature for an automatic step size.
    """
    moment = moment_of(data, rank=rank, rounds=rounds)
    weight = factor * precision(moment.count, noise_variance.astype(moment.trace.dtype))
    largest = weight * moment_behind(data).largest_eigenvalue() if curvature else None
    return Member(moment, weight, largest)


def pooled_message(data: Member, rule: str, warm_start: Personalized | None) -> dict[str, PyTree]:
    """Return a client's second moment times its precision if the start is pooled."""
    pooled = warm_start is None and rule == "pooled"
    # Weighted as in the likelihood: the top eigenvectors of mean c_i S_i are the most likely
    # components if all clients have the same.
    return {"moment": moment_message(data.moment, data.precision)} if pooled else {}


def initial_shared(
    rank: int,
    key: RandomKey,
    first: dict[str, PyTree],
    like: Member,
    warm_start: Personalized | None,
) -> Rows:
    """Return the first shared components: warm start, top eigenvectors of the mean, or random."""
    if warm_start is not None:
        return warm_start.shared.T
    if "moment" in first:
        return moment_received(first["moment"]).top(rank)[1].T
    return stiefel.random(key, like.moment.dim, rank, like.moment.trace.dtype).T


def initial_local(rank: int, key: RandomKey, data: Member, warm_start: Personalized | None) -> Rows:
    """Return a client's first components: the warm start's, or random."""
    if warm_start is not None and warm_start.local is not None:
        return warm_start.local.T
    return stiefel.random(key, data.moment.dim, rank, data.moment.trace.dtype).T


def stepped(frame: Rows, gradient: Rows, step_size: Array | None, curvature: Scalar | None) -> Rows:
    """Step down the gradient by `step_size`, or one over the curvature (zero if that is zero)."""
    if step_size is None:
        assert curvature is not None
        return polar(frame - ratio(gradient, curvature))
    return polar(frame - step_size.astype(frame.dtype) * gradient)
