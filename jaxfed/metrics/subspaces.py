"""Distances between subspaces, and the misalignment of clients' local components.

Distances are sums of squared residuals such as `(I - P_y) x`. Differences of traces would lose all
digits of a distance below the rounding error of the rank.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Real

from jaxfed._checks import checked_array
from jaxfed.core.common.printing import is_known
from jaxfed.linalg.derivatives import constant

# Columns are orthonormal if their scalar products are right to this, as in half precision.
ORTHONORMAL = 0.02


def projector_distance(
    x: Real[ArrayLike, "*#batch d r"], y: Real[ArrayLike, "*#batch d s"]
) -> Float[Array, "..."]:
    """Squared distance of two subspaces, `||P_x - P_y||_F^2`.

    Computed as `||(I - P_y) x||_F^2 + ||(I - P_x) y||_F^2`, which is equal.

    Args:
        x: orthonormal basis, `(..., d, r)`; zero columns do not count.
        y: orthonormal basis in the same space, `(..., d, s)`.

    Returns:
        One distance per leading index, between 0 and `r + s`.

    Raises:
        ValueError: if a basis is not a matrix or the dimensions of the spaces differ.
    """
    x = checked_array("x", x, "... d r")
    y = checked_array("y", y, f"... {x.shape[-2]} s")
    return _energy_outside(x, y) + _energy_outside(y, x)


def _energy_outside(x, basis):
    """`||(I - P_basis) x||_F^2`."""
    return jnp.sum((x - basis @ (basis.mT @ x)) ** 2, axis=(-2, -1))


def subspace_error(
    shared: Real[ArrayLike, "d r1"] | None,
    local: Real[ArrayLike, "m d r2"] | None,
    true_shared: Real[ArrayLike, "d s1"] | None,
    true_local: Real[ArrayLike, "m d s2"] | None,
) -> Float[Array, ""]:
    """Squared distance to the true components, `||P_U - Π_g||_F^2 + mean_i ||P_Vi - Π_i||_F^2`.

    Pass None for components that do not exist; their projector is zero.

    Source: Shi & Kontar (2024), (30).

    Args:
        shared: estimated shared components, `(d, r1)`.
        local: estimated local components, `(m, d, r2)`.
        true_shared: true shared components, `(d, s1)`.
        true_local: true local components, `(m, d, s2)`.

    Returns:
        The error, a scalar. Each of its two terms is a `projector_distance`.

    Raises:
        ValueError: if shapes do not match.
    """
    shared, local = checked_components(shared, local)
    true_shared, true_local = checked_components(true_shared, true_local, prefix="true_")
    if local is not None and true_local is not None and len(local) != len(true_local):
        raise ValueError(
            f"local, true_local: wanted as many clients, got {len(local)} and {len(true_local)}"
        )
    return _distance(shared, true_shared) + jnp.mean(_distance(local, true_local))


def _distance(x: Array | None, y: Array | None) -> Array:
    """`projector_distance`, where the projector of a missing basis is zero."""
    if x is None or y is None:
        only = y if x is None else x
        return jnp.zeros(()) if only is None else jnp.sum(only**2, axis=(-2, -1))
    return projector_distance(x, y)


def misalignment(local: Real[ArrayLike, "m d r"]) -> Float[Array, ""]:
    """Misalignment of the local components, `θ = 1 - λ_max(mean_i P_Vi)`.

    Zero if some direction lies in every client's local subspace. Computed as
    `θ = mean_i ||(I - P_Vi) v||^2` with the top eigenvector `v`: in this form θ is never negative,
    an error of `v` enters only squared, and values far below the rounding error of one stay
    accurate. The derivative along orthonormal `local` is defined even if `λ_max` is repeated (as
    one of the subgradients); a second derivative raises an error.

    Source: Shi & Kontar (2024), (11).

    Args:
        local: local components, `(m, d, r)`.

    Returns:
        θ, a scalar in [0, 1].

    Raises:
        ValueError: if `local` is not `(m, d, r)`.
    """
    local = checked_array("local", local, "m d r")
    m, d, r = local.shape
    # Hold the eigenvector fixed: θ is stationary in it, and at a tie it has no derivative.
    fixed = constant(local, "misalignment")
    stacked = jnp.moveaxis(fixed, 0, 1).reshape(d, m * r)
    # The mean projector is `stacked stacked^T / m`; decompose the smaller of the Gram matrices.
    if d <= m * r:
        top = jnp.linalg.eigh(stacked @ stacked.T)[1][:, -1]
    else:
        top = stacked @ jnp.linalg.eigh(stacked.T @ stacked)[1][:, -1]
        length = jnp.linalg.norm(top)
        # Without any components, every unit vector gives θ = 1.
        top = jnp.where(length == 0, d**-0.5, top / jnp.where(length == 0, 1, length))
    residual = top - jnp.einsum("mdr,mr->md", local, jnp.einsum("mdr,d->mr", local, top))
    return jnp.mean(jnp.sum(residual**2, axis=-1))


def client_distances(local: Real[ArrayLike, "m d r"]) -> Float[Array, "m m"]:
    """Distances between clients' local subspaces, `ρ_ij = ||P_Vi - P_Vj||_F^2 / r2`.

    If two clients have different ranks, r2 is their mean.

    Source: Shi & Kontar (2024), (31).

    Args:
        local: local components, `(m, d, r)`, with orthonormal columns; zero columns do not count.

    Returns:
        ρ, `(m, m)`: symmetric, between 0 and 2.

    Raises:
        ValueError: if `local` is not `(m, d, r)`, or its columns are not orthonormal.
    """
    local = checked_array("local", local, "m d r")
    check_orthonormal("local", local)
    return _client_distances(local)


def check_orthonormal(name: str, bases: Float[Array, "... d r"]) -> None:
    """Refuse columns that are neither orthonormal nor zero, such as loadings; not if traced.

    Raises:
        ValueError: names the argument.
    """
    if not is_known(bases):
        return
    known = np.asarray(bases, float)
    with np.errstate(over="ignore", invalid="ignore"):  # of numbers that are far from it
        grams = known.mT @ known
        there = np.any(known != 0, axis=-2)
        wrong = np.abs(grams - np.eye(grams.shape[-1]) * there[..., None, :])
    # NaN, as of a run that diverged, makes distances that are NaN.
    if (worst := np.max(wrong, initial=0)) > ORTHONORMAL:
        raise ValueError(
            f"{name}: wanted orthonormal columns, or columns of zeros, got scalar products that "
            f"differ by up to {worst:.3g} from those; jaxfed.linalg.orthonormalize makes them so"
        )


# A loop outside of `jit` would be compiled at every call.
@jax.jit
def _client_distances(local: Float[Array, "m d r"]) -> Float[Array, "m m"]:
    # One row at a time: the residuals of all pairs take m times the memory of `local`.
    outside = lax.map(lambda basis: _energy_outside(local, basis), local)
    ranks = jnp.sum(jnp.any(local != 0, axis=-2), axis=-1).astype(local.dtype)
    mean_rank = (ranks[:, None] + ranks) / 2
    # Two clients without components are at distance 0, not NaN; a mean rank of 1/2 is the least
    # other one.
    return (outside + outside.T) / jnp.maximum(mean_rank, 0.5)


def checked_components(
    shared: Real[ArrayLike, "d r1"] | None,
    local: Real[ArrayLike, "m d r2"] | None,
    *,
    prefix: str = "",
) -> tuple[jax.Array | None, jax.Array | None]:
    """Shared and local components as arrays; either may be None.

    Args:
        shared: shared components, `(d, r1)`.
        local: local components, `(m, d, r2)`.
        prefix: prefix of the two names in messages.

    Raises:
        ValueError: if the shapes do not match, or both are None.
    """
    if shared is None and local is None:
        raise ValueError(f"{prefix}shared, {prefix}local: wanted one of the two, got None and None")
    features = "d"
    if shared is not None:
        shared = checked_array(f"{prefix}shared", shared, "d r1")
        features = str(len(shared))
    if local is not None:
        local = checked_array(f"{prefix}local", local, f"m {features} r2")
    return shared, local
