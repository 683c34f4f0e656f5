"""Retractions of the Stiefel manifold, which also serve the Grassmann manifold."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed._checks import check_name
from jaxfed.linalg import orthonormalize, polar
from jaxfed.linalg.precision import in_single
from jaxfed.manifolds._frames import Frame, Matrix, frames, full_precision, polish


def retract_polar(x: Matrix, v: Matrix) -> Frame:
    """Polar retraction: the orthonormal polar factor of ``x + v``, its nearest orthonormal matrix.

    This is a generalized retraction: ``v`` need not be tangent, and the columns of the result span
    those of ``x + v`` (of full column rank).

    Args:
        x: Point, (d, r) with orthonormal columns.
        v: Step, (d, r).

    Returns:
        Point of the manifold, (d, r).

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` has another shape.

    Source: Shi & Kontar (2024), Proposition 6.
    """
    x, v = frames(x=x, v=v)
    return polar(x + v)


def retract_qr(x: Matrix, v: Matrix) -> Frame:
    """QR retraction: the Q of ``x + v`` whose R has a positive diagonal.

    The positive diagonal makes it continuous with ``retract_qr(x, 0) = x``. This is a generalized
    retraction, like `retract_polar`.

    Args:
        x: Point, (d, r) with orthonormal columns.
        v: Step, (d, r).

    Returns:
        Point of the manifold, (d, r).

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` has another shape.

    Source: Shi & Kontar (2024), Proposition 7.
    """
    x, v = frames(x=x, v=v)
    return orthonormalize(x + v)


@full_precision
def retract_cayley(x: Matrix, v: Matrix) -> Frame:
    """Cayley retraction: rotate ``x`` by the Cayley transform of a skew matrix made from ``v``.

    With p = v - x(xᵀv)/2 and W = p xᵀ - x pᵀ the result is (I - W/2)⁻¹(I + W/2) x. W = A Bᵀ with
    A = [p, x] and B = [x, -p], so that the Sherman-Morrison-Woodbury formula leaves one 2r × 2r
    solve, which is never singular.

    It is not a generalized retraction: W, hence the result, depends only on the tangent part of
    ``v``, and the columns of the result do not span those of ``x + v`` even if ``v`` is tangent.

    Args:
        x: Point, (d, r) with orthonormal columns.
        v: Step, (d, r).

    Returns:
        Point of the manifold, (d, r).

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` has another shape.

    Source: Wen & Yin (2013), A feasible method for optimization with orthogonality constraints,
    Lemma 4.
    """
    x, v = frames(x=x, v=v)
    return polish(_cayley(x, v, x))


def _cayley(x: Frame, v: Frame, turned: Float[Array, "d s"]) -> Float[Array, "d s"]:
    """Rotate columns by the Cayley transform of the skew matrix made from ``v``."""
    p = v - x @ (x.T @ v) / 2
    a = jnp.concatenate([p, x], axis=1)
    b = jnp.concatenate([x, -p], axis=1)
    eye = jnp.eye(a.shape[1], dtype=a.dtype)
    return turned + a @ in_single(jnp.linalg.solve)(eye - b.T @ a / 2, b.T @ turned)


Retraction = Callable[[Matrix, Matrix], Frame]

RETRACTIONS: dict[str, Retraction] = {
    "polar": retract_polar,
    "qr": retract_qr,
    "cayley": retract_cayley,
}


def retraction(name: str) -> Retraction:
    """Look up a retraction by name.

    Args:
        name: A key of `RETRACTIONS`.

    Returns:
        The function ``(x, v) -> point``.

    Raises:
        ValueError: If there is no retraction of that name.
    """
    check_name("retraction", name, sorted(RETRACTIONS))
    return RETRACTIONS[name]


def transport_differential(x: Matrix, v: Matrix, u: Matrix, retraction: str = "polar") -> Frame:
    """Vector transport by the differential of a retraction.

    Args:
        x: Point, (d, r) with orthonormal columns.
        v: Step from it, tangent, (d, r).
        u: Vector to transport, tangent at ``x``, (d, r).
        retraction: A key of `RETRACTIONS`.

    Returns:
        Vector tangent at ``retraction(x, v)``: the derivative of ``retraction(x, v + t u)``.

    Raises:
        ValueError: If ``x`` is not a tall matrix, ``v`` or ``u`` has another shape, or there is no
            retraction of that name.

    Source: Absil et al. (2008), Section 8.1.2.
    """
    x, v, u = frames(x=x, v=v, u=u)
    check_name("retraction", retraction, sorted(RETRACTIONS))
    return jax.jvp(lambda v: RETRACTIONS[retraction](x, v), (v,), (u,))[1]


@full_precision
def transport_cayley(x: Matrix, v: Matrix, u: Matrix) -> Frame:
    """Isometric vector transport along a step of `retract_cayley`, by the same rotation.

    Args:
        x: Point, (d, r) with orthonormal columns.
        v: Step from it, tangent, (d, r).
        u: Vector to transport, tangent at ``x``, (d, r).

    Returns:
        Vector tangent at ``retract_cayley(x, v)``, of the same norm. A step by
        ``-transport_cayley(x, v, v)`` leads back to ``x``.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` or ``u`` has another shape.

    Source: Zhu (2017), A Riemannian conjugate gradient method for optimization on the Stiefel
    manifold, Section 3.2.
    """
    x, v, u = frames(x=x, v=v, u=u)
    return _cayley(x, v, u)
