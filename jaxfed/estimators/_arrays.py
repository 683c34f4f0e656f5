"""Typed wrappers of scikit-learn's array checks."""

from numbers import Real
from typing import Any

import numpy as np
from sklearn.utils import check_consistent_length, validation


def checked(given: Any, **wanted: Any) -> np.ndarray:
    """Call `sklearn.utils.check_array`."""
    check: Any = validation.check_array
    return check(given, **wanted)


def checked_samples(estimator: Any, given: Any, incomplete: bool, **wanted: Any) -> np.ndarray:
    """Call `sklearn.utils.validation.validate_data` for single- or double-precision samples."""
    check: Any = validation.validate_data
    finite = "allow-nan" if incomplete else True
    types = [np.float64, np.float32]
    return check(estimator, given, dtype=types, ensure_all_finite=finite, **wanted)


def client_labels(groups: Any, X: Any) -> np.ndarray:
    """Return the client of each row, all numbers or all names."""
    # From a mixed list, NumPy would convert numbers to strings.
    given: Any = groups if hasattr(groups, "dtype") else np.asarray(groups, object)
    if np.ndim(given) != 1:
        raise ValueError(f"groups: wanted one label for each row, got shape {np.shape(given)}")
    labels = checked(given, ensure_2d=False, dtype=None, input_name="groups")
    if labels.dtype == object:
        kinds = {next((k for k in (Real, str) if isinstance(x, k)), type(x)) for x in labels}
        if len(kinds) > 1 or type(None) in kinds:
            names = ", ".join(sorted({type(label).__name__ for label in labels}))
            raise ValueError(
                f"groups: wanted labels that are all numbers or all names, got {names}"
            )
        if kinds <= {Real, str}:
            labels = np.asarray(labels.tolist())
    check_consistent_length(X, labels)
    return labels
