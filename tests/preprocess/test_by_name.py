"""Models of preprocessing know clients and features by name, in whatever order they come."""

import jax
import numpy as np
import pandas as pd
import pytest

import jaxfed as jf
from jaxfed.core.clients.names import NAMELESS, without_names
from jaxfed.testing._compare import compilations
from tests import helpers

NAMES, FEATURES = ["oslo", "rome", "bern"], ["iron", "zinc", "lead"]
CLIENTS, COLUMNS = [2, 0, 1], [1, 2, 0]  # another order
KEY = jax.random.key(0)


def tables(dtype=np.float64):
    rng = np.random.default_rng(0)
    made = [rng.normal(size=(12 + 3 * i, 3)) * (1 + i) + 10 * i for i in range(3)]
    return [(x * [1, 5, 20]).astype(dtype) for x in made]


def with_gaps(dtype=np.float64):
    found = tables(dtype)
    for i, x in enumerate(found):
        x[i::4, i] = np.nan
    return found


def reordered(given, **options):
    names, features = [NAMES[i] for i in CLIENTS], [FEATURES[j] for j in COLUMNS]
    moved = [given[i][:, COLUMNS] for i in CLIENTS]
    return jf.Clients.from_samples(moved, names=names, features=features, **options)


def named(given, **options):
    return jf.Clients.from_samples(given, names=NAMES, features=FEATURES, **options)


def learned(kind, given):
    algorithm = {"scale": jf.preprocess.Standardize("local", "local")}.get(kind)
    algorithm = jf.preprocess.Impute(1, 1) if algorithm is None else algorithm
    return algorithm, jf.fit(algorithm, given, rounds=1 if kind == "scale" else 5, key=KEY)


def rows_of(clients):
    """Each client's rows by name, with the features in their first order."""
    columns = [clients.names.features.index(name) for name in FEATURES]
    pairs = zip(clients.names.clients, range(len(clients)), strict=True)
    counts = np.asarray(clients.counts, int)
    return {
        name: np.asarray(clients.take([i]).parts[0].values)[0, : counts[i], columns].T
        for name, i in pairs
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["scale", "impute"])
@pytest.mark.parametrize("bucket", [None, 2])
def test_clients_in_another_order_are_known_by_name(kind, dtype, bucket):
    given, options = with_gaps(dtype), {"missing": "mask", "bucket": bucket}
    with jax.enable_x64(dtype == np.float64):
        first, second = named(given, **options), reordered(given, **options)
        model = learned(kind, first)[1].result.local
        assert model.names == first.names
        wanted, moved = model.transform(first), model.transform(second)
        assert moved.names.clients == second.names.clients
        for name, rows in rows_of(wanted).items():
            np.testing.assert_allclose(rows_of(moved)[name], rows, rtol=1e-6)
        if kind == "scale":
            again = rows_of(model.inverse_transform(moved))
            for name, rows in rows_of(first).items():
                np.testing.assert_allclose(again[name], rows, rtol=1e-5)
            return
        moments, others = model.moments(first), model.moments(second)
        places = [list(others.names.clients).index(name) for name in NAMES]
        found = jf.pca.ranks_for_variance(others, 1, 2)
        assert found == pytest.approx(jf.pca.ranks_for_variance(moments, 1, 2), rel=1e-5)
        if bucket is None:
            dense = np.asarray(others.data.dense)[places]
            np.testing.assert_allclose(dense, moments.data.dense, rtol=1e-5)


@pytest.mark.parametrize("kind", ["scale", "impute"])
def test_rows_of_a_client_by_name_and_columns_by_name(kind):
    model = learned(kind, named(with_gaps(np.float32), missing="mask"))[1].result.local
    rows = with_gaps(np.float32)[1]
    wanted = model.transform(rows, client=1)
    np.testing.assert_array_equal(model.transform(rows, client="rome"), wanted)
    frame = pd.DataFrame(rows, columns=FEATURES).iloc[:, COLUMNS]
    np.testing.assert_array_equal(model.transform(frame, client="rome"), wanted)
    with pytest.raises(ValueError, match=r"client: wanted one of oslo, rome, bern.* got 'romme'"):
        model.transform(rows, client="romme")
    with pytest.raises(ValueError, match="samples, columns: wanted iron, zinc, lead, got"):
        model.transform(frame.rename(columns={"zinc": "gold"}), client="rome")


