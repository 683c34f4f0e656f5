"""Estimators in scikit-learn's form, on clients with two shared and two own components."""

import pickle
import warnings
from importlib import metadata

import jax
import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn import datasets
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from jaxfed import estimators
from jaxfed.core.clients.checks import zeros_to_lend
from jaxfed.estimators._arrays import clients_of

M, N, D = 4, 30, 6


def sampled(m=M, n=N, noise=0.1, seed=0):
    """Samples, whose each is, and the shared components."""
    rng = np.random.default_rng(seed)
    shared = np.linalg.qr(rng.normal(size=(D, 2)))[0]
    tables = []
    for _ in range(m):
        own = rng.normal(size=(D, 2))
        own = np.linalg.qr(own - shared @ (shared.T @ own))[0]
        scores = rng.normal(size=(2, n, 2)) * np.array([2.0, 1.5])[:, None, None]
        tables.append(scores[0] @ shared.T + scores[1] @ own.T)
    X = np.concatenate(tables)
    return X + noise * rng.normal(size=X.shape) + 1, np.repeat(np.arange(m), n), shared


@pytest.fixture(scope="module")
def data():
    return sampled()


@pytest.fixture(scope="module")
def fitted(data):
    X, groups, _ = data
    return estimators.PersonalizedPCA(2, 2, rounds=20, n_init=1, random_state=0).fit(
        X, groups=groups
    )


@pytest.mark.parametrize("center", [pytest.param(True, marks=pytest.mark.slow), False])
def test_scores_and_reconstructions_keep_the_precision(center, data):
    X, groups, _ = data
    single = X.astype(np.float32)
    for samples in (single, X):  # what the means are computed from
        model = estimators.FederatedPCA(2, center=center, rounds=2).fit(samples, groups=groups)
        for given in (single, X):
            scores = model.transform(given, groups=groups)
            again = model.inverse_transform(scores, groups=groups)
            assert scores.dtype == again.dtype == given.dtype


@pytest.mark.slow
def test_components_are_those_of_the_truth(data, fitted):
    shared = data[2]
    assert fitted.components_.shape == (2, D) and fitted.local_components_.shape == (M, 2, D)
    overlap = np.linalg.svd(fitted.components_ @ shared)[1]
    assert overlap.min() > 0.98
    assert np.abs(fitted.components_ @ fitted.local_components_.swapaxes(1, 2)).max() < 1e-5
    assert fitted.explained_variance_ratio_.sum() == pytest.approx(1, abs=0.01)
    assert fitted.noise_variance_ == pytest.approx(0.01, rel=0.5)
    assert "PerPCA" in fitted.summary_


@pytest.mark.slow
def test_components_can_be_drawn(fitted):
    from jaxfed import plot

    figure = plot.components(fitted)
    drawn = [image.get_array() for axes in figure.axes for image in axes.get_images()]
    np.testing.assert_array_equal(drawn[0], fitted.components_)
    np.testing.assert_array_equal(drawn[1], fitted.local_components_[0])


def test_scores_restore_samples_of_known_clients(data, fitted):
    X, groups, _ = data
    scores = fitted.transform(X, groups=groups)
    assert scores.shape == (len(X), 4) and scores.dtype == X.dtype
    restored = fitted.inverse_transform(scores, groups=groups)
    assert np.mean((X - restored) ** 2) < 0.02
    np.testing.assert_allclose(fitted.transform(X[::-1], groups[::-1])[::-1], scores, atol=1e-12)
    # Uncorrelated within a client, the largest variance first.
    own = scores[groups == 1, 2:]
    assert np.abs((own.T @ own)[0, 1]) < 1e-6 * (own**2).sum()
    assert (own[:, 0] ** 2).sum() > (own[:, 1] ** 2).sum()


def test_a_sample_of_nobody_known_has_shared_scores_alone(data, fitted):
    X, groups, _ = data
    with pytest.warns(UserWarning, match=r"^groups: got none"):
        scores = fitted.transform(X)
    np.testing.assert_array_equal(scores[:, 2:], 0)
    np.testing.assert_allclose(scores[:, :2], fitted.transform(X, groups)[:, :2])


