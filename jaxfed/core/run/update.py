"""An update of a solution: rounds on newer data, and how far the shared subspace has turned."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.bases import Basis
from jaxfed.core.contract.fixed_point import bases
from jaxfed.core.run.fit import fit
from jaxfed.core.run.solution import Solution
from jaxfed.linalg import orthonormalize
from jaxfed.manifolds import grassmann


def update(before: Solution, clients: Clients, **options: Any) -> Solution:
    """`jaxfed.fit` from a solution, with the drift in its history; see `Solution.update`."""
    after = fit(before.algorithm, clients, warm_start=before, **options)
    both = zip(_shared_bases(before), _shared_bases(after), strict=True)
    sines = [float(_largest_sine(x, y)) for x, y in both]
    if not sines:
        return after
    drift = np.full(len(after.history["objective"]), np.nan)
    drift[-1:] = max(sines)
    return replace(after, history=after.history | {"drift": drift})


def _shared_bases(solution: Solution) -> tuple[Basis, ...]:
    """The bases in the server's state."""
    one = jax.tree.map(lambda x: x[0], solution.local)
    return bases(solution.algorithm, solution.server, one).shared


@jax.jit
def _largest_sine(x: Basis, y: Basis) -> jax.Array:
    return jnp.sin(jnp.max(grassmann.principal_angles(orthonormalize(x), orthonormalize(y))))
