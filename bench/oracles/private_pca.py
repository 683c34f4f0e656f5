"""Measure the private PCA of others on breast cancer data, all in one place.

    python -m bench.oracles.private_pca

`bench.tables.release` measures that of jaxfed. The interpreter needs diffprivlib 0.6.6,
'opendp[scikit-learn]' 0.16, randomgen and scikit-learn 1.5.2; jaxfed is not imported. Both are
given the true centre and the true bound of the rows. Their guarantees have no delta. A number is
the share of variance that five components explain, of what the best five do: the mean of ten draws.
Random components explain 0.20.
"""

import importlib
import warnings
from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_breast_cancer

RANK, DRAWS = 5, 10
EPSILONS = 0.1, 0.3, 1.0, 3.0  # beyond, their sampling takes many minutes


def diffprivlib(x: np.ndarray, bound: float, epsilon: float, seed: int) -> np.ndarray:
    """Components as rows."""
    models = importlib.import_module("diffprivlib.models")
    options = {"centered": True, "data_norm": bound, "random_state": seed}
    return models.PCA(RANK, epsilon=epsilon, **options).fit(x).components_


def opendp(x: np.ndarray, bound: float, epsilon: float, seed: int) -> np.ndarray:
    """Components as rows; the draw is the system's."""
    del seed
    features = "contrib", "idealized-numerics", "honest-but-curious"
    importlib.import_module("opendp.prelude").enable_features(*features)
    kind = importlib.import_module("opendp.extras.sklearn.decomposition").PCA
    sizes = {"n_samples": len(x), "n_features": x.shape[1], "n_components": RANK}
    return kind(epsilon=epsilon, row_norm=bound, **sizes).fit(x).components_[:RANK]


def mean_share(of: Callable[..., np.ndarray], epsilon: float) -> float:
    """The mean share of variance over draws."""
    x = load_breast_cancer(return_X_y=True)[0]
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    best = np.sum(np.linalg.svd(x, compute_uv=False)[:RANK] ** 2)
    bound = float(np.linalg.norm(x, axis=1).max())
    bases = (np.linalg.qr(of(x, bound, epsilon, seed).T)[0] for seed in range(DRAWS))
    return float(np.mean([np.sum((x @ basis) ** 2) / best for basis in bases]))


def main() -> None:
    """Print the shares."""
    warnings.simplefilter("ignore")  # of the bound, which comes from the data
    for epsilon in EPSILONS:
        shares = [mean_share(of, epsilon) for of in (diffprivlib, opendp)]
        print(f"{epsilon:g}  diffprivlib {shares[0]:.2f}  OpenDP {shares[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
