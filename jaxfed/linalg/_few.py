"""Leading eigenvectors of the second moment of few samples, with or without deflation.

Derivatives store nothing as large as the samples, except the samples themselves.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxfed.linalg import _jacobi
from jaxfed.linalg._factor import matmul, one_by_one
from jaxfed.linalg.basis import orthonormalize_once
from jaxfed.linalg.derivatives import DECOMPOSITION, constant
from jaxfed.linalg.division import reciprocal
from jaxfed.linalg.eigen import (
    Decomposition,
    Eigen,
    descending,
    perturbed,
    top_eigenvectors,
    with_sign,
)
from jaxfed.linalg.platforms import per_platform

Product = Callable[[Array, Array], Array]


def top_of_few(rows: Float[Array, "n d"], basis: Float[Array, "d b"], rank: int) -> Eigen:
    """The largest eigenvalues of `(I - B Bᵀ) Yᵀ Y (I - B Bᵀ)`, descending, and eigenvectors.

    It uses the n x n Gram matrix, for fewer samples Y than features; B has orthonormal columns, or
    none. Eigenvectors of zero eigenvalues complete the basis, and have no derivative. Otherwise it
    is as differentiable as `top_eigenvectors`; with respect to the basis, along changes that keep
    it orthonormal.
    """
    return _top(rows, basis, rank=rank)


# A CPU runs one client at a time, so that only one copy of samples exists at a time.
_kernel = one_by_one(
    lambda pair: (_of_rest(*pair),),
    tpu=lambda pair: (_of_rest(*pair, product=_jacobi.product),),
)


def _of_rest(rows, basis, product: Product = matmul):
    rest = rows - product(product(rows, basis), basis.T)
    return product(rest, rest.T)


def _gram(rows, basis, product: Product = matmul):
    return _kernel((rows, basis))[0] if basis.shape[1] else product(rows, rows.T)


def _beyond(basis, vectors, product: Product = matmul):
    if not basis.shape[1]:
        return vectors
    return vectors - product(basis, product(basis.T, vectors))


def _completed(rows, basis, values, scores, rank, product: Product = matmul):
    """Eigenvalues and eigenvectors in feature space, from those in sample space."""
    missing = rank - scores.shape[1]
    # `_back` multiplies by the samples themselves, which are not deflated, so deflate the few
    # vectors.
    vectors = _beyond(basis, _back(rows, scores, product), product)
    # Columns of zeros, which orthonormalization replaces by others that complete the basis.
    vectors = jnp.pad(vectors, ((0, 0), (0, missing)))
    return jnp.pad(values, (0, missing)), with_sign(orthonormalize_once(vectors))


def _back(rows, scores, product: Product = matmul):
    """`Yᵀ C` without transposing the samples, which a CPU would copy."""
    return product(scores.T, rows).T


def _values(
    rows: Float[Array, "n d"], basis: Float[Array, "d b"], rank: int, product: Product = matmul
) -> Eigen:
    # At most as many eigenvalues as samples can be positive.
    values, scores = top_eigenvectors(_gram(rows, basis, product), min(rank, len(rows)))
    return _completed(rows, basis, values, scores, rank, product)


def _rule(primals, tangents, rank):
    rows, basis = (constant(x, "eigenvectors") for x in primals)
    count = min(rank, len(rows))  # eigenvectors that the samples determine
    spectrum, scores = checkpoint_name(descending(_gram(rows, basis)), DECOMPOSITION)
    values, vectors = _completed(rows, basis, spectrum[:count], scores[:, :count], rank)
    info = jnp.finfo(rows.dtype)
    least = jnp.maximum(info.eps * len(rows) * spectrum[0], 1e5 * float(info.tiny))
    dropped, others = scores[:, count:], spectrum[count:, None]
    gaps = values - others
    clear = gaps > least
    # For equal eigenvalues the factor must cancel 1 / lambda, hence -1 / mu.
    reciprocals = jnp.where(clear, reciprocal(gaps, clear), -reciprocal(others, others > least))
    inverse = reciprocal(values, values > least)
    found = Decomposition(values, vectors, least, (dropped, reciprocals, inverse))
    return perturbed(primals, tangents, found, image=_image, resolvent=_resolvent)


# S is M = P Yᵀ Y P with P = I - B Bᵀ.
def _image(moment, x):
    rows, basis = moment
    return _beyond(basis, _back(rows, matmul(rows, _beyond(basis, x))))


# In sample space: with eigenvectors left out, P Yᵀ k, and their eigenvalues mu,
#     1 / (lambda - M) = 1 / lambda + sum  P Yᵀ k (1 / lambda (lambda - mu)) kᵀ Y P.
def _resolvent(moment, found, y):
    rows, basis = moment
    dropped, reciprocals, inverse = found.others
    z = _beyond(found.vectors, y) * inverse
    along = matmul(dropped.T, matmul(rows, _beyond(basis, z)))
    more = _back(rows, matmul(dropped, reciprocals * along))
    return z + _beyond(found.vectors, _beyond(basis, more))


_top = per_platform(_values, _rule, tpu=partial(_values, product=_jacobi.product))
