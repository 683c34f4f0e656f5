"""A line search along a retraction, for the strong Wolfe conditions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed.manifolds._space import chosen, inner, scaled
from jaxfed.manifolds._surface import Place, Surface

DECREASE = 1e-4
MOST = 20


class Trial(NamedTuple):
    """A point on the curve."""

    length: Float[Array, ""]
    place: Place
    slope: Float[Array, ""]  # of the function along the curve
    velocity: PyTree  # of the curve: the direction, transported by the retraction's differential


class _Search(NamedTuple):
    trial: Trial  # the last one
    low: Trial  # the lowest with a sufficient decrease
    other: tuple[Array, Array, Array]  # length, value and slope of the bracket's other end
    found: Bool[Array, ""]
    tried: Int[Array, ""]


def search(
    surface: Surface, here: Place, direction: PyTree, guess: Float[Array, ""], flatness: float
) -> tuple[Trial, Bool[Array, ""], Int[Array, ""]]:
    """Search for a point that satisfies the strong Wolfe conditions.

    There the function has decreased enough, and the magnitude of the slope along the curve is at
    most `flatness` times the initial one. Near a minimum, where rounding hides differences of
    values, slopes alone decide. The guess is the first length, as a multiple of the direction.

    Returns:
        The point, whether it is lower, and the number of points tried.

    Source: Nocedal & Wright (2006), Numerical optimization, Algorithms 3.5 and 3.6; Hager & Zhang
    (2005), A new conjugate gradient method with guaranteed descent, for the conditions by slopes.
    """
    value, slope = here.value, inner(here.gradient, direction)
    noise = 10 * jnp.finfo(value.dtype).eps * jnp.abs(value)
    nowhere = jnp.asarray(jnp.inf, value.dtype)

    def tried(length):
        point, velocity = jax.jvp(
            lambda t: surface.space.retract(here.point, scaled(t, direction)),
            (length,),
            (jnp.ones_like(length),),
        )
        place = surface.at(point)
        return Trial(length, place, inner(place.slope, velocity).astype(value.dtype), velocity)

    def enough(trial):
        return trial.place.value <= value + DECREASE * trial.length * slope

    # `low` and `other` are the ends of a bracket; until it is closed, `other` is at infinity.
    def judged(trial, low, other):
        # Hager & Zhang's approximate condition: the decrease that slopes at both ends imply, where
        # that of the values is lost to rounding.
        lower = enough(trial) | (
            (jnp.abs(trial.place.value - value) <= noise)
            & (trial.slope <= (2 * DECREASE - 1) * slope)
        )
        found = lower & (jnp.abs(trial.slope) <= flatness * jnp.abs(slope))
        better = lower & (trial.place.value <= low.place.value + noise)
        # The minimum lies on the side to which the function falls. If it rises towards the other
        # end, the bracket is now between the new point and the last lowest one.
        turned = better & (trial.slope * (other[0] - low.length) >= 0)
        ends = [(x.length, x.place.value, x.slope) for x in (trial, low)]
        other = chosen(better, chosen(turned, ends[1], other), ends[0])
        return chosen(better, trial, low), other, found

    def step(state):
        low, other = state.low, state.other
        width = other[0] - low.length
        closed = jnp.isfinite(width)
        length = _lowest(
            (low.length, low.place.value, low.slope),
            chosen(closed, other, (jnp.zeros_like(value), value, slope)),
        )
        share = (length - low.length) / jnp.where(closed, width, 1)
        # Stay within the bracket, not too near to its ends; before it is closed, go further out.
        inside = jnp.clip(share, 0.05, 0.95)
        inside = low.length + width * jnp.where(jnp.isnan(inside), 0.2, inside)
        beyond = jnp.where(length > low.length, length, jnp.inf)
        beyond = jnp.clip(beyond, 1.1 * low.length, 10 * low.length)
        length = jnp.where(closed, inside, beyond)
        # The guess is tried here too, so that the program has one trial.
        trial = tried(jnp.where(state.tried == 0, guess, length))
        low, other, found = judged(trial, low, other)
        return _Search(trial, low, other, found, state.tried + 1)

    start = Trial(jnp.zeros_like(value), here, slope.astype(value.dtype), direction)
    nothing, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    last = jax.lax.while_loop(
        lambda state: ~state.found & (state.tried < MOST),
        step,
        _Search(start, start, (nowhere, value, start.slope), no, nothing),
    )
    best = chosen(last.found, last.trial, last.low)
    # Where rounding hides differences of values, only a flat enough slope shows a lower point.
    return best, (best.length > 0) & (last.found | enough(best)), last.tried


def _lowest(one: tuple[Array, Array, Array], other: tuple[Array, Array, Array]) -> Array:
    """The minimum of the cubic with these lengths, values and slopes; NaN if there is none."""
    (a, at_a, slope_a), (b, at_b, slope_b) = other, one
    first = slope_a + slope_b - 3 * (at_a - at_b) / (a - b)
    second = jnp.sign(b - a) * jnp.sqrt(first**2 - slope_a * slope_b)
    return b - (b - a) * (slope_b + second - first) / (slope_b - slope_a + 2 * second)
