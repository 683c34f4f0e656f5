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

import functools
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree

from jaxfed.core.algorithm import hyperparameter
from jaxfed.core.checks import check_count, check_factor, check_optimizer, check_positive
from jaxfed.core.clients import Samples
from jaxfed.generative._training import Loss, Training, parameters_of

Preset = Literal["text", "published"]
PriorStep = Literal["gradient", "proximal"]

PLAIN = optax.sgd(1.0)


class Prior(NamedTuple):
    """The global model and how far personal weights are expected from it; also the message."""

    mean: PyTree  # μ, the global model's parameters
    spread: PyTree  # σ, one per scalar weight


class Local(NamedTuple):
    """What a client keeps."""

    personal: PyTree  # θ_i
    optimizer: PyTree
    global_optimizer: PyTree
    rounds: Int[Array, ""]  # that it has taken part in
    spread_gradient: PyTree  # what was not used yet of it; () where it is never kept


class AdaptiveTraining(Training):
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
      at the next round's start. The numbers that go with it are the subclasses'.

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
        super().__init__(model, loss, batch_size)
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
        if preset not in ("text", "published"):
            raise ValueError(f"preset: wanted one of text, published, got {preset!r}")
        check_prior_step(prior_step, preset, global_step_size, spread_step_size)
        self.step_size = jnp.asarray(step_size)
        self.global_step_size = jnp.asarray(global_step_size)
        self.spread_step_size = jnp.asarray(spread_step_size)
        self.hyper_prior = jnp.asarray(hyper_prior)
        self.initial_spread = jnp.asarray(initial_spread)
        self.prior_weight = hyperparameter(prior_weight)
        self.clip, self.spread_clip = hyperparameter(clip), hyperparameter(spread_clip)
        self.local_steps, self.lazy_rounds, self.bounds = local_steps, lazy_rounds, bounds
        self.optimizer, self.global_optimizer = optimizer, global_optimizer
        self.preset: Preset = preset
        self.prior_step: PriorStep = prior_step

    def check(self, clients, start):
        """Refuse data, a loss or a warm start that do not fit the model.

        Raises:
            ValueError: as said above, and for a batch larger than the smallest client.
        """
        super().check(clients, start)
        if start is not None and jax.tree.leaves(start.local):
            self._check_arrays("warm_start: wanted as local part", start.local, len(clients))

    # --- start ---------------------------------------------------------------------------------

    def client_init(self, key, data, start):
        """Nothing is sent; a warm start's own model is kept."""
        del key, data
        return (), () if start is None else parameters_of(start.local)

    def server_init(self, key, uplink, start):
        """The first global model, and the same spread for all weights."""
        del key, uplink
        mean = parameters_of(self.arrays if start is None else start.shared)
        return Prior(mean, jax.tree.map(lambda w: jnp.full_like(w, self.initial_spread), mean))

    def client_begin(self, downlink, local, data):
        """A personal model, from the global one unless there is one already."""
        del data
        personal = local if jax.tree.leaves(local) else downlink.mean
        return Local(
            personal,
            self.optimizer.init(personal),
            self.global_optimizer.init(downlink.mean),
            jnp.zeros((), jnp.int32),
            jax.tree.map(jnp.zeros_like, personal) if self._collects else (),
        )

    # --- a round -------------------------------------------------------------------------------

    def downlink(self, server):
        """The global model and the spread."""
        return server

    def client_step(self, key, downlink, local, data):
        """One update of the spread, then local steps of the personal and the global model."""
        draw_key, loss_key = jax.random.split(key)
        weight = self._weight(data)
        # A coarse channel may round a spread to nothing.
        downlink = downlink._replace(spread=self._bounded(downlink.spread))
        spread, collected = self._spread(local, downlink)
        precision = jax.tree.map(lambda s: 1 / s**2, spread)  # once, as divisions take their time

        def step(carry, index):
            personal, state, mean, global_state, collected = carry
            if self._collects:
                # The first step's own, once, was used already.
                share = jnp.where(index == 0, weight, 1 + weight)
                slope = spread_gradient(personal, Prior(mean, spread), self.hyper_prior)
                collected = _plus(collected, share, slope)
            rows = self._rows(draw_key, data, index)
            loss, gradient = jax.value_and_grad(self._loss)(
                personal, data, rows, jax.random.fold_in(loss_key, index)
            )
            if not self._proximal:
                gradient = _plus(gradient, weight, self._pull(personal, mean, precision))
            personal, state = _descend(
                self.optimizer, self.step_size, self._clipped(gradient, self.clip), state, personal
            )
            if self._proximal:
                factor = self.step_size * weight
                personal = jax.tree.map(
                    lambda w, m, p: w + _share(factor.astype(w.dtype) * p) * (m - w),
                    personal, mean, precision,
                )  # fmt: skip
                change = jax.tree.map(jnp.subtract, personal, mean)
                mean = _plus(mean, self.global_step_size, change)
                return (personal, state, mean, global_state, collected), loss
            mean, global_state = _descend(
                self.global_optimizer,
                self.global_step_size,
                self._clipped(self._global_gradient(personal, mean, precision), self.clip),
                global_state,
                mean,
            )
            return (personal, state, mean, global_state, collected), loss

        start = local.personal, local.optimizer, downlink.mean, local.global_optimizer, collected
        indices = jnp.arange(self.local_steps, dtype=jnp.int32)
        (personal, state, mean, global_state, collected), losses = jax.lax.scan(
            step, start, indices
        )
        change = jax.tree.map(jnp.subtract, Prior(mean, spread), downlink)
        kept = Local(personal, state, global_state, local.rounds + 1, collected)
        penalty = regularizer(local.personal, downlink, self.hyper_prior)
        objective = losses[0] + weight * penalty
        return change, kept, {"objective": objective, "loss": losses[0]}

    def server_step(self, key, server, uplink):
        """Add the mean changes."""
        del key
        mean, spread = (jax.tree.map(jnp.add, *pair) for pair in zip(server, uplink, strict=True))
        return Prior(mean, self._bounded(spread))

    def server_diagnostics(self, server):
        """The mean spread."""
        leaves = jax.tree.leaves(server.spread)
        return {"spread": sum(jnp.sum(leaf) for leaf in leaves) / sum(x.size for x in leaves)}

    # --- its parts -----------------------------------------------------------------------------

    @property
    def _collects(self) -> bool:
        return self.preset == "published"

    @property
    def _proximal(self) -> bool:
        return self.prior_step == "proximal"

    def _weight(self, data: Samples) -> Float[Array, ""]:
        if self.prior_weight is None:
            return 1 / data.count
        return self.prior_weight.astype(data.count.dtype)

    def _spread(self, local: Local, prior: Prior) -> tuple[PyTree, PyTree]:
        """σ_i, and what stays of the gradient that was collected."""
        gradient = spread_gradient(local.personal, prior, self.hyper_prior)
        if self._collects:
            gradient = jax.tree.map(jnp.add, local.spread_gradient, gradient)
        if self._proximal:
            direction = jax.tree.map(lambda g, s: g * s**2 / 2, gradient, prior.spread)
        else:
            direction = self._clipped(gradient, self.spread_clip, each=True)
        moved = self._bounded(_plus(prior.spread, -self.spread_step_size, direction))
        awake = local.rounds >= self.lazy_rounds
        spread = jax.tree.map(lambda a, b: jnp.where(awake, a, b), moved, prior.spread)
        if not self._collects:
            return spread, ()
        return spread, jax.tree.map(lambda g: jnp.where(awake, 0, g), gradient)

    def _bounded(self, spread: PyTree) -> PyTree:
        return jax.tree.map(lambda s: jnp.clip(s, *self.bounds), spread)

    def _pull(self, personal: PyTree, mean: PyTree, precision: PyTree) -> PyTree:
        """∂R/∂θ."""
        return jax.tree.map(lambda w, m, p: (w - m) * p, personal, mean, precision)

    def _global_gradient(self, personal: PyTree, mean: PyTree, precision: PyTree) -> PyTree:
        """∂R/∂μ, or what is published in its place."""
        if self.preset == "published":
            return jax.tree.map(lambda w, m: 2 * (m - w), personal, mean)
        return jax.tree.map(jnp.negative, self._pull(personal, mean, precision))

    def _clipped(self, gradient: PyTree, threshold: Array | None, *, each: bool = False) -> PyTree:
        """Scaled down to the threshold, by its norm or by its largest entry (`each` array's)."""
        if threshold is None:
            return gradient
        if self.preset == "text":
            return scaled_to_norm(gradient, threshold)
        return scaled_to_largest(gradient, threshold, each=each)

    # --- result --------------------------------------------------------------------------------

    def client_result(self, downlink, local, data):
        """The personal model's arrays."""
        del downlink, data
        return self._all(local.personal)

    def shared_result(self, server):
        """The global model's arrays."""
        return self._all(server.mean)


