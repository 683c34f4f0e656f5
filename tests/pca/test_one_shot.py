"""The geometric median of projectors, by NumPy and against clients that lie."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import jaxfed as jf
from jaxfed.pca.one_shot import _median_factor
from tests.helpers import gaussian

FEATURES, WIDTH = 6, 2


def bases(count, seed=0):
    rng = np.random.default_rng(seed)
    return np.stack([np.linalg.qr(rng.normal(size=(FEATURES, WIDTH)))[0] for _ in range(count)])


def test_the_median_has_the_smallest_sum_of_distances(x64):
    found = bases(7)
    factor = _median_factor(jnp.asarray(found))
    projectors = (found @ found.mT).reshape(7, -1)
    wanted = minimize(
        lambda x: np.linalg.norm(projectors - x, axis=1).sum(), projectors.mean(0), tol=1e-9
    ).x
    chex.assert_trees_all_close((factor @ factor.T).ravel(), wanted, atol=1e-4)


def test_an_absent_client_is_not_in_the_median(x64):
    found = bases(5)
    padded = np.concatenate([found, np.zeros((2, FEATURES, WIDTH))])
    one, other = (_median_factor(jnp.asarray(each)) for each in (found, padded))
    chex.assert_trees_all_close(other @ other.T, one @ one.T, atol=1e-10)


def test_equal_clients_have_a_derivative(x64):
    same = jnp.asarray(np.tile(bases(1), (4, 1, 1)))
    value, slope = jax.value_and_grad(lambda x: jnp.sum(_median_factor(x) ** 2))(same)
    np.testing.assert_allclose(value, WIDTH, rtol=1e-6)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize(("method", "near"), [("median", True), ("spectrum", False)])
def test_three_clients_of_ten_do_not_move_it_far(method, near, key):
    clients = gaussian((60,) * 10, (3, 2.5, 1, 0.5, 0.4, 0.3))
    values = np.array(clients.data.values)
    values[:3] = 100 * values[:3][..., ::-1]
    spoiled = jf.Clients.from_samples(values)
    found = jf.fit(jf.pca.OneShot(2, 1, method=method), spoiled, rounds=1, key=key).result.shared
    assert (np.linalg.norm(found[2:], 2) < 0.4) == near
