"""Bases of subspaces, and the removal of rotations within a subspace from vectors.

Any orthonormal basis of a subspace represents it equally well. All of them form an orbit,
X -> X Q for rotations Q, and a linear map that is constant on the orbit is singular along its
tangents X Ω with skew Ω.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

Basis = Float[Array, "*clients features rank"]


class Bases(NamedTuple):
    """The matrices of a state whose columns can be rotated without changing its meaning.

    Attributes:
        shared: the server's bases; one rotation turns them all.
        along: ONE client's bases that turn with the shared ones.
        own: ONE client's bases that each turn independently.
    """

    shared: tuple[Basis, ...] = ()
    along: tuple[Basis, ...] = ()
    own: tuple[Basis, ...] = ()


def vertical_part(select: Callable[[PyTree], Bases], point: PyTree) -> Callable[[PyTree], PyTree]:
    """Project vectors at a point orthogonally onto the tangents of its orbit.

    Args:
        select: a linear function that picks the bases from a tree like `point`, none of them twice;
            clients' bases have a leading axis of clients.
        point: a tree of arrays.

    Returns:
        A linear function of trees like `point`.
    """
    # `select` is linear, so its transpose puts bases back where it found them, with zeros
    # elsewhere; algorithms need to declare one direction only.
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
    """The X Ω nearest to the vectors, with one skew Ω for all bases.

    Ω solves G Ω + Ω G = M - Mᵀ, where G and M are the sums of XᵀX and of XᵀV.
    """
    if not bases:
        return ()
    gram = jnp.asarray(sum(_product(x, x) for x in bases))
    mixed = jnp.asarray(sum(_product(x, v) for x, v in zip(bases, vectors, strict=True)))
    # Differentiate the equation, not its solution: the Gram matrix of orthonormal bases is a
    # multiple of the identity, where the derivative of its eigenvectors divides by zero.
    values, turn = jnp.linalg.eigh(jax.lax.stop_gradient(gram))
    sums = values[:, None] + values
    # Ω is free where both eigenvalues vanish, as for bases with zero columns; take zero.
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
