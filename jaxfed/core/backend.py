"""How clients are mapped, and how what they send is reduced: one after the other, at once, spread.

Every backend computes the same numbers up to the order of floating-point sums, because clients
are told apart by their ids and never by their places.
"""

import abc
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any, ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxfed.core.buckets import in_order, layout_of, split, unlike
from jaxfed.core.checks import (
    check_instance,
    check_name,
    check_whole,
    is_list,
    is_whole,
    refuse,
    shown,
)
from jaxfed.core.reduction import (
    Part,
    Reduction,
    additive,
    combined,
    each,
    joined,
    over_devices,
    separated,
)

AXIS = "clients"
Device = Any  # type checkers take jax.Device for a variable

# One client's work: (what all clients share, what is this client's own) -> (its contributions to
# what is reduced over clients, what the client keeps).
Work = Callable[[PyTree, PyTree], tuple[PyTree[Reduction], PyTree]]


class Backend(eqx.Module):
    """Maps one client's work over all clients and reduces what they send."""

    apart: ClassVar[bool] = False
    """Whether `fit` is to run each client's work, and the server's, as a program of its own."""

    @property
    @abc.abstractmethod
    def multiple(self) -> int:
        """Client counts are padded to a multiple of this."""

    @property
    @abc.abstractmethod
    def gathers(self) -> bool:
        """Whether picking out a round's participants is cheaper than masking the others."""

    @property
    @abc.abstractmethod
    def processes(self) -> int:
        """How many processes it spreads clients over."""

    @property
    @abc.abstractmethod
    def sharding(self) -> NamedSharding | None:
        """Where clients of several processes lie; None for a backend that cannot have them."""

    @abc.abstractmethod
    def over_parts(
        self, work: Work, shared: PyTree, parts: tuple[PyTree, ...]
    ) -> tuple[PyTree[Reduction], tuple[PyTree, ...]]:
        """Run `work` for each client of each part.

        Args:
            work: one client's work.
            shared: passed to each client as it is.
            parts: rectangular trees, in each leading axis = its clients, at least one.

        Returns:
            The contributions of all, reduced, and what the clients of each part keep.
        """

    @final
    def map_reduce(
        self, work: Work, shared: PyTree, own: PyTree
    ) -> tuple[PyTree[Reduction], PyTree]:
        """Run `work` for each client.

        Args:
            work: one client's work.
            shared: passed to each client as it is.
            own: leading axis = clients, or in buckets.

        Returns:
            The reduced contributions, and what the clients keep (leading axis = clients; in buckets
            where its shape differs between them).

        Raises:
            ValueError: if contributions of clients in different buckets do not add up.
        """
        reduced, kept = self.over_parts(work, shared, split(own))
        return reduced, in_order(layout_of(own), kept)

    @final
    def map(self, work: Callable[[PyTree, PyTree], PyTree], shared: PyTree, own: PyTree) -> PyTree:
        """What each client's `work(shared, own)` gives, leading axis = clients."""
        return self.map_reduce(lambda *arguments: (None, work(*arguments)), shared, own)[1]


def collect(
    backend: Backend, work: Callable[[PyTree, PyTree], tuple[PyTree[Part], PyTree]],
    shared: PyTree, own: PyTree, gathering: int | slice | Array,
) -> tuple[PyTree[Part], PyTree]:  # fmt: skip
    """Map work over clients that send contributions of any kind, gathered ones included.

    Args:
        backend: how clients are mapped.
        work: one client's work: `(shared, own) -> (contributions, kept)`.
        shared: passed to each client as it is.
        own: leading axis = clients, or in buckets.
        gathering: whose parts are gathered: of so many clients, from the first, or of those that
            are indexed.

    Returns:
        The message, reduced, and what the clients keep (leading axis = clients).

    Raises:
        ValueError: if what is gathered differs in its shape between buckets.
    """

    def split(shared, own):
        sent, kept = work(shared, own)
        summands, gathered = separated(sent)
        # What is gathered stays where it was made, like what the clients keep.
        return summands, (gathered, kept)

    reduced, (gathered, kept) = backend.map_reduce(split, shared, own)
    if layout_of(gathered) is not None:
        raise unlike("gathered")
    which = slice(gathering) if isinstance(gathering, int) else gathering
    return joined(reduced, jax.tree.map(lambda x: x[which], gathered)), kept


def _processes(devices: Iterable[Device]) -> int:
    return len({device.process_index for device in devices})


class _HereAlone(Backend):
    """Clients that are not spread over devices."""

    @property
    @final
    def multiple(self):
        return 1

    @property
    @final
    def processes(self):
        return 1

    @property
    @final
    def sharding(self):
        return None

    @property
    @final
    def gathers(self):
        return True


class _Vmap(_HereAlone):
    def over_parts(self, work, shared, parts):
        return _in_turn(partial(_at_once, work, shared), parts)


