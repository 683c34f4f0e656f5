"""A warning about clients whose data are much larger than the others'."""

import warnings
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxfed._names import caller
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import are_of_samples
from jaxfed.core.common.buckets import in_order, layout_of, parts_of
from jaxfed.core.common.processes import on_host

# In a mean of second moments, a client of ten times the median energy outweighs several others, and
# a step size that suits it is a tenth of what suits them.
FACTOR = 10.0
LISTED = 5


class EnergyWarning(UserWarning):
    """Some clients' data are so much larger than the others' that they decide what is shared."""


def energies(clients: Clients) -> Float[np.ndarray, " clients"]:
    """Each client's mean squared norm of a sample; zero for data that are not samples."""
    if not all(are_of_samples(part) for part in clients.parts):
        return np.zeros(len(clients))
    found = clients.layout.over_parts(_energy)
    return on_host(in_order(layout_of(found), parts_of(found)))[clients.layout.rows(len(clients))]


@jax.jit
def _energy(part: Any) -> Float[Array, " clients"]:
    return part.energy


def warn_of_large(energies: Float[np.ndarray, " clients"], clients: Clients) -> None:
    """Warn where a client has more than ten times the median client's energy.

    Args:
        energies: each client's mean squared norm of a sample.
        clients: they name themselves by their ids; those of weight 0 are ignored.
    """
    rows = clients.layout.rows(len(clients))
    ids, weights = np.asarray(clients.ids)[rows], np.asarray(clients.weights)[rows]
    there = weights > 0
    median = np.median(energies[there]) if there.any() else 0.0
    large = np.flatnonzero(there & (energies > FACTOR * median))
    if median == 0 or not large.size:
        return
    factors = energies / median
    large = large[np.argsort(-factors[large], kind="stable")]
    shown = ", ".join(
        f"{ids[place]} ({factors[place]:.3g} times the median)" for place in large[:LISTED]
    )
    more = f" and {large.size - LISTED} more" * (large.size > LISTED)
    warnings.warn(
        "clients: wanted samples of similar size, got mean squared norms, by client id, "
        f"{shown}{more}; such clients dominate the shared components and shorten every step. Scale "
        "each client's samples to the same energy, lower these clients' weights, or use "
        "jaxfed.pca.OneShot(method='projector'), which scale does not affect",
        EnergyWarning,
        stacklevel=caller(),
    )
