"""Estimators of samples as products of factors: non-negative, with gaps, with gross errors."""

import pickle
import warnings

import jax
import numpy as np
import pandas as pd
import pytest
from scipy.optimize import nnls
from sklearn.base import clone
from sklearn.decomposition import NMF
from sklearn.utils import check_random_state

import jaxfed as jf
from jaxfed import estimators
from tests.helpers import planted_samples, projector

KEY = jax.random.key(check_random_state(0).randint(2**31 - 1))
COUNTS, D = (40, 50, 60), 20
NAMES = np.repeat(["a", "b", "c"], COUNTS)


@pytest.fixture(scope="module")
def counts():
    """Non-negative rows of three clients with four components, each in part its own."""
    rng = np.random.default_rng(0)
    shared, tables = rng.gamma(0.5, 1, size=(4, D)), []
    for n in COUNTS:
        own = rng.gamma(0.3, 0.3, size=(4, D)) * (rng.random((4, D)) < 0.3)
        tables.append(rng.gamma(1, 1, size=(n, 4)) @ (shared + own) + 0.05 * rng.random((n, D)))
    return np.concatenate(tables)


@pytest.fixture(scope="module")
def rows():
    """Rows of three clients with two shared and two own components, and noise of 0.1."""
    return np.concatenate(planted_samples(COUNTS, D, [3, 2.5], [2, 1.5], noise=0.1)) + 1


@pytest.fixture(scope="module")
def nmf(counts):
    return estimators.IntegrativeNMF(4, n_init=1, random_state=0).fit(counts, groups=NAMES)


@pytest.fixture(scope="module")
def gaps(rows):
    return np.where(np.random.default_rng(1).random(rows.shape) < 0.1, np.nan, rows)


@pytest.fixture(scope="module")
def hmf(gaps):
    model = estimators.HeterogeneousMF(2, 2, n_init=1, random_state=0)
    return model.fit(pd.DataFrame(gaps).add_prefix("g"), groups=NAMES)


def errors_in(rows):
    """Gross errors in one entry of twenty."""
    rng = np.random.default_rng(2)
    sizes = rng.choice([-1, 1], rows.shape) * rng.uniform(8, 16, rows.shape)
    return np.where(rng.random(rows.shape) < 0.05, sizes, 0)


@pytest.fixture(scope="module")
def tcmf(rows):
    model = estimators.TripleComponentMF(2, 2, n_init=1, random_state=0)
    return model.fit(rows + errors_in(rows), groups=NAMES)