def test_a_new_client_is_personalized(data, fitted):
    X = sampled(seed=0)[0]
    rng = np.random.default_rng(5)
    own = np.linalg.qr(rng.normal(size=(D, 2)))[0]
    new = rng.normal(size=(N, 2)) @ fitted.components_ + rng.normal(size=(N, 2)) @ own.T
    new += fitted.mean_
    labels = np.full(N, 9)
    said = rf"^groups: 9 \({N} samples\) not in fit; .*personalize\(X, groups\)"
    with pytest.warns(UserWarning, match=said) as caught:
        scores = fitted.transform(new, groups=labels)
    assert caught[0].filename == __file__
    assert np.abs(scores[:, 2:]).max() > 0.5
    with pytest.raises(ValueError, match=r"groups: .*9.* was not in fit"):
        fitted.inverse_transform(scores, groups=labels)
    known = pickle.loads(pickle.dumps(fitted)).personalize(new, groups=labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restored = known.inverse_transform(known.transform(new, labels), groups=labels)
    np.testing.assert_allclose(restored, new, atol=1e-4)
    assert known.local_components_.shape == (M + 1, 2, D)
    assert fitted.local_components_.shape == (M, 2, D)
    groups = np.repeat(np.arange(M), N)
    np.testing.assert_allclose(known.transform(X, groups), fitted.transform(X, groups))


@pytest.mark.slow
def test_a_single_client_is_scored_as_scikit_learn_scores_it(data):
    X = data[0][:N]
    ours = estimators.FederatedPCA(2, rounds=10).fit(X, groups=np.zeros(len(X)))
    theirs = PCA(2).fit(X)
    np.testing.assert_allclose(
        np.abs(np.sum(ours.components_ * theirs.components_, axis=1)), 1, atol=1e-3
    )
    # Theirs divides by n - 1.
    assert ours.score(X) == pytest.approx(theirs.score(X), abs=0.01)
    np.testing.assert_allclose(
        ours.explained_variance_ratio_, theirs.explained_variance_ratio_, rtol=1e-3
    )


@pytest.mark.parametrize("unit", [1e4, 1e6])
def test_noise_beside_a_feature_in_a_small_unit_is_that_of_scikit_learn(unit):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 6)) * [4 * unit, 3, 2, 0.2, 0.2, 0.2]
    fitted = estimators.FederatedPCA(3, random_state=0).fit(X, groups=np.repeat([0, 1, 2], 30))
    theirs = PCA(3).fit(X)
    assert fitted.noise_variance_ == pytest.approx(theirs.noise_variance_ * 89 / 90, rel=1e-3)
    # Theirs divides by n - 1.
    assert fitted.score(X) == pytest.approx(theirs.score(X), abs=0.02)


@pytest.mark.parametrize("updated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_variances_are_those_of_all_samples_as_in_scikit_learn(updated):
    """Also if clients differ in size and in variance."""
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1, 2], [60, 20, 10])
    X = rng.normal(size=(90, 6)) * [4, 3, 2, 1, 0.5, 0.5] * np.asarray([1, 3, 6])[groups, None]
    whole = estimators.FederatedPCA(2, rounds=12)
    fitted = (whole.partial_fit if updated else whole.fit)(X, groups=groups)
    theirs = PCA(2).fit(X)
    found, wanted = fitted.explained_variance_ratio_, theirs.explained_variance_ratio_
    np.testing.assert_allclose(found, wanted, rtol=1e-3)
    # Theirs divides by n - 1.
    assert fitted.noise_variance_ == pytest.approx(theirs.noise_variance_ * 89 / 90, rel=1e-3)
    np.testing.assert_allclose(
        np.abs(np.sum(fitted.components_ * theirs.components_, axis=1)), 1, atol=1e-3
    )
    own = estimators.PersonalizedPCA(1, 1, rounds=5)
    own = (own.partial_fit if updated else own.fit)(X, groups=groups)
    shares = np.sum(own.transform(X, groups) ** 2, axis=0) / np.sum((X - own.mean_) ** 2)
    np.testing.assert_allclose(own.explained_variance_ratio_, shares, rtol=1e-3)


