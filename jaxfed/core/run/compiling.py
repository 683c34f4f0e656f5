"""What a run's programs are compiled with, and where compiled ones are kept."""

import hashlib
import os
import platform
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree

from jaxfed._checks import checked_path
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm

# Only jaxlib 0.10 has two sorts of emitters; later versions refuse the option.
_OLD_EMITTERS = (
    {"xla_cpu_use_fusion_emitters": False} if version("jaxlib").startswith("0.10.") else {}
)

# XLA's products by Triton do not compile for some thin matrices ("Couldn't find output tile sizes",
# openxla/xla#36792), and it tries out many ways of each; those of the libraries do. Recording loops
# too (`xla_gpu_enable_command_buffer` with WHILE) made rounds a quarter faster on an H100, but one
# gradient was NaN with it (JAX 0.11.2).
GPU_OPTIONS: dict[str, bool | int] = {"xla_gpu_enable_triton_gemm": False}


def compiler_options(
    algorithm: Algorithm, clients: Clients, platform: str | None = None
) -> dict[str, bool | int]:
    """Options for `jax.jit` of a run's program, which `XLA_FLAGS` overrides.

    They are the compiled function's own and leave the process as it is.

    Args:
        algorithm: what runs.
        clients: whom it runs on.
        platform: `"cpu"`, `"cuda"` or `"tpu"`; by default what this process has.
    """
    platform = platform or jax.default_backend()
    options: dict[str, bool | int] = {}
    if platform in ("cuda", "gpu"):
        options |= GPU_OPTIONS
    elif platform == "cpu":
        options |= _for_processors(algorithm, clients)
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given}


def _for_processors(algorithm: Algorithm, clients: Clients) -> dict[str, bool | int]:
    options: dict[str, bool | int] = {}
    # Of linear algebra most is done by libraries. What XLA compiles around it is as fast by the
    # short way, which takes half the time (bench/speed/first_call.py); the elementwise work of
    # training networks is not, nor are the sums by index of sparse data.
    sparse = any(getattr(part, "summed_by_index", False) for part in clients.parts)
    if _numbers(algorithm) <= 10_000 and not sparse:
        options |= _OLD_EMITTERS | {"xla_backend_optimization_level": 1}
    # Threads cost more than they bring for products this small.
    if clients.features <= 64 and _numbers(clients.parts) <= 2**15 * len(clients):
        options["xla_cpu_multi_thread_eigen"] = False
    return options


def _numbers(tree: PyTree) -> int:
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree))


def enable_compilation_cache(folder: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs on disk, so that a later process need not compile them again.

    It is JAX's own compilation cache with a place of its own; call this before anything is
    compiled. The command line does so by default. Nothing is ever removed from the folder; remove
    it whenever you like.

    Args:
        folder: where to keep them. By default where JAX is told to
            (`JAX_COMPILATION_CACHE_DIR`), or else a folder of this user for this kind of processor.

    Returns:
        The folder.

    Raises:
        ValueError: if `folder` is no path.
        OSError: if it cannot be made.
    """
    configured = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if folder is None and configured:
        return Path(configured)
    place = _user_folder() if folder is None else checked_path("folder", folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(place))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return place


def _user_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # Machines that share a home folder may not run each other's programs.
    processor = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.exists():
        lines = described.read_text(errors="replace").splitlines()
        processor += next((x for x in lines if x.startswith(("flags", "Features"))), "")
    name = hashlib.sha256(processor.encode()).hexdigest()[:16]
    return Path(base) / "jaxfed" / "programs" / name
