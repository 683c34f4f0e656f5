"""Synthetic clients of Shi & Kontar (2024), section 7.1, and what is measured of them.

What is called the reference is an independent implementation of the same experiments in NumPy,
in double precision. Several printed results turn out to depend on how the authors' scripts start
or test; those are reproduced as printed, beside a well-posed experiment that answers the same
question.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from jaxfed import Clients, Personalized, metrics, pca, stack
from jaxfed.data import PerPCAData, perpca_synthetic
from papers.runs import learned
from papers.synthetic import PERPCA_SETTINGS

Keys = Key[Array, " runs"]

AUTHORS = "PerPCA, authors' start"


def gaussian(keys: Keys, *shape: int, dtype: Any = jnp.float32) -> Float[Array, "runs ..."]:
    """Gaussian matrices, one per key. As a start of the local components they need not be
    orthonormal: the first round sees to that.
    """
    return jax.vmap(lambda key: jax.random.normal(key, shape, dtype))(keys)


def smallest_first(moments: Float[Array, "runs d d"]) -> Float[Array, "runs d d"]:
    """Eigenvectors in the order in which `numpy.linalg.eig` gives them, not sorted by value.

    The authors' scripts take the first columns of this as the top ones. Here they come out with
    the two smallest eigenvalues first.
    """
    vectors = np.linalg.eig(np.asarray(moments, np.float64)).eigenvectors
    return jnp.asarray(np.real(vectors), jnp.float32)


def group_errors(
    test: Float[Array, "runs m n d"], result: Personalized
) -> dict[str, Float[Array, " runs"]]:
    """Mean test reconstruction error of the first half of the clients and of the others."""
    error = jax.vmap(partial(metrics.reconstruction_error, per_client=True))
    errors = error(result, test)
    half = errors.shape[1] // 2
    return {"sparse": errors[:, :half].mean(1), "rich": errors[:, half:].mean(1)}


def draw(
    setting: str, keys: Keys, **changes: Any
) -> tuple[list[PerPCAData], Clients, Personalized]:
    """Data sets of one law, the clients with a leading axis for the data set, and the truth."""
    arguments: dict[str, Any] = dict(PERPCA_SETTINGS[setting]) | changes
    draws = [perpca_synthetic(key=key, **arguments) for key in keys]
    clients = stack([Clients.from_samples(draw.samples) for draw in draws])
    return draws, clients, stack([Personalized(draw.shared, draw.local) for draw in draws])


def one_shots(
    clients: Clients, keys: Keys, shared_rank: int, local_rank: int
) -> dict[str, Personalized]:
    one_shot = partial(pca.OneShot, shared_rank, local_rank)
    return {
        "distPCA": learned(one_shot(method="projector"), clients, keys),
        "spectrum": learned(one_shot(method="spectrum"), clients, keys),
        "local first": learned(one_shot(method="local_first"), clients, keys),
    }
