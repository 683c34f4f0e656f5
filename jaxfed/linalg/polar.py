"""Orthonormal polar factor of a matrix: the matrix closest to it with orthonormal columns or rows.

`W = Q P` with `Q^T Q = I` and `P = (W^T W)^{1/2}`, so `Q = W P^{-1}`. The inverse square root of
the small Gram matrix `W^T W` costs a handful of `r x r` products where `W` is nearly orthonormal,
as it is after the steps of a manifold algorithm. Forming the Gram matrix squares the condition
number, so the expected error decides what follows: nothing, one correction of `Q` itself, for the
badly conditioned an iteration on `Q` from the start, or, where rank is as good as lost, a singular
value decomposition of `W`. For wide and square matrices the same goes for `W = P Q`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxfed.linalg import _jacobi
from jaxfed.linalg._dispatch import inverse_sqrt_of_many
from jaxfed.linalg._factor import (
    Factors,
    checked_matrix,
    checked_method,
    cross,
    for_derivatives,
    gram,
    matmul,
    normalized,
    one_by_one,
    repeated,
    squared_norm,
    thin_product,
)
from jaxfed.linalg._platform import per_platform

Method = Literal["newton_schulz", "eigh", "svd", "pallas"]
Product = Callable[[Array, Array], Array]

# XLA's processor backend multiplies batches of r x r matrices of these sizes two to six times
# slower than those of the next multiple of 8.
_SLOW_RANKS = (4, 5, 6, 7, 11, 14, 15)


def polar(w: Float[Array, "m n"], method: Method | None = None) -> Float[Array, "m n"]:
    r"""Orthonormal polar factor of a matrix, the orthonormal matrix closest to it.

    .. math:: Q = W (W^T W)^{-1/2} = \arg\min_{Q^T Q = I} \|W - Q\|_F

    for a tall matrix; of a wide one it is the transpose of its transpose's.

    The columns (of a wide matrix, the rows) are orthonormal to `1e-5 r` in single and `1e-12 r` in
    double precision at any condition number, with r the smaller size. Up to condition numbers of
    about 30 in single and 3000 in double precision `Q` comes from the Gram matrix, at best exact
    to rounding and at worst to the square root of the machine epsilon; from there to about 1e5 and
    1e13 from a Newton-Schulz iteration with `Q` itself; beyond, it is that of a singular value
    decomposition.

    Where `w` has lost rank every completion of the factor is as close as every other: one of them
    is returned. NaN or infinity in `w` gives NaN.

    Differentiable in both modes and at every order, also where singular values coincide. Where `w`
    has lost rank the factor is not differentiable: the derivative returned is zero in the
    directions lost, and of a `w` so small that multiples of its inverse would overflow (below some
    1e-33 in single precision). Map it over many matrices with `jax.vmap`; the decomposition then
    runs, for all, only when one of them needs it.

    Args:
        w: the matrix; products of batches of small matrices are faster if it is wide.
        method: `"newton_schulz"` (the default) or `"eigh"`, by which the inverse square root of
            the Gram matrix is found; `"svd"`, a singular value decomposition of `w` throughout; or
            `"pallas"`, Newton-Schulz in a kernel of `jaxfed_kernels` on CUDA devices too, which
            took 0.3 to 0.8 of the time on an H100. On TPUs Newton-Schulz of many matrices up to
            32 x 32 is a kernel anyway: it reads and writes far less by the compiler's count.

    Returns:
        The orthonormal factor, of the dtype of `w` (half precisions are computed in single).

    Raises:
        ValueError: if `w` is not one real floating-point matrix, or `method` is unknown.

    Source: Higham, "Functions of Matrices" (2008), chapters 6 and 8.
    """
    w = checked_matrix(w)
    chosen = checked_method(method, get_args(Method), default="newton_schulz")
    return _polar(w, chosen)


# Compiled by itself, so that a program that needs it in several places traces it once.
@partial(jax.jit, static_argnums=1)
def _polar(w: Float[Array, "m n"], method: str) -> Float[Array, "m n"]:
    return _factor(w.astype(jnp.promote_types(w.dtype, jnp.float32)), method)[0].astype(w.dtype)


def _is_wide(w: Float[Array, "m n"]) -> bool:
    return w.shape[0] <= w.shape[1]


def _gram(w: Float[Array, "m n"]) -> Float[Array, "r r"]:
    """The smaller of the two Gram matrices."""
    return matmul(w, w.T) if _is_wide(w) else gram(w)


def _inner(q: Float[Array, "m n"], w: Float[Array, "m n"]) -> Float[Array, "r r"]:
    """The smaller of the products of one with the other: Q^T W, or W Q^T if they are wide."""
    return matmul(w, q.T) if _is_wide(q) else cross(q, w)


def _times(w: Float[Array, "m n"], x: Float[Array, "r r"]) -> Float[Array, "m n"]:
    """The product with a small matrix, on the side where it fits."""
    return matmul(x, w) if _is_wide(w) else thin_product(w, x)


def _values(w: Float[Array, "m n"], method: str) -> Factors:
    """The polar factor and P^{-1}, without a derivative."""
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
    length = jnp.sqrt(_scale(gram)[0])
    unknown = jnp.full_like(length, jnp.inf)
    if method == "newton_schulz" and w.shape[0] == w.shape[1]:
        # Its Gram matrix is no smaller, so nothing is saved by that.
        start = w / length, eye / length, unknown
    else:
        inverse, error = _INVERSE_SQRT[method](gram)
        # Products of tiny entries are lost beyond what rounding says.
        error += max(w.shape) * jnp.finfo(w.dtype).tiny * squared_norm(inverse)
        good = error < eps**0.5
        start = (
            jnp.where(good, _times(w, inverse), w / length),
            jnp.where(good, inverse, eye / length),
            jnp.where(good, error, unknown),
        )
    q, inverse, error = _iterated(*start, tolerance)

    # What the loop changes keeps the compiler from decomposing before it, and thus every time.
    def decompose(bad, q, inverse):
        del inverse
        return _by_svd(jnp.where(bad, w, q), bad)

    return repeated(~(error <= tolerance), decompose, (q, inverse))


def _iteration(
    product: Product,
    q: Float[Array, "m n"],
    inverse: Float[Array, "r r"],
    error: Float[Array, ""],
    tolerance: Float[Array, ""],
) -> tuple[Array, Array, Float[Array, ""]]:
    """The factors by the iteration of `_newton_schulz` with the matrix in place of its Gram matrix.

    A step multiplies the smallest singular values by 3.3 and costs a product with the matrix, and
    the condition number is not squared. It leaves the ninth power of an error below 0.1.

    Args:
        product: the product of two matrices.
        q: the matrix times `inverse`, with singular values below the square root of 2.
        inverse: what has been multiplied with so far.
        error: an upper bound of `|Q^T Q - I|_F`, or infinity.
        tolerance: the error to reach.

    Returns:
        The polar factor, P^{-1}, and a bound of the error; infinity where the condition number is
        beyond what rounding lets one know.
    """
    r = min(q.shape)
    eye = jnp.eye(r, dtype=q.dtype)

    # Its transpose beside it because a product with the right factor transposed takes a processor
    # three times as long, and the compiler would make it that.
    def step(state):
        q, transposed, inverse, _, count = state
        e = eye - (product(q, transposed) if _is_wide(q) else product(transposed, q))
        t = _series(product, _padded(e))[:r, :r]
        q, size = _times(q, t), squared_norm(e)
        error = jnp.where(size > 0.01, jnp.inf, size**4.5)
        return q, q.T, product(inverse, t), jnp.where(jnp.isnan(size), size, error), count + 1

    most = int(math.log(0.1 / float(r * jnp.finfo(q.dtype).eps)) / math.log(3.3)) + 3
    q, _, inverse, error, _ = lax.while_loop(
        lambda state: (state[3] > tolerance) & (state[4] < most),
        step,
        (q, q.T, inverse, error, 0),
    )
    return q, inverse, error


_svd = one_by_one(
    lambda w: tuple(jnp.linalg.svd(w, full_matrices=False)),
    tpu=_jacobi.svd,
    cuda=_jacobi.svd_of_projected,
)
_eigh = one_by_one(lambda matrix: tuple(jnp.linalg.eigh(matrix)), tpu=_jacobi.eigh)


def _by_svd(w: Float[Array, "m n"], wanted: Bool[Array, ""] | None = None) -> Factors:
    """The polar factor by a singular value decomposition, for any rank and scale."""
    scale = jnp.max(jnp.abs(w))
    scale = jnp.where(scale == 0, 1, scale)
    u, s, vt = _svd(w / scale, wanted)
    kept = s > jnp.finfo(w.dtype).eps * min(w.shape) * s[0]
    reciprocal = jnp.where(kept, 1 / (jnp.where(kept, s, 1) * scale), 0)
    small = u.T if _is_wide(w) else vt
    return matmul(u, vt), matmul(small.T * reciprocal, small)


def _by_eigh(gram: Float[Array, "r r"]) -> tuple[Float[Array, "r r"], Float[Array, ""]]:
    """Inverse square root by eigenvalues, and the error to expect of it (see `_newton_schulz`)."""
    values, vectors = _eigh(gram)
    positive = values > 0
    known = jnp.where(positive, values, 1)
    inverse = matmul(vectors * jnp.where(positive, 1 / jnp.sqrt(known), 0), vectors.T)
    ratios = jnp.where(positive, values[-1] / known, jnp.inf)
    return inverse, jnp.finfo(gram.dtype).eps * jnp.sum(ratios)


def _inverse_sqrt(
    product: Product, gram: Float[Array, "r r"]
) -> tuple[Float[Array, "r r"], Float[Array, ""]]:
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

    scale, size = _scale(gram)
    e = _padded(eye - gram / scale)

    def step(state):
        z, t, e, size, _ = state
        e = jnp.eye(e.shape[0], dtype=e.dtype) - product(t - product(e, t), t)
        t = _series(product, e)
        return product(z, t), t, e, squared_norm(e), size

    # E shrinks until rounding stops it: that, and not a count, ends hopeless cases and NaN.
    t = _series(product, e)
    threshold = (eps * r) ** (2 / 9)
    z, _, _, size, _ = lax.while_loop(
        lambda state: (state[3] > threshold) & (state[3] < state[4]),
        step,
        (t / jnp.sqrt(scale), t, e, size, jnp.full_like(size, jnp.inf)),
    )
    z = z[:r, :r]
    return z, size**4.5 + 2 * eps * scale * squared_norm(z)


def _by_platform(function: Callable) -> Callable:
    """With the products of r x r matrices that suit the platform."""
    return per_platform(partial(function, matmul), tpu=partial(function, _jacobi.product))


_iterated, _newton_schulz = _by_platform(_iteration), _by_platform(_inverse_sqrt)


def _scale(gram: Float[Array, "r r"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """What to divide a Gram matrix G by, c, and ‖I - G / c‖².

    The iterations need eigenvalues of G / c below 2 and are fastest where they are 1: c is their
    mean, unless the largest may exceed twice that.
    """
    r = len(gram)
    mean = jnp.sum(gram * jnp.eye(r, dtype=gram.dtype)) / r
    squares = squared_norm(gram)
    spread = jnp.sqrt(jnp.maximum(squares - r * mean * mean, 0))
    scale = jnp.maximum(mean, (mean + spread) / 2)
    return scale, jnp.abs(squares / (scale * scale) - 2 * r * mean / scale + r)


def _series(product: Product, e: Float[Array, "r r"]) -> Float[Array, "r r"]:
    """The binomial series of (I - E)^{-1/2} up to E^8, in three products.

    Source: Sastre (2018), Efficient evaluation of matrix polynomials, Linear Algebra and its
    Applications 539: the scheme for degree 8, of which `_SERIES` holds the coefficients.
    """
    eye = jnp.eye(e.shape[0], dtype=e.dtype)
    a, b, c, f, g, h = _SERIES
    square = product(e, e)
    low = product(square, a * square + b * e)
    high = product(low + c * square + f * e, low + g * square)
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


_INVERSE_SQRT = {
    "newton_schulz": inverse_sqrt_of_many(_newton_schulz),
    "eigh": _by_eigh,
    "pallas": inverse_sqrt_of_many(_newton_schulz, cuda=True),
}


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _factor(w: Float[Array, "m n"], method: str) -> Factors:
    """The polar factor and P^{-1}, with their derivatives."""
    return _values(w, method)


# For a tall matrix, W = Q P with P = P^T gives dW = dQ P + Q dP, where Omega = Q^T dQ is
# antisymmetric because Q^T Q = I. With R = P^{-1} and N = Q^T dW R,
#     dP R = N - Omega,    dQ = dW R + Q (Omega - N),    dR = -R dP R = R (Omega - N).
# Both results come from this rule again, so it can be differentiated again.
@_factor.defjvp
def _(method, primals, tangents):
    (w,), (change,) = primals, tangents
    q, inverse = _factor(w, method)
    bounded = for_derivatives(inverse)
    moved = _tangent(q, bounded, change)
    turned = _inner(q, moved) - _inner(q, _times(change, bounded))
    inverse_change = matmul(turned, bounded) if _is_wide(q) else matmul(bounded, turned)
    return (q, inverse), (moved, inverse_change)


def _tangent(
    q: Float[Array, "m n"], inverse: Float[Array, "r r"], change: Float[Array, "m n"]
) -> Float[Array, "m n"]:
    """The derivative D of the polar factor, applied to a change of the matrix.

    `Q` is the gradient of the sum of the singular values, hence `D` a Hessian and its own
    transpose: one body serves both modes. JAX is told by way of the linear equations
    `Y - D X = A`, `X = B`, which are symmetric and whose solution at `A = 0` is `Y = D B`;
    it differentiates them implicitly when derivatives of higher order ask for that.
    """

    def derivative(change, solve):
        m = _inner(q, change)
        n = matmul(inverse, m) if _is_wide(q) else matmul(m, inverse)
        return _times(change, inverse) + _times(q, _rotation(inverse, m, solve) - n)

    return lax.custom_linear_solve(
        lambda pair: jnp.stack([pair[1] - derivative(pair[0], _differentiable_sylvester), pair[0]]),
        jnp.stack([jnp.zeros_like(change), change]),
        lambda _, sides: jnp.stack([sides[1], sides[0] + derivative(sides[1], _sylvester)]),
        symmetric=True,
    )[1]


# The Omega above: dP = dP^T gives P Omega + Omega P = M - M^T = B with M = Q^T dW, a Sylvester
# equation. In the eigenbasis of R = P^{-1} it multiplies by r_i r_j / (r_i + r_j), never dividing
# by differences of singular values. With R = c (I + D), s = 1 + (d_i + d_j) / 2 and
# t = (d_i - d_j) / 2 that is c (s - t^2 / s) / 2: two products give s and t^2, and what is left to
# solve is of second order in D. Wide matrices have -M in place of M.
def _rotation(
    inverse: Float[Array, "r r"], m: Float[Array, "r r"], solve: Callable[[Array, Array], Array]
) -> Float[Array, "r r"]:
    r = len(m)
    mean = jnp.trace(inverse) / r
    scaled = inverse / jnp.where(mean > 0, mean, 1)
    d, b = _padded(scaled - jnp.eye(r, dtype=m.dtype)), _padded(m - m.T)
    size = lax.stop_gradient(jnp.max(jnp.abs(b)))
    b = b / jnp.where(size > 0, size, 1)
    product = matmul(d, b)
    first = b + (product - product.T) / 2
    product = matmul(d, product + product.T)
    second = solve(scaled, (product - product.T)[:r, :r] / 2)
    return size * mean / 2 * (first[:r, :r] - second)


def _differentiable_sylvester(
    s: Float[Array, "r r"], right: Float[Array, "r r"]
) -> Float[Array, "r r"]:
    """What `_sylvester` solves, relative to the right side: that of a derivative may be tiny."""

    def relative(_, right):
        size = jnp.max(jnp.abs(right))
        size = jnp.where(size > 0, size, 1)
        return _sylvester(s, right / size) * size

    return lax.custom_linear_solve(
        lambda x: matmul(s, x) + matmul(x, s), right, relative, symmetric=True
    )


def _antisymmetric_solution(
    multiply: Product, s: Float[Array, "r r"], right: Float[Array, "r r"]
) -> Float[Array, "r r"]:
    """Antisymmetric solution of S X + X S = B, for S symmetric semidefinite, B antisymmetric.

    It leaves a residual of the size of rounding in numbers of order one. Three terms of a series
    take two products and are enough where S is near the identity and B small; else conjugate
    gradients; what they have not solved in a few steps is solved in the eigenbasis of S. Where S is
    singular, the least-squares solution.
    """
    r = len(s)
    eps = jnp.finfo(s.dtype).eps
    tolerance = (32 * eps) ** 2
    padded, b = _padded(s), _padded(right)

    def image(x):
        product = multiply(padded, x)
        return product - product.T

    def step(state):
        x, residual, direction, old, count = state
        change = image(direction)
        length = old / jnp.sum(direction * change)
        x = x + length * direction
        residual = residual - length * change
        new = squared_norm(residual)
        return x, residual, residual + new / old * direction, new, count + 1

    second = b - image(b) / 2
    third = second - image(second) / 2
    start = squared_norm(b)
    # Its next term multiplies by halves of sums of two different eigenvalues of S - I, cubed.
    left_out = (squared_norm(s - jnp.eye(r, dtype=s.dtype)) / 2) ** 3 * start
    enough = left_out <= tolerance
    x, _, _, error, _ = lax.while_loop(
        lambda state: (state[3] > tolerance) & (state[4] < 16),
        step,
        (
            jnp.where(enough, (b + second + third) / 2, 0),
            b, b, jnp.where(enough, 0, start), 0,
        ),
    )  # fmt: skip

    def decompose(bad, x):
        values, vectors = _eigh(jnp.where(bad, s, x), bad)
        sums = values[:, None] + values
        regular = sums > eps * r * values[-1]
        inner = matmul(vectors.T, matmul(right, vectors))
        inner = jnp.where(regular, inner / jnp.where(regular, sums, 1), 0)
        return (matmul(vectors, matmul(inner, vectors.T)),)

    return repeated(~(error <= tolerance), decompose, (x[:r, :r],))[0]


_sylvester = _by_platform(_antisymmetric_solution)
