"""Record errors of hierarchical-Bayes PCA after every round."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from xarray import Dataset

from jaxfed import rollout
from papers.hierarchical._laws import NOISE, drawn, error_of, frames_of, swept
from papers.runs import Seeds

KINDS = np.asarray(["test", "train"])


def _curves(*, prior_variance, seed, clients, samples, rounds, make):
    """Test and training errors after every round, by method."""
    features, rank, key = 30, 10, jax.random.key(seed)
    law = {"clients": clients, "features": features, "rank": rank, "samples": samples}
    data, given = drawn(key, prior_variance, **law)

    def errors(result):
        frames = frames_of(result, given)
        left = data.samples - jnp.einsum(
            "mnd,mdr,mer->mne", data.samples, frames, frames, optimize=True
        )
        train = jnp.sum(left**2) / (clients * samples * NOISE * (features - rank))
        return {"test": error_of(result, data, given), "train": train}

    found = {}
    for name, algorithm in make(data, prior_variance).items():
        history = rollout(algorithm, given, rounds=rounds, key=key, metrics=errors).history
        found[name] = jnp.stack([history["test"], history["train"]])
    return found


def over_rounds(variances: Sequence[float], seeds: Seeds, **options: Any) -> Dataset:
    """The errors of `_curves` with all their axes named."""
    axes = {"prior_variance": variances, "seed": list(seeds)}
    found = swept(_curves, axes, **options)
    places = np.arange(1, options["rounds"] + 1)
    named = {name: ((*axes, "kind", "round"), values.values) for name, values in found.items()}
    return Dataset(named, coords=axes | {"kind": KINDS, "round": places})


def settled(curve: Float[np.ndarray, " rounds"], share: float) -> int:
    """The round from which on a curve is within this share of its fall from its end."""
    gap = curve - curve[-1]
    away = np.abs(gap) > share * np.abs(curve[0] - curve[-1])
    return int(np.max(np.flatnonzero(away), initial=-1)) + 2
