"""ADEPT-DGM: a personal diffusion model for every client, under a prior that all of them learn.

Source: Ozkara, Huang, Zhou & Diggavi, Hierarchical Bayes approach to personalized federated
unsupervised learning (ADEPT), (10), Algorithm 3 and Section 5.1.
"""

import functools
from typing import Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key, PyTree

from jaxfed.core.common.checks import check_count, check_flag, check_instance, checked_key, shown
from jaxfed.generative._adaptive import Adaptive, adopt
from jaxfed.generative._training import Training, parameters_of
from jaxfed.generative.adaptive import AdaptiveTraining
from jaxfed.models.diffusion import (
    Corruption,
    DenoisingLoss,
    denoiser,
    generate,
    interpolation,
    variance_preserving,
)

_PRESERVING, _INTERPOLATION = variance_preserving(), interpolation()


@functools.cache
def decaying_adam(steps: int | None) -> optax.GradientTransformation:
    """Adam with a learning rate of 1, and of a tenth from this many steps on.

    The same object for the same number, as every new optimizer is compiled anew.
    """
    if steps is None:
        return optax.adam(1.0)
    return optax.adam(optax.piecewise_constant_schedule(1.0, {steps: 0.1}))


class AdaptiveDiffusion(Adaptive):
    """ADEPT-DGM: `AdaptiveTraining` of models that undo the corruption of samples.

    `AdaptiveDiffusion(model, ...)` is the paper's text: samples keep their variance when they are
    mixed with normal noise, and Adam moves the personal and the global model.
    `AdaptiveDiffusion.published(model, ...)` is what the authors' code does: samples are
    interpolated with uniform noise, the `"published"` preset, and a step size of 0.1 for the
    global model. Both have a first spread of 0.8, which is left for two rounds, ξ of 1e-5, a
    step size of 1e-3 for personal models and the spread, and after 75 rounds a tenth of the
    models' step sizes.

    `algorithm.sample(key, solution.result.local, 200)` draws from every client's model. Which
    round's models to draw from is told by a metric of held-out samples, `fit(..., best="name")`.

    Source: ADEPT, (10), Algorithm 3 and Section 5.1.
    """

    def __init__(
        self,
        model: eqx.Module,
        corruption: Corruption = _PRESERVING,
        *,
        conditional: bool = False,
        local_steps: int = 20,
        step_size: float | Array = 1e-3,
        global_step_size: float | Array = 1e-3,
        spread_step_size: float | Array = 1e-3,
        hyper_prior: float | Array = 1e-5,
        initial_spread: float | Array = 0.8,
        decay_after: int | None = 75,
        optimizer: optax.GradientTransformation | None = None,
        global_optimizer: optax.GradientTransformation | None = None,
        **options: Any,
    ):
        """Set up the algorithm.

        Args:
            model: maps one corrupted sample to the clean one, such as `jaxfed.models.UNet`.
            corruption: of the samples, `jaxfed.models.variance_preserving` or `interpolation`.
            conditional: whether the model takes the amount of noise beside the sample.
            local_steps: how many a round.
            step_size: of the personal models.
            global_step_size: of the clients' copies of the global one.
            spread_step_size: of the spread.
            hyper_prior: ξ.
            initial_spread: σ before the first round.
            decay_after: after how many rounds of a client its models' step sizes become a tenth;
                None for never.
            optimizer: of the personal models; Adam by default, with the decay.
            global_optimizer: of the clients' copies of the global one, likewise.
            options: further ones of `AdaptiveTraining`.

        Raises:
            ValueError: as `AdaptiveTraining`, for a corruption that is none, and a number
                of rounds that is not a positive whole one.
        """
        if not isinstance(corruption, Corruption):
            raise ValueError(
                "corruption: wanted one of jaxfed.models, such as variance_preserving(), "
                f"got {shown(corruption)}"
            )
        check_flag("conditional", conditional)
        check_count("local_steps", local_steps)
        check_count("decay_after", 1 if decay_after is None else decay_after)
        default = decaying_adam(None if decay_after is None else decay_after * local_steps)
        given = AdaptiveTraining(
            model,
            DenoisingLoss(corruption, conditional),
            local_steps=local_steps,
            step_size=step_size,
            global_step_size=global_step_size,
            spread_step_size=spread_step_size,
            hyper_prior=hyper_prior,
            initial_spread=initial_spread,
            optimizer=default if optimizer is None else optimizer,
            global_optimizer=default if global_optimizer is None else global_optimizer,
            **options,
        )
        adopt(self, given)

    @classmethod
    def published(
        cls,
        model: eqx.Module,
        corruption: Corruption = _INTERPOLATION,
        *,
        global_step_size: float | Array = 0.1,
        **options: Any,
    ) -> Self:
        """What the authors' code does.

        Args:
            model: maps one corrupted sample to the clean one.
            corruption: of the samples.
            global_step_size: of the clients' copies of the global model.
            options: further ones of `AdaptiveDiffusion`, without `preset`.

        Raises:
            ValueError: as `AdaptiveDiffusion`.
        """
        return cls(
            model, corruption, global_step_size=global_step_size, preset="published", **options
        )

    def sample(
        self,
        key: Key[Array, ""],
        arrays: PyTree,
        count: int,
        *,
        features: int | None = None,
        steps: int = 500,
        at_once: int | None = None,
    ) -> Float[Array, "*clients n d"]:
        """New samples of these models, see `jaxfed.generative.sample`."""
        return sample(self, key, arrays, count, features=features, steps=steps, at_once=at_once)


