"""The estimators' `scale=`, against scikit-learn's pipeline of a scaler and a PCA."""

import warnings

import jax
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import jaxfed as jf
from jaxfed.estimators import FederatedPCA, HierarchicalBayesPCA, PersonalizedPCA, _arrays

X = load_wine().data  # features from 0.1 to 1000
GROUPS = np.arange(len(X)) % 3
WEIGHTS = np.random.default_rng(0).integers(0, 4, len(X))
MODELS = (
    FederatedPCA(3, scale="shared"),
    PersonalizedPCA(2, 2, n_init=1, rounds=30, scale="shared", random_state=0),
    HierarchicalBayesPCA(3, scale="shared", random_state=0),
)


def of_sklearn(x, center=True):
    return make_pipeline(StandardScaler(with_mean=center), PCA(3)).fit(x)


def check_as_sklearn(found, x, **tol):
    wanted = of_sklearn(x)
    scaler, pca = wanted
    np.testing.assert_allclose(found.scale_, scaler.scale_, **tol)
    np.testing.assert_allclose(found.mean_, scaler.mean_, **tol)
    np.testing.assert_allclose(
        found.explained_variance_ratio_, pca.explained_variance_ratio_, **tol
    )
    signs = np.sign(np.sum(found.components_ * pca.components_, axis=1))
    np.testing.assert_allclose(found.transform(x), wanted.transform(x) * signs, **tol)
    again = found.inverse_transform(found.transform(x))
    np.testing.assert_allclose(again, wanted.inverse_transform(wanted.transform(x)), **tol)


def test_it_is_the_pipeline_of_sklearn():
    found = FederatedPCA(3, scale="shared").fit(X, groups=GROUPS)
    check_as_sklearn(found, X, rtol=1e-8, atol=1e-8)
    # scikit-learn's variances have n - 1 in place of n.
    n = len(X)
    pca = of_sklearn(X)[1]
    np.testing.assert_allclose(found.explained_variance_, pca.explained_variance_ * (n - 1) / n)
    np.testing.assert_allclose(found.noise_variance_, pca.noise_variance_ * (n - 1) / n)


def test_likelihoods_are_those_of_scaled_samples():
    found = FederatedPCA(3, scale="shared").fit(X, groups=np.zeros(len(X)))
    pca, z = PCA(3), StandardScaler().fit_transform(X)
    pca.fit(z)
    pca.explained_variance_ = found.explained_variance_  # over n, not n - 1
    pca.noise_variance_ = found.noise_variance_
    np.testing.assert_allclose(found.score_samples(X), pca.score_samples(z), rtol=1e-8)


@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_it_does_not_depend_on_units_and_offsets(unit):
    moved = (X + 1e5 * X.std(axis=0)) * unit
    check_as_sklearn(FederatedPCA(3, scale="shared").fit(moved, groups=GROUPS), moved, rtol=1e-6)


def test_single_precision():
    x = X.astype(np.float32)
    found = FederatedPCA(3, scale="shared").fit(x, groups=GROUPS)
    assert found.transform(x).dtype == np.float32
    assert found.scale_.dtype == np.float64
    np.testing.assert_allclose(found.scale_, StandardScaler().fit(X).scale_, rtol=1e-6)
    check_as_sklearn(found, X, rtol=1e-3, atol=1e-4)


def test_without_a_centre():
    found = FederatedPCA(3, scale="shared", center=False).fit(X, groups=GROUPS)
    scaled = StandardScaler(with_mean=False).fit(X)
    np.testing.assert_allclose(found.scale_, scaled.scale_, rtol=1e-10)
    values, vectors = np.linalg.svd(scaled.transform(X), full_matrices=False)[1:]
    np.testing.assert_allclose(found.explained_variance_, values[:3] ** 2 / len(X), rtol=1e-8)
    np.testing.assert_allclose(abs(np.sum(found.components_ * vectors[:3], axis=1)), 1, rtol=1e-8)
    stream = FederatedPCA(3, scale="shared", center=False)
    for part in np.array_split(np.arange(len(X)), 3):
        stream.partial_fit(X[part] + 1e6, groups=GROUPS[part])
    np.testing.assert_allclose(stream.scale_, scaled.scale_, rtol=1e-8)
    assert np.array_equal(stream.mean_, np.zeros(13))