# --- integrative NMF -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_non_negative_components_are_those_of_the_run(counts, dtype):
    X = counts.astype(dtype)
    model = estimators.IntegrativeNMF(4, penalty=3.0, rounds=30, n_init=1, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # thirty rounds
        scores = model.fit_transform(X, groups=NAMES)
    with jax.enable_x64(dtype == np.float64):
        clients = jf.Clients.from_samples([X[name == NAMES] for name in "abc"])
        wanted = jf.fit(jf.nmf.INMF(4, 3.0), clients, rounds=30, key=KEY)
    tol = 1e-4 if dtype == np.float32 else 1e-10
    np.testing.assert_allclose(model.components_, wanted.result.shared.T, atol=tol)
    own = np.swapaxes(wanted.result.local, 1, 2)
    np.testing.assert_allclose(model.local_components_, own, atol=tol)
    assert scores.dtype == dtype and model.n_iter_ == 30 and model.groups_.tolist() == [*"abc"]
    left = X - model.inverse_transform(scores, groups=NAMES)
    assert model.reconstruction_err_ == pytest.approx(np.linalg.norm(left), rel=1e-4)


def test_loadings_are_non_negative_least_squares(counts, nmf):
    found = nmf.transform(counts, groups=NAMES)
    for i in (0, 45, 140):
        own = nmf.local_components_["abc".index(NAMES[i])]
        # The penalty λ ‖Vᵀh‖² as further equations.
        matrix = np.concatenate([(nmf.components_ + own).T, np.sqrt(5.0) * own.T])
        wanted = nnls(matrix, np.concatenate([counts[i], np.zeros(D)]))[0]
        np.testing.assert_allclose(found[i], wanted, atol=1e-8)


def test_non_negative_components_of_one_client_are_those_of_scikit_learn(counts):
    one = np.zeros(len(counts), int)
    ours = estimators.IntegrativeNMF(4, tol=1e-7, random_state=0).fit(counts, groups=one)
    theirs = NMF(4, init="nndsvda", tol=1e-7, max_iter=5000).fit(counts)
    assert ours.reconstruction_err_ == pytest.approx(theirs.reconstruction_err_, rel=1e-3)
    unit = theirs.components_ / np.linalg.norm(theirs.components_, axis=1, keepdims=True)
    assert (ours.components_ @ unit.T).max(axis=1).min() > 0.99
    np.testing.assert_allclose(ours.local_components_, 0, atol=1e-2)


@pytest.mark.slow
def test_a_new_client_gets_what_it_would_have_had(counts, nmf):
    own = counts[NAMES == "a"]
    known = pickle.loads(pickle.dumps(nmf)).personalize(own, groups=["d"] * len(own))
    np.testing.assert_allclose(known.local_components_[3], nmf.local_components_[0], atol=5e-3)
    with pytest.warns(UserWarning, match=r"groups: new \(40 samples\) not in fit"):
        found = nmf.transform(own, groups=["new"] * len(own))
    np.testing.assert_allclose(found, nmf.transform(own, ["a"] * len(own)), atol=0.05)
    with pytest.raises(ValueError, match=r"groups: .*new.* was not in fit"):
        nmf.inverse_transform(found, groups=["new"] * len(own))
    with pytest.warns(UserWarning, match="got none"):
        shared = nmf.transform(counts)
    wanted = nnls(nmf.components_.T, counts[7])[0]
    np.testing.assert_allclose(shared[7], wanted, atol=1e-8)


@pytest.mark.slow
def test_hidden_counts_are_told(counts):
    hidden = np.random.default_rng(0).random(counts.shape) < 0.1
    model = estimators.IntegrativeNMF(4, random_state=0)
    model.fit(np.where(hidden, np.nan, counts), groups=NAMES)
    seen = np.where(hidden, np.nan, counts)
    found = model.inverse_transform(model.transform(seen, groups=NAMES), groups=NAMES)
    assert np.std((found - counts)[hidden]) < 0.1 * np.std(counts[hidden])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"n_components": 0}, r"^n_components: wanted a whole number"),
        ({"n_components": D + 1}, rf"minimum of {D + 1} is required"),
        ({"penalty": -1.0}, r"^penalty: wanted a finite number of at least 0"),
        ({"rounds": 0}, r"^rounds: wanted a whole number"),
        ({"n_init": 1.5}, r"^n_init: wanted a whole number"),
        ({"tol": -1.0}, r"^tol: "),
    ],
)
def test_bad_parameters_of_nmf_are_refused_by_name(counts, changed, said):
    with pytest.raises(ValueError, match=said):
        estimators.IntegrativeNMF(**{"n_init": 1, **changed}).fit(counts, groups=NAMES)


def test_samples_that_do_not_fit_are_refused(counts, nmf):
    said = r"^X: wanted non-negative samples, got -.*Negative values in data"
    with pytest.raises(ValueError, match=said):
        estimators.IntegrativeNMF().fit(counts - 1, groups=NAMES)
    with pytest.raises(ValueError, match=said):
        nmf.transform(counts - 1, groups=NAMES)
    empty = np.where(np.arange(len(counts))[:, None] == 3, np.nan, counts)
    for model in (estimators.IntegrativeNMF(), estimators.HeterogeneousMF()):
        with pytest.raises(ValueError, match=r"^X: wanted an entry .* got none in row 3"):
            model.fit(empty, groups=NAMES)
    with pytest.raises(ValueError, match=r"^X: wanted an entry .* got none in row 3"):
        nmf.transform(empty, groups=NAMES)


# --- gaps ----------------------------------------------------------------------------------------


def test_components_beside_gaps_are_those_of_the_run(gaps, hmf):
    mean = np.nanmean(gaps, axis=0)
    np.testing.assert_allclose(hmf.mean_, mean, rtol=1e-12)
    with jax.enable_x64(True):
        tables = [gaps[name == NAMES] - mean for name in "abc"]
        clients = jf.Clients.from_samples(tables, missing="mask")
        wanted = jf.fit(jf.pca.HMF(2, 2), clients, rounds=500, tol=1e-6, key=KEY)
        completed = np.concatenate([np.asarray(x) for x in jf.pca.complete(wanted, tables)]) + mean
    own = projector(hmf.local_components_.swapaxes(1, 2))
    np.testing.assert_allclose(
        projector(hmf.components_.T), projector(wanted.result.shared), atol=1e-8
    )
    np.testing.assert_allclose(own, projector(wanted.result.local), atol=1e-8)
    assert hmf.n_iter_ == wanted.rounds and "HMF" in hmf.summary_
    frame = pd.DataFrame(gaps).add_prefix("g")
    again = hmf.inverse_transform(hmf.transform(frame, groups=NAMES), groups=NAMES)
    np.testing.assert_allclose(again[np.isnan(gaps)], completed[np.isnan(gaps)], atol=1e-6)


