"""The exact privacy of Gaussian noise, in double precision."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr


def delta_of(epsilon: float, noise_multiplier: float) -> float:
    r"""The smallest \(\delta\) at an \(\varepsilon\), for noise relative to the sensitivity.

    Source: Balle & Wang (2018), Improving the Gaussian mechanism for differential privacy,
    Theorem 8.
    """
    return math.exp(_log_delta(epsilon, noise_multiplier))


def epsilon_of(noise_multiplier: float, delta: float) -> float:
    r"""The smallest \(\varepsilon\) at a \(\delta\); 0 if there is enough noise for that."""
    if _log_delta(0, noise_multiplier) <= math.log(delta):
        return 0.0
    high = 1.0
    while _log_delta(high, noise_multiplier) > math.log(delta):
        high *= 2
    return _root(lambda x: _log_delta(x, noise_multiplier) - math.log(delta), 0.0, high)


def noise_of(epsilon: float, delta: float) -> float:
    r"""The smallest noise multiplier of an \((\varepsilon, \delta)\)-private mechanism.

    Source: Balle & Wang (2018), Algorithm 1, which solves the same equation.
    """
    low = high = 1.0
    while _log_delta(epsilon, high) > math.log(delta):
        high *= 2
    while _log_delta(epsilon, low) < math.log(delta):
        low /= 2
    if low == high:
        return low
    return _root(lambda x: math.log(delta) - _log_delta(epsilon, x), low, high)


def composed(noise_multipliers: list[float]) -> float:
    r"""The multiplier of one release that is as private as several: \(1/\sigma^2\) adds up."""
    return math.fsum(sigma**-2 for sigma in noise_multipliers) ** -0.5


def _log_delta(epsilon: float, sigma: float) -> float:
    # With logarithms, because exp(epsilon) overflows and both probabilities underflow.
    near = float(log_ndtr(0.5 / sigma - epsilon * sigma))
    far = epsilon + float(log_ndtr(-0.5 / sigma - epsilon * sigma))
    share = -math.expm1(min(far - near, 0))
    return near + math.log(share) if share > 0 else -math.inf


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    rounding = 4 * np.finfo(float).eps
    found: Any = brentq(function, low, high, xtol=1e-300, rtol=rounding, maxiter=500)
    return float(found)
