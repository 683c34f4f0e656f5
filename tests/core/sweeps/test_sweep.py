"""Whole grids in one compiled call."""

import dataclasses
import functools
import logging
import os
import shutil
import subprocess
import sys
import warnings

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import xarray

import jaxfed as jf
from jaxfed.core.store import arrays as store
from jaxfed.core.sweeps.sweep import declared_scalars
from tests.examples import CLIENTS, EXAMPLES
from tests.helpers import gaussian

ROUNDS, STEPS = 6, (0.02, 0.05, 0.1)
pytestmark = pytest.mark.usefixtures("x64")


def sampled(seed=0, samples=8):
    return gaussian((samples,) * 3, (3, 2, 1, 0.5), seed=seed, dtype=float)


def perpca(step):
    return jf.pca.PerPCA(1, 1, solver="gradient", step_size=step, start="random")


@functools.cache
def loop():
    """Three algorithms on two data sets with two keys, one run after the other."""
    keys = jax.random.split(jax.random.key(0))
    run = jax.jit(lambda a, c, k: jf.rollout(a, c, rounds=ROUNDS, key=k))
    with jax.enable_x64(True):
        runs = [[[run(perpca(s), sampled(d), k) for k in keys] for d in range(2)] for s in STEPS]
        return jf.stack([jf.stack([jf.stack(row) for row in rows]) for rows in runs])


def same(given, wanted):
    chex.assert_trees_all_close(
        (given.result, given.history, given.rounds),
        (wanted.result, wanted.history, wanted.rounds),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("runs_at_once", [None, pytest.param(5, marks=pytest.mark.slow)])
def test_a_grid_equals_the_loop(runs_at_once):
    keys = jax.random.split(jax.random.key(0))
    grid = jf.sweep(
        [perpca(s) for s in STEPS],
        [sampled(0), sampled(1)],
        keys=keys,
        rounds=ROUNDS,
        runs_at_once=runs_at_once,
    )
    assert grid.result.shared.shape == (3, 2, 2, 4, 1)
    assert grid.result.local.shape == (3, 2, 2, 3, 4, 1)
    assert grid.history["objective"].shape == (3, 2, 2, ROUNDS)
    same(grid, loop())


@pytest.mark.slow
def test_only_stacked_arguments_get_an_axis():
    key = jax.random.split(jax.random.key(0))[0]
    only = functools.partial(jax.tree.map)
    stacked = jax.vmap(perpca)(jnp.asarray(STEPS))
    same(jf.sweep(stacked, sampled(), keys=key, rounds=ROUNDS), only(lambda x: x[:, 0, 0], loop()))
    same(
        jf.sweep(perpca(STEPS[1]), jf.stack([sampled(0), sampled(1)]), keys=key, rounds=ROUNDS),
        only(lambda x: x[1, :, 0], loop()),
    )
    same(
        jf.sweep(perpca(STEPS[0]), sampled(), keys=key, rounds=ROUNDS),
        only(lambda x: x[0, 0, 0], loop()),
    )


@pytest.mark.slow
def test_several_hyperparameters_vary_together_or_stay_fixed():
    """One hyperparameter of a stacked algorithm may be left common to all."""
    key = jax.random.key(1)
    algorithms = [jf.pca.PerPCA(1, 1, solver="gradient", step_size=s, decay=0.5) for s in STEPS]
    wanted = jf.sweep(algorithms, sampled(), keys=key, rounds=ROUNDS)
    partly = jf.pca.PerPCA(1, 1, solver="gradient", step_size=jnp.asarray(STEPS), decay=0.5)
    same(jf.sweep(partly, sampled(), keys=key, rounds=ROUNDS), wanted)


def trained(model, step_size=0.1):
    """Federated averaging of one array."""
    step_size = jnp.asarray(step_size)
    return jf.generative.FedAvg(model, squares, SGD, local_steps=1, step_size=step_size)


def squares(model, batch, key):
    return jnp.mean((batch - model) ** 2)


SGD = optax.sgd(1.0)
MODEL = jnp.asarray([0.5, 1.0, -1.0, 2.0])


def test_a_model_is_not_taken_for_many():
    """The axes of a model's arrays are no axes of algorithms unless the caller says so."""
    run = functools.partial(jf.sweep, clients=sampled(), rounds=2)
    keys = jax.random.split(jax.random.key(0))
    assert run(trained(MODEL), keys=keys).result.shared.shape == (2, 4)
    steps = jnp.asarray(STEPS)
    wanted = run([trained(MODEL, s) for s in STEPS], keys=keys[0])
    same(run(trained(MODEL, steps), keys=keys[0]), wanted)
    # Here nothing tells whether the model has an axis of algorithms.
    models = jnp.outer(jnp.arange(1.0, 4), MODEL)
    wanted = run([trained(*each) for each in zip(models, STEPS, strict=True)], keys=keys[0])
    stacked = jax.vmap(trained)(models, steps)
    with pytest.raises(ValueError, match=r"^in_axes: wanted which arrays of FedAvg have an axis"):
        run(stacked, keys=keys[0])
    same(run(stacked, keys=keys[0], in_axes=0), wanted)
    same(run(stacked, keys=keys[0], in_axes=eqx.if_array(0)), wanted)
    across = eqx.tree_at(lambda a: a.arrays, stacked, models.T)
    axes = eqx.tree_at(lambda a: a.arrays, jax.tree.map(lambda _: 0, stacked), -1)
    same(run(across, keys=keys[0], in_axes=axes), wanted)
    assert run(trained(models[0]), keys=keys[0], in_axes=None).rounds.shape == ()


def test_algorithms_without_hyperparameters_have_an_axis_too():
    grid = jf.sweep([jf.pca.Pooled(2)] * 2, sampled(), keys=jax.random.key(0), rounds=1)
    assert grid.result.shared.shape == (2, 4, 2)


@pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
def test_hyperparameters_are_declared_as_scalars(kind):
    """A sweep knows hyperparameters by their declared shapes, also those of a wrapped algorithm."""
    for example in EXAMPLES[kind].good.values():
        algorithm = example.make(CLIENTS)
        found = list(declared_scalars(algorithm))
        assert [leaf for leaf, _ in found] == jax.tree.leaves(algorithm)
        for leaf, scalar in found:
            assert scalar is not None and (jnp.ndim(leaf) == 0 or not scalar)
        fields = [getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)]
        for value in fields:
            if eqx.is_array(value) and value.ndim == 0:
                assert any(leaf is value and scalar for leaf, scalar in found)


