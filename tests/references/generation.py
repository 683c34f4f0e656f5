"""Distances between sets of features and the noise of an image, as plain as can be."""

import numpy as np
import scipy.linalg
import scipy.signal


def frechet(a, b):
    """By the general matrix square root of the product of the covariances."""
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    root = scipy.linalg.sqrtm(cov_a @ cov_b).real
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a + cov_b - 2 * root)


def kernel(a, b):
    """By a double loop over samples."""

    def mean(x, y, *, same):
        pairs = [
            (x[i] @ y[j] / len(x[i]) + 1) ** 3
            for i in range(len(x))
            for j in range(len(y))
            if not (same and i == j)
        ]
        return np.mean(pairs)

    return mean(a, a, same=True) + mean(b, b, same=True) - 2 * mean(a, b, same=False)


def jackknife(estimate, a, b):
    """Standard error by leaving out one row after the other."""
    variance = 0.0
    for x, others in ((a, lambda x: estimate(x, b)), (b, lambda x: estimate(a, x))):
        without = np.array([others(np.delete(x, i, axis=0)) for i in range(len(x))])
        variance += (len(x) - 1) / len(x) * ((without - without.mean()) ** 2).sum()
    return np.sqrt(variance)


def noise(image):
    """By a convolution with the mask."""
    mask = np.array([[1, -2, 1], [-2, 4, -2], [1, -2, 1]])
    response = scipy.signal.convolve2d(image, mask, mode="valid")
    height, width = image.shape
    return np.sqrt(np.pi / 2) * np.abs(response).sum() / (6 * (width - 2) * (height - 2))
