"""How good learned components are, on the samples they were learned from and on others."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxfed import metrics
from jaxfed.core.algorithm import Personalized
from jaxfed.core.clients import Samples


@jax.jit
def shares(result: Personalized, data: Samples) -> metrics.EnergyShares:
    """Shares of the samples' energy in the shared components, in the local ones, in neither."""
    return metrics.separation(data.values, result.shared, result.local, data.count)


def objective(result: Personalized, data: Samples) -> float:
    """Mean over clients of the squared reconstruction error of a sample."""
    error = metrics.reconstruction_error(data.values, result.shared, result.local, data.count)
    return float(error)


def theta(result: Personalized) -> float | None:
    """Misalignment of the local components, None where there are none."""
    return None if result.local is None else float(metrics.misalignment(result.local))


def principal(
    basis: Float[Array | np.ndarray, "d r"], samples: Sequence[Float[np.ndarray, "n_i d"]]
) -> Float[np.ndarray, "d r"]:
    """The same span by its principal axes: uncorrelated scores, the largest variance first.

    An algorithm learns a subspace; which of its bases is arbitrary. A picture needs the one in
    which each component means something by itself. Each client counts the same.
    """
    scores = np.concatenate([y @ np.asarray(basis) / np.sqrt(len(y)) for y in samples])
    axes = np.asarray(basis) @ np.linalg.eigh(scores.T @ scores)[1][:, ::-1]
    largest = np.take_along_axis(axes, np.argmax(np.abs(axes), axis=0)[None], axis=0)
    return axes * np.sign(largest)
