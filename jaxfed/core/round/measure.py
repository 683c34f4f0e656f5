"""The stopping measure: an estimate of how far the objective lies above a stationary point.

It is relative to the objective, or to a scale that the algorithm says. It takes several rounds, so
that one round that hardly moves does not end a run.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.core.contract.remarks import ENOUGH

WINDOW = ENOUGH  # rounds from which an objective alone tells how much it will still fall
LATEST = 3  # rounds in a block of gains; two blocks tell how fast gains shrink
HORIZON = 1000  # gains that hardly shrink count as those of so many further rounds
SLOWEST = 100  # the same of an objective's blocks
GROWTH = 1.05  # of gains, where a run leaves a saddle
LEAST = 1e-9  # below, gains are rounding
FLOOR = 1e-3  # of the first objective: what counts as the size of one that ends near zero
ROUNDING = 1e4  # the same in rounding errors of what the components capture, if it is known

Scalar = Float[Array, ""]
Window = Float[Array, " window"]


def size_of(
    objective: Scalar, first: Scalar, captured: Scalar | float, scale: Scalar | None
) -> Scalar:
    """Return what gains are relative to, which is positive.

    Args:
        objective: of the round.
        first: of the first round.
        captured: the variance that the components capture; 0 if it is not known.
        scale: the size, if the algorithm says it.
    """
    size = jnp.maximum(jnp.abs(objective), FLOOR * jnp.abs(first))
    size = jnp.maximum(size, ROUNDING * jnp.finfo(size.dtype).eps * captured)
    size = size if scale is None else scale.astype(size.dtype)
    return jnp.maximum(jax.lax.stop_gradient(size), jnp.finfo(size.dtype).tiny)


def extended(window: Window, value: Scalar) -> Window:
    """Replace the oldest value of a window by a new one."""
    return jnp.append(window[1:], jax.lax.stop_gradient(value).astype(window.dtype))


def left_by_gains(gains: Window) -> Scalar:
    """Return what all further rounds will gain, if gains shrink as they did; or infinity.

    Args:
        gains: of the last rounds, relative to the objective; NaN before the first.
    """
    latest, before = gains[-LATEST:], gains[-2 * LATEST : -LATEST]
    last, earlier = latest.mean(), before.mean()
    shrinking = jnp.cbrt(last / jnp.maximum(earlier, jnp.finfo(gains.dtype).tiny))
    left = latest.max() / jnp.maximum(1 - shrinking, 1 / HORIZON)
    grows = (last > GROWTH * earlier) & (last > LEAST)
    return _known(jnp.where(grows, jnp.inf, left))


def left_by_objectives(objectives: Window) -> Scalar:
    """Return how much an objective will still change, by the means of three blocks of rounds.

    Args:
        objectives: of the last rounds, relative to the last one; NaN before the first.
    """
    blocks = objectives.reshape(3, -1)
    one, two = jnp.abs(jnp.diff(blocks.mean(axis=1)))
    # Second differences of what scatters have six times its variance.
    scatter = jnp.sqrt(jnp.mean(jnp.diff(objectives[-8:], n=2) ** 2) / 6 / blocks.shape[1])
    rounding = 4 * jnp.finfo(objectives.dtype).eps
    last = jnp.maximum(two + scatter - rounding, 0)
    shrinking = two / jnp.maximum(one, rounding)
    return _known(last / jnp.maximum(1 - shrinking, 1 / SLOWEST))


def _known(left: Scalar) -> Scalar:
    # NaN compares false with a tolerance, and would end the run as if it had converged.
    return jnp.where(jnp.isnan(left), jnp.inf, left)
