"""Estimators of samples with missing entries, with two shared and two own components."""

import pickle
import warnings
from typing import Any

import chex
import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.base import clone
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator

from jaxfed import estimators
from jaxfed.estimators._normal import Normal
from tests.estimators.test_estimators import sampled
from tests.estimators.test_partial_fit import fresh, spans

D, CLIENTS = 6, 8


def with_gaps(rate=0.15, seed=0):
    """Complete samples, the same with gaps, whose each is, and the shared components."""
    X, groups, shared = sampled(m=CLIENTS, n=60, seed=seed)
    missing = np.random.default_rng(seed + 1).random(X.shape) < rate
    missing[missing.all(axis=1), 0] = False
    return X, np.where(missing, np.nan, X), groups, shared


@pytest.fixture(scope="module")
def data():
    return with_gaps()


@pytest.fixture(scope="module")
def fitted(data):
    _, gaps, groups, _ = data
    return fresh("PersonalizedPCA", impute=(2, 2)).fit(gaps, groups=groups)


def test_the_likelihood_is_that_of_what_was_observed():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(D, 3)))[0]
    root = rng.normal(size=(3, 3))
    law = Normal(basis, root @ root.T + 0.2 * np.eye(3), 0.2)
    covariance = basis @ law.within @ basis.T + 0.2 * (np.eye(D) - basis @ basis.T)
    X = rng.normal(size=(20, D))
    X[5:][rng.random((15, D)) < 0.5] = np.nan
    wanted = []
    for row in X:
        seen = ~np.isnan(row)
        marginal: Any = multivariate_normal(cov=covariance[np.ix_(seen, seen)])
        wanted.append(marginal.logpdf(row[seen]))
    np.testing.assert_allclose(law.log_likelihood(X), wanted, rtol=1e-10)


@pytest.mark.slow
def test_ranks_are_chosen_by_the_number_of_features(data):
    _, gaps, groups, _ = data
    auto, given = (
        fresh("FederatedPCA", impute=impute).fit(gaps, groups=groups)
        for impute in ("auto", (D // 2, 2))
    )
    np.testing.assert_array_equal(auto.components_, given.components_)


@pytest.mark.slow
def test_ranks_that_are_too_small_are_named():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 4)) @ rng.normal(size=(4, 12)) + 0.3 * rng.normal(size=(200, 12))
    gaps = np.where(rng.random(X.shape) < 0.2, np.nan, X)
    groups = np.arange(200) % 4
    with pytest.warns(UserWarning, match=r"^impute: One more component .* larger ranks"):
        fresh("FederatedPCA", impute=(1, 1)).fit(gaps, groups=groups)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh("FederatedPCA", impute="auto").fit(gaps, groups=groups)


@pytest.mark.slow
def test_components_and_noise_are_those_of_the_truth(data, fitted):
    full, _, groups, shared = data
    assert np.linalg.svd(fitted.components_ @ shared)[1].min() > 0.999
    whole = fresh("PersonalizedPCA").fit(full, groups=groups)
    np.testing.assert_allclose(fitted.mean_, whole.mean_, atol=0.05)
    np.testing.assert_allclose(fitted.noise_variance_, whole.noise_variance_, rtol=0.1)
    ratio = whole.explained_variance_ratio_
    np.testing.assert_allclose(fitted.explained_variance_ratio_, ratio, atol=0.01)
    score = whole.score(full, groups=groups)
    np.testing.assert_allclose(fitted.score(full, groups=groups), score, atol=0.03)


@pytest.mark.slow
def test_samples_are_completed_by_their_clients_model(data, fitted):
    full, gaps, groups, _ = data
    scores = fitted.transform(gaps, groups=groups)
    wanted = fitted.transform(full, groups=groups)
    zeros = fitted.transform(np.where(np.isnan(gaps), fitted.mean_, gaps), groups=groups)
    assert np.mean((scores - wanted) ** 2) < 0.3 * np.mean((zeros - wanted) ** 2)
    # A sample is completed by itself and its client, whatever else is there.
    some = np.arange(len(gaps))[::-7]
    np.testing.assert_allclose(fitted.transform(gaps[some], groups[some]), scores[some], atol=1e-5)
    # Clients that are not known have the model of anybody, and learn from completed samples.
    strange = fitted.transform(gaps, groups=groups + CLIENTS)
    assert np.isfinite(strange).all() and strange.shape == scores.shape
    with pytest.warns(UserWarning, match=r"^groups: got none"):
        assert np.isfinite(fitted.transform(gaps)).all()
    assert fitted.transform(np.float32(gaps), groups=groups).dtype == np.float32
    np.testing.assert_array_equal(fitted.transform(full, groups=groups), wanted)
    empty = fitted.transform(np.full((1, D), np.nan), groups=groups[:1])
    assert np.isfinite(empty).all()


