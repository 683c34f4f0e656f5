"""What the inverse square root moves and where it keeps it, by the accelerators' compilers."""

import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxfed_kernels import LARGEST_RANK, inverse_sqrt, inverse_sqrt_cuda, inverse_sqrt_reference

from jaxfed.linalg import polar
from tests.accelerators import ptx
from tests.accelerators.tpu_compiler import array, compiled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("batch", "rank"), [(10_000, 3), (10_000, 10), (1_000, LARGEST_RANK)])
def test_reads_each_matrix_once_and_writes_one(batch, rank):
    program = compiled(inverse_sqrt, array(batch, rank, rank))
    moved = program.cost_analysis()["bytes accessed"]
    assert 2 <= moved / (4 * batch * rank**2) <= 2.5
    assert program.memory_analysis().temp_size_in_bytes == 0


def test_is_the_default_of_polar_because_the_operations_move_more():
    """A hundred times as much, although the compiler counts a loop's body once."""
    batch, rank = 100, 12
    program = compiled(inverse_sqrt_reference, array(batch, rank, rank))
    assert program.cost_analysis()["bytes accessed"] > 200 * (4 * batch * rank**2)
    lowered = jax.jit(jax.vmap(polar)).trace(jnp.zeros((batch, 50, rank)))
    assert "tpu_custom_call" in lowered.lower(lowering_platforms=("tpu",)).as_text()


# The description of a device, as its driver gives it (JAX's own tests compile for one like this).
H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3" """

COMPILE = """
import jax, sys
from jax.experimental import topologies
from jaxfed_kernels.inverse_sqrt_cuda import inverse_sqrt_cuda
device = topologies.get_topology_desc(
    platform="cuda", target_config=sys.argv[1], topology="1x1x1").devices[0]
place = jax.sharding.SingleDeviceSharding(device)
gram = jax.ShapeDtypeStruct((1000, int(sys.argv[2]), int(sys.argv[2])), "float32", sharding=place)
inverse_sqrt_cuda.trace(gram).lower(lowering_platforms=("cuda",)).compile()
"""


@pytest.fixture(params=[1, 3, 10, 16, 20, LARGEST_RANK], ids="rank {}".format)
def for_an_h100(request, tmp_path, environment):
    """A rank; the kernel for it; and what the assembler says of that."""
    for package in ("jax_cuda12_plugin", "nvidia.cuda_nvcc"):
        if find_spec(package.split(".")[0]) is None or find_spec(package) is None:
            pytest.skip(f"compiling for GPUs needs {package}: pip install 'jax[cuda12]'")
    (folder,) = find_spec("nvidia.cuda_nvcc").submodule_search_locations
    subprocess.run(
        [sys.executable, "-c", COMPILE, H100, str(request.param)],
        check=True,
        env=environment
        | {"XLA_FLAGS": f"--xla_gpu_cuda_data_dir={folder}"}
        | {"PYTHONPATH": os.pathsep.join(sys.path), "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
        | {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"},
    )
    (kernel,), (report,) = tmp_path.glob("*.ptx"), tmp_path.glob("*.ptxas")
    return request.param, kernel.read_text(), report.read_text()


@pytest.mark.timeout(600)
def test_stays_in_registers_on_an_h100(for_an_h100):
    """For all that it takes; what is larger it refuses, see tests/kernels/test_kernels.py."""
    report = for_an_h100[2]
    assert re.findall(r"(\d+) bytes spill (?:stores|loads)", report) == ["0", "0"]


@pytest.mark.timeout(600)
def test_its_instructions_for_an_h100_are_right(for_an_h100):
    """One by one by NumPy, as there is no device: every thread's, and every barrier needed."""
    rank, text, _ = for_an_h100

    def group_by_group(a):
        # In one row, in the order of the kernel's arguments, which is that of their first use.
        sizes = np.cumsum([0, a.size, a.shape[0] * ptx.THREADS, a.size])
        memory = np.zeros(sizes[-1], np.uint32)
        memory[: a.size] = np.asarray(a, order="C").view(np.uint32).ravel()
        for place in range(len(a)):
            ptx.Group(text, place, list(ptx.BASE + 4 * sizes[:3]), memory).run()
        squares, inverse = np.split(memory.view(np.float32), sizes[1:3])[1:]
        return inverse.reshape(a.shape), squares.reshape(len(a), *a.shape[2:])

    def instead(kernel, out_type, **_):
        return partial(jax.pure_callback, group_by_group, out_type, vmap_method="broadcast_all")

    batch = 2 * ptx.THREADS // max(8, 2 ** (rank - 1).bit_length()) - 1  # the last group not full
    w = np.random.default_rng(rank).normal(size=(batch, 2 * rank + 1, rank))
    gram = (w.mT @ w).astype(np.float32)
    gram[0], gram[1], gram[2] = np.nan, 0, np.diag(np.arange(rank))
    with mock.patch.object(inverse_sqrt_cuda, "kernel", instead):
        inverse, defect = inverse_sqrt_cuda.inverse_sqrt_cuda.__wrapped__(gram)
    expected, error = inverse_sqrt_reference(gram)
    assert np.all(error[3:] < 1e-5) and np.all(defect[3:] < 1e-5)
    assert not np.any(defect[:3] < 0.5)
    size = np.linalg.norm(expected[3:], axis=(1, 2))
    assert np.all(np.linalg.norm(inverse[3:] - expected[3:], axis=(1, 2)) < 1e-6 * size)
