"""What training a model on clients' samples needs, whatever the algorithm."""

from collections.abc import Callable, Hashable
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxfed.core.clients.samples import Samples, at_least_single
from jaxfed.core.common.checks import check_count, host_array, refuse
from jaxfed.core.common.processes import finite, looked_at
from jaxfed.core.common.shuffle import shuffled
from jaxfed.core.contract.algorithm import Algorithm, ClientsLike, Personalized
from jaxfed.core.contract.fixed_point import DifferentiatedThrough, without_batches

Start = Personalized | None
Loss = Callable[[Any, Float[Array, "b d"], Key[Array, ""]], Float[Array, ""]]


class Training(Algorithm, DifferentiatedThrough):
    """An algorithm that trains a model on minibatches of the clients' samples.

    A model is any pytree. Its floating point arrays are its parameters; all its arrays are traced
    leaves. See `taken_apart` for the first two fields.
    """

    arrays: PyTree
    others: tuple[Any, ...] = eqx.field(static=True)  # the model's leaves that are no arrays
    loss: Loss = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)

    @final
    def model_of(self, arrays: PyTree) -> Any:
        """The model with these arrays, such as those of a result.

        Args:
            arrays: the model's arrays; what is None of them is taken from the first model.
        """
        leaves, structure = jax.tree.flatten(eqx.combine(arrays, self.arrays), is_leaf=_is_none)
        whole = (b if a is None else a for a, b in zip(leaves, self.others, strict=True))
        return jax.tree.unflatten(structure, whole)

    @final
    def through(self) -> Algorithm:
        """This one, with all samples in every step.

        Raises:
            ValueError: where steps take some samples at random.
        """
        return without_batches(self, self.batch_size)

    @final
    def check(self, clients: ClientsLike, start: Personalized | None) -> None:
        """Refuse data, a loss or a warm start that do not fit the model.

        Raises:
            ValueError: as said above, and for a batch larger than the smallest client.
        """
        if not isinstance(clients.parts[0], Samples):
            raise ValueError(
                f"clients: {type(self).__name__} needs Clients.from_samples, got data of type "
                f"{type(clients.parts[0]).__name__}"
            )
        values = clients.parts[0].values
        if self.batch_size is not None:
            smallest = min(
                part.values.shape[-2]
                if isinstance(part.count, Tracer)
                else int(looked_at(part.count).min())
                for part in clients.parts
            )
            if self.batch_size > smallest:
                raise ValueError(
                    f"batch_size: wanted at most the smallest client's {smallest} samples, "
                    f"got {self.batch_size}"
                )
        self._check_loss(values)
        if start is not None:
            self._check_arrays("warm_start: wanted as shared part", start.shared)
            if jax.tree.leaves(start.local):
                self._check_arrays(
                    "warm_start: wanted as local part", start.local, len(clients.ids)
                )

    @final
    def _check_arrays(self, wanted: str, given: PyTree, clients: int | None = None) -> None:
        """Refuse what is not like the model's arrays, or, with `clients`, one such for each."""
        axis = () if clients is None else (clients,)
        alike = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*axis, *x.shape), x.dtype), self.arrays
        )
        shapes, wanted_shapes = (
            jax.tree.map(lambda x: (x.shape, x.dtype), eqx.filter(tree, _is_array_like))
            for tree in (given, alike)
        )
        if shapes != wanted_shapes:
            each = "" if clients is None else f" with a leading axis of the {clients} clients"
            raise ValueError(
                f"{wanted} arrays like the model's{each}, {described(self.arrays)}, "
                f"got {described(given)}"
            )
        check_parameters(wanted.split(":")[0], parameters_of(given))

    @final
    def _check_loss(self, values: Array) -> None:
        shape = (1 if self.batch_size is None else self.batch_size, values.shape[-1])
        batch = jax.ShapeDtypeStruct(shape, at_least_single(values.dtype))
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
            raise ValueError(f"loss: wanted one real number for a batch, got {described(out)}")

    @final
    def batches(
        self, key: Key[Array, ""], data: Samples, steps: int
    ) -> tuple[Int[Array, " steps"], Int[Array, "steps b"] | None]:
        """Numbers of some steps, and which samples each is about, None for all.

        Samples are drawn without replacement until too few are left, then from all again.
        """
        numbers = jnp.arange(steps, dtype=jnp.int32)
        if self.batch_size is None:
            return numbers, None
        count = data.count.astype(jnp.int32)
        epoch, step = jnp.divmod(numbers, jnp.maximum(count // self.batch_size, 1))
        # Should the batch be too large for a number of samples that was not known in time, some
        # come twice, but never padding.
        places = (step[:, None] * self.batch_size + jnp.arange(self.batch_size)) % count
        rows = shuffled(jax.vmap(lambda i: jax.random.fold_in(key, i))(epoch), places, count)
        return numbers, rows

    @final
    def loss_of(
        self,
        parameters: PyTree,
        data: Samples,
        rows: Int[Array, " b"] | None,
        key: Key[Array, ""],
    ) -> Float[Array, ""]:
        """ONE client's loss of these of its samples."""
        model = self.model_of(parameters)
        dtype = data.count.dtype
        if rows is not None:
            return self.loss(model, data.values[rows].astype(dtype), key)
        # One by one, as a mean over the batch would be one over the padding, too; a real sample in
        # place of the padding, because losses of zeros may have no derivative.
        mask = data.mask
        samples = jnp.where(mask[:, None] > 0, data.values, data.values[0]).astype(dtype)
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(samples)))
        losses = jax.vmap(lambda x, key: self.loss(model, x[None], key))(samples, keys)
        return jnp.sum(mask * losses) / data.count

    @final
    def whole(self, parameters: PyTree) -> PyTree:
        """With the arrays that are no parameters."""
        return eqx.combine(parameters, self.arrays)


