"""Compiles programs for TPU slices and CUDA devices that are not present.

The devices' compilers run on an ordinary CPU and report the memory that a program needs. Nothing
runs on the devices, so this says nothing about speed or accuracy.
"""

import os
import re
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxfed._checks import refuse
from jaxfed._optional import require
from jaxfed.core.backends.backend import AXIS, Device
from jaxfed.core.run.compiling import GPU_OPTIONS

GIB = 2**30

# One H100 in the format of XLA's GPU compiler, with numbers from NVIDIA's data sheet and CUDA's
# device attributes for compute capability 9.0.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
_H100_MEMORY = 84929347584

# Memory per device, in GiB. A chip of v2 or v3 is two devices.
_TPUS = {"v2": 8, "v3": 16, "v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}
_THREE_DIMENSIONAL = ("v4", "v5p", "tpu7x")  # their topologies have three numbers


class Target(NamedTuple):
    """The devices to compile a program for."""

    name: str
    platform: str  # JAX's name: "tpu", "cuda" or "cpu"
    devices: tuple[Device, ...]
    memory: int | None  # bytes per device; None if unknown

    def mesh(self, axis: str = AXIS) -> Mesh:
        """All devices in one row, for `jaxfed.backend.shard`."""
        return Mesh(np.asarray(self.devices), (axis,))


class Compiled(NamedTuple):
    """A compiled program, and the time it took to compile."""

    program: Any  # jax.stages.Compiled
    seconds: float

    @property
    def all_reduces(self) -> int:
        """The number of exchanges between devices; one in a loop counts once."""
        return len(re.findall(r" all-reduce(?:-start)?\(", self.program.as_text()))


def target(name: str) -> Target:
    """Find devices by name.

    Args:
        name: `"v5e:4x4"`, a slice of TPUs by kind and topology; `"v5e"`, one chip; `"h100"` or
            `"h100:8"`, GPUs of one machine; `"cpu"`, this CPU.

    Raises:
        ValueError: if the name or the topology is unknown.
        ImportError: if the compiler is missing; `pip install 'jaxfed[aot]'` installs it.
    """
    kind, _, shape = name.partition(":")
    if name == "cpu":
        return Target(name, "cpu", (jax.devices("cpu")[0],), None)
    if kind == "h100" and (not shape or re.fullmatch(r"[1-9][0-9]?", shape)):
        require("jax_cuda12_plugin", extra="aot")
        return Target(name, "cuda", _gpus(int(shape or 1)), _H100_MEMORY)
    if kind in _TPUS:
        require("libtpu", extra="aot")
        return Target(name, "tpu", _tpus(kind, shape), _TPUS[kind] * GIB)
    raise refuse("topology", f"'cpu', 'h100', or one of {', '.join(_TPUS)} as in 'v5e:4x4'", name)


def _gpus(count: int) -> tuple[Device, ...]:
    topologies = require("jax.experimental.topologies", extra="aot")
    found = topologies.get_topology_desc(
        platform="cuda", target_config=_H100, topology=f"1x1x{count}"
    )
    return tuple(found.devices)


def _tpus(kind: str, shape: str) -> tuple[Device, ...]:
    # Keep the compiler from asking the cloud for a description of this machine.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    topologies = require("jax.experimental.topologies", extra="aot")
    # The smallest slice that the compiler knows has four chips.
    smallest = "2x2x1" if kind in _THREE_DIMENSIONAL else "2x2"
    try:
        found = topologies.get_topology_desc(
            topology_name=f"{kind}:{shape or smallest}", platform="tpu"
        )
    except (ValueError, RuntimeError) as error:
        message = f"a shape such as {smallest} for {kind}; its compiler says: {error}"
        raise refuse("topology", message, shape) from error
    return tuple(found.devices) if shape else tuple(found.devices[:1])


def compiled(function: Any, *arguments: Any, target: Target) -> Compiled:
    """Compile a jitted function.

    Args:
        function: what `jax.jit` returned.
        arguments: arrays or `jax.ShapeDtypeStruct`s; those without a sharding are replicated.
        target: the devices to compile for.
    """
    mesh = target.mesh()
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def placed(x):
        if not hasattr(x, "shape"):
            return x
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or everywhere)

    started = time.perf_counter()
    lowered = function.trace(*jax.tree.map(placed, arguments)).lower(
        lowering_platforms=(target.platform,)
    )
    options = GPU_OPTIONS if target.platform == "cuda" else {}
    return Compiled(lowered.compile(compiler_options=options), time.perf_counter() - started)
