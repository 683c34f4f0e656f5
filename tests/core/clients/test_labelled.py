"""Arrays of xarray in, and what was learned as arrays of xarray out."""

import sys

import chex
import jax
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import jaxfed as jf
from tests.helpers import gaussian_samples

NAMES, FEATURES = ("ann", "bob", "eve"), ("height", "mass", "age", "pulse")
COUNTS, SCALES, KEY = (9, 6, 7), (3, 2, 1, 0.5), jax.random.key(0)
PATIENTS, WAVES = ["p1", "p2", "p3", "p4", "p5", "p6"], [400.0, 410.5, 500.0]


def samples(seed=0, dtype=np.float32):
    return [x.astype(dtype) for x in gaussian_samples(COUNTS, SCALES, seed=seed)]


def labelled(seed=0, dtype=np.float32, features=FEATURES):
    return [
        xr.DataArray(x, {"feature": list(features)}, ("sample", "feature"), name=name)
        for x, name in zip(samples(seed, dtype), NAMES, strict=True)
    ]


def views(rows=PATIENTS):
    """Two views of patients, of which one has wavelengths as features."""
    rng = np.random.default_rng(0)
    first, second = (rng.normal(size=(6, d)).astype(np.float32) for d in (4, 3))
    return [
        xr.DataArray(
            first, {"patient": rows, "gene": list("abcd")}, ("patient", "gene"), name="genes"
        ),
        xr.DataArray(second, {"patient": rows, "wave": WAVES}, ("patient", "wave"), name="light"),
    ]


# --- in ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_bring_their_names_and_values(dtype):
    with jax.enable_x64(dtype == np.float64):
        clients = jf.Clients.from_samples(labelled(dtype=dtype))
        wanted = jf.Clients.from_samples(samples(dtype=dtype), names=NAMES, features=FEATURES)
        assert clients.names == wanted.names and clients.data.values.dtype == dtype
        chex.assert_trees_all_equal(clients.data, wanted.data)


def test_features_of_arrays_are_put_in_one_order():
    first, second, third = labelled()
    moved = second.isel(feature=[2, 0, 3, 1])
    wanted = jf.Clients.from_samples([first, second, third])
    clients = jf.Clients.from_samples([first, moved, third])
    assert clients.names == wanted.names
    chex.assert_trees_all_equal(clients.data, wanted.data)
    # Beside a data frame, too.
    frame = pd.DataFrame(samples()[0], columns=list(FEATURES))
    mixed = jf.Clients.from_samples([frame, moved, third], names=NAMES)
    np.testing.assert_array_equal(mixed.data.values, wanted.data.values)
    puls = moved.assign_coords(feature=["age", "height", "puls", "mass"])
    with pytest.raises(ValueError, match=r"^arrays\[1\], columns: .*without pulse, with puls"):
        jf.Clients.from_samples([first, puls, third])


def test_an_array_of_all_clients_and_a_dataset_name_clients():
    cube = xr.DataArray(
        np.stack([x[:6] for x in samples()]),
        {"client": list(NAMES), "feature": list(FEATURES)},
        ("client", "sample", "feature"),
    )
    clients = jf.Clients.from_samples(cube)
    assert clients.names.clients == NAMES and clients.names.features == FEATURES
    np.testing.assert_array_equal(clients.data.values, cube.values)
    turned = jf.Clients.from_samples(cube, features=FEATURES[::-1], names=["a", "b", "c"])
    assert turned.names.features == FEATURES[::-1] and turned.names.clients == ("a", "b", "c")
    np.testing.assert_array_equal(turned.data.values, cube.values[..., ::-1])
    own = {x.name: x.rename(sample=f"sample_{x.name}") for x in labelled()}
    of_set = jf.Clients.from_samples(xr.Dataset(own))
    assert of_set.names == jf.Clients.from_samples(labelled()).names
    np.testing.assert_array_equal(of_set.data.values[1, :6], samples()[1])
    numbered = jf.Clients.from_samples(cube.assign_coords(client=[12, 3, 7]))
    assert numbered.names.clients == ("12", "3", "7")


