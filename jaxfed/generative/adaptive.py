r"""ADEPT for any model and loss: personal models under a Gaussian prior that clients learn.

\[
    \min_{\theta, \mu, \sigma} \sum_i \big[ F_i(\theta_i) + R(\theta_i; \mu, \sigma) \big], \qquad
    R(\theta; \mu, \sigma)
    = \sum_j \log \sigma_j + \frac{2\xi + (\theta_j - \mu_j)^2}{2\sigma_j^2},
\]

where F_i is the negative log-likelihood of client i's samples, j runs over the scalar weights, and
the hyper prior ξ keeps the spread σ from vanishing.

Source: Ozkara, Huang, Zhou & Diggavi, Hierarchical Bayes approach to personalized federated
unsupervised learning (ADEPT), (2) and (6), Algorithms 2 and 3, with the changes of Section 5.1.
"""

import functools
from collections.abc import Callable
from typing import Any, Self, final

import equinox as eqx
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import ArrayLike

from jaxfed._checks import check_options
from jaxfed.contract import (
    check_count,
    check_factor,
    check_name,
    check_positive,
    hyperparameter,
    refuse,
)
from jaxfed.generative._adaptive import Adaptive, Preset, PriorStep
from jaxfed.generative._training import Loss, split_model
from jaxfed.generative.gradient_noise import GradientNoise, check_noise
from jaxfed.models import reconstruction_loss
from jaxfed.models.diffusion import (
    Corruption,
    DenoisingLoss,
    interpolation,
    variance_preserving,
)

# Made once, because JAX compiles again for every new optimizer object and every new loss.
PLAIN, MOMENTUM = optax.sgd(1.0), optax.sgd(1.0, momentum=0.9)
PRESERVING, INTERPOLATION = variance_preserving(), interpolation()


@functools.cache
def decaying_adam(steps: int | None) -> optax.GradientTransformation:
    """Adam with a learning rate of 1, and of 0.1 after this many steps.

    It is cached, because JAX compiles again for every new optimizer object.
    """
    if steps is None:
        return optax.adam(1.0)
    return optax.adam(optax.piecewise_constant_schedule(1.0, {steps: 0.1}))


