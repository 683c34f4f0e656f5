"""Empirical-Bayes PCA in plain NumPy and SciPy: dense matrices, clients one after the other.

Shares no code with the library. The normalizing constant is the formula as Butler & Wood (2002)
print it, (16), and all derivatives of it are numeric, by a complex step.
"""

import numpy as np
from scipy import optimize

from tests.references.hierarchical import moments, polar, pooled, top

FASTEST = 100.0  # times EM's own step


def log_hypergeometric(x, rank, features):
    """Logarithm of the approximate 1F1(r/2; d/2; x I_r)."""
    a, b = rank / 2, features / 2
    y = 2 * a / (b - x + np.sqrt((x - b) ** 2 + 4 * a * x))
    curvature = y**2 / a + (1 - y) ** 2 / (b - a)
    each = a * np.log(y / a) + (b - a) * np.log((1 - y) / (b - a)) + x * y
    pairs = rank * (rank + 1) / 2
    return (rank * b - pairs / 2) * np.log(b) - pairs / 2 * np.log(curvature) + rank * each


def log_mean(gap, rank, features):
    """log C(gap VV'), less that of its largest exponent."""
    return log_hypergeometric(gap / 2, rank, features) - gap * rank / 2


def expected_distance(concentration, rank, features, step=1e-30):
    """Minus twice the slope of it."""
    return -2 * np.imag(log_mean(concentration + 1j * step, rank, features)) / step


def posterior(matrix, rank):
    """Its logarithm of a normalizing constant, and the mean projector, pair by pair."""
    d = len(matrix)
    values, vectors = np.linalg.eigh(matrix)
    values, vectors = values[::-1], vectors[:, ::-1]
    log_constant, weights = values[:rank].sum() / 2, np.repeat([1.0, 0.0], [rank, d - rank])
    for j in range(rank):
        for k in range(rank, d):
            gap = values[j] - values[k]
            log_constant += log_mean(gap, rank, d) / (rank * (d - rank))
            lost = expected_distance(gap, rank, d) / (rank * (d - rank))
            weights[j] -= lost
            weights[k] += lost
    return log_constant, vectors @ np.diag(weights) @ vectors.T


def expectation_maximization(samples, rank, noise, rounds):
    """V and the U_i in the end; of every round the objective, and the prior variance after it."""
    d = samples[0].shape[1]
    precisions = [len(y) / (noise * (1 + noise)) for y in samples]
    likelihood = [c * s for c, s in zip(precisions, moments(samples), strict=True)]
    shared, concentration = pooled(samples, rank), np.mean(precisions)
    objectives, variances, before = [], [], None
    for _ in range(rounds):
        prior = concentration * shared @ shared.T
        found = [posterior(matrix + prior, rank) for matrix in likelihood]
        constant = [
            len(y) / 2 * (d * np.log(noise) + rank * np.log(1 + 1 / noise))
            + np.sum(y**2) / (2 * noise)
            for y in samples
        ]
        log_prior = log_hypergeometric(concentration / 2, rank, d)
        objectives.append(np.mean(constant) + log_prior - np.mean([one for one, _ in found]))
        mean = np.mean([projector for _, projector in found], axis=0)
        distance = rank - np.trace(shared.T @ mean @ shared)
        fitted = optimize.brentq(
            lambda x, distance=distance: expected_distance(np.exp(x), rank, d) - distance,
            np.log(1e-3),
            np.log(1e4),
            xtol=1e-13,
        )
        place = np.log(concentration)
        move, faster = fitted - place, 1.0
        if before is not None:
            # Where the secant through the last two moves crosses zero, if it does ahead.
            slope = (move - before[1]) / (place - before[0])
            if slope < 0 and abs(move - before[1]) < abs(place - before[0]):
                faster = np.clip(-1 / slope, 1, FASTEST)
        before = place, move
        concentration = np.exp(place + faster * move)
        variances.append(1 / concentration)
        shared = polar(mean @ shared)
    own = [top(matrix + concentration * shared @ shared.T, rank) for matrix in likelihood]
    return shared, own, np.asarray(objectives), np.asarray(variances)
