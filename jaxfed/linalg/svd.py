"""Singular value decomposition with a derivative that is finite everywhere."""

from collections.abc import Callable
from functools import cache, partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxfed.linalg import _jacobi
from jaxfed.linalg._factor import (
    checked_matrix,
    gram,
    matmul,
    one_by_one,
    repeated,
    squared_norm,
)
from jaxfed.linalg.division import reciprocal
from jaxfed.linalg.platforms import per_platform
from jaxfed.linalg.precision import in_single

# How many times as many rows as columns a tall matrix has.
TALL = 8

Triples = tuple[Float[Array, "m k"], Float[Array, " k"], Float[Array, "k n"]]
Leading = tuple[Float[Array, "m rank"], Float[Array, " k"], Float[Array, "rank n"]]


def singular_values(x: Float[Array, "m n"]) -> Float[Array, " k"]:
    """The singular values of a matrix, the largest first.

    In their place, `jnp.linalg.norm(x, 2)` and `jnp.linalg.svd` by its defaults allocate an m x m
    array.
    """
    return in_single(partial(jnp.linalg.svd, full_matrices=False, compute_uv=False))(x)


def svd(w: Float[ArrayLike, "m n"]) -> Triples:
    r"""Thin singular value decomposition of a matrix, `W = U diag(s) V^T`.

    Differentiable in both modes. Singular vectors have no derivative if their singular value is
    repeated or zero. The derivative then leaves out only the rotations between such vectors:

    * for two singular values that coincide up to rounding, the rotation common to both sides, which
      would divide by their difference. Functions that do not depend on such a rotation (the
      subspace spanned, the polar factor) keep their derivative;
    * for two directions that are both lost, everything.

    So derivatives are never NaN for finite data, including rank-one, constant and zero matrices.
    Functions that treat coinciding singular values differently, or that are not constant along the
    rotation (a power of the matrix), get a derivative without that part.

    Args:
        w: the matrix, at any scale.

    Returns:
        Left singular vectors, `(m, k)`; singular values in descending order, `(k,)`; right singular
        vectors as rows, `(k, n)`; with k the smaller size of `w`, and in its dtype (half precisions
        are computed in single).

    Raises:
        ValueError: if `w` is not one real floating-point matrix.

    Source: Papadopoulo & Lourakis (2000), Estimating the Jacobian of the singular value
    decomposition; Townsend (2016), Differentiating the singular value decomposition.
    """
    w = checked_matrix(w)
    full, scale = _scaled(w)
    left, singular, right = _svd(full / scale)
    return left.astype(w.dtype), (singular * scale).astype(w.dtype), right.astype(w.dtype)


def leading_triples(w: Float[Array, "m n"], rank: int) -> Leading:
    """All singular values of a matrix, and the singular vectors of the largest ones.

    Of a tall matrix it takes a third of the time of `svd`, whose derivatives it has. Singular
    vectors whose value is not above its rounding need not be orthonormal.

    Returns:
        Left singular vectors, `(m, rank)`; singular values, `(k,)`; right singular vectors as rows,
        `(rank, n)`.
    """
    full, scale = _scaled(w)
    left, singular, right = _leading(full, scale, rank=rank)
    return left.astype(w.dtype), (singular * scale).astype(w.dtype), right.astype(w.dtype)


def _scaled(w: Float[Array, "m n"]) -> tuple[Float[Array, "m n"], Float[Array, ""]]:
    """The matrix in single precision or more, and its largest entry."""
    full = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    # The vectors do not depend on the scale, so treat it as a constant.
    scale = lax.stop_gradient(jnp.max(jnp.abs(full)))
    return full, jnp.where(scale == 0, 1, scale)


def not_rounding(singular: Float[Array, " k"], shape: tuple[int, ...]) -> Bool[Array, " k"]:
    """Which singular values, descending, exceed the rounding of the largest."""
    return singular > rounding(singular, shape)


def rounding(singular: Float[Array, " k"], shape: tuple[int, ...]) -> Float[Array, ""]:
    """Bound the rounding errors of a matrix's singular values, descending."""
    # They grow with the smaller size alone. Those of a constant column are up to 33 units of
    # rounding, from some thousand rows on.
    size = min(max(shape), max(min(shape), 64))
    return jnp.finfo(singular.dtype).eps * size * singular[0]


def _by_library(w: Float[Array, "m n"]) -> Triples:
    return tuple(jnp.linalg.svd(w, full_matrices=False))


decomposed = one_by_one(_by_library, tpu=_jacobi.svd, cuda=_jacobi.svd_of_projected)


def _values(w: Float[Array, "m n"]) -> Triples:
    left, singular, right = decomposed(w)
    return left, singular, right


def _leading_values(w: Float[Array, "m n"], scale: Float[Array, ""], rank: int) -> Leading:
    return _cut_at(rank)((w, scale))


