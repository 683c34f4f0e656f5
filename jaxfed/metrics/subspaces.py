"""Distances between subspaces and the misalignment of the clients' local components.

Distances are sums of squared residuals such as `(I - P_y) x`, never differences of traces: those
would keep no digit once the distance falls below the rounding error of the rank.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxfed._checks import checked_array
from jaxfed.linalg.derivatives import constant


def projector_distance(
    x: Float[Array, "*batch d r"], y: Float[Array, "*batch d s"]
) -> Float[Array, "*batch"]:
    """Squared distance of two subspaces, `||P_x - P_y||_F^2`.

    Equal to `||(I - P_y) x||_F^2 + ||(I - P_x) y||_F^2`, which is what is computed.

    Args:
        x: orthonormal basis, `(..., d, r)`; columns of zeros do not count.
        y: orthonormal basis of the same ambient space, `(..., d, s)`.

    Returns:
        One distance per leading index, between 0 and `r + s`.

    Raises:
        ValueError: if a basis is not a matrix or the ambient dimensions differ.
    """
    x = checked_array("x", x, "... d r")
    y = checked_array("y", y, f"... {x.shape[-2]} s")
    return _energy_outside(x, y) + _energy_outside(y, x)


def _energy_outside(x, basis):
    """`||(I - P_basis) x||_F^2`."""
    return jnp.sum((x - basis @ (basis.mT @ x)) ** 2, axis=(-2, -1))


def subspace_error(
    shared: Float[Array, "d r1"] | None,
    local: Float[Array, "m d r2"] | None,
    true_shared: Float[Array, "d s1"] | None,
    true_local: Float[Array, "m d s2"] | None,
) -> Float[Array, ""]:
    """Squared distance to the true components, `||P_U - Π_g||_F^2 + mean_i ||P_Vi - Π_i||_F^2`.

    Components that do not exist are None, and their projector is zero.

    Source: Shi & Kontar (2024), (30).

    Args:
        shared: estimated shared components, `(d, r1)`.
        local: estimated local components, `(m, d, r2)`.
        true_shared: true shared components, `(d, s1)`.
        true_local: true local components, `(m, d, s2)`.

    Returns:
        The error, a scalar. Its two terms alone are `projector_distance` of the pairs.

    Raises:
        ValueError: if the shapes do not fit together.
    """
    shared, local = components(shared, local)
    true_shared, true_local = components(true_shared, true_local, prefix="true_")
    if local is not None and true_local is not None and len(local) != len(true_local):
        raise ValueError(
            f"local, true_local: wanted as many clients, got {len(local)} and {len(true_local)}"
        )
    return _distance(shared, true_shared) + jnp.mean(_distance(local, true_local))


def _distance(x: Array | None, y: Array | None) -> Array:
    """`projector_distance`, of which a missing basis has a projector of zero."""
    if x is None or y is None:
        only = y if x is None else x
        return jnp.zeros(()) if only is None else jnp.sum(only**2, axis=(-2, -1))
    return projector_distance(x, y)


def misalignment(local: Float[Array, "m d r"]) -> Float[Array, ""]:
    """Misalignment of the local components, `θ = 1 - λ_max(mean_i P_Vi)`.

    Zero where a direction lies in every client's local subspace. With `v` the top eigenvector,
    `θ = mean_i ||(I - P_Vi) v||^2`; in this form θ is never negative, an error of `v` enters only
    squared, and values far below the rounding error of one are still told apart. Differentiable
    along orthonormal `local`, also where `λ_max` is repeated (then one of the subgradients); once,
    a second derivative is an error.

    Source: Shi & Kontar (2024), (11).

    Args:
        local: local components, `(m, d, r)`.

    Returns:
        θ, a scalar in [0, 1].

    Raises:
        ValueError: if `local` is not `(m, d, r)`.
    """
    local = _local(local)
    m, d, r = local.shape
    # The eigenvector is held fixed: θ is stationary in it, and it has no derivative at a tie.
    fixed = constant(local, "misalignment")
    stacked = jnp.moveaxis(fixed, 0, 1).reshape(d, m * r)
    # The mean projector is `stacked stacked^T / m`; the smaller of its two Gram matrices will do.
    if d <= m * r:
        top = jnp.linalg.eigh(stacked @ stacked.T)[1][:, -1]
    else:
        top = stacked @ jnp.linalg.eigh(stacked.T @ stacked)[1][:, -1]
        length = jnp.linalg.norm(top)
        # No components at all: any unit vector shows that θ = 1.
        top = jnp.where(length == 0, d**-0.5, top / jnp.where(length == 0, 1, length))
    residual = top - jnp.einsum("mdr,mr->md", local, jnp.einsum("mdr,d->mr", local, top))
    return jnp.mean(jnp.sum(residual**2, axis=-1))


def client_distances(local: Float[Array, "m d r"]) -> Float[Array, "m m"]:
    """Distances between the clients' own subspaces, `ρ_ij = ||P_Vi - P_Vj||_F^2 / r2`.

    Clients of different ranks are divided by the mean of the two, which is r2 where they agree.

    Source: Shi & Kontar (2024), (31).

    Args:
        local: local components, `(m, d, r)`.

    Returns:
        ρ, `(m, m)`: symmetric, between 0 and 2.

    Raises:
        ValueError: if `local` is not `(m, d, r)`.
    """
    local = _local(local)
    # One row at a time: all pairs of residuals at once would take m times the memory of `local`.
    outside = lax.map(lambda basis: _energy_outside(local, basis), local)
    ranks = jnp.sum(jnp.any(local != 0, axis=-2), axis=-1).astype(local.dtype)
    mean_rank = (ranks[:, None] + ranks) / 2
    return (outside + outside.T) / jnp.maximum(mean_rank, 0.5)


def components(
    shared: Float[Array, "d r1"] | None, local: Float[Array, "m d r2"] | None, *, prefix: str = ""
) -> tuple[jax.Array | None, jax.Array | None]:
    """Shared and local components as arrays, after a look at their shapes.

    Args:
        shared: shared components, `(d, r1)`, or None.
        local: local components, `(m, d, r2)`, or None.
        prefix: of the two names, in the message.

    Returns:
        The two arrays, None where there is none.

    Raises:
        ValueError: if they are not `(d, r1)` and `(m, d, r2)`, or both are None.
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


def _local(local: Float[Array, "m d r"]) -> jax.Array:
    return checked_array("local", local, "m d r")
