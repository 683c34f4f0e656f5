"""Deterministic problems on which runs are compared with the reference digit by digit.

Tables of means over seeds do not notice a rule that is applied a round early or a step that is
twice as long, where the iteration ends at the same place. The first rounds do. The reference's
values are those of `tests/references`; a test computes them anew.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxfed import Algorithm, Clients, Personalized, rollout


def waves(*shape: int) -> Float[np.ndarray, "..."]:
    """Deterministic numbers from -1 to 1 that look random."""
    places = np.arange(1, math.prod(shape) + 1)
    return np.cos(places**2 * (5**0.5 - 1) / 2).reshape(shape)


def frame(features: int, rank: int) -> Float[np.ndarray, "features rank"]:
    """An orthonormal basis of such numbers."""
    return np.linalg.qr(waves(features, rank))[0]


@partial(jax.jit, static_argnames=("rounds", "measure"))
def curve(
    algorithm: Algorithm,
    clients: Clients,
    warm_start: Personalized,
    measure: Callable[[Any, Personalized], Array],
    rounds: int,
) -> Float[Array, " rounds"]:
    """Measure the result on the clients' samples after each round."""
    solution = rollout(
        algorithm,
        clients,
        rounds=rounds,
        key=jax.random.key(0),
        warm_start=warm_start,
        metrics=lambda result: {"value": measure(clients.data.values, result)},
    )
    return solution.history["value"]
