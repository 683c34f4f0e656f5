"""The matrix exponential, with few operations to compile and to differentiate."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

DEGREE = 14
MOST_SQUARINGS = 24


# Loops outside of `jit` would be compiled at every call.
@jax.jit
def expm(matrix: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The exponential of a small matrix by scaling, a Taylor polynomial and squaring.

    `jax.scipy.linalg.expm` chooses among five approximants, each with a linear solve, whose higher
    derivatives take long to compile.

    Source: Moler & Van Loan (2003), Nineteen dubious ways to compute the exponential of a matrix,
    Section 3.
    """
    size = jax.lax.stop_gradient(jnp.abs(matrix).sum(axis=0).max())
    # For a scaled norm below one half, the polynomial leaves out 1e-17.
    squarings = jnp.clip(jnp.ceil(jnp.log2(jnp.maximum(size, 0.5))) + 1, 0, MOST_SQUARINGS)
    fraction, eye = matrix / 2**squarings, jnp.eye(len(matrix), dtype=matrix.dtype)

    # Horner's scheme: 1 + x/1 (1 + x/2 (1 + x/3 (...))).
    def term(total, number):
        return eye + fraction @ total / number, None

    # Use a fixed number of turns, since a loop that stops has no reverse derivative.
    def squared(power, number):
        return jnp.where(number < squarings, power @ power, power), None

    orders = jnp.arange(DEGREE, 0, -1, dtype=matrix.dtype)
    total, _ = jax.lax.scan(term, eye, orders)
    return jax.lax.scan(squared, total, jnp.arange(MOST_SQUARINGS))[0]
