"""Newton-Schulz iterations of ninth order, for inverse square roots and polar factors.

They use only products of small matrices, and few of them if the matrix is nearly orthonormal.
"""

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxfed.linalg import _jacobi
from jaxfed.linalg._factor import is_wide, matmul, squared_norm, times
from jaxfed.linalg.platforms import per_platform

Product = Callable[[Array, Array], Array]


# On a CPU, XLA multiplies batches of r x r matrices of these sizes two to six times slower than
# those of the next multiple of 8.
_SLOW_RANKS = (4, 5, 6, 7, 11, 14, 15)


def _iteration(
    product: Product,
    q: Float[Array, "m n"],
    inverse: Float[Array, "r r"],
    error: Float[Array, ""],
    tolerance: Float[Array, ""],
) -> tuple[Array, Array, Float[Array, ""]]:
    """The factors by the iteration of `_inverse_sqrt`, applied to the matrix itself.

    It does not square the condition number. A step multiplies the smallest singular values by 3.3,
    raises an error below 0.1 to the ninth power, and costs a product with the matrix.

    Args:
        product: the product of two matrices.
        q: the matrix times `inverse`, with singular values below the square root of 2.
        inverse: the product of all factors so far, in the end P^{-1}.
        error: an upper bound of `|Q^T Q - I|_F`; infinity if rounding hides it.
        tolerance: the target error.
    """
    r = min(q.shape)
    eye = jnp.eye(r, dtype=q.dtype)

    # The barrier stores the transpose. Otherwise the compiler merges it into the product, which
    # then takes a CPU three times as long.
    def step(state):
        q, inverse, _, count = state
        transposed = lax.optimization_barrier(q.T)
        e = eye - (product(q, transposed) if is_wide(q) else product(transposed, q))
        t = _series(product, padded_for_speed(e))[:r, :r]
        q, size = times(q, t), squared_norm(e)
        # The norm to the ninth power; `size` is its square. A large norm says nothing.
        error = jnp.where(size > 0.01, jnp.inf, size**4.5)
        return q, product(inverse, t), jnp.where(jnp.isnan(size), size, error), count + 1

    # As many as a singular value just above rounding needs to grow to 0.1, and three more.
    most = int(math.log(0.1 / float(r * jnp.finfo(q.dtype).eps)) / math.log(3.3)) + 3
    q, inverse, error, _ = lax.while_loop(
        lambda state: (state[2] > tolerance) & (state[3] < most),
        step,
        (q, inverse, error, 0),
    )
    return q, inverse, error


def _inverse_sqrt(
    product: Product, gram: Float[Array, "r r"]
) -> tuple[Float[Array, "r r"], Float[Array, ""]]:
    """Inverse square root by a Newton-Schulz iteration of ninth order.

    With `E = I - G / c`, multiply `T = (I - E)^{-1/2} + O(E^9)` into the result and replace `E` by
    `I - (I - E) T^2`, until the next `T` is exact to rounding. One `T` is enough if `W` is nearly
    orthonormal.

    Returns:
        The inverse square root `Z`, and the expected error `|Z G Z - I|_F`: the rest of the series
        and the rounding of `G`, multiplied by `Z` from both sides.
    """
    r = gram.shape[0]
    eps = jnp.finfo(gram.dtype).eps
    eye = jnp.eye(r, dtype=gram.dtype)

    scale, size = gram_scale(gram)
    e = padded_for_speed(eye - gram / scale)

    def step(state):
        z, t, e, size, _ = state
        e = jnp.eye(e.shape[0], dtype=e.dtype) - product(t - product(e, t), t)
        t = _series(product, e)
        return product(z, t), t, e, squared_norm(e), size

    # E shrinks until rounding stops it. That also ends hopeless cases and NaN without a counter.
    t = _series(product, e)
    # Below it, the ninth power of the error is rounding.
    threshold = (eps * r) ** (2 / 9)
    z, _, _, size, _ = lax.while_loop(
        lambda state: (state[3] > threshold) & (state[3] < state[4]),
        step,
        (t / jnp.sqrt(scale), t, e, size, jnp.full_like(size, jnp.inf)),
    )
    # The padding of E is zero and that of T the identity, so they never mix with the rest.
    z = z[:r, :r]
    return z, size**4.5 + 2 * eps * scale * squared_norm(z)


def by_platform(function: Callable) -> Callable:
    """Use the products of r x r matrices that suit the platform."""
    return per_platform(partial(function, matmul), tpu=partial(function, _jacobi.product))


iterated = by_platform(_iteration)


newton_schulz = by_platform(_inverse_sqrt)


def gram_scale(gram: Float[Array, "r r"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The number c by which to divide a Gram matrix G, and ‖I - G / c‖².

    The iterations need eigenvalues of G / c below 2 and are fastest if they are 1: c is the mean of
    G's eigenvalues, unless the largest may exceed twice that.
    """
    r = len(gram)
    mean = jnp.sum(gram * jnp.eye(r, dtype=gram.dtype)) / r
    squares = squared_norm(gram)
    # The standard deviation of the eigenvalues times the root of r: none is farther from their
    # mean. Rounding must not make the difference negative.
    spread = jnp.sqrt(jnp.maximum(squares - r * mean * mean, 0))
    scale = jnp.maximum(mean, (mean + spread) / 2)
    return scale, jnp.abs(squares / (scale * scale) - 2 * r * mean / scale + r)


def _series(product: Product, e: Float[Array, "r r"]) -> Float[Array, "r r"]:
    """The binomial series of (I - E)^{-1/2} up to E^8, in three products.

    Source: Sastre (2018), Efficient evaluation of matrix polynomials, Linear Algebra and its
    Applications 539: the scheme for degree 8, with the coefficients in `_SERIES`.
    """
    eye = jnp.eye(e.shape[0], dtype=e.dtype)
    a, b, c, f, g, h = _SERIES
    square = product(e, e)
    low = product(square, a * square + b * e)
    high = product(low + c * square + f * e, low + g * square)
    return eye + e / 2 + 3 / 8 * square + h * low + high


def _degree_eight() -> tuple[float, ...]:
    """The coefficients that make the products of `_series` equal the binomial series."""
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


def padded_for_speed(x: Float[Array, "r r"]) -> Float[Array, "s s"]:
    """Append zero rows and columns if that makes a CPU's products faster."""
    padding = -len(x) % 8 if len(x) in _SLOW_RANKS else 0
    return jnp.pad(x, ((0, padding), (0, padding)))
