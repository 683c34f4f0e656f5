"""Names of clients and features, from the door to the file."""

import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest

import jaxfed as jf
from jaxfed.contract import Personalized
from jaxfed.core.clients.names import together
from tests.helpers import gaussian_samples

NAMES, FEATURES = ("ann", "bob", "eve"), ("height", "mass", "age", "pulse")
COUNTS, SCALES = (9, 6, 7), (3, 2, 1, 0.5)
ORDER = [2, 0, 3, 1]  # of features, on another day


def samples(seed=0):
    return gaussian_samples(COUNTS, SCALES, seed=seed)


def named(arrays=None, names=NAMES, features=FEATURES, **options):
    arrays = samples() if arrays is None else arrays
    return jf.Clients.from_samples(arrays, names=names, features=features, **options)


def frame(seed=0):
    """One table, whose rows of clients are mixed."""
    table = pd.DataFrame(np.concatenate(samples(seed)), columns=list(FEATURES))
    table.insert(1, "who", np.repeat(NAMES, COUNTS))
    return table.sample(frac=1, random_state=seed)


def reordered(clients):
    """The same clients with their features in another order."""
    values = np.asarray(clients.data.values)[..., ORDER]
    arrays = [x[: int(n)] for x, n in zip(values, clients.counts, strict=True)]
    return named(arrays, clients.names.clients, [FEATURES[i] for i in ORDER])


# --- the doors -----------------------------------------------------------------------------------


def test_names_come_with_the_samples():
    clients = named()
    assert clients.names.clients == NAMES and clients.names.features == FEATURES
    assert clients.take([2, 0]).names.clients == ("eve", "ann")
    assert clients.restrict(clients=2, samples=3).names == clients.names
    assert named(bucket=1.1).unbucketed().names == clients.names
    moments = np.stack([np.eye(4)] * 3)
    assert jf.Clients.from_moments(moments, names=NAMES, features=FEATURES).names == clients.names
    source = jf.Clients.from_source(samples(), names=NAMES, features=FEATURES)
    assert source.names == clients.names and source.take([1]).names.clients == ("bob",)
    assert jf.Clients.from_samples(samples()).names.clients is None
    read = jf.data.ClientTables(samples(), list(NAMES), list(FEATURES))
    assert jf.Clients.from_samples(read).names == clients.names
    at = jax.eval_shape(lambda clients, i: clients.take(i), clients, np.arange(2))
    assert at.names.clients is None and at.names.features == FEATURES


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"names": ["a", "b"]}, r"^names: wanted 3 distinct texts .*per client, got 2: a, b$"),
        ({"names": ["a", "b", "a"]}, r"^names: .*got 'a twice'"),
        ({"names": "abc"}, r"^names: wanted 3 distinct texts"),
        ({"names": [None, "a", "b"]}, r"^names: wanted 3 distinct texts"),
        ({"names": ["a", "b", "c\x1b[0m"]}, r"^names: .*can be printed"),
        ({"features": ["x", "y", "z"]}, r"^features: wanted 4 distinct texts .*got 3: x, y, z$"),
    ],
)
def test_unsuitable_names_are_refused(given, refused):
    with pytest.raises(ValueError, match=refused):
        jf.Clients.from_samples(samples(), **given)


def test_columns_of_data_frames_are_put_in_one_order():
    frames = [pd.DataFrame(x, columns=list(FEATURES)) for x in samples()]
    mixed = [frames[0], frames[1][[FEATURES[i] for i in ORDER]], frames[2]]
    clients = jf.Clients.from_samples(mixed)
    assert clients.names.features == FEATURES
    chex.assert_trees_all_equal(clients.data, jf.Clients.from_samples(frames).data)
    with pytest.raises(
        ValueError,
        match=r"^arrays\[1\], columns: wanted height, mass, age, pulse, got height, mass, age, "
        r"puls \(without pulse, with puls besides\)$",
    ):
        jf.Clients.from_samples([frames[0], frames[1].rename(columns={"pulse": "puls"})])
    # Columns that only count are no names.
    assert jf.Clients.from_samples([pd.DataFrame(x) for x in samples()]).names.features is None