@pytest.mark.slow
def test_a_prior_leaves_every_client_components_of_its_own(data):
    X, groups, _ = data
    model = estimators.HierarchicalBayesPCA(2, rounds=3, random_state=0).fit(X, groups=groups)
    assert model.components_.shape == (2, D) and model.local_components_.shape == (M, 2, D)
    assert model.transform(X, groups).shape == (len(X), 2) and model.prior_variance_ > 0
    new = model.transform(X[groups == 0], groups=np.full(N, 9))
    # Its own samples under the same prior: nearly what it had.
    known = model.transform(X[groups == 0], groups=groups[groups == 0])
    assert np.abs(np.corrcoef(new[:, 0], known[:, 0])[0, 1]) > 0.99


@pytest.mark.parametrize("unit", [0.001, 0.1, 1.0])
def test_a_prior_costs_nothing_where_clients_differ_and_noise_is_weak(unit):
    rng = np.random.default_rng(0)
    frames = np.linalg.qr(rng.normal(size=(8, 20, 2)))[0]
    values = rng.normal(size=(8, 30, 2)) @ np.swapaxes(frames, 1, 2)
    rows = unit * (values + 0.1 * rng.normal(size=values.shape)).reshape(-1, 20)
    model = estimators.HierarchicalBayesPCA(2, center=False, random_state=0)
    found = model.fit(rows, groups=np.arange(240) // 30).local_components_
    alone = np.linalg.svd(rows.reshape(8, 30, 20))[2][:, :2]
    left, least = (2 * (2 - np.sum((x @ frames) ** 2) / 8) for x in (found, alone))
    assert left < 1.05 * least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda **options: estimators.PersonalizedPCA(2, 2, n_init=1, **options), True),
        (lambda **options: estimators.HierarchicalBayesPCA(2, **options), True),
        # It sends projectors, which no units make large.
        (
            lambda **options: estimators.HierarchicalBayesPCA(2, prior_variance=0.1, **options),
            False,
        ),
    ],
    ids=["PersonalizedPCA", "learned prior", "given prior"],
)
def test_a_client_in_other_units_does_no_harm(make, named):
    X, groups, _ = sampled(m=12)
    names = np.array([f"site {i:02}" for i in range(12)])[groups]
    options = {"random_state": 0, "center": False}
    honest = make(**options).fit(X - 1, groups=names).components_
    spoiled = np.where(groups[:, None] == 3, 1000 * (X - 1)[:, ::-1], X - 1)
    found = make(robust=True, **options).fit(spoiled, groups=names)
    left = found.components_ - found.components_ @ honest.T @ honest
    assert np.linalg.norm(left, 2) < 0.2
    assert ("site 03" in found.far_groups_) == named


@pytest.mark.slow
@pytest.mark.parametrize("call", ["fit", "partial_fit"])
def test_a_robust_fit_centres_by_the_median_client(call):
    X, groups, _ = sampled(m=12)
    model = estimators.PersonalizedPCA(2, 2, robust=True, n_init=1, random_state=0)
    getattr(model, call)(np.where(groups[:, None] == 3, X + 1e6, X), groups=groups)
    means = np.stack([X[groups == i].mean(axis=0) for i in range(12)])
    means[3] += 1e6
    np.testing.assert_allclose(model.mean_, np.median(means, axis=0), atol=1e-6)
    assert np.abs(model.mean_ - X.mean(axis=0)).max() < 1
    far = np.where(groups[:, None] == 3, 1e12 * X, X)  # beside which others lose all digits
    again = getattr(clone(model), call)(far, groups=groups)
    left = again.components_ - again.components_ @ model.components_.T @ model.components_
    assert np.linalg.norm(left, 2) < 0.02


