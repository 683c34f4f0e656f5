"""The normal distribution that components describe, and the likelihood of samples."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float

EXACT = float(np.finfo(float).eps)
CLOSE = 1e4  # units of rounding below which a difference of energies has too few digits
PIECE = 512  # squares that are added in single precision


class Learned(NamedTuple):
    """The components that a run has learned."""

    shared: Float[np.ndarray, "d _r"]  # also used for samples of unknown clients
    local: Float[np.ndarray, "m d r2"]
    beside: bool  # whether clients have local components beside the shared ones, or only local ones
    settled: bool = False  # whether the shared ones are axes already, which data must not change


class ScoreMoment(NamedTuple):
    """Second moments of samples and of their scores along orthonormal components.

    Those of several clients have a leading axis.
    """

    energy: float | Float[np.ndarray, " m"]  # mean squared norm of a sample
    scores: Float[np.ndarray, "*m r r"]
    rest: float | Float[np.ndarray, " m"]  # mean squared norm outside the components, positive


class Normal(NamedTuple):
    """A centred normal distribution with any covariance within the span of components.

    Outside the span, the variance is the same in all directions.

    Source: probabilistic PCA (Tipping & Bishop 1999), with given components.
    """

    basis: Float[np.ndarray, "d r"]  # orthonormal
    within: Float[np.ndarray, "r r"]  # covariance of the scores
    noise: float  # variance in each other direction
    units: Float[np.ndarray, " r"] | None = None  # of the scores; None for those of the samples

    @classmethod
    def fitted(cls, basis: Float[np.ndarray, "d r"], moment: ScoreMoment, noise: float) -> Self:
        """Fit to samples of a moment by maximum likelihood; no variance is below the noise."""
        return cls(basis, _at_least(noise, moment.scores), noise)

    def scores(self, samples: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n r"]:
        """Compute the coordinates of samples along the components, in the samples' precision."""
        found = samples @ self.basis.astype(samples.dtype)
        return found if self.units is None else found / self.units.astype(found.dtype)

    def reconstructed(self, scores: Float[np.ndarray, "n _r"]) -> Float[np.ndarray, "n d"]:
        """Compute samples from scores, of which only the first count where there are more."""
        own = scores[:, : self.basis.shape[1]]
        return (own if self.units is None else own * self.units) @ self.basis.T

    def log_likelihood(self, samples: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """Compute the log-likelihood of each sample's observed entries; NaN marks missing ones."""
        rank = self.basis.shape[1]
        observed = ~np.isnan(samples)
        known = np.where(observed, samples, 0).astype(float)
        # Over the observed features, the covariance is that of scores plus noise: B K Bᵀ + ψ I.
        covariance = self.within - self.noise * np.eye(rank)
        products = self.basis[:, :, None] * self.basis[:, None, :]
        gram = (observed @ products.reshape(-1, rank**2)).reshape(-1, rank, rank)
        matrix = self.noise * np.eye(rank) + gram @ covariance
        weights = np.linalg.solve(matrix, (known @ self.basis)[:, :, None])[:, :, 0]
        scores = weights @ covariance
        # By Woodbury's identity, with z the inverse covariance times x: `weights` is Bᵀz and the
        # residual ψ z. So xᵀz, which is zᵀ(B K Bᵀ + ψ I)z, is a sum of squares without
        # cancellation.
        left = np.sum((known - observed * (scores @ self.basis.T)) ** 2, axis=1)
        entries = observed.sum(axis=1)
        # det(B K Bᵀ + ψ I) = ψ^(entries - rank) det(ψ I + BᵀB K).
        log_det = (entries - rank) * np.log(self.noise) + np.linalg.slogdet(matrix)[1]
        near = np.sum(weights * scores, axis=1)
        return -(entries * np.log(2 * np.pi) + log_det + near + left / self.noise) / 2


class Description(NamedTuple):
    """Components as principal axes, and the distributions that they describe."""

    shared: Float[np.ndarray, "d _r"]
    local: Float[np.ndarray, "m d r2"]
    laws: list[Normal]  # of the clients
    law: Normal  # of samples whose client is not known
    noise_variance: float
    variance: Float[np.ndarray, " r"]  # the mean square of each score
    variance_ratio: Float[np.ndarray, " r"]  # the share of each score's variance in that of samples


def described(
    learned: Learned,
    data: Sequence[np.ndarray] | np.ndarray,
    counts: Float[np.ndarray, " m"],
    moment_of: Callable[[np.ndarray, np.ndarray], ScoreMoment],
) -> Description:
    """Describe components by one product with each client's data.

    Args:
        learned: the components.
        data: of each client.
        counts: the clients' numbers of samples.
        moment_of: `moment_of_samples`, or `moment_of_matrix` where data are second moments.
    """
    (shared, local, both, settled), rank = learned, learned.shared.shape[1]

    def moments_along(bases):
        each = [moment_of(x, basis) for x, basis in zip(data, bases, strict=True)]
        return ScoreMoment(*map(np.stack, zip(*each, strict=True)))

    moments = moments_along(beside(shared, v) for v in local)
    energy, scores, rest = pooled(moments, counts)
    # A basis is arbitrary: rotate to uncorrelated components in order of variance.
    rotation = np.eye(rank) if settled else axes(shared, scores[:rank, :rank])
    rotations = axes(local, moments.scores[:, rank:, rank:])
    shared, local = shared @ rotation, local @ rotations
    turn = np.zeros_like(moments.scores)
    turn[:, :rank, :rank], turn[:, rank:, rank:] = rotation, rotations
    inside = turn.mT @ moments.scores @ turn
    if both:
        moments = moments._replace(scores=inside)
    else:  # the moments' basis is not that of the components
        own = moments_along(local).rest
        moments = ScoreMoment(moments.energy, inside[:, rank:, rank:], own)
    # One variance for all clients: a client with few samples cannot estimate its own.
    together = pooled(moments, counts)
    noise = _noise_outside(together, len(shared))
    bases = (beside(shared, v) if both else v for v in local)
    within = _at_least(noise, moments.scores)
    laws = [Normal(*each, noise) for each in zip(bases, within, strict=True)]
    law = laws[0]  # whose client is known even without groups, if there is one
    if len(laws) > 1:  # the shared components alone
        along = np.trace(scores[:rank, :rank])
        rest = rest + np.trace(scores[rank:, rank:]) if both else energy - along
        rest = _positive(float(rest), EXACT, float(energy))
        whole = ScoreMoment(energy, rotation.T @ scores[:rank, :rank] @ rotation, rest)
        law = Normal.fitted(shared, whole, _noise_outside(whole, len(shared)))
    along = np.diagonal(together.scores)
    ratio = along / energy if energy > 0 else 0 * along
    return Description(shared, local, laws, law, noise, along, ratio)


def beside(
    shared: Float[np.ndarray, "d r1"], local: Float[np.ndarray, "d r2"]
) -> Float[np.ndarray, "d r"]:
    """Return the shared and then the local components; no copy if there are no local ones."""
    return np.concatenate([shared, local], axis=1) if local.size else shared


def moment_of_samples(
    samples: Float[np.ndarray, "n d"], basis: Float[np.ndarray, "d r"]
) -> ScoreMoment:
    """Compute both moments of samples, `n` not 0, in one product of their own precision."""
    basis, precision = basis.astype(samples.dtype), float(np.finfo(samples.dtype).eps)
    scores = samples @ basis
    double = scores.astype(float)
    moment, energy = double.T @ double / len(samples), _squares(samples) / len(samples)
    rest = energy - np.trace(moment)
    if rest < CLOSE * precision * energy:  # a difference of rounding errors
        rest = _squares(samples - scores @ basis.T) / len(samples)
    return ScoreMoment(energy, moment, _positive(rest, max(precision**2, EXACT), energy))


def moment_of_matrix(
    moment: Float[np.ndarray, "d d"], basis: Float[np.ndarray, "d r"]
) -> ScoreMoment:
    """Compute both moments of samples with this second moment."""
    energy, scores = float(np.trace(moment)), basis.T @ moment @ basis
    return ScoreMoment(energy, scores, _positive(energy - np.trace(scores), EXACT, energy))


def pooled(moments: ScoreMoment, counts: Float[np.ndarray, " m"]) -> ScoreMoment:
    """Return the moments of all samples together.

    Args:
        moments: of the clients.
        counts: the clients' numbers of samples.
    """
    energies, scores, rests = moments
    weights = counts / counts.sum()
    mean = np.tensordot(weights, scores, 1)
    return ScoreMoment(float(weights @ energies), mean, float(weights @ rests))


def _noise_outside(moment: ScoreMoment, features: int) -> float:
    """Return the variance per direction of samples outside their components."""
    return float(moment.rest / max(features - len(moment.scores), 1))


def _at_least(noise: float, scores: Float[np.ndarray, "*m r r"]) -> Float[np.ndarray, "*m r r"]:
    """Return moments without eigenvalues below the noise.

    `K` of `Normal.log_likelihood` is then positive semi-definite.
    """
    values, vectors = np.linalg.eigh(scores)
    return (vectors * np.maximum(values, noise)[..., None, :]) @ vectors.mT


def _positive(rest: float, share: float, energy: float) -> float:
    """Keep what is left above rounding errors: without any, the likelihood would be infinite."""
    return float(max(rest, share * energy) or np.finfo(float).tiny)


def axes(
    basis: Float[np.ndarray, "*m d r"], scores: Float[np.ndarray, "*m r r"]
) -> Float[np.ndarray, "*m r r"]:
    """Return the rotation of a basis to uncorrelated components in order of decreasing variance.

    The entry of largest magnitude of each component is positive.

    Args:
        basis: orthonormal components.
        scores: the second moment of their scores.
    """
    rotation = np.linalg.eigh(scores)[1][..., ::-1]
    turned = basis @ rotation
    largest = np.abs(turned).argmax(axis=-2, keepdims=True)
    largest = np.take_along_axis(turned, largest, axis=-2)
    return rotation * np.where(largest < 0, -1, 1)


def _squares(samples: Float[np.ndarray, "n d"]) -> float:
    """Return the sum of squares: of short pieces in their precision, of the pieces in double."""
    flat = samples.reshape(-1)
    whole = flat[: len(flat) // PIECE * PIECE].reshape(-1, PIECE)
    rest = flat[whole.size :].astype(float)
    return float(np.einsum("ij,ij->i", whole, whole).sum(dtype=float) + rest @ rest)
