"""The Grassmann manifold Gr(d, r): the r-dimensional subspaces of a d-dimensional space.

A subspace is represented by any of its orthonormal bases ``x``, (d, r), and a tangent vector by
the horizontal matrix ``v`` with ``x.T @ v = 0``. Every function works on one point; map over
points with `jax.vmap`. No function forms a d × d projector. Random points and retractions are
those of `jaxfed.manifolds.stiefel`; for a horizontal ``v``, the resulting subspace does not depend
on the basis.

References:
    Absil, Mahony & Sepulchre (2008), Optimization algorithms on matrix manifolds.
    Edelman, Arias & Smith (1998), The geometry of algorithms with orthogonality constraints.
    Bendokat, Zimmermann & Absil (2024), A Grassmann manifold handbook.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from jaxfed import _names
from jaxfed._checks import check_name, checked_key, refuse
from jaxfed.linalg.svd import singular_values
from jaxfed.manifolds._frames import Frame, Matrix, frame, frames, full_precision, safe_norm
from jaxfed.manifolds._retractions import (
    RETRACTIONS,
    retract_cayley,
    retract_polar,
    retract_qr,
    retraction,
)
from jaxfed.manifolds._retractions import transport_differential as _stiefel_differential
from jaxfed.manifolds._subspaces import exp, log, transport_parallel
from jaxfed.manifolds.stiefel import random

__all__ = [
    "RETRACTIONS",
    "distance",
    "egrad2rgrad",
    "ehess2rhess",
    "exp",
    "inner",
    "log",
    "norm",
    "principal_angles",
    "project",
    "random",
    "random_tangent",
    "retract_cayley",
    "retract_polar",
    "retract_qr",
    "retraction",
    "transport",
    "transport_differential",
    "transport_parallel",
]


@full_precision
def project(x: Matrix, g: Matrix) -> Frame:
    """Orthogonal projection of ``g`` onto the horizontal space at ``x``: (I - xxᵀ) g.

    Args:
        x: Basis of the subspace, (d, r) with orthonormal columns.
        g: Any matrix of the same shape, for example a Euclidean gradient.

    Returns:
        The horizontal matrix nearest to ``g``.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``g`` has another shape.

    Source: Edelman et al. (1998), Section 2.5.
    """
    x, g = frames(x=x, g=g)
    return g - x @ (x.T @ g)


def transport(x_new: Matrix, g: Matrix) -> Frame:
    """Vector transport by projection: carry ``g`` from elsewhere to the tangent space at ``x_new``.

    Args:
        x_new: Basis of the destination, (d, r) with orthonormal columns.
        g: Vector horizontal at another basis, (d, r).

    Returns:
        The horizontal matrix at ``x_new`` nearest to ``g``.

    Raises:
        ValueError: If ``x_new`` is not a tall matrix or ``g`` has another shape.

    Source: Absil, Mahony & Sepulchre (2008), Section 8.1.3.
    """
    return project(*frames(x_new=x_new, g=g))


def transport_differential(x: Matrix, v: Matrix, u: Matrix, retraction: str = "polar") -> Frame:
    """Vector transport by the differential of a retraction.

    Args:
        x: Basis of the subspace, (d, r) with orthonormal columns.
        v: Step from it, horizontal, (d, r).
        u: Vector to transport, horizontal at ``x``, (d, r).
        retraction: A key of `RETRACTIONS`.

    Returns:
        Vector horizontal at ``retraction(x, v)``.

    Raises:
        ValueError: If ``x`` is not a tall matrix, ``v`` or ``u`` has another shape, or there is no
            retraction of that name.

    Source: Absil et al. (2008), Section 8.1.2.
    """
    moved = _stiefel_differential(x, v, u, retraction)
    # The differential moves the basis within its span too, which is no motion of the subspace.
    return project(RETRACTIONS[retraction](x, v), moved)


def inner(x: Matrix, u: Matrix, v: Matrix) -> Float[Array, ""]:
    """Inner product of two horizontal vectors, tr uᵀv.

    Args:
        x: Basis of the subspace, (d, r) with orthonormal columns.
        u: Horizontal vector, (d, r).
        v: Another one.

    Returns:
        The inner product, which does not depend on the basis.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``u`` or ``v`` has another shape.
    """
    _, u, v = frames(x=x, u=u, v=v)
    return jnp.sum(u * v)


def norm(x: Matrix, v: Matrix) -> Float[Array, ""]:
    """Length of a horizontal vector.

    Args:
        x: Basis of the subspace, (d, r) with orthonormal columns.
        v: Horizontal vector, (d, r).

    Returns:
        Its length, whose derivative at zero is 0.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` has another shape.
    """
    return safe_norm(frames(x=x, v=v)[1])


def random_tangent(x: Matrix, *, key: Key[Array, ""]) -> Frame:
    """Horizontal vector of length one, in a uniformly random direction.

    Args:
        x: Basis of the subspace, (d, r) with orthonormal columns, d > r.
        key: Random key.

    Returns:
        Vector horizontal at ``x``, of Frobenius norm one.

    Raises:
        ValueError: If ``x`` is square or not a tall matrix, or ``key`` is not a random key.
    """
    key, x = checked_key("key", key), frame("x", x)
    if x.shape[0] == x.shape[1]:
        raise refuse("x", "more rows than columns: the whole space has no tangent vectors", x)
    v = project(x, jax.random.normal(key, x.shape, x.dtype))
    return v / jnp.linalg.norm(v)


def egrad2rgrad(x: Matrix, g: Matrix) -> Frame:
    """Riemannian gradient from a Euclidean one, the same as `project`.

    Args:
        x: Basis of the subspace, (d, r) with orthonormal columns.
        g: Euclidean gradient at ``x`` of a function of subspaces, (d, r).

    Returns:
        Horizontal vector whose inner product with any other one is the derivative along it.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``g`` has another shape.
    """
    return project(x, g)


@full_precision
def ehess2rhess(x: Matrix, g: Matrix, h: Matrix, v: Matrix) -> Frame:
    """Riemannian Hessian along ``v``: (I - xxᵀ) h - v xᵀg.

    With a function f, ``g, h = jax.jvp(jax.grad(f), (x,), (v,))``.

    Args:
        x: Basis of the subspace, (d, r) with orthonormal columns.
        g: Euclidean gradient at ``x``, (d, r).
        h: Its derivative along ``v``, the Euclidean Hessian's product, (d, r).
        v: Horizontal vector, (d, r).

    Returns:
        The product of the Riemannian Hessian with ``v``, a horizontal vector.

    Raises:
        ValueError: If ``x`` is not a tall matrix or another argument has another shape.

    Source: Edelman et al. (1998), Section 2.5.4.
    """
    x, g, h, v = frames(x=x, g=g, h=h, v=v)
    return project(x, h) - v @ (x.T @ g)


@full_precision
def principal_angles(x: Matrix, y: Float[ArrayLike, "d s"]) -> Float[Array, " k"]:
    """Principal angles between two subspaces, accurate at every size.

    The cosines are the singular values of xᵀy and lose half of the digits at small angles; the
    sines are those of the residual y - x(xᵀy) and lose them near π/2. Taking the angle from both
    keeps all digits and makes the derivative finite everywhere.

    Args:
        x: Orthonormal basis, (d, r).
        y: Orthonormal basis, (d, s); s may differ from r.

    Returns:
        Angles in [0, π/2], smallest first, k = min(r, s).

    Raises:
        ValueError: If ``x`` or ``y`` is not a tall matrix or they differ in d.

    Source: Björck & Golub (1973), Numerical methods for computing angles between linear subspaces.
    """
    x, y = frame("x", x), frame("y", y)
    if x.shape[0] != y.shape[0]:
        raise refuse("y", f"the {x.shape[0]} rows of x", y)
    # Let y span the smaller subspace, whose residual has as many sines as angles.
    if x.shape[1] < y.shape[1]:
        x, y = y, x
    xty = x.T @ y
    cosines = singular_values(xty)
    sines = singular_values(y - x @ xty)[::-1]
    return jnp.arctan2(sines, cosines)


@full_precision
def distance(x: Matrix, y: Matrix, kind: str = "chordal") -> Float[Array, ""]:
    """Distance between two subspaces, which does not depend on their bases.

    With principal angles θ: ``"chordal"`` is ‖sin θ‖ = ‖xxᵀ - yyᵀ‖_F / √2, ``"geodesic"`` is ‖θ‖,
    and ``"procrustes"`` is 2‖sin(θ/2)‖, the least ‖x - y o‖_F over rotations o.

    Args:
        x: Orthonormal basis, (d, r).
        y: Orthonormal basis of the same shape.
        kind: ``"chordal"``, ``"geodesic"`` or ``"procrustes"``.

    Returns:
        Distance, accurate near 0 as well, where its derivative is 0.

    Raises:
        ValueError: If ``x`` is not a tall matrix, ``y`` has another shape or ``kind`` is unknown.

    Source: Edelman et al. (1998), Section 4.3.
    """
    x, y = frames(x=x, y=y)
    check_name("kind", kind, ("chordal", "geodesic", "procrustes"))
    if kind == "chordal":
        # Use the residual: √(r - ‖xᵀy‖²) would cancel if the subspaces are near.
        return safe_norm(y - x @ (x.T @ y))
    if kind == "geodesic":
        return safe_norm(principal_angles(x, y))
    return 2 * safe_norm(jnp.sin(principal_angles(x, y) / 2))


__dir__ = _names.public_names(__name__)
