"""Many runs in one compiled call."""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from jaxfed.core.algorithm import Algorithm
from jaxfed.core.clients import Clients
from jaxfed.core.run import Solution, rollout


def stack(trees: Sequence[PyTree]) -> PyTree:
    """Algorithms, clients or solutions of one structure, stacked along a new leading axis.

    Raises:
        ValueError: if there are none, or their structures, static fields or shapes differ.
    """
    if len(trees) == 0:
        raise ValueError("stack: nothing to stack")
    structures = {jax.tree.structure(tree) for tree in trees}
    if len(structures) > 1:
        raise ValueError(
            f"stack: ranks and other static fields must agree, got {sorted(map(str, structures))}"
        )
    shapes = {tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(tree)) for tree in trees}
    if len(shapes) > 1:
        raise ValueError(f"stack: shapes must agree, got {sorted(shapes)}")
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def sweep(
    algorithms: Algorithm | Sequence[Algorithm],
    clients: Clients | Sequence[Clients],
    *,
    keys: Key[Array, "*seeds"],
    rounds: int,
    block: int | None = None,
    **arguments: Any,
) -> Solution:
    """Run a whole grid, algorithms × data sets × seeds, as one compiled call.

    Args:
        algorithms: one algorithm, a list of them that differ in their floats only, or one whose
            floats carry a leading axis (`jax.vmap(lambda s: PerPCA(2, 3, step_size=s))(steps)`).
        clients: one data set, a list of equal shapes, or one with a leading axis.
        keys: one random key, or several along a leading axis.
        rounds: rounds of each run.
        block: how many runs go side by side; all by default. Smaller blocks need less memory.
        **arguments: passed on to `rollout`.

    Returns:
        One solution whose leaves carry a leading axis for each of algorithms, data sets and
        seeds that were several, in this order.

    Raises:
        ValueError: for grids whose members do not fit together, and as `rollout` does.
    """
    one_algorithm = algorithms if isinstance(algorithms, Algorithm) else stack(algorithms)
    one_clients = clients if isinstance(clients, Clients) else stack(clients)
    if block is not None and (not isinstance(block, int) or block <= 0):
        raise ValueError(f"block: wanted a positive whole number, got {block!r}")
    axes = (_several(one_algorithm), one_clients.ids.ndim == 2, jnp.ndim(keys) == 1)
    return _grid(one_algorithm, one_clients, keys, rounds, block, axes, arguments)


@eqx.filter_jit
def _grid(algorithms, clients, keys, rounds, block, axes, arguments):
    whole = (algorithms, clients, keys)
    sizes = [_length(part) for part, several in zip(whole, axes, strict=True) if several]
    total = math.prod(sizes)

    def one(number):
        # The run's place in the grid, the last axis fastest.
        places = list(jnp.unravel_index(number, sizes)) if sizes else []
        algorithm, data, key = (
            _picked(part, places.pop(0)) if several else part
            for part, several in zip(whole, axes, strict=True)
        )
        return rollout(algorithm, data, rounds=rounds, key=key, **arguments)

    if not sizes:
        return one(0)
    numbers = jnp.arange(total)
    # batch_size=None would run one after the other.
    size = min(block or total, total)
    runs = jax.lax.map(one, numbers, batch_size=size)
    return jax.tree.map(lambda leaf: leaf.reshape(*sizes, *leaf.shape[1:]), runs)


def _picked(tree: PyTree, place: Array) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[place] if jnp.ndim(leaf) else leaf, tree)


def _several(algorithm: Algorithm) -> bool:
    return any(jnp.ndim(leaf) > 0 for leaf in jax.tree.leaves(algorithm))


def _length(tree: PyTree) -> int:
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(tree) if jnp.ndim(leaf) > 0}
    if len(lengths) != 1:
        raise ValueError(f"algorithms: their floats need one common leading axis, got {lengths}")
    return lengths.pop()
