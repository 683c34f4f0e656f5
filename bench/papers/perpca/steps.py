"""The first rounds on a problem without random numbers, against the reference digit by digit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxfed import Clients, Personalized, metrics, rollout
from jaxfed.pca import OneShot, PerPCA
from papers.exact import curve as curve_of
from papers.exact import frame, waves
from papers.report import Found, Labels
from papers.runs import Seeds

SHARED, LOCAL, STEP = 2, 2, 0.2
AT = (1, 2, 5)  # rounds
ERROR = "reconstruction error"


def problem() -> tuple[
    Float[np.ndarray, "m n d"], Float[np.ndarray, "d r1"], Float[np.ndarray, "m d r2"]
]:
    """Clients, and shared and local components to start from."""
    # Not the same numbers again: local components must not lie in the shared ones.
    return waves(4, 15, 8), frame(8, SHARED), waves(5, 8, LOCAL)[1:]


def _error(samples, result):
    return metrics.reconstruction_error(result, samples)


def run(seeds: Seeds) -> Found:
    """One run of each method; nothing is random, so seeds are not used."""
    del seeds
    measured: dict[Labels, Any] = {}
    with jax.enable_x64(True):
        samples, shared, local = (jnp.asarray(x) for x in problem())
        clients = Clients.from_samples(samples)
        for variant in ("tangent", "polar"):
            algorithm = PerPCA(SHARED, LOCAL, solver="gradient", step_size=STEP, variant=variant)
            curve = curve_of(algorithm, clients, Personalized(shared, local), _error, AT[-1])
            for k in AT:
                measured[f"PerPCA, {variant}", f"{ERROR} after {k} rounds"] = curve[k - 1]
        for method in ("projector", "spectrum", "local_first"):
            once = OneShot(SHARED, LOCAL, method=method)
            result = rollout(once, clients, rounds=1, key=jax.random.key(0)).result
            error = metrics.reconstruction_error(result, samples)
            measured[f"OneShot, {method}", ERROR] = error
    return Found(measured)
