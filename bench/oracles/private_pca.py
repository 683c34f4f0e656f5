"""Measure diffprivlib's PCA of breast cancer data, all in one place, beside `bench.tables.release`.

    python -m bench.oracles.private_pca

The interpreter needs diffprivlib and the scikit-learn that it supports; jaxfed is not imported. It
is given the true centre and the true bound of the rows. Its guarantee has no delta. A number is the
share of variance that five components explain, of what the best five do: the mean of ten draws.
"""

import importlib
import warnings

import numpy as np
from sklearn.datasets import load_breast_cancer

RANK, DRAWS = 5, 10


def main() -> None:
    """Print the shares."""
    warnings.simplefilter("ignore")  # of the bound, which comes from the data
    models = importlib.import_module("diffprivlib.models")
    x = load_breast_cancer(return_X_y=True)[0]
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    best = np.sum(np.linalg.svd(x, compute_uv=False)[:RANK] ** 2)
    bound = np.linalg.norm(x, axis=1).max()
    for epsilon in (0.3, 1.0, 3.0):
        shares = []
        for seed in range(DRAWS):
            options = {"centered": True, "data_norm": bound, "random_state": seed}
            model = models.PCA(RANK, epsilon=epsilon, **options).fit(x)
            basis = np.linalg.qr(model.components_.T)[0]
            shares.append(np.sum((x @ basis) ** 2) / best)
        print(f"{epsilon:g}  {np.mean(shares):.2f}", flush=True)


if __name__ == "__main__":
    main()