def test_coordinates_that_only_count_and_equal_names_are_no_names():
    arrays = [xr.DataArray(x, {"f": range(4)}, ("s", "f"), name="mass") for x in samples()]
    clients = jf.Clients.from_samples(arrays)
    assert clients.names.features is None and clients.names.clients is None
    bare = jf.Clients.from_samples([xr.DataArray(x) for x in samples()])
    assert bare.names == clients.names
    chex.assert_trees_all_equal(bare.data, clients.data)


def test_levels_and_dates_name_features_as_columns_of_a_data_frame_do():
    levels = pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1), ("b", 2)], names=["g", "k"])
    own = xr.Coordinates.from_pandas_multiindex(levels, "feature")
    arrays = [xr.DataArray(x, own, ("sample", "feature")) for x in samples()]
    frames = [pd.DataFrame(x, columns=levels) for x in samples()]
    wanted = jf.Clients.from_samples(frames).names.features
    assert jf.Clients.from_samples(arrays).names.features == wanted
    assert wanted is not None and wanted[1] == "('a', 2)"
    days = pd.date_range("2020-01-01", periods=4)
    dated = [xr.DataArray(x, {"day": days}, ("sample", "day")) for x in samples()]
    assert jf.Clients.from_samples(dated).names.features[3] == "2020-01-04 00:00:00"


def test_missing_entries_are_masked_or_refused():
    arrays = labelled()
    arrays[1] = arrays[1].where(arrays[1].feature != "age")
    clients = jf.Clients.from_samples(arrays, missing="mask")
    assert np.isnan(clients.data.values[1, :6, 2]).all()
    with pytest.raises(ValueError, match=r"^arrays\[1\]: NaN .*missing='mask'"):
        jf.Clients.from_samples(arrays)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda x: x.astype("datetime64[ns]"), r"^arrays\[0\]: wanted real.*got datetime64"),
        (lambda x: x.astype(str), r"^arrays\[0\]: wanted real"),
        (lambda x: x.astype(object), r"^arrays\[0\]: wanted real"),
        (lambda x: x + 1j, r"^arrays\[0\]: wanted real.*got complex"),
        (lambda x: x.T, r"^arrays\[0\]: wanted feature as the last dimension, got feature, sample"),
        (lambda x: x[0], r"^arrays\[0\]: wanted shape \(samples, features\)"),
        (lambda x: x.assign_coords(feature=list("abca")), r"^arrays\[1\], columns: "),
    ],
)
def test_unsuitable_arrays_are_refused_by_name(change, refused):
    first, *others = labelled()
    with pytest.raises(ValueError, match=refused):
        jf.Clients.from_samples([change(first), *others])


def test_unsuitable_names_and_dimensions_are_refused():
    twice = [x.assign_coords(feature=list("abca")) for x in labelled()]
    with pytest.raises(ValueError, match=r"^features|columns: .*(twice)"):
        jf.Clients.from_samples(twice)
    first, second, _ = (x.rename(feature="gene") for x in labelled())
    with pytest.raises(ValueError, match=r"^arrays\[1\]: wanted gene as the last dimension"):
        jf.Clients.from_samples([first, second.T])
    cube = xr.DataArray(np.ones((5, 3, 4)), dims=("sample", "client", "feature"))
    with pytest.raises(ValueError, match=r"^arrays: wanted client as the first dimension"):
        jf.Clients.from_samples(cube)
    with pytest.raises(ValueError, match=r"^arrays: wanted a list"):
        jf.Clients.from_samples(cube[0])


