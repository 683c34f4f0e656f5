"""The base class of algorithms that train a model on minibatches of each client's samples."""

import warnings
from collections.abc import Callable, Hashable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxfed._checks import host_array
from jaxfed._names import caller
from jaxfed.contract import Algorithm, ClientsLike, check_count, refuse, without_batches
from jaxfed.core.clients.samples import Samples, at_least_single, other_data
from jaxfed.core.clients.units import UnitsWarning, size_of
from jaxfed.core.common.processes import finite, inspectable
from jaxfed.core.common.shuffle import shuffled
from jaxfed.generative.gradient_noise import GradientNoise
from jaxfed.models.autoencoder import reconstruction_loss
from jaxfed.models.diffusion import DenoisingLoss

# Samples so many times larger or smaller than one are not what networks start from.
FAR = 30.0
Loss = Callable[[Any, Float[Array, "b d"], Key[Array, ""]], Float[Array, ""]]


class Training(Algorithm):
    """An algorithm that trains a model on minibatches of the clients' samples.

    A model is any pytree. Its floating-point arrays are its parameters; all of its arrays are
    traced leaves. `split_model` creates the first two fields.
    """

    arrays: PyTree
    others: tuple[Any, ...] = eqx.field(static=True)  # the model's leaves that are not arrays
    loss: Loss = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    gradient_noise: GradientNoise | None
    stochastic = True  # even with all samples, optimizers with momentum oscillate

    @property
    @final
    def private(self) -> bool:
        """Whether there is noise in gradients."""
        return self.gradient_noise is not None

    @final
    def model_of(self, arrays: PyTree) -> Any:
        """The model with these arrays, such as those of a result.

        Args:
            arrays: the model's arrays; where one is None, the first model's array is used.
        """
        # Where one of the two trees has a leaf, the other has None.
        leaves, structure = jax.tree.flatten(eqx.combine(arrays, self.arrays), is_leaf=_is_none)
        whole = (b if a is None else a for a, b in zip(leaves, self.others, strict=True))
        return jax.tree.unflatten(structure, whole)

    @final
    def through(self) -> Algorithm:
        """The same algorithm with all samples in every step.

        Raises:
            ValueError: if steps draw minibatches at random.
        """
        return without_batches(self, self.batch_size)

    @final
    def check(self, clients, warm_start) -> None:
        """Check that the data, the loss and the warm start fit the model.

        Raises:
            ValueError: if they do not, or a batch is larger than the smallest client.

        Warns:
            jaxfed.UnitsWarning: if samples vanish beside a corruption's noise or a network's first
                reconstructions, or these beside them.
        """
        part = clients.parts[0]
        if not isinstance(part, Samples):
            raise other_data(f"Clients.from_samples for {type(self).__name__}", part)
        if self.batch_size is not None:
            smallest = min(map(_fewest, clients.parts))
            if self.batch_size > smallest:
                raise ValueError(
                    f"batch_size: wanted at most the smallest client's {smallest} samples, "
                    f"got {self.batch_size}"
                )
        self._check_loss(part.values)
        if isinstance(self.loss, DenoisingLoss):
            _warn_of_size(clients, "a corruption's noise")
        elif self.loss is reconstruction_loss:
            _warn_of_size(clients, "the output of a new network")
        if warm_start is not None:
            self._check_arrays("shared", warm_start.shared)
            if jax.tree.leaves(warm_start.local):
                self._check_arrays("local", warm_start.local, len(clients.ids))

    @final
    def _check_arrays(self, part: str, given: PyTree, clients: int | None = None) -> None:
        """Check part of a warm start against the model's arrays, or `clients` copies of them."""
        axis = () if clients is None else (clients,)
        wanted = jax.tree.map(lambda x: ((*axis, *x.shape), x.dtype), self.arrays)
        arrays = eqx.filter(given, lambda x: isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x))
        if jax.tree.map(lambda x: (x.shape, x.dtype), arrays) != wanted:
            each = "" if clients is None else f" with a leading axis of the {clients} clients"
            raise ValueError(
                f"warm_start: wanted as {part} part arrays like the model's{each}, "
                f"{_one_line(self.arrays)}, got {_one_line(given)}"
            )
        _check_parameters("warm_start", parameters_of(given))

    @final
    def _check_loss(self, values: Array | jax.ShapeDtypeStruct) -> None:
        single = self.batch_size is None or self.gradient_noise is not None
        shape = (1 if single else self.batch_size, values.shape[-1])
        batch = jax.ShapeDtypeStruct(shape, at_least_single(values.dtype))

        def loss(arrays, batch):
            return self.loss(self.model_of(arrays), batch, jax.random.key(0))

        # Only shapes and types pass through the loss; nothing is computed.
        try:
            out = jax.eval_shape(loss, self.arrays, batch)
        except Exception as error:
            raise ValueError(
                f"loss: it fails for this model and a batch of shape {shape}: {error}"
            ) from error
        if getattr(out, "shape", None) != () or not jnp.issubdtype(out.dtype, jnp.floating):
            raise ValueError(f"loss: wanted one real number for a batch, got {_one_line(out)}")

    @final
    def batches(
        self, key: Key[Array, ""], data: Samples, steps: int, *, noisy: bool
    ) -> tuple[Int[Array, " steps"], Int[Array, "steps b"] | None]:
        """The numbers of the steps, and the rows that each step uses; None for all rows.

        Rows are drawn without replacement until too few are left for another batch, then from all
        rows again; with noise from all rows in every step.
        """
        numbers = jnp.arange(steps, dtype=jnp.int32)
        if self.batch_size is None:
            return numbers, None
        count = data.count.astype(jnp.int32)
        passes = 1 if noisy else jnp.maximum(count // self.batch_size, 1)
        epoch, step = jnp.divmod(numbers, passes)
        # The modulus matters only if a traced count was too small for `check` to see: some rows
        # then come twice, but never padding.
        places = (step[:, None] * self.batch_size + jnp.arange(self.batch_size)) % count
        # Every pass has a permutation of its own, of which only these places are computed.
        rows = shuffled(jax.vmap(lambda i: jax.random.fold_in(key, i))(epoch), places, count)
        return numbers, rows

    @final
    def loss_of(
        self, parameters: PyTree, data: Samples, rows: Int[Array, " b"] | None, key: Key[Array, ""]
    ) -> Float[Array, ""]:
        """The loss of these rows of ONE client's samples."""
        model = self.model_of(parameters)
        dtype = data.count.dtype
        if rows is not None:
            return self.loss(model, data.values[rows].astype(dtype), key)
        # Sample by sample, because the mean over a batch would include the padding. Padding is
        # replaced by a real sample, because the loss of zeros may have no derivative.
        mask = data.mask
        samples = jnp.where(mask[:, None] > 0, data.values, data.values[0]).astype(dtype)
        # By row, so that a sample's random numbers do not depend on the amount of padding.
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(samples)))
        losses = jax.vmap(lambda x, key: self.loss(model, x[None], key))(samples, keys)
        return jnp.sum(mask * losses) / data.count

    @final
    def gradient_of(
        self,
        parameters: PyTree,
        data: Samples,
        rows: Int[Array, " b"] | None,
        key: Key[Array, ""],
        *,
        noisy: bool,
    ) -> tuple[Float[Array, ""], PyTree]:
        """The loss of these rows of ONE client's samples, and its gradient.

        With noise, each row's loss is that of a batch of one.
        """
        if rows is None or self.gradient_noise is None or not noisy:
            return jax.value_and_grad(self.loss_of)(parameters, data, rows, key)
        loss_key, noise_key = jax.random.split(key)
        keys = jax.vmap(lambda i: jax.random.fold_in(loss_key, i))(jnp.arange(len(rows)))
        each = jax.vmap(jax.value_and_grad(self.loss_of), (None, None, 0, 0))
        losses, gradients = each(parameters, data, rows[:, None], keys)
        return jnp.mean(losses), self.gradient_noise.mean_of(gradients, noise_key)

    @final
    def whole(self, parameters: PyTree) -> PyTree:
        """The parameters together with the model's other arrays."""
        return eqx.combine(parameters, self.arrays)


