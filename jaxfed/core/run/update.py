"""Updates a solution with rounds on newer data, and measures the drift of its subspace."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.processes import on_host
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.manifolds import grassmann

# The largest deviation of XᵀX from the identity for which X counts as orthonormal.
ORTHONORMAL = 1e-3


def update(before: Solution, clients: Clients, **options: Any) -> Solution:
    """Run `jaxfed.fit` from a solution and add the drift to the history; see `Solution.update`."""
    after = fit(before.algorithm, clients, warm_start=before, **options)
    both = [_basis(solution.result.shared) for solution in (before, after)]
    if both[0] is None or both[1] is None or len(both[0]) != len(both[1]):
        return after
    drift = np.full(len(after.history["objective"]), np.nan)
    drift[-1:] = _largest_sine(*both)
    return replace(after, history=after.history | {"drift": drift})


def _basis(shared: PyTree) -> Float[np.ndarray, "features rank"] | None:
    """The shared model if it is a single orthonormal basis, or None."""
    if jax.tree.structure(shared) != jax.tree.structure(0) or np.ndim(shared) != 2:
        return None
    basis = on_host(shared)
    gram = basis.T @ basis
    return basis if np.abs(gram - np.eye(len(gram))).max() < ORTHONORMAL else None


@jax.jit
def _largest_sine(
    x: Float[Array, "features rank"], y: Float[Array, "features rank"]
) -> Float[Array, ""]:
    return jnp.sin(jnp.max(grassmann.principal_angles(x, y)))