@cache
def _cut_at(rank: int) -> Callable[..., Leading]:
    """The triples of `w / scale`, divided one by one, for less memory."""

    def by(method):
        def cut(given):
            w, scale = given
            tall = method is _by_library and len(w) >= TALL * w.shape[1]
            if tall:
                return _by_cholesky(w / scale, rank)
            left, singular, right = method(w / scale)
            return left[:, :rank], singular, right[:rank]

        return cut

    return one_by_one(by(_by_library), tpu=by(_jacobi.svd), cuda=by(_jacobi.svd_of_projected))


def _by_cholesky(w: Float[Array, "m n"], rank: int) -> Leading:
    """The triples of a tall matrix W = Q R from those of R, by Cholesky's method.

    Columns have unit length in the Gram matrix, so the error does not depend on their lengths. A
    second pass makes Q orthonormal to rounding; a library does what two passes cannot.

    Source: Yamamoto, Nakatsukasa, Yanagisawa & Fukaya (2015), Roundoff error analysis of the
    CholeskyQR2 algorithm.
    """
    eps, eye = jnp.finfo(w.dtype).eps, jnp.eye(w.shape[1], dtype=w.dtype)

    def step(state):
        q, r, divisor, error = state
        # Not times the inverse, whose rounding would be that of its largest entries.
        q = lax.cond(error < 1, lambda: lax.linalg.triangular_solve(divisor, q), lambda: q)
        squares = gram(q)
        length = jnp.sqrt(jnp.diagonal(squares))
        unit = jnp.where(length > 0, length, 1)
        # A column of zeros stays one, in Q and in R.
        squares = squares / (unit[:, None] * unit) + jnp.diag((length == 0).astype(w.dtype))
        root = lax.linalg.cholesky(squares, symmetrize_input=False).T
        inverse = lax.linalg.triangular_solve(root, eye, left_side=True)
        # With the error of products of tiny entries, which underflow.
        error = 2 * eps * squared_norm(inverse)
        error += len(w) * jnp.finfo(w.dtype).tiny / jnp.min(unit) ** 2
        return q, matmul(root * length, r), root * unit, error

    # Two passes at most: the first one's error is as if infinite, and then below a hundredth.
    tolerance = 32 * eps * w.shape[1]
    q, r, divisor, error = lax.while_loop(
        lambda state: (state[3] > tolerance) & ((state[3] < 1e-2) | (state[3] == jnp.inf)),
        step,
        (w, eye, eye, jnp.asarray(jnp.inf, w.dtype)),
    )
    # Cholesky's method fails with NaN.
    bad = ~(error <= tolerance)
    left, singular, right = _by_library(jnp.where(bad, eye, r))
    left = matmul(q, lax.linalg.triangular_solve(divisor, left[:, :rank], left_side=True))

    def decompose(bad, left, singular, right):
        left, singular, right = _by_library(jnp.where(bad, w, singular[0]))
        return left[:, :rank], singular, right[:rank]

    return repeated(bad, decompose, (left, singular, right[:rank]))


# With p = Uᵀ dW V split into its symmetric and antisymmetric parts, first-order perturbation theory
# gives, for i not j,
#     (Uᵀ dU)_ij = a + b,    (Vᵀ dV)_ij = a - b,
#     a = (p_ij + p_ji) / 2 (s_j - s_i),    b = (p_ij - p_ji) / 2 (s_j + s_i),
# and outside the span of U the change dW V / s, outside that of V the change dWᵀ U / s.
def _rule(primals, tangents):
    (w,), (change,) = primals, tangents
    return _changed(w, change, _svd(w))


def _leading_rule(primals, tangents, rank):
    (w, scale), (change, _), cut = primals, tangents, slice(rank)
    # All vectors, on which a change of the leading ones depends.
    found = _leading(w, scale, rank=min(w.shape))
    return tuple(
        (left[:, cut], singular, right[cut])
        for left, singular, right in _changed(w / scale, change / scale, found)
    )


def _changed(w: Array, change: Array, found: Triples) -> tuple[Triples, Triples]:
    left, singular, right = found
    kept = not_rounding(singular, w.shape)
    # Of two directions that are both lost, nothing is known about the rotation between them.
    some = kept[:, None] | kept
    gaps, sums = singular - singular[:, None], singular + singular[:, None]
    clear = some & (jnp.abs(gaps) > rounding(singular, w.shape))
    by_gaps, by_sums = reciprocal(gaps, clear), reciprocal(sums, some)
    reciprocals = reciprocal(singular, kept)

    images, preimages = matmul(change, right.T), matmul(change.T, left)
    inner = matmul(left.T, images)
    common = by_gaps * (inner + inner.T) / 2
    apart = by_sums * (inner - inner.T) / 2
    left_change = matmul(left, common + apart) + (images - matmul(left, inner)) * reciprocals
    outside = (preimages - matmul(right.T, inner.T)) * reciprocals
    right_change = matmul(right.T, common - apart) + outside
    return (left, singular, right), (left_change, jnp.diagonal(inner), right_change.T)


_svd = per_platform(_values, _rule)
_leading = per_platform(_leading_values, _leading_rule)
