"""Tests of sums over many rows and of squares of any magnitude."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfed.linalg import sums


def test_the_mean_of_many_rows_far_from_zero():
    rows = 1000 + 3 * np.random.default_rng(0).standard_normal((2_000_000, 2))
    given = rows.astype(np.float32)
    found = sums.mean_of_rows(jnp.asarray(given))
    assert np.abs(found - given.mean(axis=0, dtype=float)).max() < 2e-4


@pytest.mark.parametrize("rows", [3, 5, 1024, 4097, 200_000])
def test_few_rows_keep_the_second_moment(rows):
    scales = np.array([1, 0.1, 1e-3, 1e-4, 1e-5])
    x = (np.random.default_rng(1).standard_normal((rows, 5)) * scales).astype(np.float32)
    few = sums.few_rows(jnp.asarray(x))
    assert few.shape == (min(rows, 5), 5)
    # A singular value far below the largest is right, too.
    wanted = np.linalg.svd(x.astype(float), compute_uv=False)
    found = np.linalg.svd(np.asarray(few, float), compute_uv=False)
    assert np.abs(found - wanted).max() < 2e-6 * wanted[0]
    derivative = jax.grad(lambda y: jnp.sum(sums.few_rows(y)[:, 0] ** 2))(jnp.asarray(x))
    assert np.allclose(derivative[:, 0], 2 * x[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-37, 1e-25, 1e-12, 1.0, 1e12, 1e25, 1e37])
def test_norms_of_any_magnitude(scale):
    x = jnp.asarray(np.float32([[3.0, -4.0], [0.0, 12.0]])) * np.float32(scale)
    assert np.isclose(float(sums.scaled_norm(x)) / (scale or 1), 13 * (scale > 1e-38), rtol=1e-3)
    if scale > 1e-38:
        by_rows = sums.scaled_norm(x, 1) / np.float32(scale)
        assert np.allclose(by_rows, [5, 12], rtol=1e-6)
    slope = jax.grad(lambda x: sums.scaled_norm(x))(x)
    wanted = np.array([[3, -4], [0, 12]]) / 13 * (scale > 1e-38)
    assert np.allclose(slope, wanted, rtol=1e-5)


def test_a_norm_without_entries_or_without_finite_ones():
    assert sums.scaled_norm(jnp.zeros((0, 3))) == 0
    assert np.isnan(sums.scaled_norm(jnp.asarray([1.0, np.nan])))
    assert sums.scaled_norm(jnp.asarray([1.0, np.inf])) == np.inf