def test_views_are_known_by_names_and_put_in_order():
    clients = jf.gcca.Views.from_arrays(views())
    assert clients.names.clients == ("genes", "light")
    assert clients.names.features == (tuple("abcd"), ("400.0", "410.5", "500.0"))
    assert clients.names.entities == tuple(PATIENTS)
    first, second = views()
    mixed = jf.gcca.Views.from_arrays([first, second[::-1]])
    assert mixed.names == clients.names
    chex.assert_trees_all_equal(mixed.data, clients.data)
    of_set = jf.gcca.Views.from_arrays(xr.Dataset({x.name: x for x in views()}))
    assert of_set.names == clients.names
    with pytest.raises(ValueError, match=r"^arrays\[1\], rows: .*without p1, with p7.*gcca\.align"):
        jf.gcca.Views.from_arrays([first, second.assign_coords(patient=["p7", *PATIENTS[1:]])])
    with pytest.raises(ValueError, match=r"^arrays\[1\]: wanted patient as the first dimension"):
        jf.gcca.Views.from_arrays([first, second.T])


def test_views_must_have_the_ids_of_their_alignment():
    first, second = views()
    second = second[[4, 0, 2]]
    ids = [x.patient.values for x in (first, second)]
    alignment = jf.gcca.align(ids)
    clients = jf.gcca.Views.from_arrays([first, second], alignment=alignment)
    assert clients.names.entities == tuple(PATIENTS)
    np.testing.assert_array_equal(clients.data.values[1, 4, :3], second.values[0])
    with pytest.raises(ValueError, match=r"^arrays\[1\], rows: wanted the order p5, p1, p3"):
        jf.gcca.Views.from_arrays([first, second[::-1]], alignment=alignment)


def test_fitted_functions_take_arrays_in_any_order():
    clients = jf.Clients.from_samples(labelled())
    run = jf.fit(jf.pca.PerPCA(1, 1), clients, rounds=5, key=KEY)
    wanted = jf.pca.transform(run, samples()[1], client="bob")
    own = labelled()[1].isel(feature=[2, 0, 3, 1])
    np.testing.assert_allclose(jf.pca.transform(run, own, client="bob"), wanted, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^samples, columns: .*without height, mass"):
        jf.pca.transform(run, own.assign_coords(feature=list("abcd")), client="bob")
    every = [x.isel(feature=[2, 0, 3, 1]) for x in labelled()]
    np.testing.assert_allclose(jf.pca.transform(run, every)[1], wanted, rtol=1e-6)
    later = jf.update(run, jf.Clients.from_samples(every), rounds=1, key=KEY)
    assert later.names == run.names


def test_estimators_of_views_match_features_of_arrays():
    model = jf.estimators.FederatedGCCA(1, ridge=0.1).fit(views())
    assert model.feature_names_in_[0] == tuple("abcd")
    first, second = views()
    scores = model.transform([first.isel(gene=[3, 1, 0, 2]), second])
    np.testing.assert_allclose(scores[0], model.transform(views())[0], rtol=1e-6)


# --- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_components_have_names(dtype, tmp_path):
    with jax.enable_x64(dtype == np.float64):
        clients = jf.Clients.from_samples(labelled(dtype=dtype))
        run = jf.fit(jf.pca.PerPCA(2, 1), clients, rounds=5, key=KEY)
    found = jf.to_xarray(run)
    assert found.shared.dims == ("feature", "component") and found.shared.shape == (4, 2)
    assert found.local.dims == ("client", "feature", "component")
    own = found.local.sel(client="bob", feature=["age", "mass"])
    np.testing.assert_array_equal(own, np.asarray(run.result.local)[1, [2, 1]])
    assert found.shared.dtype == dtype and found.shared.name == "shared"
    run.save(tmp_path / "run.npz")
    with jax.enable_x64(dtype == np.float64):
        again = jf.to_xarray(jf.load(tmp_path / "run.npz"))
    xr.testing.assert_identical(again.local, found.local)
    xr.testing.assert_identical(again.shared, found.shared)
    # What comes out goes in.
    assert jf.Clients.from_samples(found.local.transpose("client", "component", "feature")).names


def test_clients_without_names_have_ids_and_results_nothing():
    clients = jf.Clients.from_samples(samples()).take([2, 0])
    run = jf.fit(jf.pca.Local(1), clients, rounds=1, key=KEY)
    found = jf.to_xarray(run)
    assert found.shared is None and list(found.local.client.values) == [2, 0]
    assert "feature" not in found.local.coords
    assert not jf.to_xarray(run.result).local.coords


def test_representations_of_views_have_entities():
    run = jf.fit(jf.gcca.MaxVar(2), jf.gcca.Views.from_arrays(views()), rounds=3, key=KEY)
    found = jf.to_xarray(run)
    assert found.shared.dims == ("entity", "component")
    assert list(found.shared.entity.values) == PATIENTS
    light = found.local.sel(client="light")
    assert list(light.feature_name.values) == ["400.0", "410.5", "500.0", ""]
    np.testing.assert_array_equal(light, run.result.local[1])
    bare = [x.values for x in views()]
    run = jf.fit(jf.gcca.MaxVar(2), jf.gcca.Views.from_arrays(bare), rounds=3, key=KEY)
    assert jf.to_xarray(run).shared.dims == ("entity", "component")


def test_trees_stay_trees():
    clients = jf.Clients.from_samples(labelled())
    run = jf.fit(jf.preprocess.Standardize(), clients, rounds=2, key=KEY)
    leaf = jax.tree.leaves(jf.to_xarray(run).local, is_leaf=lambda x: isinstance(x, xr.DataArray))[
        0
    ]
    assert leaf.dims[0] == "client" and list(leaf.client.values) == list(NAMES)


def test_what_is_no_result_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"^fitted: wanted what an algorithm learned"):
        jf.to_xarray(np.ones((3, 2)))
    clients = jf.Clients.from_samples(labelled())
    keys = jax.random.split(KEY, 2)
    several = jf.sweep([jf.pca.Local(1)] * 2, clients, rounds=1, keys=keys)
    with pytest.raises(ValueError, match=r"^fitted: wanted the solution of one run"):
        jf.to_xarray(several)
    run = jf.fit(jf.pca.Local(1), clients, rounds=1, key=KEY)
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"xarray is needed .* pip install 'jaxfed\[sweep\]'"):
        jf.to_xarray(run)
    assert jf.Clients.from_samples(samples()).features == 4


