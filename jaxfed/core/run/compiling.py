"""Compiler options of a run's programs, and the cache of compiled programs."""

import hashlib
import os
import platform
from pathlib import Path

import jax
import numpy as np
from jaxtyping import PyTree

from jaxfed._checks import checked_path
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.contract.wrapper import Wrapper
from jaxfed.linalg.platforms import OLD_EMITTERS, processor_options, unless_given

# Libraries do most of the linear algebra, so low optimisation compiles in a quarter to half of the
# time and runs as fast (bench/speed/first_call.py). That does not hold for elementwise work, as in
# network training, nor for the indexed sums of sparse data.
_SHORT_WAY = OLD_EMITTERS | {"xla_backend_optimization_level": 1}

# Even lower optimisation halves what is left, but elementwise work takes up to three times as long.
# It is worth it where libraries do nearly all work, and products of many clients' data, which XLA
# does itself, are small.
_SHORTEST_WAY = _SHORT_WAY | {"xla_backend_optimization_level": 0}
FEW = 2**18  # numbers of all clients

# With Triton, XLA fails to compile products of some thin matrices ("Couldn't find output tile
# sizes", openxla/xla#36792) and tries many variants of each; without, it calls libraries. Also
# recording loops (`xla_gpu_enable_command_buffer` with WHILE) made rounds a quarter faster on an
# H100, but made one gradient NaN (JAX 0.11.2).
GPU_OPTIONS: dict[str, bool | int] = {"xla_gpu_enable_triton_gemm": False}


def compiler_options(
    algorithm: Algorithm, clients: Clients, platform: str | None = None
) -> dict[str, bool | int]:
    """Options for `jax.jit` of a run's program; `XLA_FLAGS` overrides them.

    They apply to the compiled function alone and leave the process unchanged.

    Args:
        algorithm: the algorithm to run.
        clients: the clients to run it on.
        platform: `"cpu"`, `"cuda"` or `"tpu"`; this process's by default.
    """
    platform = platform or jax.default_backend()
    options: dict[str, bool | int] = {}
    if platform in ("cuda", "gpu"):
        options |= GPU_OPTIONS
    elif platform == "cpu":
        options |= _for_processors(algorithm, clients)
    return unless_given(options)


def options_for_linear_algebra(arguments: PyTree) -> dict[str, bool | int]:
    """Options for `jax.jit` of a program other than a run's, most of whose work libraries do.

    Args:
        arguments: of the program.
    """
    return processor_options(_SHORT_WAY, arguments)


def _for_processors(algorithm: Algorithm, clients: Clients) -> dict[str, bool | int]:
    options: dict[str, bool | int] = {}
    # Only a network has many numbers of its own; those of a wrapper are states to go on from.
    while isinstance(algorithm, Wrapper):
        algorithm = algorithm.algorithm
    sparse = any(getattr(part, "summed_by_index", False) for part in clients.parts)
    if _numbers(algorithm) <= 10_000 and not sparse:
        few = len(clients) == 1 or _numbers(clients.parts) <= FEW
        options |= _SHORTEST_WAY if few and algorithm.calls_libraries else _SHORT_WAY
    # For products this small, threads cost more than they save.
    if clients.features <= 64 and _numbers(clients.parts) <= 2**15 * len(clients):
        options["xla_cpu_multi_thread_eigen"] = False
    return options


def _numbers(tree: PyTree) -> int:
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree))


def enable_compilation_cache(folder: str | os.PathLike[str] | None = None) -> Path:
    """Keep compiled programs on disk, so that later processes need not compile them again.

    This is JAX's compilation cache in a separate folder. Call it before anything is compiled; the
    command line does so by default. Nothing is ever deleted from the folder, but you may delete it
    at any time.

    It applies to all programs of the process, those of other packages too. A program contains the
    arrays that its function closes over, such as samples in `metrics`; so does the folder then.

    Args:
        folder: the folder. By default the one that JAX is configured with
            (`JAX_COMPILATION_CACHE_DIR`), or else one for this user and type of processor.

    Returns:
        The folder.

    Raises:
        ValueError: if `folder` is not a path.
        OSError: if the folder cannot be created.
    """
    configured = jax.config.values["jax_compilation_cache_dir"]
    if folder is None and configured:
        return Path(configured)
    place = _user_folder() if folder is None else checked_path("folder", folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(place))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        # By default JAX keeps only what took a second, and many small programs add up.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return place


def _user_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # Machines that share a home folder may be unable to run each other's programs.
    processor = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.exists():
        lines = described.read_text(errors="replace").splitlines()
        processor += next((x for x in lines if x.startswith(("flags", "Features"))), "")
    name = hashlib.sha256(processor.encode()).hexdigest()[:16]
    return Path(base) / "jaxfed" / "programs" / name
