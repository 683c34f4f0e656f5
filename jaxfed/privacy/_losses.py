"""Distributions of the privacy loss of Gaussian messages, and their composition."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq
from scipy.stats import norm

# Standard deviations of a sum of losses on either side of its mean that are kept.
WIDTH = 14
LARGEST = 300.0  # exponent
PLACES = 2**18  # most losses of one sign of a message
CUT = 1e-6


class Losses(NamedTuple):
    """The privacy loss of one message, rounded up to multiples of a step."""

    places: Float[np.ndarray, " n"]
    logarithms: Float[np.ndarray, " n"]  # of the probabilities
    times: int  # messages
    beyond: float  # probability of a loss above the last place

    def tilted(self, tilt: float) -> tuple[Float[np.ndarray, " n"], float]:
        """Probabilities times exp(tilt * loss), normalized, and the logarithm of their sum."""
        found = self.logarithms + tilt * self.places
        weights = np.exp(found - found.max())
        return weights / weights.sum(), float(found.max() + np.log(weights.sum()))


def losses_of(
    ratio: float, shares: Sequence[float], times: int, step: float, delta: float
) -> Losses:
    """Round a message's privacy loss up, such that its guarantee is exact at multiples of a step.

    Args:
        ratio: how far one client or row can move the sum, relative to the noise's standard
            deviation.
        shares: the probabilities that a message is moved by one, by two ... of them; together 1 if
            an observer may know who sends.
        times: number of messages.
        step: distance between the losses.
        delta: losses with a total probability of `CUT` times this are cut off.
    """
    most = int(np.ceil(_longest(ratio, shares, CUT * delta / times) / step))
    places = np.arange(-most, most + 1) * step
    # Between two places, δ is linear in exp(ε): its slope changes at a place by the probability
    # there over exp(place).
    profile = _profile(places, ratio, shares)
    rises = np.diff(profile)
    after = np.append(rises / np.expm1(step), 0.0)
    before = np.append(profile[0] - 1, rises / -np.expm1(-step))
    found = np.maximum(after - before, np.finfo(float).tiny)
    return Losses(places, np.log(found), times, float(profile[-1]))


def step_of(ratio: float, shares: Sequence[float], times: int, delta: float) -> float:
    """About a sixteenth of the standard deviation of one message's loss.

    Rounding losses of 0 and of a part of a step up to a whole one would add to their variance.
    Arguments are those of `losses_of`.
    """
    deviation = sum(shares) * np.expm1(min(ratio, 1.0) ** 2) ** 0.5
    return max(float(deviation) / 16, _longest(ratio, shares, CUT * delta / times) / PLACES)


def _longest(ratio: float, shares: Sequence[float], delta: float) -> float:
    r"""An \(\varepsilon\) at which one message has at most this \(\delta\), nearly the smallest."""

    def suffices(epsilon: float) -> bool:
        return bool(_profile(np.array([epsilon]), ratio, shares)[0] <= delta)

    # Without a draw, the loss of one message is normal with mean ratio²/2 and standard deviation
    # ratio; a draw can only make it smaller.
    far = len(shares) * ratio
    low, high = 0.0, float(far * (far / 2 - norm.ppf(delta)))
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def composed(losses: Sequence[Losses], step: float, delta: float) -> float:
    """The epsilon of all messages together.

    The distribution of the sum of losses is a convolution. Probabilities below the rounding errors
    of a Fourier transform would be lost, and a small δ is made of these alone. So it is that of
    tilted losses, of which the sum that matters is the mean.
    """

    def moments(tilt: float) -> tuple[float, float, float]:
        total = mean = variance = 0.0
        for each in losses:
            weights, logarithm = each.tilted(tilt)
            first = weights @ each.places
            total, mean = total + each.times * logarithm, mean + each.times * first
            variance += each.times * (weights @ (each.places - first) ** 2)
        return total, float(mean), float(variance)

    def excess(tilt: float) -> float:
        """The logarithm of Chernoff's bound on the probability of the mean, over δ."""
        total, mean, _ = moments(tilt)
        return float(total - tilt * mean - np.log(delta))

    largest = 1.0
    while excess(largest) > 0:
        largest *= 2
    tilt = float(np.asarray(brentq(excess, 0, largest)))
    total, mean, variance = moments(tilt)
    reach = WIDTH * variance**0.5 + max(each.places[-1] for each in losses)
    size = 2 ** int(np.ceil(np.log2(2 * reach / step)))
    spectrum = np.ones(size // 2 + 1, complex)
    for each in losses:
        index = np.round(each.places / step).astype(int) % size
        spectrum *= np.fft.rfft(np.bincount(index, each.tilted(tilt)[0], size)) ** each.times
    index = np.arange(size) + round(mean / step) - size // 2
    tilted, from_mean = np.fft.irfft(spectrum, size)[index % size], index * step - mean
    near = np.abs(from_mean) <= WIDTH * variance**0.5  # all that rounding leaves
    tilted, from_mean = np.maximum(tilted[near], 0), from_mean[near]
    # Probabilities, and these over exp(loss), summed from each place on; all in units of `scale`.
    scale = np.exp(total - tilt * mean)
    # Far below the mean they may overflow, and do not count.
    found = tilted * np.exp(np.minimum(-tilt * from_mean, LARGEST))
    above = np.cumsum(found[::-1])[::-1]
    below = np.cumsum((found * np.exp(np.minimum(-from_mean, LARGEST)))[::-1])[::-1]
    wanted = (delta - sum(each.times * each.beyond for each in losses)) / scale
    missed = above - np.exp(np.minimum(from_mean - step, LARGEST)) * below > wanted
    if not missed.any():
        return float(mean + from_mean[0])
    last = np.flatnonzero(missed)[-1]
    return float(mean + np.log((above[last] - wanted) / below[last]))


def _profile(
    epsilon: Float[np.ndarray, " n"], ratio: float, shares: Sequence[float]
) -> Float[np.ndarray, " n"]:
    r"""The smallest \(\delta\) of one message for each \(\varepsilon\) of either sign."""
    size, share = np.abs(epsilon), min(sum(shares), 1.0)
    # The epsilon without a draw, which the draw reduces to this one.
    undrawn = size + np.log1p(-(1 - share) * np.exp(-size)) - np.log(share)
    delta = np.zeros(len(epsilon))
    for number, own in enumerate(shares, 1):
        # Theorem 8 of Balle & Wang at this epsilon, in logarithms against overflow.
        far = number * ratio
        above = norm.cdf(far / 2 - undrawn / far)
        below = np.exp(undrawn + norm.logcdf(-far / 2 - undrawn / far))
        delta += own * np.maximum(above - below, 0)
    # Either of the two data sets may come first.
    return np.clip(np.where(epsilon >= 0, delta, -np.expm1(-size) + np.exp(-size) * delta), 0, 1)
