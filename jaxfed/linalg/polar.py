"""Orthonormal polar factor of a matrix: the matrix closest to it with orthonormal columns or rows.

`W = Q P` with `QᵀQ = I` and `P = (WᵀW)^{1/2}`, so `Q = W P^{-1}`. The inverse square root of the
small Gram matrix `WᵀW` costs a few `r x r` products if `W` is nearly orthonormal, as it is after
the steps of a manifold algorithm. Forming the Gram matrix squares the condition number, so the
expected error decides what follows: nothing, one correction of `Q` itself, an iteration on `Q` from
the start if `W` is badly conditioned, or a singular value decomposition of `W` if rank is as good
as lost. For wide and square matrices the same holds for `W = P Q`.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxfed._checks import check_name
from jaxfed.linalg._dispatch import inverse_sqrt_of_many
from jaxfed.linalg._factor import (
    SMALL,
    Factorization,
    by_sums,
    checked_matrix,
    factor_alone,
    for_derivatives,
    gram,
    is_wide,
    matmul,
    normalized,
    repeated,
    smaller_product,
    squared_norm,
    times,
)
from jaxfed.linalg._newton_schulz import gram_scale, iterated, newton_schulz
from jaxfed.linalg._sylvester import differentiable_sylvester, rotation, sylvester
from jaxfed.linalg.eigen import eigh
from jaxfed.linalg.platforms import Maps, per_platform
from jaxfed.linalg.precision import client_matmul
from jaxfed.linalg.svd import decomposed

Method = Literal["newton_schulz", "eigh", "svd", "pallas"]


def polar(w: Float[ArrayLike, "m n"], method: Method | None = None) -> Float[Array, "m n"]:
    r"""Orthonormal polar factor of a matrix, the orthonormal matrix closest to it.

    .. math:: Q = W (W^T W)^{-1/2} = \arg\min_{Q^T Q = I} \|W - Q\|_F

    for a tall matrix; for a wide one, transpose it and its factor.

    The columns (for a wide matrix, the rows) are orthonormal to `1e-5 r` in single and `1e-12 r` in
    double precision at any condition number, with r the smaller size. Up to condition numbers of
    about 30 in single and 3000 in double precision, `Q` comes from the Gram matrix, at best exact
    to rounding and at worst to the square root of the machine epsilon; up to about 1e5 and 1e13,
    from a Newton-Schulz iteration on `Q` itself; beyond, from a singular value decomposition.

    If `w` has lost rank, all completions of the factor are equally close, and one of them is
    returned. NaN or infinity in `w` gives NaN.

    Differentiable in both modes and at every order, even if singular values coincide. If `w` has
    lost rank, the factor is not differentiable: the derivative is zero in the lost directions. It
    is also zero if `w` is so small that multiples of its inverse would overflow (below some 1e-33
    in single precision). Map it over many matrices with `jax.vmap`; the decomposition then runs,
    for all, only if one of them needs it.

    Args:
        w: the matrix; products of batches of small matrices are faster if it is wide.
        method: `"newton_schulz"` or `"eigh"`, the method for the inverse square root of the Gram
            matrix; `"svd"`, always a singular value decomposition of `w`; None (the default) for
            `"newton_schulz"`, but for one small matrix on a CPU `"svd"`, which compiles faster; or
            `"pallas"`, which also runs Newton-Schulz in a kernel of `jaxfed_kernels` on CUDA
            devices of compute capability 9 or 10, compiled for them and never yet run on one. TPUs
            always use a kernel for Newton-Schulz of many matrices up to 32 x 32: it reads and
            writes far less by the compiler's count.

    Returns:
        The orthonormal factor, in the dtype of `w` (half precisions are computed in single).

    Raises:
        ValueError: if `w` is not one real floating-point matrix, or `method` is unknown.

    Source: Higham, "Functions of Matrices" (2008), chapters 6 and 8.
    """
    w = checked_matrix(w)
    if method is not None:
        check_name("method", method, get_args(Method))
    return _polar(w, method)


def _gram(w: Float[Array, "m n"]) -> Float[Array, "r r"]:
    """The smaller of the two Gram matrices."""
    if w.shape[0] == w.shape[1]:
        # The barrier stores the transpose; as part of the product it slows down a CPU.
        return matmul(*lax.optimization_barrier((w, w.T)))
    return client_matmul(w, w.T) if is_wide(w) else gram(w)


def _values(w: Float[Array, "m n"], method: Method | None) -> Factorization:
    """The polar factor and P^{-1}, without a derivative."""
    method = method or "newton_schulz"
    r = min(w.shape)
    eps = jnp.finfo(w.dtype).eps
    if r == 1:
        q, inverse = normalized(w.reshape(-1, 1))
        return q.reshape(w.shape), inverse
    if method == "svd":
        return _by_svd(w)

    tolerance = float(32 * eps * r)
    eye = jnp.eye(r, dtype=w.dtype)
    gram = _gram(w)
    length = jnp.sqrt(gram_scale(gram)[0])
    unknown = jnp.full_like(length, jnp.inf)
    if method == "newton_schulz" and w.shape[0] == w.shape[1]:
        # The Gram matrix is as large as W, so it saves nothing.
        start = w / length, eye / length, unknown
    else:
        inverse, error = _INVERSE_SQRT[method](gram)
        # Add the error of products of tiny entries, which underflow.
        error += max(w.shape) * jnp.finfo(w.dtype).tiny * squared_norm(inverse)
        # Half of the digits are enough, since a step of `iterated` raises the error to its ninth
        # power. Otherwise start from W itself, whose condition number is not squared.
        good = error < eps**0.5
        start = (
            jnp.where(good, times(w, inverse), w / length),
            jnp.where(good, inverse, eye / length),
            jnp.where(good, error, unknown),
        )
    q, inverse, error = iterated(*start, tolerance)

    # It depends on the loop's results; otherwise the compiler would always decompose before it.
    def decompose(bad, q, inverse):
        return _by_svd(jnp.where(bad, w, q), bad)

    return repeated(~(error <= tolerance), decompose, (q, inverse))


def _alone(maps: Maps, w: Float[Array, "*maps m n"], method: Method | None) -> Factorization | None:
    """The factors of one small matrix on a CPU, such as a server's, by a library.

    An iteration would take a third of the time, and half a second to compile: as much as some
    thousands of rounds save.
    """
    if maps or method is not None or min(w.shape) == 1 or w.size * min(w.shape) > SMALL:
        return None
    return _by_svd(w)


def _by_svd(w: Float[Array, "m n"], wanted: Bool[Array, ""] | None = None) -> Factorization:
    """The polar factor by a singular value decomposition, for any rank and scale."""
    scale = jnp.max(jnp.abs(w))
    scale = jnp.where(scale == 0, 1, scale)
    u, s, vt = decomposed(w / scale, wanted)
    kept = s > jnp.finfo(w.dtype).eps * min(w.shape) * s[0]
    reciprocal = jnp.where(kept, 1 / (jnp.where(kept, s, 1) * scale), 0)
    small = u.T if is_wide(w) else vt
    return client_matmul(u, vt), client_matmul(small.T * reciprocal, small)


def _by_eigh(gram: Float[Array, "r r"]) -> tuple[Float[Array, "r r"], Float[Array, ""]]:
    """Inverse square root by eigenvalues, and its expected error (see `_inverse_sqrt`)."""
    values, vectors = eigh(gram)
    positive = values > 0
    safe = jnp.where(positive, values, 1)
    inverse = matmul(vectors * jnp.where(positive, 1 / jnp.sqrt(safe), 0), vectors.T)
    # An eigenvalue lost to rounding makes the expected error infinite, and the result is not used.
    ratios = jnp.where(positive, values[-1] / safe, jnp.inf)
    return inverse, jnp.finfo(gram.dtype).eps * jnp.sum(ratios)


_INVERSE_SQRT = {
    "newton_schulz": inverse_sqrt_of_many(newton_schulz),
    "eigh": _by_eigh,
    "pallas": inverse_sqrt_of_many(newton_schulz, cuda=True),
}


# For a tall matrix, W = Q P with P = Pᵀ gives dW = dQ P + Q dP, where Omega = Qᵀ dQ is
# antisymmetric because QᵀQ = I. With R = P^{-1} and N = Qᵀ dW R,
#     dP R = N - Omega,    dQ = dW R + Q (Omega - N),    dR = -R dP R = R (Omega - N).
# This rule computes both results, so it can be differentiated again.
def _rule(primals, tangents, method):
    (w,), (change,) = primals, tangents
    q, inverse = _factor(w, method=method)
    bounded = for_derivatives(inverse)
    moved = _tangent(q, bounded, change)
    turned = smaller_product(q, moved) - smaller_product(q, times(change, bounded))
    inverse_change = matmul(turned, bounded) if is_wide(q) else matmul(bounded, turned)
    return (q, inverse), (moved, inverse_change)


_factor = per_platform(_values, _rule, {"cpu": _alone})
_polar = factor_alone(_factor)


def _tangent(
    q: Float[Array, "m n"], inverse: Float[Array, "r r"], change: Float[Array, "m n"]
) -> Float[Array, "m n"]:
    """The derivative D of the polar factor, applied to a change of the matrix.

    `Q` is the gradient of the sum of the singular values, so `D` is a Hessian and its own
    transpose: one body serves both modes. To tell JAX, we solve the linear equations
    `Y - D X = A`, `X = B`, which are symmetric and whose solution at `A = 0` is `Y = D B`. JAX
    differentiates them implicitly for derivatives of higher order.
    """

    def derivative(change, solve):
        m = smaller_product(q, change)
        n = matmul(inverse, m) if is_wide(q) else matmul(m, inverse)
        factors = inverse, rotation(inverse, m, solve) - n
        if not is_wide(q) and by_sums(*q.shape):
            # The product stores the factors; otherwise the compiler recomputes them in every sum.
            both = matmul(jnp.concatenate(factors), jnp.eye(len(m), dtype=m.dtype))
            factors = both[: len(m)], both[len(m) :]
        return times(change, factors[0]) + times(q, factors[1])

    return lax.custom_linear_solve(
        lambda pair: jnp.stack([pair[1] - derivative(pair[0], differentiable_sylvester), pair[0]]),
        jnp.stack([jnp.zeros_like(change), change]),
        lambda _, sides: jnp.stack([sides[1], sides[0] + derivative(sides[1], sylvester)]),
        symmetric=True,
    )[1]
