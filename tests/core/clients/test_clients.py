"""Clients made from users' data."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.linalg import Moment
from tests.helpers import gaussian_samples

COUNTS = (4, 2, 5)
samples = functools.partial(gaussian_samples, COUNTS, (1, 1, 1))


def test_ragged_lists_are_padded_with_zero_rows():
    arrays = samples()
    clients = jf.Clients.from_samples(arrays)
    assert len(clients) == 3
    assert clients.features == 3
    assert clients.data.values.shape == (3, 5, 3)
    np.testing.assert_array_equal(clients.data.count, COUNTS)
    np.testing.assert_array_equal(clients.data.mask.sum(axis=1), COUNTS)
    for values, mask, array in zip(clients.data.values, clients.data.mask, arrays, strict=True):
        np.testing.assert_array_equal(values[: len(array)], array)
        assert (values[len(array) :] == 0).all()
        np.testing.assert_array_equal(mask, np.arange(5) < len(array))
    np.testing.assert_array_equal(clients.ids, [0, 1, 2])


def test_one_array_is_a_list_of_equal_lengths():
    block = np.stack(gaussian_samples((4, 4)))
    chex.assert_trees_all_equal(
        jf.Clients.from_samples(block), jf.Clients.from_samples(list(block))
    )
    chex.assert_trees_all_equal(
        jf.Clients.from_samples(jnp.asarray(block)), jf.Clients.from_samples(tuple(block))
    )


def test_weights():
    arrays = samples()
    for weights, wanted in (
        ("equal", [1 / 3, 1 / 3, 1 / 3]),
        ("samples", [4 / 11, 2 / 11, 5 / 11]),
        ([2, 0, 6], [0.25, 0, 0.75]),
        (jnp.asarray([1.0, 1.0, 2.0]), [0.25, 0.25, 0.5]),
    ):
        clients = jf.Clients.from_samples(arrays, weights=weights)
        np.testing.assert_allclose(clients.weights, wanted, rtol=1e-6)
        assert clients.weights.dtype == jnp.float32


def test_double_precision_is_kept_where_it_is_enabled():
    with jax.enable_x64(True):
        clients = jf.Clients.from_samples(samples(dtype=np.float64))
        for leaf in (clients.data.values, clients.data.count, clients.weights):
            assert leaf.dtype == jnp.float64
        single = jf.Clients.from_samples(samples(dtype=np.float32))
        for leaf in (single.data.values, single.data.count, single.weights):
            assert leaf.dtype == jnp.float32
    assert jf.Clients.from_samples(samples(dtype=np.float64)).data.values.dtype == jnp.float32


def test_take_keeps_ids_and_renormalizes():
    clients = jf.Clients.from_samples(samples(), weights=[1, 2, 5])
    chosen = clients.take([2, 0])
    np.testing.assert_array_equal(chosen.ids, [2, 0])
    np.testing.assert_allclose(chosen.weights, [5 / 6, 1 / 6], rtol=1e-6)
    np.testing.assert_array_equal(chosen.data.values, clients.data.values[np.array([2, 0])])
    assert len(chosen) == 2


def test_duplicate_and_negative_ids_are_refused(key):
    """Clients with the same id used to draw the same noise."""
    clients = jf.Clients.from_samples(samples())
    for ids, wrong in (([0, 1, 1], "1 twice"), ([0, -1, 2], "-1")):
        with pytest.raises(ValueError, match=rf"^clients: wanted ids that differ.*got {wrong}$"):
            jf.Clients(clients.data, jnp.asarray(ids), clients.weights)
    twice = clients.take([0, 2, 2])
    for run in (jf.fit, jf.rollout):
        with pytest.raises(ValueError, match=r"^clients: wanted ids that differ.*got 2 twice$"):
            run(jf.pca.Pooled(1), twice, rounds=1, key=key)
    with pytest.raises(ValueError, match=r"^clients: wanted ids that differ.*got 2 twice$"):
        jf.sweep(jf.pca.Pooled(1), [clients, twice], rounds=1, keys=key)


@pytest.mark.slow
def test_restrict_keeps_the_first_clients_and_samples(key, x64):
    clients = jf.Clients.from_samples(samples(dtype=np.float64), weights=[1, 2, 5])
    some = clients.restrict(clients=2, samples=3)
    assert some.data.values.shape == clients.data.values.shape
    np.testing.assert_array_equal(some.data.count, [3, 2, 3])
    np.testing.assert_allclose(some.weights, [1 / 3, 2 / 3, 0])
    np.testing.assert_array_equal(some.ids, clients.ids)
    assert (some.data.values[:, 3:] == 0).all()
    np.testing.assert_array_equal(some.data.values[:, :3], clients.data.values[:, :3])
    chex.assert_trees_all_equal(clients.restrict(), clients)
    chex.assert_trees_all_close(
        jax.jit(lambda c, m, n: c.restrict(clients=m, samples=n))(clients, 2, 3), some, rtol=1e-12
    )
    # A run equals one on the remaining clients alone.
    alone = jf.Clients.from_samples([x[:3] for x in samples(dtype=np.float64)[:2]], weights=[1, 2])
    one, other = (
        jf.fit(jf.pca.PerPCA(1, 1, solver="gradient"), c, rounds=5, key=key) for c in (some, alone)
    )
    chex.assert_trees_all_close(one.result.local[:2], other.result.local, atol=1e-10)
    np.testing.assert_allclose(one.history["objective"], other.history["objective"], rtol=1e-10)
    # Only restricting the samples requires samples.
    moments = jf.Clients.from_moments(np.stack([np.eye(3)] * 3))
    np.testing.assert_allclose(moments.restrict(clients=2).weights, [0.5, 0.5, 0])
    with pytest.raises(ValueError, match=r"^samples: wanted clients made from samples .* Moment"):
        moments.restrict(samples=1)


@pytest.mark.parametrize(
    "given",
    [
        {"clients": 4},
        {"clients": 0},
        {"clients": True},
        {"clients": 1.5},
        {"clients": "2"},
        {"samples": 6},
        {"samples": -1},
        {"samples": np.float32(2)},
        {"samples": [1, 2]},
    ],
)
def test_unfit_restrictions_are_refused(given):
    (name,) = given
    with pytest.raises(ValueError, match=rf"^{name}: wanted a whole number from 1 to \d, got"):
        jf.Clients.from_samples(samples()).restrict(**given)


def test_moments_are_as_good_as_samples(key, x64):
    arrays = gaussian_samples((9, 7, 8), (1,) * 5, dtype=np.float64)
    moments = np.stack([y.T @ y / len(y) for y in arrays])
    from_samples = jf.Clients.from_samples(arrays, weights="samples")
    from_moments = jf.Clients.from_moments(moments, counts=(9, 7, 8), weights="samples")
    assert from_moments.features == 5
    np.testing.assert_allclose(from_moments.weights, from_samples.weights)
    algorithm = jf.pca.PerPCA(1, 2, solver="gradient")
    one, other = (
        jf.fit(algorithm, clients, rounds=20, key=key) for clients in (from_samples, from_moments)
    )
    chex.assert_trees_all_close(other.result, one.result, atol=1e-9)
    np.testing.assert_allclose(other.history["objective"], one.history["objective"], rtol=1e-9)


def test_pooled_pca_of_moments_weighs_by_sample_counts(key, x64):
    arrays = gaussian_samples((20, 3, 6), (1,) * 4, dtype=np.float64)
    moments = np.stack([y.T @ y / len(y) for y in arrays])
    clients = jf.Clients.from_moments(moments, counts=(20, 3, 6))
    shared = jf.fit(jf.pca.Pooled(2), clients, rounds=1, key=key).result.shared
    together = np.concatenate(arrays)
    wanted = np.linalg.eigh(together.T @ together)[1][:, 2:]
    np.testing.assert_allclose(shared @ shared.T, wanted @ wanted.T, atol=1e-10)


def test_clients_can_be_made_under_a_transformation():
    """Derivatives with respect to samples, of equal lengths or not, and to weights."""
    arrays = [jnp.asarray(array) for array in samples()]

    def loss(arrays, weights):
        clients = jf.Clients.from_samples(arrays, weights=weights)
        moments = jax.vmap(lambda one: Moment.from_samples(one.values, one.count).trace)
        return clients.weights @ moments(clients.data)

    weights = jnp.asarray([1.0, 2.0, 1.0])
    by_arrays, by_weights = jax.jit(jax.grad(loss, argnums=(0, 1)))(arrays, weights)
    shares = weights / 4
    for gradient, array, share in zip(by_arrays, arrays, shares, strict=True):
        np.testing.assert_allclose(gradient, 2 * share * array / len(array), rtol=1e-5)
    traces = np.asarray([(array**2).sum() / len(array) for array in arrays])
    np.testing.assert_allclose(by_weights, (traces - shares @ traces) / 4, rtol=1e-4)
    block = jnp.stack(arrays[:1] * 2)
    assert jnp.isfinite(jax.grad(lambda x: loss(x, "equal"))(block)).all()


def test_clients_are_a_pytree():
    clients = jf.Clients.from_samples(samples())
    doubled = jax.jit(lambda c: jax.tree.map(lambda leaf: leaf + leaf, c))(clients)
    assert isinstance(doubled, jf.Clients)
    np.testing.assert_array_equal(doubled.data.values, 2 * clients.data.values)


def test_samples_of_one_client_know_their_mask():
    one = jf.Samples(jnp.ones((4, 2)), jnp.asarray(3.0))
    np.testing.assert_array_equal(one.mask, [1, 1, 1, 0])


@pytest.mark.parametrize("extra", [0, 3])
def test_extra_padding_does_not_change_moments(extra):
    (array,) = gaussian_samples((6,))
    padded = np.pad(array, ((0, extra), (0, 0)))
    moment = Moment.from_samples(jnp.asarray(padded), jnp.asarray(6.0))
    np.testing.assert_allclose(moment.matrix(), array.T @ array / 6, rtol=1e-5, atol=1e-6)
