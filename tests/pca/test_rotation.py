"""Rotations reach scikit-learn's optimum, keep the span, and have derivatives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_wine
from sklearn.decomposition import FactorAnalysis

import jaxfed as jf

METHODS = "varimax", "quartimax", "promax"
EXACT = {"svd_method": "lapack", "tol": 1e-10, "max_iter": 10_000}


@pytest.fixture(scope="module")
def table():
    samples = load_wine().data
    return (samples - samples.mean(0)) / samples.std(0)


@pytest.fixture(scope="module")
def loadings(table):
    return FactorAnalysis(3, **EXACT).fit(table).components_.T


def criterion(loadings, method):
    squares = np.asarray(loadings) ** 2
    mean = 0 if method == "quartimax" else 1
    return np.sum(squares**2) - mean * np.sum(squares.sum(0) ** 2) / len(squares)


@pytest.mark.parametrize("method", [pytest.param("varimax", marks=pytest.mark.slow), "quartimax"])
def test_the_optimum_is_that_of_scikit_learn(x64, table, loadings, method):
    theirs = FactorAnalysis(3, rotation=method, **EXACT).fit(table).components_.T
    found = jf.pca.rotate(loadings, method)
    ours, best = (criterion(x, method) for x in (found.loadings, theirs))
    assert best - 1e-9 <= ours <= best + 1e-5
    assert ours > criterion(loadings, method) + 0.5
    # The same components, but for their order and signs.
    between = np.abs(np.linalg.pinv(theirs) @ found.loadings)
    np.testing.assert_allclose(np.sort(between, axis=0), [[0] * 3, [0] * 3, [1] * 3], atol=1e-3)
    chex.assert_trees_all_close(found.matrix.T @ found.matrix, jnp.eye(3), atol=1e-10)
    chex.assert_trees_all_close(found.correlations, jnp.eye(3), atol=1e-10)


def test_axes_halfway_between_two_components_are_left(x64):
    """There the criterion has no gradient."""
    structure = np.array([[1.0, 0], [0, 1], [0.5, 0], [0, 0.5]])
    halfway = structure @ np.array([[1, 1], [1, -1]]) / np.sqrt(2)
    chex.assert_trees_all_close(
        jnp.sort(jf.pca.rotate(halfway).loadings, axis=1)[:, ::-1],
        np.sort(structure, axis=1)[:, ::-1],
        atol=1e-6,
    )


def test_promax_is_that_of_its_paper(x64, loadings):
    rotated = jf.pca.rotate(loadings).loadings
    target = np.sign(rotated) * np.abs(rotated) ** 3
    turn = np.linalg.solve(rotated.T @ rotated, rotated.T @ target)
    # Rows of the inverse are the components' axes, of length one.
    turn = turn * np.linalg.norm(np.linalg.inv(turn), axis=1)
    found = jf.pca.rotate(loadings, "promax", power=3.0)
    between = np.linalg.pinv(rotated @ turn) @ found.loadings
    np.testing.assert_allclose(np.sort(np.abs(between), axis=0)[:2], 0, atol=1e-9)
    np.testing.assert_allclose(np.abs(between).max(0), 1, atol=1e-9)
    chex.assert_trees_all_close(jnp.diagonal(found.correlations), jnp.ones(3), atol=1e-10)
    # What the loadings explain does not change.
    explained = found.loadings @ found.correlations @ found.loadings.T
    chex.assert_trees_all_close(explained, loadings @ loadings.T, atol=1e-10)


def test_features_count_equally_where_they_are_normalized(x64, loadings):
    rows = loadings / np.linalg.norm(loadings, axis=1, keepdims=True)
    found, wanted = jf.pca.rotate(loadings, normalize=True), jf.pca.rotate(rows)
    np.testing.assert_allclose(
        np.sort(np.abs(np.asarray(found.matrix.T @ wanted.matrix)).ravel()),
        [0] * 6 + [1] * 3,
        atol=1e-5,
    )
    assert np.abs(found.matrix - jf.pca.rotate(loadings).matrix).max() > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_each_client_is_rotated_by_itself(x64, loadings, method):
    clients = np.stack([loadings, 1e-9 * loadings, np.roll(loadings, 1, axis=0)])
    found = jax.jit(lambda x: jf.pca.rotate(x, method))(clients)
    for i, one in enumerate(clients):
        alone = jf.pca.rotate(one, method)
        chex.assert_trees_all_close(found.matrix[i], alone.matrix, atol=1e-8)
    given = jnp.sum(found.loadings**2, axis=1)
    assert (jnp.diff(given, axis=1) <= 0).all()
    largest = jnp.argmax(jnp.abs(found.loadings), axis=1)[:, None]
    assert (jnp.take_along_axis(found.loadings, largest, axis=1) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_derivatives_equal_central_differences(x64, loadings, method):
    change = np.random.default_rng(0).normal(size=loadings.shape)

    def rotated(step):
        return jf.pca.rotate(loadings + step * change, method).loadings

    step = 1e-4
    difference = (rotated(step) - rotated(-step)) / (2 * step)
    forward = jax.jacfwd(rotated)(0.0)
    chex.assert_trees_all_close(forward, difference, atol=1e-5)
    backward = jax.grad(lambda x: jnp.sum(rotated(x) * change))(0.0)
    chex.assert_trees_all_close(backward, jnp.sum(forward * change), rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_units_change_nothing(loadings, scale):
    single = loadings.astype(np.float32)
    found, wanted = (jf.pca.rotate(x).loadings for x in (scale * single, single))
    np.testing.assert_allclose(found / np.float32(scale), wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_single(loadings, dtype):
    half = jnp.asarray(loadings, dtype)
    found = jf.pca.rotate(half).loadings
    assert found.dtype == dtype
    wanted = jf.pca.rotate(half.astype(jnp.float32)).loadings
    np.testing.assert_allclose(found.astype(np.float32), wanted, atol=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_loadings_without_structure(method):
    none = jf.pca.rotate(np.zeros((4, 2)), method)
    chex.assert_tree_all_finite(none.loadings)
    chex.assert_trees_all_equal(none.loadings, jnp.zeros((4, 2)))
    one = jf.pca.rotate(-np.ones((4, 1), np.float32), method)
    chex.assert_trees_all_close(one.loadings, jnp.ones((4, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loadings": np.ones(3)}, "^loadings: wanted an array"),
        ({"loadings": np.ones((2, 3))}, "^loadings: wanted at most as many"),
        ({"loadings": np.full((3, 2), np.nan)}, "^loadings: wanted finite"),
        ({"method": "oblimin"}, "^method: wanted"),
        ({"power": 0.0}, "^power: wanted"),
        ({"normalize": "yes"}, "^normalize: wanted"),
    ],
)
def test_bad_input_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        jf.pca.rotate(**{"loadings": np.ones((3, 2)), **change})
