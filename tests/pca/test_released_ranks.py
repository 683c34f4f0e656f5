"""Ranks suggested by moments whose noise protects persons."""

import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.pca import _released_ranks

CLIENTS, FEATURES, PERSONS = 12, 20, 500


def released(shared, local, epsilon, noise_variance=0.09, seed=0, **options):
    """Moments of clients with shared variances 4, local ones 2.25, and equal ones besides."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(FEATURES, FEATURES)))[0][:, :shared]
    tables = []
    for _ in range(CLIENTS):
        own = rng.normal(size=(FEATURES, local))
        own = np.linalg.qr(own - basis @ (basis.T @ own))[0]
        rows = 2 * rng.normal(size=(PERSONS, shared)) @ basis.T
        rows += 1.5 * rng.normal(size=(PERSONS, local)) @ own.T
        tables.append(rows + noise_variance**0.5 * rng.normal(size=rows.shape))
    clients = jf.Clients.from_samples(np.float32(tables))
    options |= {"epsilon": epsilon, "delta": 1e-5, "key": jax.random.key(seed)}
    return jf.privacy.release_moments(clients, **options)


def suggested(clients):
    return jf.pca.suggest_ranks(clients, key=jax.random.key(1), most_shared=4, most_local=4)


# Where the noise of the release is larger than the error of finitely many samples, and smaller.
@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("truth", [(2, 2), (2, 0), (0, 2), (0, 0)])
def test_the_truth_is_found_beside_known_noise(truth, epsilon):
    noise_variance = 0.09 if sum(truth) else 1.0
    found = suggested(released(*truth, epsilon, noise_variance))
    assert (found.shared, found.local) == truth
    assert found.suggested == (truth if all(truth) else None)
    if all(truth):
        assert found.support > 0.9
        # Of directions, whose variances add up to one.
        assert 0.003 < np.mean(found.noise_variance) < 0.015


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"rows": "directions"}, {"neighbours": "add_remove"}, {"semidefinite": True}]
)
def test_all_kinds_of_directions_are_tested(options):
    assert suggested(released(2, 2, 1.0, **options)).suggested == (2, 2)


@pytest.mark.slow
def test_local_components_below_the_noise_are_too_weak_to_tell():
    found = suggested(released(2, 2, 0.3))
    assert found.shared == 2 and found.suggested is None


@pytest.mark.slow
def test_persons_set_the_noise_and_not_rows():
    person = [np.arange(PERSONS) // 2] * CLIENTS
    assert suggested(released(2, 2, 2.0, person=person)).suggested == (2, 2)
    # With the noise of twice as many persons in the null, noise itself would be a component.
    found = suggested(released(0, 0, 1.0, 1.0, person=person))
    assert (found.shared, found.local) == (0, 0)


def test_a_direction_counts_up_to_the_largest_that_noise_would_have():
    values, deviation, terms = np.array([0.5, 0.2, 0.1, 0.05, 0.0, -0.05]), 0.05, 100
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    signal = np.asarray(_released_ranks._signal((vectors * values) @ vectors.T, terms, deviation))
    median = 0.075
    edge = 2 * np.sqrt(6 * (deviation**2 / 2 + median**2 / terms))
    weights = np.clip((values - median) / edge, 0, 1)
    assert weights[0] == 1 and 0 < weights[2] < weights[1] < 1
    np.testing.assert_allclose(signal @ signal.T, (vectors * weights) @ vectors.T, atol=1e-5)
