"""The Grassmann manifold Gr(d, r): the r-dimensional subspaces of a d-dimensional space.
In all functions ``x`` and ``y`` are orthonormal bases of subspaces, (d, r), and tangent vectors are
horizontal matrices ``u`` and ``v`` of the same shape, ``x.T @ v = 0``. Results are (d, r) unless
said otherwise. A `ValueError` refuses what is no tall matrix, other shapes and unknown names. Map
over subspaces with `jax.vmap`. No function forms a d × d projector. Random points and retractions
are those of `jaxfed.manifolds.stiefel`: of a horizontal ``v`` they give the same subspace whichever
basis represents it.

References:
    Absil, Mahony & Sepulchre (2008), Optimization algorithms on matrix manifolds.
    Edelman, Arias & Smith (1998), The geometry of algorithms with orthogonality constraints.
    Bendokat, Zimmermann & Absil (2024), A Grassmann manifold handbook.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Key

from jaxfed import _names
from jaxfed._checks import check_name, checked_key, refuse
from jaxfed.manifolds._frames import Frame, Matrix, frame, frames, full_precision
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
    """Orthogonal projection of a matrix (d, r) onto the horizontal space at ``x``: (I - xxᵀ) g.

    Source: Edelman et al. (1998), Section 2.5.
    """
    x, g = frames(x=x, g=g)
    return g - x @ (x.T @ g)


def transport(x_new: Matrix, g: Matrix) -> Frame:
    """Vector transport by projection: the horizontal matrix at ``x_new`` nearest to ``g``.

    Source: Absil, Mahony & Sepulchre (2008), Section 8.1.3.
    """
    return project(*frames(x_new=x_new, g=g))


def transport_differential(x: Matrix, v: Matrix, u: Matrix, retraction: str = "polar") -> Frame:
    """Vector transport by the retraction's differential: how its end moves as ``v`` moves by ``u``.

    Horizontal at ``retraction(x, v)``, with one of `RETRACTIONS`.

    Source: Absil et al. (2008), Section 8.1.2.
    """
    moved = _stiefel_differential(x, v, u, retraction)
    return project(RETRACTIONS[retraction](x, v), moved)


def inner(x: Matrix, u: Matrix, v: Matrix) -> Float[Array, ""]:
    """Inner product of two horizontal vectors, tr uᵀv, which no turn of the basis changes."""
    _, u, v = frames(x=x, u=u, v=v)
    return jnp.sum(u * v)


def norm(x: Matrix, v: Matrix) -> Float[Array, ""]:
    """Length of a horizontal vector, a number whose derivative at zero is taken as 0."""
    return optax.safe_norm(frames(x=x, v=v)[1], 0.0)


def random_tangent(key: Key[Array, ""], x: Matrix) -> Frame:
    """Horizontal vector of Frobenius norm one, in a uniformly random direction.

    The whole space, d = r, has none: a `ValueError`.
    """
    key, x = checked_key("key", key), frame("x", x)
    if x.shape[0] == x.shape[1]:
        raise refuse("x", "more rows than columns: the whole space has no tangent vectors", x)
    v = project(x, jax.random.normal(key, x.shape, x.dtype))
    return v / jnp.linalg.norm(v)


def egrad2rgrad(x: Matrix, g: Matrix) -> Frame:
    """Riemannian gradient from a Euclidean one of a function of subspaces, which is `project`."""
    return project(x, g)


@full_precision
def ehess2rhess(x: Matrix, g: Matrix, h: Matrix, v: Matrix) -> Frame:
    """Riemannian Hessian along ``v``: (I - xxᵀ) h - v xᵀg.

    With a function f, ``g, h = jax.jvp(jax.grad(f), (x,), (v,))``: the Euclidean gradient at ``x``
    and its derivative along ``v``.

    Source: Edelman et al. (1998), Section 2.5.4.
    """
    x, g, h, v = frames(x=x, g=g, h=h, v=v)
    return project(x, h) - v @ (x.T @ g)


@full_precision
def principal_angles(x: Matrix, y: Float[ArrayLike, "d s"]) -> Float[Array, " k"]:
    """Principal angles between two subspaces, accurate at every size.

    The cosines are the singular values of xᵀy and lose half of the digits at small angles; the
    sines, those of the residual y - x(xᵀy), lose them near π/2. Taking the angle from both keeps
    all digits, and a derivative that is finite everywhere.

    Args:
        x: orthonormal basis, (d, r).
        y: orthonormal basis, (d, s); s may differ from r.

    Returns:
        Angles in [0, π/2], smallest first, min(r, s) of them.

    Source: Björck & Golub (1973), Numerical methods for computing angles between linear subspaces.
    """
    x, y = frame("x", x), frame("y", y)
    if x.shape[0] != y.shape[0]:
        raise refuse("y", f"the {x.shape[0]} rows of x", y)
    # From here on y spans the smaller subspace, whose residual has as many sines as angles.
    if x.shape[1] < y.shape[1]:
        x, y = y, x
    xty = x.T @ y
    cosines = jnp.linalg.svd(xty, compute_uv=False)
    sines = jnp.linalg.svd(y - x @ xty, compute_uv=False)[::-1]
    return jnp.arctan2(sines, cosines)


@full_precision
def distance(x: Matrix, y: Matrix, kind: str = "chordal") -> Float[Array, ""]:
    """Distance between two subspaces, whatever bases represent them: a number.

    With principal angles θ: ``"chordal"`` is ‖sin θ‖ = ‖xxᵀ - yyᵀ‖_F / √2, ``"geodesic"`` is ‖θ‖,
    and ``"procrustes"`` is 2‖sin(θ/2)‖, the least ‖x - y o‖_F over rotations o. Accurate near 0 as
    well, where its derivative is taken as 0.

    Source: Edelman et al. (1998), Section 4.3.
    """
    x, y = frames(x=x, y=y)
    check_name("kind", kind, ("chordal", "geodesic", "procrustes"))
    if kind == "chordal":
        # From the residual: √(r - ‖xᵀy‖²) would cancel when the subspaces are near.
        return optax.safe_norm(y - x @ (x.T @ y), 0.0)
    if kind == "geodesic":
        return optax.safe_norm(principal_angles(x, y), 0.0)
    return 2 * optax.safe_norm(jnp.sin(principal_angles(x, y) / 2), 0.0)


__dir__ = _names.public_names(__name__)
