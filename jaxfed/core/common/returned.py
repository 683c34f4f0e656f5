"""Checks what methods from outside of this library return."""

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


def returned(
    owner: object, method: str, result: Any, like: Any = ..., what: str = "{}", argument: str = ""
) -> Any:
    """Return what a method returned, if it is what the caller wants.

    Args:
        owner: the object with the method.
        method: its name.
        result: what it returned.
        like: a class; or arrays, or their shapes, whose structure, shapes and types are wanted. By
            default any tree of arrays.
        what: how to describe the wanted arrays, with `{}` for their types and shapes.
        argument: the argument that the owner is, if any.

    Raises:
        ValueError: if it returned anything else; the message names the method.
    """
    if isinstance(like, type) and not isinstance(result, like):
        wanted = f"a {like.__name__}" if what == "{}" else what
        raise broken(owner, method, wanted, result, argument)
    for leaf in jax.tree.leaves(result):
        if not is_number(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
            raise broken(owner, method, "arrays", leaf, argument)
    if like is ... or isinstance(like, type):
        return result
    wanted, given = jax.tree.map(
        lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), (like, result)
    )
    if not alike(wanted, given):
        raise broken(owner, method, what.format(described(wanted)), given, argument)
    return result


def broken(owner: object, method: str, wanted: str, given: Any, argument: str = "") -> ValueError:
    """The error for a method that breaks its contract; the caller raises it.

    Args:
        owner: the object with the method.
        method: its name.
        wanted: what it should have returned.
        given: what it returned.
        argument: the argument that the owner is, if any.
    """
    name = f"{type(owner).__name__}.{method}"
    where = f"{argument}: wanted of {name}" if argument else f"{name}: wanted"
    return ValueError(f"{where} {wanted}, got {described(given)}")
