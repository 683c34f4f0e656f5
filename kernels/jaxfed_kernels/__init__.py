"""Hand-written accelerator kernels: arrays in, arrays out.

Each kernel stands beside a plain `jax.numpy` version of the same signature, against which it is
tested. The package imports nothing of `jaxfed`. What is for CUDA devices is a module of its own,
`jaxfed_kernels.inverse_sqrt_cuda`.
"""

from jaxfed_kernels.inverse_sqrt import LARGEST_RANK, inverse_sqrt, inverse_sqrt_reference
from jaxfed_kernels.second_moment import (
    second_moment,
    second_moment_reads_less,
    second_moment_reference,
)

__all__ = [
    "LARGEST_RANK",
    "inverse_sqrt",
    "inverse_sqrt_reference",
    "second_moment",
    "second_moment_reads_less",
    "second_moment_reference",
]
