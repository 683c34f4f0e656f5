"""Measures how well components fit samples, whether or not they were learned from them."""

import jax

from jaxfed import metrics
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.algorithm import Personalized


@jax.jit
def shares(result: Personalized, data: Samples) -> metrics.EnergyShares:
    """Return the shares of the samples' energy in shared components, in local ones, in neither."""
    return metrics.separation(data.values, result.shared, result.local, data.count)


@jax.jit
def shares_of_each(result: Personalized, data: Samples) -> metrics.EnergyShares:
    """Return the same shares for each client, as three arrays."""
    return metrics.separation(data.values, result.shared, result.local, data.count, per_client=True)


def objective(result: Personalized, data: Samples) -> float:
    """Return the squared reconstruction error of a sample, averaged over clients."""
    error = metrics.reconstruction_error(data.values, result.shared, result.local, data.count)
    return float(error)


def theta(result: Personalized) -> float | None:
    """Return the misalignment of the local components; None without any."""
    return None if result.local is None else float(metrics.misalignment(result.local))