def regularizer(personal: PyTree, prior: Prior, hyper_prior: Float[Array, ""]) -> Float[Array, ""]:
    """R(θ; μ, σ), the prior's negative logarithm up to a constant.

    Source: ADEPT, (2), with a spread for each scalar weight.
    """

    def one(w, m, s):
        return jnp.sum(jnp.log(s) + (2 * hyper_prior.astype(w.dtype) + (w - m) ** 2) / (2 * s**2))

    # Not from zero, whose type need not be that of the weights.
    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(one, personal, *prior)))


def spread_gradient(personal: PyTree, prior: Prior, hyper_prior: Float[Array, ""]) -> PyTree:
    """∂R/∂σ = 1/σ - (2ξ + (θ - μ)²)/σ³, for each scalar weight."""

    def one(w, m, s):
        return (1 - (2 * hyper_prior.astype(w.dtype) + (w - m) ** 2) / s**2) / s

    return jax.tree.map(one, personal, *prior)


def scaled_to_norm(gradient: PyTree, threshold: Float[Array, ""]) -> PyTree:
    """The gradient, scaled down where its norm over all arrays is above the threshold."""
    square = sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient))
    limit = jnp.square(threshold.astype(jnp.asarray(square).dtype))
    # Nothing is divided by a norm of zero, whose derivative would be NaN.
    factor = jnp.sqrt(limit / jnp.where(square > limit, square, limit))
    return jax.tree.map(lambda g: factor.astype(g.dtype) * g, gradient)