@pytest.mark.slow
def test_arguments_reach_every_run():
    key = jax.random.key(2)
    participation, backend = jf.participation.uniform(2), jf.backend.chunked(2)
    start = jf.fit(jf.pca.OneShot(1, 1), sampled(), rounds=1, key=key)
    metrics = captured
    arguments = {
        "participation": participation,
        "backend": backend,
        "warm_start": start,
        "metrics": metrics,
        "metrics_every": 2,
    }
    grid = jf.sweep([perpca(s) for s in STEPS[:2]], sampled(), keys=key, rounds=4, **arguments)
    for i, step in enumerate(STEPS[:2]):
        one = jf.fit(perpca(step), sampled(), rounds=4, key=key, **arguments)
        for name, values in one.history.items():
            np.testing.assert_allclose(grid.history[name][i], values, rtol=1e-10, err_msg=name)


def captured(result):
    return {"corner": result.shared[0, 0] ** 2}


@pytest.mark.slow
def test_a_tolerance_ends_each_run_on_its_own():
    key = jax.random.key(0)
    grid = jf.sweep([perpca(s) for s in STEPS], sampled(), keys=key, rounds=400, tol=1e-2)
    for i, step in enumerate(STEPS):
        one = jf.fit(perpca(step), sampled(), rounds=400, key=key, tol=1e-2)
        assert grid.rounds[i] == one.rounds < 400
        np.testing.assert_allclose(
            grid.history["objective"][i][: one.rounds], one.history["objective"], rtol=1e-10
        )
    assert len(set(np.asarray(grid.rounds))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("runs_at_once", [None, 2])
def test_a_sweep_can_be_compiled_and_differentiated(runs_at_once):
    key, steps = jax.random.key(0), jnp.asarray(STEPS)

    def last(run, steps):
        return run(steps).history["objective"][:, -1].sum()

    def swept(steps):
        many = jax.vmap(perpca)(steps)
        return jf.sweep(many, sampled(), keys=key, rounds=ROUNDS, runs_at_once=runs_at_once)

    def one_by_one(steps):
        runs = [jf.rollout(perpca(s), sampled(), rounds=ROUNDS, key=key) for s in steps]
        return jf.stack(runs)

    given, wanted = (
        jax.jit(jax.grad(functools.partial(last, f)))(steps) for f in (swept, one_by_one)
    )
    assert jnp.abs(wanted).min() > 1e-3
    np.testing.assert_allclose(given, wanted, rtol=1e-9)


def test_a_second_grid_compiles_nothing(caplog):
    def grid(factor, seed):
        return jf.sweep(
            [perpca(factor * s) for s in STEPS],
            [sampled(seed), sampled(seed + 1)],
            keys=jax.random.split(jax.random.key(seed)),
            rounds=ROUNDS,
            runs_at_once=5,
        )

    grid(1.0, 0)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        grid(0.5, 4)
        compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
    assert not compiled, compiled


def test_grids_that_do_not_fit_are_refused():
    keys = jax.random.key(0)
    with pytest.raises(ValueError, match=r"^algorithms: wanted one or a list"):
        jf.sweep([], sampled(), keys=keys, rounds=2)
    with pytest.raises(ValueError, match=r"^algorithms: wanted equal ranks and other static"):
        jf.sweep(
            [jf.pca.PerPCA(1, 1, solver="gradient"), jf.pca.PerPCA(1, 2, solver="gradient")],
            sampled(),
            keys=keys,
            rounds=2,
        )
    with pytest.raises(ValueError, match=r"^clients: wanted arrays of equal shapes"):
        jf.sweep(perpca(0.1), [sampled(), sampled(samples=9)], keys=keys, rounds=2)
    with pytest.raises(ValueError, match=r"^algorithms: .*, got .lengths \[2, 3\]"):
        lengths = jf.pca.PerPCA(1, 1, solver="gradient", step_size=jnp.ones(2), decay=jnp.ones(3))
        jf.sweep(lengths, sampled(), keys=keys, rounds=2)
    for algorithm, in_axes in (
        (perpca(0.1), 0),
        (jax.vmap(perpca)(jnp.ones(3)), 1),
        (perpca(0.1), "all"),
        (perpca(0.1), (0, None)),
        ([perpca(0.1)], 0),
    ):
        with pytest.raises(ValueError, match=r"^in_axes: wanted"):
            jf.sweep(algorithm, sampled(), keys=keys, rounds=2, in_axes=in_axes)
    for runs_at_once in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"^runs_at_once: wanted a whole number of at least 1"):
            jf.sweep(perpca(0.1), sampled(), keys=keys, rounds=2, runs_at_once=runs_at_once)
    with pytest.raises(ValueError, match=r"^rounds: "):
        jf.sweep(perpca(0.1), sampled(), keys=keys, rounds=0)
    for wrong in (0, None, [0.1]):
        with pytest.raises(ValueError, match=r"^algorithms: wanted"):
            jf.sweep(wrong, sampled(), keys=keys, rounds=2)
        with pytest.raises(ValueError, match=r"^clients: wanted"):
            jf.sweep(perpca(0.1), wrong, keys=keys, rounds=2)
        with pytest.raises(ValueError, match=r"^keys: wanted"):
            jf.sweep(perpca(0.1), sampled(), keys=wrong, rounds=2)


