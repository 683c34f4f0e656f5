"""The Grassmann manifold Gr(d, r): the r-dimensional subspaces of a d-dimensional space.

A subspace is represented by any of its orthonormal bases ``x``, (d, r), and a tangent vector by
the horizontal matrix ``v`` with ``x.T @ v = 0``. Every function works on one point; map over
points with `jax.vmap`. No function forms a d × d projector. Random points and retractions are
those of `jaxfed.manifolds.stiefel`: of a horizontal ``v`` they give the same subspace whichever
basis represents it.

References:
    Absil, Mahony & Sepulchre (2008), Optimization algorithms on matrix manifolds.
    Edelman, Arias & Smith (1998), The geometry of algorithms with orthogonality constraints.
    Bendokat, Zimmermann & Absil (2024), A Grassmann manifold handbook.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxfed._checks import check_name, refuse
from jaxfed.linalg import polar
from jaxfed.manifolds.stiefel import (
    RETRACTIONS,
    _frame,
    _frames,
    _full_precision,
    _polish,
    random,
    retract_cayley,
    retract_polar,
    retract_qr,
    retraction,
)

__all__ = [
    "RETRACTIONS",
    "distance",
    "exp",
    "log",
    "principal_angles",
    "project",
    "random",
    "retract_cayley",
    "retract_polar",
    "retract_qr",
    "retraction",
    "transport",
]

# Gauss-Legendre nodes and weights on [0, 1] for `log`. The integrand is analytic at distance one
# around the interval, so that the error falls by 21 with every node: 1e-16 with twelve.
_NODES, _WEIGHTS = (np.polynomial.legendre.leggauss(12) + np.array([[1.0], [0.0]])) / 2


@_full_precision
def project(x: Float[Array, "d r"], g: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Orthogonal projection of ``g`` onto the horizontal space at ``x``: (I - xxᵀ) g.

    Args:
        x: Basis of the subspace, (d, r) with orthonormal columns.
        g: Any matrix of the same shape, for example a Euclidean gradient.

    Returns:
        The horizontal matrix nearest to ``g``.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``g`` has another shape.

    Source:
        Edelman et al. (1998), Section 2.5.
    """
    x, g = _frames(x=x, g=g)
    return g - x @ (x.T @ g)