@pytest.mark.slow
def test_it_is_pickled_cloned_and_personalized(data, fitted):
    _, gaps, groups, _ = data
    copy = pickle.loads(pickle.dumps(fitted))
    scores = fitted.transform(gaps, groups=groups)
    np.testing.assert_array_equal(copy.transform(gaps, groups=groups), scores)
    again = clone(fitted).fit(gaps, groups=groups)
    np.testing.assert_array_equal(again.components_, fitted.components_)
    copy.personalize(gaps[groups == 3], groups=np.full(60, 99))
    assert copy.local_components_.shape == (CLIENTS + 1, 2, D)
    np.testing.assert_array_equal(copy.transform(gaps, groups=groups), scores)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "FederatedPCA",
        "PersonalizedPCA",
        "HierarchicalBayesPCA",
    ],
)
def test_one_part_is_a_fit_and_later_ones_are_completed(data, name):
    _, gaps, groups, _ = data
    whole = fresh(name, impute=(2, 2)).fit(gaps, groups=groups)
    part = fresh(name, impute=(2, 2)).partial_fit(gaps, groups=groups)
    chex.assert_trees_all_equal(spans(part), spans(whole))
    _, newer, others, _ = with_gaps(seed=0, rate=0.3)
    part.partial_fit(newer, groups=others + 1)
    assert part.groups_.tolist() == list(range(CLIENTS + 1))
    assert np.isfinite(part.score(newer, groups=others + 1))


@pytest.mark.slow
def test_a_small_unit_changes_no_components(data):
    _, gaps, groups, _ = data
    small, smaller = (
        fresh("PersonalizedPCA", impute=(2, 2)).fit((unit * gaps).astype(np.float32), groups=groups)
        for unit in (1e-13, 1e-15)
    )
    chex.assert_trees_all_close(spans(small), spans(smaller), atol=1e-5)
    assert smaller.noise_variance_ == pytest.approx(1e-4 * small.noise_variance_, rel=1e-4)


@pytest.mark.slow
def test_without_gaps_it_is_the_same(data):
    full, _, groups, _ = data
    model = fresh("FederatedPCA")
    wanted = model.fit(full, groups=groups).score_samples(full, groups=groups)
    model.set_params(impute=(2, 2))
    found = model.fit(full, groups=groups).score_samples(full, groups=groups)
    np.testing.assert_allclose(found, wanted, atol=1e-3)


@pytest.mark.slow
def test_faulty_clients_do_little_harm_to_what_completes(data):
    full, gaps, groups, _ = data
    spoiled = np.where(groups[:, None] == 3, 1000 * gaps[:, ::-1], gaps)
    options = {"impute": (2, 2), "center": False, "robust": True}
    found = fresh("PersonalizedPCA", **options).fit(spoiled, groups=groups)
    honest = groups != 3
    scores, wanted = (found.transform(x[honest], groups=groups[honest]) for x in (gaps, full))
    assert np.mean((scores - wanted) ** 2) < 0.05 * np.mean(wanted**2)


def test_missing_entries_are_refused_unless_asked_for(data, fitted):
    full, gaps, groups, _ = data
    whole = fresh("PersonalizedPCA")
    assert not get_tags(whole).input_tags.allow_nan and get_tags(fitted).input_tags.allow_nan
    with pytest.raises(ValueError, match="contains NaN"):
        whole.fit(gaps, groups=groups)
    with pytest.raises(ValueError, match="contains NaN"):
        whole.fit(full, groups=groups).transform(gaps, groups=groups)
    for given in ((2,), (0, 2), (2, -1), "impute", True, (2, 1.5)):
        with pytest.raises(ValueError, match=r'^impute: wanted None, "auto" or two numbers'):
            fresh("FederatedPCA", impute=given).fit(gaps, groups=groups)
    with pytest.raises(ValueError, match="infinity"):
        fitted.transform(np.where(np.isnan(gaps), np.inf, gaps), groups=groups)
    empty = gaps.copy()
    empty[7] = np.nan
    with pytest.raises(ValueError, match="every sample, got none of sample 7"):
        fresh("FederatedPCA", impute=(2, 2)).fit(empty, groups=groups)
    with pytest.raises(ValueError, match="every feature, got none of feature 2"):
        fresh("FederatedPCA", impute=(2, 2)).fit(
            np.where(np.arange(D) == 2, np.nan, full), groups=groups
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:groups. got none", "ignore:impute")
@pytest.mark.parametrize("name", ["PersonalizedPCA", "FederatedPCA", "HierarchicalBayesPCA"])
def test_scikit_learns_own_checks_pass(name):
    model = getattr(estimators, name)(rounds=2, impute=(1, 1))
    weighted = ("pandas_series", "not_an_array", "list", "shape", "not_overwritten")
    excluded = {f"check_sample_weights_{x}": "imputation excludes weights" for x in weighted}
    for check in ("all_zero_sample_weights_error", "sample_weight_equivalence_on_dense_data"):
        excluded[f"check_{check}"] = "imputation excludes weights"
    results = check_estimator(model, on_skip=None, expected_failed_checks=excluded)
    assert {x["status"] for x in results} <= {"passed", "skipped", "xfail"}
    assert {x["check_name"] for x in results if x["status"] == "xfail"} <= set(excluded)
