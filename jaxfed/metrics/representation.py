"""How well classes can be separated in a representation, computed with scikit-learn."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Real

from jaxfed._checks import check_name, check_positive, check_whole, checked_labels, checked_table
from jaxfed._optional import require
from jaxfed.metrics.clustering import Labels, clustering_accuracy


def svm_accuracy(
    train: Real[ArrayLike, "n d"],
    train_labels: Labels,
    test: Real[ArrayLike, "k d"],
    test_labels: Labels,
    *,
    kernel: Literal["linear", "rbf"] = "linear",
    penalty: float = 1.0,
) -> float:
    """Test accuracy of a support vector machine trained on a representation.

    It depends on the scale of the rows: multiply an orthonormal representation by the root of its
    number of rows to give it unit variance.

    Args:
        train: rows to train on.
        train_labels: their classes, at least two different ones.
        test: rows to classify.
        test_labels: their classes.
        kernel: `"linear"`, or `"rbf"` with scikit-learn's default width, features times variance.
        penalty: weight of the errors relative to the margin, C in the literature.

    Returns:
        The share of correct classes, from 0 to 1.

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if rows and labels do not match, numbers are not finite, there is one class
            only, the kernel is unknown, or the penalty is not positive.

    Source: Shrestha & Fu (2023), Section V-B; Cortes & Vapnik (1995), Support-vector networks.
    """
    rows, others = checked_table("train", train), checked_table("test", test)
    classes = checked_labels("train_labels", train_labels, len(rows))
    truth = checked_labels("test_labels", test_labels, len(others))
    if rows.shape[1] != others.shape[1]:
        raise ValueError(f"test: wanted {rows.shape[1]} features as train, got {others.shape[1]}")
    if len(np.unique(classes)) < 2:
        raise ValueError(f"train_labels: wanted two classes or more, got only {classes[0]}")
    check_name("kernel", kernel, ("linear", "rbf"))
    check_positive("penalty", penalty, single=True)
    svm = require("sklearn.svm", extra="data")
    # The classifier does not depend on a common mean, but its solver converges slowly far from it.
    mean = rows.mean(axis=0)
    rows, others = rows - mean, others - mean
    classifier = svm.SVC(kernel=kernel, C=penalty).fit(rows, classes)
    return float(np.mean(classifier.predict(others) == truth))


def spectral_clustering_accuracy(
    rows: Real[ArrayLike, "n d"],
    labels: Labels,
    *,
    gamma: float = 5.0,
    seed: int = 0,
) -> float:
    r"""Accuracy of spectral clustering into as many groups as there are classes.

    The affinity of two rows is \(\exp(-\gamma \|x - y\|^2)\), which depends on their scale.
    Groups are matched with classes as in `clustering_accuracy`.

    Args:
        rows: the rows to cluster.
        labels: true classes, at least two different ones.
        gamma: γ of the affinity, in units of an inverse squared distance.
        seed: seed of k-means in the spectral embedding.

    Returns:
        The share of rows in the right group, from 0 to 1.

    Raises:
        ImportError: if scikit-learn is not installed.
        ValueError: if rows and labels do not match, numbers are not finite, there is one class
            only, or `gamma` is not positive.

    Source: Ng, Jordan & Weiss (2002), On spectral clustering; Shrestha & Fu (2023), Figure 10.
    """
    table = checked_table("rows", rows)
    classes = checked_labels("labels", labels, len(table))
    kinds, codes = np.unique(classes, return_inverse=True)
    if len(kinds) < 2:
        raise ValueError(f"labels: wanted two classes or more, got only {classes[0]}")
    check_positive("gamma", gamma, single=True)
    check_whole("seed", seed, least=0)
    cluster = require("sklearn.cluster", extra="data")
    found = cluster.SpectralClustering(
        n_clusters=len(kinds), affinity="rbf", gamma=gamma, random_state=seed
    ).fit_predict(table - table.mean(axis=0))  # as squared distances are differences of squares
    return clustering_accuracy(jnp.asarray(codes), jnp.asarray(found))