@pytest.mark.slow
def test_masks_are_used_for_one_run_only():
    """Two runs with one key used to have the same masks, which cancel in their difference."""
    clients, key = sampled(), jax.random.key(0)
    masks = jf.channel.secure_sum(len(clients), bits=24, bound=1e3, neighbours=2)
    power = jf.pca.SubspaceIteration(1)

    def swept(algorithms, data, keys):
        return jf.sweep(
            algorithms, data, keys=keys, rounds=1, channel=jf.Wire(masks, jf.channel.lossless())
        ).rounds

    for algorithms, data, keys in (
        ([perpca(s) for s in STEPS], clients, key),
        (power, [sampled(0), sampled(1)], key),
        (power, clients, jnp.stack([key, key])),
    ):
        with pytest.raises(ValueError, match=r"^keys: wanted one for each run under masks"):
            swept(algorithms, data, keys)
    np.testing.assert_array_equal(swept(power, clients, jax.random.split(key)), [1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("runs_at_once", [None, 2])
def test_an_algorithm_without_local_components(runs_at_once):
    keys = jax.random.split(jax.random.key(0), 3)
    grid = jf.sweep(jf.pca.Pooled(2), sampled(), keys=keys, rounds=1, runs_at_once=runs_at_once)
    assert grid.result.local is None
    wanted = jf.fit(jf.pca.Pooled(2), sampled(), rounds=1, key=keys[0]).result.shared
    for shared in grid.result.shared:
        chex.assert_trees_all_close(shared, wanted, atol=1e-10)


# --- labelled grids ------------------------------------------------------------------------------

AXES = {"factor": [0.5, 1.0, 3.0], "power": [1, 2], "seed": range(4)}


def noisy(factor, power, seed):
    value = factor * jnp.float64(2.0) ** power
    noise = jax.random.normal(jax.random.key(seed), (), jnp.float64)
    return {"value": value + noise, "curve": value * jnp.arange(5)}


@functools.cache
def noise():
    draw = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (), jnp.float64))
    return np.asarray([draw(seed) for seed in AXES["seed"]])


