"""Orthonormal bases: of the columns of a tall matrix, of the leading eigenvectors of a moment."""

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxfed._checks import check_whole, checked_array, refuse
from jaxfed.linalg._factor import (
    Factors,
    checked_method,
    checked_tall,
    differentiable,
    gram,
    matmul,
    normalized,
    one_by_one,
    repeated,
    squared_norm,
)

Method = Literal["qr", "cholesky"]


def orthonormalize(w: Float[Array, "d r"], method: Method | None = None) -> Float[Array, "d r"]:
    """Orthonormal basis by Gram-Schmidt: the factor Q of W = Q R, with a positive diagonal of R.

    The signs make the factor unique, hence continuous and differentiable, and the identity on
    orthonormal matrices. The columns are orthonormal to `1e-5 r` in single and `1e-12 r` in double
    precision at any condition number. Columns that depend on earlier ones are replaced by some that
    complete the basis; NaN and infinity in `w` give NaN.

    Differentiable in both modes and at every order; along dependent columns, where the factor is
    not differentiable, the derivative is zero.

    Args:
        w: the matrix, with d >= r.
        method: `"cholesky"` (the default), Cholesky's factor of the Gram matrix, applied a second
            time where rounding asks for it and replaced by `"qr"` where that would not help; or
            `"qr"`, Householder's reflections throughout, which took 1.5 to 2 times as long.

    Returns:
        The orthonormal basis, of the dtype of `w` (half precisions are computed in single).

    Raises:
        ValueError: if `w` is not one tall, real floating-point matrix, or `method` is unknown.

    Source: Yamamoto, Nakatsukasa, Yanagisawa & Fukaya, "Roundoff error analysis of the CholeskyQR2
    algorithm" (2015).
    """
    w = checked_tall(w)
    chosen = checked_method(method, get_args(Method), default="cholesky")
    return _orthonormalize(w, chosen)


# Compiled by itself, so that a program that needs it in several places traces it once.
@partial(jax.jit, static_argnums=1)
def _orthonormalize(w: Float[Array, "d r"], method: str) -> Float[Array, "d r"]:
    return _factor(w.astype(jnp.promote_types(w.dtype, jnp.float32)), method)[0].astype(w.dtype)


def _values(w: Float[Array, "d r"], method: str) -> Factors:
    """The factor and R^{-1}, without a derivative."""
    eps = jnp.finfo(w.dtype).eps
    if w.shape[1] == 1:
        return normalized(w)
    if method == "qr":
        return _by_householder(w)

    def cholesky(w):
        """One pass, and the error to expect of it."""
        g = gram(w)
        # With columns of unit length, the error no longer depends on their lengths.
        length = jnp.sqrt(jnp.diagonal(g))
        (inverse,) = _inverse_cholesky(g / (length[:, None] * length))
        error = 2 * eps * squared_norm(inverse)
        # Products of tiny entries are lost beyond what rounding says.
        error += len(w) * jnp.finfo(w.dtype).tiny / jnp.min(length) ** 2
        inverse = inverse / length[:, None]
        return matmul(w, inverse), inverse, error

    def again(state):
        q, first, _ = state
        q, second, error = cholesky(q)
        return q, matmul(first, second), error

    tolerance = 32 * eps * w.shape[1]
    q, inverse, error = lax.while_loop(
        lambda state: (state[2] > tolerance) & (state[2] < 1e-2), again, cholesky(w)
    )

    def householder(bad, q, inverse):
        del inverse
        return _by_householder(jnp.where(bad, w, q), bad)

    return repeated(~(error <= tolerance), householder, (q, inverse))


@one_by_one
def _inverse_cholesky(gram: Float[Array, "r r"]) -> tuple[Float[Array, "r r"]]:
    """R^{-1} of gram = R^T R."""
    eye = jnp.eye(len(gram), dtype=gram.dtype)
    factor = jnp.linalg.cholesky(gram)
    return (lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True).T,)


@one_by_one
def _by_householder(w: Float[Array, "d r"]) -> Factors:
    """The factors by reflections, for any rank; dependent columns get zeros in R^{-1}."""
    q, r = jnp.linalg.qr(w)
    sign = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(w.dtype)
    q, r = q * sign, r * sign[:, None]
    pivots = jnp.diagonal(r)
    kept = pivots > jnp.finfo(w.dtype).eps * len(r) * jnp.max(pivots)
    both = kept[:, None] & kept
    eye = jnp.eye(len(r), dtype=w.dtype)
    inverse = lax.linalg.triangular_solve(jnp.where(both, r, eye), eye, left_side=True)
    return q, jnp.where(both, inverse, 0)


