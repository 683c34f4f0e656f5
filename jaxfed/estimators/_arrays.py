"""Arrays as scikit-learn checks them, which has no types for it."""

from typing import Any

import numpy as np
from sklearn.utils import validation


def checked(given: Any, **wanted: Any) -> np.ndarray:
    """An array that is checked as `sklearn.utils.check_array` does.

    Raises:
        ValueError: as that does.
    """
    check: Any = validation.check_array
    return check(given, **wanted)


def checked_samples(estimator: Any, given: Any, **wanted: Any) -> np.ndarray:
    """Samples in single or double precision, checked against those of `fit` too.

    Raises:
        ValueError: as `sklearn.utils.validation.validate_data` does.
    """
    check: Any = validation.validate_data
    return check(estimator, given, dtype=[np.float64, np.float32], **wanted)
