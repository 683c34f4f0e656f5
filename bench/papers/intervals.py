"""Intervals of values that count as the same as a published one."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A published value and what counts as the same: anything from `low` to `high`.

    Attributes:
        low: the least value that is accepted.
        high: the largest one.
        text: what is printed for it.
        value: the published value, where it is not half-way between the two.
    """

    low: float
    high: float
    text: str
    value: float | None = None

    @property
    def accepted(self) -> str:
        """The two ends, with as many digits as their distance calls for."""
        if math.isinf(self.low):
            return f"<= {self.high:.4g}"
        if math.isinf(self.high):
            return f">= {self.low:.4g}"
        return f"[{self._rounded(self.low)}, {self._rounded(self.high)}]"

    @property
    def middle(self) -> float:
        """The published value, or what is half-way between the two ends."""
        return (self.low + self.high) / 2 if self.value is None else self.value

    def _rounded(self, end: float) -> str:
        texts = (f"{end:.{digits}g}" for digits in range(3, 17))
        width = self.high - self.low
        return next((text for text in texts if abs(float(text) - end) <= 0.005 * width), repr(end))


def around(mean: float, sd: float) -> Interval:
    """A mean over seeds, plus or minus two standard deviations."""
    return Interval(mean - 2 * sd, mean + 2 * sd, f"{mean:.4g} ± {sd:.2g}")


def near(value: float, tolerance: float) -> Interval:
    """A single number, plus or minus a tolerance."""
    return Interval(value - tolerance, value + tolerance, f"{value:.4g}")


def within(value: float, share: float) -> Interval:
    """A single number, plus or minus a share of itself."""
    return near(value, share * abs(value))


def between(low: float, high: float) -> Interval:
    """The range of a few runs, extended by half of its width on each side.

    The range of three runs is 1.7 standard deviations on average, so this is about `around` again.
    """
    half = (high - low) / 2
    return Interval(low - half, high + half, f"{low:.4g} to {high:.4g}")


def quartiles(low: float, middle: float, high: float) -> Interval:
    """A median with its quartiles, between which values count as the same."""
    return Interval(low, high, f"{middle:g} [{low:g}, {high:g}]", middle)


def draws(low: float, middle: float, high: float) -> Interval:
    """A median with the range of the reference's draws, within which medians count as the same."""
    return Interval(low, high, f"{middle:.3g} [{low:.3g}, {high:.3g}]", middle)


def few_draws(low: float, high: float) -> Interval:
    """`between` on a logarithmic scale, for a size that scatters by a factor."""
    room = math.sqrt(high / low)
    return Interval(low / room, high * room, f"{low:.3g} to {high:.3g}")


def about(value: float, factor: float = 2.0) -> Interval:
    """A size, up to a factor."""
    return Interval(value / factor, value * factor, f"{value:.2g}")


def at_least(value: float) -> Interval:
    """A lower bound."""
    return Interval(value, math.inf, f">= {value:.4g}")


def at_most(value: float) -> Interval:
    """An upper bound."""
    return Interval(-math.inf, value, f"<= {value:.4g}")


def to_digits(value: float) -> Interval:
    """A number without randomness: sums in another order change its eighth digit at most."""
    return near(value, 1e-7 * abs(value))


def interval(low: float, high: float, text: str) -> Interval:
    """Any other interval, with the text that is printed for it."""
    return Interval(low, high, text)
