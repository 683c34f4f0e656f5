"""Decompositions by rotations and projections of whole rows, for array processors.

XLA's own decompositions for a TPU take a minute to compile if a program has several. These are
short loops of elementwise work, which compile in a second, run on any number of small matrices side
by side and use no products of reduced precision. They need more operations than a library, so CPUs
do not use them.

CUDA's libraries compute the eigenvalues of many small matrices at once, but Householder reflections
and singular values of tall matrices one by one: on an H100, 37 ms for 100 of 784 x 5, and 3.2 s for
10,000 of 64 x 5, where `svd_of_projected` took 0.5 and 3.0 ms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

_SWEEPS = 30  # six to ten are usual
_SMALL = 64


def are_small(*matrices: Array) -> bool:
    """Whether `product` avoids the matrix unit."""
    return max(length for x in matrices for length in x.shape) <= _SMALL


def product(a: Float[Array, "m k"], b: Float[Array, "k n"]) -> Float[Array, "m n"]:
    """The product of two matrices, at full precision.

    The matrix unit takes 128 x 128 numbers of half precision at a time. A small product at full
    precision wastes most of it, in six passes, with a program ten times as long as a plain sum's,
    which takes ten times as long to compile.
    """
    if are_small(a, b):
        return jnp.sum(a[:, :, None] * b, axis=1)
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def first_true(holds: Bool[Array, "n ..."]) -> Bool[Array, "n ..."]:
    """Keep only the first True along the leading axis.

    XLA implements `argmax` by reducing pairs, which can take a minute to compile for a TPU.
    """
    places = _places(holds)
    return places == jnp.min(jnp.where(holds, places, len(holds)), axis=0)


def _places(x: Array) -> Array:
    """The numbers 0, 1, ... along the leading axis, with the axes of `x`."""
    return jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))


@jax.custom_batching.custom_vmap
def gram_schmidt(
    x: Float[Array, "k n *many"],
) -> tuple[Float[Array, "k n *many"], Float[Array, "k k *many"]]:
    """Orthonormal rows that span the rows of a wide matrix, row by row.

    Every row is projected twice, which makes it orthogonal to rounding. A row that depends on
    earlier ones is replaced by the coordinate axis farthest from them, made orthogonal.

    Args:
        x: the matrix, or many along the last axes, where `jax.vmap` puts them. If the few entries
            of a row came last, the compiler would store each row in a tile of its own.

    Returns:
        The rows Q, and the lower triangular T with Q = T X; zeros for rows that were replaced.

    Source: Giraud, Langou & Rozložník (2005), The loss of orthogonality in the Gram-Schmidt
    orthogonalization process ("twice is enough").
    """
    k, n, *many = x.shape
    eps = jnp.finfo(x.dtype).eps
    scale = jnp.max(jnp.abs(x), axis=1)
    # Lengths by way of the largest entries, so that no square overflows or vanishes.
    scale = scale * _lengths(x / jnp.where(scale == 0, 1, scale)[:, None])
    reciprocal = 1 / jnp.where(scale == 0, 1, scale)

    # Each pass is one turn of a loop; if unrolled, the compiler would repeat a pass in the next.
    def step(i, state):
        q, t = state
        place = _places(x) == i  # a mask, which is faster for batches than an index
        taken = jnp.sum(q * q, axis=0)
        axis = first_true(taken == jnp.min(taken, axis=0))

        def project(number, state):
            row, made_of, length = state
            inner = jnp.sum(q * row, axis=1)
            row = row - jnp.sum(q * inner[:, None], axis=0)
            left = jnp.sqrt(jnp.sum(row * row, axis=0))
            shorter = 1 / jnp.where(left == 0, 1, left)
            made_of = (made_of - jnp.sum(t * inner[:, None], axis=0)) * shorter
            # Passes 0 and 1 decide whether the row depends on earlier ones. If so, passes 2 and 3
            # make the coordinate axis orthogonal that replaces it; it keeps a length of at least
            # k^(-1/2), so they need no test.
            length = jnp.where(number < 2, length * left, length)
            dependent = (number == 1) & (length <= eps * n)
            return (
                jnp.where(dependent, axis.astype(x.dtype), row * shorter),
                made_of,
                jnp.where(dependent, 0, length),
            )

        row = jnp.sum(jnp.where(place, x * reciprocal[:, None], 0), axis=0)
        unit = jnp.broadcast_to(place[:, 0], (k, *many)).astype(x.dtype)
        row, made_of, length = lax.fori_loop(0, 4, project, (row, unit, jnp.ones(many, x.dtype)))
        made_of = jnp.where(length == 0, 0, made_of)
        return jnp.where(place, row, q), jnp.where(place, made_of, t)

    q, t = lax.fori_loop(0, k, step, (jnp.zeros_like(x), jnp.zeros((k, k, *many), x.dtype)))
    return q, t * reciprocal


@gram_schmidt.def_vmap
def _(size, batched, x):
    del size, batched
    q, t = gram_schmidt(jnp.moveaxis(x, 0, -1))
    return (jnp.moveaxis(q, -1, 0), jnp.moveaxis(t, -1, 0)), (True, True)


def orthonormalized(w: Float[Array, "d r"]) -> tuple[Float[Array, "d r"], Float[Array, "r r"]]:
    """The factor Q of W = Q R, with a positive diagonal of R, and R^{-1}.

    Columns that depend on earlier ones are replaced, and get zeros in R^{-1}.
    """
    q, t = gram_schmidt(w.T)
    return q.T, t.T


def svd(
    w: Float[Array, "m n"],
) -> tuple[Float[Array, "m k"], Float[Array, " k"], Float[Array, "k n"]]:
    """Thin singular value decomposition by one-sided Jacobi rotations, values descending.

    If values are lost to rounding, arbitrary vectors complete the bases. NaN and infinity give NaN.

    Source: Demmel & Veselić (1992), Jacobi's method is more accurate than QR.
    """
    if w.shape[0] > w.shape[1]:
        left, values, right = svd(w.T)
        return right.T, values, left.T
    k, n = w.shape
    # Apply the rotations to an identity too, which accumulates them.
    both = _orthogonalized(jnp.concatenate([w, jnp.eye(k, dtype=w.dtype)], axis=1), n)
    values = _lengths(both[:, :n])
    values, both = _sorted(-values, both)
    values, rows, turns = -values, both[:, :n], both[:, n:]
    finite = jnp.isfinite(w).all()
    # The rows are orthogonal up to rounding, but those of lost values consist of rounding alone,
    # and are replaced.
    right = gram_schmidt(rows)[0]
    left, values, right = (jnp.where(finite, x, jnp.nan) for x in (turns.T, values, right))
    return left, values, right


def svd_of_projected(
    w: Float[Array, "m n"],
) -> tuple[Float[Array, "m k"], Float[Array, " k"], Float[Array, "k n"]]:
    """The result of `svd`, through the library's decomposition of a small square factor."""
    if w.shape[0] > w.shape[1]:
        left, values, right = svd_of_projected(w.T)
        return right.T, values, left.T
    q, _ = gram_schmidt(w)
    small = jnp.matmul(w, q.T, precision=lax.Precision.HIGHEST)
    left, values, right = jnp.linalg.svd(small, full_matrices=False)
    return left, values, jnp.matmul(right, q, precision=lax.Precision.HIGHEST)