def transport(x_new: Float[Array, "d r"], g: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Vector transport by projection: carry ``g`` from elsewhere to the tangent space at ``x_new``.

    Args:
        x_new: Basis of the subspace where the vector is wanted, (d, r).
        g: Vector horizontal at another basis, (d, r).

    Returns:
        The horizontal matrix at ``x_new`` nearest to ``g``.

    Raises:
        ValueError: If ``x_new`` is not a tall matrix or ``g`` has another shape.

    Source:
        Absil, Mahony & Sepulchre (2008), Section 8.1.3.
    """
    return project(*_frames(x_new=x_new, g=g))


@_full_precision
def principal_angles(x: Float[Array, "d r"], y: Float[Array, "d s"]) -> Float[Array, " k"]:
    """Principal angles between two subspaces, accurate at every size.

    The cosines are the singular values of xᵀy and lose half of the digits at small angles; the
    sines, those of the residual y - x(xᵀy), lose them near π/2. Taking the angle from both keeps
    all digits, and a derivative that is finite everywhere.

    Args:
        x: Orthonormal basis, (d, r).
        y: Orthonormal basis, (d, s); s may differ from r.

    Returns:
        Angles in [0, π/2], smallest first, k = min(r, s).

    Raises:
        ValueError: If ``x`` or ``y`` is not a tall matrix or they differ in d.

    Source:
        Björck & Golub (1973), Numerical methods for computing angles between linear subspaces.
    """
    x, y = _frame("x", x), _frame("y", y)
    if x.shape[0] != y.shape[0]:
        raise refuse("y", f"the {x.shape[0]} rows of x", y)
    if x.shape[1] < y.shape[1]:
        x, y = y, x
    xty = x.T @ y
    cosines = jnp.linalg.svd(xty, compute_uv=False)
    sines = jnp.linalg.svd(y - x @ xty, compute_uv=False)[::-1]
    return jnp.arctan2(sines, cosines)


@_full_precision
def distance(
    x: Float[Array, "d r"], y: Float[Array, "d r"], kind: str = "chordal"
) -> Float[Array, ""]:
    """Distance between two subspaces, whatever bases represent them.

    With principal angles θ: ``"chordal"`` is ‖sin θ‖ = ‖xxᵀ - yyᵀ‖_F / √2, ``"geodesic"`` is ‖θ‖,
    and ``"procrustes"`` is 2‖sin(θ/2)‖, the least ‖x - y o‖_F over rotations o.

    Args:
        x: Orthonormal basis, (d, r).
        y: Orthonormal basis of the same shape.
        kind: ``"chordal"``, ``"geodesic"`` or ``"procrustes"``.

    Returns:
        Distance, accurate near 0 as well, where its derivative is taken as 0.

    Raises:
        ValueError: If ``x`` is not a tall matrix, ``y`` has another shape or ``kind`` is unknown.

    Source:
        Edelman et al. (1998), Section 4.3.
    """
    x, y = _frames(x=x, y=y)
    check_name("kind", kind, ("chordal", "geodesic", "procrustes"))
    if kind == "chordal":
        # From the residual: √(r - ‖xᵀy‖²) would cancel when the subspaces are near.
        return optax.safe_norm(y - x @ (x.T @ y), 0.0)
    if kind == "geodesic":
        return optax.safe_norm(principal_angles(x, y), 0.0)
    return 2 * optax.safe_norm(jnp.sin(principal_angles(x, y) / 2), 0.0)


@_full_precision
def exp(x: Float[Array, "d r"], v: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Exponential map: where the geodesic from ``x`` with velocity ``v`` is at time one.

    x cos(√G) + v sin(√G)/√G with G = vᵀv. Both are entire functions of G, the first columns of
    the exponential of [[0, -G], [I, 0]], so that neither repeated nor zero singular values of
    ``v`` are special, in the derivative either.

    Args:
        x: Orthonormal basis, (d, r).
        v: Horizontal matrix, ``x.T @ v = 0``, (d, r).

    Returns:
        Orthonormal basis, (d, r), transported in parallel along the geodesic.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` has another shape.

    Source:
        Edelman et al. (1998), Theorem 2.3.
    """
    x, v = _frames(x=x, v=v)
    rank = x.shape[1]
    zero, eye = jnp.zeros((rank, rank), v.dtype), jnp.eye(rank, dtype=v.dtype)
    columns = jax.scipy.linalg.expm(jnp.block([[zero, -v.T @ v], [eye, zero]]))[:, :rank]
    return _polish(x @ columns[:rank] + v @ columns[rank:])


@_full_precision
def log(x: Float[Array, "d r"], y: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Logarithm: the velocity at ``x`` of the shortest geodesic to the subspace of ``y``.

    With y turned within its span so that C = xᵀy is positive, it is (y - xC) f(C) where
    f(cos θ) = θ / sin θ = ∫₀¹ 2 ds / ((1 + cos θ) + (1 - cos θ) s²), an integral of inverses of
    positive r × r matrices: nothing is special about repeated or zero angles, in the reverse mode
    derivative either.

    Args:
        x: Orthonormal basis, (d, r).
        y: Orthonormal basis of the same shape, no direction of which is orthogonal to the subspace
            of ``x`` (beyond an angle of π/2 the shortest geodesic is not unique).

    Returns:
        Horizontal matrix v, (d, r): ``exp(x, v)`` spans the subspace of ``y``.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``y`` has another shape.

    Source:
        Bendokat et al. (2024), Algorithm 5.3, with the integral in place of the singular value
        decomposition.
    """
    x, y = _frames(x=x, y=y)
    y = y @ polar(x.T @ y).T
    xty = x.T @ y
    cosines, eye = (xty + xty.T) / 2, jnp.eye(x.shape[1], dtype=x.dtype)
    squares = jnp.asarray(_NODES**2, x.dtype)[:, None, None]
    inverses = jnp.linalg.inv((eye + cosines) + (eye - cosines) * squares)
    return (y - x @ xty) @ jnp.tensordot(jnp.asarray(2 * _WEIGHTS, x.dtype), inverses, axes=1)
