"""Real data of Shi & Kontar (2024), sections 7.3 and 7.4, or data of the same kind.

The paper's own files are not all public or not the ones at hand; each target says which data it
wants and where they come from. What is called the reference is an independent implementation of
the same experiment on the same data in NumPy, in double precision.
"""

from typing import Any

import jax

from jaxfed import Algorithm, Clients, Solution, fit


def fitted(
    algorithm: Algorithm, clients: Clients, seed: int, rounds: int = 1, start: Any = None
) -> Solution:
    """A run from a seed."""
    key = jax.random.key(seed)
    return fit(algorithm, clients, rounds=rounds, key=key, warm_start=start)
