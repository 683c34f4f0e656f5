"""How clients are mapped, and how what they send is reduced: one after the other, at once, spread.

Every backend computes the same numbers up to the order of floating-point sums, because clients
are told apart by their ids and never by their places.
"""

import abc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, PyTree

AXIS = "clients"

# One client's work: (what all clients share, what is this client's own) ->
# ({"sum": ..., "max": ..., "stack": ..., "gram": ...}, what the client keeps).
Work = Callable[[PyTree, PyTree], tuple[dict[str, PyTree], PyTree]]
# What work sends that only keeps something.
NOTHING: dict[str, PyTree] = {"sum": (), "max": (), "stack": (), "gram": ()}


class Backend(eqx.Module):
    """Maps one client's work over all clients and reduces what they send."""

    @property
    @abc.abstractmethod
    def multiple(self) -> int:
        """Client counts are padded to a multiple of this."""

    @property
    @abc.abstractmethod
    def gathers(self) -> bool:
        """Whether picking out a round's participants is cheaper than masking the others."""

    @abc.abstractmethod
    def map_reduce(
        self, work: Work, shared: PyTree, own: PyTree
    ) -> tuple[dict[str, PyTree], PyTree]:
        """Run `work` for each client.

        Args:
            work: one client's work.
            shared: passed to each client as it is.
            own: leading axis = clients.

        Returns:
            The reduced contributions (only `"stack"` with the client axis; `"gram"` is the sum
            of the factors' products with themselves) and what the clients keep (leading axis =
            clients).
        """


