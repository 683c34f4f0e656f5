"""Inverse square roots by the coupled Newton-Schulz iteration, in one kernel for CUDA devices.

One matrix is multiplied by a group of threads, in whose registers it stays: up to 32 x 32 without
any being spilled, as the assembler reports. Nothing chooses it automatically, since it has never
been measured on hardware; and JAX deprecates Pallas' way through Triton, so `inverse_sqrt` does
without it where that is gone.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from jaxfed_kernels.inverse_sqrt import check_rank, scale_of

# The matrix units of accelerators multiply tiles of at least this many rows and columns.
_TILE = 16


def _dot(a, b):
    return jnp.dot(a, b, precision=lax.Precision.HIGHEST)


def _iterate(a, steps):
    """The coupled iteration on one matrix with eigenvalues in (0, 2]: a^{-1/2} and its defect."""
    rows = lax.broadcasted_iota(jnp.int32, a.shape, 0)
    columns = lax.broadcasted_iota(jnp.int32, a.shape, 1)
    eye = jnp.where(rows == columns, 1.0, 0.0).astype(a.dtype)

    def step(_, state):
        y, z = state
        t = 1.5 * eye - 0.5 * _dot(z, y)
        return _dot(y, t), _dot(t, z)

    y, z = lax.fori_loop(0, steps, step, (a, eye))
    defect = eye - _dot(z, y)
    return z, jnp.sqrt(jnp.sum(defect * defect))


@partial(jax.jit, static_argnames=("steps", "block", "interpret"))
def inverse_sqrt_cuda(
    gram: Float[Array, "b r r"], *, steps: int = 16, block: int = 8, interpret: bool = False
) -> tuple[Float[Array, "b r r"], Float[Array, " b"]]:
    """The same as `inverse_sqrt`, for CUDA devices.

    Args:
        gram: symmetric positive definite matrices, no larger than `LARGEST_RANK`.
        steps: how many steps; 16 suffice for eigenvalues spread over a factor of 1e4.
        block: how many matrices one program of the kernel works off.
        interpret: run the kernel as ordinary operations, on any backend.

    Returns:
        As `inverse_sqrt`.

    Raises:
        ValueError: if the matrices are larger: they would not fit into registers.
    """
    batch, r, _ = gram.shape
    check_rank(r)
    if batch == 0:
        return gram, jnp.zeros(0, gram.dtype)
    tile = max(_TILE, pl.next_power_of_2(r))
    scale = scale_of(gram)
    # The padding is the identity: already an inverse square root, so it adds nothing to the defect.
    a = jnp.pad(gram / scale[:, None, None], ((0, -batch % block), (0, tile - r), (0, tile - r)))
    a = a + jnp.diag((jnp.arange(tile) >= r).astype(a.dtype))

    def kernel(a_ref, inverse_ref, defect_ref):
        def one(i, carry):
            inverse_ref[i], defect_ref[i] = _iterate(a_ref[i], steps)
            return carry

        lax.fori_loop(0, block, one, 0)

    matrices = pl.BlockSpec((block, tile, tile), lambda i: (i, 0, 0))
    inverse, defect = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(a.shape, a.dtype),
            jax.ShapeDtypeStruct(a.shape[:1], a.dtype),
        ),
        grid=(len(a) // block,),
        in_specs=[matrices],
        out_specs=(matrices, pl.BlockSpec((block,), lambda i: (i,))),
        compiler_params=triton.CompilerParams(),
        interpret=interpret,
    )(a)
    return inverse[:batch, :r, :r] / jnp.sqrt(scale)[:, None, None], defect[:batch]