def wanted_values():
    factor, power = np.asarray(AXES["factor"])[:, None, None], np.asarray(AXES["power"])[:, None]
    return factor * 2.0**power + noise()


@pytest.mark.parametrize(
    ("runs_at_once", "backend"),
    [
        (None, jf.backend.vmap()),
        (1, jf.backend.vmap()),
        (7, jf.backend.chunked(3)),
        (7, jf.backend.shard(4)),
        (None, jf.backend.pmap(2)),
    ],
)
def test_a_labelled_grid_evaluates_the_function_at_every_point(runs_at_once, backend):
    found = jf.grid(noisy, AXES, runs_at_once=runs_at_once, backend=backend)
    assert {name: values.values.tolist() for name, values in found.coords.items()} == {
        name: list(values) for name, values in AXES.items()
    }
    assert list(found) == ["value", "curve"]  # in the function's order
    assert found["value"].dims == tuple(AXES)
    np.testing.assert_allclose(found["value"], wanted_values(), rtol=1e-12)
    assert found["curve"].dims == (*AXES, "curve_0") and found["curve"].shape == (3, 2, 4, 5)
    np.testing.assert_allclose(found["curve"][2, 1, 0], 12 * np.arange(5))


def test_a_labelled_grid_is_a_dataset(tmp_path):
    found, wanted = jf.grid(noisy, AXES), wanted_values()
    np.testing.assert_allclose(found.mean("seed")["value"], wanted.mean(axis=2))
    sd = found.std(["seed", "power"], ddof=1)["value"]
    np.testing.assert_allclose(sd, wanted.std(axis=(1, 2), ddof=1))
    np.testing.assert_allclose(found.sel(power=2, factor=1.0)["value"], wanted[1, 1])
    found.to_netcdf(tmp_path / "found.nc")
    again = xarray.load_dataset(tmp_path / "found.nc")
    assert again.equals(found) and again.attrs == found.attrs
    # The identity depends on what the function computes, not on the points.
    assert found.attrs["jax"] == jax.__version__ and found.attrs["numpy"] == np.__version__
    other = {"factor": [1.0], "power": [3], "seed": [9]}
    assert jf.grid(noisy, other).attrs == found.attrs

    def noisier(factor, power, seed):
        return {"value": 2 * noisy(factor, power, seed)["value"]}

    assert jf.grid(noisier, other).attrs["computation"] != found.attrs["computation"]