def test_gaps_are_filled_and_noise_is_that_of_observed_entries(rows, gaps, hmf):
    frame = pd.DataFrame(gaps).add_prefix("g")
    again = hmf.inverse_transform(hmf.transform(frame, groups=NAMES), groups=NAMES)
    assert np.std((again - rows)[np.isnan(gaps)]) < 0.15
    left = np.nanmean((again - gaps) ** 2) * D / (D - 4)
    assert hmf.noise_variance_ == pytest.approx(left, rel=1e-6)
    assert 0.98 < hmf.explained_variance_ratio_.sum() < 1
    assert np.isfinite(hmf.score(frame, groups=NAMES))


def test_components_without_gaps_leave_the_least_error(rows):
    """No small turn of the shared components, each with its best local ones, leaves less."""
    model = estimators.HeterogeneousMF(2, 2, n_init=1, random_state=0).fit(rows, groups=NAMES)
    tables = [(rows - model.mean_)[name == NAMES] for name in "abc"]

    def left(shared):
        rests = [x - x @ shared @ shared.T for x in tables]
        return sum(np.sum(np.linalg.svd(rest)[1][2:] ** 2) for rest in rests)

    least = left(model.components_.T)
    again = model.inverse_transform(model.transform(rows, NAMES), groups=NAMES)
    assert np.sum((again - rows) ** 2) == pytest.approx(least, rel=1e-8)
    rng = np.random.default_rng(0)
    for _ in range(50):
        turned = model.components_.T + 1e-3 * rng.normal(size=(D, 2))
        assert left(np.linalg.qr(turned)[0]) > least
    other = estimators.PersonalizedPCA(2, 2, n_init=1, random_state=0).fit(rows, groups=NAMES)
    np.testing.assert_allclose(
        projector(model.components_.T), projector(other.components_.T), atol=0.02
    )
    assert model.score(rows, groups=NAMES) == pytest.approx(
        other.score(rows, groups=NAMES), abs=0.01
    )


@pytest.mark.slow
@pytest.mark.parametrize("which", ["hmf", "tcmf"])
def test_a_new_client_with_gaps_or_errors_gets_what_it_would_have_had(which, request, rows, gaps):
    model = request.getfixturevalue(which)
    own = gaps[NAMES == "b"] if which == "hmf" else (rows + errors_in(rows))[NAMES == "b"]
    if which == "hmf":
        own = pd.DataFrame(own).add_prefix("g")
    known = pickle.loads(pickle.dumps(model)).personalize(own, groups=["d"] * len(own))
    found = known.transform(own, groups=["d"] * len(own))
    np.testing.assert_allclose(found, model.transform(own, ["b"] * len(own)), atol=1e-2)
    assert known.local_components_.shape == (4, 2, D)


# --- gross errors --------------------------------------------------------------------------------


def test_gross_errors_are_told_from_the_rest(rows, tcmf):
    wrong = errors_in(rows)
    assert tcmf.threshold_ == pytest.approx(0.4, rel=0.2)  # four deviations of the noise
    found = tcmf.sparse_part(rows + wrong, groups=NAMES)
    assert np.mean((found != 0) != (wrong != 0)) < 1e-3
    assert np.std((found - wrong)[wrong != 0]) < 0.2
    again = tcmf.inverse_transform(tcmf.transform(rows + wrong, NAMES), groups=NAMES)
    assert np.std(again - rows) < 0.12
    assert tcmf.noise_variance_ == pytest.approx(0.01, rel=0.3)
    assert not hasattr(tcmf, "score")
    missing = np.where(np.arange(D) == 3, np.nan, rows + wrong)
    assert not np.any(tcmf.sparse_part(missing, groups=NAMES)[:, 3])


def test_constant_features_hide_no_noise(rows, tcmf):
    constant = np.tile([0.0, 0.1, 7], (len(rows), D))  # three for each that varies
    X = np.hstack([rows + errors_in(rows), constant])
    wider = estimators.TripleComponentMF(2, 2, n_init=1, random_state=0).fit(X, groups=NAMES)
    assert wider.threshold_ == pytest.approx(tcmf.threshold_)
    wanted = tcmf.sparse_part(X[:, :D], groups=NAMES)
    np.testing.assert_allclose(wider.sparse_part(X, groups=NAMES)[:, :D], wanted, atol=1e-8)