def _at_once(work: Work, shared: PyTree, own: PyTree) -> tuple[PyTree[Reduction], PyTree]:
    if _length(own) == 1:  # which takes longer as a batch of one
        alone = work(shared, jax.tree.map(lambda x: x[0], own))
        sent, kept = jax.tree.map(lambda x: jnp.asarray(x)[None], alone)
    else:
        sent, kept = jax.vmap(work, in_axes=(None, 0))(shared, own)
    return each(lambda part: part.over_clients(), sent), kept


def _in_turn(
    function: Callable[[PyTree], tuple[PyTree[Reduction], PyTree]], parts: tuple[PyTree, ...]
) -> tuple[PyTree[Reduction], tuple[PyTree, ...]]:
    """One part after the other, with one result."""
    sent, kept = zip(*map(function, parts), strict=True)
    if len(sent) == 1:
        return sent[0], kept
    sent = tuple(map(additive, sent))
    if any(_described(each) != _described(sent[0]) for each in sent):
        raise unlike("sent")
    return reduce(combined, sent), kept


def _described(tree: PyTree) -> tuple:
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


class _Separate(_HereAlone):
    apart = True

    def over_parts(self, work, shared, parts):
        return _Vmap().over_parts(work, shared, parts)


class _Chunked(_HereAlone):
    size: int = eqx.field(static=True)
    remembered: tuple[str, ...] = eqx.field(static=True, default=())  # for derivatives, by name

    def over_parts(self, work, shared, parts):
        return _in_turn(partial(self._one, work, shared), parts)

    def _one(self, work, shared, own):
        clients = _length(own)
        if clients <= self.size:
            return _at_once(work, shared, own)
        size = _block(clients, self.size)
        full = clients // size * size
        # A scan over blocks that combines as it goes: only one block's messages exist at a time.
        blocks = jax.tree.map(lambda x: x[:full].reshape(full // size, size, *x.shape[1:]), own)
        one = jax.tree.map(lambda x: x[:1], own)
        sent = jax.eval_shape(lambda *given: additive(_at_once(work, *given)[0]), shared, one)

        @partial(
            jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*self.remembered)
        )
        def step(total, block):
            part, kept = _at_once(work, shared, block)
            return combined(total, part), kept

        total, kept = jax.lax.scan(step, each(lambda part: part.neutral(), sent), blocks)
        kept = jax.tree.map(lambda x: x.reshape(full, *x.shape[2:]), kept)
        if full < clients:
            rest = jax.tree.map(lambda x: x[full:], own)
            part, last = _at_once(work, shared, rest)
            total = combined(total, part)
            kept = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), kept, last)
        return total, kept


# Measured on a processor with 2 MiB of cache a core: clients' data in a block, the least
# number of clients that is worth one, and how many blocks there must be.
BLOCK_BYTES, BLOCK_CLIENTS, BLOCKS = 2**20, 64, 4


class _Auto(_HereAlone):
    def over_parts(self, work, shared, parts):
        return _in_turn(partial(self._one, work, shared), parts)

    def _one(self, work, shared, own):
        clients = _length(own)
        each = sum(x.size // clients * x.dtype.itemsize for x in jax.tree.leaves(own))
        size = BLOCK_BYTES // max(each, 1)
        few = size < BLOCK_CLIENTS or clients < BLOCKS * size
        if few or jax.default_backend() != "cpu":
            return _at_once(work, shared, own)
        reduced, (kept,) = _Chunked(size).over_parts(work, shared, (own,))
        return reduced, kept


def _block(clients: int, most: int) -> int:
    """The size of blocks: one that leaves no rest, if there is any from half the most allowed.

    A rest is a second program beside that of the blocks, and takes copies of everything.
    """
    for size in range(most, most // 2, -1):
        if clients % size == 0:
            return size
    return most


def _on_device(inner: Backend, work: Work, axis: str, shared: PyTree, parts: tuple[PyTree, ...]):
    """What one device does: its own clients by the inner backend, then one all-reduce."""
    sent, kept = inner.over_parts(work, shared, parts)
    return over_devices(sent, axis), kept


class _Shard(Backend):
    mesh: Mesh = eqx.field(static=True)
    axis: str = eqx.field(static=True)
    inner: Backend

    @property
    def multiple(self):
        return self.mesh.shape[self.axis]

    @property
    def processes(self):
        return _processes(self.mesh.devices.flat)

    @property
    def sharding(self):
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    @property
    def gathers(self):
        return False

    def over_parts(self, work, shared, parts):
        along = PartitionSpec(self.axis)
        return jax.shard_map(
            partial(_on_device, self.inner, work, self.axis),
            mesh=self.mesh,
            in_specs=(PartitionSpec(), along),
            out_specs=(PartitionSpec(), along),
            check_vma=False,
        )(shared, parts)


class _Pmap(Backend):
    devices: tuple[Device, ...] = eqx.field(static=True)
    inner: Backend

    @property
    def multiple(self):
        return len(self.devices)

    @property
    def processes(self):
        return _processes(self.devices)

    @property
    def sharding(self):
        return None

    @property
    def gathers(self):
        return False

    def over_parts(self, work, shared, parts):
        count = self.multiple
        parts = jax.tree.map(lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), parts)
        # As one argument: of two, JAX (0.11 at least) takes these axes for those of two leaves
        # where the arguments have as many, though `shared` has none.
        total, kept = jax.pmap(
            lambda both: _on_device(self.inner, work, AXIS, *both),
            axis_name=AXIS,
            in_axes=((None, 0),),
            out_axes=(None, 0),
            devices=self.devices,
        )((shared, parts))
        return total, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)


