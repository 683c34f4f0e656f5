"""Typed wrappers of scikit-learn's checks of arrays."""

from typing import Any

import numpy as np
from sklearn.utils import validation


def checked(given: Any, **wanted: Any) -> np.ndarray:
    """`sklearn.utils.check_array`."""
    check: Any = validation.check_array
    return check(given, **wanted)


def checked_samples(estimator: Any, given: Any, **wanted: Any) -> np.ndarray:
    """`sklearn.utils.validation.validate_data` for samples in single or double precision."""
    check: Any = validation.validate_data
    return check(estimator, given, dtype=[np.float64, np.float32], **wanted)
