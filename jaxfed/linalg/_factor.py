"""What the polar and the QR factor of a tall matrix have in common: their checks, their derivative.

Both write `W = Q R` with orthonormal columns in `Q`. They differ in what `R` is (symmetric positive
definite, or upper triangular with a positive diagonal), hence in which rotation of `Q` inside its
own span keeps `R` of that kind, and in nothing else.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Lower precisions, the default of accelerators, lose the constraint Q^T Q = I.
matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def squared_norm(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Squared Frobenius norm."""
    return jnp.sum(x * x)


def identity_minus_gram(q: Float[Array, "d r"]) -> Float[Array, "r r"]:
    """How far the columns of `q` are from orthonormal: I - Q^T Q."""
    return jnp.eye(q.shape[1], dtype=q.dtype) - matmul(q.T, q)


def checked_tall(w: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Refuse what has no orthonormal factor.

    Raises:
        ValueError: if `w` is not a real floating-point matrix with d >= r >= 1.
    """
    w = jnp.asarray(w)
    if w.ndim != 2 or not 1 <= w.shape[1] <= w.shape[0]:
        raise ValueError(
            f"w must be one tall matrix (d, r) with d >= r >= 1, got shape {w.shape}; "
            "map over further axes with jax.vmap"
        )
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(f"w must be of a real floating-point dtype, got {w.dtype}")
    return w


Factors = tuple[Float[Array, "d r"], Float[Array, "r r"]]


def differentiable(
    values: Callable[[Array, str], Factors], rotation: Callable[[Array, Array], Array]
) -> Callable[[Array, str], Factors]:
    """Give a factorization its derivative, of every order and in both modes.

    Args:
        values: `(w, method) -> (Q, R^{-1})` with `W = Q R`; never differentiated.
        rotation: `(R^{-1}, N) -> Omega`, the antisymmetric matrix that keeps `dR` of its kind,
            where `N = Q^T dW R^{-1}`; linear in `N`, differentiable and transposable.

    Returns:
        `values` with a derivative rule.
    """

    @partial(jax.custom_jvp, nondiff_argnums=(1,))
    def factor(w, method):
        return values(w, method)

    # dW = dQ R + Q dR, and Q^T dQ = Omega is antisymmetric. With A = dW R^{-1} and N = Q^T A,
    #     dR R^{-1} = N - Omega,
    #     dQ        = (I - Q Q^T) A + Q Omega = A + Q K,         K = Omega - N,
    #     d(R^{-1}) = -R^{-1} dR R^{-1}       = R^{-1} K.
    # Nothing is divided by a difference of singular values, so repeated ones are no exception, and
    # the factors are themselves differentiable results of this rule, so its derivatives are right.
    @factor.defjvp
    def factor_jvp(method, primals, tangents):
        (w,), (dw,) = primals, tangents
        q, inverse = factor(w, method)
        a = matmul(dw, inverse)
        n = matmul(q.T, a)
        k = rotation(inverse, n) - n
        return (q, inverse), (a + matmul(q, k), matmul(inverse, k))

    return factor
