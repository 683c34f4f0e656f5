"""The Stiefel manifold St(d, r): matrices of d rows with r orthonormal columns.

Every function works on one point ``x`` with ``x.T @ x = I``, seen as a point of the Euclidean
space of d × r matrices with the Frobenius inner product; map over points with `jax.vmap`. No
function forms a d × d matrix.

A *retraction* at ``x`` maps a tangent vector ``v`` to a point of the manifold that agrees with
``x + v`` to first order. A generalized retraction (Shi & Kontar 2024, Definition 5) also accepts a
``v`` that is not tangent, and keeps the column space of ``x + v``: `retract_polar` and `retract_qr`
do, `retract_cayley` does not.

There are two *metrics*: ``"euclidean"``, of the embedding space, and ``"canonical"``, of the
quotient of the rotations, which gives the rotation xᵀv of a tangent vector half the weight.
Functions without a ``metric`` argument use the first.

References:
    Edelman, Arias & Smith (1998), The geometry of algorithms with orthogonality constraints.
    Absil, Mahony & Sepulchre (2008), Optimization algorithms on matrix manifolds.
    Shi & Kontar (2024), Personalized PCA: decoupling shared and unique features.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key

from jaxfed import _names
from jaxfed._checks import check_name, check_positive, check_whole, checked_key, refuse
from jaxfed.linalg import orthonormalize
from jaxfed.manifolds._frames import Frame, Matrix, frame, frames, full_precision, safe_norm
from jaxfed.manifolds._geodesics import METRICS, exp, log
from jaxfed.manifolds._retractions import (
    RETRACTIONS,
    retract_cayley,
    retract_polar,
    retract_qr,
    retraction,
    transport_cayley,
    transport_differential,
)

__all__ = [
    "METRICS",
    "RETRACTIONS",
    "distance",
    "egrad2rgrad",
    "ehess2rhess",
    "exp",
    "inner",
    "is_on",
    "log",
    "norm",
    "project",
    "random",
    "random_tangent",
    "retract_cayley",
    "retract_polar",
    "retract_qr",
    "retraction",
    "transport",
    "transport_cayley",
    "transport_differential",
]


@full_precision
def project(x: Matrix, g: Matrix) -> Frame:
    """Orthogonal projection of ``g`` onto the tangent space at ``x``: g - x sym(xᵀg).

    Applied to a Euclidean gradient, it gives the Riemannian one.

    Args:
        x: Point, (d, r) with orthonormal columns.
        g: Any matrix of the same shape.

    Returns:
        The tangent vector nearest to ``g``: ``x.T @ result`` is skew.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``g`` has another shape.

    Source: Shi & Kontar (2024), Section 5.2; Edelman et al. (1998), Section 2.2.
    """
    x, g = frames(x=x, g=g)
    xtg = x.T @ g
    return g - x @ ((xtg + xtg.T) / 2)


@full_precision
def inner(x: Matrix, u: Matrix, v: Matrix, metric: str = "euclidean") -> Float[Array, ""]:
    """Inner product of two tangent vectors: tr uᵀv, less tr uᵀx xᵀv / 2 in the canonical metric.

    Args:
        x: Point, (d, r) with orthonormal columns.
        u: Tangent vector, (d, r).
        v: Another one.
        metric: ``"euclidean"`` or ``"canonical"``.

    Returns:
        The inner product.

    Raises:
        ValueError: If ``x`` is not a tall matrix, ``u`` or ``v`` has another shape or the metric is
            unknown.

    Source: Edelman et al. (1998), Sections 2.2.1 and 2.4.1.
    """
    x, u, v = frames(x=x, u=u, v=v)
    check_name("metric", metric, METRICS)
    if metric == "euclidean":
        return jnp.sum(u * v)
    return jnp.sum(u * v) - jnp.sum((x.T @ u) * (x.T @ v)) / 2


@full_precision
def norm(x: Matrix, v: Matrix, metric: str = "euclidean") -> Float[Array, ""]:
    """Length of a tangent vector.

    Args:
        x: Point, (d, r) with orthonormal columns.
        v: Tangent vector, (d, r).
        metric: ``"euclidean"`` or ``"canonical"``.

    Returns:
        Its length, whose derivative at zero is 0.

    Raises:
        ValueError: If ``x`` is not a tall matrix, ``v`` has another shape or the metric is unknown.
    """
    x, v = frames(x=x, v=v)
    check_name("metric", metric, METRICS)
    # A sum of squares in either metric, since a difference would cancel: with this factor, the
    # rotation xᵀv counts half.
    rest = v if metric == "euclidean" else v - (1 - 0.5**0.5) * x @ (x.T @ v)
    return safe_norm(rest)


@full_precision
def egrad2rgrad(x: Matrix, g: Matrix, metric: str = "euclidean") -> Frame:
    """Riemannian gradient from a Euclidean one: `project`, or g - x gᵀx in the canonical metric.

    Args:
        x: Point, (d, r) with orthonormal columns.
        g: Euclidean gradient of a function at ``x``, (d, r).
        metric: ``"euclidean"`` or ``"canonical"``.

    Returns:
        Tangent vector whose inner product with any other one is the derivative along it.

    Raises:
        ValueError: If ``x`` is not a tall matrix, ``g`` has another shape or the metric is unknown.

    Source: Edelman et al. (1998), Section 2.4.4.
    """
    x, g = frames(x=x, g=g)
    check_name("metric", metric, METRICS)
    return project(x, g) if metric == "euclidean" else g - x @ (g.T @ x)


@full_precision
def ehess2rhess(x: Matrix, g: Matrix, h: Matrix, v: Matrix) -> Frame:
    """Riemannian Hessian along ``v`` in the Euclidean metric: P(h - v sym(xᵀg)).

    With a function f, ``g, h = jax.jvp(jax.grad(f), (x,), (v,))``.

    Args:
        x: Point, (d, r) with orthonormal columns.
        g: Euclidean gradient at ``x``, (d, r).
        h: Its derivative along ``v``, the Euclidean Hessian's product, (d, r).
        v: Tangent vector, (d, r).

    Returns:
        The product of the Riemannian Hessian with ``v``, a tangent vector.

    Raises:
        ValueError: If ``x`` is not a tall matrix or another argument has another shape.

    Source: Absil, Mahony & Trumpf (2013), An extrinsic look at the Riemannian Hessian.
    """
    x, g, h, v = frames(x=x, g=g, h=h, v=v)
    xtg = x.T @ g
    return project(x, h - v @ ((xtg + xtg.T) / 2))


def transport(x_new: Matrix, g: Matrix) -> Frame:
    """Vector transport by projection onto the tangent space at ``x_new``.

    Args:
        x_new: Destination, (d, r) with orthonormal columns.
        g: Vector tangent at another point, (d, r).

    Returns:
        The vector of the tangent space at ``x_new`` nearest to ``g``.

    Raises:
        ValueError: If ``x_new`` is not a tall matrix or ``g`` has another shape.

    Source: Absil et al. (2008), Section 8.1.3.
    """
    return project(*frames(x_new=x_new, g=g))


def random(
    dim: int, rank: int, *, key: Key[Array, ""], dtype: DTypeLike = float
) -> Float[Array, "dim rank"]:
    """Point drawn from the uniform (Haar) distribution of the manifold.

    The Q factor of a Gaussian matrix is uniform once R has a positive diagonal.

    Args:
        key: Random key.
        dim: Number of rows d.
        rank: Number of columns r, at most ``dim``.
        dtype: Floating type; JAX's default if not given.

    Returns:
        Matrix with orthonormal columns, (dim, rank).

    Raises:
        ValueError: If not 1 <= rank <= dim, or ``key`` is not a random key.

    Source: Mezzadri (2007), How to generate random matrices from the classical compact groups.
    """
    key = checked_key("key", key)
    check_whole("dim", dim)
    check_whole("rank", rank, most=dim)
    return orthonormalize(jax.random.normal(key, (dim, rank), dtype))


def random_tangent(x: Matrix, *, key: Key[Array, ""]) -> Frame:
    """Tangent vector of length one, in a uniformly random direction.

    Args:
        x: Point, (d, r) with orthonormal columns.
        key: Random key.

    Returns:
        Vector tangent at ``x``, of Frobenius norm one.

    Raises:
        ValueError: If ``x`` is a single number or not a tall matrix, or ``key`` is not a random
            key.
    """
    key, x = checked_key("key", key), frame("x", x)
    if x.shape[0] == 1:
        raise refuse("x", "more than one number, which has no tangent vectors", x)
    v = project(x, jax.random.normal(key, x.shape, x.dtype))
    return v / jnp.linalg.norm(v)


def distance(x: Matrix, y: Matrix, kind: str = "chordal") -> Float[Array, ""]:
    """Distance between two frames: through the embedding space, or along the manifold.

    It distinguishes bases of the same subspace; `jaxfed.manifolds.grassmann.distance` does not.

    Args:
        x: Point, (d, r) with orthonormal columns.
        y: Point of the same shape.
        kind: ``"chordal"`` for ‖x - y‖_F; ``"euclidean"`` or ``"canonical"`` for the length of the
            shortest geodesic in that metric; NaN if `log` does not find it.

    Returns:
        Distance; the chordal one is from 0 to 2√r. Its derivative at ``x = y`` is 0.

    Raises:
        ValueError: If ``x`` is not a tall matrix, ``y`` has another shape or ``kind`` is unknown.
    """
    x, y = frames(x=x, y=y)
    check_name("kind", kind, ("chordal", *METRICS))
    return safe_norm(x - y) if kind == "chordal" else norm(x, log(x, y, kind), kind)


@full_precision
def is_on(x: Matrix, tolerance: float | None = None) -> Bool[Array, ""]:
    """Whether the columns of ``x`` are orthonormal: ‖xᵀx - I‖_F at most ``tolerance``.

    Args:
        x: Matrix, (d, r).
        tolerance: Largest accepted Frobenius norm; by default r times 1e-12 in double precision,
            1e-5 in single, and four roundings in shorter ones.

    Returns:
        A boolean scalar.

    Raises:
        ValueError: If ``x`` is not a tall matrix, or ``tolerance`` is not positive.
    """
    x = frame("x", x)
    check_positive("tolerance", tolerance, optional=True, single=True)
    rank = x.shape[1]
    if tolerance is None:
        eps = float(jnp.finfo(x.dtype).eps)
        tolerance = (1e-12 if x.dtype == jnp.float64 else max(1e-5, 4 * eps)) * rank
    return jnp.linalg.norm(x.T @ x - jnp.eye(rank, dtype=x.dtype)) <= tolerance


__dir__ = _names.public_names(__name__)
