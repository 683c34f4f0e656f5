"""Likelihood, prior and initial components of hierarchical-Bayes PCA."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, PyTree

from jaxfed.contract import ClientsLike, Personalized, check_count, check_positive
from jaxfed.core.clients.samples import SampleRows, Samples
from jaxfed.core.common.printing import is_known
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

LARGEST_ACCELERATION = 100.0  # relative to EM's own step

Scalar = Float[Array, ""]
Number = float | Scalar


class Variances(NamedTuple):
    """The variances of a sample U x + e."""

    noise: Number  # s, of each feature of e
    scores: Number = 1.0  # l, of each entry of x


# --- the terms of the objective ------------------------------------------------------------------


def precision(count: Scalar, noise: Number, scores: Number = 1.0) -> Scalar:
    """Return the weight c = n / (s (1 + s/l)) of a second moment in the likelihood.

    Up to a constant factor, the likelihood is exp(c/2 tr UᵀSU), and n samples determine an entry of
    the components with the variance 1 / (c l).
    """
    # Neither the square of the noise nor that in a derivative may overflow or vanish.
    return ratio(ratio(count, noise), 1 + ratio(noise, scores))


def negative_log_likelihood(moment: Moment, frame: Rows, variances: Variances) -> Scalar:
    """n/2 (log det W + tr W⁻¹S) for orthonormal components, without the normal's constant."""
    (rank, features), (s, scores) = frame.shape, variances
    share = ratio(s, scores)
    log_det = (features - rank) * jnp.log(s) + rank * (jnp.log(scores) + jnp.log1p(share))
    energy = jnp.trace(moment.row_products(frame)[1])
    return moment.count / 2 * (log_det + ratio(moment.trace - energy / (1 + share), s))


def objective_scale(moment: Moment) -> Scalar:
    """What a difference of `negative_log_likelihood` is relative to: n d / 2.

    Its own magnitude would depend on the samples' unit.
    """
    return jnp.asarray(moment.count * moment.dim / 2)


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


# --- the variances -------------------------------------------------------------------------------


def variances_message(moment: Moment, rank: int) -> dict[str, Scalar]:
    """Return the sums from which `estimated` computes the variances."""
    outside = jnp.maximum(moment.trace - moment.top(rank)[0].sum(), 0)
    return {
        "samples": moment.count,
        "free": jnp.maximum(moment.count - rank, 0),
        "energy": moment.count * moment.trace,
        "residual": moment.count * outside,
    }


def estimated(reduced: dict[str, Scalar], rank: int, features: int) -> Variances:
    """Estimate the variances from the mean messages of the clients.

    The residual of n samples of d features beside their own r components has (n - r)(d - r) degrees
    of freedom: a row and a column for each component. So the mean of the discarded eigenvalues, the
    maximum-likelihood estimate, is divided by 1 - r/n, which matters if samples are few. The mean
    squared norm of a sample is l r + s d.

    Source: Tipping & Bishop (1999), Probabilistic principal component analysis, (8), for n >> r.
    """
    # Without a free sample, as for exact moments, n is taken for n - r.
    free = jnp.where(reduced["free"] > 0, reduced["free"], reduced["samples"])
    energy = ratio(reduced["energy"], reduced["samples"])
    # Data of zeros have any unit.
    energy = jnp.where(energy > 0, energy, 1)
    noise = ratio(reduced["residual"], free * (features - rank))
    # Data without noise, or without components, still give finite precisions.
    small = float(jnp.finfo(energy.dtype).eps)
    noise = jnp.maximum(noise, small * energy)
    return Variances(noise, jnp.maximum((energy - features * noise) / rank, small**0.5 * noise))


def variances_of(given: Array | None, found: Variances | None, dtype: DTypeLike) -> Variances:
    """Return the noise variance as given, with scores of variance one, or the estimates."""
    if found is not None:
        return found
    assert given is not None
    return Variances(given.astype(dtype))


def at_rest(value: Scalar) -> Float[Array, " 2"]:
    """Return a `previous` of `extrapolated` by which the next step from a value is EM's own."""
    return jnp.stack([jnp.log(value), jnp.zeros_like(value)])


def extrapolated(
    place: Scalar, move: Scalar, previous: Float[Array, " 2"], longest: float = np.inf
) -> Scalar:
    """Return the next logarithm of a variance that EM learns, from EM's own step.

    EM is slow if samples say little about the variance. The secant through its last two steps
    predicts where they vanish.

    Args:
        place: the logarithm.
        move: EM's step from there.
        previous: both in the round before; a step of zero if there was none.
        longest: the longest step, unless EM's own is longer.
    """
    moved, change = place - previous[0], move - previous[1]
    useful = (moved * change < 0) & (jnp.abs(change) < jnp.abs(moved))
    factor = jnp.where(useful, -moved / jnp.where(useful, change, 1), 1)
    step = move * jnp.clip(factor, 1, LARGEST_ACCELERATION)
    # Where steps come near rounding, their ratio is one of rounding errors: differentiate EM's own
    # step, which vanishes at the same place.
    near = jnp.maximum(jnp.abs(move), jnp.abs(moved)) < float(jnp.finfo(move.dtype).eps) ** 0.5
    own = lax.stop_gradient(step) + (move - lax.stop_gradient(move))
    step = jnp.where(near, own, step)
    if np.isfinite(longest):
        most = jnp.maximum(jnp.abs(move), longest)
        step = jnp.clip(step, -most, most)
    return place + step


