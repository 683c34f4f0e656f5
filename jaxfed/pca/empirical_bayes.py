r"""Hierarchical PCA whose prior variance is estimated from the marginal likelihood.

Maximizing jointly over the clients' components and the prior's variance lets the variance collapse
or echo a hyper prior, because a point estimate of the components ignores how uncertain they are.
Here the components are integrated out.

Given the shared components V, prior and posterior of a client's subspace are both matrix Bingham
laws on the Grassmannian, with density proportional to exp(½ tr UᵀAU): the prior with
A = κ VVᵀ, κ = 1/σ², the posterior with A = c S_i + κ VVᵀ. So the marginal likelihood is a ratio of
their normalizing constants, C(c S_i + κ VVᵀ) / C(κ VVᵀ), and what an EM step needs are their
derivatives, the mean projectors E[UUᵀ]. Those have the eigenvectors of A: the most probable
subspace is also the best one on average.

For A of two distinct eigenvalues C is a hypergeometric function of one number, here by the
calibrated Laplace approximation of Butler & Wood. For others every pair of an eigenvalue that is
kept and one that is left out counts as it does there:

    log C(A) ≈ ½ Σ_j a_j + Σ_j Σ_k l(a_j - a_k),    j = 1..r, k = r+1..d,

which is exact for two distinct eigenvalues, to first order for small A, and where A grows.

Source: the prior is that of Ozkara, Huang & Diggavi (2023), as a law of subspaces; Chikuse (2003),
Statistics on special manifolds, for the matrix Bingham law; Butler & Wood (2002), Laplace
approximations for hypergeometric functions with matrix argument, equation 16.
"""

from collections.abc import Mapping
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int, PyTree

from jaxfed.core.clients.samples import Samples
from jaxfed.core.common.checks import check_count, check_positive
from jaxfed.core.contract.algorithm import (
    Algorithm,
    ClientsLike,
    Diagnostics,
    Personalized,
    hyperparameter,
)
from jaxfed.core.contract.bases import Bases
from jaxfed.core.contract.fixed_point import HasBases
from jaxfed.core.contract.remarks import HasRemarks
from jaxfed.linalg import Moment, polar, ratio
from jaxfed.pca._components import (
    Frame,
    change_within,
    check_start,
    moment_message,
    moment_of,
    moment_received,
)
from jaxfed.pca._likelihood import (
    Number,
    RandomKey,
    Scalar,
    Start,
    aligned,
    check_proper_rank,
    joint_moment,
    precision,
)

LARGEST_ACCELERATION = 100.0  # of what EM moves
LARGEST_RATIO = 100.0  # of the concentration to the samples' mean precision


def log_normalizer(concentration: Number, features: int, rank: int) -> Scalar:
    r"""Logarithm of the mean of exp(-κ/2 ‖U - VVᵀU‖²) over subspaces, C(κ VVᵀ) e^(-κr/2).

    Args:
        concentration: κ, not negative.
        features: d.
        rank: r.

    Source:
        Butler & Wood (2002), (16), for ₁F₁(r/2; d/2; κ I_r / 2).
    """
    a, b, x = rank / 2, features / 2, concentration / 2
    inside, outside = _saddle(concentration, features, rank)
    pairs = rank * (rank + 1) / 4
    curvature = b * (inside**2 / a + outside**2 / (b - a))
    exponent = a * jnp.log(inside * b / a) + (b - a) * jnp.log(outside * b / (b - a)) - x * outside
    return rank * exponent - pairs * jnp.log(curvature)


def prior_distance(concentration: Number, features: int, rank: int) -> Scalar:
    """Expected ‖U - VVᵀU‖² under the prior: from r(d - r)/d for κ = 0 down to about r(d - r)/κ.

    It is -2 times the derivative of `log_normalizer`, written out: by the saddle point's equation
    that of the exponent is 1 - y.
    """
    a, b = rank / 2, features / 2
    inside, outside = _saddle(concentration, features, rank)
    curvature = (b - a) * inside**2 + a * outside**2
    turn = (inside * outside / curvature) ** 2 * ((b - a) * inside - a * outside)
    return rank * outside + rank * (rank + 1) / 2 * turn


