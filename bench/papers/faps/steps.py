"""The first rounds on a problem without random numbers, against the reference digit by digit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxfed import Clients, Personalized, metrics
from jaxfed.pca import FAPS, LocalPower, SubspaceIteration
from papers.exact import curve as curve_of
from papers.exact import frame, waves
from papers.faps._problems import FIVE, KKT, POWER, SSI
from papers.report import Found, Labels
from papers.runs import Seeds

RANK, ROUNDS = 3, 12
AT = (1, 5, 6, 7, 12)  # rounds; rule (25) makes the first difference to the seventh


def problem() -> tuple[Float[np.ndarray, "m n d"], Float[np.ndarray, "d rank"]]:
    """Clients of unlike scale, and the first components."""
    samples = waves(3, 20, 12) * np.asarray([1.0, 0.3, 0.1])[:, None, None]
    return samples, frame(12, RANK)


def _kkt(samples, result):
    return metrics.scaled_kkt_violation(result, samples)


def run(seeds: Seeds) -> Found:
    """One run of each method; nothing is random, so seeds are not used."""
    del seeds
    measured: dict[Labels, Any] = {}
    with jax.enable_x64(True):
        samples, start = problem()
        clients = Clients.from_samples(samples)
        for name, algorithm in (
            (SSI, SubspaceIteration(RANK, stop="objective")),
            (POWER, LocalPower(RANK, alignment="procrustes", stop="objective")),
            (FIVE, FAPS(RANK, stop="objective")),
        ):
            curve = curve_of(
                algorithm, clients, Personalized(jnp.asarray(start), None), _kkt, ROUNDS
            )
            for k in AT:
                measured[name, f"{KKT} after {k} rounds"] = curve[k - 1]
    return Found(measured)