def arrow(table):
    return pytest.importorskip("pyarrow").Table.from_pandas(table, preserve_index=False)


def polars(table):
    return pytest.importorskip("polars").DataFrame({name: table[name].to_numpy() for name in table})


@pytest.mark.parametrize("kind", [lambda table: table, arrow, polars])
def test_a_frame_is_split_by_a_column_that_is_no_feature(kind):
    table = frame()
    clients = jf.Clients.from_frame(kind(table), by="who")
    assert clients.names.clients == NAMES and clients.names.features == FEATURES
    assert clients.features == 4  # `groupby` alone used to keep the client's code as a feature
    for name, values, count in zip(NAMES, clients.data.values, clients.counts, strict=True):
        own = table.loc[table["who"] == name, list(FEATURES)].to_numpy(np.float32)
        np.testing.assert_array_equal(values[: int(count)], own)
    some = jf.Clients.from_frame(kind(table), by="who", features=["age", "mass"])
    assert some.names.features == ("age", "mass")
    np.testing.assert_array_equal(some.data.values, clients.data.values[..., [2, 1]])


def test_clients_of_a_frame_are_in_natural_order_and_may_be_numbers():
    table = pd.DataFrame({"x": [1.5, 2, 3, 4], "y": [0, 1, 0, 1], "site": [10, 2, 10, 2]})
    clients = jf.Clients.from_frame(table, by="site", weights="samples", bucket=1.5)
    assert clients.names.clients == ("2", "10")
    np.testing.assert_array_equal(clients.data.values[0], [[2, 1], [4, 1]])
    gaps = table.astype({"x": "Float64"})
    gaps.loc[1, "x"] = pd.NA
    masked = jf.Clients.from_frame(gaps, by="site", missing="mask")
    assert np.isnan(masked.data.values[0, 0, 0])


@pytest.mark.parametrize(
    ("change", "given", "refused"),
    [
        ({}, {"by": "wo"}, r"^by: wanted one of height, who.*got no 'wo'; did you mean who\?$"),
        ({}, {"by": "who", "features": ["age", "size"]}, r"^features: .*got no 'size'"),
        ({}, {"by": "who", "features": ["age", "who"]}, r"^features: wanted columns besides 'who'"),
        ({"sex": "f"}, {"by": "who"}, r"^frame: wanted columns of numbers, got column 'sex'"),
        (
            {"day": pd.Timestamp("2020-01-01")},
            {"by": "who"},
            r"^frame: wanted columns of numbers, got column 'day' of type datetime",
        ),
        ({"who": None}, {"by": "who"}, r"^by: wanted a column .*without empty cells, got 'who'"),
        ({"age": np.nan}, {"by": "who"}, r"^frame: wanted complete numbers"),
    ],
)
def test_unsuitable_frames_are_refused_by_column(change, given, refused):
    with pytest.raises(ValueError, match=refused):
        jf.Clients.from_frame(frame().assign(**change), **given)
    with pytest.raises(ValueError, match=r"^frame: wanted a data frame"):
        jf.Clients.from_frame(samples()[0], by="who")


def test_views_have_names_of_their_own():
    tables = [pd.DataFrame(np.eye(4), columns=list(FEATURES)), pd.DataFrame(np.eye(4)[:, :1])]
    views = jf.gcca.Views.from_arrays(
        tables, names=["left", "right"], features=[FEATURES, ["x"]], entities=list("ABCD")
    )
    assert views.names.features == (FEATURES, ("x",)) and views.names.entities == tuple("ABCD")
    assert views.take([1]).names.features == (("x",),)
    aligned = jf.gcca.align([["p", "q"], ["q", "r"]])
    eyes = [np.eye(2), np.eye(2)]
    assert jf.gcca.Views.from_arrays(eyes, alignment=aligned).names.entities == ("p", "q", "r")
    with pytest.raises(ValueError, match=r"^features\[1\]: wanted 1 distinct texts"):
        jf.gcca.Views.from_arrays(tables, features=[FEATURES, ["x", "y"]])


# --- runs ----------------------------------------------------------------------------------------

ALGORITHM = jf.pca.PerPCA(1, 1)


