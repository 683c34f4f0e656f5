"""Orthonormal polar factor of a tall matrix: the orthonormal matrix closest to it.

`W = Q P` with `Q^T Q = I` and `P = (W^T W)^{1/2}`, so `Q = W P^{-1}`. The inverse square root of
the small Gram matrix `W^T W` costs a handful of `r x r` products where `W` is nearly orthonormal,
as it is after the steps of a manifold algorithm. Forming the Gram matrix squares the condition
number, so the expected error decides what follows: nothing, one correction of `Q` itself, or, for
the badly conditioned, a singular value decomposition of `W`.
"""

import math
from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxfed.linalg._dispatch import inverse_sqrt_kernel
from jaxfed.linalg._factor import (
    Factors,
    checked_method,
    checked_tall,
    defect,
    differentiable,
    gram,
    matmul,
    normalized,
    repeated,
    squared_norm,
    thin_product,
)

Method = Literal["newton_schulz", "eigh", "svd", "pallas"]

# XLA's processor backend multiplies batches of r x r matrices of these sizes two to six times
# slower than those of the next multiple of 8.
_SLOW_RANKS = (4, 5, 6, 7, 11, 14, 15)


def polar(w: Float[Array, "d r"], method: Method | None = None) -> Float[Array, "d r"]:
    r"""Orthonormal polar factor of a tall matrix, the orthonormal matrix closest to it.

    .. math:: Q = W (W^T W)^{-1/2} = \arg\min_{Q^T Q = I} \|W - Q\|_F.

    The columns are orthonormal to `1e-5 r` in single and `1e-12 r` in double precision at any
    condition number. Up to condition numbers of about 30 in single and 3000 in double precision
    `Q` comes from the Gram matrix, at best exact to rounding and at worst to the square root of
    the machine epsilon; beyond, it is that of a singular value decomposition.

    Where `w` has lost rank every completion of the factor is as close as every other: one of them
    is returned. NaN or infinity in `w` gives NaN.

    Differentiable in both modes and at every order, also where singular values coincide. Where `w`
    has lost rank the factor is not differentiable: the derivative returned is zero in the
    directions lost. Map it over many matrices with `jax.vmap`; the decomposition then runs, for
    all, only when one of them needs it.

    Args:
        w: the matrix, with d >= r.
        method: `"newton_schulz"` (the default) or `"eigh"`, by which the inverse square root of
            the Gram matrix is found; `"svd"`, a singular value decomposition of `w` throughout; or
            `"pallas"`, Newton-Schulz in a kernel of `jaxfed_kernels` for CUDA devices, never yet
            measured on one and therefore never chosen automatically.

    Returns:
        The orthonormal factor, of the dtype of `w` (half precisions are computed in single).

    Raises:
        ValueError: if `w` is not one tall, real floating-point matrix, or `method` is unknown.

    Source: Higham, "Functions of Matrices" (2008), chapters 6 and 8.
    """
    w = checked_tall(w)
    chosen = checked_method(method, get_args(Method), default="newton_schulz")
    return _factor(w.astype(jnp.promote_types(w.dtype, jnp.float32)), chosen)[0].astype(w.dtype)


def _values(w: Float[Array, "d r"], method: str) -> Factors:
    """The polar factor and P^{-1}, without a derivative."""
    r = w.shape[1]
    eps = jnp.finfo(w.dtype).eps
    if r == 1:
        return normalized(w)
    if method == "svd":
        return _by_svd(w)

    inverse, error = _INVERSE_SQRT[method](gram(w))
    tolerance = 32 * eps * r

    def correct(state):
        q, inverse, _ = state
        e = defect(q)
        step = e / 2 + 3 / 8 * matmul(e, e)
        return q + thin_product(q, step), inverse + matmul(inverse, step), squared_norm(e) ** 1.5

    q, inverse, error = lax.while_loop(
        lambda state: (state[2] > tolerance) & (state[2] < eps**0.5),
        correct,
        (thin_product(w, inverse), inverse, error),
    )

    # The loop changes `w` so that the compiler cannot take its transposition out of the loop, where
    # it would be done every time.
    def decompose(bad, q, inverse, w):
        del inverse
        q, inverse = _by_svd(jnp.where(bad, w, q))
        return q, inverse, q

    return repeated(~(error <= tolerance), decompose, (q, inverse, w))[:2]


