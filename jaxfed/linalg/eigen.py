"""Leading eigenvectors of symmetric matrices."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from jaxfed._checks import check_whole, checked_array, refuse
from jaxfed.linalg import _jacobi
from jaxfed.linalg._factor import matmul, one_by_one, repeated
from jaxfed.linalg.basis import orthonormalize
from jaxfed.linalg.derivatives import DECOMPOSITION, constant
from jaxfed.linalg.division import reciprocal
from jaxfed.linalg.platforms import per_platform

Eigen = tuple[Float[Array, " rank"], Float[Array, "d rank"]]

# Matrices of at least LARGE rows, and SHARE times as many rows as wanted eigenvectors, use a block
# Lanczos iteration of at most CYCLES cycles of BLOCKS blocks instead of a decomposition. A failure
# wastes a tenth of the time of a decomposition.
LARGE, SHARE, CYCLES, BLOCKS = 512, 32, 12, 4
CYCLES_OF_ONE = 32  # for the largest eigenvalue alone, where a failure wastes a quarter


def top_eigenvectors(matrix: Float[ArrayLike, "d d"], rank: int) -> Eigen:
    """The largest eigenvalues of a symmetric matrix, in descending order, and their eigenvectors.

    The entry of largest magnitude of every eigenvector is positive. The derivative is that of the
    eigenvalues and of the subspace. It leaves out rotations of the eigenvectors within the
    subspace, which are undefined if eigenvalues coincide. So differentiate only functions of the
    subspace (its projection, a distance, an energy), which are right even if eigenvalues within it
    coincide. If the smallest eigenvalue kept equals the largest left out, or differs from it by
    less than 1e5 times the smallest normal number (1e-33 in single precision), the subspace is not
    differentiable, and the derivative is zero in the directions concerned. Second derivatives are
    those of the same functions; that of a single eigenvalue requires it to be distinct. There are
    no third derivatives.

    Args:
        matrix: the symmetric matrix; its symmetric part is used.
        rank: number of eigenvectors, from 1 to d.

    Returns:
        The eigenvalues, and the eigenvectors as columns.

    Raises:
        ValueError: if `matrix` is not one square, real floating-point matrix, or `rank` is not from
            1 to d.
    """
    matrix = checked_square("matrix", matrix)
    check_whole("rank", rank, most=len(matrix))
    return _top(matrix, rank)


@jax.jit
def top_eigenvalue(matrix: Float[Array, "d d"]) -> Float[Array, ""]:
    """The largest eigenvalue of a symmetric matrix, as differentiable as `top_eigenvectors`."""
    return _top_eigenvalue(matrix)


@partial(jax.jit, static_argnums=1)
def _top(matrix: Float[Array, "d d"], rank: int) -> Eigen:
    return _top_eigenvectors(matrix, rank=rank)


def checked_square(name: str, matrix: Float[ArrayLike, "d d"]) -> Float[Array, "d d"]:
    """The matrix as an array; a `ValueError` if it is not one square floating-point matrix."""
    square = checked_array(name, matrix, "d d", whole=False)
    if square.shape[0] != square.shape[1]:
        raise refuse(name, "a square matrix", square)
    return square


eigh = one_by_one(lambda matrix: tuple(jnp.linalg.eigh(matrix)), tpu=_jacobi.eigh)


def descending(matrix: Float[Array, "d d"]) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
    """All eigenvalues of a symmetric matrix, descending, and eigenvectors; no derivative."""
    values, vectors = eigh(matrix)
    return values[::-1], with_sign(vectors[:, ::-1])


def with_sign(vectors: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Make the entry of largest magnitude of every column positive."""
    sizes = jnp.abs(vectors)
    first = _jacobi.first_true(sizes == jnp.max(sizes, axis=0))
    largest = jnp.sum(jnp.where(first, vectors, 0), axis=0)
    return vectors * jnp.where(largest < 0, -1, 1).astype(vectors.dtype)


def _values(matrix: Float[Array, "d d"], rank: int) -> Eigen:
    if len(matrix) < LARGE or SHARE * rank > len(matrix):
        values, vectors = descending(matrix)
        return values[:rank], vectors[:, :rank]

    def decompose(bad, values, vectors):
        # It depends on the iteration's result; see `repeated`.
        values, vectors = eigh(jnp.where(bad, matrix, values[0]), bad)
        return values[::-1][:rank], vectors[:, ::-1][:, :rank]

    tolerance = float(jnp.finfo(matrix.dtype).eps) * len(matrix) ** 0.5
    (values, vectors), converged = _by_products((matrix + matrix.T) / 2, rank, tolerance, CYCLES)
    values, vectors = repeated(~converged, decompose, (values, vectors))
    return values, with_sign(vectors)


