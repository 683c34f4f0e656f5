"""Choose between runs from several starts."""

from collections.abc import Sequence

import numpy as np

from jaxfed.core.run.solution import Solution
from jaxfed.multi_start import TIE


def best_of(tried: Sequence[Solution]) -> Solution:
    """Return the run that ended lowest, the first of those that count as equal.

    Args:
        tried: runs from several starts; those that failed are not the best.
    """
    ends = np.array([each.history["objective"][-1] for each in tried])
    least = np.nanmin(ends)
    return tried[int(np.argmax(ends <= least + TIE * abs(least)))]