@pytest.mark.parametrize("robust", [False, True])
def test_samples_whose_squares_overflow_are_refused(robust):
    X, groups, _ = sampled(m=4)
    X = X.astype(np.float32)
    X[groups == 2] *= 1e30
    refused = r"^X: wanted samples whose squares add up to a finite float32 number, got .* group 2$"
    with pytest.raises(ValueError, match=refused):
        estimators.PersonalizedPCA(1, 1, robust=robust).fit(X, groups=groups)
    with pytest.raises(ValueError, match=refused):
        estimators.FederatedPCA(1).fit(X, groups=groups)


def test_a_robust_fit_wants_three_clients():
    X, groups, _ = sampled(m=2)
    with pytest.raises(ValueError, match="robust: wanted three clients or more, got 2"):
        estimators.PersonalizedPCA(robust=True).fit(X, groups=groups)


def test_it_works_in_a_pipeline_and_names_its_columns(data):
    X, groups, _ = data
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(X, columns=[f"x{j}" for j in range(D)])
    with sklearn.config_context(enable_metadata_routing=True):
        model = estimators.PersonalizedPCA(2, 2, rounds=20, n_init=1, random_state=0)
        model.set_fit_request(groups=True).set_transform_request(groups=True)
        pipe = make_pipeline(StandardScaler(), model).set_output(transform="pandas")
        found = pipe.fit(frame, groups=groups).transform(frame, groups=groups)
    names = [f"personalizedpca_{kind}{j}" for kind in ("shared", "local") for j in range(2)]
    assert list(found.columns) == names
    assert list(pipe[-1].feature_names_in_) == list(frame.columns)


@pytest.mark.slow
def test_a_search_over_a_pipeline_passes_groups_on(data):
    """Pipelines pass a `sample_weight` on to the last step's `score`, even where there is none."""
    X, groups, _ = data
    with sklearn.config_context(enable_metadata_routing=True):
        model = estimators.FederatedPCA(1, rounds=5, random_state=0)
        model.set_fit_request(groups=True).set_score_request(groups=True)
        pipe = make_pipeline(StandardScaler(), model.set_transform_request(groups=True))
        search = GridSearchCV(pipe, {"federatedpca__n_components": [1, 2]}, cv=GroupKFold(2))
        search.fit(X, groups=groups)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


def test_a_score_weights_its_samples(data, fitted):
    X, groups, _ = data
    each = fitted.score_samples(X, groups)
    weights = np.arange(len(X)) % 3
    found = fitted.score(X, groups=groups, sample_weight=weights)
    assert found == pytest.approx(each @ weights / weights.sum(), rel=1e-12)
    assert fitted.score(X, groups=groups) == pytest.approx(each.mean(), rel=1e-12)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"shared_rank": 0}, "shared_rank: wanted a whole number"),
        (
            {"local_rank": 1.5},
            r"local_rank: wanted a number of components, or a share",
        ),
        ({"rounds": 0}, "rounds: wanted a whole number"),
        ({"center": "yes"}, "center: wanted True or False"),
        ({"shared_rank": D}, f"minimum of {D + 1} is required"),
    ],
)
def test_bad_parameters_are_refused_by_name(data, changed, said):
    with pytest.raises(ValueError, match=said):
        estimators.PersonalizedPCA(**changed).fit(data[0], groups=data[1])