def eigh(matrix: Float[Array, "d d"]) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
    """Eigenvalues of a symmetric matrix, ascending, and eigenvectors as columns.

    The matrix is shifted by twice a bound, so that its eigenvalues lie between one and three times
    the bound. Rotations make its rows orthogonal; they are then the eigenvectors times these
    eigenvalues.
    """
    eye = jnp.eye(len(matrix), dtype=matrix.dtype)
    matrix = (matrix + matrix.T) / 2
    bound = jnp.max(jnp.sum(jnp.abs(matrix), axis=1))
    scaled = matrix / jnp.where(bound == 0, 1, bound)
    rows = _orthogonalized(scaled + 2 * eye, len(matrix))
    vectors = rows / _lengths(rows)[:, None]
    # Use Rayleigh quotients, in which errors of the vectors count only squared.
    images = product(vectors, scaled)
    values, vectors = _sorted(bound * jnp.sum(images * vectors, axis=1), vectors)
    finite = jnp.isfinite(bound)
    return jnp.where(finite, values, jnp.nan), jnp.where(finite, vectors.T, jnp.nan)


def _sorted(
    keys: Float[Array, " k"], rows: Float[Array, "k n"]
) -> tuple[Float[Array, " k"], Float[Array, "k n"]]:
    """Sort keys in ascending order, and rows with them, without gathering whole rows."""
    places = jnp.arange(len(keys))
    if len(keys) > _SMALL:
        spread = jnp.broadcast_to(keys[:, None], rows.shape)
        spread, rows = lax.sort((spread, rows), dimension=0, num_keys=1, is_stable=True)
        return spread[:, 0], rows
    # Count the smaller keys, since a sort would copy to another layout and back.
    earlier = (keys < keys[:, None]) | ((keys == keys[:, None]) & (places < places[:, None]))
    wanted = places[:, None] == jnp.sum(earlier, axis=1)
    return (
        jnp.sum(jnp.where(wanted, keys, 0), axis=1),
        jnp.sum(jnp.where(wanted[:, :, None], rows, 0), axis=1),
    )


