"""The estimator of joint and individual parts of views."""

import pickle

import jax
import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone

import jaxfed as jf
from bench.oracles import ajive as oracle
from jaxfed.estimators import FederatedAJIVE, FederatedGCCA
from tests.references import ajive as reference


@pytest.fixture(scope="module")
def views():
    return oracle.draw(0)


@pytest.fixture(scope="module")
def fitted(views):
    return FederatedAJIVE(random_state=0).fit(views)


def parts_of(model):
    joint = [model.joint_scores_ @ x for x in model.joint_components_]
    own = zip(model.individual_scores_, model.individual_components_, strict=True)
    return joint, [u @ x for u, x in own]


def test_ranks_are_estimated_and_parts_are_those_of_the_reference(views, fitted):
    wanted = reference.ajive(views, 2, oracle.SIGNAL_RANKS)
    assert fitted.joint_rank_ == 2 and fitted.individual_ranks_ == wanted.individual_ranks
    assert fitted.signal_ranks_ == list(oracle.SIGNAL_RANKS)
    for found, true in zip(parts_of(fitted), (wanted.joint, wanted.individual), strict=True):
        for one, other in zip(found, true, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-9)
    for j, x in enumerate(views):
        joint, individual = (np.sum(part[j] ** 2) for part in (wanted.joint, wanted.individual))
        shares = fitted.explained_variance_ratio_[j]
        assert shares[:2].sum() == pytest.approx(joint / np.sum(x**2), rel=1e-8)
        assert shares[2:].sum() == pytest.approx(individual / np.sum(x**2), rel=1e-8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_given_ranks_are_those_of_the_run(views, dtype):
    tables = [(x + 3).astype(dtype) for x in views]
    options = {"individual_rank": [1, 0, 2], "signal_rank": (3, 4, 3)}
    model = FederatedAJIVE(3, **options).fit(tables)
    with jax.enable_x64(dtype == np.float64):
        algorithm = jf.gcca.AJIVE(3, (3, 4, 3), individual_rank=(1, 0, 2))
        clients = jf.gcca.Views.from_arrays(tables, center=True)
        joint, parts = jf.fit(algorithm, clients, rounds=1, key=jax.random.key(0)).result
    kept = np.asarray(joint.singular_values) > 0
    tol = 1e-4 if dtype == np.float32 else 1e-10
    scores = np.asarray(joint.scores)[:, kept]
    found = model.joint_scores_ @ model.joint_scores_.T
    np.testing.assert_allclose(found, scores @ scores.T, atol=tol)
    assert model.joint_rank_ == kept.sum() and model.individual_ranks_ == [1, 0, 2]
    own = parts_of(model)[1]
    for j, x in enumerate(parts.individual()):
        np.testing.assert_allclose(own[j], x[:, : tables[j].shape[1]], atol=30 * tol)
    assert all(z.dtype == dtype for z in model.transform(tables))
    again = model.inverse_transform(model.transform(tables))
    assert all(x.dtype == dtype and x.shape == y.shape for x, y in zip(again, tables, strict=True))


def test_scores_of_new_entities_are_least_squares(views, fitted):
    rng = np.random.default_rng(0)
    new = [x[:5] + rng.normal(size=(5, x.shape[1])) for x in views]
    scores = fitted.transform(new)
    for j, x in enumerate(new):
        both = np.concatenate([fitted.joint_components_[j], fitted.individual_components_[j]])
        wanted = np.linalg.lstsq(both.T, (x - fitted.means_[j]).T, rcond=None)[0].T
        np.testing.assert_allclose(scores[j], wanted, atol=1e-9)
        again = fitted.inverse_transform(scores)[j]
        np.testing.assert_allclose(again, wanted @ both + fitted.means_[j], atol=1e-9)
    assert fitted.score(views) > 0.95 and fitted.score(new) < fitted.score(views)


def test_views_that_share_nothing_have_no_joint_part():
    rng = np.random.default_rng(0)
    views = [
        rng.normal(size=(100, 2)) @ rng.normal(size=(2, d)) + 0.1 * rng.normal(size=(100, d))
        for d in (8, 9)
    ]
    model = FederatedAJIVE(random_state=0).fit(views)
    assert model.joint_rank_ == 0 and model.individual_ranks_ == [2, 2]
    assert model.joint_scores_.shape == (100, 0) and model.score(views) == 0
    for j, x in enumerate(views):
        u, s, vt = np.linalg.svd(x - x.mean(0), full_matrices=False)
        found = parts_of(model)[1][j]
        np.testing.assert_allclose(found, u[:, :2] * s[:2] @ vt[:2], atol=1e-9)
    assert [z.shape for z in model.transform(views)] == [(100, 2)] * 2
    assert model.saved_.result.shared.scores.shape == (100, 0)


def test_frames_keep_their_names_and_give_frames(views, fitted):
    frames = [
        pd.DataFrame(x, index=[f"e{i}" for i in range(20)]).add_prefix(f"v{j} ")
        for j, x in enumerate(views)
    ]
    model = clone(FederatedAJIVE(random_state=0).set_output(transform="pandas")).fit(frames)
    found = model.transform([frames[0].iloc[:, ::-1], *frames[1:]])
    for one, scores in zip(found, fitted.transform(views), strict=True):
        np.testing.assert_allclose(one, scores, atol=1e-12)
    assert found[2].columns.tolist() == [
        f"federatedajive_view2_{kind}" for kind in ("joint0", "joint1", "individual0")
    ]
    assert found[0].index[3] == "e3"
    loadings = model.components_frame()[1]
    assert loadings.index.tolist() == ["joint0", "joint1", "individual0", "individual1"]
    np.testing.assert_array_equal(loadings.loc["joint1"], model.joint_components_[1][1])
    assert loadings.columns.tolist() == frames[1].columns.tolist()
    assert model.saved_.names.features == tuple(tuple(x.columns) for x in frames)
    with sklearn.config_context(transform_output="pandas"):
        of_arrays = fitted.transform(views)
    assert isinstance(of_arrays[0], pd.DataFrame)
    with pytest.raises(ValueError, match=r"^transform: "):
        model.set_output(transform="table")


def test_weights_of_gcca_are_frames_too(views):
    model = FederatedGCCA(2, random_state=0).fit(views)
    frames = model.components_frame()
    np.testing.assert_array_equal(frames[1].T, model.weights_[1])
    assert frames[1].columns[0] == "x0"
    assert model.get_feature_names_out()[1].tolist() == [f"federatedgcca_view1_{i}" for i in (0, 1)]


def test_a_fitted_estimator_is_stored(views, fitted):
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.transform(views)[1], fitted.transform(views)[1])
    assert "AJIVE" in again.summary_ and again.n_iter_ == 1 and again.n_views_ == 3
    joint, parts = again.saved_.result
    wanted = parts_of(fitted)[0][0]
    np.testing.assert_allclose(parts.joint(joint)[0][:, :8], wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"joint_rank": -1}, r"^joint_rank: wanted a whole number of at least 0, got -1"),
        ({"joint_rank": 11}, r"^joint_rank: wanted at most 10, got 11"),
        ({"signal_rank": (3, 4)}, r"^signal_rank: wanted a whole number, 3 of them or None"),
        ({"signal_rank": "auto"}, r"^signal_rank: wanted a whole number, 3 of them or None"),
        ({"signal_rank": 0}, r"^signal_rank: wanted a whole number of at least 1"),
        ({"individual_rank": -1}, r"^individual_rank: wanted a whole number of at least 0"),
        ({"center": 1.5}, r"^center: wanted True or False"),
    ],
)
def test_bad_parameters_are_refused_by_name(views, changed, said):
    with pytest.raises(ValueError, match=said):
        FederatedAJIVE(**{"signal_rank": (3, 4, 3), **changed}).fit(views)


def test_views_that_do_not_fit_are_refused(views, fitted):
    with pytest.raises(ValueError, match="views: wanted at least two"):
        FederatedAJIVE().fit(views[:1])
    with pytest.raises(ValueError, match=r"views: wanted \[8, 11, 7\] features"):
        fitted.transform(views[::-1])
    with pytest.raises(ValueError, match=r"^scores: wanted \[3, 4, 3\] columns"):
        fitted.inverse_transform(views)


def test_views_may_have_nothing_in_common(views):
    model = FederatedAJIVE(0, signal_rank=(3, 4, 3), individual_rank=(3, 4, 3)).fit(views)
    assert model.joint_rank_ == 0
    for x, own, rank in zip(views, parts_of(model)[1], (3, 4, 3), strict=True):
        left, values, right = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
        best = (left[:, :rank] * values[:rank]) @ right[:rank]
        np.testing.assert_allclose(own, best, atol=1e-8)
