"""A multi-layer perceptron with batch normalization."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key

from jaxfed._checks import check_count, check_number, checked_array, is_list, refuse

EPS = 1e-5  # added to variances


class RunningStatistics(NamedTuple):
    """Running statistics of one layer's units."""

    mean: Float[Array, " units"]
    variance: Float[Array, " units"]


class Perceptron(eqx.Module):
    r"""Fully connected layers: hidden layers with batch normalization and ReLU, then a linear one.

    \(x \mapsto W_n h_{n-1}(\dots h_1(x)) + b_n\), where a hidden layer is
    \(h_i(x) = \max(0, s_i\, (W_i x + b_i - \mu_i) / \sqrt{v_i + 10^{-5}} + t_i)\).

    In training (`in_training`), the mean \(\mu\) and the variance \(v\) are those of the batch, and
    the running statistics move towards them by `momentum`. When applied (`__call__`), the network
    uses the running statistics, so that the output for a sample depends on no other sample.

    Source: Shrestha & Fu (2023), Section V-B; Ioffe & Szegedy (2015), Batch normalization. As in
    PyTorch, initial weights are uniform between plus and minus one over the root of a layer's
    number of inputs.
    """

    weights: tuple[Float[Array, "inputs units"], ...]
    biases: tuple[Float[Array, " units"], ...]
    scales: tuple[Float[Array, " units"], ...]
    shifts: tuple[Float[Array, " units"], ...]
    statistics: tuple[RunningStatistics, ...]
    momentum: float = eqx.field(static=True)

    def __init__(
        self,
        features: int,
        outputs: int,
        *,
        hidden: Sequence[int] = (128, 64),
        momentum: float = 0.1,
        mask: Float[Array, " features"] | None = None,
        key: Key[Array, ""],
    ):
        """Draw the layers.

        Args:
            features: features of a sample.
            outputs: number of outputs.
            hidden: units of each hidden layer; empty for a linear map.
            momentum: weight of a batch's statistics in the running statistics.
            mask: 1 for a real feature and 0 for padding, which comes last. The first layer is then
                drawn as for the real features alone, with zero weights for padding.
            key: random key of the initial parameters.

        Raises:
            ValueError: if a size is not positive, the momentum is not from 0 to 1, or the mask has
                another length.
        """
        if not is_list(hidden):
            raise refuse("hidden", "a list of whole numbers", hidden)
        sizes = (features, *hidden, outputs)
        names = ("features", *("hidden" for _ in hidden), "outputs")
        for name, size in zip(names, sizes, strict=True):
            check_count(name, size)
        check_number("momentum", momentum, "a number from 0 to 1", lambda x: (x >= 0) & (x <= 1))
        used = jnp.ones(features)
        if mask is not None:
            used = checked_array("mask", mask, f"{features}", finite=True)
        weights, biases = [], []
        for i, (inputs, units) in enumerate(itertools.pairwise(sizes)):
            count = used.sum() if i == 0 else jnp.asarray(inputs, used.dtype)
            # Fold in the layer's number, so that draws do not depend on how many layers follow.
            of_weights, of_biases = jax.random.split(jax.random.fold_in(key, i))
            bound = 1 / jnp.sqrt(count)
            # Inputs come first, so that more padding does not change the real features' draws.
            drawn = bound * jax.random.uniform(of_weights, (inputs, units), used.dtype, -1, 1)
            weights.append(drawn * used[:, None] if i == 0 else drawn)
            biases.append(bound * jax.random.uniform(of_biases, (units,), used.dtype, -1, 1))
        self.weights, self.biases = tuple(weights), tuple(biases)
        self.scales = tuple(jnp.ones(units, used.dtype) for units in hidden)
        self.shifts = tuple(jnp.zeros(units, used.dtype) for units in hidden)
        self.statistics = tuple(
            RunningStatistics(jnp.zeros(units, used.dtype), jnp.ones(units, used.dtype))
            for units in hidden
        )
        self.momentum = momentum

    def __call__(self, samples: Float[ArrayLike, "*n features"]) -> Float[Array, "*n outputs"]:
        """The outputs of one sample or of many, using the running statistics."""
        values = jnp.asarray(samples)
        for i, moments in enumerate(self.statistics):
            values = self._normalized(i, self._linear(i, values), moments)
        return self._linear(len(self.statistics), values)

    def in_training(
        self, batch: Float[ArrayLike, "b features"]
    ) -> tuple[Float[Array, "b outputs"], tuple[RunningStatistics, ...]]:
        """The outputs of a batch, using its own statistics, and the new running statistics.

        The running variance is the unbiased estimate, while outputs use the biased one.

        Raises:
            ValueError: if the batch has fewer than two samples, and thus no variance.
        """
        batch = jnp.asarray(batch)
        if batch.ndim != 2 or (self.statistics and len(batch) < 2):
            raise refuse("batch", "at least two samples for batch normalization", batch)
        values, statistics = batch, []
        for i, old in enumerate(self.statistics):
            values = self._linear(i, values)
            mean = values.mean(0)
            variance = jnp.mean((values - mean) ** 2, axis=0)
            values = self._normalized(i, values, RunningStatistics(mean, variance))
            unbiased = variance * (len(batch) / (len(batch) - 1))
            statistics.append(
                RunningStatistics(self._moved(old.mean, mean), self._moved(old.variance, unbiased))
            )
        return self._linear(len(self.statistics), values), tuple(statistics)

    def _linear(self, layer: int, values: Array) -> Array:
        return values @ self.weights[layer] + self.biases[layer]

    def _normalized(self, layer: int, values: Array, moments: RunningStatistics) -> Array:
        factor = self.scales[layer] / jnp.sqrt(moments.variance + EPS)
        return jax.nn.relu((values - moments.mean) * factor + self.shifts[layer])

    def _moved(self, old: Array, new: Array) -> Array:
        return (1 - self.momentum) * old + self.momentum * new
