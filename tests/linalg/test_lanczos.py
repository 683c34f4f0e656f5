"""The largest eigenvalue from products alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfed.linalg import largest_eigenvalue


def product(factor, vector):
    return factor.T @ (factor @ vector)


@pytest.mark.parametrize("shape", [(40, 30), (5, 60), (3, 1)])
def test_value_and_derivative(shape, x64):
    factor = jnp.asarray(np.random.default_rng(0).normal(size=shape))
    start = jnp.asarray(np.random.default_rng(1).normal(size=shape[1]))
    value, slope = jax.jit(jax.value_and_grad(lambda f: largest_eigenvalue(product, f, start)))(
        factor
    )
    left, singular, right = np.linalg.svd(factor, full_matrices=False)
    np.testing.assert_allclose(value, singular[0] ** 2, rtol=1e-10)
    wanted = 2 * singular[0] * np.outer(left[:, 0], right[0])
    np.testing.assert_allclose(slope, wanted, atol=1e-5 * np.abs(wanted).max())


def test_few_different_eigenvalues_end_it_early():
    factor = jnp.diag(jnp.array([3.0, 3.0, 1.0, 1.0, 0.0]))
    value, slope = jax.value_and_grad(lambda f: largest_eigenvalue(product, f, jnp.ones(5)))(factor)
    np.testing.assert_allclose(value, 9, rtol=1e-6)
    assert jnp.isfinite(slope).all()


def test_zero_matrix_and_zero_start():
    function = jax.value_and_grad(lambda f, s: largest_eigenvalue(product, f, s))
    for factor, start in ((jnp.zeros((4, 3)), jnp.ones(3)), (jnp.ones((4, 3)), jnp.zeros(3))):
        value, slope = function(factor, start)
        assert value == 0
        assert jnp.isfinite(slope).all()


def test_padding_in_the_start_stays_out():
    factor = jnp.diag(jnp.array([1.0, 2.0, 9.0]))
    start = jnp.array([1.0, 1.0, 0.0])
    np.testing.assert_allclose(largest_eigenvalue(product, factor, start), 4, rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-15, 1, 1e15])
def test_nearly_equal_features_of_any_scale(scale):
    rng = np.random.default_rng(0)
    common = rng.normal(size=(5, 40, 1)) + 1e-3 * rng.normal(size=(5, 40, 6))
    for factor in (scale * common).astype(np.float32):
        found = largest_eigenvalue(product, jnp.asarray(factor), jnp.ones(6))
        exact = np.linalg.norm(factor.astype(float), 2) ** 2
        np.testing.assert_allclose(found, exact, rtol=1e-5)
