"""The normal distribution that components describe, and the likelihood of samples under it."""

from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float


class Normal(NamedTuple):
    """A centred normal distribution with any covariance within the span of components.

    Outside of the span, the variance is the same in all directions.

    Source: probabilistic PCA (Tipping & Bishop 1999), with the components given.
    """

    basis: Float[np.ndarray, "d r"]  # orthonormal
    within: Float[np.ndarray, "r r"]  # covariance of the scores
    noise: float  # variance in each other direction

    @classmethod
    def fitted(
        cls, basis: Float[np.ndarray, "d r"], samples: Float[np.ndarray, "n d"], noise: float
    ) -> Self:
        """The maximum likelihood fit to samples; no variance is smaller than the given noise."""
        scores = samples @ basis
        values, vectors = np.linalg.eigh(scores.T @ scores / max(len(samples), 1))
        return cls(basis, (vectors * np.maximum(values, noise)) @ vectors.T, noise)

    def log_likelihood(self, samples: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """The log-likelihood of each sample."""
        features, rank = self.basis.shape
        scores = samples @ self.basis
        # The covariance is block diagonal: one block within the span, a multiple of I outside it.
        left = np.maximum(np.sum(samples**2, axis=1) - np.sum(scores**2, axis=1), 0)
        _, log_det = np.linalg.slogdet(self.within)
        log_det += (features - rank) * np.log(self.noise)
        near = np.sum(scores * np.linalg.solve(self.within, scores.T).T, axis=1)
        return -(features * np.log(2 * np.pi) + log_det + near + left / self.noise) / 2


def noise_outside(
    bases: Float[np.ndarray, "m d r"], tables: list[Float[np.ndarray, "n_i d"]]
) -> float:
    """Mean variance per direction of the clients' samples outside of their components."""
    features, rank = bases.shape[1:]
    left = [
        (np.sum(x**2) - np.sum((x @ basis) ** 2)) / len(x)
        for x, basis in zip(tables, bases, strict=True)
    ]
    total = np.mean([np.sum(x**2) / len(x) for x in tables])
    # Without noise at all, the likelihood would be infinite.
    least = np.finfo(np.float32).eps * max(total, 1e-30) / features
    return float(max(np.mean(left) / max(features - rank, 1), least))


def principal(
    basis: Float[np.ndarray, "d r"], tables: list[Float[np.ndarray, "n_i d"]]
) -> Float[np.ndarray, "d r"]:
    """The same span with uncorrelated components in descending order of variance.

    Every client has the same weight. Signs are fixed: the largest entry of a component is positive.
    """
    moment = sum((x @ basis).T @ (x @ basis) / len(x) for x in tables)
    turned = basis @ np.linalg.eigh(moment)[1][:, ::-1]
    largest = np.take_along_axis(turned, np.argmax(np.abs(turned), axis=0)[None], axis=0)
    return turned * np.where(largest < 0, -1, 1)
