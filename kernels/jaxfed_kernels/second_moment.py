"""Products with second moments, `(W Xᵀ) X`, that read the samples `X` once.

As two products the samples are read twice, and for the thin `W` of a round nothing else takes time:
each sample is read for a few dozen multiplications. Here a block of samples is read, its scores
`W Xᵀ` stay on the chip, and what they make of the same block is added to the result in place.

Nothing is padded in memory. A TPU keeps arrays in tiles of 8 x 128, the compiler puts that axis
last which wastes less, and the kernel reads the samples that way round: no copy is made. What of
the last block lies beyond the samples is masked.

Compiled for TPUs and run in interpret mode; never yet measured on hardware.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# A tile of the TPU's memory, of 32 bits each: rows (sublanes) and columns (lanes).
_SUBLANES, _LANES = 8, 128
# Bytes of blocks in on-chip memory, of which a program may use 16 MiB by default. A block of
# samples is there twice, one being read while the other is worked on, and again as the pieces that
# full precision multiplies; so are W and the result.
_BLOCK = 2**20
_THIN = 2**20
# From this many bytes of one client's samples on, reading them outlasts starting a step of the
# grid.
_LEAST = 2**17
# If tiles would be emptier than this, the compiler lays another axis along them, that of the
# clients, and the kernel would need a copy.
_WASTE = 1.1


def _tiled(rows: int, columns: int) -> int:
    """Entries that a matrix takes in memory, its columns along the lanes."""
    return (rows + -rows % _SUBLANES) * (columns + -columns % _LANES)


def _samples_last(samples: int, features: int) -> bool:
    """Whether the compiler keeps samples along the lanes, because that pads less."""
    return _tiled(features, samples) < _tiled(samples, features)


def second_moment_reads_less(samples: int, features: int, rank: int, dtype) -> bool:
    """Whether the kernel can take matrices of this size, and reads less than two products do.

    Args:
        samples: number of samples n of a client.
        features: number of features d.
        rank: number of rows r of the thin matrix.
        dtype: of the samples.
    """
    if dtype not in (jnp.float32, jnp.bfloat16):
        return False
    least = min(_tiled(samples, features), _tiled(features, samples))
    return (
        samples * features * jnp.dtype(dtype).itemsize >= _LEAST
        and least <= _WASTE * samples * features
        and 4 * _tiled(rank, features) <= _THIN
        and 4 * _LANES * features <= _BLOCK
    )


def _computed_in(dtype, precision: lax.Precision):
    """The type of what is multiplied, of samples of a type."""
    return dtype if precision == lax.Precision.DEFAULT else jnp.float32


@partial(jax.jit, static_argnames="precision")
def second_moment_reference(
    x: Float[Array, "b n d"],
    w: Float[Array, "b r d"],
    counts: Float[Array, " b"] | None = None,
    *,
    precision: lax.Precision = lax.Precision.HIGHEST,
) -> Float[Array, "b r d"]:
    """The same as `second_moment`, in plain `jax.numpy`."""
    if counts is not None:
        x = jnp.where((jnp.arange(x.shape[1]) < counts[:, None])[..., None], x, 0)
    x = x.astype(_computed_in(x.dtype, precision))
    dot = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    scores = dot("brd,bnd->brn", w.astype(x.dtype), x)
    return dot("brn,bnd->brd", scores.astype(x.dtype), x)


@partial(jax.jit, static_argnames=("precision", "block", "interpret"))
def second_moment(
    x: Float[Array, "b n d"],
    w: Float[Array, "b r d"],
    counts: Float[Array, " b"] | None = None,
    *,
    precision: lax.Precision = lax.Precision.HIGHEST,
    block: int | None = None,
    interpret: bool = False,
) -> Float[Array, "b r d"]:
    """Products `(W Xᵀ) X` of many clients, in one Pallas kernel for TPUs that reads `X` once.

    Args:
        x: samples, in single precision or as bfloat16, which halves what is read.
        w: thin matrices; as many rows as fit beside the samples, see `second_moment_reads_less`.
        counts: how many rows of `x` are samples; the others, of any value, do not count.
        precision: of the products: full, which `HIGH` is here too; or in one pass (`DEFAULT`),
            for which samples in bfloat16 have `w` and the scores rounded to it. All is added up
            in single precision.
        block: samples at a time, a multiple of 128; by default what a mebibyte holds.
        interpret: run the kernel as ordinary operations, on any backend.

    Returns:
        The products, in single precision.
    """
    from jax.experimental import pallas as pl  # late: most programs need none of it

    batch, n, d = x.shape
    r = w.shape[1]
    if 0 in (batch, n, d, r):
        return jnp.zeros((batch, r, d), jnp.float32)
    if block is None:
        block = max(1, _BLOCK // (4 * d * _LANES)) * _LANES
    block = min(block, n)
    last = _samples_last(n, d)
    ragged = counts is not None or n % block
    if precision == lax.Precision.HIGH:  # Mosaic has no three passes
        precision = lax.Precision.HIGHEST
    dtype = _computed_in(x.dtype, precision)
    dot = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    over = (((1,), (0,)), ((), ()))
    over_last = (((1,), (1,)), ((), ()))

    def kernel(count_ref, w_ref, x_ref, y_ref):
        place = pl.program_id(1)

        # The grid's last axis varies fastest, so a client's result stays on the chip while its
        # blocks of samples are added up.
        @pl.when(place == 0)
        def _():
            y_ref[...] = jnp.zeros_like(y_ref)

        x = x_ref[...].astype(dtype)
        if ragged:
            # Beyond the last sample a block has arbitrary values, even NaN, so choose zeros instead
            # of multiplying by them.
            numbers = lax.broadcasted_iota(jnp.int32, x.shape, 1 if last else 0) + place * block
            x = jnp.where(numbers < count_ref[...], x, jnp.zeros_like(x))
        scores = dot(w_ref[...], x, over if last else over_last)
        y_ref[...] += dot(scores.astype(x.dtype), x, over_last if last else over)

    whole = n if counts is None else counts
    blocks = pl.cdiv(n, block)
    thin = pl.BlockSpec((None, r, d), lambda i, j: (i, 0, 0))
    if last:
        # As the compiler stores the samples: this transposition moves nothing.
        x, samples = x.mT, pl.BlockSpec((None, d, block), lambda i, j: (i, 0, j))
    else:
        samples = pl.BlockSpec((None, block, d), lambda i, j: (i, j, 0))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((batch, r, d), jnp.float32),
        grid=(batch, blocks),
        in_specs=[pl.BlockSpec((None, 1, 1), lambda i, j: (i, 0, 0)), thin, samples],
        out_specs=thin,
        # Everything is moved once, by the blocks above; there are two products.
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * n * d * r,
            bytes_accessed=x.nbytes + batch * r * d * (jnp.dtype(dtype).itemsize + 4) + 4 * batch,
            transcendentals=0,
        ),
        interpret=interpret,
    )(
        jnp.broadcast_to(jnp.asarray(whole, jnp.int32), batch).reshape(batch, 1, 1),
        w.astype(dtype),
        x,
    )