def in_blocks(backend: Backend, own: PyTree, *remembered: str) -> Backend:
    """The same numbers, a tenth of the clients at a time, to keep little for their derivatives.

    Clients that are spread over devices stay as they are, and so do a megabyte of data or less.

    Args:
        backend: how the clients would be mapped.
        own: what they have, leading axis = clients, or in buckets.
        remembered: names, as of `jax.ad_checkpoint.checkpoint_name`, of what is kept; all else is
            computed again.
    """
    if backend.multiple > 1 or backend.processes > 1:
        return backend
    sizes = [_length(part) for part in split(own)]
    each = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(own)) / sum(sizes)
    size = max(math.ceil(max(sizes) / 10), int(BLOCK_BYTES / max(each, 1)))
    if isinstance(backend, _Chunked):
        size = min(size, backend.size)
    return _Chunked(size, remembered) if size < max(sizes) else backend


def _length(own: PyTree) -> int:
    return jax.tree.leaves(own)[0].shape[0]


def vmap() -> Backend:
    """All clients at once on one device."""
    return _Vmap()


def separate() -> Backend:
    """One client after the other, each by a program of its own, and the server by another.

    In `fit`, the numbers are bit for bit those of `jaxfed.deploy` on separate machines of one kind:
    programs of many clients round otherwise than those of one. It takes longer than `vmap`, which
    it is within `rollout` and `grid`.
    """
    return _Separate()


def chunked(size: int) -> Backend:
    """Clients in blocks of at most `size`, one block after the other, in bounded memory.

    A number of clients that some number from half of `size` to `size` divides needs least: a
    remainder is computed by itself, from copies.

    Raises:
        ValueError: if `size` is not a positive whole number.
    """
    check_whole("chunked size", size)
    return _Chunked(int(size))


def auto() -> Backend:
    """All clients at once, or on a processor blocks of them, as many as its cache holds.

    Blocks are taken of many small clients: where a block's data have a megabyte, at least 64
    clients fit into one and there are at least four of them. Numbers differ from those of `vmap`
    by the order of sums only. On accelerators, and in federations that are not large, it is `vmap`.
    """
    return _Auto()


def pmap(devices: int | Sequence[Device] | None = None, inner: Backend | None = None) -> Backend:
    """Clients spread over devices by `jax.pmap`, with one all-reduce a round.

    Args:
        devices: how many of the local devices, or which; all of them by default.
        inner: how each device maps its own clients; `vmap()` by default.

    Raises:
        ValueError: if there are not that many devices, or `inner` is no backend.
    """
    return _Pmap(_devices("devices", devices, jax.local_devices()), _inner(inner))


def shard(
    mesh: Mesh | int | None = None, *, axis: str | None = None, inner: Backend | None = None
) -> Backend:
    """Clients spread over a device mesh by `jax.shard_map`, with one all-reduce a round.

    Works across processes too, if the mesh does. Clients are then those of
    `Clients.from_process_local`, or else every process has all of them, the same ones: a run in
    which they differ is refused, as far as they are known outside of compiled functions.

    Args:
        mesh: a mesh, or how many of all devices; all of them by default.
        axis: the mesh's axis for the clients; may be left out if the mesh has only one.
        inner: how each device maps its own clients; `vmap()` by default.

    Raises:
        ValueError: if there are not that many devices, the mesh has no such axis, or it has
            several and none is named, or `inner` is no backend.
    """
    if not isinstance(mesh, Mesh):
        mesh = Mesh(np.asarray(_devices("mesh", mesh, jax.devices())), (AXIS,))
    if axis is None:
        if len(mesh.axis_names) != 1:
            raise ValueError(
                f"axis: the mesh has the axes {mesh.axis_names}; name the one for the clients"
            )
        axis = mesh.axis_names[0]
    check_name("axis", axis, mesh.axis_names)
    return _Shard(mesh, str(axis), _inner(inner))


def _inner(inner: Backend | None) -> Backend:
    if inner is None:
        return vmap()
    check_instance("inner", inner, Backend, "one of jaxfed.backend")
    return inner


def _devices(
    name: str, wanted: int | Sequence[Device] | None, available: Sequence[Device]
) -> tuple[Device, ...]:
    if wanted is None:
        return tuple(available)
    if is_whole(wanted):
        if not 0 < wanted <= len(available):
            raise ValueError(
                f"{name}: {shown(wanted)} were asked for, there are {len(available)} "
                f"({available[0].platform})"
            )
        return tuple(available[: int(wanted)])
    # Not by a set: what cannot be hashed is no device.
    if not is_list(wanted) or not wanted or any(each not in available for each in wanted):
        raise refuse(name, f"how many of {len(available)} devices, or a list of some", wanted)
    return tuple(wanted)
