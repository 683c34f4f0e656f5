"""Orthonormal bases of the columns of a tall matrix."""

from functools import partial
from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from jaxfed._checks import check_name, refuse
from jaxfed.linalg import _jacobi
from jaxfed.linalg._factor import (
    SMALL,
    Factorization,
    checked_matrix,
    factor_alone,
    for_derivatives,
    gram,
    matmul,
    normalized,
    one_by_one,
    repeated,
    squared_norm,
)
from jaxfed.linalg.platforms import Maps, per_platform

Method = Literal["cholesky", "qr"]

# From here on, the threads of LAPACK's QR wait for each other; on a busy CPU, a hundred times as
# long as they work.
MANY_ROWS = 512


def orthonormalize(w: Float[ArrayLike, "d r"], method: Method | None = None) -> Float[Array, "d r"]:
    """Orthonormal basis by Gram-Schmidt: the factor Q of W = Q R, with a positive diagonal of R.

    The signs make the factor unique, hence continuous and differentiable, and the identity on
    orthonormal matrices. The columns are orthonormal to `1e-5 r` in single and `1e-12 r` in double
    precision at any condition number. Columns that depend on earlier ones are replaced by others
    that complete the basis; NaN and infinity in `w` give NaN.

    Differentiable in both modes and at every order. The derivative is zero along dependent columns,
    where the factor is not differentiable, and for matrices so small that multiples of their
    inverses would overflow (below some 1e-33 in single precision).

    Args:
        w: the matrix, with d >= r.
        method: `"cholesky"` uses the Cholesky factor of the Gram matrix, a second time if rounding
            requires it, and falls back on `"qr"` if that would not help. `"qr"` always uses
            Householder reflections, which take 1.5 to 2 times as long for many matrices. None (the
            default) is `"cholesky"`, but for one small matrix on a CPU `"qr"`, which compiles in
            half of the time.

    Returns:
        The orthonormal basis, in the dtype of `w` (half precisions are computed in single).

    Raises:
        ValueError: if `w` is not one tall, real floating-point matrix, or `method` is unknown.

    Source: Yamamoto, Nakatsukasa, Yanagisawa & Fukaya, "Roundoff error analysis of the CholeskyQR2
    algorithm" (2015).
    """
    w = checked_matrix(w)
    if w.shape[0] < w.shape[1]:
        raise refuse("w", "a matrix (d, r) with d >= r", w)
    if method is not None:
        check_name("method", method, get_args(Method))
    return _orthonormalize(w, method)


