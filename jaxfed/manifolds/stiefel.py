"""The Stiefel manifold St(d, r): matrices of d rows with r orthonormal columns.

Every function works on one point ``x`` with ``x.T @ x = I``, seen as a point of the Euclidean
space of d × r matrices with the Frobenius inner product; map over points with `jax.vmap`. No
function forms a d × d matrix.

A *retraction* at ``x`` maps a tangent vector ``v`` to a point of the manifold that agrees with
``x + v`` to first order. The generalized retraction of Shi & Kontar (2024, Definition 5) also
accepts a ``v`` that is not tangent, and keeps the column space of ``x + v``: `retract_polar` and
`retract_qr` are such, `retract_cayley` is not.

References:
    Edelman, Arias & Smith (1998), The geometry of algorithms with orthogonality constraints.
    Absil, Mahony & Sepulchre (2008), Optimization algorithms on matrix manifolds.
    Shi & Kontar (2024), Personalized PCA: decoupling shared and unique features.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key

from jaxfed._checks import (
    check_name,
    check_positive,
    check_whole,
    checked_array,
    checked_key,
    refuse,
)
from jaxfed.linalg import orthonormalize, polar

# Accelerators shorten the factors of single precision products by default (to 10 bits of
# mantissa or fewer), which alone would move a point off the manifold by about 1e-3.
_full_precision = jax.default_matmul_precision("highest")


def _frame(name: str, x: Array) -> Array:
    """One point, refused if it cannot have orthonormal columns."""
    x = checked_array(name, x, "d r")
    if x.shape[0] < x.shape[1]:
        raise refuse(name, "one matrix (d, r) with d >= r; map over several with jax.vmap", x)
    return x


def _frames(**matrices: Array) -> list[Array]:
    """A point and its companions, by name; refused if these have another shape."""
    (name, x), *others = matrices.items()
    x = _frame(name, x)
    shape = f"{x.shape[0]} {x.shape[1]}"
    return [x, *(checked_array(name, other, shape) for name, other in others)]


def _polish(y: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """One Newton-Schulz step from a nearly orthonormal ``y`` to the nearest orthonormal matrix.

    A map that only rotates its point keeps the point's rounding errors, which add up over many
    steps; this squares them away.
    """
    return y + y @ (jnp.eye(y.shape[1], dtype=y.dtype) - y.T @ y) / 2


@_full_precision
def project(x: Float[Array, "d r"], g: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Orthogonal projection of ``g`` onto the tangent space at ``x``: g - x sym(xᵀg).

    Applied to a Euclidean gradient it gives the Riemannian one.

    Args:
        x: Point, (d, r) with orthonormal columns.
        g: Any matrix of the same shape.

    Returns:
        The tangent vector nearest to ``g``: ``x.T @ result`` is skew.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``g`` has another shape.

    Source:
        Shi & Kontar (2024), Section 5.2; Edelman et al. (1998), Section 2.2.
    """
    x, g = _frames(x=x, g=g)
    xtg = x.T @ g
    return g - x @ ((xtg + xtg.T) / 2)


