"""Inverse square roots of many small symmetric positive definite matrices, in one kernel.

The coupled Newton-Schulz iteration is a dozen products of r x r matrices that depend on each other.
As separate operations each of them reads and writes the whole batch in the accelerator's memory; in
one kernel a matrix is read once, stays on the chip through all steps, and is written once.

A TPU works on tiles of 8 x 128 numbers, most of which a single small matrix would leave empty. So
the batch lies along the lanes, `(r, r, batch)`: each entry is a row of 128 matrices, and a
product is made of multiplications and additions of such rows, none of them wasted.

Compiled for TPUs and run in interpret mode; never yet measured on one.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_LANES = 128
LARGEST_RANK = 32
"""The largest matrices: seven times 128 of them fill a quarter of what a TPU's program may use."""


def check_rank(r: int) -> None:
    """Refuse matrices that are too large."""
    if r > LARGEST_RANK:
        raise ValueError(f"gram: wanted at most {LARGEST_RANK} rows, got {r}")


def scale_of(gram: Float[Array, "b r r"]) -> Float[Array, " b"]:
    """The mean eigenvalue, or more where the largest may be over twice the mean."""
    r = gram.shape[-1]
    mean = jnp.trace(gram, axis1=1, axis2=2) / r
    spread = jnp.linalg.norm(gram - mean[:, None, None] * jnp.eye(r, dtype=gram.dtype), axis=(1, 2))
    return jnp.maximum(mean, (mean + spread) / 2)


def tolerance(r: int, dtype) -> float:
    """The squared defect that rounding leaves."""
    return float((2 * r * jnp.finfo(dtype).eps) ** 2)


@partial(jax.jit, static_argnames="steps")
def inverse_sqrt_reference(
    gram: Float[Array, "b r r"], *, steps: int = 16
) -> tuple[Float[Array, "b r r"], Float[Array, " b"]]:
    """The same as `inverse_sqrt`, in plain `jax.numpy`."""
    r = gram.shape[-1]
    eye = jnp.eye(r, dtype=gram.dtype)
    dot = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

    def step(state):
        y, z, e, _, count = state
        t = eye + e / 2
        y, z = dot(y, t), dot(t, z)
        e = eye - dot(z, y)
        return y, z, e, jnp.sum(e * e), count + 1

    def one(a):
        e = eye - a
        _, z, _, size, _ = lax.while_loop(
            lambda state: (state[3] > tolerance(r, gram.dtype)) & (state[4] < steps),
            step,
            (a, eye, e, jnp.sum(e * e), 0),
        )
        return z, jnp.sqrt(size)

    scale = scale_of(gram)
    inverse, defect = jax.vmap(one)(gram / scale[:, None, None])
    return inverse / jnp.sqrt(scale)[:, None, None], defect


@partial(jax.jit, static_argnames=("steps", "interpret"))
def inverse_sqrt(
    gram: Float[Array, "b r r"], *, steps: int = 16, interpret: bool = False
) -> tuple[Float[Array, "b r r"], Float[Array, " b"]]:
    """Inverse square roots by the coupled Newton-Schulz iteration, in one Pallas kernel for TPUs.

    Args:
        gram: symmetric positive definite matrices, no larger than `LARGEST_RANK`.
        steps: how many at most; 16 suffice for eigenvalues spread over a factor of 1e4. It ends
            earlier where all of 128 neighbours are exact to rounding.
        interpret: run the kernel as ordinary operations, on any backend.

    Returns:
        The inverse square roots `Z`, and how far each is from one, `|I - Z Y|_F` for the square
        root `Y` found with it: near 1 or above where the steps did not suffice.

    Raises:
        ValueError: if the matrices are larger.

    Source: Higham, "Functions of Matrices" (2008), section 6.3 and equation (6.35).
    """
    from jax.experimental import pallas as pl  # late: most programs need none of it
    from jax.experimental.pallas import tpu

    batch, r, _ = gram.shape
    check_rank(r)
    if batch == 0:
        return gram, jnp.zeros(0, gram.dtype)

    def eye(i):
        """Row i of the identity, of all matrices."""
        rows = lax.broadcasted_iota(jnp.int32, (r, _LANES), 0)
        return jnp.where(rows == i, 1.0, 0.0).astype(gram.dtype)

    def over_rows(x):
        return jnp.sum(x, axis=0, keepdims=True)

    def kernel(a_ref, z_ref, defect_ref, y_ref, t_ref, new_ref):
        zero = jnp.zeros((1, _LANES), gram.dtype)
        lanes = lax.broadcasted_iota(jnp.int32, (1, _LANES), 1)
        # The last block may lie partly beyond the batch, where what is read is undefined.
        real = pl.program_id(0) * _LANES + lanes < batch

        def row_of_product(i, left, right):
            return sum(left[i, pl.ds(k, 1), :] * right[k] for k in range(r))

        def measure(i, state):
            y_ref[i] = jnp.where(real, a_ref[i], eye(i))  # identities beyond the batch
            return state + over_rows(y_ref[i] * eye(i))

        def spread(i, state):
            return state + over_rows((y_ref[i] - mean * eye(i)) ** 2)

        def start(i, size):
            y_ref[i] = y_ref[i] / scale
            z_ref[i] = eye(i)
            return move(i, eye(i) - y_ref[i], size)

        def move(i, e, size):
            t_ref[i] = eye(i) + e / 2
            return size + over_rows(e * e)

        def multiply(i, carry):
            # Row i of Y T needs no other row of Y, so it can replace it; T Z needs all rows of Z
            # until the last one is done.
            y_ref[i] = row_of_product(i, y_ref, t_ref)
            new_ref[i] = row_of_product(i, t_ref, z_ref)
            return carry

        def check(i, size):
            return move(i, eye(i) - row_of_product(i, z_ref, y_ref), size)

        def step(state):
            lax.fori_loop(0, r, multiply, 0)
            z_ref[...] = new_ref[...]
            return lax.fori_loop(0, r, check, zero), state[1] + 1

        def unfinished(state):  # a NaN is not above the tolerance, so it ends its steps
            # Squares of the defects, one per lane: all 128 matrices take the same steps.
            above = (state[0] > tolerance(r, gram.dtype)).astype(jnp.float32)
            return (jnp.sum(above) > 0) & (state[1] < steps)

        mean = lax.fori_loop(0, r, measure, zero) / r
        scale = jnp.maximum(mean, (mean + jnp.sqrt(lax.fori_loop(0, r, spread, zero))) / 2)
        size, _ = lax.while_loop(unfinished, step, (lax.fori_loop(0, r, start, zero), 0))
        z_ref[...] = z_ref[...] / jnp.sqrt(scale)
        defect_ref[...] = jnp.sqrt(size)

    matrices = pl.BlockSpec((r, r, _LANES), lambda i: (0, 0, i))
    moved = 2 * gram.nbytes + gram.dtype.itemsize * batch
    inverse, defect = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((r, r, batch), gram.dtype),
            jax.ShapeDtypeStruct((1, batch), gram.dtype),
        ),
        grid=(pl.cdiv(batch, _LANES),),
        in_specs=[matrices],
        out_specs=(matrices, pl.BlockSpec((1, _LANES), lambda i: (0, i))),
        scratch_shapes=[tpu.VMEM((r, r, _LANES), gram.dtype)] * 3,
        cost_estimate=pl.CostEstimate(
            flops=6 * r**3 * steps * batch, bytes_accessed=moved, transcendentals=0
        ),
        interpret=interpret,
    )(jnp.moveaxis(gram, 0, 2))
    return jnp.moveaxis(inverse, 2, 0), defect[0]
