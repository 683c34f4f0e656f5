"""Measure how well components fit samples, seen or unseen."""

from functools import partial

import jax

from jaxfed import metrics
from jaxfed.core.clients.samples import Samples
from jaxfed.core.contract.algorithm import Personalized


@partial(jax.jit, static_argnames="per_client")
def shares(
    result: Personalized, data: Samples, *, per_client: bool = False
) -> metrics.EnergyShares:
    """Return the shares of the samples' energy in shared components, local ones, and neither."""
    return metrics.separation(result, data.values, counts=data.count, per_client=per_client)


def objective(result: Personalized, data: Samples) -> float:
    """Return the squared reconstruction error of a sample, averaged over clients."""
    return float(metrics.reconstruction_error(result, data.values, counts=data.count))


def theta(result: Personalized) -> float | None:
    """Return the misalignment of the local components; None without local components."""
    return None if result.local is None else float(metrics.misalignment(result.local))