def test_components_beside_gross_errors_are_those_of_the_run(rows):
    X = rows + errors_in(rows)
    options = {"threshold": 0.5, "decay": 0.8, "center": False, "n_init": 1, "random_state": 0}
    model = estimators.TripleComponentMF(3, 2, **options).fit(X, groups=NAMES)
    with jax.enable_x64(True):
        clients = jf.Clients.from_samples([X[name == NAMES] for name in "abc"])
        algorithm = jf.pca.TCMF(3, 2, 0.5, decay=0.8)
        wanted = jf.fit(algorithm, clients, rounds=500, tol=1e-6, key=KEY)
    np.testing.assert_allclose(
        projector(model.components_.T), projector(wanted.result.shared), atol=1e-8
    )
    cleaned = np.concatenate([x[:n] for x, n in zip(wanted.local.cleaned, COUNTS, strict=True)])
    sparse = np.where(cleaned == X, 0, X - cleaned)
    np.testing.assert_allclose(model.sparse_part(X, groups=NAMES), sparse, atol=1e-3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"threshold": -1.0}, r"^threshold: wanted a finite number of at least 0"),
        ({"decay": 1.0}, r"^decay: wanted a number above 0 and below 1"),
        ({"shared_rank": 0}, r"^shared_rank: wanted a whole number"),
        ({"local_rank": D}, rf"minimum of {D + 1} is required"),
        ({"center": "yes"}, r"^center: wanted True or False"),
    ],
)
def test_bad_parameters_of_a_factorization_are_refused_by_name(rows, changed, said):
    with pytest.raises(ValueError, match=said):
        estimators.TripleComponentMF(**{"n_init": 1, **changed}).fit(rows, groups=NAMES)


# --- names ---------------------------------------------------------------------------------------


def test_local_components_are_a_frame_by_client_and_feature(hmf, nmf):
    frame = hmf.components_frame()
    assert frame.index.names == ["client", "component"] and frame.columns[3] == "g3"
    np.testing.assert_array_equal(frame.loc["b"], hmf.local_components_[1])
    assert nmf.components_frame().columns[0] == "x0"
    np.testing.assert_array_equal(nmf.components_frame().loc[("c", 3)], nmf.local_components_[2, 3])
    alone = estimators.FederatedPCA(1).fit(np.eye(5), groups=[0, 0, 1, 1, 1])
    with pytest.raises(ValueError, match=r"^components_frame: wanted local components"):
        alone.components_frame()


def test_columns_tell_shared_from_local(gaps, counts, hmf, nmf):
    wanted = [f"heterogeneousmf_{kind}{j}" for kind in ("shared", "local") for j in range(2)]
    frame = pd.DataFrame(gaps, index=range(7, 7 + len(gaps))).add_prefix("g")
    found = clone(hmf).set_output(transform="pandas").fit(frame, groups=NAMES)
    scores = found.transform(frame, groups=NAMES)
    assert scores.columns.tolist() == wanted and scores.index[0] == 7
    np.testing.assert_allclose(scores, hmf.transform(frame, groups=NAMES), atol=1e-10)
    assert nmf.get_feature_names_out().tolist() == [f"integrativenmf{j}" for j in range(4)]
    with pytest.raises(ValueError, match="feature names"):
        found.transform(frame.iloc[:, ::-1], groups=NAMES)
    assert found.saved_.names.features == tuple(frame.columns)


def test_a_run_can_be_used_where_solutions_are(rows, counts, hmf, nmf):
    tables = [(rows - hmf.mean_)[name == NAMES] for name in "abc"]
    with jax.enable_x64(True):
        scores = np.concatenate(jf.pca.transform(hmf, tables))
        loadings = jf.nmf.transform(
            nmf, [counts[name == NAMES] for name in "abc"], penalty=nmf.penalty
        )
    frame = pd.DataFrame(rows).add_prefix("g")
    np.testing.assert_allclose(scores, hmf.transform(frame, groups=NAMES), atol=1e-10)
    found = nmf.transform(counts, groups=NAMES)
    np.testing.assert_allclose(np.concatenate(loadings), found, atol=1e-8)


@pytest.mark.filterwarnings("ignore:.*not in fit")
@pytest.mark.parametrize(
    ("name", "rows_of", "change"),
    [
        ("nmf", "counts", {"penalty": 50.0}),
        pytest.param("hmf", "gaps", {"shared_rank": 1, "local_rank": 1}, marks=pytest.mark.slow),
    ],
)
def test_what_is_set_after_a_fit_changes_nothing_before_the_next(name, rows_of, change, request):
    fitted, table = map(request.getfixturevalue, (name, rows_of))
    new = np.full(COUNTS[0], "new")
    model = pickle.loads(pickle.dumps(fitted)).set_params(**change)
    if hasattr(fitted, "feature_names_in_"):
        table = pd.DataFrame(table, columns=fitted.feature_names_in_)
    found, wanted = (x.transform(table[: COUNTS[0]], groups=new) for x in (model, fitted))
    np.testing.assert_array_equal(found, wanted)
