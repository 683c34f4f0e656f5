"""Checks and products shared by the polar factor, the QR factor and other decompositions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float

from jaxfed._checks import checked_array
from jaxfed.linalg.platforms import Maps, in_one_row, mapped_sizes, per_platform
from jaxfed.linalg.precision import client_matmul

Factorization = tuple[Float[Array, "m n"], Float[Array, "r r"]]

# Times its smaller size, the size of matrices whose decomposition takes a CPU about a tenth of a
# millisecond.
SMALL = 2**17

# Always in full precision, even if the user has chosen less for products with data
# (`jaxfed.linalg.precision`), or QᵀQ = I would not hold.
matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def squared_norm(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Squared Frobenius norm."""
    return jnp.sum(x * x)


def gram(w: Float[Array, "d r"]) -> Float[Array, "r r"]:
    """The Gram matrix W^T W."""
    return cross(w, w)


def cross(q: Float[Array, "d r"], w: Float[Array, "d s"]) -> Float[Array, "r s"]:
    """The product Q^T W."""
    # For few rows, elementwise work is 3 to 8 times as fast on a CPU as a batch of small products
    # with the left factor transposed. For many tiny matrices, a sum of outer products is up to ten
    # times as fast again, but it takes three times as long to compile.
    if len(w) > 32:
        return matmul(q.T, w)
    if len(w) > 16 or q.shape[1] * w.shape[1] > 16:
        return jnp.sum(q[:, :, None] * w[:, None, :], axis=0)
    first, *rest = (jnp.outer(q[i], w[i]) for i in range(len(w)))
    return sum(rest, first)


def thin_product(w: Float[ArrayLike, "d r"], x: Float[ArrayLike, "r s"]) -> Float[Array, "d s"]:
    """The product of a matrix of few columns with a small matrix, at full precision.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    w = checked_array("w", w, "d r", half=True)
    d, r = w.shape
    x = checked_array("x", x, f"{r} s", half=True)
    if by_sums(d, r):
        first, *rest = (w[:, i : i + 1] * x[i] for i in range(r))
        return sum(rest, first)
    return matmul(w, x)


def by_sums(d: int, r: int) -> bool:
    """Whether `thin_product` adds outer products, up to 8 times as fast as a batched product."""
    return r <= 2 or (r <= 5 and d >= 64)


def transposed_product(
    x: Float[ArrayLike, "n d"], y: Float[ArrayLike, "n r"]
) -> Float[Array, "d r"]:
    """The product XᵀY of a large matrix and one with few columns, at full precision.

    Unlike `x.T @ y`, it does not transpose when mapped over many matrices. A CPU would copy them,
    which takes two thirds of the time.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    x = checked_array("x", x, "n d", half=True)
    return _product_of_transposed(x, checked_array("y", y, f"{len(x)} r", half=True))


def _as_written(x: Float[Array, "n d"], y: Float[Array, "n r"]) -> Float[Array, "d r"]:
    return matmul(x.T, y)


def _as_it_lies(
    maps: Maps, x: Float[Array, "... n d"], y: Float[Array, "... n r"]
) -> Float[Array, "... d r"]:
    xs, ys = in_one_row(maps, [x, y])
    # Without the barrier the compiler would transpose the product back.
    product = lax.optimization_barrier(matmul(ys.mT, xs)).mT
    return product.reshape(*mapped_sizes(maps, [x, y]), *product.shape[1:])


_product_of_transposed = per_platform(_as_written, kernels={"cpu": _as_it_lies})


def is_wide(w: Float[Array, "m n"]) -> bool:
    """Whether the rows, not the columns, become orthonormal."""
    return w.shape[0] <= w.shape[1]


def smaller_product(q: Float[Array, "m n"], w: Float[Array, "m n"]) -> Float[Array, "r r"]:
    """The smaller of the two products of Q and W: QᵀW, or WQᵀ if they are wide."""
    return client_matmul(w, q.T) if is_wide(q) else cross(q, w)


def times(w: Float[Array, "m n"], x: Float[Array, "r r"]) -> Float[Array, "m n"]:
    """The product with a small matrix, on the side where it fits."""
    return client_matmul(x, w, once=True) if is_wide(w) else thin_product(w, x)