@pytest.mark.parametrize("kind", ["scale", "impute"])
def test_other_names_are_refused(kind):
    given = with_gaps(np.float32)
    model = learned(kind, named(given, missing="mask"))[1].result.local
    others = jf.Clients.from_samples(given, names=["oslo", "rome", "kyiv"], missing="mask")
    with pytest.raises(ValueError, match="clients: wanted oslo, rome, bern, got oslo, rome, kyiv"):
        model.transform(others)
    few = jf.Clients.from_samples(given[:2], names=NAMES[:2], missing="mask")
    with pytest.raises(ValueError, match="without bern"):
        model.transform(few)
    others = jf.Clients.from_samples(given, features=["iron", "zinc", "gold"], missing="mask")
    with pytest.raises(ValueError, match="features: wanted iron, zinc, lead, got iron, zinc, gold"):
        model.transform(others)


def test_without_names_on_one_side_clients_count_by_position():
    given = tables(np.float32)
    model = learned("scale", named(given))[1].result.local
    bare = jf.Clients.from_samples(given)
    found = np.asarray(model.transform(bare).data.values)
    np.testing.assert_array_equal(found, model.transform(named(given)).data.values)
    by_hand = jf.preprocess.Standardization(model.mean, model.scale)
    assert by_hand.names == NAMELESS
    moved = by_hand.transform(reordered([given[i][:, np.argsort(COLUMNS)] for i in range(3)]))
    assert moved.names.clients == ("bern", "oslo", "rome")


def test_the_model_for_all_clients_knows_the_features():
    given = tables(np.float32)
    solution = jf.fit(jf.preprocess.Standardize(), named(given), rounds=1, key=KEY)
    model = solution.result.shared
    others = reordered(given).take([0])
    found = rows_of(model.transform(others))["bern"]
    wanted = (given[2] - np.asarray(model.mean)) / np.asarray(model.scale)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("kind", ["scale", "impute"])
def test_new_clients_models_have_their_names(kind):
    given = tables(np.float32)
    algorithm, solution = learned(kind, named(given))
    found = jf.personalize(algorithm, solution, reordered(given), rounds=1).local
    assert found.names.clients == ("bern", "oslo", "rome")
    assert found.names.features == tuple(FEATURES)


def test_they_are_saved_with_their_own_names(tmp_path):
    given = with_gaps(np.float32)
    clients = named(given, missing="mask")
    units = learned("scale", clients)[1].result.local
    scaled = units.transform(clients)
    models = learned("impute", scaled)[1].result.local
    solution = helpers.fit(jf.pca.OneShot(1, 1), models.transform(scaled), rounds=1)
    solution.save(tmp_path / "result.npz", preprocessing=units, imputation=models)
    found = jf.load(tmp_path / "result.npz")
    assert found.preprocessing.names == found.imputation.names == clients.names
    again = rows_of(found.preprocessing.transform(reordered(given, missing="mask")))
    for name, rows in rows_of(scaled).items():
        np.testing.assert_allclose(again[name], rows, rtol=1e-6)
    solution.save(tmp_path / "result.npz", preprocessing=without_names(units))
    assert jf.load(tmp_path / "result.npz").preprocessing.names == NAMELESS


@pytest.mark.parametrize("kind", ["scale", "impute"])
def test_without_names_they_are_of_the_type_of_those_that_never_had_any(kind):
    given = with_gaps() if kind == "impute" else tables()
    options = {"missing": "mask"} if kind == "impute" else {}
    algorithm, found = learned(kind, named(given, **options))
    never = jf.rollout(algorithm, jf.Clients.from_samples(given, **options), rounds=1, key=KEY)
    wanted = jax.tree.structure(never.result)
    assert jax.tree.structure(without_names(found.result)) == wanted
    assert jax.tree.structure(without_names(never.result)) == wanted


def test_names_compile_nothing_again():
    def run(names):
        given = jf.Clients.from_samples(with_gaps(np.float32), names=names, missing="mask")
        algorithm, solution = learned("impute", given)
        later = jf.fit(algorithm, given, rounds=5, key=KEY, warm_start=solution)
        models = later.result.local
        jf.personalize(algorithm, later, given, rounds=1)
        return models.transform(given), models.moments(given)

    run(NAMES)
    run(NAMES)
    with compilations() as compiled:
        run(["a", "b", "c"])
    assert not compiled


def test_clients_that_are_read_later_are_known_by_name():
    given = tables(np.float32)
    model = learned("scale", named(given))[1].result.local
    source = jf.Clients.from_source(
        [given[i][:, COLUMNS] for i in CLIENTS],
        names=[NAMES[i] for i in CLIENTS],
        features=[FEATURES[j] for j in COLUMNS],
    )
    found = model.transform(source)
    assert found.names == named(given).names._replace(clients=source.names.clients)
    wanted = model.transform(named(given))
    first, second = (
        helpers.fit(jf.pca.Pooled(1), each, rounds=1).result.shared for each in (found, wanted)
    )
    np.testing.assert_allclose(np.abs(first.T @ second), 1, rtol=1e-5)