@pytest.mark.parametrize("model", MODELS)
def test_it_is_that_of_scaled_rows(model):
    z = StandardScaler().fit_transform(X)
    found = clone(model).fit(X, groups=GROUPS)
    plain = clone(model).set_params(scale="none").fit(z, groups=GROUPS)
    assert plain.scale_ is None
    for name in ("components_", "local_components_", "explained_variance_", "noise_variance_"):
        np.testing.assert_allclose(getattr(found, name), getattr(plain, name), atol=1e-8)
    for groups in (GROUPS, np.where(GROUPS == 2, 7, GROUPS)):  # of which 7 is new
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            scores = found.transform(X, groups=groups)
            wanted = plain.transform(z, groups=groups)
        np.testing.assert_allclose(scores, wanted, atol=1e-7)
        likelihoods = found.score_samples(X, groups=groups)
        np.testing.assert_allclose(likelihoods, plain.score_samples(z, groups=groups), rtol=1e-7)
    scores = found.transform(X, groups=GROUPS)
    wanted = StandardScaler().fit(X).inverse_transform(plain.inverse_transform(scores, GROUPS))
    np.testing.assert_allclose(found.inverse_transform(scores, GROUPS), wanted, rtol=1e-8)
    found.set_params(scale="none")  # changes nothing before the next fit
    np.testing.assert_array_equal(found.transform(X, groups=GROUPS), scores)


@pytest.mark.parametrize("model", MODELS)
def test_a_weight_counts_rows(model):
    found = clone(model).fit(X, groups=GROUPS, sample_weight=WEIGHTS)
    wanted = clone(model).fit(np.repeat(X, WEIGHTS, axis=0), groups=np.repeat(GROUPS, WEIGHTS))
    scaler = StandardScaler().fit(X, sample_weight=WEIGHTS)
    np.testing.assert_allclose(found.scale_, scaler.scale_, rtol=1e-10)
    for name in ("components_", "mean_", "explained_variance_"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=1e-7)


def test_a_stream_is_scaled_by_all_samples_so_far():
    order = np.argsort(X[:, 12])  # so that the deviations of later samples are others
    found = FederatedPCA(3, scale="shared", rounds=100)
    for part in np.array_split(order, 4):
        found.partial_fit(X[part], groups=GROUPS[part])
    check_as_sklearn(found, X, rtol=1e-8, atol=1e-8)
    weighted = FederatedPCA(3, scale="shared")
    for part in np.array_split(order, 4):
        weighted.partial_fit(X[part], groups=GROUPS[part], sample_weight=WEIGHTS[part])
    scaler = StandardScaler().fit(X, sample_weight=WEIGHTS)
    np.testing.assert_allclose(weighted.scale_, scaler.scale_, rtol=1e-10)


def test_a_stream_that_forgets():
    found = FederatedPCA(3, scale="shared", forgetting=0.3)
    for part in (slice(0, 99), slice(99, 177)):  # each client has as many rows of a part
        found.partial_fit(X[part], groups=GROUPS[part])
    weights = np.concatenate([np.full(99, 0.7 / 99), np.full(78, 0.3 / 78)])
    scaler = StandardScaler().fit(X[:177], sample_weight=weights)
    np.testing.assert_allclose(found.scale_, scaler.scale_, rtol=1e-10)


def test_missing_entries():
    gaps = np.where(np.random.default_rng(0).random(X.shape) < 0.1, np.nan, X)
    found = FederatedPCA(3, scale="shared", impute=(3, 1), random_state=0)
    found.fit(gaps, groups=GROUPS)
    scaler = StandardScaler().fit(gaps)
    np.testing.assert_allclose(found.scale_, scaler.scale_, rtol=1e-10)
    z = (gaps - np.nanmean(gaps, axis=0)) / scaler.scale_
    plain = FederatedPCA(3, impute=(3, 1), random_state=0).fit(z, groups=GROUPS)
    np.testing.assert_allclose(found.components_, plain.components_, atol=1e-7)
    scores = found.transform(gaps, groups=GROUPS)
    np.testing.assert_allclose(scores, plain.transform(z, groups=GROUPS), atol=1e-6)
    likelihoods = found.score_samples(gaps, groups=GROUPS)
    np.testing.assert_allclose(likelihoods, plain.score_samples(z, groups=GROUPS), rtol=1e-6)
    again = found.inverse_transform(scores)
    assert np.mean((again - X) ** 2 / scaler.var_) < 0.5
    found.partial_fit(gaps[:90], groups=GROUPS[:90])
    first = found.scale_
    np.testing.assert_allclose(first, StandardScaler().fit(gaps[:90]).scale_, rtol=1e-10)
    found.partial_fit(gaps[90:], groups=GROUPS[90:])
    np.testing.assert_array_equal(found.scale_, first)