@pytest.mark.slow
def test_standard_errors_are_those_of_the_components(data):
    X, groups = data[:2]
    model = estimators.PersonalizedPCA(2, 2, rounds=20, n_init=1, bootstrap=50, random_state=0)
    model.fit(X, groups=groups)
    found = model.confidence_
    np.testing.assert_allclose(found.axes.T, model.components_, atol=1e-4)
    spread = found.replicates.std(axis=0, ddof=1).T
    np.testing.assert_array_equal(model.components_std_, spread)
    assert model.components_std_.shape == (2, D) and len(found.replicates) == 50
    assert 0 < found.angle < 0.2 and len(found.distance.estimate) == len(model.groups_)
    with pytest.raises(ValueError, match="bootstrap: wanted 0 in partial_fit"):
        clone(model).partial_fit(X, groups=groups)
    with pytest.raises(ValueError, match=r"groups: wanted 3 samples of each client .* got 1"):
        clone(model).fit(X, groups=np.arange(len(X)))
    unsure = clone(model).set_params(bootstrap=0).fit(X, groups=groups)
    assert not hasattr(unsure, "components_std_") and not hasattr(unsure, "confidence_")


@pytest.mark.slow
def test_standard_errors_with_gaps_are_larger(data):
    X, groups = data[:2]
    gaps = np.where(np.random.default_rng(0).random(X.shape) < 0.3, np.nan, X)
    model = estimators.PersonalizedPCA(2, 2, rounds=20, n_init=1, bootstrap=50, random_state=0)
    complete = clone(model).fit(X, groups=groups)
    model.set_params(impute=(2, 2)).fit(gaps, groups=groups)
    found = model.confidence_
    np.testing.assert_allclose(found.axes.T, model.components_, atol=1e-4)
    assert found.remarks == ()
    assert complete.confidence_.angle < found.angle < 0.6
    assert model.components_std_.mean() > complete.components_std_.mean()
    # Offsets are subtracted, also where entries are missing.
    moved = clone(model).fit(gaps + 1e3, groups=groups)
    np.testing.assert_allclose(moved.confidence_.angle, found.angle, rtol=1e-2)


def test_bad_groups_are_refused(data):
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        estimators.PersonalizedPCA().fit(data[0], groups=data[1][:-1])
    with pytest.raises(ValueError, match="groups: wanted one label for each row"):
        estimators.PersonalizedPCA().fit(data[0], groups=data[1][:, None])


ROUTING = r"enable_metadata_routing=True.*set_{}_request\(groups=True\)"


@pytest.mark.slow
def test_a_fit_that_is_not_told_of_clients_says_so(data):
    X, groups, _ = data
    model = estimators.FederatedPCA(1, rounds=2, random_state=0)
    said = "^groups: got none.*" + ROUTING.format("fit")
    with pytest.warns(UserWarning, match=said) as caught:
        model.fit(X)
    assert caught[0].filename == __file__ and len(model.groups_) == 1
    search = GridSearchCV(model, {"n_components": [1]}, cv=GroupKFold(2))
    with pytest.warns(UserWarning, match=said):
        search.fit(X, groups=groups)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ConvergenceWarning)  # two rounds
        model.fit(X, groups=np.zeros(len(X)))
        model.transform(X)  # there is one client
        model.fit(X, groups=groups).transform(X)  # nothing is any client's own


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["transform", "score"])
def test_samples_whose_clients_are_not_told_say_so(data, fitted, ask):
    X, groups, _ = data
    said = f"^groups: got none, .*{M} clients.*" + ROUTING.format(ask)
    with pytest.warns(UserWarning, match=said) as caught:
        getattr(fitted, ask)(X)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(fitted, ask)(X, groups=groups)
        fitted.score(X, groups=groups + M)  # as in a search that holds out whole clients


@pytest.mark.slow
def test_labels_of_another_type_are_of_nobody_known_and_say_so(data, fitted):
    X, groups, _ = data
    names = [str(label) for label in groups]
    with pytest.warns(UserWarning, match=r"^groups: wanted numbers, as in fit, got names"):
        scores = fitted.transform(X, groups=names)
    with pytest.warns(UserWarning, match=r"^groups: 4 \(30 samples\), .* not in fit"):
        np.testing.assert_allclose(scores, fitted.transform(X, groups + M))
    with pytest.raises(ValueError, match=r"^groups: wanted numbers, as in fit, got names"):
        fitted.personalize(X, groups=names)
    by_name = estimators.FederatedPCA(1, rounds=2).fit(X, groups=np.array(names, object))
    np.testing.assert_array_equal(by_name.groups_, ["0", "1", "2", "3"])
    with pytest.warns(UserWarning, match=r"^groups: wanted names, as in fit, got numbers"):
        by_name.score(X, groups=groups)