def _by_svd(w: Float[Array, "d r"]) -> Factors:
    """The polar factor by a singular value decomposition, for any rank and scale."""
    scale = jnp.max(jnp.abs(w))
    scale = jnp.where(scale == 0, 1, scale)
    u, s, vt = jnp.linalg.svd(w / scale, full_matrices=False)
    kept = s > jnp.finfo(w.dtype).eps * w.shape[1] * s[0]
    reciprocal = jnp.where(kept, 1 / (jnp.where(kept, s, 1) * scale), 0)
    return matmul(u, vt), matmul(vt.T * reciprocal, vt)


def _by_eigh(gram: Float[Array, "r r"]) -> tuple[Float[Array, "r r"], Float[Array, ""]]:
    """Inverse square root by eigenvalues, and the error to expect of it (see `_newton_schulz`)."""
    values, vectors = jnp.linalg.eigh(gram)
    positive = values > 0
    reciprocal = jnp.where(positive, 1 / jnp.where(positive, values, 1), jnp.inf)
    inverse = matmul(vectors * jnp.where(positive, jnp.sqrt(reciprocal), 0), vectors.T)
    return inverse, jnp.finfo(gram.dtype).eps * values[-1] * jnp.sum(reciprocal)


def _newton_schulz(gram: Float[Array, "r r"]) -> tuple[Float[Array, "r r"], Float[Array, ""]]:
    """Inverse square root by a Newton-Schulz iteration of ninth order.

    With `E = I - G / c`, multiply `T = (I - E)^{-1/2} + O(E^9)` into the result and replace `E` by
    `I - (I - E) T^2`, until the next `T` is exact to rounding. One `T` is enough where `W` is
    nearly orthonormal.

    Returns:
        The inverse square root `Z`, and the error `|Z G Z - I|_F` to expect: what the series leaves
        out, and the rounding of `G` seen through `Z`.
    """
    r = gram.shape[0]
    eps = jnp.finfo(gram.dtype).eps
    eye = jnp.eye(r, dtype=gram.dtype)

    # The iteration needs the eigenvalues of G / c below 2 and is fastest where they are 1: c is
    # their mean, unless the largest may exceed twice that.
    mean = jnp.sum(gram * eye) / r
    squares = squared_norm(gram)
    spread = jnp.sqrt(jnp.maximum(squares - r * mean * mean, 0))
    scale = jnp.maximum(mean, (mean + spread) / 2)
    e = _padded(eye - gram / scale)
    size = jnp.abs(squares / (scale * scale) - 2 * r * mean / scale + r)

    def step(state):
        z, t, e, size, _ = state
        e = jnp.eye(e.shape[0], dtype=e.dtype) - matmul(t - matmul(e, t), t)
        t = _series(e)
        return matmul(z, t), t, e, squared_norm(e), size

    # E shrinks until rounding stops it: that, and not a count, ends hopeless cases and NaN.
    t = _series(e)
    threshold = (eps * r) ** (2 / 9)
    z, _, _, size, _ = lax.while_loop(
        lambda state: (state[3] > threshold) & (state[3] < state[4]),
        step,
        (t / jnp.sqrt(scale), t, e, size, jnp.full_like(size, jnp.inf)),
    )
    z = z[:r, :r]
    return z, size**4.5 + 2 * eps * scale * squared_norm(z)


def _series(e: Float[Array, "r r"]) -> Float[Array, "r r"]:
    """The binomial series of (I - E)^{-1/2} up to E^8, in three products.

    Source: Sastre (2018), Efficient evaluation of matrix polynomials, Linear Algebra and its
    Applications 539: the scheme for degree 8, of which `_SERIES` holds the coefficients.
    """
    eye = jnp.eye(e.shape[0], dtype=e.dtype)
    a, b, c, f, g, h = _SERIES
    square = matmul(e, e)
    low = matmul(square, a * square + b * e)
    high = matmul(low + c * square + f * e, low + g * square)
    return eye + e / 2 + 3 / 8 * square + h * low + high


