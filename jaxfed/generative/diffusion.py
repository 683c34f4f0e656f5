"""ADEPT-DGM: a personal diffusion model for every client, under a prior that all clients learn.

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
from jaxtyping import Array, ArrayLike, Float, Key, PyTree

from jaxfed._checks import check_count, check_instance, check_options
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
    """Adam with a learning rate of 1, and of 0.1 after this many steps.

    It is cached, because JAX compiles again for every new optimizer object.
    """
    if steps is None:
        return optax.adam(1.0)
    return optax.adam(optax.piecewise_constant_schedule(1.0, {steps: 0.1}))


def sample(
    algorithm: Training,
    key: Key[Array, ""],
    arrays: PyTree,
    count: int,
    *,
    features: int | None = None,
    steps: int = 500,
    chunk_size: int | None = None,
) -> Float[Array, "*clients n d"]:
    """Draw samples from models that were trained to undo a corruption.

    Args:
        algorithm: the algorithm that trained the models with a `DenoisingLoss`:
            `AdaptiveDiffusion`, or `FedAvg` as its baseline.
        key: random key of the initial noise.
        arrays: the arrays of one model, such as `solution.result.shared`, or of all clients' models
            with a leading axis, such as `solution.result.local`.
        count: samples per model.
        features: features of a sample; None if the model has an `image_shape`.
        steps: steps of the sampler; the authors' code takes 500.
        chunk_size: number of clients to sample from at the same time; None for all.

    Returns:
        The samples, `(count, features)` for one model and `(clients, count, features)` for many.

    Raises:
        ValueError: if the algorithm has another loss, the arrays are not the model's, or a count is
            not positive.
    """
    check_instance("algorithm", algorithm, Training, "an algorithm that trains a model")
    loss = algorithm.loss
    if not isinstance(loss, DenoisingLoss):
        raise ValueError(f"algorithm: wanted one with a DenoisingLoss, got {loss!r}")
    check_count("count", count)
    check_count("chunk_size", 1 if chunk_size is None else chunk_size)
    if features is None:
        shape = getattr(algorithm.model_of(algorithm.arrays), "image_shape", None)
        if shape is None:
            raise ValueError("features: wanted a number, because the model has no image_shape")
        features = int(np.prod(shape))
    wanted, given = (
        [leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (algorithm.arrays, arrays)
    )
    many = [shape[1:] for shape in given] == wanted
    if not many and given != wanted:
        raise ValueError(
            f"arrays: wanted those of the model, of shapes {wanted}, or one for each client with "
            f"a leading axis, got {given}"
        )
    dtype = jnp.result_type(*jax.tree.leaves(parameters_of(arrays)))

    def draw(key, arrays):
        denoise = denoiser(algorithm.model_of(arrays), conditional=loss.conditional)
        return generate(denoise, loss.corruption, key, (count, features), steps=steps, dtype=dtype)

    if not many:
        return draw(key, arrays)
    clients = given[0][0]
    # Fold in positions, so that a client's samples do not depend on the number of clients.
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(clients))
    together = clients if chunk_size is None else min(chunk_size, clients)
    return jax.lax.map(lambda pair: draw(*pair), (keys, arrays), batch_size=together)


class AdaptiveDiffusion(Adaptive):
    """ADEPT-DGM: `AdaptiveTraining` of models that undo the corruption of samples.

    `AdaptiveDiffusion(model, ...)` follows the paper's text: variance-preserving corruption with
    normal noise, and Adam for the personal and the global model.
    `AdaptiveDiffusion.published(model, ...)` follows the authors' code: samples are interpolated
    with uniform noise, the preset is `"published"`, and the global model's step size is 0.1. Both
    start with a spread of 0.8 and leave it unchanged for two rounds, use ξ = 1e-5 and step sizes of
    1e-3 for the personal models and the spread, and divide the models' step sizes by ten after 75
    rounds.

    `algorithm.sample(key, solution.result.local, 200)` draws from every client's model. To keep the
    models of the best round, pick it by a metric of held-out samples: `fit(..., best="name")`.

    Source: ADEPT, (10), Algorithm 3 and Section 5.1.
    """

    def __init__(
        self,
        model: eqx.Module,
        corruption: Corruption = _PRESERVING,
        *,
        conditional: bool = False,
        local_steps: int = 20,
        step_size: ArrayLike = 1e-3,
        global_step_size: ArrayLike = 1e-3,
        spread_step_size: ArrayLike = 1e-3,
        hyper_prior: ArrayLike = 1e-5,
        initial_spread: ArrayLike = 0.8,
        decay_after: int | None = 75,
        optimizer: optax.GradientTransformation | None = None,
        global_optimizer: optax.GradientTransformation | None = None,
        **options: Any,
    ):
        """Set up the algorithm.

        Args:
            model: maps one corrupted sample to the clean one, such as `jaxfed.models.UNet`.
            corruption: of the samples, `jaxfed.models.variance_preserving` or `interpolation`.
            conditional: whether the model takes the amount of noise as well as the sample.
            local_steps: local steps per round.
            step_size: of the personal models.
            global_step_size: of the clients' copies of the global model.
            spread_step_size: of the spread.
            hyper_prior: ξ.
            initial_spread: σ before the first round.
            decay_after: a client's models take a tenth of the step size after it has taken part in
                this many rounds; None for never.
            optimizer: of the personal models; by default Adam with this decay.
            global_optimizer: of the clients' copies of the global model; the same default.
            options: other options of `AdaptiveTraining`.

        Raises:
            ValueError: as in `AdaptiveTraining`, and if `decay_after` is not positive.
        """
        check_options(options, AdaptiveTraining.__init__, without=("self", "model", "loss"))
        check_count("local_steps", local_steps)  # before it is multiplied
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
        global_step_size: ArrayLike = 0.1,
        **options: Any,
    ) -> Self:
        """The variant in the authors' code.

        Args:
            model: maps one corrupted sample to the clean one.
            corruption: of the samples.
            global_step_size: of the clients' copies of the global model.
            options: other options of `AdaptiveDiffusion` except `preset`.

        Raises:
            ValueError: as in `AdaptiveDiffusion`.
        """
        makers = cls.__init__, AdaptiveTraining.__init__
        check_options(options, *makers, without=("self", "model", "loss", "corruption", "preset"))
        return cls(
            model, corruption, global_step_size=global_step_size, preset="published", **options
        )

    sample = sample
