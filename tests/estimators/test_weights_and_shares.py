"""Weights of samples, numbers of components as shares of the variance, and whitened scores."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits, load_wine
from sklearn.decomposition import PCA

import jaxfed as jf
from jaxfed.estimators import FederatedPCA, HierarchicalBayesPCA, PersonalizedPCA

DIGITS, WINE = load_digits(), load_wine()
X, GROUPS = DIGITS.data[:600], DIGITS.target[:600] % 4
WEIGHTS = np.random.default_rng(0).integers(0, 4, len(X))
MODELS = (
    FederatedPCA(3),
    pytest.param(PersonalizedPCA(2, 2, n_init=1, random_state=0), marks=pytest.mark.slow),
    pytest.param(
        PersonalizedPCA(2, 2, n_init=1, robust=True, shrinkage=True, random_state=0),
        marks=pytest.mark.slow,
    ),
    HierarchicalBayesPCA(3, random_state=0),
)


def repeated(x, groups, weights):
    return np.repeat(x, weights, axis=0), np.repeat(groups, weights)


def attributes(model):
    return (
        model.transform(X, groups=GROUPS),
        model.mean_,
        model.explained_variance_ratio_,
        np.array([model.noise_variance_, model.score(X, groups=GROUPS)]),
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_weight_counts_rows(model):
    found = attributes(clone(model).fit(X, groups=GROUPS, sample_weight=WEIGHTS))
    rows, groups = repeated(X, GROUPS, WEIGHTS)
    for pair in zip(found, attributes(clone(model).fit(rows, groups=groups)), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("forgetting", [None, 0.3])
def test_a_weight_counts_rows_of_a_stream(forgetting):
    found, wanted = FederatedPCA(3, forgetting=forgetting), FederatedPCA(3, forgetting=forgetting)
    for part in (slice(0, 250), slice(250, 600)):
        x, groups, weights = X[part], GROUPS[part], WEIGHTS[part]
        found.partial_fit(x, groups=groups, sample_weight=weights)
        rows, again = repeated(x, groups, weights)
        wanted.partial_fit(rows, groups=again)
    for pair in zip(attributes(found), attributes(wanted), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-7, atol=1e-8)


def test_weights_are_those_of_the_covariance():
    weights = np.random.default_rng(1).random(len(WINE.data))
    groups = np.arange(len(weights)) % 3
    found = FederatedPCA(2).fit(WINE.data, groups=groups, sample_weight=weights)
    covariance = np.cov(WINE.data.T, aweights=weights, ddof=0)
    values, vectors = np.linalg.eigh(covariance)
    np.testing.assert_allclose(found.mean_, np.average(WINE.data, axis=0, weights=weights))
    np.testing.assert_allclose(found.explained_variance_, values[:-3:-1], rtol=1e-10)
    cosines = np.abs(np.sum(found.components_ * vectors[:, :-3:-1].T, axis=1))
    np.testing.assert_allclose(cosines, 1, rtol=1e-10)


@pytest.mark.parametrize(
    ("model", "weights", "words"),
    [
        (FederatedPCA(), -np.ones(600), "Negative values"),
        (FederatedPCA(), np.ones(3), r"sample_weight.shape"),
        (FederatedPCA(), np.full(600, 1e-300), r"sample_weight: wanted weights from \de-247"),
        (FederatedPCA(), np.full(600, 1e300), r"sample_weight: wanted weights from \de-247"),
        (FederatedPCA(), np.eye(600)[0], "sample_weight: wanted two positive weights or more, got"),
        (FederatedPCA(impute="auto"), np.ones(600), "impute: wanted None with sample_weight"),
        (PersonalizedPCA(bootstrap=9), np.ones(600), "bootstrap: wanted 0 with sample_weight"),
        (FederatedPCA(epsilon=1.0, center=False), np.ones(600), "epsilon: wanted None with sample"),
    ],
)
def test_wrong_weights(model, weights, words):
    with pytest.raises(ValueError, match=words):
        model.fit(X, groups=GROUPS, sample_weight=weights)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_share_of_the_variance_is_that_of_sklearn(share):
    found, wanted = FederatedPCA(share).fit(X, groups=GROUPS), PCA(share).fit(X)
    assert found.n_components_ == wanted.n_components_ == found.transform(X).shape[1]
    assert found.explained_variance_ratio_.sum() >= share
    assert found.n_components == share


def test_a_share_in_double_precision():
    found = FederatedPCA(0.999).fit(WINE.data, groups=np.arange(178) % 3)
    assert found.n_components_ == PCA(0.999).fit(WINE.data).n_components_


@pytest.mark.slow
def test_shares_of_shared_and_local_components():
    model = PersonalizedPCA(0.4, 0.7, n_init=1, random_state=0).fit(X, groups=GROUPS)
    assert model.components_.shape == (model.shared_rank_, 64)
    assert model.local_components_.shape == (4, model.local_rank_, 64)
    assert model.explained_variance_ratio_.sum() >= 0.69
    numbers = PersonalizedPCA(model.shared_rank_, model.local_rank_, n_init=1, random_state=0)
    numbers.fit(X, groups=GROUPS)
    np.testing.assert_allclose(model.components_, numbers.components_)


def test_a_stream_keeps_its_numbers_of_components():
    model = HierarchicalBayesPCA(0.5, rounds=3, random_state=0)
    model.partial_fit(X[:300], groups=GROUPS[:300])
    before = model.n_components_
    clients = [X[:300][GROUPS[:300] == i] - X[:300].mean(axis=0) for i in range(4)]
    alone = jf.pca.ranks_for_variance(jf.Clients.from_samples(clients), 0, 0.5)
    assert before == alone.local
    assert model.partial_fit(X[300:], groups=GROUPS[300:]).n_components_ == before


@pytest.mark.parametrize("given", [0.0, 1.0, 1.5, "0.5", None])
def test_wrong_shares(given):
    with pytest.raises(ValueError, match="n_components: wanted a"):
        FederatedPCA(given).fit(X, groups=GROUPS)


def test_shares_that_no_model_has():
    few = X[:, 20:24]
    with pytest.raises(ValueError, match="local_rank: wanted at least the share of shared_rank"):
        PersonalizedPCA(0.8, 0.4, n_init=1).fit(few, groups=GROUPS)
    with pytest.raises(ValueError, match="shared_rank: wanted a smaller share"):
        PersonalizedPCA(0.9999, 0.99999, n_init=1).fit(few, groups=GROUPS)
    with pytest.raises(ValueError, match="n_components: wanted a smaller share"):
        HierarchicalBayesPCA(0.9999).fit(few, groups=GROUPS)
    with pytest.raises(ValueError, match=r"n_components: wanted a whole number .* or a share"):
        FederatedPCA("0.9").fit(few, groups=GROUPS)


@pytest.mark.parametrize("unit", [1e-20, 1e15])
def test_single_precision_holds_no_squares_but_weights_do_not_need_them(unit):
    x = (X[:, 10:30] * unit).astype(np.float32)
    ones = np.ones(len(x))
    found = FederatedPCA(2).fit(x, groups=GROUPS, sample_weight=ones)
    wanted = FederatedPCA(2).fit(x.astype(float), groups=GROUPS)
    np.testing.assert_allclose(found.components_, wanted.components_, atol=1e-6)
    np.testing.assert_allclose(found.explained_variance_, wanted.explained_variance_, rtol=1e-6)


def test_new_clients_have_the_units_of_known_ones():
    model = HierarchicalBayesPCA(2, rounds=3, random_state=0).fit(X, groups=GROUPS)
    before = model.transform(X, groups=GROUPS)
    model.set_params(whiten=True)
    np.testing.assert_array_equal(model.transform(X, groups=GROUPS), before)
    with pytest.warns(UserWarning, match="not in fit"):
        new = model.transform(X[:50], groups=np.full(50, 9))
    assert new.std(axis=0).max() > 5


def test_noise_covers_no_shares():
    with pytest.raises(ValueError, match="n_components: wanted a whole number with epsilon"):
        FederatedPCA(0.5, epsilon=1.0, center=False).fit(X, groups=GROUPS)


def test_whitened_scores_are_those_of_sklearn():
    model = FederatedPCA(4, whiten=True).fit(X, groups=GROUPS)
    wanted = PCA(4, whiten=True, svd_solver="full").fit(X)
    scores = model.transform(X, groups=GROUPS)
    ratio = np.sqrt((len(X) - 1) / len(X))  # which of two numbers of degrees of freedom
    np.testing.assert_allclose(np.abs(scores * ratio), np.abs(wanted.transform(X)), atol=1e-7)
    np.testing.assert_allclose(np.mean(scores**2, axis=0), 1)
    rebuilt = model.inverse_transform(scores, groups=GROUPS)
    np.testing.assert_allclose(rebuilt, wanted.inverse_transform(wanted.transform(X)), atol=1e-8)


@pytest.mark.slow
def test_whitened_local_scores_have_their_clients_unit():
    model = PersonalizedPCA(2, 2, n_init=1, whiten=True, random_state=0).fit(X, groups=GROUPS)
    plain = clone(model).set_params(whiten=False).fit(X, groups=GROUPS)
    scores = model.transform(X, groups=GROUPS)
    np.testing.assert_allclose(np.mean(scores[:, :2] ** 2, axis=0), 1)
    for group in model.groups_:
        np.testing.assert_allclose(np.mean(scores[group == GROUPS, 2:] ** 2, axis=0), 1)
    rebuilt = model.inverse_transform(scores, groups=GROUPS)
    wanted = plain.inverse_transform(plain.transform(X, groups=GROUPS), groups=GROUPS)
    np.testing.assert_allclose(rebuilt, wanted, atol=1e-8)
    assert model.score(X, groups=GROUPS) == plain.score(X, groups=GROUPS)