def sample(
    algorithm: Training,
    key: Key[Array, ""],
    arrays: PyTree,
    count: int,
    *,
    features: int | None = None,
    steps: int = 500,
    at_once: int | None = None,
) -> Float[Array, "*clients n d"]:
    """New samples of models that were trained to undo a corruption.

    Args:
        algorithm: what trained them, by a `DenoisingLoss`: `AdaptiveDiffusion`, or `FedAvg` for
            what it is compared with.
        key: of the noise that samples are made from.
        arrays: the arrays of one model, such as `solution.result.shared`, or those of all
            clients' with a leading axis, such as `solution.result.local`.
        count: how many samples of each model.
        features: of a sample; None where the model has an `image_shape`.
        steps: of the sampler; the authors' code takes 500.
        at_once: how many clients' samples are drawn at the same time; None for all.

    Returns:
        The samples, `(count, features)` of one model and `(clients, count, features)` of many.

    Raises:
        ValueError: for an algorithm with another loss, arrays that are not the model's, and
            counts that are not positive whole numbers.
    """
    check_instance("algorithm", algorithm, Training, "one with a DenoisingLoss")
    key = checked_key("key", key)
    loss = algorithm.loss
    if not isinstance(loss, DenoisingLoss):
        raise ValueError(f"algorithm: wanted one with a DenoisingLoss, got {loss!r}")
    check_count("count", count)
    check_count("steps", steps)
    if at_once is not None:
        check_count("at_once", at_once)
    if features is None:
        shape = getattr(algorithm.model_of(algorithm.arrays), "image_shape", None)
        if shape is None:
            raise ValueError("features: wanted the number of a sample's, as the model tells none")
        features = int(np.prod(shape))
    check_count("features", features)
    own, given = (
        [leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (algorithm.arrays, arrays)
    )
    many = [shape[1:] for shape in given] == own
    if not many and given != own:
        raise ValueError(
            f"arrays: wanted those of the model, of shapes {own}, or of one for each client with "
            f"a leading axis, got {given}"
        )
    dtype = jnp.result_type(*jax.tree.leaves(parameters_of(arrays)))

    def draw(key, arrays):
        denoise = denoiser(algorithm.model_of(arrays), conditional=loss.conditional)
        return generate(denoise, loss.corruption, key, (count, features), steps=steps, dtype=dtype)

    if not many:
        return draw(key, arrays)
    clients = given[0][0]
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(clients))
    together = clients if at_once is None else min(at_once, clients)
    return jax.lax.map(lambda pair: draw(*pair), (keys, arrays), batch_size=together)
