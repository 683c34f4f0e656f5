"""Ten principal components of one table, beside scikit-learn's `PCA`."""

from functools import partial

import numpy as np

WORK, ANSWER, DIGITS, RANK = "PCA", "of the variance", 6, 10
CLIENTS = 10  # among which jaxfed's samples are divided


def digits(seed):
    """Images of digits, in double precision."""
    from sklearn.datasets import load_digits

    return {"x": np.random.default_rng(seed).permutation(load_digits().data)[:1700]}


def planted(seed, samples, features):
    """Samples with variances that fall like those of real data, in single precision."""
    x = np.random.default_rng(seed).standard_normal((samples, features), np.float32)
    return {"x": x / np.sqrt(1 + np.arange(features, dtype=np.float32))}


def jaxfed():
    from jaxfed.estimators import FederatedPCA

    def solve(data):
        groups = np.repeat(np.arange(CLIENTS), len(data["x"]) // CLIENTS)
        return FederatedPCA(RANK).fit(data["x"], groups=groups).components_

    return solve


def scikit_learn():
    from sklearn.decomposition import PCA

    return lambda data: PCA(RANK, random_state=0).fit(data["x"]).components_


def answer(data, components):
    """The share of the variance along the components."""
    x = data["x"] - data["x"].mean(0)
    return np.sum(np.square(x @ np.linalg.qr(components.T)[0])) / np.sum(x * x)


CASES = {
    "1,700 digits x 64": digits,
    "100,000 x 50": partial(planted, samples=100_000, features=50),
    "5,000 x 2,000": partial(planted, samples=5_000, features=2_000),
}
SIDES = {"jaxfed": jaxfed, "scikit-learn": scikit_learn}