# R stays upper triangular where dR R^{-1} = N - Omega is: Omega equals N below the diagonal.
def _rotation(inverse: Float[Array, "r r"], n: Float[Array, "r r"]) -> Float[Array, "r r"]:
    del inverse
    lower = jnp.tril(n, -1)
    return lower - lower.T


_factor = differentiable(_values, _rotation)


def top_eigenvectors(
    matrix: Float[Array, "d d"], rank: int
) -> tuple[Float[Array, " rank"], Float[Array, "d rank"]]:
    """The largest eigenvalues of a symmetric matrix, in descending order, and their eigenvectors.

    The entry of largest magnitude of every eigenvector is positive. The derivative is that of the
    eigenvalues and of the subspace; of a rotation of the eigenvectors within the subspace, which is
    undefined where eigenvalues coincide, it has none. So differentiate functions that depend on the
    subspace only (its projection, a distance, an energy); they are right where eigenvalues within
    it coincide. Where the smallest eigenvalue kept equals the largest left out, the subspace is not
    differentiable, and the derivative returned there is zero in the directions concerned; the same
    goes for two that differ by less than 1e5 times the smallest normal number, 1e-33 in single
    precision. Second derivatives need distinct eigenvalues.

    Args:
        matrix: the symmetric matrix; its symmetric part is used.
        rank: how many eigenvectors, from 1 to d.

    Returns:
        The eigenvalues and the eigenvectors, one in each column.

    Raises:
        ValueError: if `matrix` is not one square, real floating-point matrix, or `rank` is not from
            1 to d.
    """
    matrix = checked_square("matrix", matrix)
    checked_rank(rank, len(matrix))
    return _top(matrix, rank)


@partial(jax.jit, static_argnums=1)
def _top(
    matrix: Float[Array, "d d"], rank: int
) -> tuple[Float[Array, " rank"], Float[Array, "d rank"]]:
    return _top_eigenvectors(matrix, rank)


def checked_square(name: str, matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Refuse what is not one square matrix.

    Raises:
        ValueError: if `matrix` is none, or not of real floating-point numbers.
    """
    matrix = checked_array(name, matrix, "d d", whole=False)
    if matrix.shape[0] != matrix.shape[1]:
        raise refuse(name, "a square matrix", matrix)
    return matrix


def checked_rank(rank: int, largest: int) -> None:
    """Refuse a rank outside 1, ..., largest.

    Raises:
        ValueError: if `rank` is one.
    """
    check_whole("rank", rank, most=largest)


_eigh = one_by_one(lambda matrix: tuple(jnp.linalg.eigh(matrix)))


def _descending(matrix: Float[Array, "d d"]) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
    values, vectors = _eigh(matrix)
    return values[::-1], with_sign(vectors[:, ::-1])


def with_sign(vectors: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Make the entry of largest magnitude of every column positive."""
    largest = jnp.take_along_axis(vectors, jnp.argmax(jnp.abs(vectors), axis=0)[None], axis=0)
    return vectors * jnp.where(largest < 0, -1, 1).astype(vectors.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _top_eigenvectors(
    matrix: Float[Array, "d d"], rank: int
) -> tuple[Float[Array, " rank"], Float[Array, "d rank"]]:
    values, vectors = _descending(matrix)
    return values[:rank], vectors[:, :rank]


# First-order perturbation theory: with eigenvectors U kept and V left out,
#     d lambda_i = u_i^T dS u_i,    dU = V X,    X_ji = v_j^T dS u_i / (lambda_i - mu_j).
# The part of dU within the span of U, which divides by differences of kept eigenvalues, is dropped:
# no function of the subspace sees it.
@_top_eigenvectors.defjvp
def _(rank, primals, tangents):
    (matrix,), (change,) = primals, tangents
    values, vectors = _descending(matrix)
    kept, dropped = vectors[:, :rank], vectors[:, rank:]
    change = matmul((change + change.T) / 2, kept)
    gaps = values[:rank] - values[rank:, None]
    size = jnp.maximum(jnp.abs(values[0]), jnp.abs(values[-1]))
    info = jnp.finfo(matrix.dtype)
    # Nor must the reciprocal of a gap be near overflow.
    clear = gaps > jnp.maximum(info.eps * len(matrix) * size, 1e5 * float(info.tiny))
    x = matmul(dropped.T, change)
    x = jnp.where(clear, x / jnp.where(clear, gaps, 1), 0)
    return (values[:rank], kept), (jnp.sum(kept * change, axis=0), matmul(dropped, x))