def scaled_to_largest(gradient: PyTree, threshold: Float[Array, ""], *, each: bool) -> PyTree:
    """The gradient, scaled down where its largest absolute entry is above the threshold.

    Args:
        gradient: arrays.
        threshold: what the largest entry may be.
        each: whether arrays are scaled on their own, and not all alike.
    """
    sizes = jax.tree.map(lambda g: jnp.max(jnp.abs(g)), gradient)
    if not each:
        largest = jnp.max(jnp.stack(jax.tree.leaves(sizes)))
        sizes = jax.tree.map(lambda _: largest, sizes)

    def scaled(g, size):
        limit = threshold.astype(g.dtype)
        return limit / jnp.maximum(size, limit).astype(g.dtype) * g

    return jax.tree.map(scaled, gradient, sizes)


def _share(t: Float[Array, "..."]) -> Float[Array, "..."]:
    """What the proximal map of t/2 (θ - μ)² goes of the way from θ to μ."""
    return t / (1 + t)


def _descend(
    optimizer: optax.GradientTransformation,
    step_size: Array,
    gradient: PyTree,
    state: PyTree,
    parameters: PyTree,
) -> tuple[PyTree, PyTree]:
    updates, state = optimizer.update(gradient, state, parameters)
    return _plus(parameters, step_size, updates), state


def _plus(tree: PyTree, factor: Array, other: PyTree) -> PyTree:
    """The first tree plus so much of the other."""
    return jax.tree.map(lambda a, b: a + factor.astype(a.dtype) * b, tree, other)


def check_bounds(bounds: Any, initial_spread: Any) -> None:
    """Refuse bounds that are none, and an initial spread outside of them."""
    values = np.asarray(bounds)
    if values.shape != (2,) or values.dtype.kind not in "fiu" or not 0 < values[0] <= values[1]:
        raise ValueError(f"bounds: wanted a least and a largest positive spread, got {bounds!r}")
    if isinstance(initial_spread, Tracer):
        return
    given = np.asarray(initial_spread)
    if (given < values[0]).any() or (given > values[1]).any():
        raise ValueError(
            f"initial_spread: wanted a number within the bounds {bounds}, got {initial_spread!r}"
        )


def check_prior_step(
    prior_step: Any, preset: str, global_step_size: Any, spread_step_size: Any
) -> None:
    """Refuse unknown kinds of steps, and what does not go with proximal ones."""
    if prior_step not in ("gradient", "proximal"):
        raise ValueError(f"prior_step: wanted one of gradient, proximal, got {prior_step!r}")
    if prior_step == "gradient":
        return
    if preset == "published":
        raise ValueError('prior_step: wanted gradient with the published preset, got "proximal"')
    for name, given in (
        ("global_step_size", global_step_size),
        ("spread_step_size", spread_step_size),
    ):
        if not isinstance(given, Tracer) and (np.asarray(given) > 1).any():
            raise ValueError(f"{name}: wanted at most 1 with proximal steps, got {given!r}")
