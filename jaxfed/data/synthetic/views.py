"""Views of Shrestha & Fu (2023) whose common class only nonlinear maps find."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxfed._checks import check_factor, check_whole, checked_dtype, checked_key


class NonlinearViews(NamedTuple):
    """Views of the same entities, and their classes.

    Attributes:
        views: the three views, `(entities, 2)` each.
        labels: each entity's class, 0 and 1 in turn.
    """

    views: list[Float[Array, "entities 2"]]
    labels: Int[Array, " entities"]


def nonlinear_views_synthetic(
    *, key: Key[Array, ""], entities: int = 10_000, noise: float = 0.1, dtype: Any = None
) -> NonlinearViews:
    """Draw three views of two-dimensional points of two classes that no line separates.

    View 1 has the classes on circles of radius 1 and 2. View 2 has them on the parabolas
    `y = 2 x²` and `y = 1 + x²/2`, with `x` uniform between -3 and 3. View 3 has one on a circle of
    radius 2 and the other in a normal distribution around its centre. Angles and `x` are drawn
    independently for each view, so the views have only the class in common.

    Args:
        key: random key.
        entities: number of entities, half of them in each class.
        noise: standard deviation of the noise in both coordinates, except for the normal
            distribution, which has 1.
        dtype: floating-point type; JAX's default if None.

    Returns:
        The views and the classes.

    Raises:
        ValueError: if there are fewer than two entities, or the noise is negative or not finite.

    Source: Shrestha & Fu (2023), Section V-B, after Benton et al. (2019), Deep generalized
    canonical correlation analysis; the constants are those of the authors' programs.
    """
    check_whole("entities", entities, least=2)
    check_factor("noise", noise, single=True)
    key = checked_key("key", key)
    kind = jnp.result_type(float) if dtype is None else checked_dtype("dtype", dtype)
    keys = jax.random.split(key, 7)
    labels = jnp.arange(entities, dtype=jnp.int32) % 2
    one = labels == 1

    def circle(key, radius):
        angle = jax.random.uniform(key, (entities,), kind, 0, 2 * jnp.pi)
        return radius * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)

    x = jax.random.uniform(keys[1], (entities,), kind, -3, 3)
    parabola = jnp.stack([x, jnp.where(one, 1 + x**2 / 2, 2 * x**2)], axis=1)
    cloud = jax.random.normal(keys[3], (entities, 2), kind)
    points = [circle(keys[0], jnp.where(one, 2, 1)[:, None]), parabola, circle(keys[2], 2)]
    noisy = [
        p + noise * jax.random.normal(k, p.shape, kind)
        for p, k in zip(points, keys[4:], strict=True)
    ]
    noisy[2] = jnp.where(one[:, None], cloud, noisy[2])
    return NonlinearViews(noisy, labels)
