"""Typed wrappers of scikit-learn's array checks."""

import warnings
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from sklearn.utils import check_consistent_length, validation

from jaxfed._checks import refuse
from jaxfed._numbers import unmasked
from jaxfed._rows import rows_of_each
from jaxfed.core.clients.checks import on_device, zeros_to_lend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples


def checked(given: Any, **wanted: Any) -> np.ndarray:
    """Call `sklearn.utils.check_array`."""
    check: Any = validation.check_array
    return check(unmasked(given), **wanted)


def checked_samples(estimator: Any, given: Any, incomplete: bool, **wanted: Any) -> np.ndarray:
    """Call `sklearn.utils.validation.validate_data` for single- or double-precision samples."""
    check: Any = validation.validate_data
    finite = "allow-nan" if incomplete else True
    types = [np.float64, np.float32]
    return check(estimator, unmasked(given), dtype=types, ensure_all_finite=finite, **wanted)


MOST = float(np.finfo(float).max) ** 0.8  # of weights: sums of weighted squares stay finite
LEAST = 1 / MOST


class Rows(NamedTuple):
    """Rows of a table, and how often each counts."""

    X: np.ndarray
    labels: np.ndarray  # of their clients
    weights: np.ndarray | None  # positive; None if each counts once


def weighted(X: np.ndarray, labels: np.ndarray, sample_weight: Any) -> Rows:
    """Return the rows of positive weight, in double precision.

    Raises:
        ValueError: if weights are of another number, negative, not finite, too small or too large,
            or fewer than two are positive.
    """
    check: Any = validation._check_sample_weight
    weights = check(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    kept = weights > 0
    for largest in (weights.max(initial=0), weights.sum()):
        if largest and not LEAST < largest < MOST:
            raise refuse("sample_weight", f"weights from {LEAST:.0e} to {MOST:.0e}", largest)
    if kept.sum() < 2:
        raise refuse("sample_weight", "two positive weights or more", int(kept.sum()))
    return Rows(X[kept].astype(float), labels[kept], weights[kept])


def mean_of(X: np.ndarray) -> np.ndarray:
    """Return the mean row, without the errors that many rows in single precision add up to."""
    return X.mean(axis=0, dtype=np.float64).astype(X.dtype)


def median_of_means(
    X: np.ndarray, places: Int[np.ndarray, " n"], weights: np.ndarray | None = None
) -> np.ndarray:
    """Return the median, per feature, of the clients' mean rows, from the entries that are not NaN.

    Source: Nemirovsky & Yudin (1983), as `jaxfed.preprocess.Standardize` with `robust`.
    """
    clients = rows_of_each(places)
    with warnings.catch_warnings():  # of a client without an entry of some feature
        warnings.simplefilter("ignore", RuntimeWarning)
        if weights is None:
            means = [np.nanmean(X[own], axis=0, dtype=np.float64) for own in clients]
        else:
            means = [np.average(X[own], axis=0, weights=weights[own]) for own in clients]
    return np.nanmedian(means, axis=0).astype(X.dtype)


def scale_of(
    X: np.ndarray, places: Int[np.ndarray, " n"], mean: np.ndarray, robust: bool
) -> np.ndarray:
    """Return each feature's standard deviation over all entries that are not NaN, in double.

    Args:
        X: samples as rows, `(n, d)`.
        places: the client of each row, `(n,)`.
        mean: of the features, up to rounding, `(d,)`.
        robust: use the medians of the clients' means and mean squares instead of those of all rows.

    Source: as `jaxfed.preprocess.Standardize` with `scale="shared"`.
    """
    clients = rows_of_each(places) if robust else [slice(None)]
    first, second = [], []
    with warnings.catch_warnings():  # of a client without an entry of some feature
        warnings.simplefilter("ignore", RuntimeWarning)
        for own in clients:
            apart = np.subtract(X[own], mean, dtype=np.float64)
            first.append(np.nanmean(apart, axis=0))
            second.append(np.nanmean(np.square(apart, out=apart), axis=0))
    variance = np.nanmedian(second, axis=0) - np.nanmedian(first, axis=0) ** 2
    return deviation(variance, mean, X.dtype)


def deviation(variance: np.ndarray, mean: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the root of variances; where it is rounding of the mean, that, and one if it is zero.

    See `deviation` of `jaxfed.preprocess.standardize`, which is for arrays of JAX.
    """
    size = np.abs(mean.astype(float))
    found = np.sqrt(np.maximum(variance, 0))
    return np.where(found <= 8 * np.finfo(dtype).eps * size, np.where(size > 0, size, 1), found)


def check_energies(X: np.ndarray, groups: np.ndarray) -> None:
    """Refuse samples whose sums of squares overflow.

    Args:
        X: samples as rows; NaN for missing entries.
        groups: the client of each row.

    Raises:
        ValueError: names a client and its largest entry.
    """
    with np.errstate(over="ignore"):
        rows = np.einsum("ij,ij->i", X, X)
        if np.isnan(rows).any():
            rows = np.nansum(np.square(X), axis=1)
    most = np.finfo(X.dtype).max
    if rows.sum(dtype=np.longdouble) <= most:  # as nearly always
        return
    labels, places = np.unique(groups, return_inverse=True)
    energies = np.bincount(places, rows.astype(float))
    for place in np.flatnonzero(energies > most):
        largest = np.nanmax(np.abs(X[places == place]))
        raise ValueError(
            f"X: wanted samples whose squares add up to a finite {X.dtype} number, got "
            f"{largest:.3g} in group {labels[place]}"
        )


def clients_of(
    X: np.ndarray,
    places: Int[np.ndarray, " n"],
    mean: np.ndarray | None,
    scale: np.ndarray | None = None,
) -> tuple[Clients, list[np.ndarray]]:
    """Make clients from rows that are known to be finite, copied once or not at all.

    Args:
        X: samples as rows, `(n, d)`. It must not change as long as the clients are in use.
        places: the client of each row, `(n,)`; clients count from 0, and each has a row.
        mean: to subtract, `(d,)`; None to subtract nothing.
        scale: to divide by, `(d,)`; None to divide by nothing.

    Returns:
        The clients, and the samples of each as rows of the same memory.
    """
    counts = np.bincount(places)
    if len(counts) == 1 and mean is None and scale is None:
        block = X[None]
    else:
        block = zeros_to_lend((len(counts), int(counts.max()), X.shape[1]), X.dtype)
        for i, rows in enumerate(rows_of_each(places)):
            np.subtract(X[rows], 0 if mean is None else mean, out=block[i, : counts[i]])
        if scale is not None:
            block /= scale
    data = Samples(on_device(block, fresh=True), on_device(counts.astype(X.dtype)))
    weights = on_device(np.full(len(counts), 1 / len(counts), X.dtype))
    clients = Clients(data, on_device(np.arange(len(counts), dtype=np.int32)), weights)
    return clients, [own[:count] for own, count in zip(block, counts, strict=True)]


def check_entries(X: np.ndarray) -> None:
    """Refuse samples without any entry.

    Raises:
        ValueError: names the first one.
    """
    empty = np.flatnonzero(np.isnan(X).all(axis=1))
    if len(empty):
        raise ValueError(
            f"X: wanted an entry that is not missing in each sample, got none in row {empty[0]}"
        )


def client_labels(groups: Any, X: Any, name: str = "groups") -> np.ndarray:
    """Return the client, or whatever `name` says, of each row, all numbers or all names."""
    # From a mixed list, NumPy would convert numbers to strings.
    given: Any = groups if hasattr(groups, "dtype") else np.asarray(groups, object)
    if np.ndim(given) != 1:
        raise ValueError(f"{name}: wanted one label for each row, got shape {np.shape(given)}")
    labels = checked(given, ensure_2d=False, dtype=None, input_name=name)
    if labels.dtype == object:
        kinds = {next((k for k in (Real, str) if isinstance(x, k)), type(x)) for x in labels}
        if len(kinds) > 1 or type(None) in kinds:
            names = ", ".join(sorted({type(label).__name__ for label in labels}))
            raise ValueError(
                f"{name}: wanted labels that are all numbers or all names, got {names}"
            )
        if kinds <= {Real, str}:
            labels = np.asarray(labels.tolist())
    check_consistent_length(X, labels)
    return labels