def fitted(clients, key, **options):
    return jf.fit(ALGORITHM, clients, rounds=3, key=key, **options)


def test_names_travel_into_solutions_and_files(key, tmp_path):
    clients = named()
    solution = fitted(clients, key)
    assert solution.names == clients.names
    text = solution.summary()
    assert "3 (ann, bob, eve)" in text and "4 (height, mass, age, pulse)" in text
    solution.save(tmp_path / "run.npz", moments=jf.stream.Forgetting(0.5).update(None, clients))
    saved = jf.load(tmp_path / "run.npz")
    assert saved.names == clients.names and saved.moments.names == clients.names
    assert saved.summary() == text
    plain = fitted(jf.Clients.from_samples(samples()), key)
    chex.assert_trees_all_equal(plain.result, solution.result)
    assert plain.names.clients is None
    plain.save(tmp_path / "plain.npz")
    assert jf.load(tmp_path / "plain.npz").names == plain.names


@pytest.mark.slow
def test_names_never_compile_anything_again(key, caplog):
    def squares(result, clients):
        return result.shared**2

    def run(clients):
        solution = fitted(clients, key)
        jf.update(solution, clients, rounds=1, key=key)
        jf.personalize(ALGORITHM, solution, clients, rounds=2)
        keys = jax.random.split(key, 2)
        swept = jf.sweep(ALGORITHM, clients, rounds=2, keys=keys, warm_start=solution.result)
        assert swept.names == clients.names
        jf.inference.bootstrap(solution, clients, squares, key=key, resamples=4, rounds=1)
        jf.aggregation.client_influence(solution, clients, key=key, rounds=1)

    run(jf.Clients.from_samples(samples()))
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        run(named())
        run(named(names=("x", "y", "z")))
    compiled = [each.message for each in caplog.records if "Compiling" in each.message]
    assert not compiled


def test_under_jit_names_are_static_and_right(key):
    @jax.jit
    def solved(clients):
        return jf.rollout(ALGORITHM, clients, rounds=2, key=key)

    assert solved(named()).names.clients == NAMES
    assert solved(named(names=("x", "y", "z"))).names.clients == ("x", "y", "z")


def test_data_sets_of_other_names_are_stacked_without_them(key):
    both = [named(), named(names=("x", "y", "z"))]
    stacked = jf.stack(both)
    assert stacked.names.clients is None and stacked.data.values.shape[0] == 2
    assert jf.stack([both[0], both[0]]).names == both[0].names
    keys = jax.random.split(key, 2)
    assert jf.sweep(ALGORITHM, both, rounds=2, keys=keys).names.clients is None


def test_features_in_another_order_are_put_in_order(key):
    solution, clients = fitted(named(), key), named(samples(1))
    moved = reordered(clients)
    for one, other in (
        (jf.update(solution, given, rounds=2, key=key).result for given in (clients, moved)),
        (jf.personalize(ALGORITHM, solution, given) for given in (clients, moved)),
        (
            jf.rollout(ALGORITHM, given, rounds=2, key=key, warm_start=solution).result
            for given in (clients, moved)
        ),
    ):
        chex.assert_trees_all_equal(one, other)
    forgetting = jf.stream.Forgetting(0.5)
    known = forgetting.update(None, named())
    one, other = (forgetting.update(known, given) for given in (clients, moved))
    chex.assert_trees_all_equal(one, other)
    again = jf.Clients.from_moments(
        np.asarray(known.data.dense)[..., ORDER, :][..., ORDER],
        names=NAMES,
        features=[FEATURES[i] for i in ORDER],
    )
    chex.assert_trees_all_close(
        jf.personalize(ALGORITHM, solution, known).local,
        jf.personalize(ALGORITHM, solution, again).local,
    )
    source = jf.Clients.from_source(
        [x[:, ORDER] for x in samples(1)], names=NAMES, features=[FEATURES[i] for i in ORDER]
    )
    chex.assert_trees_all_close(
        jf.update(solution, source, rounds=2, key=key).result,
        jf.update(solution, clients, rounds=2, key=key).result,
        atol=1e-5,
    )


