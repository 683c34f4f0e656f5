"""The largest eigenvalue of a matrix that is given by its products."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxfed._checks import check_callable, check_whole, checked_array
from jaxfed.linalg._factor import matmul
from jaxfed.linalg.derivatives import constant
from jaxfed.linalg.eigen import top_eigenvectors
from jaxfed.linalg.sums import scaled_norm

Operator = TypeVar("Operator")


def largest_eigenvalue(
    product: Callable[[Operator, Float[Array, " d"]], Float[Array, " d"]],
    operator: Operator,
    start: Float[Array, " d"],
    steps: int = 32,
) -> Float[Array, ""]:
    """The largest eigenvalue of a symmetric matrix by Lanczos iteration, reorthogonalized.

    Its derivative with respect to the operator is that of the quotient `vᵀ S v` at the vector v
    found, which equals the eigenvalue's if that is simple; nothing of the iteration is stored.
    There is no second derivative.

    Args:
        product: `(operator, vector) -> S vector`, for the symmetric matrix S.
        operator: a pytree of arrays that defines S.
        start: the first vector, `(d,)`; a random one has a component along the eigenvector. From
            zero the result is zero.
        steps: number of products; d of them, or as many as S has distinct eigenvalues, are exact.

    Returns:
        The eigenvalue, approximated from below.

    Raises:
        ValueError: if `product` is not callable, `start` is not a vector or `steps` is not
            positive.

    Source: Golub & Van Loan, Matrix Computations, Section 10.3.
    """
    check_callable("product", product)
    start = checked_array("start", start, "d", whole=False, half=True)
    check_whole("steps", steps)
    fixed = jax.tree.map(lambda x: constant(x, "largest_eigenvalue"), operator)

    def step(k, state):
        basis, images = state
        image = product(fixed, basis[k])
        rest = _unit(image)  # in the operator's unit, what the first pass leaves may underflow
        for _ in range(2):  # rounding in the first pass brings parts of the basis back
            rest = rest - matmul(basis.T, matmul(basis, rest))
        exhausted = scaled_norm(rest) <= 100 * jnp.finfo(rest.dtype).eps
        # Once the Krylov space is complete, only rounding is left; rows of zeros add nothing.
        following = jnp.where(exhausted, 0, _unit(rest))
        return basis.at[k + 1].set(following, mode="drop"), images.at[k].set(image)

    steps = min(steps, len(start))
    empty = jnp.zeros((steps, len(start)), start.dtype)
    state = (empty.at[0].set(_unit(lax.stop_gradient(start))), empty)
    basis, images = lax.fori_loop(0, steps, step, state)
    ritz = top_eigenvectors(matmul(basis, images.T), 1)[1][:, 0]
    vector = _unit(matmul(ritz, basis))
    # This product is with the operator itself, not with its constant copy: the derivative of the
    # result is vᵀ dS v.
    return vector @ product(operator, vector)


def _unit(vector: Float[Array, " d"]) -> Float[Array, " d"]:
    norm = scaled_norm(vector)
    return vector / jnp.where(norm > 0, norm, 1)
