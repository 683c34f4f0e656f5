"""What products with second moments read, by the count of the TPU's compiler."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jaxfed_kernels import second_moment, second_moment_reference

import jaxfed as jf
from jaxfed.core.clients.samples import Samples
from jaxfed.linalg import Moment
from tests.accelerators.tpu_compiler import array, compiled

pytestmark = pytest.mark.slow

# Clients, samples, features, rank.
SHAPES = [(50, 2048, 784, 24), (16, 4096, 1024, 16), (1000, 1024, 64, 8)]


def over_data(f, *arrays):
    """Bytes accessed and temporaries, over the bytes of the first array."""
    program = compiled(f, *arrays)
    size = prod(arrays[0].shape) * arrays[0].dtype.itemsize
    temporaries = program.memory_analysis().temp_size_in_bytes
    return program.cost_analysis()["bytes accessed"] / size, temporaries / size


@pytest.mark.parametrize("shape", SHAPES)
def test_reads_the_samples_once(shape):
    m, n, d, r = shape

    def product(x, count, w):
        return jax.vmap(Moment.mv)(Moment(None, x, count, count), w)

    read, temporaries = over_data(product, array(m, n, d), array(m), array(m, d, r))
    assert 1 <= read <= 1.15
    assert temporaries < 0.05  # so no copy in another layout, and none that is padded
    assert over_data(second_moment_reference, array(m, n, d), array(m, r, d))[0] > 2


@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision(shape):
    m, n, d, r = shape
    read, temporaries = over_data(second_moment, array(m, n, d, dtype=jnp.bfloat16), array(m, r, d))
    assert 1 <= read <= 1.15
    assert temporaries < 0.05


@pytest.mark.parametrize("shape", [*SHAPES, (3, 1000, 784, 5)])
def test_the_compiler_is_told_what_the_kernel_moves(shape):
    """It cannot look into a kernel and counts what it is told: here that is counted by the blocks.

    A block is moved where the grid's next step has another one than the step before.
    """
    m, n, d, r = shape
    x, w = (jax.ShapeDtypeStruct(s, np.float32) for s in ((m, n, d), (m, r, d)))
    (call,) = _calls(jax.make_jaxpr(second_moment)(x, w).jaxpr)
    grid = call.params["grid_mapping"]
    steps = jnp.stack(jnp.meshgrid(*map(jnp.arange, grid.grid), indexing="ij"), -1)
    steps = steps.reshape(-1, len(grid.grid))
    moved = 0
    for block in grid.block_mappings:
        shape = [getattr(size, "block_size", size) for size in block.block_shape]
        shape = np.array([size if isinstance(size, int) else 1 for size in shape])
        index = jax.vmap(jaxpr_as_fun(block.index_map_jaxpr))(*steps.T)
        starts = np.stack([np.broadcast_to(i, len(steps)) for i in index], -1) * shape
        new = np.any(np.diff(starts, axis=0, prepend=-1), axis=1)
        whole = np.array(block.array_aval.shape)
        entries = np.prod(np.minimum(starts + shape, whole) - starts, axis=1)
        moved += entries[new].sum() * block.array_aval.dtype.itemsize
    assert call.params["cost_estimate"].bytes_accessed == moved


def _calls(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _calls(inner)


def test_a_whole_run_reads_them_once_a_round():
    """The compiler counts a loop's body once; a copy made before it would be a temporary."""
    m, n, d = SHAPES[0][:3]

    def run(x):
        data = Samples(x, jnp.full(m, n, x.dtype))
        clients = jf.Clients(data, jnp.arange(m), jnp.full(m, 1 / m))
        return jf.rollout(
            jf.pca.SubspaceIteration(10), clients, rounds=5, key=jax.random.key(0)
        ).result

    read, temporaries = over_data(run, array(m, n, d))
    assert read <= 1.15
    assert temporaries < 0.05
