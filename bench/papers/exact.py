"""Problems without a random number, on which runs are compared digit by digit.

Tables of means over seeds do not notice a rule that is applied a round early or a step that is
twice as long, where the iteration ends at the same place. The first rounds do. The reference's
values are those of `tests/references`; a test computes them anew.
"""

import math

import numpy as np
from jaxtyping import Float

from papers.report import Interval, near

DIGITS = 1e-7  # relative: sums in another order, over some rounds


def waves(*shape: int) -> Float[np.ndarray, "..."]:
    """Numbers from -1 to 1 that look like chance and are none."""
    places = np.arange(1, math.prod(shape) + 1)
    return np.cos(places**2 * (5**0.5 - 1) / 2).reshape(shape)


def frame(features: int, rank: int) -> Float[np.ndarray, "features rank"]:
    """An orthonormal basis of such numbers."""
    return np.linalg.qr(waves(features, rank))[0]


def to_digits(value: float) -> Interval:
    """What agrees with the reference in seven digits."""
    return near(value, DIGITS * abs(value))
