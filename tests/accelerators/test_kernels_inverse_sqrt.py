"""What the inverse square root moves and where it keeps it, by the accelerators' compilers."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxfed_kernels import LARGEST_RANK, inverse_sqrt, inverse_sqrt_reference
from tpu_compiler import array, compiled

from jaxfed.linalg import polar

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
for rank in map(int, sys.argv[2:]):
    place = jax.sharding.SingleDeviceSharding(device)
    gram = jax.ShapeDtypeStruct((1000, rank, rank), "float32", sharding=place)
    inverse_sqrt_cuda.trace(gram).lower(lowering_platforms=("cuda",)).compile()
"""


@pytest.mark.timeout(600)
def test_stays_in_registers_on_an_h100(tmp_path, environment):
    """For all that it takes; what is larger it refuses, see tests/test_kernels.py."""
    for package in ("jax_cuda12_plugin", "nvidia.cuda_nvcc"):
        if find_spec(package.split(".")[0]) is None or find_spec(package) is None:
            pytest.skip(f"compiling for GPUs needs {package}: pip install 'jax[cuda12]'")
    (folder,) = find_spec("nvidia.cuda_nvcc").submodule_search_locations
    ranks = [str(rank) for rank in (3, 10, 16, 20, LARGEST_RANK)]
    flags = f"--xla_dump_to={tmp_path} --xla_gpu_cuda_data_dir={folder}"
    subprocess.run(
        [sys.executable, "-c", COMPILE, H100, *ranks],
        check=True,
        env=environment | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    spilled = []
    programs = [path for path in tmp_path.glob("*.ptx") if ".entry kernel(" in path.read_text()]
    for path in programs:
        binary = path.with_suffix(".cubin")
        ptxas = [Path(folder) / "bin" / "ptxas", "-v", "-arch=sm_90a", "-o", binary, path]
        report = subprocess.run(ptxas, check=True, capture_output=True, text=True).stderr
        spilled += re.findall(r"(\d+) bytes spill stores", report)
    assert spilled == ["0"] * len(ranks)
