"""Map a function over a leading axis, in blocks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree


def map_in_blocks(function: Callable[[PyTree], PyTree], arguments: PyTree, most: int) -> PyTree:
    """Map a function over a leading axis, in blocks of one size, of which one is held at a time.

    In its place, `jax.lax.map` with a `batch_size` that does not divide the length compiles the
    function twice.

    Args:
        function: of one element.
        arguments: arrays with the same leading axis.
        most: the largest size of a block.
    """
    count = len(jax.tree.leaves(arguments)[0])
    blocks = -(-count // most)
    if blocks <= 1:
        return jax.vmap(function)(arguments)
    size = -(-count // blocks)
    if blocks * size > count:
        # What fills the last block is computed and left out.
        places = jnp.minimum(jnp.arange(blocks * size), count - 1)
        arguments = jax.tree.map(lambda x: x[places], arguments)
    parted = jax.tree.map(lambda x: x.reshape(blocks, size, *x.shape[1:]), arguments)
    found = jax.lax.map(jax.vmap(function), parted)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], found)