def diagnostics_of(found: Variances | None) -> dict[str, Array]:
    """Return the estimates under their names in the history, if there are any."""
    if found is None:
        return {}
    return {"noise_variance": jnp.asarray(found.noise), "score_variance": jnp.asarray(found.scores)}


def check_estimable(
    noise_variance: Array | None, rank: int, clients: ClientsLike, warm_start: Personalized | None
) -> None:
    """Raise a `ValueError` if no client has more samples than components to estimate noise from.

    New clients that `jaxfed.personalize` starts at shared components alone may have fewer: for
    them, a solution has the estimates.
    """
    if noise_variance is not None or (warm_start is not None and warm_start.local is None):
        return
    counts = [part.count for part in clients.parts if isinstance(part, SampleRows)]
    if len(counts) == len(clients.parts) and all(map(is_known, counts)):
        most = max(int(np.asarray(x).max(initial=0)) for x in counts)
        if most <= rank:
            raise ValueError(
                f"noise_variance: wanted a number for clients with at most {most} samples, which "
                f"{rank} components reproduce without noise, got None"
            )


# --- checks, prepared data and the start ---------------------------------------------------------


def check_settings(rank: int, noise_variance: Number | None, step_size: Number | None) -> None:
    """Raise a `ValueError` if the rank, the variance or the step size is not positive."""
    check_count("rank", rank)
    check_positive("noise_variance", noise_variance, optional=True)
    check_positive("step_size", step_size, optional=True)


def check_proper_rank(rank: int, clients: ClientsLike) -> None:
    """Raise a `ValueError` if PCA cannot use the data, or `rank` is not below the features."""
    check_fits("rank", rank, clients)
    if rank == clients.features:
        raise ValueError(f"rank: wanted less than the {clients.features} features, got {rank}")


class LikelihoodMember(NamedTuple):
    """One client's prepared data."""

    moment: Moment
    precision: Scalar  # c, or n before the variances are known
    curvature: Scalar | None  # that times the largest eigenvalue, if it sets the step size

    def under(self, found: Variances | None) -> "LikelihoodMember":
        """Return the same with c in place of n, if the variances were estimated."""
        if found is None:
            return self
        unit = precision(jnp.ones_like(self.precision), *found)
        curvature = None if self.curvature is None else unit * self.curvature
        return LikelihoodMember(self.moment, unit * self.precision, curvature)


def member(
    data: Samples | Moment,
    noise_variance: Array | None,
    rank: int,
    rounds: int,
    *,
    factor: float = 1.0,
    curvature: bool = False,
) -> LikelihoodMember:
    """Prepare one client's data.

    Args:
        data: the client's samples or second moment.
        noise_variance: variance of the noise in each feature; None if it is yet to be estimated.
        rank: number of components.
        rounds: number of rounds.
        factor: factor on the precision.
        curvature: whether to compute the curvature for an automatic step size.
    """
    moment = moment_of(data, rank=rank, rounds=rounds)
    weight = moment.count
    if noise_variance is not None:
        weight = precision(weight, noise_variance.astype(moment.trace.dtype))
    weight = factor * weight
    largest = weight * moment_behind(data).largest_eigenvalue() if curvature else None
    return LikelihoodMember(moment, weight, largest)


def pooled_message(
    data: LikelihoodMember, rule: str, warm_start: Personalized | None
) -> dict[str, PyTree]:
    """Return a client's second moment times its precision if the start is pooled."""
    pooled = warm_start is None and rule == "pooled"
    # Weighted as in the likelihood: the top eigenvectors of mean c_i S_i are the most likely
    # components if all clients have the same.
    return {"moment": moment_message(data.moment, data.precision)} if pooled else {}


def initial_shared(
    rank: int,
    key: RandomKey,
    first: dict[str, PyTree],
    like: LikelihoodMember,
    warm_start: Personalized | None,
) -> Rows:
    """Return the first shared components: warm start, top eigenvectors of the mean, or random."""
    if warm_start is not None:
        return warm_start.shared.T
    if "moment" in first:
        return moment_received(first["moment"]).top(rank)[1].T
    return stiefel.random(like.moment.dim, rank, dtype=like.moment.trace.dtype, key=key).T


def initial_local(
    rank: int, key: RandomKey, data: LikelihoodMember, warm_start: Personalized | None
) -> Rows:
    """Return a client's first components: the warm start's, or random."""
    if warm_start is not None and warm_start.local is not None:
        return warm_start.local.T
    return stiefel.random(data.moment.dim, rank, dtype=data.moment.trace.dtype, key=key).T


def stepped(frame: Rows, gradient: Rows, step_size: Array | None, curvature: Scalar | None) -> Rows:
    """Step down the gradient by `step_size`, or one over the curvature (zero if that is zero)."""
    if step_size is None:
        assert curvature is not None
        return polar(frame - ratio(gradient, curvature))
    return polar(frame - step_size.astype(frame.dtype) * gradient)
