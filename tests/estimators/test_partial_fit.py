"""Estimators that learn from samples in parts, with two shared and two own components."""

import pickle

import chex
import jax
import numpy as np
import pytest
from sklearn.decomposition import PCA

import jaxfed as jf
from jaxfed import estimators
from tests.estimators.test_estimators import sampled

ESTIMATORS = {
    "PersonalizedPCA": estimators.PersonalizedPCA(2, 2, rounds=60, n_init=1, random_state=0),
    "FederatedPCA": estimators.FederatedPCA(2, random_state=0),
    "HierarchicalBayesPCA": estimators.HierarchicalBayesPCA(2, rounds=60, random_state=0),
}


def fresh(name, **settings):
    return pickle.loads(pickle.dumps(ESTIMATORS[name])).set_params(**settings)


def spans(estimator):
    both = estimator.components_.T, estimator.local_components_.swapaxes(1, 2)
    return [basis @ basis.swapaxes(-1, -2) for basis in both]


def parts(seed=0, order=0):
    """Half of the samples and the other half, whose means differ."""
    X, groups, _ = sampled(seed=seed)
    half = np.arange(len(X)) % 2 == order
    X[~half] += 0.5
    return (X[half], groups[half]), (X[~half], groups[~half]), (X, groups)


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("center", [True, False])
def test_one_part_is_a_fit(name, center):
    *_, (X, groups) = parts()
    # The noise variance takes its time where samples are not centred.
    options = {"rounds": 300} if name == "HierarchicalBayesPCA" else {}
    whole = fresh(name, center=center, **options).fit(X, groups=groups)
    part = fresh(name, center=center, **options).partial_fit(X, groups=groups)
    np.testing.assert_allclose(part.mean_, whole.mean_, atol=1e-6)
    chex.assert_trees_all_close(spans(part), spans(whole), atol=2e-3)
    wanted = whole.score_samples(X, groups=groups)
    np.testing.assert_allclose(part.score_samples(X, groups=groups), wanted, atol=0.02)
    np.testing.assert_allclose(
        part.explained_variance_ratio_, whole.explained_variance_ratio_, atol=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
def test_two_parts_are_a_fit_to_all(name):
    first, second, (X, groups) = parts()
    found = fresh(name)
    for each in (first, second):
        found.partial_fit(each[0], groups=each[1])
    whole = fresh(name).fit(X, groups=groups)
    np.testing.assert_allclose(found.mean_, whole.mean_, atol=1e-6)
    chex.assert_trees_all_close(spans(found), spans(whole), atol=2e-3)
    np.testing.assert_allclose(found.noise_variance_, whole.noise_variance_, rtol=1e-3)
    np.testing.assert_allclose(
        found.score(X, groups=groups), whole.score(X, groups=groups), atol=1e-3
    )


def test_twice_is_two_updates():
    """Without centring, by the functions that are behind it."""
    first, second, _ = parts()
    found = fresh("PersonalizedPCA", center=False, forgetting=0.3)
    clients, solution, rule = None, None, jf.stream.Forgetting(0.3)
    for X, groups in (first, second, first):
        found.partial_fit(X, groups=groups)
        tables = [X[groups == label] for label in np.unique(groups)]
        clients = rule.update(clients, jf.Clients.from_samples(tables))
        key = jax.random.key(np.random.RandomState(0).randint(2**31 - 1))
        options = {"rounds": 60, "key": key}
        if solution is None:
            solution = jf.fit(jf.pca.PerPCA(2, 2), clients, **options)
        else:
            solution = jf.update(solution, clients, **options)
    shared, local = (np.asarray(part, float) for part in solution.result)
    wanted = [shared @ shared.T, local @ local.swapaxes(1, 2)]
    chex.assert_trees_all_close(spans(found), wanted, atol=1e-4)


@pytest.mark.slow
def test_samples_far_from_zero_cost_no_precision():
    first, second, (X, _) = parts()
    found = fresh("FederatedPCA", tol=None)
    for X_part, each in (first, second):
        found.partial_fit((X_part + 1e4).astype(np.float32), groups=each)
    exact = PCA(2).fit(X)
    basis = found.components_.T
    np.testing.assert_allclose(basis @ basis.T, exact.components_.T @ exact.components_, atol=5e-3)


@pytest.mark.slow
def test_the_old_is_forgotten():
    *_, (X, groups) = parts(seed=0)
    *_, (newer, _) = parts(seed=5)
    found = fresh("PersonalizedPCA", forgetting=1.0)
    found.partial_fit(X, groups=groups).partial_fit(newer, groups=groups)
    alone = fresh("PersonalizedPCA").fit(newer, groups=groups)
    np.testing.assert_allclose(found.mean_, alone.mean_, atol=1e-5)
    chex.assert_trees_all_close(spans(found), spans(alone), atol=2e-3)


@pytest.mark.slow
def test_groups_come_and_go_in_the_order_of_their_labels():
    X, groups, _ = sampled()
    names = np.array(["d", "b", "a", "c"])[groups]
    found = fresh("PersonalizedPCA").partial_fit(X[groups < 2], groups=names[groups < 2])
    assert found.groups_.tolist() == ["b", "d"]
    found.partial_fit(X[groups >= 2], groups=names[groups >= 2])
    assert found.groups_.tolist() == ["a", "b", "c", "d"]
    whole = fresh("PersonalizedPCA").fit(X, groups=names)
    chex.assert_trees_all_close(spans(found), spans(whole), atol=2e-3)
    restored = found.inverse_transform(found.transform(X, groups=names), groups=names)
    assert np.mean((restored - X) ** 2) < 0.02


@pytest.mark.slow
def test_fit_begins_anew_and_copies_go_on():
    first, second, _ = parts()
    found = fresh("FederatedPCA").partial_fit(first[0], groups=first[1])
    copy = pickle.loads(pickle.dumps(found))
    for each in (found, copy):
        each.partial_fit(second[0], groups=second[1])
    chex.assert_trees_all_equal(spans(found), spans(copy))
    found.fit(first[0], groups=first[1]).partial_fit(second[0], groups=second[1])
    alone = fresh("FederatedPCA").partial_fit(second[0], groups=second[1])
    chex.assert_trees_all_equal(spans(found), spans(alone))


def test_bad_input_is_refused():
    (X, groups), *_ = parts()
    found = fresh("FederatedPCA").partial_fit(X, groups=groups)
    before = spans(found)
    with pytest.raises(ValueError, match=r"has 5 features, but FederatedPCA is expecting 6"):
        found.partial_fit(X[:, :5], groups=groups)
    with pytest.raises(ValueError, match=r"^groups: wanted numbers, as in fit, got names"):
        found.partial_fit(X, groups=groups.astype(str))
    with pytest.raises(ValueError, match=r"^forgetting: wanted a number in \(0, 1\] or None"):
        found.set_params(forgetting=2.0).partial_fit(X, groups=groups)
    with pytest.raises(ValueError, match="NaN"):
        found.set_params(forgetting=None).partial_fit(X * np.nan, groups=groups)
    chex.assert_trees_all_equal(spans(found), before)
    found.partial_fit(X[:1], groups=groups[:1])


def test_means_that_jump_in_single_precision():
    rng = np.random.default_rng(0)
    first = rng.normal(size=(400, 3)).astype(np.float32) * np.float32([3, 1, 1])
    found = fresh("FederatedPCA", n_components=2)
    for offset in (0, 1e4, 0):
        found.partial_fit(first + np.float32(offset), groups=np.arange(400) % 2)
    wanted = np.concatenate([first + np.float32(offset) for offset in (0, 1e4, 0)]).astype(float)
    axes = np.linalg.svd(wanted - wanted.mean(axis=0), full_matrices=False)[2][:2]
    assert np.abs(found.components_) == pytest.approx(np.abs(axes), abs=1e-6)
