"""Two clients in three dimensions: what pooled PCA finds of them, and what PerPCA does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import Clients, metrics, stack
from jaxfed.pca import PerPCA, Pooled
from papers.report import Found, Labels
from papers.runs import Seeds, learned
from papers.synthetic import misalignment_pair

THETA = 0.127  # of the paper's picture
POOLED, OURS = "pooled PCA, two components", "PerPCA, one shared and one local"
SHARED, ERROR = "shared component's distance", "reconstruction error"


def run(seeds: Seeds, *, rounds: int = 600) -> Found:
    """All seeds of a method in one compiled call."""
    data_keys, keys = seeds.split(2)
    draws = [misalignment_pair(key, THETA, noise_variance=0.01) for key in data_keys]
    clients = stack([Clients.from_samples(draw.samples) for draw in draws])
    truth = jnp.stack([draw.shared for draw in draws])
    own = jnp.stack([draw.local for draw in draws])
    samples = jnp.stack([jnp.asarray(draw.samples) for draw in draws])
    error = jax.vmap(metrics.reconstruction_error)
    pooled = learned(Pooled(2), clients, keys)
    ours = learned(
        PerPCA(1, 1, solver="gradient", step_size=0.2, start="random"), clients, keys, rounds
    )
    # As the shared component, pooled PCA has its second one where local variance is larger.
    distance = jax.vmap(metrics.projector_distance)
    measured: dict[Labels, Any] = {
        (POOLED, f"first {SHARED}"): distance(pooled.shared[:, :, :1], truth),
        (POOLED, f"second {SHARED}"): distance(pooled.shared[:, :, 1:], truth),
        (OURS, SHARED): distance(ours.shared, truth),
        (OURS, "local components' mean distance"): jax.vmap(
            lambda v, w: jax.vmap(metrics.projector_distance)(v, w).mean()
        )(ours.local, own),
        (POOLED, ERROR): error(pooled, samples),
        (OURS, ERROR): error(ours, samples),
    }
    return Found({labels: np.asarray(values) for labels, values in measured.items()})
