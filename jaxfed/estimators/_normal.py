"""The normal distribution that components describe, and the likelihood of samples."""

from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float


class Learned(NamedTuple):
    """The components that a run has learned."""

    shared: Float[np.ndarray, "d _r"]  # also used for samples of unknown clients
    local: Float[np.ndarray, "m d r2"]
    beside: bool  # whether clients have local components beside the shared ones, or only local ones


class Normal(NamedTuple):
    """A centred normal distribution with any covariance within the span of components.

    Outside the span, the variance is the same in all directions.

    Source: probabilistic PCA (Tipping & Bishop 1999), with given components.
    """

    basis: Float[np.ndarray, "d r"]  # orthonormal
    within: Float[np.ndarray, "r r"]  # covariance of the scores
    noise: float  # variance in each other direction

    @classmethod
    def fitted(
        cls, basis: Float[np.ndarray, "d r"], samples: Float[np.ndarray, "n d"], noise: float
    ) -> Self:
        """Fit to samples by maximum likelihood; no variance is smaller than the noise."""
        scores = samples @ basis
        # With eigenvalues of at least the noise, K of `log_likelihood` is positive semi-definite.
        values, vectors = np.linalg.eigh(scores.T @ scores / max(len(samples), 1))
        return cls(basis, (vectors * np.maximum(values, noise)) @ vectors.T, noise)

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


def noise_outside(
    bases: Float[np.ndarray, "m d r"],
    tables: list[Float[np.ndarray, "n_i d"]],
    counts: Float[np.ndarray, " m"],
) -> float:
    """Return the variance per direction of all samples outside their client's components.

    Args:
        bases: the clients' components.
        tables: for each client, rows with the second moment of its samples.
        counts: the clients' numbers of samples.
    """
    features, rank = bases.shape[1:]
    total, along = _pooled(bases, tables, counts)
    # Without any noise, the likelihood would be infinite.
    least = np.finfo(np.float32).eps * max(total, 1e-30) / features
    return float(max((total - along.sum()) / max(features - rank, 1), least))


def variance_ratio(
    bases: Float[np.ndarray, "m d r"],
    tables: list[Float[np.ndarray, "n_i d"]],
    counts: Float[np.ndarray, " m"],
) -> Float[np.ndarray, " r"]:
    """Return the share of each score's variance in that of all samples, as for `noise_outside`."""
    total, along = _pooled(bases, tables, counts)
    return along / total if total > 0 else 0 * along


def _pooled(
    bases: Float[np.ndarray, "m d r"],
    tables: list[Float[np.ndarray, "n_i d"]],
    counts: Float[np.ndarray, " m"],
) -> tuple[float, Float[np.ndarray, " r"]]:
    """Return the variance of all samples together, in total and of each score."""
    found = [
        (np.sum(x**2) / len(x), np.sum((x @ basis) ** 2, axis=0) / len(x))
        for x, basis in zip(tables, bases, strict=True)
    ]
    total, along = (
        np.average(np.stack(each), axis=0, weights=counts) for each in zip(*found, strict=True)
    )
    return float(total), along


def principal(
    basis: Float[np.ndarray, "d r"], tables: list[Float[np.ndarray, "n_i d"]]
) -> Float[np.ndarray, "d r"]:
    """Rotate a basis to uncorrelated components in order of decreasing variance.

    All clients have the same weight. The entry of largest magnitude of each component is positive.
    """
    moment = sum((x @ basis).T @ (x @ basis) / len(x) for x in tables)
    turned = basis @ np.linalg.eigh(moment)[1][:, ::-1]
    largest = np.take_along_axis(turned, np.argmax(np.abs(turned), axis=0)[None], axis=0)
    return turned * np.where(largest < 0, -1, 1)
