"""Runs of Shrestha & Fu (2023): federated deep GCCA with quantized messages.

The reference is an independent implementation in NumPy and PyTorch, in double precision, on draws
of its own. What is counted in rounds is the position in the list of accuracies whose first entry is
the start's.
"""

import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxfed import channel as channels
from jaxfed.data import NonlinearViews
from jaxfed.gcca import DeepMaxVar, Views
from jaxfed.models import Perceptron

RANK, BITS, ENTITIES, BATCH = 2, 3, 10_000, 1000
# One of each for all runs, which are then compiled once.
ADAM = optax.adam(1e-3)
CHANNELS = {
    "AltMaxVar-Deep": channels.lossless(),
    "CuteMaxVar-Deep": channels.difference(channels.quantize(BITS)),
}
FULL, QUANTIZED = CHANNELS
TEXT, PROGRAMS = "as in the text", "as in the programs"


class _Enlarged(Perceptron):
    """A perceptron whose outputs are multiplied by a number."""

    factor: float = eqx.field(static=True)

    def __init__(self, *arguments: Any, factor: float, **options: Any):
        super().__init__(*arguments, **options)
        self.factor = factor

    def __call__(self, samples):
        return self.factor * super().__call__(samples)

    def in_training(self, batch):
        outputs, statistics = super().in_training(batch)
        return self.factor * outputs, statistics


@functools.cache
def algorithm_of(entities: int, scaling: str = TEXT) -> DeepMaxVar:
    """The method on the toy, by how the networks' outputs are compared with the representation.

    The authors' programs leave out the root of the number of entities that outputs are divided by.
    """
    network = functools.partial(Perceptron, outputs=RANK, hidden=(128, 64))
    if scaling == PROGRAMS:
        network = functools.partial(_Enlarged, outputs=RANK, hidden=(128, 64), factor=entities**0.5)
    return DeepMaxVar(network, ADAM, rank=RANK, batch_size=BATCH * entities // ENTITIES)


def entities_at(scale: float) -> int:
    """A tenth of them is a batch, of two at least."""
    return 10 * max(2, round(scale * ENTITIES / 10))


def views_of(data: NonlinearViews) -> Views:
    return Views.from_arrays(data.views)


def represented(algorithm: DeepMaxVar, local: Any, views: Views) -> Float[np.ndarray, "n rank"]:
    return np.asarray(_represent(algorithm, local, views))


@jax.jit
def _represent(algorithm: DeepMaxVar, local: Any, views: Views) -> Float[Array, "n rank"]:
    return algorithm.represent(local, views)


def scaled(entities: int, rounds: int) -> list[str]:
    setting = (
        f"{entities} entities to learn from in batches of {BATCH * entities // ENTITIES}, 10 "
        f"passes a round, {rounds} rounds, networks 2-128-64-2, Adam with step size 0.001, {BITS} "
        "bits."
    )
    if entities == ENTITIES:
        return [f"Full size: {setting} Single instead of double precision."]
    return [
        f"Scaled: {setting} Single instead of double precision. The full size, --scale 1, has "
        f"{ENTITIES} entities in batches of {BATCH}."
    ]
