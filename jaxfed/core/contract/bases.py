"""Bases that stand for subspaces: what turning them does, and how to take that out of a vector.

A state that holds an orthonormal basis of a subspace could hold any other one as well. All of them
together are an orbit, X -> X Q for rotations Q, and a linear map that leaves the orbit where it is
is singular along its tangents X Ω with skew Ω.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

Basis = Float[Array, "*clients features rank"]


class Bases(NamedTuple):
    """The matrices of a state whose columns may be turned without changing what it says.

    Attributes:
        shared: of the server's; all of them are turned by one rotation.
        along: of ONE client's, those that are turned by the same rotation as the shared ones.
        own: of ONE client's, those that are each turned by a rotation of their own.
    """

    shared: tuple[Basis, ...] = ()
    along: tuple[Basis, ...] = ()
    own: tuple[Basis, ...] = ()


def vertical_part(select: Callable[[PyTree], Bases], point: PyTree) -> Callable[[PyTree], PyTree]:
    """The orthogonal projection of vectors at a point onto the tangents of its orbit.

    Args:
        select: a linear function that picks the bases out of a tree like the point; those of
            clients have a leading axis of clients. No entry is picked twice.
        point: a tree of arrays.

    Returns:
        `f(vector)`, linear, for trees like the point.
    """
    bases, pick = jax.linearize(select, point)
    put = jax.linear_transpose(pick, point)

    def project(vector: PyTree) -> PyTree:
        together = bases.shared + bases.along
        picked = pick(vector)
        turned = _turned(together, picked.shared + picked.along)
        count = len(bases.shared)
        own = tuple(
            jax.vmap(lambda x, v: _turned((x,), (v,))[0])(x, v)
            for x, v in zip(bases.own, picked.own, strict=True)
        )
        return put(Bases(turned[:count], turned[count:], own))[0]

    return project


def _turned(bases: tuple[Basis, ...], vectors: tuple[Basis, ...]) -> tuple[Basis, ...]:
    """The X Ω nearest to the vectors, of one skew Ω for all of them.

    Ω solves G Ω + Ω G = M - Mᵀ, where G and M are the sums of XᵀX and of XᵀV.
    """
    if not bases:
        return ()
    gram = jnp.asarray(sum(_product(x, x) for x in bases))
    mixed = jnp.asarray(sum(_product(x, v) for x, v in zip(bases, vectors, strict=True)))
    # Derivatives go through the equation and not through its solution.
    values, turn = jnp.linalg.eigh(jax.lax.stop_gradient(gram))
    sums = values[:, None] + values
    known = sums > jnp.finfo(values.dtype).eps * len(values) * values[-1]

    def solve(product, right):
        del product
        inside = turn.T @ right @ turn
        return turn @ jnp.where(known, inside / jnp.where(known, sums, 1), 0) @ turn.T

    skew = jax.lax.custom_linear_solve(
        lambda omega: gram @ omega + omega @ gram, mixed - mixed.T, solve, symmetric=True
    )
    return tuple(x @ skew for x in bases)


def _product(x: Basis, v: Basis) -> Float[Array, "rank rank"]:
    """Xᵀ V, summed over clients."""
    return jnp.einsum("...dr,...ds->rs", x, v, precision=jax.lax.Precision.HIGHEST)