def test_numbers_that_count_in_another_order_are_names():
    z = np.random.default_rng(0).normal(size=(6, 3))
    order = [2, 0, 1]
    frames = [pd.DataFrame(z), pd.DataFrame(z)[order]]
    arrays = [xr.DataArray(z, dims=("sample", "feature"), coords={"feature": np.arange(3)})]
    arrays.append(arrays[0][:, order])
    for tables in (frames, frames[::-1], arrays, arrays[::-1]):
        one, other = np.asarray(jf.Clients.from_samples(tables).data.values)
        np.testing.assert_array_equal(one, other)
        solution = jf.fit(jf.pca.Pooled(1), jf.Clients.from_samples([z]), rounds=1, key=KEY)
        scores = [jf.pca.transform(solution, x) for x in tables]
        np.testing.assert_array_equal(*scores)
    wide = [pd.DataFrame(z), pd.DataFrame(z, columns=[7, 8, 9])]
    with pytest.raises(ValueError, match="columns: wanted"):
        jf.Clients.from_samples(wide)


def test_entities_that_count_in_another_order_are_matched():
    z, order = np.random.default_rng(0).normal(size=(6, 3)), [3, 5, 0, 1, 2, 4]
    view = xr.DataArray(z, dims=("entity", "f"), coords={"entity": np.arange(6)})
    for pair in ([view, view[order]], [view[order], view]):
        one, other = np.asarray(jf.gcca.Views.from_arrays(pair).data.values)
        np.testing.assert_array_equal(one, other)
    others = view.assign_coords(entity=np.arange(100, 106))
    with pytest.raises(ValueError, match="rows: wanted"):
        jf.gcca.Views.from_arrays([view, others])