def _largest(matrix: Float[Array, "d d"]) -> Float[Array, ""]:
    if len(matrix) < LARGE:
        return descending(matrix)[0][0]

    def decompose(bad, value):
        return (eigh(jnp.where(bad, matrix, value), bad)[0][-1],)

    # The error is at most the square of the residual over the gap between the two largest
    # eigenvalues: rounding for gaps from the cube root of eps on, a hundred times less beyond.
    tolerance = float(jnp.finfo(matrix.dtype).eps) ** (2 / 3)
    symmetric = (matrix + matrix.T) / 2
    ((value,), _), converged = _by_products(symmetric, 1, tolerance, CYCLES_OF_ONE)
    return repeated(~converged, decompose, (value,))[0]


def _by_products(
    matrix: Float[Array, "d d"], rank: int, tolerance: float, cycles: int
) -> tuple[Eigen, Bool[Array, ""]]:
    """Leading eigenvectors by restarted block Lanczos iteration, and whether they converged.

    They converged if residuals |S v - lambda v| are at most `tolerance` times the largest
    eigenvalue. A block has a few more columns than the rank, so that no eigenvector is missed and
    the wanted ones do not wait for the slowest of them.

    Source: Golub & Underwood (1977), The block Lanczos method for computing eigenvalues.
    """
    size, width = len(matrix), rank + 8
    scale = jnp.max(jnp.abs(matrix))  # so that squares of residuals neither overflow nor vanish
    matrix = matrix / jnp.where(scale > 0, scale, 1)

    def extended(k, state):
        basis, products = state
        block = lax.dynamic_slice_in_dim(products, k * width, width, axis=1)
        for _ in range(2):  # rounding in the first pass brings parts of the basis back
            block = orthonormalize(block - matmul(basis, matmul(basis.T, block)))
        place = 0, (k + 1) * width
        basis = lax.dynamic_update_slice(basis, block, place)
        return basis, lax.dynamic_update_slice(products, matmul(matrix, block), place)

    def cycle(state):
        block, product, _, _, count = state
        room = jnp.zeros((size, (BLOCKS - 1) * width), matrix.dtype)
        first = (jnp.concatenate([x, room], axis=1) for x in (block, product))
        basis, products = lax.fori_loop(0, BLOCKS - 1, extended, tuple(first))
        # Rayleigh-Ritz: the best eigenvectors within the basis, from products that are there
        # already.
        inner = matmul(basis.T, products)
        values, turn = eigh((inner + inner.T) / 2)
        values, turn = values[::-1][:width], turn[:, ::-1][:, :width]
        block, product = matmul(basis, turn), matmul(products, turn)
        rest = jnp.linalg.norm((product - values * block)[:, :rank], axis=0)
        largest = jnp.maximum(jnp.abs(values[0]), jnp.max(jnp.linalg.norm(product, axis=0)))
        return block, product, values, jnp.max(rest) <= tolerance * largest, count + 1

    def unfinished(state):
        return ~state[3] & (state[4] < cycles)

    # Always the same start, since the result is a function of the matrix alone.
    start = orthonormalize(jax.random.normal(jax.random.key(0), (size, width), matrix.dtype))
    first = start, matmul(matrix, start), jnp.zeros(width, matrix.dtype), jnp.zeros((), bool), 0
    block, _, values, converged, _ = lax.while_loop(unfinished, cycle, first)
    return (scale * values[:rank], block[:, :rank]), converged


class Decomposition(NamedTuple):
    """Leading eigenvalues and eigenvectors of a symmetric matrix S, without derivative.

    Attributes:
        values: eigenvalues, descending.
        vectors: their eigenvectors, orthonormal.
        least: the largest difference at which eigenvalues count as equal.
        others: arrays for the resolvent.
    """

    values: Float[Array, " r"]
    vectors: Float[Array, "d r"]
    least: Float[Array, ""]
    others: PyTree