def _total(x: Array) -> Array:
    """The sum over clients."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.sum(0)
    # XLA's sum over a leading axis is up to 14 times slower on a processor than this product.
    ones = jnp.ones(len(x), x.dtype)
    return jnp.tensordot(ones, x, 1, precision=jax.lax.Precision.HIGHEST)


def reduced(sent: dict[str, PyTree]) -> dict[str, PyTree]:
    """What the messages of all clients come to, by the kind of their reduction."""
    return {
        "sum": jax.tree.map(_total, sent["sum"]),
        "max": jax.tree.map(lambda x: x.max(0), sent["max"]),
        "gram": jax.tree.map(_gram, sent["gram"]),
        "stack": sent["stack"],
    }


def _gram(factors: Float[Array, "m d k"]) -> Float[Array, "d d"]:
    # One product of all factors side by side: the clients' own products are never formed.
    wide = jnp.moveaxis(factors, 0, 1).reshape(factors.shape[1], -1)
    return jnp.matmul(wide, wide.T, precision=jax.lax.Precision.HIGHEST)


class _Vmap(Backend):
    @property
    def multiple(self):
        return 1

    @property
    def gathers(self):
        return True

    def map_reduce(self, work, shared, own):
        if _length(own) == 1:  # which takes longer as a batch of one
            alone = work(shared, jax.tree.map(lambda x: x[0], own))
            sent, kept = jax.tree.map(lambda x: x[None], alone)
        else:
            sent, kept = jax.vmap(work, in_axes=(None, 0))(shared, own)
        return reduced(sent), kept


class _Chunked(Backend):
    size: int = eqx.field(static=True)

    @property
    def multiple(self):
        return 1

    @property
    def gathers(self):
        return True

    def map_reduce(self, work, shared, own):
        clients = _length(own)
        if clients <= self.size:
            return _Vmap().map_reduce(work, shared, own)
        full = clients // self.size * self.size
        # A scan over blocks that adds as it goes: only one block's messages exist at a time.
        blocks = jax.tree.map(
            lambda x: x[:full].reshape(full // self.size, self.size, *x.shape[1:]), own
        )
        one = jax.tree.map(lambda x: x[:1], own)
        sent, _ = jax.eval_shape(partial(_Vmap().map_reduce, work), shared, one)
        first = {
            kind: jax.tree.map(lambda x, start=start: jnp.full(x.shape, start, x.dtype), sent[kind])
            for kind, start in (("sum", 0), ("max", -jnp.inf), ("gram", 0))
        }

        @jax.checkpoint
        def step(total, block):
            part, kept = _Vmap().map_reduce(work, shared, block)
            return _combined(total, part), (part["stack"], kept)

        total, (stack, kept) = jax.lax.scan(step, first, blocks)
        stack, kept = jax.tree.map(lambda x: x.reshape(full, *x.shape[2:]), (stack, kept))
        if full < clients:
            rest = jax.tree.map(lambda x: x[full:], own)
            part, last = _Vmap().map_reduce(work, shared, rest)
            total = _combined(total, part)
            stack, kept = jax.tree.map(
                lambda a, b: jnp.concatenate([a, b]), (stack, kept), (part["stack"], last)
            )
        return {**total, "stack": stack}, kept


def _combined(total: dict[str, PyTree], part: dict[str, PyTree]) -> dict[str, PyTree]:
    return {
        "sum": jax.tree.map(jnp.add, total["sum"], part["sum"]),
        "max": jax.tree.map(jnp.maximum, total["max"], part["max"]),
        "gram": jax.tree.map(jnp.add, total["gram"], part["gram"]),
    }


def _spread(launch: Callable, count: int, work: Work, shared: PyTree, own: PyTree):
    """Run `launch(work, shared, own)` over `count` devices, keeping empty arrays out of it.

    Arrays without elements (no own components, say) crash the compiler of jaxlib 0.11 on their way
    to the devices and back; they are made anew on the other side.
    """
    shapes = jax.eval_shape(partial(_Vmap().map_reduce, work), shared, own)
    shared_shapes = jax.eval_shape(lambda: shared)
    own_shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((len(x) // count, *x.shape[1:]), x.dtype), own
    )

    def device_work(inner, axis, shared, own):
        shared, own = completed(shared, shared_shapes), completed(own, own_shapes)
        return nonempty(_across_devices(inner, work, axis, shared, own))

    total, (stack, kept) = launch(device_work, nonempty(shared), nonempty(own))
    return completed(({**total, "stack": stack}, kept), shapes)


def nonempty(tree: PyTree) -> PyTree:
    """The tree with None in place of arrays without elements, which JAX cannot always reshape."""
    return jax.tree.map(lambda x: x if x.size else None, tree)


def completed(tree: PyTree, shapes: PyTree) -> PyTree:
    """The tree with the arrays that `nonempty` has left out; inverse of it."""

    def complete(x, shape):
        return jnp.zeros(shape.shape, shape.dtype) if x is None and shape is not None else x

    return jax.tree.map(complete, tree, shapes, is_leaf=lambda x: x is None)


def _across_devices(inner: Backend, work: Work, axis: Any, shared: PyTree, own: PyTree):
    """What one device does: its own clients by the inner backend, then one all-reduce."""
    sent, kept = inner.map_reduce(work, shared, own)
    # The stack stays where it was made, like what the clients keep.
    total = {
        "sum": jax.lax.psum(sent["sum"], axis),
        "gram": jax.lax.psum(sent["gram"], axis),
        "max": jax.tree.map(lambda x: _pmax(x, axis), sent["max"]),
    }
    return total, (sent["stack"], kept)


def _pmax(value, axis):
    # lax.pmax has no derivative; the maximum of the gathered values has.
    return jax.lax.all_gather(value, axis).max(0)


class _Shard(Backend):
    mesh: Mesh = eqx.field(static=True)
    axis: str = eqx.field(static=True)
    inner: Backend

    @property
    def multiple(self):
        return self.mesh.shape[self.axis]

    @property
    def gathers(self):
        return False

    def map_reduce(self, work, shared, own):
        along = PartitionSpec(self.axis)

        def launch(device_work, shared, own):
            return jax.shard_map(
                partial(device_work, self.inner, self.axis),
                mesh=self.mesh,
                in_specs=(PartitionSpec(), along),
                out_specs=(PartitionSpec(), along),
                check_vma=False,
            )(shared, own)

        return _spread(launch, self.multiple, work, shared, own)


class _Pmap(Backend):
    devices: tuple[jax.Device, ...] = eqx.field(static=True)
    inner: Backend

    @property
    def multiple(self):
        return len(self.devices)

    @property
    def gathers(self):
        return False

    def map_reduce(self, work, shared, own):
        count = self.multiple

        def launch(device_work, shared, own):
            parts = jax.tree.map(lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), own)
            total, kept = jax.pmap(
                partial(device_work, self.inner, AXIS),
                axis_name=AXIS,
                in_axes=(None, 0),
                out_axes=(None, 0),
                devices=self.devices,
            )(shared, parts)
            return total, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)

        return _spread(launch, count, work, shared, own)


def _length(own: PyTree) -> int:
    return jax.tree.leaves(own)[0].shape[0]


def vmap() -> Backend:
    """All clients at once on one device."""
    return _Vmap()


def chunked(size: int) -> Backend:
    """Clients in blocks of `size`, one block after the other, in bounded memory.

    Raises:
        ValueError: if `size` is not a positive whole number.
    """
    if not isinstance(size, int | np.integer) or size <= 0:
        raise ValueError(f"chunked size: wanted a positive whole number, got {size!r}")
    return _Chunked(int(size))


def pmap(
    devices: int | Sequence[jax.Device] | None = None, inner: Backend | None = None
) -> Backend:
    """Clients spread over devices by `jax.pmap`, with one all-reduce a round.

    Args:
        devices: how many of the local devices, or which; all of them by default.
        inner: how each device maps its own clients; `vmap()` by default.

    Raises:
        ValueError: if there are not that many devices.
    """
    return _Pmap(_devices(devices, jax.local_devices()), inner or vmap())


def shard(
    mesh: Mesh | int | None = None, *, axis: str | None = None, inner: Backend | None = None
) -> Backend:
    """Clients spread over a device mesh by `jax.shard_map`, with one all-reduce a round.

    Works across processes too, if the mesh does.

    Args:
        mesh: a mesh, or how many of all devices; all of them by default.
        axis: the mesh's axis for the clients; may be left out if the mesh has only one.
        inner: how each device maps its own clients; `vmap()` by default.

    Raises:
        ValueError: if there are not that many devices, the mesh has no such axis, or it has
            several and none is named.
    """
    if not isinstance(mesh, Mesh):
        mesh = Mesh(np.asarray(_devices(mesh, jax.devices())), (AXIS,))
    if axis is None:
        if len(mesh.axis_names) != 1:
            raise ValueError(
                f"axis: the mesh has the axes {mesh.axis_names}; name the one for the clients"
            )
        axis = mesh.axis_names[0]
    if axis not in mesh.axis_names:
        raise ValueError(f"axis: the mesh has the axes {mesh.axis_names}, not {axis!r}")
    return _Shard(mesh, str(axis), inner or vmap())


def _devices(
    wanted: int | Sequence[jax.Device] | None, available: Sequence[jax.Device]
) -> tuple[jax.Device, ...]:
    if wanted is None:
        return tuple(available)
    if isinstance(wanted, int | np.integer):
        if not 0 < wanted <= len(available):
            raise ValueError(
                f"devices: {wanted} were asked for, there are {len(available)} "
                f"({available[0].platform})"
            )
        return tuple(available[: int(wanted)])
    chosen = tuple(wanted)
    if not chosen or not set(chosen) <= set(available):
        raise ValueError(f"devices: wanted some of {list(available)}, got {list(chosen)}")
    return chosen