def _lengths(rows: Float[Array, "k n ..."]) -> Float[Array, "k ..."]:
    return jnp.sqrt(jnp.sum(rows * rows, axis=1))


def _orthogonalized(x: Float[Array, "k n"], width: int) -> Float[Array, "k n"]:
    """Rotate pairs of rows until all are orthogonal in their first `width` columns.

    In a sweep every row meets every other once; half as many pairs as there are rows rotate at
    once.

    Source: Brent & Luk (1985), The solution of singular-value and symmetric eigenvalue problems on
    multiprocessor arrays.
    """
    k = len(x)
    half = (k + 1) // 2
    # Rows meet in pairs, so their number must be even; a row of zeros is orthogonal to all others
    # and never rotates.
    x = jnp.pad(x, ((0, 2 * half - k), (0, 0)))
    tolerance = jnp.finfo(x.dtype).eps * max(width, 4) ** 0.5

    def turn(_, state):
        upper, lower, largest = state
        a, b = upper[:, :width], lower[:, :width]
        squares, others = jnp.sum(a * a, axis=1), jnp.sum(b * b, axis=1)
        inner = jnp.sum(a * b, axis=1)
        lengths = jnp.sqrt(squares) * jnp.sqrt(others)
        wanted = jnp.abs(inner) > tolerance * lengths
        # The smaller of the angles that make the two orthogonal.
        slope = (others - squares) / (2 * jnp.where(wanted, inner, 1))
        tangent = jnp.where(slope < 0, -1, 1) / (jnp.abs(slope) + jnp.sqrt(1 + slope * slope))
        tangent = jnp.where(wanted, tangent, 0)[:, None]
        cosine = lax.rsqrt(1 + tangent * tangent)
        upper, lower = (
            cosine * (upper - tangent * lower),
            cosine * (lower + tangent * upper),
        )
        relative = jnp.where(wanted, jnp.abs(inner) / jnp.where(wanted, lengths, 1), 0)
        # Keep the first row, and move the others on by one place around it.
        if half > 1:
            upper, lower = (
                jnp.concatenate([upper[:1], lower[:1], upper[1:-1]]),
                jnp.concatenate([lower[1:], upper[-1:]]),
            )
        return upper, lower, jnp.maximum(largest, jnp.max(relative))

    def sweep(state):
        upper, lower, _, count = state
        none = jnp.zeros((), x.dtype)
        # After these turns every row is back in its place, the padding last.
        return *lax.fori_loop(0, 2 * half - 1, turn, (upper, lower, none)), count + 1

    def unfinished(state) -> Bool[Array, ""]:
        # With NaN, nothing is above the tolerance, and the loop ends.
        return (state[2] > 0) & (state[3] < _SWEEPS)

    start = x[:half], x[half:], jnp.ones((), x.dtype), 0
    upper, lower, _, _ = lax.while_loop(unfinished, sweep, start)
    return jnp.concatenate([upper, lower])[:k]
