"""A quotient whose derivative squares nothing, against the plain one and its closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfed.linalg.division import ratio


def test_values_are_those_of_the_plain_quotient():
    x = jnp.asarray([[1.0, -2.0, 0.0], [3.0, 1e30, 5.0]])
    y = jnp.asarray([2.0, -4.0, 1e-30])
    np.testing.assert_array_equal(ratio(x, y)[:, :2], (x / y)[:, :2])
    np.testing.assert_array_equal(ratio(x, 0.0), jnp.zeros_like(x))
    np.testing.assert_array_equal(ratio(1.0, jnp.array([0.0, 4.0])), [0.0, 0.25])


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_derivatives_at_every_scale(scale):
    """Of data times a scale, whose quotient does not change: the plain rule gives NaN or zero."""
    x, y = jnp.float32([0.5, 2.0, -3.0]) * scale, jnp.float32(4.0 * scale)

    def loss(x, y):
        return jnp.sum(ratio(x, y) ** 2) * scale**0.5

    for transform in (jax.jacrev, jax.jacfwd):
        by_x, by_y = jax.jit(transform(loss, (0, 1)))(x, y)
        shares = np.array([0.125, 0.5, -0.75])
        np.testing.assert_allclose(by_x * scale**0.5, 2 * shares / 4, rtol=1e-5)
        np.testing.assert_allclose(by_y * scale**0.5, -2 * np.sum(shares**2) / 4, rtol=1e-5)


def test_derivatives_of_every_order(x64):
    for order, wanted in enumerate([1 / 3, -1 / 9, 2 / 27, -6 / 81]):
        f = lambda y: ratio(1.0, y)  # noqa: E731
        for _ in range(order):
            f = jax.grad(f)
        np.testing.assert_allclose(f(3.0), wanted, rtol=1e-12)


def test_where_the_denominator_is_zero_so_is_the_derivative():
    for transform in (jax.grad, jax.jacfwd):
        assert transform(ratio, (0, 1))(2.0, 0.0) == (0, 0)
    # Not even a constant before it makes infinity of it, whichever way a compiler turns the terms.
    step = jax.jit(jax.vmap(lambda y: 1e6 * (0 * ratio(1.0, y))))
    np.testing.assert_array_equal(step(jnp.zeros(64)), 0)


def test_where_the_reciprocal_is_near_overflow_there_is_no_derivative():
    y = jnp.float32([2e-37, -1e-34, 1e-31])
    slope = jax.grad(lambda y: jnp.sum(1e3 * ratio(y, y[::-1]) + 1e3 * ratio(1e-35, y)))(y)
    assert np.isfinite(slope).all() and slope[2] != 0
    np.testing.assert_array_equal(ratio(y, y), 1)  # values there are as elsewhere
