"""Geodesics of the Grassmann manifold, along horizontal vectors."""

import jax.numpy as jnp
import numpy as np

from jaxfed.linalg import polar
from jaxfed.linalg.precision import in_single
from jaxfed.manifolds._exponential import expm
from jaxfed.manifolds._frames import Frame, Matrix, frames, full_precision, polish

# Gauss-Legendre nodes and weights on [0, 1] for `log`. The integrand is analytic within distance
# one of the interval, so the error falls by 21 with every node: 1e-16 with twelve.
_NODES, _WEIGHTS = (np.polynomial.legendre.leggauss(12) + np.array([[1.0], [0.0]])) / 2


@full_precision
def exp(x: Matrix, v: Matrix) -> Frame:
    """Exponential map: the end of the geodesic from ``x`` with velocity ``v`` at time one.

    It is x cos(√G) + v sin(√G)/√G with G = vᵀv. Both are entire functions of G, the first columns
    of the exponential of [[0, -G], [I, 0]], so repeated or zero singular values of ``v`` are no
    special case, even in the derivative.

    Args:
        x: Orthonormal basis, (d, r).
        v: Horizontal matrix, ``x.T @ v = 0``, (d, r).

    Returns:
        Orthonormal basis, (d, r), transported in parallel along the geodesic.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` has another shape.

    Source: Edelman et al. (1998), Theorem 2.3.
    """
    x, v = frames(x=x, v=v)
    rank = x.shape[1]
    zero, eye = jnp.zeros((rank, rank), v.dtype), jnp.eye(rank, dtype=v.dtype)
    # The first block column holds cos √G and sin √G / √G.
    columns = expm(jnp.block([[zero, -v.T @ v], [eye, zero]]))[:, :rank]
    return polish(x @ columns[:rank] + v @ columns[rank:])


@full_precision
def log(x: Matrix, y: Matrix) -> Frame:
    """Logarithm: the velocity at ``x`` of the shortest geodesic to the subspace of ``y``.

    With y rotated within its span so that C = xᵀy is positive, it is (y - xC) f(C) where
    f(cos θ) = θ / sin θ = ∫₀¹ 2 ds / ((1 + cos θ) + (1 - cos θ) s²), an integral of inverses of
    positive r × r matrices. Repeated or zero angles are no special case, even in the reverse mode
    derivative.

    Args:
        x: Orthonormal basis, (d, r).
        y: Orthonormal basis of the same shape, no direction of which is orthogonal to the subspace
            of ``x`` (beyond an angle of π/2 the shortest geodesic is not unique).

    Returns:
        Horizontal matrix v, (d, r): ``exp(x, v)`` spans the subspace of ``y``.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``y`` has another shape.

    Source: Bendokat et al. (2024), Algorithm 5.3, with the integral in place of the singular value
    decomposition.
    """
    x, y = frames(x=x, y=y)
    # The basis of the second subspace that is nearest to x.
    y = y @ polar(x.T @ y).T
    xty = x.T @ y
    # Symmetric but for rounding, since y is aligned with x.
    cosines, eye = (xty + xty.T) / 2, jnp.eye(x.shape[1], dtype=x.dtype)
    squares = jnp.asarray(_NODES**2, x.dtype)[:, None, None]
    inverses = in_single(jnp.linalg.inv)((eye + cosines) + (eye - cosines) * squares)
    return (y - x @ xty) @ jnp.tensordot(jnp.asarray(2 * _WEIGHTS, x.dtype), inverses, axes=1)


@full_precision
def transport_parallel(x: Matrix, v: Matrix, u: Matrix) -> Frame:
    """Parallel transport along the geodesic to ``exp(x, v)``.

    It is u - x s(G) vᵀu - v k(G) vᵀu with G = vᵀv, s(θ²) = sin θ / θ and k(θ²) = (1 - cos θ) / θ²,
    entire functions as in `exp`.

    Args:
        x: Basis of the subspace, (d, r) with orthonormal columns.
        v: Velocity of the geodesic, horizontal at ``x``, (d, r).
        u: Vector to transport, horizontal at ``x``, (d, r).

    Returns:
        Vector horizontal at ``exp(x, v)``. Lengths and inner products are preserved.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` or ``u`` has another shape.

    Source: Edelman et al. (1998), Theorem 2.4.
    """
    x, v, u = frames(x=x, v=v, u=u)
    rank = x.shape[1]
    zero, eye = jnp.zeros((rank, rank), v.dtype), jnp.eye(rank, dtype=v.dtype)
    # The last columns are the integral over time of the first ones, s and cos.
    blocks = jnp.block([[zero, -v.T @ v, eye], [eye, zero, zero], [zero, zero, zero]])
    columns = expm(blocks)[: 2 * rank, 2 * rank :] @ (v.T @ u)
    return u - x @ columns[:rank] - v @ columns[rank:]