@final
class AdaptiveTraining(Adaptive):
    r"""ADEPT: every client trains a personal model under a prior that all clients learn.

    In each round a client receives the global model μ and the spread σ, and then (Algorithm 2
    with the changes of Section 5.1):

    1. σ_i ← σ - η₃ clip(∂R/∂σ), clipped to `bounds`; skipped in the client's first `lazy_rounds`.
    2. `local_steps` times: θ_i ← θ_i - η₁ clip(∂/∂θ [f_i(θ_i) + w R(θ_i; μ_i, σ_i)]), with f_i
       the mean loss of a minibatch and w = 1/n_i, because F_i is a sum over n_i samples; then
       μ_i ← μ_i - η₂ clip(∂R/∂μ).
    3. It sends μ_i - μ and σ_i - σ, whose means the server adds. θ_i never leaves the client.

    Presets:

    * `"text"`, the default, follows the paper: gradients of models are clipped to norm 1 over all
      weights together, those of spreads to norm 10.
    * `"published"` follows the authors' code. Gradients are scaled by their largest absolute entry
      instead of their norm: over all weights for the models, within each array for the spread.
      The gradient of μ is 2 (μ - θ), without 1/(2σ²). The gradient of the spread is collected
      over all local steps, times 1 + w, and applied at the start of the next round.
      `autoencoder` and `diffusion` have the matching step sizes.

    `prior_step="proximal"` goes beyond the paper. The prior bypasses the optimizer, because Adam
    would divide its pull by the size of the loss's gradient. Each step is then taken in the
    prior's own scale, and only the loss's gradient is clipped:

    1. σ_i ← σ - η₃ (σ²/2) ∂R/∂σ = σ + η₃/2 ((2ξ + (θ_i - μ)²)/σ - σ), a natural gradient step:
       2/σ² is the Fisher information of σ.
    2. θ_i takes the optimizer's step on f_i alone, and then θ_i ← (θ_i + t μ_i)/(1 + t) with
       t = η₁ w/σ_i², the proximal map of η₁ w R, stable for any spread; then
       μ_i ← μ_i - η₂ σ_i² ∂R/∂μ = μ_i + η₂ (θ_i - μ_i), another natural gradient step.

    η₂ and η₃ are then fractions up to 1, and an optimizer's schedule affects only the steps on the
    loss. Small spreads keep models together; large ones let each model train alone.

    Personal models start at the global model, or at those of a warm start.

    In the history, `"objective"` is the criterion per sample, f_i + w R, for the round's first
    batch, evaluated at the values that enter the round; `"loss"` is f_i alone, and `"spread"` is
    the mean of σ after the round. `solution.server` has `mean` and `spread`; `result.shared` holds
    the global model's arrays and `result.local` those of the personal models, with a leading axis
    of clients: see `model_of`.

    The model's arrays, the step sizes, `hyper_prior`, `initial_spread`, `prior_weight` and the
    clipping thresholds are traced leaves. A run is differentiable in them except where a gradient
    meets its threshold, a spread meets a bound, or two entries tie for the largest.

    Pass optimizers as Optax transformations with a learning rate of 1: the step sizes scale their
    updates, and clients keep their states. A schedule counts a client's local steps; to use a
    tenth of the step size from round 75 on, pass
    `optax.sgd(optax.piecewise_constant_schedule(1.0, {75 * local_steps: 0.1}))`.

    Source: Ozkara et al., ADEPT, Algorithms 2 and 3 and Section 5.1.
    """

    def __init__(
        self,
        model: eqx.Module,
        loss: Loss,
        *,
        local_steps: int = 20,
        batch_size: int | None = None,
        step_size: ArrayLike = 1e-2,
        global_step_size: ArrayLike = 1e-2,
        spread_step_size: ArrayLike = 1e-3,
        hyper_prior: ArrayLike = 1e-6,
        initial_spread: ArrayLike = 1.0,
        prior_weight: ArrayLike | None = None,
        lazy_rounds: int = 2,
        clip: ArrayLike | None = 1.0,
        spread_clip: ArrayLike | None = 10.0,
        bounds: tuple[float, float] = (1e-3, 100.0),
        optimizer: optax.GradientTransformation = PLAIN,
        global_optimizer: optax.GradientTransformation = PLAIN,
        preset: Preset = "text",
        prior_step: PriorStep = "gradient",
        gradient_noise: GradientNoise | None = None,
    ):
        """Set up the algorithm.

        Args:
            model: the initial model; its floating-point arrays are the weights.
            loss: `loss(model, batch, key)` is the mean loss of a batch of samples `(b, d)`, a
                scalar; random models and losses use `key`.
            local_steps: local steps per round.
            batch_size: samples per local step, drawn as in `FedAvg`; None for all.
            step_size: η₁, of the personal models.
            global_step_size: η₂, of the clients' copies of the global model.
            spread_step_size: η₃, of the spread.
            hyper_prior: ξ. The spread of a weight on which all clients agree falls to √(2ξ).
            initial_spread: σ before the first round.
            prior_weight: w, the weight of R relative to the mean loss; None for 1/n_i.
            lazy_rounds: rounds in which a client does not change the spread at first.
            clip: threshold of the models' gradients; None for no clipping.
            spread_clip: threshold of the spread's gradient; None for no clipping.
            bounds: smallest and largest spread.
            optimizer: of the personal models, see above.
            global_optimizer: of the clients' copies of the global model.
            preset: `"text"` or `"published"`, see above.
            prior_step: `"gradient"`, the paper's, or `"proximal"`, see above.
            gradient_noise: protects each person in the messages, the global and the personal model;
                needs `batch_size`, of which every step then draws new samples. The gradient of the
                loss has noise before that of the prior is added, and is then clipped by `clip` as
                any other: leave `clip` well above the noise, or None.

        Raises:
            ValueError: if the model has no finite parameters; a count, step size, weight, hyper
                prior, threshold or bound is out of range; `gradient_noise` has no `batch_size`; the
                initial spread is outside the bounds; a name is unknown; or, with proximal steps,
                the preset is `"published"` or η₂ or η₃ is above 1.
        """
        self.arrays, self.others = split_model(model, batch_size)
        check_noise(gradient_noise, batch_size)
        self.loss, self.batch_size, self.gradient_noise = loss, batch_size, gradient_noise
        check_count("local_steps", local_steps)
        check_count("lazy_rounds", lazy_rounds, least=0)
        factors = {
            "step_size": step_size,
            "global_step_size": global_step_size,
            "spread_step_size": spread_step_size,
            "prior_weight": prior_weight,
        }
        positive = {
            "hyper_prior": hyper_prior,
            "initial_spread": initial_spread,
            "clip": clip,
            "spread_clip": spread_clip,
        }
        for name, value in factors.items():
            check_factor(name, value, optional=name == "prior_weight")
        for name, value in positive.items():
            check_positive(name, value, optional=name.endswith("clip"))
        for name, value in (factors | positive).items():
            setattr(self, name, hyperparameter(value))
        for bound in bounds:
            check_positive("bounds", bound, single=True)
        least, most = bounds
        if least > most:
            raise refuse("bounds", "the smallest spread, then the largest", bounds)
        if _any(initial_spread, lambda x: (x < least) | (x > most)):
            raise refuse("initial_spread", f"a number within the bounds {bounds}", initial_spread)
        check_name("preset", preset, ("text", "published"))
        check_name("prior_step", prior_step, ("gradient", "proximal"))
        if prior_step == "proximal":
            if preset == "published":
                raise refuse("prior_step", "gradient with the published preset", prior_step)
            # These are fractions of the way to the optimum: beyond 1 a step would overshoot.
            for name in ("global_step_size", "spread_step_size"):
                if _any(factors[name], lambda x: x > 1):
                    raise refuse(name, "at most 1 with proximal steps", factors[name])
        self.local_steps, self.lazy_rounds, self.bounds = local_steps, lazy_rounds, bounds
        self.optimizer, self.global_optimizer = optimizer, global_optimizer
        self.preset, self.prior_step = preset, prior_step

    @classmethod
    def autoencoder(
        cls,
        model: eqx.Module,
        loss: Loss = reconstruction_loss,
        *,
        preset: Preset = "text",
        prior_weight: ArrayLike | None = None,
        optimizer: optax.GradientTransformation | None = None,
        **options: Any,
    ) -> Self:
        """ADEPT-AE: models that reconstruct samples, with squared error.

        The paper gives no step sizes, ξ or initial spread, so both presets use the authors' values
        for MNIST. In the authors' code, personal models start from separate random weights; pass a
        warm start for that.

        Plain descent is slow: with `step_size=3e-3, global_step_size=1.0,
        optimizer=optax.adam(1.0)`, the error of handwritten digits after 150 rounds is a third of
        that by default. The text also mentions a momentum for all methods.
        `optimizer=optax.sgd(1.0, momentum=0.9)` adds it for the personal models, as `jaxfed
        reproduce adept/table1` and `adept/table2` do; in their grids, a `global_step_size` of 1 and
        an `initial_spread` of 0.1 to 1 do well. By default the spread moves by less than 0.1 in 150
        rounds.

        Args:
            model: maps one sample to its reconstruction, such as `jaxfed.models.Autoencoder`.
            loss: the loss of a batch, see the class.
            preset: `"text"` or `"published"`, see the class.
            prior_weight: w; by default 1/n_i, or 1/10 with `"published"`, as in the authors' code
                for all data.
            optimizer: of the personal models; by default plain descent, or with `"published"` a
                momentum of 0.9.
            options: those of `AdaptiveTraining`.

        Raises:
            ValueError: as in `AdaptiveTraining`.

        Source: ADEPT, (6), Algorithm 2 and Section 5.1.
        """
        check_options(options, cls.__init__, without=("self", "model", "loss"))
        published = preset == "published"
        if prior_weight is None and published:
            prior_weight = 0.1
        if optimizer is None:
            optimizer = MOMENTUM if published else PLAIN
        return cls(
            model, loss, preset=preset, prior_weight=prior_weight, optimizer=optimizer, **options
        )

    @classmethod
    def diffusion(
        cls,
        model: eqx.Module,
        corruption: Corruption | None = None,
        *,
        conditional: bool = False,
        preset: Preset = "text",
        local_steps: int = 20,
        step_size: ArrayLike = 1e-3,
        global_step_size: ArrayLike | None = None,
        hyper_prior: ArrayLike = 1e-5,
        initial_spread: ArrayLike = 0.8,
        decay_after: int | None = 75,
        optimizer: optax.GradientTransformation | None = None,
        global_optimizer: optax.GradientTransformation | None = None,
        **options: Any,
    ) -> Self:
        """ADEPT-DGM: models that undo the corruption of samples.

        `jaxfed.generative.sample(algorithm, solution.result.local, 200, key=key)` draws from every
        client's model. To keep the models of the best round, pick it by a metric of held-out
        samples: `fit(..., best="name")`.

        Args:
            model: maps one corrupted sample to the clean one, such as `jaxfed.models.UNet`.
            corruption: of the samples; by default `jaxfed.models.variance_preserving()`, with
                normal noise, or with `"published"` `interpolation()`, with uniform noise.
            conditional: whether the model takes the amount of noise as well as the sample.
            preset: `"text"` or `"published"`, see the class.
            local_steps: local steps per round.
            step_size: of the personal models.
            global_step_size: of the clients' copies of the global model; by default 1e-3, or 0.1
                with `"published"`.
            hyper_prior: ξ.
            initial_spread: σ before the first round.
            decay_after: a client's models take a tenth of the step size after it has taken part in
                this many rounds; None for never.
            optimizer: of the personal models; by default Adam with this decay.
            global_optimizer: of the clients' copies of the global model; the same default.
            options: other options of `AdaptiveTraining`.

        Raises:
            ValueError: as in `AdaptiveTraining`, and if `decay_after` is not positive.

        Source: ADEPT, (10), Algorithm 3 and Section 5.1.
        """
        check_options(options, cls.__init__, without=("self", "model", "loss"))
        check_count("local_steps", local_steps)  # before it is multiplied
        check_count("decay_after", 1 if decay_after is None else decay_after)
        default = decaying_adam(None if decay_after is None else decay_after * local_steps)
        published = preset == "published"
        if corruption is None:
            corruption = INTERPOLATION if published else PRESERVING
        if global_step_size is None:
            global_step_size = 0.1 if published else 1e-3
        return cls(
            model,
            DenoisingLoss(corruption, conditional),
            preset=preset,
            local_steps=local_steps,
            step_size=step_size,
            global_step_size=global_step_size,
            hyper_prior=hyper_prior,
            initial_spread=initial_spread,
            optimizer=default if optimizer is None else optimizer,
            global_optimizer=default if global_optimizer is None else global_optimizer,
            **options,
        )


def _any(given: ArrayLike, wrong: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Whether a hyperparameter has a wrong value; traced ones have none yet."""
    return not isinstance(given, Tracer) and bool(wrong(np.asarray(given)).any())
