"""Robust PCA against known parts, a plain NumPy implementation, and bad input."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfed.pca.robust import robust_pca
from tests.references import perpca as reference


def _corrupted(key, shape=(60, 40), rank=2, share=0.05, dtype=float):
    left, right, where, size = jax.random.split(key, 4)
    low = jax.random.normal(left, (shape[0], rank), dtype) @ jax.random.normal(
        right, (rank, shape[1]), dtype
    )
    spikes = jax.random.bernoulli(where, share, shape) * jax.random.uniform(
        size, shape, dtype, -10.0, 10.0
    )
    return low, spikes


@pytest.mark.parametrize("shape", [(60, 40), (30, 50)])
def test_recovers_the_parts(key, x64, shape):
    low, spikes = _corrupted(key, shape)
    found, sparse = robust_pca(low + spikes)
    assert jnp.linalg.norm(found - low) < 1e-5 * jnp.linalg.norm(low)
    assert jnp.linalg.norm(sparse - spikes) < 1e-5 * jnp.linalg.norm(spikes)
    assert jnp.linalg.matrix_rank(found, rtol=1e-6) == 2
    chex.assert_trees_all_close(found + sparse, low + spikes, atol=1e-5)


def test_single_precision_keeps_its_type(key):
    low, spikes = _corrupted(key, dtype=jnp.float32)
    found, sparse = robust_pca(low + spikes)
    assert found.dtype == sparse.dtype == jnp.float32
    assert jnp.linalg.norm(found - low) < 1e-3 * jnp.linalg.norm(low)


@pytest.mark.parametrize("sparsity", [None, 0.3])
def test_equals_the_numpy_reference(key, x64, sparsity):
    # Too dense a corruption to be undone: the split itself must agree, right or wrong.
    low, spikes = _corrupted(key, (25, 18), rank=5, share=0.4)
    matrix = low + spikes
    expected = reference.robust_pca(np.asarray(matrix), sparsity)
    chex.assert_trees_all_close(robust_pca(matrix, sparsity=sparsity), expected, atol=1e-8)


def test_scales_with_the_matrix(key, x64):
    matrix = sum(_corrupted(key, (20, 15)))
    small, large = robust_pca(1e-3 * matrix), robust_pca(1e3 * matrix)
    chex.assert_trees_all_close(
        jax.tree.map(lambda part: 1e6 * part, small), large, rtol=1e-6, atol=1e-4
    )


def test_zero_matrix():
    low, sparse = robust_pca(jnp.zeros((4, 3)))
    chex.assert_trees_all_equal(low, jnp.zeros((4, 3)))
    chex.assert_trees_all_equal(sparse, jnp.zeros((4, 3)))


def test_rounds_bound_the_loop(key, x64):
    matrix = sum(_corrupted(key))
    low, sparse = robust_pca(matrix, rounds=3)
    assert jnp.linalg.norm(matrix - low - sparse) > 1e-4 * jnp.linalg.norm(matrix)


def test_under_jit_and_vmap(key, x64):
    matrices = jnp.stack([sum(_corrupted(k, (20, 15))) for k in jax.random.split(key, 2)])
    mapped = jax.jit(jax.vmap(robust_pca))(matrices)
    alone = jax.tree.map(lambda *parts: jnp.stack(parts), *map(robust_pca, matrices))
    chex.assert_trees_all_close(mapped, alone, atol=1e-8)


@pytest.mark.parametrize(
    ("matrix", "arguments", "message"),
    [
        (np.ones(3), {}, r"matrix: wanted .*\(rows, columns\), got .*\(3,\)"),
        (np.ones((0, 3)), {}, "matrix: wanted .* at least one entry"),
        (np.ones((2, 3), int), {}, "matrix: wanted an array of floating-point numbers.*int"),
        (np.ones((2, 3), complex), {}, "matrix: wanted an array of floating-point numbers"),
        (np.full((2, 3), np.nan), {}, "matrix: wanted finite numbers"),
        (np.ones((2, 3)), {"sparsity": 0.0}, "sparsity: wanted a positive finite number"),
        (np.ones((2, 3)), {"tol": -1.0}, "tol: wanted a positive finite number"),
        (np.ones((2, 3)), {"rounds": 0}, "rounds: wanted a whole number of at least 1"),
    ],
)
def test_refuses_bad_input(matrix, arguments, message):
    with pytest.raises(ValueError, match=message):
        robust_pca(matrix, **arguments)