def test_further_dimensions_have_names_that_arrays_share():
    def histories(x):
        return {"a": x * jnp.arange(3), "b": x * jnp.ones((2, 3)), "c": jnp.ones(2)}

    dims = {"a": ["round"], "b": ["kind", "round"]}
    found = jf.grid(histories, {"x": [1.0, 2.0]}, dims=dims)
    assert {name: values.dims for name, values in found.items()} == {
        "a": ("x", "round"),
        "b": ("x", "kind", "round"),
        "c": ("x", "c_0"),
    }
    np.testing.assert_allclose(found.assign_coords(round=[5, 10, 20]).sel(round=20, x=2.0)["a"], 4)


def test_without_xarray_a_grid_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"xarray is needed .* pip install 'jaxfed\[sweep\]'"):
        jf.grid(noisy, AXES)


def test_data_are_arguments_and_a_second_grid_compiles_nothing(caplog):
    def moment(data, which, scale):
        return {"moment": scale * jnp.sum(data[which] ** 2)}

    def grid(seed, scales):
        data = np.random.default_rng(seed).normal(size=(2, 9))
        partial = jax.tree_util.Partial(moment, jnp.asarray(data))
        found = jf.grid(partial, {"which": range(2), "scale": scales}, runs_at_once=2)
        wanted = np.sum(data**2, axis=1)[:, None] * scales
        np.testing.assert_allclose(found["moment"], wanted, rtol=1e-12)

    grid(0, [1.0, 2.0])
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        grid(1, [3.0, 5.0, 7.0])
        compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
    assert not any("_block" in message for message in compiled), compiled


@pytest.mark.slow
def test_runs_on_fewer_clients_and_samples_share_a_program():
    """Hyperparameter, numbers of clients and samples, and data set: one compiled function."""
    data = jf.stack([sampled(0), sampled(1)])

    def run(data, step_size, size, samples, data_set):
        clients = jax.tree.map(lambda x: x[data_set], data).restrict(clients=size, samples=samples)
        solution = jf.rollout(perpca(step_size), clients, rounds=ROUNDS, key=jax.random.key(0))
        return {"shared": solution.result.shared, "objective": solution.history["objective"]}

    axes = {"step_size": STEPS[:2], "size": [2, 3], "samples": [5, 8], "data_set": range(2)}
    found = jf.grid(jax.tree_util.Partial(run, data), axes, runs_at_once=3)
    alone = jf.Clients.from_samples(sampled(1).data.values[:2, :5])
    one = jf.fit(perpca(STEPS[1]), alone, rounds=ROUNDS, key=jax.random.key(0))
    part = found.sel(step_size=STEPS[1], size=2, samples=5, data_set=1)
    np.testing.assert_allclose(part["shared"], one.result.shared, atol=1e-10)
    np.testing.assert_allclose(part["objective"], one.history["objective"], rtol=1e-10)