def transport(x_new: Float[Array, "d r"], g: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Vector transport by projection: carry ``g`` from elsewhere to the tangent space at ``x_new``.

    Args:
        x_new: Point where the vector is wanted, (d, r) with orthonormal columns.
        g: Vector tangent at another point, (d, r).

    Returns:
        The vector of the tangent space at ``x_new`` nearest to ``g``.

    Raises:
        ValueError: If ``x_new`` is not a tall matrix or ``g`` has another shape.

    Source:
        Absil et al. (2008), Section 8.1.3.
    """
    return project(*_frames(x_new=x_new, g=g))


def retract_polar(x: Float[Array, "d r"], v: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Polar retraction: the orthonormal polar factor of ``x + v``, its nearest orthonormal matrix.

    A generalized retraction: ``v`` need not be tangent, and the columns of the result span those
    of ``x + v`` (of full column rank).

    Args:
        x: Point, (d, r) with orthonormal columns.
        v: Step, (d, r).

    Returns:
        Point of the manifold, (d, r).

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` has another shape.

    Source:
        Shi & Kontar (2024), Proposition 6.
    """
    x, v = _frames(x=x, v=v)
    return polar(x + v)


def retract_qr(x: Float[Array, "d r"], v: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """QR retraction: the Q of ``x + v`` whose R has a positive diagonal.

    The positive diagonal makes it continuous with ``retract_qr(x, 0) = x``. A generalized
    retraction, as `retract_polar`.

    Args:
        x: Point, (d, r) with orthonormal columns.
        v: Step, (d, r).

    Returns:
        Point of the manifold, (d, r).

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` has another shape.

    Source:
        Shi & Kontar (2024), Proposition 7.
    """
    x, v = _frames(x=x, v=v)
    return orthonormalize(x + v)


@_full_precision
def retract_cayley(x: Float[Array, "d r"], v: Float[Array, "d r"]) -> Float[Array, "d r"]:
    """Cayley retraction: rotate ``x`` by the Cayley transform of the skew matrix that ``v`` makes.

    With p = v - x(xᵀv)/2 and W = p xᵀ - x pᵀ the result is (I - W/2)⁻¹(I + W/2) x. W = A Bᵀ with
    A = [p, x] and B = [x, -p], so that the Sherman-Morrison-Woodbury formula leaves one 2r × 2r
    solve, which is never singular.

    Not a generalized retraction: W, hence the result, depends only on the tangent part of ``v``,
    and the columns of the result do not span those of ``x + v`` even when ``v`` is tangent.

    Args:
        x: Point, (d, r) with orthonormal columns.
        v: Step, (d, r).

    Returns:
        Point of the manifold, (d, r).

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``v`` has another shape.

    Source:
        Wen & Yin (2013), A feasible method for optimization with orthogonality constraints,
        Lemma 4.
    """
    x, v = _frames(x=x, v=v)
    p = v - x @ (x.T @ v) / 2
    a = jnp.concatenate([p, x], axis=1)
    b = jnp.concatenate([x, -p], axis=1)
    y = x + a @ jnp.linalg.solve(jnp.eye(a.shape[1], dtype=a.dtype) - b.T @ a / 2, b.T @ x)
    return _polish(y)


Retraction = Callable[[Float[Array, "d r"], Float[Array, "d r"]], Float[Array, "d r"]]

RETRACTIONS: dict[str, Retraction] = {
    "polar": retract_polar,
    "qr": retract_qr,
    "cayley": retract_cayley,
}


def retraction(name: str) -> Retraction:
    """Retraction of that name.

    Args:
        name: A key of `RETRACTIONS`.

    Returns:
        The function ``(x, v) -> point``.

    Raises:
        ValueError: If there is no retraction of that name.
    """
    check_name("retraction", name, sorted(RETRACTIONS))
    return RETRACTIONS[name]


def random(
    key: Key[Array, ""], dim: int, rank: int, dtype: DTypeLike = float
) -> Float[Array, "dim rank"]:
    """Point drawn from the uniform (Haar) distribution of the manifold.

    The Q factor of a Gaussian matrix is uniform once R has a positive diagonal.

    Args:
        key: Random key.
        dim: Number of rows d.
        rank: Number of columns r, at most ``dim``.
        dtype: Floating type; the default of JAX when not given.

    Returns:
        Matrix with orthonormal columns, (dim, rank).

    Raises:
        ValueError: If not 1 <= rank <= dim, or ``key`` is no random key.

    Source:
        Mezzadri (2007), How to generate random matrices from the classical compact groups.
    """
    key = checked_key("key", key)
    check_whole("dim", dim)
    check_whole("rank", rank, most=dim)
    return orthonormalize(jax.random.normal(key, (dim, rank), dtype))


def distance(x: Float[Array, "d r"], y: Float[Array, "d r"]) -> Float[Array, ""]:
    """Chordal distance ‖x - y‖_F between two frames, a metric of the embedding space.

    It tells apart two bases of the same subspace; `jaxfed.manifolds.grassmann.distance` does not.

    Args:
        x: Point, (d, r) with orthonormal columns.
        y: Point of the same shape.

    Returns:
        Distance, between 0 and 2√r. Its derivative at ``x = y`` is taken as 0.

    Raises:
        ValueError: If ``x`` is not a tall matrix or ``y`` has another shape.
    """
    x, y = _frames(x=x, y=y)
    return optax.safe_norm(x - y, 0.0)


@_full_precision
def is_on(x: Float[Array, "d r"], tolerance: float | None = None) -> Bool[Array, ""]:
    """Whether the columns of ``x`` are orthonormal: ‖xᵀx - I‖_F at most ``tolerance``.

    Args:
        x: Matrix, (d, r).
        tolerance: Largest accepted Frobenius norm; when not given, r times 1e-12 in double
            precision, 1e-5 in single, and four roundings in shorter ones.

    Returns:
        A boolean scalar.

    Raises:
        ValueError: If ``x`` is not a tall matrix, or ``tolerance`` is not positive.
    """
    x = _frame("x", x)
    check_positive("tolerance", tolerance, optional=True, single=True)
    rank = x.shape[1]
    if tolerance is None:
        eps = float(jnp.finfo(x.dtype).eps)
        tolerance = (1e-12 if x.dtype == jnp.float64 else max(1e-5, 4 * eps)) * rank
    return jnp.linalg.norm(x.T @ x - jnp.eye(rank, dtype=x.dtype)) <= tolerance
