"""Where algorithms with shared and local components start without a warm start."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed.core.contract.reduction import Gram, Symmetric
from jaxfed.linalg import Moment, top_eigenvectors
from jaxfed.linalg.basis import orthonormalize_once
from jaxfed.linalg.division import ratio, reciprocal
from jaxfed.pca.components import (
    FEW,
    RandomKey,
    Rows,
    first_components,
    moment_message,
    moment_received,
)

StartName = Literal["common", "local_first", "random"]

# Steps of subspace iteration for the shared components, from which a solver continues.
STEPS = 40
# Rows of that iteration in excess of the components.
MORE = 10
# The energy c of `common_message`, relative to the least energy of a client's components.
SMALL = 0.03


def start_message(
    start: StartName,
    moment: Moment,
    shared_rank: int,
    local_rank: int,
    active: Float[Array, " local_rank"] | None = None,
) -> Gram | Symmetric | None:
    """Return what ONE client sends for the first shared components; nothing for random ones.

    Args:
        start: `"common"`: the client's top `shared_rank + local_rank` components, of which the
            server takes those that most clients have, the larger ones first. `"local_first"`: the
            second moment deflated by the client's top `local_rank` components.
        moment: the client's second moment.
        shared_rank: number of shared components.
        local_rank: number of local components.
        active: 1 for local components in use; by default all.
    """
    if start == "random":
        return None
    if start == "local_first":
        return moment_message(moment.deflate(first_components(moment, local_rank, active).T))
    if active is not None:
        active = jnp.concatenate([jnp.ones(shared_rank, active.dtype), active])
    return common_message(moment, first_components(moment, shared_rank + local_rank, active))


def common_message(moment: Moment, rows: Rows) -> Gram:
    """Return a message about the directions among the top eigenvectors of many clients.

    It is a factor of the client's projector in which a component of energy e has the weight
    e² / (e + c)², so that among directions common to all clients the larger come first.

    Args:
        moment: the client's second moment.
        rows: its `first_components`.
    """
    inner = moment.row_products(rows)[1]
    # The weights do not depend on the unit of energy.
    inner = ratio(inner, jax.lax.stop_gradient(jnp.diagonal(inner).max()))
    energies = jnp.diagonal(inner)
    # Directions without variance, which complete a basis, have no weight despite rounding.
    eps = jnp.finfo(energies.dtype).eps
    present = energies > eps * moment.dim
    # For eigenvectors the off-diagonal entries are zero, but their derivatives are not. All below
    # is right to second order in them; where eigenvalues tie, the least has no such derivative.
    mixed = jnp.where(jnp.eye(len(rows), dtype=bool), 0, inner)
    weakest = jnp.argmin(jnp.where(present, energies, jnp.inf))
    least = energies[weakest]
    gaps = least - energies
    gaps = jnp.where(jnp.abs(gaps) * least > eps, gaps, jnp.inf)
    small = SMALL * jnp.maximum(least + jnp.sum(mixed[weakest] ** 2 / gaps), 0)
    # K (K + c)^{-1} = 1 - c (K + c)^{-1}
    scale = reciprocal(energies + small, present)
    mixed = mixed * scale
    weights = jnp.diag(energies * scale) + small * scale[:, None] * (mixed - mixed @ mixed)
    return Gram((weights @ rows).T, thin=True)


def first_shared(
    received: Array | None, rank: int, key: RandomKey, features: int, dtype: jnp.dtype
) -> Rows:
    """Return the server's first shared components.

    Args:
        received: the reduced messages of `start_message`; None for random components.
        rank: number of components.
        key: random key.
        features: number of features.
        dtype: type of random components.
    """
    if received is None:
        # Transposed, so that rows hold the same random numbers as columns would.
        return orthonormalize_once(jax.random.normal(key, (features, rank), dtype)).T
    moment = moment_received(received)
    if moment.dim < FEW:
        return first_components(moment, rank)
    # If clients are alike, as many directions as they have components are almost equally common.
    # More rows than that contain them all, and then tell them apart.
    rows = first_components(moment, min(moment.dim, rank + MORE), steps=STEPS)
    inner = moment.row_products(rows)[1]
    return top_eigenvectors(inner, rank)[1].T @ rows


def with_starts(algorithm: Any, count: int) -> list[Any]:
    """Return copies of an algorithm with different starts, beginning with its own.

    Without a clear difference the first one wins, and `"common"` shares the largest components.

    Args:
        algorithm: an algorithm with a field `start`.
        count: number of copies.
    """
    own = algorithm.start
    others = [name for name in ("common", "local_first") if name != own and own != "random"]
    names = [own, *others, *["random"] * count][:count]
    return [dataclasses.replace(algorithm, start=name) for name in names]
