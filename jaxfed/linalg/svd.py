"""Singular value decomposition with a derivative that is finite everywhere."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxfed.linalg import _jacobi
from jaxfed.linalg._factor import checked_matrix, matmul, one_by_one
from jaxfed.linalg.division import reciprocal
from jaxfed.linalg.platforms import per_platform

Triples = tuple[Float[Array, "m k"], Float[Array, " k"], Float[Array, "k n"]]


def singular_values(x: Float[Array, "m n"]) -> Float[Array, " k"]:
    """The singular values of a matrix, the largest first.

    In their place, `jnp.linalg.norm(x, 2)` and `jnp.linalg.svd` by its defaults allocate an m x m
    array.
    """
    return jnp.linalg.svd(x, full_matrices=False, compute_uv=False)


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
    full = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    # The vectors do not depend on the scale, so treat it as a constant.
    scale = lax.stop_gradient(jnp.max(jnp.abs(full)))
    scale = jnp.where(scale == 0, 1, scale)
    left, singular, right = _svd(full / scale)
    return left.astype(w.dtype), (singular * scale).astype(w.dtype), right.astype(w.dtype)


def not_rounding(singular: Float[Array, " k"], shape: tuple[int, ...]) -> Bool[Array, " k"]:
    """Which singular values, descending, exceed the rounding of the largest."""
    return singular > rounding(singular, shape)


def rounding(singular: Float[Array, " k"], shape: tuple[int, ...]) -> Float[Array, ""]:
    """Bound the rounding errors of a matrix's singular values, descending."""
    # They grow with the smaller size alone. Those of a constant column are up to 33 units of
    # rounding, from some thousand rows on.
    size = min(max(shape), max(min(shape), 64))
    return jnp.finfo(singular.dtype).eps * size * singular[0]


decomposed = one_by_one(
    lambda w: tuple(jnp.linalg.svd(w, full_matrices=False)),
    tpu=_jacobi.svd,
    cuda=_jacobi.svd_of_projected,
)


def _values(w: Float[Array, "m n"]) -> Triples:
    left, singular, right = decomposed(w)
    return left, singular, right


# With p = Uᵀ dW V split into its symmetric and antisymmetric parts, first-order perturbation theory
# gives, for i not j,
#     (Uᵀ dU)_ij = a + b,    (Vᵀ dV)_ij = a - b,
#     a = (p_ij + p_ji) / 2 (s_j - s_i),    b = (p_ij - p_ji) / 2 (s_j + s_i),
# and outside the span of U the change dW V / s, outside that of V the change dWᵀ U / s.
def _rule(primals, tangents):
    (w,), (change,) = primals, tangents
    left, singular, right = _svd(w)
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
