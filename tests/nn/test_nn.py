"""Solves as layers: their derivatives, and what they remember."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf

pytestmark = pytest.mark.usefixtures("x64")


def samples():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 10, 4)) * [0.3, 5.0, 0.5, 1.0]
    values[..., 1] = rng.normal(size=(3, 10)) * 2
    for own in range(3):
        values[own, :, [0, 2, 3][own]] += 6 * rng.normal(size=10)
    return values


def error(scale, layer, state, values=None):
    """How badly scaled samples are told by their components."""
    scaled = (samples() if values is None else values) * scale
    projected, state = layer(scaled, state)
    return ((scaled - projected) ** 2).mean(), state


def test_a_layer_is_differentiated_through_its_solve(key):
    layer, state = eqx.nn.make_with_state(jf.nn.PersonalizedProjection)(
        jf.pca.PerPCA(1, 1, solver="gradient"), samples(), rounds=1000, key=key
    )
    gradient = jax.jit(jax.value_and_grad(error, has_aux=True))
    scale = jnp.array([1.0, 0.9, 1.1, 1.0])
    (value, after), slope = gradient(scale, layer, state)
    assert value < (samples() ** 2).mean() / 4

    direction = np.random.default_rng(1).normal(size=4)
    far, near = (
        [gradient(scale + sign * step * direction, layer, state)[0][0] for sign in (1, -1)]
        for step in (2e-4, 1e-4)
    )
    wanted = (8 * (near[0] - near[1]) - (far[0] - far[1])) / 1.2e-3
    np.testing.assert_allclose(slope @ direction, wanted, rtol=1e-6)

    # The next solve starts where this one ended.
    kept = after.get(layer.last)
    assert jnp.abs(kept.shared - state.get(layer.last).shared).max() > 1e-6
    (again, _), _ = gradient(scale, layer, after)
    np.testing.assert_allclose(again, value, rtol=1e-12)


@pytest.mark.slow
def test_what_is_trained_of_a_layer_and_what_is_returned(key):
    """The algorithm's numbers, and nothing of the solve; in the precision of the call."""
    layer, state = eqx.nn.make_with_state(jf.nn.PersonalizedProjection)(
        jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.02), samples(), rounds=1000, key=key
    )
    trained = eqx.filter(layer, eqx.is_inexact_array)
    assert [leaf.size for leaf in jax.tree.leaves(trained)] == [1]
    assert trained.algorithm.step_size.dtype == jnp.float64

    @eqx.filter_jit
    @eqx.filter_grad(has_aux=True)
    def slopes(layer, values, state):
        projected, state = layer(values, state)
        return (projected**2).sum(), (projected, state)

    kept, found = state.get(layer.last), []
    for dtype in (jnp.float32, jnp.float64):
        slope, (projected, state) = slopes(layer, jnp.asarray(samples(), dtype), state)
        assert jax.tree.leaves(slope) == [0.0]  # a step size does not move a solution
        assert projected.dtype == dtype
        chex.assert_trees_all_equal_shapes_and_dtypes(state.get(layer.last), kept)
        found.append(projected)
    np.testing.assert_allclose(*found, atol=1e-4)


@pytest.mark.slow
def test_a_layer_begins_at_a_solution_however_few_the_rounds_of_a_call(key):
    """A hundred rounds from the start alone would end far from it."""
    values = jax.random.normal(key, (3, 20, 4)) * jnp.array([5.0, 4.0, 2.0, 1.0])
    layer, state = eqx.nn.make_with_state(jf.nn.PersonalizedProjection)(
        jf.pca.PerPCA(1, 1, solver="gradient"), values, rounds=100, key=jax.random.key(1)
    )
    slope, _ = jax.jit(jax.grad(lambda scale: error(scale, layer, state, values), has_aux=True))(
        jnp.ones(4)
    )
    assert jnp.isfinite(slope).all() and jnp.abs(slope).max() > 1e-3


@pytest.mark.slow
def test_views_on_what_they_have_in_common(key):
    rng = np.random.default_rng(0)
    common = rng.normal(size=(9, 2))
    arrays = [common @ rng.normal(size=(2, 3)) + 0.3 * rng.normal(size=(9, 3)) for _ in range(3)]
    make = eqx.nn.make_with_state(jf.nn.CommonRepresentation)
    algorithm = jf.gcca.MaxVar(2, ridge=0.1)
    layer, state = make(algorithm, jf.gcca.Views.from_arrays(arrays), rounds=300, key=key)

    @jax.jit
    @jax.value_and_grad
    def left(scale):
        scaled = [array * scale for array in arrays]
        projected, _ = layer(jf.gcca.Views.from_arrays(scaled), state)
        return ((jnp.stack(scaled) - projected) ** 2).sum()

    scale, direction = jnp.ones(3), jnp.array([0.3, -0.7, 0.2])
    near, far = (
        left(scale + step * direction)[0] - left(scale - step * direction)[0]
        for step in (1e-4, 2e-4)
    )
    np.testing.assert_allclose(left(scale)[1] @ direction, (8 * near - far) / 1.2e-3, rtol=1e-6)