def _saddle(concentration: Number, features: int, rank: int) -> tuple[Scalar, Scalar]:
    """The y that solves the saddle point's equation, and 1 - y, both to full precision.

    In shares of x + b for x = κ/2, so that nothing cancels or overflows for the largest κ, where
    y = (x - b + ((x - b)² + 4ax)^½) / 2x as it is printed has nothing left of 1 - y.
    """
    a, b, x = rank / 2, features / 2, concentration / 2
    large = x > b
    below = 1 / (1 + x / b)  # b / (x + b)
    above = jnp.where(large, 1 - below, x / b * below)  # x / (x + b)
    root = jnp.sqrt(1 - 4 * (1 - a / b) * above * below)
    gap = jnp.where(large, above - below, below - above) + root
    inside = jnp.where(large, gap / (2 * jnp.where(large, above, 1)), 2 * a / b * below / gap)
    return inside, 2 * (1 - a / b) * below / (1 + root)


def mean_projector_weights(values: Float[Array, " d"], rank: int) -> Float[Array, " d"]:
    """Eigenvalues of E[UUᵀ] under the matrix Bingham law, from those of A, both descending.

    Between 0 and 1, and they sum to the rank.
    """
    features = len(values)
    gaps = values[:rank, None] - values[rank:]
    pair = jax.vmap(jax.vmap(lambda gap: prior_distance(gap, features, rank)))(gaps)
    lost = pair / (rank * (features - rank))
    return jnp.concatenate([1 - lost.sum(axis=1), lost.sum(axis=0)])


def divided_differences(
    values: Float[Array, " d"], weights: Float[Array, " d"]
) -> Float[Array, "d d"]:
    """(w_i - w_j) / (λ_i - λ_j), what the eigenvectors' turns do to V diag(w) Vᵀ; zero at ties."""
    gaps = values[:, None] - values
    clear = jnp.abs(gaps) > jnp.finfo(values.dtype).eps * len(values) * jnp.abs(values[0])
    return ratio(weights[:, None] - weights, jnp.where(clear, gaps, 0))


def concentrations(features: int, rank: int, dtype: DTypeLike) -> tuple[float, float]:
    """The smallest and the largest concentration that a distance can tell from none and from more.

    A distance is what a sum of r leaves of r, so that its rounding is a few units of that.
    """
    return 1e-6, 4 * (features - rank) / float(jnp.finfo(dtype).eps)


def fitted_concentration(distance: Scalar, features: int, rank: int) -> Scalar:
    """The concentration whose expected distance is the given one: the maximum likelihood one.

    Of distances beyond those of `concentrations` it is that bound, with a derivative of zero.
    """
    limits = jnp.asarray(concentrations(features, rank, distance.dtype), distance.dtype)
    farthest, nearest = prior_distance(limits, features, rank)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        above = prior_distance(jnp.exp(middle), features, rank) > distance
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    low, high = (jnp.full(distance.shape, limit) for limit in jnp.log(limits))
    bounds = jax.lax.fori_loop(0, 50, halve, jax.lax.stop_gradient((low, high)))
    root = jax.lax.stop_gradient(jnp.exp(sum(bounds) / 2))
    # The bisection has no derivative; the implicit function has.
    slope = jax.lax.stop_gradient(jax.grad(prior_distance)(root, features, rank))
    within = (nearest < distance) & (distance < farthest)
    return root + ratio(distance - jax.lax.stop_gradient(distance), jnp.where(within, slope, 0))


class Downlink(NamedTuple):
    """The shared components and the concentration."""

    shared: Frame
    concentration: Scalar


class Uplink(NamedTuple):
    """The posterior's mean projector, applied to the shared components, and how far it is."""

    product: Frame
    distance: Scalar


class Server(NamedTuple):
    """The server's state."""

    shared: Frame
    concentration: Scalar
    previous: Float[Array, " 2"]  # log κ of the round before, and how far EM moved it from there
    most: Scalar  # the largest concentration


