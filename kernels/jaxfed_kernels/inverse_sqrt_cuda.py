"""Inverse square roots by the coupled Newton-Schulz iteration, in one kernel for CUDA devices.

Each thread keeps one column of one matrix in its registers. For a product, the threads of a matrix
read the left factor's columns together from shared memory, where the iterates stay through all
steps. Four to sixteen matrices share a group of 128 threads.

Compiled for an H100, where the assembler reports no spilled register up to 32 x 32, and run in
interpret mode; never yet run on a device. It is written for Pallas' Mosaic GPU, which changes from
one version of JAX to the next: importing or calling this may fail, and `jaxfed` does without then.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.mosaic_gpu import (
    SMEM,
    CompilerParams,
    Layout,
    LoweringSemantics,
    Tiling,
    kernel,
    layout_cast,
)
from jaxtyping import Array, Float

from jaxfed_kernels.inverse_sqrt import check_rank, scale_of, tolerance

# Threads of a warpgroup, which works on an array together, and of a warp.
_THREADS, _WARP = 128, 32
# Use the layouts given here. The other semantics infers some, and JAX 0.12.0 then stores matrices
# in another order than that in which it reads their columns.
_AS_GIVEN = CompilerParams(lowering_semantics=LoweringSemantics.Lane)


def compiles_here() -> bool:
    """Whether Mosaic GPU compiles for the CUDA devices of this process; also where it has none.

    It does for compute capabilities 9 and 10: for 8 it ends the process, for 12 it raises.
    """
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return True
    return all(device.compute_capability.split(".")[0] in ("9", "10") for device in devices)


@partial(jax.jit, static_argnames=("steps", "interpret"))
def inverse_sqrt_cuda(
    gram: Float[Array, "b r r"], *, steps: int = 16, interpret: bool = False
) -> tuple[Float[Array, "b r r"], Float[Array, " b"]]:
    """The same as `inverse_sqrt`, for CUDA devices of compute capability 9 or 10.

    Args:
        gram: symmetric positive definite matrices, no larger than `LARGEST_RANK`.
        steps: how many at most; 16 suffice for eigenvalues spread over a factor of 1e4. It ends
            earlier where all matrices that share threads are exact to rounding.
        interpret: run the kernel as ordinary operations, on any backend.

    Returns:
        As `inverse_sqrt`.

    Raises:
        ValueError: if the matrices are larger.
    """
    batch, r, _ = gram.shape
    check_rank(r)
    if batch == 0:
        return gram, jnp.zeros(0, gram.dtype)
    rows, columns = max(2, r), max(8, pl.next_power_of_2(r))
    many = _THREADS // columns
    shape = rows, columns, many
    # Thread `j * many + m` has column j of matrix m, one entry after the other.
    tiles = (1, columns, many), (_WARP // many, many), (1,)
    layout = Layout.TILED(Tiling(tiles), (-5,), (-3, -2), -1)

    def laid_out(x, layout: Any = layout):
        return x if interpret else layout_cast(x, layout)

    def product(left, right):
        def add(k, total):
            column = laid_out(left[:, k], layout.reduce(1))
            row = laid_out(right[k], layout.reduce(0))
            column = laid_out(lax.broadcast_in_dim(column, shape, (0, 2)))
            return total + column * laid_out(lax.broadcast_in_dim(row, shape, (1, 2)))

        return lax.fori_loop(0, rows, add, laid_out(jnp.zeros(shape, gram.dtype)))

    def iterate(a_ref, inverse_ref, squares_ref, y_ref, z_ref, t_ref):
        row, column = (laid_out(lax.broadcasted_iota(jnp.int32, shape, axis)) for axis in (0, 1))
        eye = jnp.where(row == column, 1.0, 0.0).astype(gram.dtype)

        def move(e):
            t_ref[...] = eye + e / 2
            return jnp.sum(e * e, axis=0)

        def step(state):
            y, z = product(y_ref, t_ref), product(t_ref, z_ref)
            y_ref[...], z_ref[...] = y, z
            return move(eye - product(z_ref, y_ref)), state[1] + 1

        def unfinished(state):  # a NaN is not above the tolerance, so it ends its steps
            above = jnp.sum(state[0], axis=0) > tolerance(r, gram.dtype)
            return (jnp.sum(jnp.where(above, 1, 0)) > 0) & (state[1] < steps)

        y_ref[...] = laid_out(a_ref[...], Layout.WG_STRIDED(shape, vec_size=1))
        z_ref[...] = eye
        start = move(eye - laid_out(y_ref[...])), jnp.int32(0)
        squares_ref[...], _ = lax.while_loop(unfinished, step, start)
        inverse_ref[...] = laid_out(z_ref[...])

    run = kernel(
        iterate,
        out_type=[jax.ShapeDtypeStruct(s, gram.dtype) for s in (shape, shape[1:])],
        scratch_types=[SMEM(shape, gram.dtype)] * 3,
        compiler_params=_AS_GIVEN,
        interpret=interpret,
    )
    # Identities fill up the last group, and each matrix gets the further rows and columns of an
    # identity; the iteration leaves these unchanged.
    scale = scale_of(gram)
    groups = pl.cdiv(batch, many)
    a = jnp.broadcast_to(jnp.eye(rows, columns, dtype=gram.dtype), (groups * many, rows, columns))
    a = a.at[:batch, :r, :r].set(gram / scale[:, None, None])
    a = jnp.moveaxis(a.reshape(groups, many, rows, columns), 1, 3)
    inverse, squares = lax.map(run, a) if interpret else jax.vmap(run)(a)
    inverse = jnp.moveaxis(inverse, 3, 1).reshape(-1, rows, columns)[:batch, :r, :r]
    defect = jnp.sqrt(jnp.sum(squares, axis=1).ravel()[:batch])
    return inverse / jnp.sqrt(scale)[:, None, None], defect