def orthonormalize_once(w: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """`orthonormalize` for use once per run: a shorter program instead of a faster one."""
    return orthonormalize(w, "qr" if len(w) < MANY_ROWS else "cholesky")


def orthonormal_rows(w: Float[Array, "r d"]) -> Float[Array, "r d"]:
    """Orthonormal rows by modified Gram-Schmidt: the first k rows span the first k rows of `w`.

    A shorter program than `orthonormalize`, for rows far from dependent: the error is rounding
    times the condition number of `w` with rows of unit length. A row of zeros stays zero.
    """

    def step(k, q):
        square = squared_norm(q[k])
        row = q[k] / jnp.sqrt(jnp.where(square > 0, square, 1))
        later = jnp.where(jnp.arange(len(q)) > k, jnp.sum(q * row, axis=1), 0)
        return (q - later[:, None] * row).at[k].set(row)

    return lax.fori_loop(0, len(w), step, w)


def _values(w: Float[Array, "d r"], method: Method | None) -> Factorization:
    """The factor and R^{-1}, without a derivative."""
    return normalized(w) if w.shape[1] == 1 else _METHODS[method or "cholesky"](w)


def _alone(maps: Maps, w: Float[Array, "*maps d r"], method: Method | None) -> Factorization | None:
    """The factors of one small matrix on a CPU, such as a server's, in a shorter program."""
    small = w.shape[1] > 1 and len(w) < MANY_ROWS and w.size * w.shape[1] <= SMALL
    return _by_householder(w) if small and not maps and method is None else None


def _by_cholesky(w: Float[Array, "d r"]) -> Factorization:
    """The factors from the Gram matrix, or by reflections if that is not accurate enough."""
    eps = jnp.finfo(w.dtype).eps

    def cholesky(w):
        """One pass, and its expected error."""
        g = gram(w)
        # With columns of unit length, the error does not depend on their lengths.
        length = jnp.sqrt(jnp.diagonal(g))
        (inverse,) = _inverse_cholesky(g / (length[:, None] * length))
        error = 2 * eps * squared_norm(inverse)
        # Add the error of products of tiny entries, which underflow.
        error += len(w) * jnp.finfo(w.dtype).tiny / jnp.min(length) ** 2
        inverse = inverse / length[:, None]
        return matmul(w, inverse), inverse, error

    def again(state):
        q, first, _ = state
        q, second, error = cholesky(q)
        return q, matmul(first, second), error

    tolerance = 32 * eps * w.shape[1]
    # A second pass starts from columns that are orthonormal up to the first one's error, so it is
    # exact to rounding if that is small. Where it is not, or NaN because Cholesky's method failed,
    # reflections follow.
    q, inverse, error = lax.while_loop(
        lambda state: (state[2] > tolerance) & (state[2] < 1e-2), again, cholesky(w)
    )

    def householder(bad, q, inverse):
        return _by_householder(jnp.where(bad, w, q), bad)

    return repeated(~(error <= tolerance), householder, (q, inverse))


@one_by_one
def _inverse_cholesky(gram: Float[Array, "r r"]) -> tuple[Float[Array, "r r"]]:
    """R^{-1} of gram = R^T R."""
    eye = jnp.eye(len(gram), dtype=gram.dtype)
    factor = jnp.linalg.cholesky(gram)
    return (lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True).T,)


@partial(one_by_one, cuda=_jacobi.orthonormalized)
def _by_householder(w: Float[Array, "d r"]) -> Factorization:
    """The factors by reflections, for any rank; dependent columns get zeros in R^{-1}."""
    q, r = jnp.linalg.qr(w)
    # LAPACK leaves the signs of R's diagonal open.
    sign = jnp.where(jnp.diagonal(r) < 0, -1, 1).astype(w.dtype)
    q, r = q * sign, r * sign[:, None]
    pivots = jnp.diagonal(r)
    # A column depends on those before if it loses its own length: others may be in larger units.
    lengths = jnp.max(jnp.abs(r), axis=0)
    kept = pivots > jnp.finfo(w.dtype).eps * len(r) * lengths
    both = kept[:, None] & kept
    eye = jnp.eye(len(r), dtype=w.dtype)
    # Dependent columns become those of the identity, so that no pivot is zero.
    inverse = lax.linalg.triangular_solve(jnp.where(both, r, eye), eye, left_side=True)
    return q, jnp.where(both, inverse, 0)


_METHODS = {
    method: per_platform(function, tpu=_jacobi.orthonormalized)
    for method, function in (("cholesky", _by_cholesky), ("qr", _by_householder))
}


# W = Q R gives dW = dQ R + Q dR, where Qᵀ dQ = Omega is antisymmetric because QᵀQ = I. With
# A = dW R^{-1} and N = Qᵀ A,
#     dR R^{-1}  = N - Omega,
#     dQ         = (I - Q Qᵀ) A + Q Omega = A + Q K   with K = Omega - N,
#     d(R^{-1})  = -R^{-1} dR R^{-1}      = R^{-1} K.
# R stays upper triangular if dR R^{-1} is, so Omega equals N below the diagonal. Q and R^{-1} are
# results of this same rule, so it can be differentiated again.
def _rule(primals, tangents, method):
    (w,), (dw,) = primals, tangents
    q, inverse = _factor(w, method=method)
    bounded = for_derivatives(inverse)
    a = matmul(dw, bounded)
    n = matmul(q.T, a)
    lower = jnp.tril(n, -1)
    k = lower - lower.T - n
    return (q, inverse), (a + matmul(q, k), matmul(bounded, k))


_factor = per_platform(_values, _rule, {"cpu": _alone})
_orthonormalize = factor_alone(_factor)