def test_other_features_are_refused_by_name(key):
    solution = fitted(named(), key)
    other = named(features=("height", "mass", "age", "sleep"))
    for run in (
        lambda: jf.update(solution, other, rounds=1, key=key),
        lambda: jf.personalize(ALGORITHM, solution, other),
        lambda: jf.stream.Forgetting(0.5).update(named(), other),
    ):
        with pytest.raises(
            ValueError,
            match=r"^features: wanted height, mass, age, pulse, got height, mass, age, sleep "
            r"\(without pulse, with sleep besides\)$",
        ):
            run()


def test_clients_are_matched_by_name(key):
    """By position, `bob` would start from the model of `ann`."""
    solution = fitted(named(), key)
    today = named(samples()[1:] + samples(3)[:1], names=("bob", "eve", "new"))
    after = jf.update(solution, today, rounds=1, key=key)
    assert after.names.clients == ("bob", "eve", "new")
    np.testing.assert_array_equal(after.ids, [1, 2, 3])
    by_hand = jf.Clients(today.data, jnp.asarray([1, 2, 3]), today.weights)
    chex.assert_trees_all_equal(
        jf.update(solution, by_hand, rounds=1, key=key).result, after.result
    )
    forgetting = jf.stream.Forgetting(0.5)
    union = forgetting.update(forgetting.update(None, named()), today)
    assert union.names.clients == (*NAMES, "new") and union.names.features == FEATURES
    np.testing.assert_array_equal(union.ids, [0, 1, 2, 3])


RUNS = {
    "fit": jf.fit,
    "rollout": jf.rollout,
    "jit": lambda algorithm, clients, **given: jax.jit(
        lambda: jf.rollout(algorithm, clients, **given)
    )(),
    "sweep": lambda algorithm, clients, key, **given: jf.sweep(
        algorithm, clients, keys=key, **given
    ),
    "sweep over data": lambda algorithm, clients, key, **given: jax.tree.map(
        lambda x: x[0], jf.sweep(algorithm, [clients], keys=key, **given)
    ),
    "tune": lambda algorithm, clients, **given: (
        jf.tune(
            algorithm,
            clients,
            lambda result: jnp.sum(result.local**4),
            optax.sgd(0.0),
            names=["local_penalty"],
            steps=1,
            adjoint=jf.adjoint.unrolled(),
            **given,
        ).solution
    ),
}


