r"""Personal models with a learned Gaussian prior: ADEPT for any model and any loss.

\[
    \min_{\theta, \mu, \sigma} \sum_i \big[ F_i(\theta_i) + R(\theta_i; \mu, \sigma) \big], \qquad
    R(\theta; \mu, \sigma)
    = \sum_j \log \sigma_j + \frac{2\xi + (\theta_j - \mu_j)^2}{2\sigma_j^2},
\]

where F_i is the negative log-likelihood of client i's samples, the sum over j is over the scalar
weights, and ξ is the hyper prior that keeps the spread σ from vanishing.

Source: Ozkara, Huang, Zhou & Diggavi, Hierarchical Bayes approach to personalized federated
unsupervised learning (ADEPT), (2) and (6), Algorithms 2 and 3, with the changes of Section 5.1.
"""

import equinox as eqx
import optax
from jaxtyping import Array

from jaxfed.core.common.checks import (
    check_count,
    check_factor,
    check_name,
    check_optimizer,
    check_positive,
)
from jaxfed.core.contract.algorithm import hyperparameter
from jaxfed.generative._adaptive import Adaptive, Preset, PriorStep
from jaxfed.generative._prior import check_bounds, check_prior_step
from jaxfed.generative._training import Loss, taken_apart

PLAIN = optax.sgd(1.0)