def normalized(w: Float[Array, "d 1"]) -> Factorization:
    """The polar and QR factors of one column, which coincide: w / |w| and 1 / |w|, for any |w|."""
    # Divide by the largest entry first, so that squares neither overflow nor vanish. A column of
    # zeros becomes the first coordinate axis, with derivative zero.
    scale = jnp.max(jnp.abs(w))
    zero = scale == 0
    scaled = jnp.where(zero, jnp.zeros_like(w).at[0].set(1), w / jnp.where(zero, 1, scale))
    norm = jnp.sqrt(squared_norm(scaled))
    return scaled / norm, jnp.where(zero, 0, 1 / (norm * scale)).reshape(1, 1)


def for_derivatives(inverse: Float[Array, "r r"]) -> Float[Array, "r r"]:
    """The inverse of a factor, or zero if its multiples would overflow, as in `ratio`."""
    limit = 1 / (1e5 * float(jnp.finfo(inverse.dtype).tiny))
    return jnp.where(jnp.max(jnp.abs(inverse)) < limit, inverse, 0)


def repeated(bad: Bool[Array, ""], again: Callable, result: tuple) -> tuple:
    """The result, or that of a more expensive method `(bad, *result) -> result` if it is bad.

    This is a loop of at most one turn instead of a `lax.cond`: under `jax.vmap`, a `cond` runs both
    branches for all matrices, but this loop runs only if some result is bad. Everything that the
    method computes must depend on its arguments; otherwise the compiler moves it out of the loop
    and always computes it.
    """

    def turn(state):
        bad, *result = state
        return jnp.zeros_like(bad), *again(bad, *result)

    return lax.while_loop(lambda state: state[0], turn, (bad, *result))[1:]


def one_by_one(
    library: Callable[[Any], tuple], **others: Callable[[Any], tuple]
) -> Callable[..., tuple]:
    """Wrap a library's decomposition so that, under `jax.vmap`, a CPU runs one matrix at a time.

    For several matrices at once, jaxlib's LAPACK kernels (up to 0.11 at least) wait on a thread of
    a pool for other threads of that pool. If as many wait as there are threads, in runs on several
    devices or in independent operations of one program, they deadlock.

    The library maps one matrix, or a tree of arrays, to a tuple of arrays, and so do the `others`
    on their platforms, `tpu` or `cuda` (see `jaxfed.linalg._jacobi`). The result takes `(matrix,
    wanted=None)`: if `wanted` is False, the arrays are arbitrary and cost a CPU no time.
    """
    decompose = per_platform(library, None, None, **others) if others else library

    @jax.custom_batching.custom_vmap
    def one(matrix, wanted):
        if wanted is None:  # compiles faster without the condition
            return decompose(matrix)

        def nothing(matrix):
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(decompose, matrix))

        return lax.cond(wanted, decompose, nothing, matrix)

    @one.def_vmap
    def several(axis_size, in_batched, matrices, wanted):
        if not any(in_batched):  # only a tangent is mapped
            found = decompose(matrices)
        else:
            # Mapped again, over runs, it comes back here.
            spread = jax.tree.map(
                lambda x, batched: x if batched else jnp.broadcast_to(x, (axis_size, *x.shape)),
                (matrices, wanted),
                tuple(in_batched),
            )
            found = lax.platform_dependent(
                *spread,
                cpu=lambda *given: lax.map(lambda x: one(*x), given),
                default=lambda matrices, _: jax.vmap(decompose)(matrices),
            )
        return found, jax.tree.map(lambda _: any(in_batched), found)

    return lambda matrix, wanted=None: one(matrix, wanted)


def checked_matrix(w: Float[ArrayLike, "m n"]) -> Float[Array, "m n"]:
    """The matrix as an array; a `ValueError` if it is not one real floating-point matrix."""
    return checked_array("w", w, "m n", whole=False, half=True)


def factor_alone(factors: Callable[..., Factorization]) -> Callable[..., Array]:
    """The first factor only, in the type of the matrix; half precisions are computed in single.

    It is compiled separately, so that a program that uses it in several places traces it once.
    """

    @partial(jax.jit, static_argnums=1)
    def factor(w: Float[Array, "m n"], method: str | None) -> Float[Array, "m n"]:
        full = w.astype(jnp.promote_types(w.dtype, jnp.float32))
        return factors(full, method=method)[0].astype(w.dtype)

    return factor