def test_robust_scales_are_those_of_standardize():
    z = (X - X.mean(axis=0)) / X.std(axis=0)
    clients = jf.Clients.from_samples([z[i == GROUPS] for i in range(3)])
    algorithm = jf.preprocess.Standardize("shared", "shared", robust=True)
    wanted = jf.fit(algorithm, clients, rounds=1, key=jax.random.key(0)).result.shared
    mean = _arrays.median_of_means(z, GROUPS)
    np.testing.assert_allclose(mean, wanted.mean, atol=1e-6)
    found = _arrays.scale_of(z, GROUPS, mean, robust=True)
    np.testing.assert_allclose(found, wanted.scale, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, np.ones(len(X))])
def test_robust_scales_are_medians(weights):
    model = HierarchicalBayesPCA(2, scale="shared", rounds=1, robust=True, random_state=0)
    model.fit(X, groups=GROUPS, sample_weight=weights)
    tables = [X[i == GROUPS] for i in range(3)]
    mean = np.median([table.mean(axis=0) for table in tables], axis=0)
    squares = np.median([np.mean((table - mean) ** 2, axis=0) for table in tables], axis=0)
    np.testing.assert_allclose(model.mean_, mean, rtol=1e-10)
    np.testing.assert_allclose(model.scale_, np.sqrt(squares), rtol=1e-10)


def test_it_is_that_of_standardize():
    model = FederatedPCA(3, scale="shared").fit(X, groups=GROUPS)
    z = (X - X.mean(axis=0)) / X.std(axis=0)
    clients = jf.Clients.from_samples([z[i == GROUPS] for i in range(3)])
    algorithm = jf.preprocess.Standardize("shared", "shared")
    found = jf.fit(algorithm, clients, rounds=1, key=jax.random.key(0))
    np.testing.assert_allclose(
        model.scale_ / X.std(axis=0), np.asarray(found.result.shared.scale), rtol=1e-4
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("impute", [None, (3, 1)])
def test_a_constant_feature_is_divided_by_its_magnitude(dtype, impute):
    x = np.column_stack([X[:, :-1], np.full(len(X), 0.1)]).astype(dtype)
    model = FederatedPCA(3, scale="shared", impute=impute, random_state=0)
    found = model.fit(x, groups=GROUPS)
    assert found.scale_[-1] == pytest.approx(0.1, rel=1e-5)
    np.testing.assert_allclose(found.components_[:, -1], 0, atol=1e-5)
    assert np.isfinite(found.transform(x, groups=GROUPS)).all()
    for part in (slice(0, 90), slice(90, None)):
        model.partial_fit(x[part], groups=GROUPS[part])
    assert model.scale_[-1] == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_constant_feature_of_any_size_comes_back(dtype):
    x = np.column_stack([X[:, :-1], np.full(len(X), 3e-15)]).astype(dtype)
    model = FederatedPCA(3, scale="shared", random_state=0).fit(x, groups=GROUPS)
    back = model.inverse_transform(model.transform(x, groups=GROUPS), groups=GROUPS)
    np.testing.assert_allclose(back[:, -1], 3e-15, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (FederatedPCA(scale="local"), r"scale: wanted one of .*none.*, got 'local'"),
        (FederatedPCA(scale=True), "scale: wanted one of"),
        (PersonalizedPCA(scale=None), "scale: wanted one of"),
        (
            FederatedPCA(scale="shared", center=False, epsilon=1.0),
            "scale: wanted none with epsilon, which does not cover the deviations",
        ),
    ],
)
def test_what_is_refused(model, words):
    with pytest.raises(ValueError, match=words):
        model.fit(X, groups=GROUPS)


@pytest.mark.slow
def test_a_bootstrap_is_of_scaled_samples():
    z = StandardScaler().fit_transform(X)
    options = {"n_init": 1, "rounds": 30, "bootstrap": 20, "random_state": 0}
    found = PersonalizedPCA(2, 1, scale="shared", **options).fit(X, groups=GROUPS)
    plain = PersonalizedPCA(2, 1, **options).fit(z, groups=GROUPS)
    np.testing.assert_allclose(found.components_std_, plain.components_std_, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of runs that are too short
def test_units_change_no_interval_of_samples_with_gaps():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(240, 6)) * [3, 2, 1.5, 1, 1, 1]
    gaps = rng.random(X.shape) < 0.15
    gaps[:, 0] = False
    found = []
    for unit in (np.ones(6), np.geomspace(1, 1e4, 6)):
        model = PersonalizedPCA(
            1, 1, impute=(1, 1), bootstrap=20, scale="shared", n_init=1, random_state=0
        )
        model.fit(np.where(gaps, np.nan, (X + 100) * unit), groups=np.repeat(np.arange(4), 60))
        found.append([model.confidence_.angle, model.components_std_, model.scale_ / unit])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8)
