"""The rotation in the derivative of a polar factor: an antisymmetric Sylvester equation."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxfed.linalg._factor import matmul, repeated, squared_norm
from jaxfed.linalg._newton_schulz import Product, by_platform, padded_for_speed
from jaxfed.linalg.eigen import eigh


# Omega of the rule in `jaxfed.linalg.polar`: dP = dPᵀ gives P Omega + Omega P = M - Mᵀ = B with
# M = Qᵀ dW, a Sylvester equation. In the eigenbasis of R = P^{-1} its solution multiplies B by
# r_i r_j / (r_i + r_j), and never divides by differences of singular values. With R = c (I + D),
# s = 1 + (d_i + d_j) / 2 and t = (d_i - d_j) / 2 the factor is c (s - t^2 / s) / 2: two products
# give s and t^2, and the remaining equation is of second order in D. Wide matrices have -M in place
# of M.
def rotation(
    inverse: Float[Array, "r r"], m: Float[Array, "r r"], solve: Callable[[Array, Array], Array]
) -> Float[Array, "r r"]:
    """The antisymmetric Omega that keeps the symmetric factor symmetric, from R = P^{-1} and M."""
    r = len(m)
    mean = jnp.trace(inverse) / r
    scaled = inverse / jnp.where(mean > 0, mean, 1)
    d, b = padded_for_speed(scaled - jnp.eye(r, dtype=m.dtype)), padded_for_speed(m - m.T)
    # The solver wants numbers of order one. Omega is linear in B, so the size cancels and needs no
    # derivative.
    size = lax.stop_gradient(jnp.max(jnp.abs(b)))
    size = jnp.where(size > 0, size, 1)  # zero has a derivative too
    b = b / size
    product = matmul(d, b)
    first = b + (product - product.T) / 2
    product = matmul(d, product + product.T)
    second = solve(scaled, (product - product.T)[:r, :r] / 2)
    return size * mean / 2 * (first[:r, :r] - second)


def differentiable_sylvester(
    s: Float[Array, "r r"], right: Float[Array, "r r"]
) -> Float[Array, "r r"]:
    """`sylvester` for a right-hand side of any size, with derivatives of every order."""

    def relative(_, right):
        size = jnp.max(jnp.abs(right))
        size = jnp.where(size > 0, size, 1)
        return sylvester(s, right / size) * size

    return lax.custom_linear_solve(
        lambda x: matmul(s, x) + matmul(x, s), right, relative, symmetric=True
    )


def _antisymmetric_solution(
    multiply: Product, s: Float[Array, "r r"], right: Float[Array, "r r"]
) -> Float[Array, "r r"]:
    """Antisymmetric solution of S X + X S = B, for S symmetric semidefinite, B antisymmetric.

    The residual is rounding, for S and B of order one. If S is near the identity and B small, three
    terms of a series, in two products, are enough; otherwise conjugate gradients solve it, or the
    eigenbasis of S if a few steps are not enough. For singular S it is the least-squares solution.
    """
    r = len(s)
    eps = jnp.finfo(s.dtype).eps
    tolerance = (32 * eps) ** 2
    wide, b = padded_for_speed(s), padded_for_speed(right)

    def image(x):
        product = multiply(wide, x)
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
    # The next term multiplies by half the sum of two eigenvalues of S - I, to the third power.
    left_out = (squared_norm(s - jnp.eye(r, dtype=s.dtype)) / 2) ** 3 * start
    enough = left_out <= tolerance
    first = jnp.where(enough, (b + second + third) / 2, 0), b, b, jnp.where(enough, 0, start), 0
    x, _, _, error, _ = lax.while_loop(
        lambda state: (state[3] > tolerance) & (state[4] < 16), step, first
    )

    def decompose(bad, x):
        # It depends on the loop's result; see `repeated`.
        values, vectors = eigh(jnp.where(bad, s, x), bad)
        sums = values[:, None] + values
        regular = sums > eps * r * values[-1]
        inner = matmul(vectors.T, matmul(right, vectors))
        inner = jnp.where(regular, inner / jnp.where(regular, sums, 1), 0)
        return (matmul(vectors, matmul(inner, vectors.T)),)

    return repeated(~(error <= tolerance), decompose, (x[:r, :r],))[0]


sylvester = by_platform(_antisymmetric_solution)
