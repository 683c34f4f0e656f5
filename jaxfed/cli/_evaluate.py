"""How good learned components are, on the samples they were learned from and on others."""

import jax

from jaxfed import metrics
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.algorithm import Personalized


@jax.jit
def shares(result: Personalized, data: Samples) -> metrics.EnergyShares:
    """Shares of the samples' energy in the shared components, in the local ones, in neither."""
    return metrics.separation(data.values, result.shared, result.local, data.count)


@jax.jit
def shares_of_each(result: Personalized, data: Samples) -> metrics.EnergyShares:
    """The same of every client by itself, three arrays."""
    return metrics.separation(data.values, result.shared, result.local, data.count, per_client=True)


def objective(result: Personalized, data: Samples) -> float:
    """Mean over clients of the squared reconstruction error of a sample."""
    error = metrics.reconstruction_error(data.values, result.shared, result.local, data.count)
    return float(error)


def theta(result: Personalized) -> float | None:
    """Misalignment of the local components, None where there are none."""
    return None if result.local is None else float(metrics.misalignment(result.local))
