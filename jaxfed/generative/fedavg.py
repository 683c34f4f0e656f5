r"""Federated averaging: clients train copies of one model for a while, the server averages them.

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
from jaxtyping import Array, Float, Key, PyTree

from jaxfed.core.clients.samples import Samples
from jaxfed.core.common.checks import check_count, check_factor, check_optimizer
from jaxfed.core.contract.algorithm import Diagnostics, hyperparameter
from jaxfed.generative._training import (
    Loss,
    Start,
    Training,
    descend,
    parameters_of,
    plus,
    taken_apart,
)


class Server(NamedTuple):
    """The server's state."""

    parameters: PyTree
    optimizer: PyTree  # state of the server's optimizer; None without one


class FedAvg(Training):
    r"""Federated averaging of any model, with any loss and any Optax optimizers.

    A model is an Equinox module, or any other pytree of arrays, such as a dictionary of parameters,
    whose apply function the loss calls; of a Flax NNX model, its state::

        graph, state = nnx.split(model)
        FedAvg(state, lambda state, batch, key: loss(nnx.merge(graph, state)(batch)), ...)

    Each round a client starts at the server's parameters w, takes some optimizer steps on
    minibatches of its own samples, and sends the change. The server takes the mean change
    \(\Delta\): \(w \leftarrow w + \Delta\), or a step of its own optimizer with the pseudo-gradient
    \(-\Delta\). Clients keep nothing from round to round. The means are weighted by the clients'
    weights; by numbers of samples in the paper, `Clients.from_samples(..., weights="samples")`.

    Messages up are changes, as gradients are: compress them with `quantize(...)`,
    `error_feedback(...)` or `difference(...)`, and parameters, messages down, with the last.

    The history's objective is the loss of the round's first batches at the parameters that enter
    the round: exact where a batch is all samples, else an unbiased estimate that costs nothing.

    `result.shared` holds the model's arrays, of which `algorithm.model_of` makes the model;
    `result.local` those of the clients' fine-tuned ones, with a leading axis, or None without
    fine-tuning. Two other methods are settings of this one: local training is fine-tuning alone,
    `fine_tuning_steps=...` and `server_optimizer=optax.set_to_zero()` for one round; pooled
    training is one client with all samples.

    Traced leaves, to sweep over and differentiate by, are the model's arrays, `step_size` and
    `proximal`. The optimizers' own numbers are compiled in: put the step size here,
    `FedAvg(..., optax.sgd(1.0), step_size=0.1)`, to have it traced, and make an optimizer once for
    many runs, as every new one is compiled anew. Parameters keep their own type.

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
        client_optimizer: optax.GradientTransformation,
        *,
        local_steps: int,
        batch_size: int | None = None,
        step_size: float | Array = 1.0,
        proximal: float | Array = 0.0,
        server_optimizer: optax.GradientTransformation | None = None,
        fine_tuning_steps: int = 0,
    ):
        """Set up the algorithm.

        Args:
            model: where to start, a pytree; its floating point arrays are the parameters.
            loss: `loss(model, batch, key)` is the mean loss of a batch of samples `(b, d)`, a
                scalar; `key` is for models and losses that are random.
            client_optimizer: of the local steps, from a fresh state in each round.
            local_steps: how many a round.
            batch_size: samples of a local step. They are drawn without replacement until too few
                are left for another batch, then from all of the client's samples again. None: all
                samples in every step, as a mean of the losses of single ones.
            step_size: factor on the client optimizer's updates.
            proximal: factor of FedProx's term, proximal/2 ‖w - w_server‖²; 0 is FedAvg.
            server_optimizer: takes minus the mean change for a gradient; None adds the change.
            fine_tuning_steps: how many local steps from the final parameters make each client's
                local model.

        Raises:
            ValueError: for a model that has no parameters or not finite ones, things that are no
                loss or optimizer, steps and a batch size that are not whole numbers
                in their range, and a step size or proximal factor that is negative or not finite.
        """
        self.arrays, self.others = taken_apart(model, loss, batch_size)
        self.loss, self.batch_size = loss, batch_size
        check_optimizer("client_optimizer", client_optimizer)
        if server_optimizer is not None:
            check_optimizer("server_optimizer", server_optimizer)
        check_count("local_steps", local_steps)
        check_count("fine_tuning_steps", fine_tuning_steps, least=0)
        check_factor("step_size", step_size)
        check_factor("proximal", proximal)
        self.client_optimizer, self.server_optimizer = client_optimizer, server_optimizer
        self.local_steps, self.fine_tuning_steps = local_steps, fine_tuning_steps
        self.step_size, self.proximal = hyperparameter(step_size), hyperparameter(proximal)

    def server_init(self, key: Key[Array, ""], first: None, like: Samples, start: Start) -> Server:
        """The first parameters."""
        del key, first, like
        parameters = parameters_of(self.arrays if start is None else start.shared)
        optimizer = self.server_optimizer
        return Server(parameters, None if optimizer is None else optimizer.init(parameters))

    def downlink(self, server: Server) -> PyTree:
        """The parameters."""
        return server.parameters

    def client_init(
        self, key: Key[Array, ""], downlink: PyTree, data: Samples, start: Start
    ) -> PyTree:
        """What settles all that is drawn in the fine-tuning."""
        del downlink, data, start
        return jax.random.bits(key, (), jnp.uint32) if self.fine_tuning_steps else None

    def client_step(
        self, key: Key[Array, ""], downlink: PyTree, local: PyTree, data: Samples
    ) -> tuple[PyTree, PyTree, Diagnostics]:
        """Train a copy of the model; send its change."""
        moved, objective = self._trained(key, downlink, data, self.local_steps)
        return jax.tree.map(jnp.subtract, moved, downlink), local, {"objective": objective}

    def server_step(
        self, key: Key[Array, ""], server: Server, uplink: PyTree
    ) -> tuple[Server, Diagnostics]:
        """Add the mean change, or take a step with it."""
        del key
        parameters, state = server
        if self.server_optimizer is not None:
            gradient = jax.tree.map(jnp.negative, uplink)
            uplink, state = self.server_optimizer.update(gradient, state, parameters)
        return Server(optax.apply_updates(parameters, uplink), state), {}

    def _trained(
        self, key: Key[Array, ""], shared: PyTree, data: Samples, steps: int
    ) -> tuple[PyTree, Float[Array, ""]]:
        """ONE client's parameters after some steps from the shared ones, and the first loss."""
        draw_key, loss_key = jax.random.split(key)

        def step(carry, batch):
            (parameters, state), (index, rows) = carry, batch
            key = jax.random.fold_in(loss_key, index)
            value, gradient = jax.value_and_grad(self.loss_of)(parameters, data, rows, key)
            gradient = plus(gradient, self.proximal, jax.tree.map(jnp.subtract, parameters, shared))
            moved = descend(self.client_optimizer, self.step_size, gradient, state, parameters)
            return moved, value

        start = shared, self.client_optimizer.init(shared)
        (parameters, _), losses = jax.lax.scan(step, start, self.batches(draw_key, data, steps))
        return parameters, losses[0]

    def client_result(self, downlink: PyTree, local: PyTree, data: Samples) -> PyTree:
        """The client's local, fine-tuned model; None without fine-tuning."""
        if local is None:
            return None
        key = jax.random.key(local)
        return self.whole(self._trained(key, downlink, data, self.fine_tuning_steps)[0])

    def shared_result(self, server: Server) -> PyTree:
        """The model's arrays."""
        return self.whole(server.parameters)