@pytest.mark.parametrize("odd", [None, "1", (1,)])
def test_labels_of_several_types_are_refused(data, fitted, odd):
    X, groups, _ = data
    labels = [*groups[:-1].tolist(), odd]
    listed = np.empty(len(labels), object)
    listed[:] = labels
    said = rf"^groups: wanted labels that are all numbers or all names, got .*{type(odd).__name__}"
    for given in [listed, *([] if isinstance(odd, tuple) else [labels])]:
        with pytest.raises(ValueError, match=said):
            estimators.FederatedPCA().fit(X, groups=given)
        with pytest.raises(ValueError, match=said):
            fitted.transform(X, groups=given)
    with pytest.raises(ValueError, match=r"^groups: wanted labels .*got NoneType"):
        estimators.FederatedPCA().fit(X, groups=[None] * len(X))
    with pytest.raises(ValueError, match=r"^groups: wanted one label for each row"):
        fitted.personalize(X, groups=None)


@pytest.mark.slow
def test_views_agree_on_what_they_share():
    rng = np.random.default_rng(0)
    common = rng.normal(size=(60, 2))
    views = [common @ rng.normal(size=(2, d)) + 0.05 * rng.normal(size=(60, d)) + 3 for d in (4, 5)]
    model = estimators.FederatedGCCA(2, rounds=10, random_state=0).fit([v[:40] for v in views])
    assert [q.shape for q in model.weights_] == [(4, 2), (5, 2)]
    assert model.score([v[40:] for v in views]) > 0.98
    assert [z.shape for z in model.transform(views)] == [(60, 2)] * 2
    with pytest.raises(ValueError, match="views: wanted at least two"):
        model.fit(views[:1])
    with pytest.raises(ValueError, match=r"views: wanted \[4, 5\] features"):
        model.transform(views[::-1])


@pytest.mark.slow
def test_several_starts_leave_a_poor_optimum():
    X = np.random.default_rng(10).standard_t(2, size=(40, 6))
    groups = np.repeat(np.arange(4), 10)

    def end(starts):
        model = estimators.PersonalizedPCA(2, 1, n_init=starts, center=False, random_state=0)
        return model.fit(X, groups=groups).saved_.history["objective"][-1]

    assert end(4) < 0.95 * end(1)


