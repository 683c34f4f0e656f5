"""How well classes can be told apart in a representation. On the host, through scikit-learn."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float, Int

from jaxfed._checks import check_name, check_positive, check_whole, checked_labels, checked_table
from jaxfed._optional import require
from jaxfed.metrics.clustering import clustering_accuracy


def svm_accuracy(
    train: Float[ArrayLike, "n d"],
    train_labels: Int[ArrayLike, " n"],
    test: Float[ArrayLike, "k d"],
    test_labels: Int[ArrayLike, " k"],
    *,
    kernel: Literal["linear", "rbf"] = "linear",
    penalty: float = 1.0,
) -> float:
    """Accuracy of a support vector machine that learns the classes from some rows, on others.

    It depends on the scale of the rows: bring an orthonormal representation to unit variance, times
    the root of its number of rows.

    Args:
        train: rows to learn from.
        train_labels: their classes, of two kinds at least.
        test: rows to classify.
        test_labels: their classes.
        kernel: `"linear"`, or `"rbf"` with a width of the number of features times their variance.
        penalty: weight of the errors against the margin, the C of the literature.

    Returns:
        The share of right classes, from 0 to 1.

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: for rows and labels that do not fit, NaN or infinite numbers, a single class, an
            unknown kernel and a penalty that is not positive.

    Source: Shrestha & Fu (2023), Section V-B; Cortes & Vapnik (1995), Support-vector networks.
    """
    rows, classes = _checked("train", train, train_labels)
    others, truth = _checked("test", test, test_labels)
    if rows.shape[1] != others.shape[1]:
        raise ValueError(f"test: wanted {rows.shape[1]} features as train, got {others.shape[1]}")
    if len(np.unique(classes)) < 2:
        raise ValueError(f"train_labels: wanted two classes or more, got only {classes[0]}")
    check_name("kernel", kernel, ("linear", "rbf"))
    check_positive("penalty", penalty, single=True)
    svm = require("sklearn.svm", extra="data")
    classifier = svm.SVC(kernel=kernel, C=penalty).fit(rows, classes)
    return float(np.mean(classifier.predict(others) == truth))


def spectral_clustering_accuracy(
    rows: Float[ArrayLike, "n d"],
    labels: Int[ArrayLike, " n"],
    *,
    gamma: float = 5.0,
    seed: int = 0,
) -> float:
    r"""Accuracy of spectral clustering into as many groups as there are classes.

    The affinity of two rows is \(\exp(-\gamma \|x - y\|^2)\), so that it depends on their scale.
    Groups are matched with classes as in `clustering_accuracy`.

    Args:
        rows: what to cluster.
        labels: true classes, of two kinds at least.
        gamma: the affinity's factor, one over a squared length.
        seed: of the k-means in the spectral embedding.

    Returns:
        The share of rows in the right group, from 0 to 1.

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: for rows and labels that do not fit, NaN or infinite numbers, a single class and
            a factor that is not positive.

    Source: Ng, Jordan & Weiss (2002), On spectral clustering; Shrestha & Fu (2023), Figure 10.
    """
    table, classes = _checked("rows", rows, labels, name_of_labels="labels")
    kinds, codes = np.unique(classes, return_inverse=True)
    if len(kinds) < 2:
        raise ValueError(f"labels: wanted two classes or more, got only {classes[0]}")
    check_positive("gamma", gamma, single=True)
    check_whole("seed", seed, least=0)
    cluster = require("sklearn.cluster", extra="data")
    found = cluster.SpectralClustering(
        n_clusters=len(kinds), affinity="rbf", gamma=gamma, random_state=seed
    ).fit_predict(table)
    return clustering_accuracy(jnp.asarray(codes), jnp.asarray(found))


def _checked(
    name: str, rows: Any, labels: Any, name_of_labels: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    table = checked_table(name, rows)
    return table, checked_labels(name_of_labels or f"{name}_labels", labels, len(table))