@pytest.mark.parametrize("earlier", ["solution", pytest.param("saved", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "run", [name if name == "fit" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_a_run_from_another_one_matches_clients_and_features_by_name(run, earlier, key, tmp_path):
    algorithm = jf.pca.PerPCA(1, 1, local_penalty=0.1)
    start = jf.fit(algorithm, named(), rounds=3, key=key)
    if earlier == "saved":
        start.save(tmp_path / "run.npz")
        start = jf.load(tmp_path / "run.npz")
    given = {"rounds": 2, "key": key, "warm_start": start}
    wanted = RUNS[run](algorithm, named(samples(1)), **given)
    names, order = ("eve", "ann", "bob"), np.asarray([2, 0, 1])
    moved = reordered(named([samples(1)[i] for i in order], names))
    found = RUNS[run](algorithm, moved, **given)
    assert found.names == jf.core.clients.names.Names(names, FEATURES)
    np.testing.assert_array_equal(found.ids, order)
    chex.assert_trees_all_close(found.result.shared, wanted.result.shared, atol=1e-5)
    chex.assert_trees_all_close(found.result.local, wanted.result.local[order], atol=1e-5)
    last = found.history["objective"][-1]
    np.testing.assert_allclose(last, wanted.history["objective"][-1], rtol=1e-5)


def test_clients_that_cannot_be_matched_by_name_are_refused(key):
    start = fitted(named(), key)
    moved = named(samples()[1:] + samples()[:1], ("bob", "eve", "ann"))
    run = jax.jit(lambda x: jf.rollout(ALGORITHM, x, rounds=1, key=key, warm_start=start))
    assert run(named()).names.clients == NAMES
    with pytest.raises(ValueError, match=r"^clients: wanted ann, bob, eve in this order, where id"):
        run(moved)
    # A run without local models has nothing to match.
    pooled = jf.fit(jf.pca.Pooled(1), named(), rounds=1, key=key)
    found = jax.jit(
        lambda x: jf.rollout(jf.pca.SubspaceIteration(1), x, rounds=1, key=key, warm_start=pooled)
    )(moved)
    assert found.names.clients == ("bob", "eve", "ann")
    new = named(names=("ann", "bob", "new"))
    with pytest.raises(ValueError, match=r"^warm_start: wanted one of the clients \[0, 1, 3\]"):
        jf.sweep(ALGORITHM, new, rounds=1, keys=key, warm_start=start)
    for function in (
        jf.inference.membership,
        jf.report.html,
        lambda x, y: jf.aggregation.client_influence(x, y, key=key),
        lambda x, y: jf.inference.confidence(x, y, key=key),
    ):
        with pytest.raises(ValueError, match=r"^clients: wanted those of the run, in its order"):
            function(start, moved)


def test_measures_of_a_run_put_features_in_its_order(key):
    start, clients = fitted(named(), key), named()
    one, other = (jf.inference.membership(start, x) for x in (clients, reordered(clients)))
    chex.assert_trees_all_equal(one, other)
    one, other = (
        jf.aggregation.client_influence(start, x, key=key, rounds=2)
        for x in (clients, reordered(clients))
    )
    np.testing.assert_array_equal(one, other)


def test_an_estimator_starts_a_run(key):
    table = pd.DataFrame(np.concatenate(samples()), columns=list(FEATURES))
    model = jf.estimators.PersonalizedPCA(1, 1, rounds=30).fit(
        table, groups=np.repeat(("z", "a", "x"), COUNTS)
    )
    assert model.saved_.names == jf.core.clients.names.Names(("a", "x", "z"), FEATURES)
    model.personalize(table[:9] + 1, groups=["k"] * 9)
    assert model.saved_.names.clients == ("a", "k", "x", "z")
    assert "4 (a, k, x, z)" in model.summary_
    moved = reordered(named(names=("z", "a", "x")))
    found = jf.rollout(ALGORITHM, moved, rounds=1, key=key, warm_start=model)
    start = Personalized(model.saved_.result.shared, model.saved_.result.local[np.array([3, 0, 2])])
    wanted = jf.rollout(ALGORITHM, named(), rounds=1, key=key, warm_start=start)
    chex.assert_trees_all_equal(found.result, wanted.result)
    with pytest.raises(ValueError, match=r"^warm_start: wanted a solution, .* got PersonalizedPCA"):
        jf.fit(ALGORITHM, named(), rounds=1, key=key, warm_start=jf.estimators.PersonalizedPCA())


def test_scores_of_views_go_by_name(key):
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=(9, 3)), rng.normal(size=(9, 3))]
    views = jf.gcca.Views.from_arrays(tables, names=["l", "r"], entities=list("abcdefghi"))
    start = jf.fit(jf.gcca.MVLSA(1), views, rounds=1, key=key)
    other = jf.gcca.Views.from_arrays(tables[::-1], names=["r", "l"], entities=list("123456789"))
    np.testing.assert_array_equal(
        jf.gcca.transform(start, other), jf.gcca.transform(start, views)[::-1]
    )


def test_reports_pictures_and_warnings_name_clients_and_features(key):
    pytest.importorskip("matplotlib")
    clients = named()
    solution = fitted(clients, key)
    page = jf.report.html(solution, reordered(clients))
    assert "bob" in page and "client 1" not in page
    drawn = jf.plot.components(solution)
    text = [each.get_text() for each in drawn.findobj(lambda x: hasattr(x, "get_text"))]
    assert "client bob" in text and "pulse" in text
    large = [x * (100 if i == 1 else 1) for i, x in enumerate(samples())]
    with pytest.warns(jf.EnergyWarning, match=r"by client name, bob \("):
        fitted(named(large), key)


def test_sources_bring_names(tmp_path):
    for name, table in zip(NAMES, samples(), strict=True):
        np.save(tmp_path / f"{name}.npy", table)
    clients = jf.Clients.from_source(jf.data.NpyFolder(tmp_path))
    assert clients.names.clients == NAMES and clients.names.features is None
    pytest.importorskip("pyarrow")
    table = pd.DataFrame(samples()[0], columns=list(FEATURES))
    table.to_parquet(tmp_path / "all.parquet", row_group_size=3, index=False)
    clients = jf.Clients.from_source(jf.data.ParquetGroups(tmp_path / "all.parquet"))
    assert clients.names.features == FEATURES and len(clients) == 3


def test_data_frames_meet_the_features_of_a_run(key):
    solution, tables = fitted(named(), key), samples(1)
    frames = [pd.DataFrame(x, columns=list(FEATURES))[[FEATURES[i] for i in ORDER]] for x in tables]
    for use in (jf.pca.transform, jf.pca.anomaly_score, jf.pca.complete):
        chex.assert_trees_all_close(use(solution, frames), use(solution, tables), rtol=1e-5)
        one = use(solution, frames[2], client="eve")
        np.testing.assert_allclose(one, use(solution, tables[2], client=2), rtol=1e-5)
    with pytest.raises(ValueError, match=r"^samples\[0\], columns: .*without mass, with MASS"):
        jf.pca.transform(solution, [frames[0].rename(columns={"mass": "MASS"}), *frames[1:]])
    with pytest.raises(ValueError, match=r"^client: wanted one of ann, bob, eve; did you mean bob"):
        jf.pca.transform(solution, frames[1], client="bobo")
    chex.assert_trees_all_close(
        jf.pca.explained_variance(solution, frames), jf.pca.explained_variance(solution, tables)
    )
    chex.assert_trees_all_close(
        jf.pca.fit_local(solution, frames), jf.pca.fit_local(solution, tables)
    )
    learner = pytest.importorskip("jaxfed.estimators").PersonalizedPCA(1, 1, rounds=2, n_init=1)
    rows = frame()
    learner.fit(rows[list(FEATURES)], groups=rows["who"])
    whole = rows.loc[rows["who"] == "bob", list(FEATURES)]
    np.testing.assert_allclose(
        jf.pca.transform(learner, whole[[FEATURES[i] for i in ORDER]], client=1),
        jf.pca.transform(learner, whole.to_numpy(), client=1),
        rtol=1e-5,
    )
    parts = jf.fit(jf.nmf.INMF(1), named([abs(x) for x in tables]), rounds=2, key=key)
    chex.assert_trees_all_close(
        jf.nmf.transform(parts, [abs(x) for x in frames]),
        jf.nmf.transform(parts, [abs(x) for x in tables]),
        rtol=1e-4,
    )


def test_views_in_another_order_are_refused(key):
    def views(order, entities="ABCDE"):
        rng = np.random.default_rng(0)
        tables = [rng.normal(size=(5, 3)), rng.normal(size=(5, 2))]
        return jf.gcca.Views.from_arrays(
            tables, names=["l", "r"], features=[list(order), ["x", "y"]], entities=list(entities)
        )

    algorithm = jf.gcca.MVLSA(1)
    solution = jf.fit(algorithm, views("abc"), rounds=1, key=key)
    assert solution.names.entities == tuple("ABCDE")
    jf.update(solution, views("abc"), rounds=1, key=key)
    with pytest.raises(ValueError, match=r"^features of l: wanted the order a, b, c, got b, a, c$"):
        jf.update(solution, views("bac"), rounds=1, key=key)
    with pytest.raises(ValueError, match=r"^entities: wanted A, B, C, D, E, got A, B, C, D, F"):
        jf.update(solution, views("abc", "ABCDF"), rounds=1, key=key)


def test_processes_that_disagree_on_features_are_named():
    first, second = named().names, named(names=("x", "y", "z")).names
    assert together([first, second], "own").clients == (*NAMES, "x", "y", "z")
    other = second._replace(features=FEATURES[::-1])
    with pytest.raises(ValueError, match=r"^own: features of process 1: wanted the order height"):
        together([first, other], "own")
    with pytest.raises(ValueError, match=r"^own: wanted 6 distinct.*got 'ann twice'"):
        together([first, first], "own")