# (what S is made of, X) -> S X, differentiable.
Image = Callable[[PyTree, Array], Array]
# (what S is made of, its decomposition, Y) -> the solution Z of Z diag(values) - S Z = Y for Y
# orthogonal to the eigenvectors; zero where there is no unique solution.
Resolvent = Callable[[PyTree, Decomposition, Array], Array]


def _rule(primals, tangents, rank):
    matrix, change = ((x + x.T) / 2 for (x,) in (primals, tangents))
    values, vectors = checkpoint_name(descending(constant(matrix, "eigenvectors")), DECOMPOSITION)
    gaps = values[:rank] - values[rank:, None]
    size = jnp.maximum(jnp.abs(values[0]), jnp.abs(values[-1]))
    info = jnp.finfo(matrix.dtype)
    # The reciprocal of a gap must not be near overflow either.
    least = jnp.maximum(info.eps * len(matrix) * size, 1e5 * float(info.tiny))
    others = vectors[:, rank:], reciprocal(gaps, gaps > least)
    found = Decomposition(values[:rank], vectors[:, :rank], least, others)
    return perturbed(matrix, change, found, image=matmul, resolvent=_resolvent)


def _resolvent(matrix, found, y):
    dropped, reciprocals = found.others
    return matmul(dropped, reciprocals * matmul(dropped.T, y))


def _rule_of_largest(primals, tangents):
    (values, _), (changes, _) = _rule(primals, tangents, 1)
    return values[0], changes[0]


_top_eigenvectors = per_platform(_values, _rule)
_top_eigenvalue = per_platform(_largest, _rule_of_largest)


def perturbed(
    of: PyTree, by: PyTree, found: Decomposition, *, image: Image, resolvent: Resolvent
) -> tuple[Eigen, Eigen]:
    """Eigenvalues and eigenvectors U of a symmetric matrix S, and the changes of both, for a rule.

    S is a function of the arrays `of`, which change by `by`. `image` and `resolvent` must always be
    the same functions: products with S, and with the inverse of lambda - S. The change of U is the
    Z with `UᵀZ = 0` that solves the equation of perturbation theory

        (I - UUᵀ)(Z UᵀSU - S Z - dS U) = 0.

    The part within the span of U, which would divide by differences of the eigenvalues, is left
    out, since no function of the subspace depends on it. Second derivatives are those of this
    equation, not of a decomposition, which would divide by differences of the eigenvalues left out,
    often zero.
    """
    inner, vectors = _turning(of, found, image=image, resolvent=resolvent)
    moved = _along(image, of, by, vectors)

    def beyond(x):
        return x - matmul(vectors, matmul(vectors.T, x))

    def equation(z):
        rest = beyond(z)
        # On the span of U, about which the equation says nothing, add a multiple of the identity,
        # as large as S: the system is then regular there, and its solution orthogonal to U.
        return beyond(matmul(rest, inner) - image(of, rest)) + size * (z - rest)

    def solution(_, y):
        rest = beyond(y)
        return beyond(resolvent(of, found, rest)) + (y - rest) / size

    size = jnp.max(jnp.abs(found.values))
    size = jnp.where(size > found.least, size, 1)
    turned = lax.custom_linear_solve(equation, beyond(moved), solution, symmetric=True)
    # A single eigenvalue depends on how its vector rotates within the span.
    gaps = found.values - found.values[:, None]
    within = inner * reciprocal(gaps, jnp.abs(gaps) > found.least)
    slopes = matmul(vectors.T, moved)
    along = jnp.diagonal(slopes) + 2 * jnp.sum(within * slopes, axis=0)
    return (jnp.diagonal(inner), vectors), (along, turned)


def _along(image: Image, of: PyTree, by: PyTree, x: Array) -> Array:
    return jax.jvp(lambda of: image(of, x), (of,), (by,))[1]


def _at(of: PyTree, found: Decomposition, *, image: Image, resolvent: Resolvent):
    """`UᵀSU` and U."""
    return jnp.diag(found.values), found.vectors


def _first_change(primals, tangents, *, image, resolvent):
    (of, found), (by, _) = primals, tangents
    moved = _along(image, of, by, found.vectors)
    inner = matmul(found.vectors.T, moved)
    turned = resolvent(of, found, moved - matmul(found.vectors, inner))
    return _at(of, found, image=image, resolvent=resolvent), (inner, turned)


# Its rule has no second derivative; `constant` refuses before that.
_turning = per_platform(_at, _first_change)