class AdaptiveTraining(Adaptive):
    r"""ADEPT: every client trains a model of its own under a prior that all of them learn.

    One round of one client, from the global model μ and the spread σ that it receives
    (Algorithm 2, with what Section 5.1 changes in it):

    1. σ_i ← σ - η₃ clip(∂R/∂σ), kept within `bounds`; not in the client's first `lazy_rounds`.
    2. `local_steps` times: θ_i ← θ_i - η₁ clip(∂/∂θ [f_i(θ_i) + w R(θ_i; μ_i, σ_i)]), with f_i
       the mean loss of a minibatch and w = 1/n_i, as F_i is a sum over n_i samples; and then
       μ_i ← μ_i - η₂ clip(∂R/∂μ).
    3. It sends μ_i - μ and σ_i - σ, whose means the server adds. θ_i stays.

    Presets:

    * `"text"`, the default, is the paper's text: gradients of models are clipped to norm 1, over
      all weights together, those of spreads to norm 10.
    * `"published"` is what the authors' code does. The largest absolute entry is clipped and not
      the norm, by scaling, among all weights for the models and within each array for the
      spread. The gradient of μ is 2 (μ - θ), without 1/(2σ²). The gradient of the spread is not
      taken at the first local step alone: 1 + w times it is collected at all of them and used
      at the next round's start. `AdaptiveAutoencoder` and `AdaptiveDiffusion` have the numbers.

    With `prior_step="proximal"`, which is beyond the paper, the prior does not go through the
    optimizer, as Adam would divide its pull by the size of the loss's gradient. Every step is
    then taken in the prior's own scale, and only the loss's gradient is clipped:

    1. σ_i ← σ - η₃ (σ²/2) ∂R/∂σ = σ + η₃/2 ((2ξ + (θ_i - μ)²)/σ - σ), a natural gradient step,
       as 2/σ² is the Fisher information of σ.
    2. θ_i takes the optimizer's step on f_i alone, and then θ_i ← (θ_i + t μ_i)/(1 + t) with
       t = η₁ w/σ_i², the proximal map of η₁ w R, which is stable however small the spread; and
       then μ_i ← μ_i - η₂ σ_i² ∂R/∂μ = μ_i + η₂ (θ_i - μ_i), another natural gradient step.

    η₂ and η₃ are shares of the way, up to 1, and a schedule in an optimizer acts on none but the
    loss's steps. Small spreads keep models together, large ones let each train alone.

    Personal models start at the global one, or at a warm start's own.

    The history's objective is the criterion per sample, f_i + w R, of the round's first batch, at
    the personal model, μ and σ that enter the round; `"loss"` is its f_i, and `"spread"` the mean
    of σ after the round. `solution.server` has `mean` and `spread`; `result.shared` are the global
    model's arrays and `result.local` those of the personal ones, clients first: see `model_of`.

    Traced leaves are the model's arrays, the step sizes, `hyper_prior`, `initial_spread`,
    `prior_weight` and the clipping thresholds. A run is differentiable in them except where a
    gradient's size meets its threshold or a spread one of its bounds, and by an entry's size only
    where no other one is as large.

    Optimizers other than plain descent, with states that clients keep, come as Optax
    transformations with a learning rate of 1, as the step sizes are factors on their updates. A
    schedule counts the client's local steps: a tenth from round 75 on is
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
        step_size: float | Array = 1e-2,
        global_step_size: float | Array = 1e-2,
        spread_step_size: float | Array = 1e-3,
        hyper_prior: float | Array = 1e-6,
        initial_spread: float | Array = 1.0,
        prior_weight: float | Array | None = None,
        lazy_rounds: int = 2,
        clip: float | Array | None = 1.0,
        spread_clip: float | Array | None = 10.0,
        bounds: tuple[float, float] = (1e-3, 100.0),
        optimizer: optax.GradientTransformation = PLAIN,
        global_optimizer: optax.GradientTransformation = PLAIN,
        preset: Preset = "text",
        prior_step: PriorStep = "gradient",
    ):
        """Set up the algorithm.

        Args:
            model: where to start; its floating point arrays are the weights.
            loss: `loss(model, batch, key)` is the mean loss of a batch of samples `(b, d)`, a
                scalar; `key` is for models and losses that are random.
            local_steps: how many a round.
            batch_size: samples of a local step, drawn as `FedAvg` draws them; None for all.
            step_size: η₁, of the personal models.
            global_step_size: η₂, of the clients' copies of the global one.
            spread_step_size: η₃, of the spread.
            hyper_prior: ξ. The spread of a weight that is the same everywhere falls to √(2ξ).
            initial_spread: σ before the first round.
            prior_weight: w, what R counts beside the mean loss; None for 1/n_i.
            lazy_rounds: how many rounds of its own a client leaves the spread as it is.
            clip: threshold of the models' gradients; None not to clip.
            spread_clip: threshold of the spread's gradient; None not to clip.
            bounds: least and largest spread.
            optimizer: of the personal models, see above.
            global_optimizer: of the clients' copies of the global one.
            preset: `"text"` or `"published"`, see above.
            prior_step: `"gradient"`, the paper's, or `"proximal"`, see above.

        Raises:
            ValueError: for a model that is none, or has no parameters or not finite ones, things
                that are no loss or optimizer, counts that are not whole numbers in their range,
                step sizes and weights that are negative or not finite, a hyper prior, thresholds
                or bounds that are not positive, an initial spread outside of the bounds, an
                unknown preset or kind of step, and, with proximal steps, the published preset and
                shares above 1.
        """
        self.arrays, self.others = taken_apart(model, loss, batch_size)
        self.loss, self.batch_size = loss, batch_size
        check_count("local_steps", local_steps)
        check_count("lazy_rounds", lazy_rounds, least=0)
        for name, value in (
            ("step_size", step_size),
            ("global_step_size", global_step_size),
            ("spread_step_size", spread_step_size),
            ("prior_weight", 0.0 if prior_weight is None else prior_weight),
        ):
            check_factor(name, value)
        for name, value in (
            ("hyper_prior", hyper_prior),
            ("initial_spread", initial_spread),
            ("clip", 1.0 if clip is None else clip),
            ("spread_clip", 1.0 if spread_clip is None else spread_clip),
        ):
            check_positive(name, value)
        check_bounds(bounds, initial_spread)
        check_optimizer("optimizer", optimizer)
        check_optimizer("global_optimizer", global_optimizer)
        check_name("preset", preset, ("text", "published"))
        check_prior_step(prior_step, preset, global_step_size, spread_step_size)
        self.step_size = hyperparameter(step_size)
        self.global_step_size = hyperparameter(global_step_size)
        self.spread_step_size = hyperparameter(spread_step_size)
        self.hyper_prior = hyperparameter(hyper_prior)
        self.initial_spread = hyperparameter(initial_spread)
        self.prior_weight = hyperparameter(prior_weight)
        self.clip, self.spread_clip = hyperparameter(clip), hyperparameter(spread_clip)
        self.local_steps, self.lazy_rounds, self.bounds = local_steps, lazy_rounds, bounds
        self.optimizer, self.global_optimizer = optimizer, global_optimizer
        self.preset, self.prior_step = preset, prior_step
