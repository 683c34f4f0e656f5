"""Checks the arrays that functions from outside of this library return."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


def is_number(leaf: Any) -> bool:
    """Whether JAX can trace this leaf."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def alike(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have the same structure, shapes and types."""
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def described(tree: PyTree) -> str:
    """A tree in one line, with the types and shapes of its arrays."""
    return " ".join(eqx.tree_pformat(tree, struct_as_array=True).split())


def check_arrays(where: str, given: Any) -> None:
    """Check that a function returned a tree of arrays, or of their shapes.

    Args:
        where: the beginning of the message, which names the function.
        given: what the function returned.

    Raises:
        ValueError: if the tree contains anything else.
    """
    for leaf in jax.tree.leaves(given):
        if not is_number(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(f"{where} arrays, got {leaf!r}")


def check_alike(where: str, wanted: PyTree, given: Any, why: str = "") -> None:
    """Check that a function returned arrays with the wanted structure, shapes and types.

    Args:
        where: the beginning of the message, which names the function.
        wanted: such arrays, or their shapes.
        given: what the function returned.
        why: a description of the wanted arrays, for the message.

    Raises:
        ValueError: if it returned anything else.
    """
    check_arrays(where, given)
    wanted, given = jax.tree.map(
        lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), (wanted, given)
    )
    if not alike(wanted, given):
        raise ValueError(f"{where} {described(wanted)}{why}, got {described(given)}")
