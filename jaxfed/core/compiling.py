"""What a run's programs are compiled with, where XLA's defaults take long for what they bring."""

import os

import jax
import numpy as np
from jax import lib
from jaxtyping import PyTree

from jaxfed.core.algorithm import Algorithm
from jaxfed.core.clients import Clients

# Only jaxlib 0.10 has two sorts of emitters; later versions refuse the option.
_OLD_EMITTERS = {"xla_cpu_use_fusion_emitters": False} if lib.__version__ < "0.11" else {}


def compiler_options(algorithm: Algorithm, clients: Clients) -> dict[str, bool | int]:
    """Options for `jax.jit` of a run's program, which `XLA_FLAGS` overrides.

    They are the compiled function's own and leave the process as it is.

    Args:
        algorithm: what runs.
        clients: whom it runs on.
    """
    if jax.default_backend() != "cpu":
        return {}
    options: dict[str, bool | int] = {}
    # Of linear algebra most is done by libraries. What XLA compiles around it is as fast by the
    # short way, which takes half the time; the elementwise work of training networks is not.
    if _numbers(algorithm) <= 10_000:
        options |= _OLD_EMITTERS | {"xla_backend_optimization_level": 1}
    # Threads cost more than they bring for products this small.
    if clients.features <= 64 and _numbers(clients.data) <= 2**15 * len(clients):
        options["xla_cpu_multi_thread_eigen"] = False
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if name not in given}


def _numbers(tree: PyTree) -> int:
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(tree))
