"""Warns about clients whose data are much larger than the others'."""

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

# At ten times the median energy, a client outweighs several others in a mean of second moments, and
# needs a step size of a tenth of theirs.
FACTOR = 10.0
LISTED = 5


class EnergyWarning(UserWarning):
    """Some clients' data are so much larger than the others' that they dominate the shared part."""


def energies(clients: Clients) -> Float[np.ndarray, " clients"]:
    """Each client's mean squared norm of a sample; zero if the data are not samples."""
    if not all(are_of_samples(part) for part in clients.parts):
        return np.zeros(len(clients))
    found = clients.layout.over_parts(energy_of)
    return on_host(in_order(layout_of(found), parts_of(found)))[clients.layout.rows(len(clients))]


@jax.jit
def energy_of(part: Any) -> Float[Array, " clients"]:
    """The energies of one part of the data."""
    return part.energy


def warn_of_large(energies: Float[np.ndarray, " clients"], clients: Clients) -> None:
    """Warn about clients with more than ten times the median energy.

    Args:
        energies: each client's mean squared norm of a sample.
        clients: the clients; those of weight 0 are ignored.
    """
    rows = clients.layout.rows(len(clients))
    names, weights = clients.names.clients, np.asarray(clients.weights)[rows]
    labels = np.asarray(clients.ids)[rows] if names is None else names
    # A client of weight 0 dominates nothing, and must not move the median.
    there = weights > 0
    # One without an energy, since its samples are not finite, must not silence the others.
    there &= ~np.isnan(energies)
    median = np.median(energies[there]) if there.any() else 0.0
    large = np.flatnonzero(there & (energies > FACTOR * median))
    if median == 0 or not large.size:
        return
    factors = energies / median
    large = large[np.argsort(-factors[large], kind="stable")]
    shown = ", ".join(
        f"{labels[place]} ({factors[place]:.3g} times the median)" for place in large[:LISTED]
    )
    kind = "id" if names is None else "name"
    more = f" and {large.size - LISTED} more" * (large.size > LISTED)
    warnings.warn(
        f"clients: wanted samples of similar size, got mean squared norms, by client {kind}, "
        f"{shown}{more}; such clients dominate the shared components and shorten every step. Scale "
        "each client's samples to the same energy, lower these clients' weights, or use "
        "jaxfed.pca.OneShot(method='projector'), which scale does not affect",
        EnergyWarning,
        stacklevel=caller(),
    )
