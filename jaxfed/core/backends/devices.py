"""Backends that spread clients over devices, with one all-reduce per round."""

from collections.abc import Sequence
from functools import partial

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxfed._checks import check_instance, check_name, is_list, is_whole, refuse, shown
from jaxfed.core.backends.backend import AXIS, Backend, Device, Work, checked
from jaxfed.core.backends.one_device import vmap
from jaxfed.core.common.meshes import automatic
from jaxfed.core.contract.reduction import over_devices


def _on_device(inner: Backend, work: Work, axis: str, shared: PyTree, parts: tuple[PyTree, ...]):
    """One device's work: map its own clients with the inner backend, then all-reduce once."""
    sent, kept = checked(inner, work, parts, inner.over_parts(work, shared, parts))
    return over_devices(sent, axis), kept


class _Shard(Backend):
    factory = "shard"
    mesh: Mesh = eqx.field(static=True)
    axis: str = eqx.field(static=True)
    inner: Backend

    @property
    def multiple(self):
        return self.mesh.shape[self.axis]

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
            # JAX does not infer that what `Max.over_devices` makes of gathered values is the same
            # on all devices.
            check_vma=False,
        )(shared, parts)


class _Pmap(Backend):
    factory = "pmap"
    devices: tuple[Device, ...] = eqx.field(static=True)
    inner: Backend

    @property
    def multiple(self):
        return len(self.devices)

    @property
    def sharding(self):
        return None

    @property
    def gathers(self):
        return False

    def over_parts(self, work, shared, parts):
        count = self.multiple
        # The number of clients is a multiple of the devices: callers pad by `multiple`.
        parts = jax.tree.map(lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), parts)
        # Pass one argument: with two that have equally many leaves, JAX (0.11 at least) takes these
        # axes for those of the leaves, although `shared` has none.
        total, kept = jax.pmap(
            lambda both: _on_device(self.inner, work, AXIS, *both),
            axis_name=AXIS,
            in_axes=((None, 0),),
            out_axes=(None, 0),
            devices=self.devices,
        )((shared, parts))
        return total, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)


def pmap(devices: int | Sequence[Device] | None = None, inner: Backend | None = None) -> Backend:
    """Spread clients over devices with `jax.pmap`, with one all-reduce per round.

    Args:
        devices: number of local devices, or a list of devices; all local devices by default.
        inner: maps each device's own clients; `vmap()` by default.

    Raises:
        ValueError: if there are not that many devices, or `inner` is not a backend.
    """
    return _Pmap(_devices("devices", devices, jax.local_devices()), _inner(inner))


def shard(
    mesh: Mesh | int | None = None, *, axis: str | None = None, inner: Backend | None = None
) -> Backend:
    """Spread clients over a device mesh with `jax.shard_map`, with one all-reduce per round.

    The mesh may span processes. Then use clients of `Clients.from_process_local`, or give every
    process the same clients; a run refuses clients that differ between processes, as far as their
    values are known outside of compiled functions.

    Args:
        mesh: a mesh, or the number of devices; all devices by default.
        axis: the mesh's axis for the clients; optional if the mesh has only one.
        inner: maps each device's own clients; `vmap()` by default.

    Raises:
        ValueError: if there are not that many devices, the mesh lacks the axis, it has several and
            none is named, or `inner` is not a backend.
    """
    if not isinstance(mesh, Mesh):
        mesh = Mesh(np.asarray(_devices("mesh", mesh, jax.devices())), (AXIS,))
    mesh = automatic(mesh)
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
    # Do not use a set: what cannot be hashed is not a device, and must be refused.
    if not is_list(wanted) or not wanted or any(each not in available for each in wanted):
        raise refuse(name, f"how many of {len(available)} devices, or a list of some", wanted)
    return tuple(wanted)