def descend(
    optimizer: optax.GradientTransformation,
    step_size: Array,
    gradient: PyTree,
    state: PyTree,
    parameters: PyTree,
) -> tuple[PyTree, PyTree]:
    """Parameters and the optimizer's state after a step; the step size is a factor on updates."""
    updates, state = optimizer.update(gradient, state, parameters)
    return plus(parameters, step_size, updates), state


def plus(tree: PyTree, factor: Array, other: PyTree) -> PyTree:
    """The first tree plus so much of the other."""
    return jax.tree.map(lambda a, b: a + factor.astype(a.dtype) * b, tree, other)


def taken_apart(
    model: PyTree, loss: Loss, batch_size: int | None
) -> tuple[PyTree, tuple[Any, ...]]:
    """A model's arrays, and its other leaves.

    Raises:
        ValueError: for a model that has no parameters, not finite ones or leaves that no program
            can be compiled for, what is no loss, and a batch size that is not a positive whole
            number.
    """
    if not callable(loss):
        raise refuse("loss", "a function of model, batch and key", loss)
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

    model = jax.tree.map(array, model)
    arrays, others = eqx.partition(model, eqx.is_array)
    check_parameters("model", parameters_of(arrays))
    kept = tuple(jax.tree.leaves(others, is_leaf=_is_none))
    for leaf in kept:
        if not isinstance(leaf, Hashable):
            raise refuse("model", wanted, leaf)
    return arrays, kept


def parameters_of(arrays: PyTree) -> PyTree:
    """The arrays that are trained, None in place of the others."""
    return eqx.filter(arrays, eqx.is_inexact_array)


def described(tree: PyTree) -> str:
    """In one line, arrays as their type and shape."""
    return " ".join(eqx.tree_pformat(tree).split())


def check_parameters(name: str, parameters: PyTree) -> None:
    """Refuse parameters that are none, complex or not finite."""
    leaves = jax.tree.leaves(parameters)
    if not leaves:
        raise ValueError(f"{name}: wanted parameters, floating point arrays, got none")
    for path, leaf in jax.tree.leaves_with_path(parameters):
        where = jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise ValueError(f"{name}: wanted real parameters, got {leaf.dtype} at {where}")
        if not isinstance(leaf, Tracer) and not finite(leaf):
            raise ValueError(f"{name}: NaN or infinite parameters at {where}")


def _is_none(node: object) -> bool:
    return node is None


def _is_array_like(node: object) -> bool:
    return isinstance(node, jax.ShapeDtypeStruct) or eqx.is_array(node)
