"""Rotations of components to a simple structure, which is easier to name than principal axes."""

from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jaxfed._checks import check_flag, check_name, check_positive, checked_array, refuse
from jaxfed.linalg.division import ratio
from jaxfed.linalg.svd import not_rounding, singular_values
from jaxfed.manifolds import minimise

STARTS = 4

Method = Literal["varimax", "quartimax", "promax"]


class Rotated(NamedTuple):
    """The result of `rotate`."""

    loadings: Float[Array, "*m d r"]
    matrix: Float[Array, "*m r r"]  # the given loadings times it are the rotated ones
    correlations: Float[Array, "*m r r"]  # of the rotated components' scores


def rotate(
    loadings: Float[ArrayLike, "*m d r"],
    method: Method = "varimax",
    *,
    normalize: bool = False,
    power: float = 4.0,
) -> Rotated:
    r"""Rotate loadings until each component has few large entries.

    Algorithms learn a subspace, and any basis of it fits as well: the rotated components span the
    same one. So shared components are rotated among themselves, and each client's local components
    by themselves. Rotate principal axes times the standard deviations of their scores, as factor
    analysis does; after a rotation, scores no longer have a decreasing variance.

    * `"varimax"` maximizes the variance of the squared loadings of each component;
    * `"quartimax"` maximizes the sum of all fourth powers, so that each feature has few components,
      often with one component that all features have;
    * `"promax"` rotates by varimax, and then turns each component towards the loadings' own power,
      which makes the scores of components correlated.

    Components are sorted by their sums of squares, and the entry of largest magnitude of each is
    positive. The result is the best optimum of four starts, which are always the same. Works under
    `jit` and `vmap`, and has derivatives.

    Args:
        loadings: of one set of components, or with leading axes, of which each matrix is rotated by
            itself, such as `solution.result.local`.
        method: the criterion.
        normalize: whether features count equally (Kaiser's normalization, the default in R).
        power: for `"promax"`, the power that small loadings are lowered by.

    Returns:
        The rotated loadings, the matrix that rotates, and the correlations of the scores if those
        of the given loadings are uncorrelated with variance one: the identity, but for `"promax"`.

    Raises:
        ValueError: if the loadings are not finite matrices (unless traced), or of more components
            than features, the method is unknown, or the power is not positive.

    Source: Kaiser (1958), The varimax criterion for analytic rotation in factor analysis; Neuhaus &
    Wrigley (1954), The quartimax method; Hendrickson & White (1964), Promax: a quick method for
    rotation to oblique simple structure.
    """
    check_name("method", method, get_args(Method))
    check_flag("normalize", normalize)
    check_positive("power", power, single=True)
    array = checked_array("loadings", loadings, "... features rank", finite=True, half=True)
    if array.shape[-1] > array.shape[-2]:
        raise refuse("loadings", "at most as many components as features", array)
    return _all_rotated(array, power, method=method, normalize=bool(normalize))


@partial(jax.jit, static_argnames=("method", "normalize"))
def _all_rotated(
    loadings: Float[Array, "*m d r"], power: Float[ArrayLike, ""], method: Method, normalize: bool
) -> Rotated:
    def rotated(loadings):
        return _rotated(loadings, power, method, normalize)

    for _ in loadings.shape[:-2]:
        rotated = jax.vmap(rotated)
    # Half precisions are computed in single.
    found = rotated(loadings.astype(jnp.promote_types(loadings.dtype, jnp.float32)))
    return jax.tree.map(lambda x: x.astype(loadings.dtype), found)


def _rotated(
    loadings: Float[Array, "d r"], power: Float[ArrayLike, ""], method: Method, normalize: bool
) -> Rotated:
    # In units in which no fourth power over- or underflows.
    unit = jax.lax.stop_gradient(jnp.max(jnp.abs(loadings)))
    scaled = ratio(loadings, unit)
    lengths = jnp.linalg.norm(scaled, axis=1, keepdims=True)
    rows = ratio(scaled, lengths) if normalize else scaled
    matrix = _orthogonal(rows, mean=0.0 if method == "quartimax" else 1.0)
    if method == "promax":
        matrix = matrix @ _oblique(scaled @ matrix, power)
    turned = scaled @ matrix
    order = jnp.argsort(-jnp.sum(turned**2, axis=0))
    largest = jnp.take_along_axis(turned, jnp.argmax(jnp.abs(turned), axis=0)[None], axis=0)[0]
    matrix = (matrix * jnp.where(largest < 0, -1, 1))[:, order]
    inverse = jnp.linalg.inv(matrix)
    return Rotated(loadings @ matrix, matrix, inverse @ inverse.T)


def _orthogonal(loadings: Float[Array, "d r"], mean: float) -> Float[Array, "r r"]:
    """Maximize the sum of fourth powers, less `mean` times those that equal squares would have."""

    def criterion(matrix):
        squares = (loadings @ matrix) ** 2
        lost = jnp.sum(jnp.sum(squares, axis=0) ** 2) / len(squares)
        return mean * lost - jnp.sum(squares**2)

    def ended(start):
        found = minimise(criterion, start, solver="trust_regions")
        return found.point, found.value

    # Principal axes can lie halfway between the components that are sought, where the gradient is
    # zero, so starts are somewhere else.
    rank = loadings.shape[1]
    draws = jax.random.normal(jax.random.key(0), (STARTS, rank, rank), loadings.dtype)
    points, values = jax.vmap(ended)(jnp.linalg.qr(draws)[0])
    return points[jnp.argmin(values)]


def _oblique(loadings: Float[Array, "d r"], power: Float[ArrayLike, ""]) -> Float[Array, "r r"]:
    """Return the matrix that turns rotated loadings towards their own power."""
    # Dependent components cannot be told apart and stay as they are.
    independent = jnp.all(not_rounding(singular_values(loadings), loadings.shape))
    loadings = jnp.where(independent, loadings, jnp.eye(*loadings.shape, dtype=loadings.dtype))
    size = jnp.abs(loadings)
    target = loadings * jnp.where(size > 0, size, 1) ** (power - 1)
    matrix = jnp.linalg.lstsq(loadings, target)[0]
    # Scores keep the variance one.
    return matrix * jnp.sqrt(jnp.diagonal(jnp.linalg.inv(matrix.T @ matrix)))
