"""Shrinkage of the noise, and the choice by split halves: shared components that stay true."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.linalg import Moment


def spiked(key, samples, spikes, noise, features):
    """Samples of a spiked covariance model, and its directions."""
    basis_key, score_key, noise_key = jax.random.split(key, 3)
    basis = jf.manifolds.stiefel.random(features, len(spikes), key=basis_key, dtype=jnp.float64)
    scores = jax.random.normal(score_key, (samples, len(spikes)), jnp.float64) * jnp.sqrt(spikes)
    noises = jnp.sqrt(noise) * jax.random.normal(noise_key, (samples, features), jnp.float64)
    return scores @ basis.T + noises, basis


@pytest.mark.slow
def test_finds_the_spikes_and_drops_the_noise(x64, key):
    spikes = jnp.asarray([9.0, 4.0])
    samples, basis = spiked(key, 4000, spikes, 0.5, 40)
    shrunk = jf.pca.shrink(Moment.from_samples(samples, jnp.float64(4000)), 6)
    values = np.linalg.eigvalsh(shrunk.matrix())[::-1]
    # The raw eigenvalues hold noise + spike + bias; what is left is the spike alone.
    np.testing.assert_allclose(values[:2], spikes, rtol=0.08)
    np.testing.assert_array_less(np.abs(values[2:]), 1e-12)
    assert jf.metrics.projector_distance(shrunk.top(2)[1], basis) < 0.02


def test_pure_noise_is_nothing(x64, key):
    samples = jax.random.normal(key, (300, 20), jnp.float64)
    shrunk = jf.pca.shrink(Moment.from_samples(samples, jnp.float64(300)), 5)
    assert jnp.linalg.norm(shrunk.matrix()) < 0.1 * jnp.linalg.norm(jnp.cov(samples.T))


@pytest.mark.slow
def test_noiseless_data_are_left_alone(x64, key):
    samples, _ = spiked(key, 50, jnp.asarray([3.0, 1.0]), 0.0, 12)
    moment = Moment.from_samples(samples, jnp.float64(50))
    chex.assert_trees_all_close(jf.pca.shrink(moment, 4).matrix(), moment.matrix(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 3, 5])
def test_fewer_samples_than_the_rank_are_finite(key, samples):
    values = jax.random.normal(key, (samples, 8))
    moment = Moment.from_samples(values, jnp.float32(samples))
    matrix, gradient = jax.value_and_grad(
        lambda y: jnp.sum(
            jf.pca.shrink(Moment.from_samples(y, jnp.float32(samples)), 6).matrix() ** 2
        )
    )(values)
    chex.assert_tree_all_finite((matrix, gradient, jf.pca.shrink(moment, 6).matrix()))


@pytest.mark.slow
def test_the_scale_changes_nothing():
    """Of rank-one data, whose noise is rounding: that of tiny data used to drop the signal."""
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(6, 1)) @ rng.normal(size=(1, 5))).astype(np.float32)

    @jax.jit
    @jax.value_and_grad
    def energy(rows, weight):
        shrunk = jf.pca.shrink(Moment.from_samples(rows).densified(), 2)
        return weight * jnp.linalg.norm(shrunk.samples @ jnp.arange(1.0, 6))

    value, slope = energy(rows, 1.0)
    for scale in (1e-13, 1e-16, 1e15):
        found, its_slope = energy(np.float32(scale) * rows, 1e10)
        np.testing.assert_allclose(found / scale / 1e10, value, rtol=1e-4)
        np.testing.assert_allclose(its_slope / 1e10, slope, atol=1e-3 * np.abs(slope).max())


@pytest.fixture(scope="module")
def weakly_shared():
    """Shared variance far below the noise, as in the published Table 2: identified, barely."""
    return jf.data.perpca_synthetic(
        key=jax.random.key(0),
        clients=60,
        features=15,
        shared_rank=2,
        local_rank=10,
        samples=[50] * 30 + [500] * 30,
        shared_scale=0.01,
        local_scale=0.99,
        noise_variance=0.5,
    )


@pytest.mark.slow
def test_keeps_the_iteration_near_the_truth(weakly_shared, key):
    clients = jf.Clients.from_samples(weakly_shared.samples)
    error = {}
    for shrinkage in (False, True):
        algorithm = jf.pca.PerPCA(
            2, 10, solver="gradient", step_size=0.2, shrinkage=shrinkage, start="local_first"
        )
        result = jf.fit(algorithm, clients, rounds=1000, key=key).result
        error[shrinkage] = jf.metrics.projector_distance(result.shared, weakly_shared.shared)
        joint = jnp.concatenate(
            [jnp.broadcast_to(result.shared, (60, 15, 2)), result.local], axis=2
        )
        gram = jnp.einsum("mdr,mds->mrs", joint, joint)
        chex.assert_trees_all_close(gram, jnp.broadcast_to(jnp.eye(12), gram.shape), atol=1e-5)
    assert error[False] > 2  # the optimum of the plain objective is somewhere else
    assert error[True] < 0.1


@pytest.mark.slow
def test_split_halves_choose_what_is_true(weakly_shared, key):
    clients = jf.Clients.from_samples(weakly_shared.samples)
    shrunk = jf.pca.PerPCA(2, 10, solver="gradient", shrinkage=True, start="local_first")
    candidates = [jf.pca.PerPCA(2, 10), shrunk]
    best, disagreement = jf.pca.split_half(candidates, clients, rounds=60, key=key)
    assert best == 1
    assert disagreement[0] > 1 > 0.2 > disagreement[1]


def test_split_halves_refuse_what_cannot_be_split(key):
    with pytest.raises(ValueError, match="algorithms"):
        jf.pca.split_half([], jf.Clients.from_samples(np.ones((2, 4, 3))), rounds=1, key=key)
    alone = jf.Clients.from_samples([np.ones((4, 3)), np.ones((1, 3))])
    with pytest.raises(ValueError, match="client 1 has one"):
        jf.pca.split_half([jf.pca.PerPCA(1, 1, solver="gradient")], alone, rounds=1, key=key)
    moments = jf.Clients.from_moments(np.stack([np.eye(3)] * 2))
    with pytest.raises(ValueError, match="samples"):
        jf.pca.split_half([jf.pca.PerPCA(1, 1, solver="gradient")], moments, rounds=1, key=key)


@pytest.mark.slow
def test_derivatives_of_several_spikes(x64, key):
    """What turns the kept eigenvectors towards each other counts, as they shrink differently."""
    samples, _ = spiked(key, 40, jnp.asarray([9.0, 4.0, 1.0]), 0.02, 5)
    weights, direction = np.random.default_rng(0).normal(size=(2, 40, 5))

    @jax.jit
    @jax.value_and_grad
    def energy(samples):
        moment = jf.pca.shrink(Moment.from_samples(samples), 4)
        return jnp.sum((weights[:5] @ moment.matrix()) ** 3)

    near, far = (
        energy(samples + step * direction)[0] - energy(samples - step * direction)[0]
        for step in (1e-4, 2e-4)
    )
    wanted = (8 * near - far) / 1.2e-3
    np.testing.assert_allclose((energy(samples)[1] * direction).sum(), wanted, rtol=1e-7)