def test_an_interrupted_grid_resumes(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    whole = jf.grid(noisy, AXES, runs_at_once=5, folder=folder)
    files = sorted(folder.glob("*.npz"))
    assert len(files) == 5
    kept = {path: path.stat().st_mtime_ns for path in files[::2]}
    for path in files[1::2]:
        path.unlink()
    (folder / ".part-00000005.npz").write_bytes(b"killed while it was written")
    again = jf.grid(noisy, AXES, runs_at_once=5, folder=folder, progress=True)
    assert "24/24" in capsys.readouterr().err
    assert again.identical(whole)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    # Other block sizes work too, because points are stored, not blocks.
    files[1].unlink()
    again = jf.grid(noisy, AXES, runs_at_once=2, folder=folder)
    np.testing.assert_allclose(again["value"], whole["value"], rtol=1e-12)


def test_a_folder_of_another_grid_is_refused(tmp_path):
    axes = {"which": [0, 1]}

    def computes(factor, data):
        return jax.tree_util.Partial(
            lambda data, which: {"value": factor * data[which]}, jnp.asarray(data)
        )

    jf.grid(computes(2.0, [1.0, 2.0]), axes, folder=tmp_path)
    jf.grid(computes(2.0, [1.0, 2.0]), axes, folder=tmp_path)
    with pytest.raises(ValueError, match=r"^folder: .* another grid: axes was \{'which"):
        jf.grid(computes(2.0, [1.0, 2.0]), {"which": [1]}, folder=tmp_path)
    for other in (computes(3.0, [1.0, 2.0]), computes(2.0, [1.0, 2.5])):
        with pytest.raises(ValueError, match=r"^folder: .* another grid: computation differs"):
            jf.grid(other, axes, folder=tmp_path)
    # Arrays that it closes over count as well.
    arrays = jnp.arange(9.0), jnp.arange(9.0) + 1
    closed = [lambda which, data=data: {"value": data[which]} for data in arrays]
    jf.grid(closed[0], axes, folder=tmp_path / "closed")
    with pytest.raises(ValueError, match=r"^folder: .* another grid: computation differs"):
        jf.grid(closed[1], axes, folder=tmp_path / "closed")


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"theirs")
    with pytest.raises(ValueError, match=r"^folder: .* holds something else than a grid"):
        jf.grid(noisy, AXES, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def cheap(x, y):
    return {"value": x * y, "curve": x * jnp.arange(3.0), "few": jnp.bfloat16(x)}


POINTS = {"x": [1.5, 2.5, 4.5], "y": [1, 2, 3, 4]}


def unchanged(found, wanted):
    assert found.attrs == wanted.attrs and list(found) == list(wanted)
    for name, values in wanted.variables.items():
        assert found[name].dims == values.dims and found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A finished grid in blocks of 4, and its folder."""
    folder = tmp_path_factory.mktemp("kept")
    with jax.enable_x64(True):
        return folder, jf.grid(cheap, POINTS, runs_at_once=4, folder=folder)


def stored(change):
    """The second block with some of its arrays replaced."""

    def damage(path):
        with np.load(path) as file:
            arrays = dict(file)
        np.savez(path, **(arrays | change(arrays)))

    return damage


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"garbage" * 100),
    "too few points": stored(lambda arrays: {"points": arrays["points"][:2]}),
    "points beyond": stored(lambda arrays: {"points": arrays["points"] + 100}),
    "points before": stored(lambda arrays: {"points": arrays["points"] - 100}),
    "a point twice": stored(lambda arrays: {"points": arrays["points"] * 0 + 4}),
    "points as floats": stored(lambda arrays: {"points": arrays["points"] + 0.5}),
    "another type": stored(lambda arrays: {"value value": arrays["value value"].astype("f4")}),
    "another shape": stored(lambda arrays: {"value curve": arrays["value curve"][:, :2]}),
    "objects": stored(lambda arrays: {"value value": np.asarray([None] * 4)}),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_block_is_computed_again(kind, kept, tmp_path):
    folder = tmp_path / "grid"
    shutil.copytree(kept[0], folder)
    DAMAGE[kind](folder / "00000004.npz")
    with pytest.warns(UserWarning, match=r"^folder: \S*00000004.npz is damaged") as caught:
        again = jf.grid(cheap, POINTS, runs_at_once=4, folder=folder)
    assert len(caught) == 1 and caught[0].filename == __file__
    unchanged(again, kept[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the block is whole again
        unchanged(jf.grid(cheap, POINTS, runs_at_once=4, folder=folder), kept[1])


def test_a_block_that_another_was_copied_to_is_computed_again(kept, tmp_path):
    folder = tmp_path / "grid"
    shutil.copytree(kept[0], folder)
    shutil.copy(folder / "00000000.npz", folder / "00000004.npz")
    unchanged(jf.grid(cheap, POINTS, runs_at_once=4, folder=folder), kept[1])


@pytest.mark.slow
def test_no_changed_bit_of_a_block_goes_unnoticed(kept, tmp_path):
    """Either the block is computed again, or the bit was one that nothing depends on."""
    folder, rng = tmp_path / "grid", np.random.default_rng(0)
    shutil.copytree(kept[0], folder)
    path = folder / "00000004.npz"
    whole, noticed = path.read_bytes(), 0
    for place in rng.choice(len(whole), 60, replace=False):
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.integers(8)
        path.write_bytes(changed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            unchanged(jf.grid(cheap, POINTS, runs_at_once=4, folder=folder), kept[1])
        noticed += len(caught)
    assert noticed > 20


def test_a_block_from_other_versions_is_refused(kept, monkeypatch):
    monkeypatch.setattr("jaxfed.core.store.grid.versions", lambda: {"jax": "0.1", "jaxlib": "0.2"})
    with pytest.raises(ValueError, match=r"^folder: .* another grid: versions was .* and is "):
        jf.grid(cheap, POINTS, runs_at_once=4, folder=kept[0])


def test_files_that_only_look_like_blocks_are_left(tmp_path):
    path = tmp_path / "00000000.npz"
    np.savez(path, values=np.ones(3))
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"^folder: .* holds something else than a grid"):
        jf.grid(cheap, POINTS, runs_at_once=4, folder=tmp_path)
    assert path.read_bytes() == content


def test_one_process_at_a_time_works_in_a_folder(kept, tmp_path):
    folder = tmp_path / "grid"
    shutil.copytree(kept[0], folder)
    hold = (
        "import pathlib, sys, time; from jaxfed.core.common.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1]), 'folder'):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(99)"
    )
    process = subprocess.Popen([sys.executable, "-c", hold, folder], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(BlockingIOError, match=rf"^folder: .* in use by process {process.pid} on"):
        jf.grid(cheap, POINTS, runs_at_once=4, folder=folder)
    process.kill()
    process.wait()
    process.stdout.close()
    # Neither a dead process, which could not clean up, nor an error keeps others out.
    unchanged(jf.grid(cheap, POINTS, runs_at_once=4, folder=folder), kept[1])
    with pytest.raises(ValueError, match="another grid"):
        jf.grid(cheap, POINTS | {"y": [5]}, folder=folder)
    unchanged(jf.grid(cheap, POINTS, runs_at_once=4, folder=folder), kept[1])


def test_folders_that_cannot_be_locked_are_still_used(kept, tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(37, os.strerror(37))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match=r"^folder: .* cannot be locked \(No locks available"):
        unchanged(jf.grid(cheap, POINTS, runs_at_once=4, folder=tmp_path / "network"), kept[1])
    monkeypatch.setattr("jaxfed.core.common.files.fcntl", None)
    unchanged(jf.grid(cheap, POINTS, runs_at_once=4, folder=tmp_path / "windows"), kept[1])


def test_a_full_disk_leaves_whole_blocks(kept, tmp_path, monkeypatch):
    folder, write, written = tmp_path / "grid", store.write_entries, []

    def full(path, entries):
        write(path, entries)
        written.append(path)
        if len(written) == 2:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(store, "write_entries", full)
    with pytest.raises(OSError, match="No space left on device"):
        jf.grid(cheap, POINTS, runs_at_once=4, folder=folder)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "00000000.npz"]
    monkeypatch.undo()
    unchanged(jf.grid(cheap, POINTS, runs_at_once=4, folder=folder), kept[1])


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "axes: wanted values by the name"),
        ([1, 2], "axes: wanted values by the name"),
        ({"factor": 0.5}, "axes: wanted a list of numbers for 'factor'"),
        ({"factor": []}, "axes: wanted a list of numbers for 'factor'"),
        ({"factor": ["a"]}, "axes: wanted a list of numbers for 'factor'"),
        ({"factor": [1.0, np.nan]}, "axes: wanted finite numbers for 'factor'"),
        ({"factor": [1.0], "power": [1]}, "do not fit the function: missing .* 'seed'"),
        (AXES | {"rounds": [3]}, "do not fit the function: .* 'rounds'"),
    ],
)
def test_axes_that_do_not_fit_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        jf.grid(noisy, axes)


def test_other_bad_input_of_labelled_grids():
    for runs_at_once in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"^runs_at_once: wanted a whole number of at least 1"):
            jf.grid(noisy, AXES, runs_at_once=runs_at_once)
    with pytest.raises(ValueError, match=r"^backend: wanted one of jaxfed.backend, got 2"):
        jf.grid(noisy, AXES, backend=2)
    with pytest.raises(ValueError, match=r"^function: wanted arrays by name"):
        jf.grid(lambda seed: seed, {"seed": [1, 2]})
    for value in (None, "word", [1, "b"], jax.random.key(0)):
        with pytest.raises(ValueError, match=r"^function: wanted an array of numbers for 'a', got"):
            jf.grid(lambda x, value=value: {"a": value}, {"x": [1]})
    for names in (("seed", "x"), ("1", 1)):
        with pytest.raises(ValueError, match=rf"^function: .* got '{names[-1]}' twice"):
            jf.grid(lambda x, names=names: dict.fromkeys(names, jnp.ones(2)), {"x": [1, 2]})
    for dims, message in (
        ({"c": ["round"]}, r"^dims: wanted names of .*\['a', 'b'\], got 'c'"),
        ({"a": ["kind", "round"]}, "^dims: wanted 1 different names for 'a', got .*'kind', 'rou"),
        ({"b": ["round", "round"]}, "^dims: wanted 2 different names for 'b'"),
        ({"a": ["x"]}, "^dims: wanted a name that is not yet an axis .* of 'a', got 'x'"),
        ({"a": ["b"]}, "^dims: wanted a name that is not yet an axis .* of 'a', got 'b'"),
        ({"a": ["round"], "b": ["round", "kind"]}, "^dims: wanted arrays that share 'round' .* 2"),
    ):
        with pytest.raises(ValueError, match=message):
            jf.grid(lambda x: {"a": x * jnp.ones(3), "b": jnp.ones((2, 3))}, {"x": [1]}, dims=dims)


def test_plotting_a_labelled_grid():
    found, wanted = jf.grid(noisy, AXES), wanted_values()
    (axes,) = jf.plot.grid(found, "factor", over="seed", names=["value"]).axes
    for i, line in enumerate(axes.get_lines()):
        assert line.get_label() == f"value, power {i + 1}"
        np.testing.assert_allclose(line.get_xydata()[:, 0], AXES["factor"])
        np.testing.assert_allclose(line.get_xydata()[:, 1], wanted[:, i].mean(axis=1))
    assert len(axes.get_lines()) == len(axes.collections) == 2
    assert axes.get_xlabel() == "factor" and axes.get_xscale() == "log"
    lower = axes.collections[0].get_paths()[0].vertices[:, 1].min()
    spread = wanted[:, 0].mean(axis=1) - wanted[:, 0].std(axis=1, ddof=1)
    np.testing.assert_allclose(lower, spread.min())
    (axes,) = jf.plot.grid(found.sel(power=1, seed=0), "factor", names=["value"]).axes
    assert len(axes.collections) == 0 and axes.get_legend() is None
    # Each variable has its own dimensions, and one without coordinates is numbered.
    (axes,) = jf.plot.grid(found.sel(seed=0), "curve_0", names=["curve"], scale="linear").axes
    assert [line.get_label() for line in axes.get_lines()][:2] == [
        "curve, factor 0.5, power 1",
        "curve, factor 0.5, power 2",
    ]
    np.testing.assert_allclose(axes.get_lines()[-1].get_xydata()[:, 1], 12 * np.arange(5))
    assert axes.get_lines()[-1].get_xydata()[:, 0].tolist() == list(range(5))
    for arguments, message in (
        ({"x": "rounds"}, "^x: wanted one of the dimensions"),
        ({"x": "seed", "over": "seed"}, "^x: wanted one of the dimensions"),
        ({"x": "seed", "over": "rounds"}, "^over: wanted some of the dimensions"),
        ({"x": "seed", "names": ["error"]}, "^names: wanted some of"),
        ({"x": "seed", "names": ["power"]}, "^names: wanted some of"),
        ({"x": "seed"}, "^names: 'curve' has the dimension 'curve_0', which has no coordinates"),
        ({"x": "curve_0"}, "^names: wanted variables along 'curve_0', got 'value'"),
    ):
        with pytest.raises(ValueError, match=message):
            jf.plot.grid(found, **arguments)


def test_a_plot_does_not_hide_a_diverged_run():
    found = jf.grid(
        lambda x, seed: {"value": jnp.where(x * seed == 2, jnp.nan, x)},
        {"x": [1.0, 2.0, 3.0], "seed": [0, 1]},
    )
    (axes,) = jf.plot.grid(found, "x", over="seed").axes
    np.testing.assert_array_equal(axes.get_lines()[0].get_xydata()[:, 1], [1, np.nan, 3])