def _degree_eight() -> tuple[float, ...]:
    """The coefficients with which the products of `_series` make the binomial series."""
    *_, b3, b4, b5, b6, b7, b8 = (math.comb(2 * k, k) / 4**k for k in range(9))
    a = math.sqrt(b8)
    b = b7 / (2 * a)
    total = (b6 - b * b) / a  # c + g
    f = (b5 - b * total) / a
    # c g + a h = b4 - b f and f g + b h = b3, with c = total - g: a quadratic equation for g.
    linear = total - a * f / b
    g = (linear - math.sqrt(linear**2 - 4 * (b4 - b * f - a * b3 / b))) / 2
    return a, b, total - g, f, g, (b3 - f * g) / b


_SERIES = _degree_eight()


def _padded(x: Float[Array, "r r"]) -> Float[Array, "s s"]:
    """Add zero rows and columns where that makes the processor's products faster."""
    padding = -len(x) % 8 if len(x) in _SLOW_RANKS else 0
    return jnp.pad(x, ((0, padding), (0, padding)))


_INVERSE_SQRT = {"newton_schulz": _newton_schulz, "eigh": _by_eigh, "pallas": inverse_sqrt_kernel}


# The rotation that keeps P symmetric. From the rule of `differentiable`, with R = P^{-1}:
# dP P^{-1} = N - Omega and dP = dP^T give P^{-1} (N - Omega) = (N - Omega)^T P^{-1}, that is
#     P^{-1} Omega + Omega P^{-1} = P^{-1} N - N^T P^{-1},
# a Sylvester equation. In the eigenbasis of P it divides by sums of singular values, never by
# differences. As a linear solve it is differentiated implicitly and is its own transpose.
def _rotation(inverse: Float[Array, "r r"], n: Float[Array, "r r"]) -> Float[Array, "r r"]:
    mean = jnp.trace(inverse) / len(n)
    inverse = inverse / jnp.where(mean > 0, mean, 1)
    right = matmul(inverse, n)
    omega = lax.custom_linear_solve(
        lambda x: matmul(inverse, x) + matmul(x, inverse),
        right - right.T,
        lambda _, b: _sylvester(inverse, b),
        symmetric=True,
    )
    return (omega - omega.T) / 2


def _sylvester(s: Float[Array, "r r"], right: Float[Array, "r r"]) -> Float[Array, "r r"]:
    """Antisymmetric solution of S X + X S = B, for S symmetric semidefinite, B antisymmetric.

    Conjugate gradients take a few products where S is near the identity; what they have not solved
    by then is solved in the eigenbasis of S. Where S is singular, the least-squares solution.
    """
    r = len(s)
    eps = jnp.finfo(s.dtype).eps
    size = jnp.max(jnp.abs(right))
    size = jnp.where(size > 0, size, 1)
    right = right / size
    start = squared_norm(right)
    tolerance = (32 * eps) ** 2 * start
    padded = _padded(s)

    def step(state):
        x, residual, direction, old, count = state
        product = matmul(padded, direction)
        image = product - product.T
        length = old / jnp.sum(direction * image)
        x = x + length * direction
        residual = residual - length * image
        new = squared_norm(residual)
        return x, residual, residual + new / old * direction, new, count + 1

    b = _padded(right)
    x, _, _, error, _ = lax.while_loop(
        lambda state: (state[3] > tolerance) & (state[4] < 16),
        step,
        (jnp.zeros_like(b), b, b, start, 0),
    )

    def decompose(bad, x):
        values, vectors = jnp.linalg.eigh(jnp.where(bad, s, x))
        sums = values[:, None] + values
        regular = sums > eps * r * values[-1]
        inner = matmul(vectors.T, matmul(right, vectors))
        inner = jnp.where(regular, inner / jnp.where(regular, sums, 1), 0)
        return (matmul(vectors, matmul(inner, vectors.T)),)

    (x,) = repeated(~(error <= tolerance), decompose, (x[:r, :r],))
    return x * size


_factor = differentiable(_values, _rotation)
