"""Federated k-means keeps the contract on every backend and channel, and finds the clusters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_kmeans import KMeans

import jaxfed as jf
from jaxfed.testing import CHECKS, check_algorithm

CENTRES = np.array([[4.0, 0, 0], [0, 4, 0], [0, 0, 4]])


def draw(seed=0):
    """Clients of different lengths, each with samples of all clusters, and the samples."""
    rng = np.random.default_rng(seed)
    kinds = [np.arange(n) % 3 for n in (20, 14, 17, 11)]
    samples = [CENTRES[kind] + 0.3 * rng.normal(size=(len(kind), 3)) for kind in kinds]
    return jf.Clients.from_samples(samples), samples


def backends():
    """Every kind, on two devices where there are two."""
    devices = min(2, jax.local_device_count())
    return {
        "vmap": jf.backend.vmap(),
        "chunked": jf.backend.chunked(3),
        "pmap": jf.backend.pmap(devices),
        "shard": jf.backend.shard(devices),
        "chunks on devices": jf.backend.shard(devices, inner=jf.backend.chunked(1)),
    }


def test_it_keeps_the_contract():
    clients, _ = draw()
    report = check_algorithm(KMeans(3), clients, backends=backends(), deterministic=True)
    # Centres are not quadratic in the samples. What a checkpoint needs may not be installed.
    assert report.skipped.keys() <= {"checkpoint", "samples"}
    assert set(report.checked) | report.skipped.keys() == set(CHECKS)


def test_it_is_lloyds_algorithm():
    clients, samples = draw()
    together, centres = np.concatenate(samples), CENTRES[:, ::-1] + 1.0
    start = jf.Personalized(np.asarray(centres, np.float32), None)
    given = jf.fit(KMeans(3), clients, rounds=5, key=jax.random.key(0), warm_start=start)
    for _ in range(5):
        nearest = ((together[:, None] - centres) ** 2).sum(-1).argmin(1)
        centres = np.stack([together[nearest == i].mean(0) for i in range(3)])
    np.testing.assert_allclose(given.result.shared, centres, atol=1e-5)
    found = np.sort(np.round(given.result.shared).argmax(1))
    np.testing.assert_array_equal(found, [0, 1, 2])
    assert given.result.local is None


def test_a_solution_has_its_derivative():
    """Each coordinate of a centre is a mean of its cluster's samples."""
    pytest.importorskip("lineax")
    samples = jnp.asarray(np.stack([CENTRES + shift for shift in (-0.2, 0.1, 0.3, 0.0)]))

    def total(samples):
        run = jf.rollout(
            KMeans(3),
            jf.Clients.from_samples(samples),
            rounds=20,
            key=jax.random.key(0),
            warm_start=jf.Personalized(jnp.asarray(CENTRES, samples.dtype), None),
            adjoint=jf.adjoint.implicit(),
        )
        return run.result.shared.sum()

    np.testing.assert_allclose(jax.jit(jax.grad(total))(samples), 1 / len(samples), rtol=1e-5)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"^clusters: wanted a whole number of at least 1, got 0"):
        KMeans(0)
    start = jf.Personalized(np.zeros((2, 3), np.float32), None)
    with pytest.raises(ValueError, match=r"^warm_start: wanted centres of shape"):
        jf.fit(KMeans(3), draw()[0], rounds=1, key=jax.random.key(0), warm_start=start)
