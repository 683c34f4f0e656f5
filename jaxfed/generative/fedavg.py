r"""Federated averaging: clients train copies of one model, and the server averages the changes.

min over w of  mean_i F_i(w),   F_i(w) = the loss of client i's samples.

Source: McMahan et al. (2017), Communication-efficient learning of deep networks from decentralized
data (FedAvg); Li et al. (2020), Federated optimization in heterogeneous networks (FedProx); Reddi
et al. (2021), Adaptive federated optimization (FedOpt).
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Key, PyTree

from jaxfed.contract import Diagnostics, check_count, check_factor, hyperparameter
from jaxfed.core.clients.samples import Samples
from jaxfed.generative._training import (
    Loss,
    Training,
    optimizer_step,
    parameters_of,
    plus,
    split_model,
)
from jaxfed.generative.gradient_noise import GradientNoise, check_noise

# One object, because JAX compiles again for each new one.
ADAM = optax.adam(3e-3)


class FedAvgServer(NamedTuple):
    """The server's state between rounds."""

    parameters: PyTree
    optimizer: PyTree  # the optimizer's state; None without an optimizer


class FedAvg(Training):
    r"""Federated averaging of any model, with any loss and any Optax optimizers.

    A model is an Equinox module or any other pytree of arrays, such as a dictionary of parameters
    that the loss passes to an apply function. For a Flax NNX model, pass its state::

        graph, state = nnx.split(model)
        FedAvg(state, lambda state, batch, key: loss(nnx.merge(graph, state)(batch)), ...)

    Each round a client starts at the server's parameters w, takes some optimizer steps on
    minibatches of its samples, and sends the change. The server adds the mean change
    \(\Delta\) to w, or takes a step of its own optimizer with the pseudo-gradient \(-\Delta\).
    Clients keep nothing between rounds. Means use the clients' weights; the paper weights by
    numbers of samples, `Clients.from_samples(..., weights="samples")`.

    Uplink messages are changes, like gradients: compress them with `quantize(...)`,
    `error_feedback(...)` or `difference(...)`. Downlink messages are parameters: compress them with
    `difference(...)`.

    The history's objective is the loss of the round's first batches at the parameters that enter
    the round: exact if a batch is all samples, else an unbiased estimate that costs nothing extra.

    `result.shared` holds the model's arrays, which `algorithm.model_of` turns back into a model;
    `result.local` holds those of the fine-tuned models, with a leading axis of clients, or None
    without fine-tuning. Two other methods are special cases: for local training, run one round
    with `fine_tuning_steps=...` and `server_optimizer=optax.set_to_zero()`; for pooled training,
    run one client with all samples.

    The model's arrays, `step_size` and `proximal` are traced leaves, to sweep over or
    differentiate. An optimizer's own numbers are compiled into the program. To trace the step size,
    pass it here, `FedAvg(..., optax.sgd(1.0), step_size=0.1)`. Reuse one optimizer object over many
    runs, because JAX compiles again for each new object. Parameters keep their own type.

    Source: McMahan et al. (2017), Algorithm 1; Li et al. (2020), Algorithm 2, with a fixed number
    of steps; Reddi et al. (2021), Algorithm 1.
    """

    step_size: Float[Array, ""]
    proximal: Float[Array, ""]
    client_optimizer: optax.GradientTransformation = eqx.field(static=True)
    server_optimizer: optax.GradientTransformation | None = eqx.field(static=True)
    local_steps: int = eqx.field(static=True)
    fine_tuning_steps: int = eqx.field(static=True)

    def __init__(
        self,
        model: PyTree,
        loss: Loss,
        client_optimizer: optax.GradientTransformation = ADAM,
        *,
        local_steps: int = 20,
        batch_size: int | None = None,
        step_size: ArrayLike = 1.0,
        proximal: ArrayLike = 0.0,
        server_optimizer: optax.GradientTransformation | None = None,
        fine_tuning_steps: int = 0,
        gradient_noise: GradientNoise | None = None,
    ):
        """Set up the algorithm.

        Args:
            model: the initial model, a pytree; its floating-point arrays are the parameters.
            loss: `loss(model, batch, key)` is the mean loss of a batch of samples `(b, d)`, a
                scalar; random models and losses use `key`.
            client_optimizer: of the local steps; its state is new in each round. The default,
                `optax.adam(3e-3)`, does not depend on the loss's unit. Plain descent does: a step
                size that suits centred samples may be far too long for others.
            local_steps: local steps per round.
            batch_size: samples per local step. They are drawn without replacement until too few
                are left for another batch, then from all of the client's samples again. None uses
                all samples in every step, with the mean of their single losses.
            step_size: factor on the client optimizer's updates.
            proximal: factor of FedProx's term, proximal/2 ‖w - w_server‖²; 0 is FedAvg.
            server_optimizer: treats minus the mean change as a gradient; None adds the change.
            fine_tuning_steps: local steps that turn the final parameters into a client's local
                model.
            gradient_noise: protects each person in the messages and the shared model; needs
                `batch_size`, of which every step then draws new samples. Fine-tuning, whose models
                stay at home, has no noise.

        Raises:
            ValueError: if the model has no finite parameters; a number of steps or the batch size
                is out of range, or missing with `gradient_noise`; or the step size or proximal
                factor is negative or not finite.
        """
        self.arrays, self.others = split_model(model, batch_size)
        check_noise(gradient_noise, batch_size)
        self.loss, self.batch_size, self.gradient_noise = loss, batch_size, gradient_noise
        check_count("local_steps", local_steps)
        check_count("fine_tuning_steps", fine_tuning_steps, least=0)
        check_factor("step_size", step_size)
        check_factor("proximal", proximal)
        self.client_optimizer, self.server_optimizer = client_optimizer, server_optimizer
        self.local_steps, self.fine_tuning_steps = local_steps, fine_tuning_steps
        self.step_size, self.proximal = hyperparameter(step_size), hyperparameter(proximal)

    def server_init(self, key, first: None, like, warm_start) -> FedAvgServer:
        """The initial parameters."""
        parameters = parameters_of(self.arrays if warm_start is None else warm_start.shared)
        optimizer = self.server_optimizer
        return FedAvgServer(parameters, None if optimizer is None else optimizer.init(parameters))

    def downlink(self, server: FedAvgServer) -> PyTree:
        """The parameters."""
        return server.parameters

    def client_init(self, key, downlink: PyTree, data: Samples, warm_start) -> PyTree:
        """The seed of all random draws in fine-tuning; None without fine-tuning."""
        return jax.random.bits(key, (), jnp.uint32) if self.fine_tuning_steps else None

    def client_step(self, key, downlink: PyTree, local: PyTree, data: Samples):
        """Train a copy of the model; send its change."""
        noisy = self.gradient_noise is not None
        moved, objective = self._trained(key, downlink, data, self.local_steps, noisy=noisy)
        return jax.tree.map(jnp.subtract, moved, downlink), local, {"objective": objective}

    def server_step(
        self, key, server: FedAvgServer, uplink: PyTree
    ) -> tuple[FedAvgServer, Diagnostics]:
        """Add the mean change, or let the optimizer take a step."""
        parameters, state = server
        if self.server_optimizer is not None:
            gradient = jax.tree.map(jnp.negative, uplink)
            uplink, state = self.server_optimizer.update(gradient, state, parameters)
        return FedAvgServer(optax.apply_updates(parameters, uplink), state), {}

    def _trained(
        self, key: Key[Array, ""], shared: PyTree, data: Samples, steps: int, *, noisy: bool
    ) -> tuple[PyTree, Float[Array, ""]]:
        """ONE client's parameters after some local steps, and the loss of the first batch."""
        draw_key, loss_key = jax.random.split(key)

        def step(carry, batch):
            (parameters, state), (index, rows) = carry, batch
            key = jax.random.fold_in(loss_key, index)
            value, gradient = self.gradient_of(parameters, data, rows, key, noisy=noisy)
            # The gradient of FedProx's term, zero for FedAvg.
            gradient = plus(gradient, self.proximal, jax.tree.map(jnp.subtract, parameters, shared))
            moved = optimizer_step(
                self.client_optimizer, self.step_size, gradient, state, parameters
            )
            return moved, value

        start = shared, self.client_optimizer.init(shared)
        batches = self.batches(draw_key, data, steps, noisy=noisy)
        (parameters, _), losses = jax.lax.scan(step, start, batches)
        return parameters, losses[0]

    def client_result(self, downlink: PyTree, local: PyTree, data: Samples) -> PyTree:
        """The client's fine-tuned model; None without fine-tuning."""
        if local is None:
            return None
        # Draw the same batches however often the result is requested.
        key = jax.random.key(local)
        steps = self.fine_tuning_steps
        return self.whole(self._trained(key, downlink, data, steps, noisy=False)[0])

    def shared_result(self, server: FedAvgServer) -> PyTree:
        """The model's arrays."""
        return self.whole(server.parameters)
