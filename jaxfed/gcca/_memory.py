"""Block Lanczos iteration over rounds, for a server that is sent products with an operator.

Source: Wu & Simon (2000), Thick-restart Lanczos method for large symmetric eigenvalue problems.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.gcca.views import Scores
from jaxfed.linalg import matmul, polar, top_eigenvectors

# Relative error of a product up to which it is used again.
TRUST = 0.1
# How long a column must be outside the span of the others to join it, squared, in units of
# rounding error.
NOISE = 32


class Memory(NamedTuple):
    """Representations of earlier rounds, and their products with the operator.

    With exact maps, the mean score is a symmetric operator applied to the representation.
    """

    basis: Float[Array, "entities columns"]  # orthonormal; unused columns are zero
    products: Float[Array, "entities columns"]  # of the operator with the basis


def within_span(shared: Scores, memory: Memory, product: Scores) -> tuple[Scores, Memory]:
    """Apply the operator to the best representation in the span of the memory and the received one.

    For the best one, a Rayleigh-Ritz approximation, this product is known without a message. It
    extends the span by the same directions as the residual would, but unlike the residual it
    converges, so that messages change less and less.
    """
    rank, columns = shared.shape[1], memory.basis.shape[1]
    basis, products = _trusted(shared, memory, product)

    # Errors of products grow when columns are scaled. Only the new product has none, so the old
    # columns are made orthogonal to the new ones, and not the other way round.
    inside = matmul(shared.T, basis)
    old = basis - matmul(shared, inside)
    # Columns of rounding errors are left out. Rotating and scaling the others has no derivative,
    # because only their span matters.
    squares, turn = top_eigenvectors(jax.lax.stop_gradient(matmul(old.T, old)), columns)
    clear = squares > NOISE * jnp.finfo(squares.dtype).eps
    turn = turn * jnp.where(clear, jax.lax.rsqrt(jnp.where(clear, squares, 1)), 0)
    old = matmul(old, turn)
    again = matmul(shared.T, old)
    old = old - matmul(shared, again)
    inner, unused = matmul(old.T, old), jnp.diag(1 - clear.astype(old.dtype))
    scale = eye = jnp.eye(columns, dtype=old.dtype)
    for _ in range(2):
        # A Newton-Schulz step to orthonormal columns: values nearly are, but derivatives are not.
        half = 1.5 * eye - (inner + unused) / 2
        scale, inner = matmul(scale, half), matmul(half, matmul(inner, half))
    # What is done to the old columns, in one product each.
    old = matmul(old, scale)
    inside = matmul(matmul(inside, turn) + again, scale)
    images = matmul(products, matmul(turn, scale)) - matmul(product, inside)

    span = jnp.concatenate([shared, old], axis=1)
    images = jnp.concatenate([product, images], axis=1)
    # The operator is symmetric, so the new product alone says how new and old columns interact:
    # where it is right, errors of the others only slow the iteration down.
    beside, among = matmul(span.T, product), matmul(old.T, images[:, rank:])
    projected = jnp.concatenate([beside, jnp.concatenate([beside[rank:].T, among])], axis=1)
    # It has no negative eigenvalue, so zero columns come last.
    empty = jnp.pad(1 - clear.astype(span.dtype), (rank, 0))
    projected = (projected + projected.T) / 2 - jnp.diag(empty)
    # Computed twice, because the derivative of a span has no part within it.
    best = top_eigenvectors(projected, rank)[1]
    kept = top_eigenvectors(projected, columns)[1]
    # In the basis nearest to the received one, so that messages change little.
    best = matmul(best, polar(matmul(matmul(span, best).T, shared)))
    return polar(matmul(images, best)), Memory(matmul(span, kept), matmul(images, kept))


def _trusted(shared: Scores, memory: Memory, product: Scores) -> Memory:
    """Set columns to zero whose products disagree with the new product.

    Products are of one symmetric operator only if all clients took part and little was lost on the
    way. Otherwise `basis' (A shared)` differs from `(A basis)' shared`. An error that does not
    depend on the representation has the share `rank / entities` of its square in that difference.
    """
    basis, products = memory
    difference = matmul(basis.T, product) - matmul(products.T, shared)
    error = jnp.linalg.norm(difference, axis=1) * len(shared) ** 0.5
    kept = jax.lax.stop_gradient(error <= TRUST * jnp.linalg.norm(product))
    return Memory(basis * kept, products * kept)
