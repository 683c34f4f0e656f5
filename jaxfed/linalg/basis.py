"""Orthonormal bases."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def orthonormalize(w: Float[Array, "d r"], method=None) -> Float[Array, "d r"]:
    """Orthonormal basis by QR with a positive diagonal of R."""
    q, r = jnp.linalg.qr(w)
    sign = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(w.dtype)
    return q * sign


def top_eigenvectors(matrix: Float[Array, "d d"], rank: int):
    """Largest eigenvalues (descending) and their eigenvectors."""
    values, vectors = jnp.linalg.eigh(matrix)
    vectors = vectors[:, ::-1][:, :rank]
    pivot = jnp.take_along_axis(vectors, jnp.argmax(jnp.abs(vectors), 0)[None], 0)
    return values[::-1][:rank], vectors * jnp.where(pivot < 0, -1, 1).astype(matrix.dtype)
