"""The networks of deep GCCA: create them, separate their parameters, apply and train them."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Key, PyTree

from jaxfed.core.common.returned import described
from jaxfed.gcca.views import Scores, View

Maker = Callable[..., Any]  # network(features, *, mask, key)


def frame_of(network: Maker, features: int, dtype: DTypeLike) -> tuple[PyTree, PyTree]:
    """Return the shapes and types of a network's arrays, and the rest of the network."""

    def make(key, mask):
        return network(features, mask=mask, key=key)

    # Only shapes: each client draws the arrays from its own key.
    mask = jax.ShapeDtypeStruct((features,), dtype)
    made = eqx.filter_eval_shape(make, jax.random.key(0), mask)
    shapes, frame = eqx.partition(made, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return jax.eval_shape(lambda tree: _cast(tree, dtype), shapes), frame


def initial_arrays(
    network: Maker, key: Key[Array, ""], mask: Float[Array, " features"], dtype: DTypeLike
) -> PyTree:
    """Create the arrays of a new network."""
    made = network(len(mask), mask=mask, key=key)
    return _cast(eqx.filter(made, eqx.is_array), dtype)


def check_network(network: Maker, view: View, batch: int, rank: int) -> PyTree:
    """Check that a network fits a view, without computing values; return its arrays' shapes.

    Raises:
        ValueError: if the network fails for a batch of this size, has no parameters, or does not
            return one number per component of the rank.
    """
    features, dtype = view.shape[-1], view.values.dtype
    try:
        arrays, frame = frame_of(network, features, dtype)
        parameters = jax.tree.leaves(partition(eqx.combine(arrays, frame))[0])
        entities = jax.ShapeDtypeStruct((batch, features), dtype)
        outputs, _ = eqx.filter_eval_shape(
            lambda arrays, x: _in_training(eqx.combine(arrays, frame), x), arrays, entities
        )
    except Exception as error:  # the user's function may raise anything
        raise ValueError(
            f"network: it fails for batches of {batch} entities with {features} features: {error}"
        ) from error
    if not parameters:
        raise ValueError("network: wanted parameters, floating point arrays, got none")
    wanted = (batch, rank)
    if getattr(outputs, "shape", None) != wanted or outputs.dtype != dtype:
        raise ValueError(
            f"network: wanted outputs of shape {wanted} and type {dtype}, one for each "
            f"component of the rank, got {described(outputs)}"
        )
    return arrays


def partition(network: Any) -> tuple[PyTree, PyTree]:
    """Return a network's parameters, and the rest of the network."""
    trained = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _inexact(leaf) and not _is_statistic(path), network
    )
    return eqx.partition(network, trained)


def with_statistics(network: Any, statistics: PyTree) -> Any:
    """Return the network with other running statistics."""
    # Both trees have their leaves in the same order.
    leaves = iter(jax.tree.leaves(statistics))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: next(leaves) if _is_statistic(path) else leaf, network
    )


def applied(network: Any, values: Float[Array, "n features"]) -> Float[Array, "n rank"]:
    """Return the network's outputs, computed with its running statistics."""
    return network(values) if hasattr(network, "statistics") else jax.vmap(network)(values)


def scores_of(network: Any, values: Float[Array, "entities features"]) -> Scores:
    """Return the scores `S(X) / sqrt(L)` of a view."""
    return applied(network, values) / len(values) ** 0.5


def loss(
    parameters: PyTree, rest: PyTree, batch: Float[Array, "b features"], targets: Scores
) -> tuple[Float[Array, ""], PyTree]:
    """Return half the mean squared error of a batch's outputs, and the next running statistics."""
    outputs, statistics = _in_training(eqx.combine(parameters, rest), batch)
    # A sum of squares, as in (8a) of Shrestha & Fu. The authors' programs minimize the norm itself,
    # over all views stacked, which couples the views' gradients.
    return jnp.sum((outputs - targets) ** 2) / (2 * len(batch)), statistics


def _in_training(network: Any, batch: Float[Array, "b features"]) -> tuple[Array, PyTree]:
    if hasattr(network, "statistics"):
        return network.in_training(batch)
    return jax.vmap(network)(batch), None


def _is_statistic(path: tuple[Any, ...]) -> bool:
    return path[0] == jax.tree_util.GetAttrKey("statistics")


def _inexact(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return is_array and jnp.issubdtype(leaf.dtype, jnp.floating)


def _cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype) if _inexact(x) else x, tree)
