"""Robust PCA: split a matrix into a low-rank and a sparse one.

This is not federated. It is a baseline for personalized PCA, with sparse parts in place of local
components (Shi & Kontar 2024, Section 7.2). `jaxfed.pca.TCMF` learns shared, local and sparse parts
of several clients' matrices.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jaxfed._checks import check_count, check_positive
from jaxfed._numbers import checked_rows
from jaxfed.linalg.svd import singular_values

Matrix = Float[Array, "rows columns"]


def robust_pca(
    matrix: Float[ArrayLike, "rows columns"],
    *,
    sparsity: float | Float[Array, ""] | None = None,
    rounds: int = 500,
    tol: float | Float[Array, ""] | None = None,
) -> tuple[Matrix, Matrix]:
    r"""Split a matrix into a low-rank and a sparse part by principal component pursuit.

    \(\min \|L\|_* + \lambda \|E\|_1\) subject to \(L + E = M\), by the inexact augmented
    Lagrangian method: shrink the singular values of \(M - E + Y/\mu\), then the entries of
    \(M - L + Y/\mu\), then move the multiplier \(Y\) by \(\mu (M - L - E)\) and let the penalty
    \(\mu\) grow.

    It works under `jit` and `vmap`; the loop has no reverse-mode derivative.

    Args:
        matrix: the matrix M.
        sparsity: weight of the sparse part; larger weights make it sparser. By default
            1 / sqrt(max(rows, columns)).
        rounds: maximum number of iterations.
        tol: stop once \(\|M - L - E\|_F\) is at most this times \(\|M\|_F\). By default 1e-7 in
            double and 1e-6 in single precision.

    Returns:
        The low-rank and the sparse part. Their sum equals the matrix up to `tol`, unless `rounds`
        was too small.

    Raises:
        ValueError: if `matrix` is not a matrix of finite real floating-point numbers, or another
            argument is not positive.

    Source: Candès, Li, Ma & Wright (2011), Robust principal component analysis?; Lin, Chen & Ma
    (2010), The augmented Lagrange multiplier method for exact recovery of corrupted low-rank
    matrices, Algorithm 5.

    Example:
        >>> import jax, jaxfed as jf
        >>> left, right, where = jax.random.split(jax.random.key(0), 3)
        >>> low = jax.random.normal(left, (60, 2)) @ jax.random.normal(right, (2, 40))
        >>> spikes = jax.random.bernoulli(where, 0.05, low.shape) * 10.0
        >>> found, sparse = jf.pca.robust_pca(low + spikes)
        >>> bool(abs(found - low).max() < 1e-2)
        True
    """
    matrix = checked_rows("matrix", matrix, "rows columns", finite=True, whole=False)
    check_positive("sparsity", sparsity, optional=True, single=True)
    check_positive("tol", tol, optional=True, single=True)
    check_count("rounds", rounds)
    if sparsity is None:
        sparsity = max(matrix.shape) ** -0.5
    if tol is None:
        tol = 1e-7 if matrix.dtype == jnp.float64 else 1e-6
    return _pursue(matrix, jnp.asarray(sparsity, matrix.dtype), tol, rounds)


@jax.jit
def _pursue(matrix, weight, tol, rounds):
    spectral = singular_values(matrix)[0]
    # In units of the largest singular value, so that the matrix may be zero or large.
    unit = jnp.where(spectral > 0, spectral, 1)
    scaled = matrix / unit
    size = jnp.linalg.norm(scaled)

    def proceed(carry):
        *_, gap, step = carry
        return (step < rounds) & (gap > tol * size)

    def iterate(carry):
        _, sparse, multiplier, penalty, _, step = carry
        left, values, right = jnp.linalg.svd(
            scaled - sparse + multiplier / penalty, full_matrices=False
        )
        low = (left * jnp.maximum(values - 1 / penalty, 0)) @ right
        rest = scaled - low + multiplier / penalty
        sparse = jnp.sign(rest) * jnp.maximum(jnp.abs(rest) - weight / penalty, 0)
        gap = scaled - low - sparse
        multiplier = multiplier + penalty * gap
        penalty = jnp.minimum(1.5 * penalty, 1e7)
        return low, sparse, multiplier, penalty, jnp.linalg.norm(gap), step + 1

    zero = jnp.zeros_like(scaled)
    # A dual feasible start: the dual norm is the larger of the two norms.
    dual = scaled / jnp.maximum(1, jnp.abs(scaled).max() / weight)
    penalty = jnp.asarray(1.25, scaled.dtype)
    start = (zero, zero, dual, penalty, jnp.full((), jnp.inf, scaled.dtype), 0)
    low, sparse, *_ = jax.lax.while_loop(proceed, iterate, start)
    return unit * low, unit * sparse
