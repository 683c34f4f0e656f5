"""Views of Shrestha & Fu (2023): a common factor for linear maps, a common class for others."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxfed._checks import (
    check_factor,
    check_number,
    check_whole,
    checked_dtype,
    checked_key,
    counts_of,
    is_list,
    refuse,
)


class GCCAData(NamedTuple):
    """Views of the same entities, and what they have in common.

    Attributes:
        views: one `(entities, features)` array per view.
        latent: the common scores `Z`.
        mixing: each view's mixing matrix `A_j`.
    """

    views: list[Float[Array, "entities features"]]
    latent: Float[Array, "entities latent"]
    mixing: list[Float[Array, "latent features"]]


def gcca_synthetic(
    key: PRNGKeyArray,
    *,
    views: int = 3,
    entities: int = 500,
    features: int | Sequence[int] = 25,
    latent: int = 20,
    noise: float = 0.1,
    densities: tuple[float, float, float] = (1.0, 1.0, 1.0),
    dtype: Any = None,
) -> GCCAData:
    r"""Views with a common latent factor, \(X_j = Z A_j + \sigma E_j\).

    All of `Z`, `A_j` and `E_j` are Gaussian, or sparse with Gaussian entries. The defaults are the
    small setting of the paper.

    Args:
        key: random key.
        views: number of views.
        entities: number of entities.
        features: number of features, one for all or one per view.
        latent: number of latent dimensions.
        noise: standard deviation of the noise (the paper's programs take the 0.1 that it calls
            a variance as one).
        densities: shares of the entries of `Z`, `A_j` and `E_j` that are not zero. The paper's
            large setting has 0.01, 0.0005 and 0.001.
        dtype: floating-point type; JAX's default if None.

    Returns:
        The views, and the truth.

    Raises:
        ValueError: for counts that are not positive, a negative noise, densities outside (0, 1].

    Source: Shrestha & Fu (2023), Section V-A1; Fu, Huang, Hong, Sidiropoulos & So (2017).
    """
    for name, value in (("views", views), ("entities", entities), ("latent", latent)):
        check_whole(name, value)
    widths = counts_of("features", features, views)
    check_factor("noise", noise, single=True)
    if not is_list(densities) or len(densities) != 3:
        raise refuse("densities", "three numbers in (0, 1]", densities)
    for density in densities:
        check_number("densities", density, "numbers in (0, 1]", lambda x: (x > 0) & (x <= 1))
    key, kind = checked_key("key", key), _dtype(dtype)
    of_latent, of_mixing, of_noise = (float(density) for density in densities)

    def gaussian(key, density, *shape):
        if density == 1:
            return jax.random.normal(key, shape, kind)
        present, value = jax.random.split(key)
        kept = jax.random.bernoulli(present, density, shape)
        return kept * jax.random.normal(value, shape, kind)

    latent_key, *keys = jax.random.split(key, views + 1)
    scores = gaussian(latent_key, of_latent, entities, latent)
    arrays, mixing = [], []
    for width, view_key in zip(widths, keys, strict=True):
        mixing_key, noise_key = jax.random.split(view_key)
        matrix = gaussian(mixing_key, of_mixing, latent, width)
        arrays.append(scores @ matrix + noise * gaussian(noise_key, of_noise, entities, width))
        mixing.append(matrix)
    return GCCAData(arrays, scores, mixing)


def _dtype(given: Any) -> Any:
    """The type asked for; JAX's default for None."""
    default = jax.dtypes.canonicalize_dtype(float)
    return default if given is None else checked_dtype("dtype", given)


class NonlinearViews(NamedTuple):
    """Views of the same entities, and the classes of these.

    Attributes:
        views: the three views, `(entities, 2)` each.
        labels: each entity's class, 0 and 1 in turn.
    """

    views: list[Float[Array, "entities 2"]]
    labels: Int[Array, " entities"]


def nonlinear_views_synthetic(
    key: PRNGKeyArray, *, entities: int = 10_000, noise: float = 0.1, dtype: Any = None
) -> NonlinearViews:
    """Three views of two-dimensional points of two classes that no line divides.

    View 1 has the classes on circles of radius 1 and 2. View 2 has them on the parabolas
    `y = 2 x²` and `y = 1 + x²/2`, with `x` uniform between -3 and 3. View 3 has one on a circle of
    radius 2 and the other in a normal distribution around its centre. Angles and `x` are drawn
    anew for each view: the class is all that the views have in common.

    Args:
        key: random key.
        entities: number of entities, half of them in each class.
        noise: standard deviation of the noise in both coordinates, that of the normal distribution
            apart, which is 1.
        dtype: floating-point type; JAX's default if None.

    Returns:
        The views and the classes.

    Raises:
        ValueError: for fewer than two entities, and a noise that is negative or not finite.

    Source: Shrestha & Fu (2023), Section V-B, after Benton et al. (2019), Deep generalized
    canonical correlation analysis; the constants are those of the authors' programs.
    """
    check_whole("entities", entities, least=2)
    check_factor("noise", noise, single=True)
    key, kind = checked_key("key", key), _dtype(dtype)
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
