"""A backend from outside serves runs, grids, derivatives and the public checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_kmeans import KMeans
from one_by_one import OneByOne

import jaxfed as jf
from jaxfed.testing import check_algorithm


def draw():
    """Clients of different lengths."""
    rng = np.random.default_rng(0)
    return jf.Clients.from_samples([rng.normal(size=(n, 3)).astype("f4") for n in (9, 4, 7, 5)])


def fitted(backend, **options):
    key = jax.random.key(0)
    return jf.fit(KMeans(2), draw(), rounds=4, key=key, backend=backend, **options)


def test_runs_give_what_vmap_gives():
    for options in ({}, {"participation": jf.participation.uniform(2)}):
        given, wanted = fitted(OneByOne(), **options), fitted(jf.backend.vmap(), **options)
        np.testing.assert_allclose(given.result.shared, wanted.result.shared, rtol=1e-5)
        np.testing.assert_allclose(given.history["objective"], wanted.history["objective"], 1e-5)


def test_several_devices_may_each_run_it():
    devices = min(2, jax.local_device_count())
    given = fitted(jf.backend.shard(devices, inner=OneByOne()))
    np.testing.assert_allclose(given.result.shared, fitted(OneByOne()).result.shared, rtol=1e-5)


def test_a_grid_runs_its_points_one_by_one():
    pytest.importorskip("xarray")

    def squares(x, y):
        return {"sum": x**2 + y**2}

    axes = {"x": [1.0, 2.0], "y": [0.0, 1.0, 3.0]}
    found = jf.grid(squares, axes, backend=OneByOne(), runs_at_once=2)
    np.testing.assert_array_equal(found["sum"], [[1, 2, 10], [4, 5, 13]])


def test_a_solution_has_its_derivative():
    pytest.importorskip("lineax")

    def loss(values, backend):
        clients = jf.Clients.from_samples(values)
        run = jf.rollout(
            jf.pca.SubspaceIteration(1),
            clients,
            rounds=300,
            key=jax.random.key(0),
            adjoint=jf.adjoint.implicit(),
            backend=backend,
        )
        shared = run.result.shared
        return (jnp.arange(9.0).reshape(3, 3) * (shared @ shared.T)).sum()

    with jax.enable_x64(True):
        values = np.random.default_rng(1).normal(size=(4, 6, 3)) * [3.0, 1.0, 0.5]
        derivative = jax.jit(jax.grad(loss), static_argnums=1)
        given, wanted = (derivative(values, way) for way in (OneByOne(), jf.backend.vmap()))
    assert np.abs(wanted).max() > 1e-3
    np.testing.assert_allclose(given, wanted, atol=1e-9)


def test_an_algorithm_from_outside_runs_on_it():
    report = check_algorithm(KMeans(2), draw(), backends={"one": OneByOne()}, checks=["backends"])
    assert report.checked == ("backends",)