@pytest.mark.slow
def test_a_search_that_holds_out_whole_clients_finds_the_ranks():
    X, groups, _ = sampled(m=12, n=60, noise=0.3)
    with sklearn.config_context(enable_metadata_routing=True):
        model = estimators.PersonalizedPCA(rounds=50, n_init=2, random_state=0)
        model.set_fit_request(groups=True).set_score_request(groups=True)
        grid = {"shared_rank": np.array([1, 2, 3]), "local_rank": [1, 2, 3]}
        search = GridSearchCV(model, grid, cv=GroupKFold(3)).fit(X, groups=groups)
    assert search.best_params_ == {"shared_rank": 2, "local_rank": 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:groups. got none")
@pytest.mark.parametrize(
    "model",
    [
        estimators.PersonalizedPCA(rounds=2),
        estimators.FederatedPCA(rounds=2),
        estimators.HierarchicalBayesPCA(rounds=2),
        estimators.IntegrativeNMF(rounds=2, n_init=1),
        estimators.HeterogeneousMF(rounds=2, n_init=1),
        estimators.TripleComponentMF(rounds=2, n_init=1),
    ],
    ids=lambda model: type(model).__name__,
)
def test_scikit_learns_own_checks_pass(model):
    results = check_estimator(model, on_skip=None)
    assert {result["status"] for result in results} <= {"passed", "skipped"}
    # Arrays of other libraries are skipped where SciPy is not told to take them.
    assert sum(result["status"] == "skipped" for result in results) <= 1


@pytest.mark.slow
def test_what_clients_that_are_alike_have_in_common_is_shared():
    """One axis has nearly all of the variance, and so is each client's first component."""
    rows = np.random.default_rng(0).normal(size=(300, 6)) * [100, 5, 4, 2, 1, 0.5]
    model = estimators.PersonalizedPCA(3, 2, n_init=1, random_state=0)
    model.fit(rows, groups=np.arange(300) % 6)
    top = np.linalg.eigvalsh(np.cov(rows.T, bias=True))[-3:].sum()
    centred = rows - rows.mean(0)
    assert np.sum((centred @ model.components_.T) ** 2) / 300 > 0.99 * top


@pytest.mark.parametrize("name", ["breast_cancer", "wine", "diabetes", "digits", "iris"])
def test_federated_pca_of_raw_units_equals_that_of_scikit_learn(name):
    X = getattr(datasets, f"load_{name}")().data
    if name == "digits":
        X = X * np.where(np.arange(64) == 20, 1000, 1)  # grams beside kilograms
    flag = jax.config.read("jax_enable_x64")
    found = estimators.FederatedPCA(3, random_state=0).fit(X, groups=np.arange(len(X)) % 4)
    assert jax.config.read("jax_enable_x64") == flag
    wanted = PCA(3, svd_solver="full").fit(X)
    assert np.abs(found.components_) == pytest.approx(np.abs(wanted.components_), abs=1e-8)
    ratio = wanted.explained_variance_ratio_
    assert found.explained_variance_ratio_ == pytest.approx(ratio, rel=1e-8)
    assert found.mean_ == pytest.approx(wanted.mean_, rel=1e-12)


@pytest.mark.parametrize("unit", [1e3, 1e6])
def test_a_table_in_single_precision_and_unlike_units_is_solved_to_its_rounding(unit):
    rng = np.random.default_rng(1)
    axes = np.linalg.qr(rng.normal(size=(7, 7)))[0]
    X = rng.normal(size=(320, 7)) * [4, 3.9, 1, 0.2, 0.2, 0.2, 0.2] @ axes.T
    X[:, 1] *= unit
    X = X.astype(np.float32)
    wanted = PCA(2, svd_solver="full").fit(X.astype(float)).components_
    model = estimators.FederatedPCA(2, random_state=0).fit(X, groups=np.arange(320) % 4)
    assert np.linalg.norm(wanted - wanted @ model.components_.T @ model.components_, 2) < 1e-3
    model.partial_fit(X, groups=np.arange(320) % 4)
    assert np.linalg.norm(wanted - wanted @ model.components_.T @ model.components_, 2) < 1e-3


@pytest.mark.parametrize(
    "estimator",
    [estimators.FederatedPCA(2, random_state=0), estimators.PersonalizedPCA(1, 1, random_state=0)],
)
def test_integers_are_computed_in_double_and_single_precision_stays(estimator):
    rng = np.random.default_rng(0)
    groups = np.arange(60) % 3
    X = np.rint(rng.normal(size=(60, 4)) * [1, 3, 100, 1e5]).astype(np.int64) + 10**9
    of_integers = estimator.fit(X, groups=groups).components_
    of_doubles = estimator.fit(X.astype(float), groups=groups).components_
    assert np.array_equal(of_integers, of_doubles)
    single = estimator.fit((X - 10**9).astype(np.float32), groups=groups)
    assert single.transform((X - 10**9).astype(np.float32), groups=groups).dtype == np.float32


def test_the_mean_of_many_rows_in_single_precision():
    X = (1000 + 3 * np.random.default_rng(0).normal(size=(500_000, 3))).astype(np.float32)
    found = estimators.FederatedPCA(1, random_state=0).fit(X, groups=np.zeros(len(X), int))
    assert np.abs(found.mean_ - X.mean(axis=0, dtype=float)).max() < 1e-4
    assert found.explained_variance_ratio_ == pytest.approx(1 / 3, abs=0.01)


def test_variances_keep_single_precision():
    """Also where a million squares add up, and where the mean is far from zero."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20_000, 50)) * np.linspace(3, 1, 50) + 100
    X, groups = X.astype(np.float32), np.arange(20_000) % 3
    found = estimators.FederatedPCA(3, rounds=40).fit(X, groups=groups)
    x, q = X.astype(float) - found.mean_.astype(float), found.components_.T
    along, total = np.mean((x @ q) ** 2, axis=0), np.mean(np.sum(x**2, axis=1))
    np.testing.assert_allclose(found.explained_variance_ratio_, along / total, rtol=2e-7)
    assert found.noise_variance_ == pytest.approx((total - along.sum()) / 47, rel=2e-7)


def test_samples_are_copied_once_or_never():
    """XLA computes on the memory of NumPy, if it is aligned."""
    X = zeros_to_lend((90, 4), np.dtype(np.float32))
    X[:] = np.random.default_rng(0).normal(size=X.shape)
    groups = np.repeat([0, 1], [60, 30])
    for places, mean, memory in ((0 * groups, None, X), (groups, X.mean(axis=0), None)):
        clients, tables = clients_of(X, places, mean)
        wanted = X - (0 if mean is None else mean)
        np.testing.assert_array_equal(np.concatenate(tables), wanted)
        np.testing.assert_array_equal(clients.counts, np.bincount(places))
        assert clients.data.values.unsafe_buffer_pointer() == tables[0].ctypes.data
        assert memory is None or np.shares_memory(memory, tables[0])
        assert not np.any(clients.data.values[-1, len(tables[-1]) :])


def test_versions_are_read_once(data, monkeypatch):
    X, groups, _ = data
    model = estimators.FederatedPCA(2, rounds=2).fit(X, groups=groups)
    monkeypatch.setattr(metadata, "version", None)
    versions = model.fit(X, groups=groups).saved_.versions
    versions.clear()
    assert "jax" in model.fit(X, groups=groups).saved_.versions


def test_views_stop_at_a_tolerance():
    rng = np.random.default_rng(0)
    common = rng.normal(size=(200, 2))
    views = [common @ rng.normal(size=(2, d)) + rng.normal(size=(200, d)) for d in (5, 8)]
    rough, whole = (
        estimators.FederatedGCCA(2, tol=tol, random_state=0).fit(views) for tol in (0.1, None)
    )
    assert rough.n_iter_ < whole.n_iter_ < 50
    assert whole.score(views) >= rough.score(views) - 1e-3
    with pytest.raises(ValueError, match="tol: wanted a non-negative number or None, got -1"):
        estimators.FederatedGCCA(2, tol=-1).fit(views)


@pytest.mark.slow
def test_views_of_data_frames_are_matched_by_their_columns():
    rng = np.random.default_rng(0)
    common = rng.normal(size=(40, 2))
    views = [
        pd.DataFrame(common @ rng.normal(size=(2, d)) + rng.normal(size=(40, d))).add_prefix(name)
        for name, d in (("gene ", 4), ("lipid ", 5))
    ]
    model = estimators.FederatedGCCA(2, random_state=0).fit(views)
    assert model.saved_.names.features == tuple(tuple(view.columns) for view in views)
    moved = [views[0], views[1].iloc[:, ::-1]]
    np.testing.assert_array_equal(model.transform(moved), model.transform(views))
    with pytest.raises(ValueError, match=r"^views\[0\]: wanted gene 0, .*without gene 3"):
        model.transform([views[0].drop(columns="gene 3").assign(other=0.0), views[1]])
    values = [view.to_numpy() for view in views]
    np.testing.assert_array_equal(model.transform(values), model.transform(views))
    assert not hasattr(model.fit(values), "feature_names_in_")
    assert model.saved_.names.features is None