class EmpiricalBayesPCA(Algorithm, HasBases, HasRemarks):
    r"""Personalized components around shared ones, with a prior variance that the data decide.

    Expectation maximization of the marginal likelihood, the clients' components integrated out:
    each round a client sends E[UUᵀ]V, a thin matrix, and the expected distance r - tr VᵀE[UUᵀ]V;
    the server orthonormalizes the mean matrix (the shared components' step) and finds the
    concentration at which the prior expects the mean distance. There is neither a step size nor a
    hyper prior to choose.

    The prior is one of subspaces, of density proportional to exp(κ/2 ‖VᵀU‖²), so a result of
    σ² = 1/κ is at once the best `prior_variance` of `HierarchicalPCA`. It grows without bound as
    the clients' subspaces become unrelated, where (2ξ + d²)/D of `AdaptivePCA` hardly exceeds 1/d.
    Where samples show no spread it falls to its lower limit, a hundredth of the mean sampling
    variance 1/c, which changes a client's components no more. `history["at_lower_limit"]` is 1
    where it is there.

    The noise variance decides how much of the scatter is sampling. Where it is twice too large and
    samples are few, sampling explains everything, and the spread falls to its limit although the
    clients differ. `history["residual_variance"]` is the variance that the components leave in each
    of the other features: a better noise variance where it is another one. Fits repeated with the
    last one find both. From twice the noise variance, 20 samples of 20 features and 4 components,
    the noise of five fits is 20, 6, 2, 0.3 and 0.1 % off, and the spread at the limit, then 19, 6,
    2 and 0.4 % too small.

    The likelihood is an approximation. Where it can be integrated, one component of three features,
    100 clients of 20 samples, κ comes out 3, 11 and 15 per cent too small for clients that scatter
    with variances of 0.03, 0.1 and 0.3.
    """

    noise_variance: Array
    rank: int = eqx.field(static=True)

    def __init__(self, rank: int, noise_variance: float | Array):
        """Set up the algorithm.

        Args:
            rank: number of components of each client, less than the number of features.
            noise_variance: variance of the noise in each feature, if need be from a fit; see the
                class. The latent variance is one.

        Raises:
            ValueError: for a rank that is not a positive whole number and a variance that is not
                positive and finite.
        """
        check_count("rank", rank)
        check_positive("noise_variance", noise_variance)
        self.rank, self.noise_variance = rank, hyperparameter(noise_variance)

    def check(self, clients: ClientsLike, start: Start) -> None:
        """Refuse a rank or a warm start that does not fit.

        Raises:
            ValueError: as said above.
        """
        check_proper_rank(self.rank, clients)
        check_start(start, clients, self.rank, None)

    def prepare(self, data: Samples | Moment, client_id: Int[Array, ""], rounds: int) -> Moment:
        """The client's second moment."""
        del client_id
        return moment_of(data, rank=self.rank, rounds=rounds)

    def first_message(self, key: RandomKey, data: Moment, start: Start) -> dict[str, PyTree]:
        """How precise the second moment is, and for the pooled start itself."""
        del key
        weight = self._precision(data)
        first: dict[str, PyTree] = {"precision": weight}
        return first if start is not None else first | {"moment": moment_message(data, weight)}

    def server_init(
        self, key: RandomKey, first: dict[str, PyTree], like: Moment, start: Start
    ) -> Server:
        """Pooled components; a prior as strong as the samples."""
        del key
        top = moment_received(first["moment"]).top(self.rank)[1] if start is None else start.shared
        # With no way behind it, the first move is EM's own.
        weight = first["precision"]
        place = jnp.log(weight)
        known = concentrations(like.dim, self.rank, weight.dtype)[1]
        most = jnp.minimum(LARGEST_RATIO * weight, known)
        return Server(top, weight, jnp.stack([place, jnp.zeros_like(place)]), most)

    def downlink(self, server: Server) -> Downlink:
        """The shared components and the concentration."""
        return Downlink(server.shared, server.concentration)

    def client_init(self, key: RandomKey, downlink: Downlink, data: Moment, start: Start) -> None:
        """Nothing: the posterior is found anew each round."""
        del key, downlink, data, start

    def client_step(
        self, key: RandomKey, downlink: Downlink, local: None, data: Moment
    ) -> tuple[Uplink, None, Diagnostics]:
        """The posterior's mean projector, applied to the shared components."""
        del key
        shared, concentration = downlink
        joint = self._posterior(data, downlink)
        rows = data.dim if joint.samples is None else len(joint.samples)
        top, vectors = joint.top(min(rows, data.dim))
        known = len(top)
        # Eigenvalues beyond the vectors are zero.
        values = jnp.pad(top, (0, data.dim - known))
        features, rank, s = data.dim, self.rank, self.noise_variance.astype(values.dtype)
        weights = mean_projector_weights(values, rank)
        rest = weights[-1] if known < features else 0.0
        inside = vectors.T @ shared
        # The eigenvectors' own derivative leaves out what turns them towards each other.
        differences = divided_differences(values, weights)[:known, :known]
        turned = differences * change_within(joint, vectors)
        within = (weights[:known, None] - rest) * inside + turned @ inside
        product = rest * shared + vectors @ within
        # Not left to the server: of two messages that channels round, little is right of it.
        distance = jnp.vdot(shared, shared - product)

        gaps = values[:rank, None] - values[rank:]
        posterior = log_normalizer(gaps, features, rank).mean() + values[:rank].sum() / 2
        # What arrives is not quite orthonormal, which a large concentration would multiply.
        prior = log_normalizer(concentration, features, rank)
        prior += concentration / 2 * jnp.vdot(shared, shared)
        constant = features * jnp.log(s) + rank * jnp.log1p(1 / s) + data.trace / s
        objective = data.count / 2 * constant - posterior + prior
        # What the components hold of the variance: tr E[UUᵀ]S from E[UUᵀ](cS + κVVᵀ).
        held = jnp.vdot(weights[:known], top) - concentration * jnp.vdot(shared, product)
        left = (data.trace - ratio(held, self._precision(data))) / (features - rank)
        return Uplink(product, distance), local, {"objective": objective, "residual_variance": left}

    def server_step(
        self, key: RandomKey, server: Server, uplink: Uplink
    ) -> tuple[Server, Diagnostics]:
        """The shared components and the concentration that the mean posterior asks for."""
        del key
        features = len(server.shared)
        place = jnp.log(server.concentration)
        move = jnp.log(fitted_concentration(uplink.distance, features, self.rank)) - place
        # EM is slow where the samples say little about σ²; the secant through the last two moves
        # finds where they vanish.
        moved, change = place - server.previous[0], move - server.previous[1]
        useful = (moved * change < 0) & (jnp.abs(change) < jnp.abs(moved))
        factor = jnp.where(useful, -moved / jnp.where(useful, change, 1), 1)
        place_next = place + move * jnp.clip(factor, 1, LARGEST_ACCELERATION)
        least, _ = concentrations(features, self.rank, place.dtype)
        # Kept and handed on, the limit would have no implicit derivative.
        most = jax.lax.stop_gradient(server.most)
        concentration = jnp.clip(jnp.exp(place_next), least, most)
        # The nearest basis to the one before, so that it comes to rest with the subspace.
        server = Server(polar(uplink.product), concentration, jnp.stack([place, move]), server.most)
        at_limit = (concentration >= most).astype(concentration.dtype)
        return server, {"prior_variance": 1 / concentration, "at_lower_limit": at_limit}

    def client_result(self, downlink: Downlink, local: None, data: Moment) -> Frame:
        """The best subspace on average, and the most probable one, its basis turned towards V."""
        del local
        top = self._posterior(data, downlink).top(self.rank)[1]
        # Once a run, so that the shorter program counts, and not the faster one.
        return aligned(top.T, downlink.shared.T, "svd").T

    def shared_result(self, server: Server) -> Frame:
        """The shared components."""
        return server.shared

    def remarks(self, result: Personalized, history: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Whether the spread is at its lower limit, and what noise the components leave."""
        del result
        if not history["at_lower_limit"].size or not history["at_lower_limit"][-1]:
            return ()
        left, given = history["residual_variance"][-1], float(self.noise_variance)
        return (
            "The learned spread is at its lower limit: the clients are alike, or noise_variance "
            f"({given:.3g}) is too large; the components leave {left:.3g} in each other feature.",
        )

    def bases(self, server: Server, local: None) -> Bases:
        """The shared components."""
        del local
        return Bases(shared=(server.shared,))

    def _precision(self, moment: Moment) -> Scalar:
        return precision(moment.count, self.noise_variance.astype(moment.trace.dtype))

    def _posterior(self, moment: Moment, downlink: Downlink) -> Moment:
        """The posterior's matrix, c S + κ VVᵀ."""
        weight = self._precision(moment)
        return joint_moment(moment, weight, downlink.shared, 1 / downlink.concentration)
