"""One round of ADEPT, for any model and loss."""

import abc
from typing import Literal, NamedTuple, final

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from jaxfed.contract import Diagnostics
from jaxfed.core.clients.samples import Samples
from jaxfed.generative._prior import (
    Prior,
    bounded,
    proximal_map,
    pull,
    regularizer,
    scaled_to_largest,
    scaled_to_norm,
    spread_gradient,
)
from jaxfed.generative._training import Training, optimizer_step, parameters_of, plus

Preset = Literal["text", "published"]
PriorStep = Literal["gradient", "proximal"]


class AdaptiveLocal(NamedTuple):
    """A client's state between rounds."""

    personal: PyTree  # θ_i
    optimizer: PyTree
    global_optimizer: PyTree
    rounds: Int[Array, ""]  # rounds that the client took part in
    spread_gradient: PyTree  # collected for the next round; None if the preset does not collect


class Adaptive(Training):
    """The rounds of ADEPT; `AdaptiveTraining` sets the hyperparameters."""

    step_size: Float[Array, ""]
    global_step_size: Float[Array, ""]
    spread_step_size: Float[Array, ""]
    hyper_prior: Float[Array, ""]
    initial_spread: Float[Array, ""]
    prior_weight: Float[Array, ""] | None
    clip: Float[Array, ""] | None
    spread_clip: Float[Array, ""] | None
    local_steps: int = eqx.field(static=True)
    lazy_rounds: int = eqx.field(static=True)
    bounds: tuple[float, float] = eqx.field(static=True)
    optimizer: optax.GradientTransformation = eqx.field(static=True)
    global_optimizer: optax.GradientTransformation = eqx.field(static=True)
    preset: Preset = eqx.field(static=True)
    prior_step: PriorStep = eqx.field(static=True)

    @abc.abstractmethod
    def __init__(self):
        """Set up the algorithm."""

    @final
    def server_init(self, key, first: None, like, warm_start) -> Prior:
        """The initial global model, with the same spread for every weight."""
        mean = parameters_of(self.arrays if warm_start is None else warm_start.shared)
        return Prior(mean, jax.tree.map(lambda w: jnp.full_like(w, self.initial_spread), mean))

    @final
    def downlink(self, server: Prior) -> Prior:
        """The global model and the spread."""
        return server

    @final
    def client_init(self, key, downlink: Prior, data: Samples, warm_start) -> AdaptiveLocal:
        """The personal model: the warm start's if it has one, else the global model."""
        personal = downlink.mean
        if warm_start is not None and jax.tree.leaves(warm_start.local):
            personal = parameters_of(warm_start.local)
        return AdaptiveLocal(
            personal,
            self.optimizer.init(personal),
            self.global_optimizer.init(downlink.mean),
            jnp.zeros((), jnp.int32),
            jax.tree.map(jnp.zeros_like, personal) if self._collects else None,
        )

    @final
    def client_step(self, key, downlink: Prior, local: AdaptiveLocal, data: Samples):
        """One update of the spread, then local steps of the personal and the global model."""
        draw_key, loss_key = jax.random.split(key)
        noisy = self.gradient_noise is not None
        prior_weight = 1 / data.count if self.prior_weight is None else self.prior_weight
        weight = prior_weight.astype(data.count.dtype)
        # A coarse channel may round a spread to zero.
        downlink = downlink._replace(spread=bounded(downlink.spread, self.bounds))
        # Before the local steps, as in Section 5.1; Algorithm 2 updates the spread after them.
        spread, collected = self._spread(local, downlink)
        precision = jax.tree.map(lambda s: 1 / s**2, spread)  # divide only once

        def step(carry, batch):
            (personal, state, mean, global_state, collected), (index, rows) = carry, batch
            if self._collects:
                # The authors' code zeroes the gradient of σ only when it applies it. Until then
                # every step adds ∂R/∂σ once by itself and w times as part of the personal loss.
                # `_spread` has used the first step's own gradient already.
                share = jnp.where(index == 0, weight, 1 + weight)
                slope = spread_gradient(personal, Prior(mean, spread), self.hyper_prior)
                collected = plus(collected, share, slope)
            key = jax.random.fold_in(loss_key, index)
            loss, gradient = self.gradient_of(personal, data, rows, key, noisy=noisy)
            if not self._proximal:
                gradient = plus(gradient, weight, pull(personal, mean, precision))
            gradient = self._clipped(gradient, self.clip)
            personal, state = optimizer_step(
                self.optimizer, self.step_size, gradient, state, personal
            )
            if self._proximal:
                # Both models step towards each other outside of the optimizer.
                personal = proximal_map(personal, mean, precision, self.step_size * weight)
                change = jax.tree.map(jnp.subtract, personal, mean)
                mean = plus(mean, self.global_step_size, change)
            else:
                # The global model moves in every local step, too (Section 5.1), with the new θ_i.
                slope = self._clipped(self._global_gradient(personal, mean, precision), self.clip)
                mean, global_state = optimizer_step(
                    self.global_optimizer, self.global_step_size, slope, global_state, mean
                )
            return (personal, state, mean, global_state, collected), loss

        start = local.personal, local.optimizer, downlink.mean, local.global_optimizer, collected
        (personal, state, mean, global_state, collected), losses = jax.lax.scan(
            step, start, self.batches(draw_key, data, self.local_steps, noisy=noisy)
        )
        # Send changes instead of values, because small messages compress well.
        change = jax.tree.map(jnp.subtract, Prior(mean, spread), downlink)
        new_local = AdaptiveLocal(personal, state, global_state, local.rounds + 1, collected)
        # At the values that entered the round, like `losses[0]`.
        penalty = regularizer(local.personal, downlink, self.hyper_prior)
        objective = losses[0] + weight * penalty
        return change, new_local, {"objective": objective, "loss": losses[0]}

    @final
    def server_step(self, key, server: Prior, uplink: Prior) -> tuple[Prior, Diagnostics]:
        """Add the mean changes; report the mean spread."""
        # A lossy channel may move the sum out of the bounds.
        mean, spread = (jax.tree.map(jnp.add, *pair) for pair in zip(server, uplink, strict=True))
        spread = bounded(spread, self.bounds)
        leaves = jax.tree.leaves(spread)
        average = sum(jnp.sum(leaf) for leaf in leaves) / sum(leaf.size for leaf in leaves)
        return Prior(mean, spread), {"spread": jnp.asarray(average)}

    @property
    def _collects(self) -> bool:
        return self.preset == "published"

    @property
    def _proximal(self) -> bool:
        return self.prior_step == "proximal"

    def _spread(self, local: AdaptiveLocal, prior: Prior) -> tuple[PyTree, PyTree]:
        """σ_i, and the collected gradient that remains for later rounds."""
        gradient = spread_gradient(local.personal, prior, self.hyper_prior)
        if self._collects:
            gradient = jax.tree.map(jnp.add, local.spread_gradient, gradient)
        if self._proximal:
            # The inverse of the Fisher information of σ is σ²/2.
            direction = jax.tree.map(lambda g, s: g * s**2 / 2, gradient, prior.spread)
        else:
            direction = self._clipped(gradient, self.spread_clip, each=True)
        moved = bounded(plus(prior.spread, -self.spread_step_size, direction), self.bounds)
        # Until personal models have moved, their distance to μ says nothing about the spread.
        awake = local.rounds >= self.lazy_rounds
        spread = jax.tree.map(lambda a, b: jnp.where(awake, a, b), moved, prior.spread)
        if not self._collects:
            return spread, None
        return spread, jax.tree.map(lambda g: jnp.where(awake, 0, g), gradient)

    def _global_gradient(self, personal: PyTree, mean: PyTree, precision: PyTree) -> PyTree:
        """∂R/∂μ, or what the published code uses instead."""
        if self.preset == "published":
            return jax.tree.map(lambda w, m: 2 * (m - w), personal, mean)
        return jax.tree.map(jnp.negative, pull(personal, mean, precision))

    def _clipped(self, gradient: PyTree, threshold: Array | None, *, each: bool = False) -> PyTree:
        """The gradient clipped by norm or, in the published code, by its largest entry."""
        if threshold is None:
            return gradient
        if self.preset == "text":
            return scaled_to_norm(gradient, threshold)
        return scaled_to_largest(gradient, threshold, each=each)

    @final
    def client_result(self, downlink: Prior, local: AdaptiveLocal, data: Samples) -> PyTree:
        """The personal model's arrays."""
        return self.whole(local.personal)

    @final
    def shared_result(self, server: Prior) -> PyTree:
        """The global model's arrays."""
        return self.whole(server.mean)