def _warn_of_size(clients: ClientsLike, what: str) -> None:
    size = size_of(clients)
    if not 1 / FAR < size < FAR:
        warnings.warn(
            f"clients: wanted samples of about size one, like {what}, got a root mean square of "
            f"{size:.3g}, from which a model may learn nothing; "
            "divide them by a constant, or standardize them with jaxfed.preprocess.Standardize",
            UnitsWarning,
            stacklevel=caller(),
        )


def optimizer_step(
    optimizer: optax.GradientTransformation,
    step_size: Array,
    gradient: PyTree,
    state: PyTree,
    parameters: PyTree,
) -> tuple[PyTree, PyTree]:
    """One step: new parameters and optimizer state. The step size scales the updates."""
    updates, state = optimizer.update(gradient, state, parameters)
    return plus(parameters, step_size, updates), state


def plus(tree: PyTree, factor: Array, other: PyTree) -> PyTree:
    """`tree + factor * other`."""
    return jax.tree.map(lambda a, b: a + factor.astype(a.dtype) * b, tree, other)


def split_model(model: PyTree, batch_size: int | None) -> tuple[PyTree, tuple[Any, ...]]:
    """Split a model into its arrays and its other leaves, and check the batch size.

    Raises:
        ValueError: if the model has no parameters, some that are not finite, or a leaf that cannot
            be compiled into a program; or if the batch size is not positive.
    """
    if batch_size is not None:
        check_count("batch_size", batch_size)
    wanted = "a pytree of arrays of numbers and of hashable objects"

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return leaf
        found = host_array("model", leaf, wanted)
        if not (jnp.issubdtype(found.dtype, jnp.number) or found.dtype == bool):
            raise refuse("model", wanted, leaf)
        return jnp.asarray(found)

    arrays, others = eqx.partition(jax.tree.map(array, model), eqx.is_array)
    _check_parameters("model", parameters_of(arrays))
    leaves = tuple(jax.tree.leaves(others, is_leaf=_is_none))
    for leaf in leaves:
        if not isinstance(leaf, Hashable):  # static fields are hashed
            raise refuse("model", wanted, leaf)
    return arrays, leaves


def parameters_of(arrays: PyTree) -> PyTree:
    """The arrays that are trained, with None in place of the others."""
    return eqx.filter(arrays, eqx.is_inexact_array)


def _check_parameters(name: str, parameters: PyTree) -> None:
    if not jax.tree.leaves(parameters):
        raise ValueError(f"{name}: wanted parameters, floating-point arrays, got none")
    for path, leaf in jax.tree.leaves_with_path(parameters):
        where = jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(f"{name}: wanted real parameters, got {leaf.dtype} at {where}")
        if not isinstance(leaf, Tracer) and not finite(leaf):
            raise ValueError(f"{name}: NaN or infinite parameters at {where}")


def _fewest(part: Samples) -> int:
    """The smallest number of samples of a client; an upper bound of it under tracing."""
    if isinstance(part.count, Tracer):
        return part.values.shape[-2]
    return int(inspectable(part.count).min())


def _one_line(tree: PyTree) -> str:
    return " ".join(eqx.tree_pformat(tree).split())


def _is_none(node: object) -> bool:
    return node is None
