r"""Federated averaging: clients train copies of one model for a while, the server averages them.

min over w of  mean_i F_i(w),   F_i(w) = the loss of client i's samples.

Source: McMahan et al. (2017), Communication-efficient learning of deep networks from decentralized
data (FedAvg); Li et al. (2020), Federated optimization in heterogeneous networks (FedProx); Reddi
et al. (2021), Adaptive federated optimization (FedOpt).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.clients import Clients, Samples

Loss = Callable[[Any, Float[Array, "b d"], Key[Array, ""]], Float[Array, ""]]


class Server(NamedTuple):
    """The server's state."""

    parameters: PyTree
    optimizer: PyTree  # state of the server's optimizer; None without one


class FedAvg(Algorithm):
    r"""Federated averaging of any Equinox model, with any loss and any Optax optimizers.

    Each round a client starts at the server's parameters w, takes some optimizer steps on
    minibatches of its own samples, and sends the change. The server takes the mean change
    \(\Delta\): \(w \leftarrow w + \Delta\), or a step of its own optimizer with the pseudo-gradient
    \(-\Delta\). Clients keep nothing from round to round. The means are weighted by the clients'
    weights; by numbers of samples in the paper, `Clients.from_samples(..., weights="samples")`.

    Messages up are changes, as gradients are: compress them with `quantize(...)` or
    `error_feedback(...)`; `difference(...)` works too. Messages down are parameters, for which
    `difference(...)` is the one with memory.

    The history's objective is the loss of the round's first batches at the parameters that enter
    the round: exact where a batch is all samples, else an unbiased estimate that costs nothing.

    `result.shared` are the model's arrays: the model itself where its other fields are static, and
    in any case `algorithm.model_of(result.shared)` is. `result.local` are the clients' fine-tuned
    ones, likewise, with a leading axis; without fine-tuning it is empty. Two other methods are
    settings of this one: local training is fine-tuning alone, `fine_tuning_steps=...` and
    `server_optimizer=optax.set_to_zero()` for one round; pooled training is one client with all
    samples.

    Traced leaves, to sweep over and differentiate by, are the model's arrays, `step_size` and
    `proximal`. The optimizers' own numbers are compiled in: put the step size here,
    `FedAvg(..., optax.sgd(1.0), step_size=0.1)`, to have it traced, and make an optimizer once for
    many runs, as every new one is compiled anew. Parameters keep their own type.

    Source: McMahan et al. (2017), Algorithm 1; Li et al. (2020), Algorithm 2, with a fixed number
    of steps; Reddi et al. (2021), Algorithm 1.
    """

    arrays: PyTree
    step_size: Float[Array, ""]
    proximal: Float[Array, ""]
    others: tuple[Any, ...] = eqx.field(static=True)  # the model's leaves that are no arrays
    loss: Loss = eqx.field(static=True)
    client_optimizer: optax.GradientTransformation = eqx.field(static=True)
    server_optimizer: optax.GradientTransformation | None = eqx.field(static=True)
    local_steps: int = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    fine_tuning_steps: int = eqx.field(static=True)

    def __init__(
        self,
        model: eqx.Module,
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
            model: where to start; its floating point arrays are the parameters.
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
                own model.

        Raises:
            ValueError: for a model that is none, or has no parameters or not finite ones, things
                that are no loss or optimizer, steps and a batch size that are not whole numbers
                in their range, and a step size or proximal factor that is negative or not finite.
        """
        if not isinstance(model, eqx.Module):
            raise ValueError(f"model: wanted an equinox.Module, got {type(model).__name__}")
        if not callable(loss):
            raise ValueError(f"loss: wanted a function of model, batch and key, got {loss!r}")
        _check_optimizer("client_optimizer", client_optimizer)
        if server_optimizer is not None:
            _check_optimizer("server_optimizer", server_optimizer)
        _check_count("local_steps", local_steps, least=1)
        if batch_size is not None:
            _check_count("batch_size", batch_size, least=1)
        _check_count("fine_tuning_steps", fine_tuning_steps, least=0)
        _check_factor("step_size", step_size)
        _check_factor("proximal", proximal)
        model = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, model)
        self.arrays, others = eqx.partition(model, eqx.is_array)
        self.others = tuple(jax.tree.leaves(others, is_leaf=_is_none))
        _check_parameters("model", self._parameters(self.arrays))
        self.loss, self.client_optimizer = loss, client_optimizer
        self.server_optimizer = server_optimizer
        self.local_steps, self.batch_size = local_steps, batch_size
        self.fine_tuning_steps = fine_tuning_steps
        self.step_size, self.proximal = jnp.asarray(step_size), jnp.asarray(proximal)

    def model_of(self, arrays: PyTree) -> Any:
        """The model with these arrays, such as those of a result.

        Args:
            arrays: the model's arrays; what is None of them is taken from the first model.
        """
        leaves, structure = jax.tree.flatten(eqx.combine(arrays, self.arrays), is_leaf=_is_none)
        whole = (b if a is None else a for a, b in zip(leaves, self.others, strict=True))
        return jax.tree.unflatten(structure, whole)

    def check(self, clients: Clients, start: Personalized | None) -> None:
        """Refuse data, a loss or a warm start that do not fit the model.

        Raises:
            ValueError: as said above, and for a batch larger than the smallest client.
        """
        if not isinstance(clients.data, Samples):
            raise ValueError(
                "clients: FedAvg needs Clients.from_samples, got data of type "
                f"{type(clients.data).__name__}"
            )
        values, count = clients.data.values, clients.data.count
        if self.batch_size is not None:
            smallest = values.shape[-2]
            if not isinstance(count, Tracer):
                smallest = int(np.asarray(count).min())
            if self.batch_size > smallest:
                raise ValueError(
                    f"batch_size: wanted at most the smallest client's {smallest} samples, "
                    f"got {self.batch_size}"
                )
        self._check_loss(values)
        if start is not None:
            given, wanted = (
                jax.tree.map(lambda x: (x.shape, x.dtype), eqx.filter(tree, eqx.is_array))
                for tree in (start.shared, self.arrays)
            )
            if given != wanted:
                raise ValueError(
                    "warm_start: wanted as shared part arrays like the model's, "
                    f"{_described(self.arrays)}, got {_described(start.shared)}"
                )
            _check_parameters("warm_start", self._parameters(start.shared))

    def _check_loss(self, values: Array) -> None:
        shape = (1 if self.batch_size is None else self.batch_size, values.shape[-1])
        batch = jax.ShapeDtypeStruct(shape, values.dtype)
        try:
            out = jax.eval_shape(
                lambda arrays, batch: self.loss(self.model_of(arrays), batch, jax.random.key(0)),
                self.arrays, batch,
            )  # fmt: skip
        except Exception as error:
            raise ValueError(
                f"loss: it fails for this model and a batch of shape {shape}: {error}"
            ) from error
        if getattr(out, "shape", None) != () or not jnp.issubdtype(out.dtype, jnp.floating):
            raise ValueError(f"loss: wanted one real number for a batch, got {_described(out)}")

    # --- start ---------------------------------------------------------------------------------

    def client_init(self, key, data, start):
        """Nothing is sent; what is drawn in the fine-tuning is settled here."""
        del data, start
        return (), jax.random.bits(key, (), jnp.uint32) if self.fine_tuning_steps else ()

    def server_init(self, key, uplink, start):
        """The first parameters."""
        del key, uplink
        parameters = self._parameters(self.arrays if start is None else start.shared)
        optimizer = self.server_optimizer
        return Server(parameters, None if optimizer is None else optimizer.init(parameters))

    # --- a round -------------------------------------------------------------------------------

    def downlink(self, server):
        """The parameters."""
        return server.parameters

    def client_step(self, key, downlink, local, data):
        """Train a copy of the model; send its change."""
        moved, objective = self._trained(key, downlink, data, self.local_steps)
        change = jax.tree.map(jnp.subtract, moved, downlink)
        return change, local, {"objective": objective}

    def server_step(self, key, server, uplink):
        """Add the mean change, or take a step with it."""
        del key
        parameters, state = server
        if self.server_optimizer is None:
            return Server(optax.apply_updates(parameters, uplink), state)
        gradient = jax.tree.map(jnp.negative, uplink)
        updates, state = self.server_optimizer.update(gradient, state, parameters)
        return Server(optax.apply_updates(parameters, updates), state)

    def _trained(
        self, key: Key[Array, ""], shared: PyTree, data: Samples, steps: int
    ) -> tuple[PyTree, Float[Array, ""]]:
        """ONE client's parameters after some steps from the shared ones, and the first loss."""
        draw_key, loss_key = jax.random.split(key)

        def step(carry, index):
            parameters, state = carry
            rows = self._rows(draw_key, data, index)
            value, gradient = jax.value_and_grad(self._loss)(
                parameters, data, rows, jax.random.fold_in(loss_key, index)
            )
            gradient = jax.tree.map(
                lambda g, w, origin: g + self.proximal.astype(g.dtype) * (w - origin),
                gradient, parameters, shared,
            )  # fmt: skip
            updates, state = self.client_optimizer.update(gradient, state, parameters)
            updates = jax.tree.map(lambda u: self.step_size.astype(u.dtype) * u, updates)
            return (optax.apply_updates(parameters, updates), state), value

        start = shared, self.client_optimizer.init(shared)
        (parameters, _), losses = jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))
        return parameters, losses[0]

    def _rows(
        self, key: Key[Array, ""], data: Samples, step: Int[Array, ""]
    ) -> Int[Array, " b"] | None:
        """Which samples a step is about; None for all."""
        if self.batch_size is None:
            return None
        samples, count = len(data.values), data.count.astype(jnp.int32)
        steps_per_epoch = jnp.maximum(count // self.batch_size, 1)
        lots = jax.random.uniform(jax.random.fold_in(key, step // steps_per_epoch), (samples,))
        order = jnp.argsort(jnp.where(jnp.arange(samples) < count, lots, jnp.inf))
        first = step % steps_per_epoch * self.batch_size
        # Should the batch be too large for a number of samples that was not known in time, some
        # come twice, but never padding.
        return order[(first + jnp.arange(self.batch_size)) % count]

    def _loss(self, parameters, data, rows, key):
        model = self.model_of(parameters)
        if rows is not None:
            return self.loss(model, data.values[rows], key)
        # One by one, as a mean over the batch would be one over the padding, too; a real sample in
        # place of the padding, because losses of zeros may have no derivative.
        mask = data.mask
        samples = jnp.where(mask[:, None] > 0, data.values, data.values[0])
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(samples)))
        losses = jax.vmap(lambda x, key: self.loss(model, x[None], key))(samples, keys)
        return jnp.sum(mask * losses) / data.count

    # --- result --------------------------------------------------------------------------------

    def client_result(self, downlink, local, data):
        """The client's own, fine-tuned model; nothing without fine-tuning."""
        if not self.fine_tuning_steps:
            return ()
        key = jax.random.key(local)
        return self._all(self._trained(key, downlink, data, self.fine_tuning_steps)[0])

    def shared_result(self, server):
        """The model's arrays."""
        return self._all(server.parameters)

    # -------------------------------------------------------------------------------------------

    def _parameters(self, arrays: PyTree) -> PyTree:
        return eqx.filter(arrays, eqx.is_inexact_array)

    def _all(self, parameters: PyTree) -> PyTree:
        """With the arrays that are no parameters."""
        return eqx.combine(parameters, self.arrays)


def _is_none(node: object) -> bool:
    return node is None


def _described(tree: PyTree) -> str:
    """In one line, arrays as their type and shape."""
    return " ".join(eqx.tree_pformat(tree).split())


def _check_parameters(name: str, parameters: PyTree) -> None:
    leaves = jax.tree.leaves(parameters)
    if not leaves:
        raise ValueError(f"{name}: wanted parameters, floating point arrays, got none")
    for path, leaf in jax.tree.leaves_with_path(parameters):
        where = jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(f"{name}: wanted real parameters, got {leaf.dtype} at {where}")
        if not isinstance(leaf, Tracer) and not bool(jnp.isfinite(leaf).all()):
            raise ValueError(f"{name}: NaN or infinite parameters at {where}")


def _check_optimizer(name: str, given: object) -> None:
    if not isinstance(given, optax.GradientTransformation):
        raise ValueError(f"{name}: wanted an optax.GradientTransformation, got {given!r}")


def _check_count(name: str, given: object, *, least: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise ValueError(f"{name}: wanted a whole number of at least {least}, got {given!r}")


def _check_factor(name: str, given) -> None:
    if isinstance(given, Tracer):
        return
    values = np.asarray(given)
    if values.dtype.kind not in "fiu" or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"{name}: wanted a finite number of at least 0, got {given!r}")
