"""Symmetric matrices as their upper triangles, row by row, which have about half the numbers."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def to_triangle(matrix: Float[Array, "d d"]) -> Float[Array, " size"]:
    """Return the d (d + 1) / 2 numbers of a symmetric matrix's upper triangle."""
    return matrix[jnp.triu_indices(len(matrix))]


def from_triangle(triangle: Float[Array, " size"]) -> Float[Array, "d d"]:
    """Return the symmetric matrix with this upper triangle."""
    # Solve d (d + 1) / 2 = size for d.
    dim = int(((8 * triangle.size + 1) ** 0.5 - 1) / 2)
    rows, columns = jnp.triu_indices(dim)
    upper = jnp.zeros((dim, dim), triangle.dtype).at[rows, columns].set(triangle)
    return upper.at[columns, rows].set(triangle)
