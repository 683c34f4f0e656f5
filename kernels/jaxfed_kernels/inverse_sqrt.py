"""Inverse square roots of many small symmetric positive definite matrices, in one kernel.

The coupled Newton-Schulz iteration is a dozen products of r x r matrices that depend on each other.
As separate operations each of them reads and writes the whole batch in the accelerator's memory;
in one kernel a matrix is read once, stays in registers through all steps, and is written once.

The kernel has so far been run in interpret mode only, never measured on hardware. Nothing chooses
it automatically.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

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


def _scale(gram: Float[Array, "b r r"]) -> Float[Array, " b"]:
    """The mean eigenvalue, or more where the largest may be over twice the mean."""
    r = gram.shape[-1]
    mean = jnp.trace(gram, axis1=1, axis2=2) / r
    spread = jnp.linalg.norm(gram - mean[:, None, None] * jnp.eye(r, dtype=gram.dtype), axis=(1, 2))
    return jnp.maximum(mean, (mean + spread) / 2)


@partial(jax.jit, static_argnames="steps")
def inverse_sqrt_reference(
    gram: Float[Array, "b r r"], *, steps: int = 16
) -> tuple[Float[Array, "b r r"], Float[Array, " b"]]:
    """The same as `inverse_sqrt`, in plain `jax.numpy`."""
    scale = _scale(gram)
    inverse, defect = jax.vmap(partial(_iterate, steps=steps))(gram / scale[:, None, None])
    return inverse / jnp.sqrt(scale)[:, None, None], defect


@partial(jax.jit, static_argnames=("steps", "block", "interpret"))
def inverse_sqrt(
    gram: Float[Array, "b r r"], *, steps: int = 16, block: int = 8, interpret: bool = False
) -> tuple[Float[Array, "b r r"], Float[Array, " b"]]:
    """Inverse square roots by the coupled Newton-Schulz iteration, in one Pallas kernel.

    Args:
        gram: symmetric positive definite matrices.
        steps: how many steps; 16 suffice for eigenvalues spread over a factor of 1e4.
        block: how many matrices one program of the kernel works off.
        interpret: run the kernel as ordinary operations, on any backend.

    Returns:
        The inverse square roots `Z`, and how far each is from one, `|I - Z Y|_F` for the square
        root `Y` found with it: near 1 or above where the steps did not suffice.

    Source: Higham, "Functions of Matrices" (2008), section 6.3 and equation (6.35).
    """
    batch, r, _ = gram.shape
    tile = max(_TILE, pl.next_power_of_2(r))
    scale = _scale(gram)
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
