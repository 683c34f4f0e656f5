"""Features in unlike units, numbers at the door, and half precision; laws are in `tests.laws`."""

import inspect
import warnings

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from scipy.sparse import csr_matrix

import jaxfed as jf
from bench.tables import units as bench
from docs import public
from jaxfed import aggregation, channel
from jaxfed.core.clients.units import exceed_single_precision
from jaxfed.linalg.sums import scaled_norm
from tests.examples import CLIENTS, EXAMPLES

KEY = jax.random.key(0)
SCALES = [2.0**-43, 2.0**-40, 2.0**-20, 2.0**20, 2.0**40, 2.0**43]  # 1e-13 to 1e13, exact
RNG = np.random.default_rng(0)
SAMPLES = RNG.normal(size=(5, 40, 6)).astype(np.float32) * np.float32([5, 4, 2, 1, 1, 1])


@pytest.mark.parametrize("scale", SCALES)
def test_a_clip_that_never_binds_changes_nothing(scale):
    message = jnp.asarray(SAMPLES[0] * np.float32(scale))
    way = channel.gaussian(100 * float(np.abs(message).max()) * 240, 1e-12)
    sent, _ = way.encode(KEY, {"one": message, "other": message[:1]}, None)
    assert np.allclose(np.asarray(sent["one"]) / scale, SAMPLES[0], rtol=1e-5, atol=1e-5)


def test_a_clip_binds_at_every_magnitude():
    for scale in SCALES:
        message = jnp.asarray(SAMPLES[0] * np.float32(scale))
        sent, _ = channel.gaussian(float(scale), 1e-12).encode(KEY, message, None)
        assert np.isclose(float(scaled_norm(sent)) / scale, 1, rtol=1e-4)


# --- features in unlike units --------------------------------------------------------------------

TWO = jf.pca.PerPCA(2, 1)
TUCKER = jf.pca.PerTucker((2, 5), (1, 2), (1, 1))
# Of modes of samples, with tests of its own below.
OF_ANOTHER_KIND = {jf.pca.PerTucker}
# Their results hold no eigenvectors of second moments.
WITHOUT = {
    jf.gcca.DeepMaxVar,
    jf.preprocess.Standardize,
    *(jf.generative.FedAvg, jf.generative.AdaptiveTraining),
}
SOLVED = {type(algorithm): name for name, (algorithm, _) in bench.ALGORITHMS.items()}


def test_every_algorithm_of_components_says_how_many():
    kinds = {
        each
        for each in vars(jf.pca).values()
        if isinstance(each, type) and issubclass(each, jf.contract.Algorithm)
    }
    assert kinds == SOLVED.keys() | OF_ANOTHER_KIND
    assert all(algorithm.eigenvectors == 3 for algorithm, _ in bench.ALGORITHMS.values())
    several = jf.MultiStart(jf.pca.PerPCA(2, 1), 2)
    assert several.eigenvectors == aggregation.Robust(several, groups=3).eigenvectors == 3
    assert (TUCKER.eigenvectors, jf.preprocess.Impute(2, 1).eigenvectors) == (3, 3)
    made = {kind: next(iter(each.good.values())).make(CLIENTS) for kind, each in EXAMPLES.items()}
    assert {kind for kind, each in made.items() if not each.eigenvectors} == WITHOUT


def in_both_precisions(function, *given):
    given = jax.tree.map(np.float64, given)
    with jax.enable_x64(True):
        wanted = jax.tree.map(np.asarray, function(*given))
    return function(*given), wanted


@pytest.mark.parametrize("factor", [1e2, 1e4])
def test_units_change_no_tucker_decomposition(factor):
    def solve(x):
        return jf.fit(TUCKER, jf.Clients.from_samples(x), rounds=60, key=KEY)

    given, wanted = in_both_precisions(solve, bench.samples(factor, 0))
    ends = [run.history["objective"][-1] for run in (given, wanted)]
    np.testing.assert_allclose(*ends, rtol=1e-5)


def test_what_is_missing_is_said_by_the_function_itself():
    for call, missing in ((jf.fit, "algorithm"), (aggregation.client_influence, "solution")):
        with pytest.raises(TypeError, match=rf"missing .* argument.*{missing}"):
            call(clients=jf.Clients.from_samples(SAMPLES), rounds=1, key=KEY)


def test_units_change_no_imputation():
    x = bench.samples(1e4, 0)
    x.reshape(-1)[::11] = np.nan

    def solve(x):
        clients = jf.Clients.from_samples(x, missing="mask")
        models = jf.fit(jf.preprocess.Impute(2, 1), clients, rounds=20, key=KEY).result.local
        return models.transform(clients).data.values

    given, wanted = in_both_precisions(solve, x)
    np.testing.assert_allclose(given, wanted, rtol=1e-3, atol=1e-3)


def test_units_change_no_influence():
    def influence(x):
        clients = jf.Clients.from_samples(x)
        solution = jf.fit(clients=clients, algorithm=jf.pca.Pooled(2), rounds=1, key=KEY)
        return aggregation.client_influence(clients=clients, solution=solution, key=KEY, rounds=1)

    np.testing.assert_allclose(*in_both_precisions(influence, bench.samples(1e4, 0)), rtol=1e-3)


@pytest.mark.slow
def test_units_change_no_suggested_ranks():
    def suggest(x):
        clients = jf.Clients.from_samples(x)
        options = {"most_shared": 3, "most_local": 2, "subsets": 5, "draws": 8}
        found = jf.pca.suggest_ranks(clients, key=KEY, **options)
        return found.shared, found.local, found.noise_variance

    for pair in zip(*in_both_precisions(suggest, bench.samples(1e4, 0)), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-3)


@pytest.mark.parametrize(
    "unit",
    [(1e3, 0), (1, 1e3), *(pytest.param(x, marks=pytest.mark.slow) for x in ((1e2, 0), (1e6, 0)))],
)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=() if kind in (jf.pca.PerPCA, jf.pca.BlockLanczos) else pytest.mark.slow
        )
        for kind in SOLVED
    ],
)
def test_units_of_a_feature_cost_no_digits(kind, unit):
    name, x = SOLVED[kind], bench.samples(*unit)
    algorithm, rounds = bench.ALGORITHMS[name]
    found = jf.fit(algorithm, jf.Clients.from_samples(x), rounds=rounds, key=KEY)
    assert all(leaf.dtype != np.float64 for leaf in jax.tree.leaves((found.result, found.state)))
    wanted = bench.in_double(name, x)
    assert wanted.result.shared is None or wanted.result.shared.dtype == np.float64
    for pair in zip(*(bench.projectors(run.result) for run in (found, wanted)), strict=True):
        np.testing.assert_allclose(*pair, atol=1e-6)
    ends = [run.history["objective"][-1] for run in (found, wanted)]
    np.testing.assert_allclose(*ends, rtol=1e-6)


def test_runs_that_cannot_change_their_precision_warn():
    algorithm = jf.pca.Pooled(3)
    with pytest.warns(jf.UnitsWarning, match="features of similar and moderate"):
        jf.rollout(algorithm, jf.Clients.from_samples(bench.samples(1e3, 0)), rounds=1, key=KEY)


def test_samples_that_are_read_block_by_block_are_looked_at():
    for factor, given in (1.0, ()), (1e3, (jf.UnitsWarning,)):
        clients = jf.Clients.from_source(list(bench.samples(factor, 0)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jf.fit(jf.pca.Pooled(3), clients, rounds=1, key=KEY)
        assert tuple(warning.category for warning in caught) == given


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rank", [1, 3])
def test_small_features_that_do_not_matter_change_no_precision(rank):
    """The components of a picture do not depend on its dark corners."""
    x = bench.samples(1, 0)
    x[..., 5] *= 1e-3
    clients = jf.Clients.from_samples(x)
    assert not exceed_single_precision(jf.pca.Pooled(rank), clients)
    assert exceed_single_precision(jf.pca.Pooled(9), clients)
    jf.rollout(jf.pca.Pooled(rank), clients, rounds=1, key=KEY)
    run = jax.jit(lambda key: jf.rollout(jf.pca.Pooled(rank), clients, rounds=1, key=key).server)
    run(KEY)  # which closes over the clients
    sparse = jf.Clients.from_samples(np.where(bench.samples(1e3, 0) > 9, np.nan, x), missing="mask")
    assert not exceed_single_precision(jf.pca.HMF(1, rank), sparse)


def test_moments_and_large_means_count():
    x = bench.samples(1, 1e3)
    moments = np.einsum("mnd,mne->mde", x, x) / 60
    assert exceed_single_precision(jf.pca.Pooled(2), jf.Clients.from_samples(x))
    assert exceed_single_precision(jf.pca.Pooled(2), jf.Clients.from_moments(moments))
    moments = np.einsum("mnd,mne->mde", *[bench.samples(1e3, 0)] * 2) / 60
    assert exceed_single_precision(jf.pca.Pooled(2), jf.Clients.from_moments(moments))


def views_with_a_column(factor):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(60, 2))
    views = [scores @ rng.normal(size=(2, d)) + 0.4 * rng.normal(size=(60, d)) for d in (6, 8, 5)]
    views[0][:, 1] *= factor
    return views


def test_units_change_no_sparse_views():
    def cost(views):
        clients = jf.gcca.Views.from_sparse([csr_matrix(v) for v in views], center=True)
        found = jf.fit(jf.gcca.MVLSA(2), clients, rounds=1, key=KEY).result
        return jf.gcca.cost(clients, found.shared, found.local)

    np.testing.assert_allclose(*in_both_precisions(cost, views_with_a_column(1e6)), rtol=1e-4)


@pytest.mark.slow
def test_estimators_of_single_tables_keep_the_units_of_features():
    x, groups = bench.samples(1e4, 0).reshape(-1, 10), np.repeat(np.arange(5), 60)
    noise = [
        jf.estimators.HierarchicalBayesPCA(2, random_state=0)
        .fit(x.astype(dtype), groups=groups)
        .noise_variance_
        for dtype in (np.float32, np.float64)
    ]
    np.testing.assert_allclose(*noise, rtol=1e-3)
    views = views_with_a_column(1e6)
    found = [
        jf.estimators.FederatedGCCA(2, random_state=0)
        .fit([view.astype(dtype) for view in views])
        .representation_
        for dtype in (np.float32, np.float64)
    ]
    np.testing.assert_allclose(*(y @ y.T for y in found), atol=5e-3)


@pytest.mark.parametrize("form", ["array", "tables", "one"])
def test_units_change_nothing_that_is_computed_of_samples(form):
    x = np.float32(bench.samples(3e4, 0))
    result = jf.fit(jf.pca.PerPCA(2, 1), jf.Clients.from_samples(x), rounds=20, key=KEY).result
    assert result.shared.dtype == np.float32
    own = [np.linalg.qr(np.c_[result.shared, one].astype(float))[0] for one in result.local]
    rest = np.stack([y - y @ u @ u.T for y, u in zip(x.astype(float), own, strict=True)])
    given = {"array": x, "tables": list(x), "one": x[0]}[form]
    options = {"client": 0} if form == "one" else {}
    chosen = slice(0, 1) if form == "one" else slice(None)
    far = np.reshape(jf.pca.anomaly_score(result, given, **options), (-1, x.shape[1]))
    assert far.dtype == np.float32
    np.testing.assert_allclose(far, np.sum(rest**2, axis=2)[chosen], rtol=1e-3)
    closed = jax.jit(lambda: jf.pca.anomaly_score(result, given, **options))()
    np.testing.assert_allclose(np.reshape(closed, far.shape), far, rtol=1e-6)
    on_device = jax.tree.map(jnp.asarray, given)
    closed = jax.jit(lambda: jf.pca.anomaly_score(result, on_device, **options))()
    np.testing.assert_allclose(np.reshape(closed, far.shape), far, rtol=1e-6)
    gaps = np.where(np.random.default_rng(0).random(x.shape) < 0.1, np.nan, x)
    given = {"array": gaps, "tables": list(gaps), "one": gaps[0]}[form]
    found = np.reshape(jf.pca.complete(result, given, **options), (-1, *x.shape[1:]))
    for y, u, filled in zip(gaps[chosen], own[chosen], found, strict=True):
        for row, got in zip(y, filled, strict=True):
            seen = ~np.isnan(row)
            wanted = u @ np.linalg.lstsq(u[seen], row[seen], rcond=None)[0]
            # Components in single precision determine a missing large feature to so many digits.
            np.testing.assert_allclose(got[~seen], wanted[~seen], rtol=1e-3, atol=1e-3)


def test_units_change_no_joint_rank():
    def estimate(views):
        clients = jf.gcca.Views.from_arrays(views, center=True)
        found = jf.gcca.joint_rank(clients, 2, key=KEY, samples=20)
        return found.rank, found.squared_singular_values

    for pair in zip(*in_both_precisions(estimate, views_with_a_column(1e6)), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_steps_on_unlike_features_warn(sparse):
    for factor, given in ((30, ()), (1e4, (UserWarning,))):
        views = views_with_a_column(factor)
        if sparse:
            clients = jf.gcca.Views.from_sparse([csr_matrix(v) for v in views], center=True)
        else:
            clients = jf.gcca.Views.from_arrays(views, center=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jf.fit(jf.gcca.MaxVar(2, solver="gradient"), clients, rounds=1, key=KEY)
        assert tuple(warning.category for warning in caught) == given


def test_sparse_views_far_from_zero_are_refused():
    # Rounded to single precision, the second ones are all the same.
    for offset in (1e6, 1e9):
        views = [csr_matrix(offset + view) for view in views_with_a_column(1)]
        with pytest.raises(ValueError, match=r"^matrices\[0\]: wanted features near zero"):
            jf.gcca.Views.from_sparse(views)


def test_neighbours_do_not_depend_on_a_common_mean():
    scores = np.random.default_rng(0).normal(size=(2, 30, 2))
    scores[1] = scores[0] + 0.3 * scores[1]
    near, far = (jf.gcca.alignment_accuracy(jnp.asarray(scores + x)) for x in (0, 1000))
    assert near == far


def test_a_sweep_of_several_unlike_data_sets_warns():
    clients = jf.Clients.from_samples(bench.samples(1e3, 0))
    with pytest.warns(jf.UnitsWarning, match="features of similar and moderate"):
        jf.sweep(jf.pca.Pooled(3), [clients, clients], keys=KEY, rounds=1)


# What runs an algorithm on clients, and returns numbers that units must not change. Each keeps them
# by computing in double precision, or warns.
OPTIONS = {"rounds": 1, "key": KEY}
RUNS = {
    "jaxfed.fit": lambda x: jf.fit(jf.pca.Pooled(3), x, **OPTIONS).history["objective"],
    "jaxfed.rollout": lambda x: jf.rollout(jf.pca.Pooled(3), x, **OPTIONS).history["objective"],
    "jaxfed.sweep": lambda x: jf.sweep(jf.pca.Pooled(3), x, rounds=1, keys=KEY).history[
        "objective"
    ],
    "jaxfed.update": lambda x: jf.update(
        jf.fit(jf.pca.Pooled(3), x, **OPTIONS), x, **OPTIONS
    ).history["objective"],
    "jaxfed.personalize": lambda x: spans(
        jf.personalize(TWO, jf.fit(TWO, x, **OPTIONS), x, **OPTIONS).local
    ),
    "jaxfed.tune": lambda x: jf.tune(
        jf.pca.PerPCA(2, 1, local_penalty=0.1),
        x,
        lambda result: jnp.sum(result.shared[0] ** 2),
        optax.sgd(0.1),
        names=["local_penalty"],
        steps=1,
        adjoint=jf.adjoint.unrolled(),
        **OPTIONS,
    ).solution.history["objective"],
    "jaxfed.pca.split_half": lambda x: jf.pca.split_half([TWO], x, **OPTIONS),
    "jaxfed.aggregation.client_influence": lambda x: aggregation.client_influence(
        jf.fit(jf.pca.Pooled(3), x, **OPTIONS), x, **OPTIONS
    ),
    "jaxfed.inference.confidence": lambda x: (
        jf.inference.confidence(
            jf.fit(TWO, x, rounds=30, key=KEY), x, key=KEY, resamples=20
        ).variances.estimate
    ),
}
# They take views, describe what was found, or only look at messages.
OTHERS = {
    *("jaxfed.plan", "jaxfed.nn.common_projection", "jaxfed.privacy.record"),
    *("jaxfed.privacy.restart_attack", "jaxfed.report.html", "jaxfed.report.write"),
    *("jaxfed.plot.scores", "jaxfed.plot.biplot"),
    *("jaxfed.inference.bootstrap", "jaxfed.inference.membership"),
    *("jaxfed.gcca.transform", "jaxfed.testing.check_algorithm"),
    "jaxfed.privacy.training_guarantee",
}


def spans(bases):
    return bases @ jnp.swapaxes(bases, -1, -2)


def test_every_function_of_an_algorithm_and_clients_is_known():
    found = {
        f"{module}.{name}"
        for module in public.MODULES
        for name, function in public.public_names(module).items()
        if inspect.isfunction(function)
        and {"clients", "views"} & (names := set(inspect.signature(function).parameters))
        and {"algorithm", "algorithms", "solution", "fitted"} & names
    }
    assert found == RUNS.keys() | OTHERS


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_run_keeps_units_or_warns(name):
    def run(x):
        return RUNS[name](jf.Clients.from_samples(x))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given, wanted = in_both_precisions(run, bench.samples(1e3, 0))
    if not any(isinstance(each.message, jf.UnitsWarning) for each in caught):
        chex.assert_trees_all_close(given, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kept", [jf.Clients.from_moments, None])
def test_moments_keep_the_units_of_features(kept):
    x = bench.samples(1e3, 0)

    def solve(x):
        if kept is None:
            clients = jf.stream.Forgetting(None).update(None, jf.Clients.from_samples(x))
        else:
            clients = kept(np.einsum("mnd,mne->mde", x, x) / x.shape[1])
        return jf.fit(jf.pca.PerPCA(2, 1), clients, rounds=60, key=KEY).history["objective"][-1]

    np.testing.assert_allclose(*in_both_precisions(solve, x), rtol=1e-5)


@pytest.mark.parametrize("offset", [1e3, 1e4, 1e6])
def test_moments_that_have_lost_digits_warn(offset):
    """Also where all directions but one are within rounding errors of it."""
    x = bench.samples(1, 0) + offset
    moments = np.einsum("mnd,mne->mde", x, x) / x.shape[1]
    for clients in (jf.Clients.from_moments(moments), jf.Clients.from_moments(1e-9 * moments)):
        with pytest.warns(jf.UnitsWarning, match="second moments that keep enough digits"):
            jf.fit(jf.pca.Pooled(3), clients, rounds=1, key=KEY)


@pytest.mark.filterwarnings("error")
def test_moments_of_few_samples_have_lost_nothing():
    few = jf.Clients.from_samples(np.random.default_rng(0).normal(size=(4, 2, 6)))
    moments = jf.stream.Forgetting(None).update(None, few)
    assert not exceed_single_precision(jf.pca.PerPCA(2, 1), moments)


def trend(strength, rows=60):
    """Three clients with one direction that much stronger than a second, and no feature so."""
    rng = np.random.default_rng(1)
    basis = np.linalg.qr(rng.normal(size=(8, 8)))[0][:, :2]
    scores = rng.normal(size=(3, rows, 2)) * [strength, 1]
    return scores @ basis.T + 0.1 * rng.normal(size=(3, rows, 8))


@pytest.mark.parametrize("algorithm", [jf.pca.Pooled(2), jf.pca.BlockLanczos(2)])
def test_one_strong_direction_costs_no_digits(algorithm):
    for strength in (10, 100, 1000):
        x = np.float32(trend(strength))
        clients = jf.Clients.from_samples(x)
        assert exceed_single_precision(algorithm, clients) == (strength > 30)
        found = jf.fit(algorithm, clients, rounds=3, key=KEY).result.shared
        right = np.linalg.svd(x.reshape(-1, 8).astype(float), full_matrices=False)[2][:2].T
        sine = np.linalg.norm(found @ found.T - right @ right.T, 2)
        assert sine < (1e-4 if strength < 30 else 1e-5)
    assert not exceed_single_precision(jf.pca.Pooled(1), clients)  # which is the strong one
    # Beyond the rank of the samples, there are rounding errors alone.
    x = np.float32(trend(10))
    right = np.linalg.svd(x.reshape(-1, 8), full_matrices=False)[2][:2].T
    exact = jf.Clients.from_samples(x @ right @ right.T)
    assert not exceed_single_precision(jf.pca.Pooled(3), exact)


def test_halves_of_unlike_features_are_computed_in_double_precision():
    x = jnp.asarray(bench.samples(1e4, 0), jnp.bfloat16)

    def solve(x):
        clients = jf.Clients.from_samples(x)
        solution = jf.fit(jf.pca.Pooled(3), clients, rounds=2, key=KEY)
        return solution.history["objective"][-1]

    np.testing.assert_allclose(solve(x), solve(np.asarray(x, np.float32)), rtol=1e-6)


@pytest.mark.parametrize("size", [1e4, 1e8, 1e9])
@pytest.mark.parametrize("kind", ["mean", "direction", "moments"])
def test_what_double_precision_loses_warns(kind, size, x64):
    x = bench.samples(1, 0) + size * (np.arange(10) == 1)
    clients = jf.Clients.from_samples(trend(size) if kind == "direction" else x)
    if kind == "moments":
        clients = jf.Clients.from_moments(np.einsum("mnd,mne->mde", x, x) / x.shape[1])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        jf.fit(jf.pca.Pooled(2), clients, rounds=1, key=KEY)
    words = "clients: wanted features that double precision tells apart"
    assert any(str(each.message).startswith(words) for each in found) == (size > 1e5)


@pytest.mark.parametrize(
    "model", [jf.pca.PerPCA(2, 1), jf.pca.HMF(2, 1), jf.pca.HierarchicalPCA(2)]
)
def test_a_run_goes_on_from_single_in_double_precision(model, tmp_path):
    x = bench.samples(1, 0) * np.where(np.arange(10) == 1, 1e5, 1)
    earlier = jf.fit(model, jf.Clients.from_samples(np.float32(x)), rounds=20, key=KEY)
    earlier.save(tmp_path / "run.npz")
    here = jf.fit(model, jf.Clients.from_samples(x), rounds=1, key=KEY, warm_start=earlier)
    with jax.enable_x64(True):
        again = jf.load(tmp_path / "run.npz")
        exact = jf.Clients.from_samples(x)
        doubles = jf.fit(model, exact, rounds=20, key=KEY)
        wanted, *found = (
            jf.fit(model, exact, rounds=1, key=KEY, warm_start=start).history["objective"][0]
            for start in (doubles, earlier, again)
        )
        for start in (earlier, again):
            other = jf.personalize(model, start, exact, rounds=1, key=KEY).local
            assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(other))
    np.testing.assert_allclose([*found, here.history["objective"][0]], float(wanted), rtol=1e-4)


def test_units_of_a_views_feature_cost_no_digits():
    views = [np.float32(x) for x in bench.samples(1, 0)[:3]]
    raw = [views[0] * np.where(np.arange(10) == 1, np.float32(2.0**20), 1), *views[1:]]
    algorithm = jf.gcca.MaxVar(2)
    found, wanted = (
        jf.fit(algorithm, jf.gcca.Views.from_arrays(x), rounds=30, key=KEY).result.shared
        for x in (raw, views)
    )
    np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=1e-4)
    costs = [float(jf.gcca.optimum(jf.gcca.Views.from_arrays(x), 2).cost) for x in (raw, views)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-5)
    deep = jf.gcca.Views.from_arrays(raw)
    assert not exceed_single_precision(jf.gcca.MaxVar(2, solver="gradient"), deep)


def test_new_clients_far_from_zero_are_personalized_in_double():
    x = bench.samples(1, 1e3)
    algorithm = jf.pca.PerPCA(2, 1)
    solution = jf.fit(algorithm, jf.Clients.from_samples(x[:3]), rounds=20, key=KEY)
    new = jf.Clients.from_samples(x[3:])
    found = jf.personalize(algorithm, solution, new, rounds=50)
    assert found.local.dtype == np.float32
    shared = np.linalg.qr(np.asarray(solution.result.shared, float))[0]
    for table, own in zip(np.float32(x[3:]).astype(float), found.local, strict=True):
        rest = table - table @ shared @ shared.T
        top = np.linalg.svd(rest, full_matrices=False)[2][0]
        assert abs(top @ np.asarray(own)[:, 0]) == pytest.approx(1, abs=1e-6)

    def size(weight):
        other = eqx.tree_at(
            lambda s: s.result,
            solution,
            jf.Personalized(weight * solution.result.shared, solution.result.local),
        )
        return jnp.sum(jf.personalize(algorithm, other, new, rounds=2).local)

    with pytest.warns(jf.UnitsWarning):
        assert np.isfinite(jax.grad(size)(1.0))


@pytest.mark.parametrize("scale", [1e-15, 1e-12, 1e9, 1e15])
def test_derivatives_have_the_unit_of_what_they_differentiate(scale):
    views, rows = bench.samples(1, 0)[:3], np.float32(bench.samples(1, 0))
    basis = jnp.linalg.qr(jnp.asarray(np.random.default_rng(0).normal(size=(10, 2))))[0]

    def cost(x):
        return jf.gcca.optimum(jf.gcca.Views.from_arrays(list(x)), 2).cost

    def violation(x):
        return jf.metrics.scaled_kkt_violation(jf.Personalized(basis, None), x)

    for function, x in (cost, jnp.float32(views)), (violation, jnp.asarray(rows)):
        wanted = jax.grad(function)(x)
        found = jax.grad(function)(x * scale) * scale
        chex.assert_trees_all_close(found, wanted, rtol=1e-3, atol=1e-4 * float(abs(wanted).max()))


# --- numbers at the door -------------------------------------------------------------------------


def test_whole_numbers_masks_and_data_frames_are_taken():
    x = np.round(SAMPLES * 100)
    wanted = jf.Clients.from_samples(x)
    for given in (x.astype(int), list(x.astype(np.int16)), [pd.DataFrame(y) for y in x]):
        chex.assert_trees_all_equal(jf.Clients.from_samples(given).data, wanted.data)
    gaps = np.where(x > 900, np.nan, x)
    masked = [np.ma.masked_invalid(y) for y in gaps]
    frames = [pd.DataFrame(y).convert_dtypes() for y in gaps]
    wanted = jf.Clients.from_samples(gaps, missing="mask")
    for given in (masked, frames):
        chex.assert_trees_all_equal(
            jf.Clients.from_samples(given, missing="mask").data, wanted.data
        )


def test_a_feature_that_varies_little_at_one_client_is_not_lost():
    rng = np.random.default_rng(0)
    tables = [300 + size * rng.normal(size=(40, 2)) for size in (20, 20, 0.005)]
    with pytest.warns(
        jf.UnitsWarning, match=r"by 0\.00\d* about 299.* in arrays\[2\]; models of th"
    ):
        clients = jf.Clients.from_samples(tables)
    np.testing.assert_allclose(clients.data.values, tables, rtol=1e-7)
    with pytest.warns(jf.UnitsWarning, match=r" in arrays\[2\] and in 1 more; models of these"):
        jf.Clients.from_samples([*tables, tables[2]])
    with pytest.warns(jf.UnitsWarning, match=r" in arrays\[2\]; models of these clients"):
        jf.Clients.from_samples(np.stack(tables))
    # Earlier clients that are rounded already do not change the name of a later one.
    with pytest.warns(jf.UnitsWarning, match=r" in arrays\[3\]; models of these clients"):
        jf.Clients.from_samples([np.float32(tables[0]), *tables])
    with pytest.raises(ValueError, match=r"got feature 0 .*, which varies by 0\.00"):
        jf.Clients.from_samples(tables[2:])


FAR = 1.7e9 + SAMPLES.astype(float)
SOLVED_ONCE = jf.Personalized(jnp.eye(6)[:, :2], None)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jf.pca.transform(SOLVED_ONCE, x),
        lambda x: jf.pca.anomaly_score(SOLVED_ONCE, list(x)),
        lambda x: jf.pca.complete(SOLVED_ONCE, x),
        lambda x: jf.pca.explained_variance(SOLVED_ONCE, x),
        lambda x: jf.pca.robust_pca(x[0]),
        lambda x: jf.metrics.captured_energy(SOLVED_ONCE, x),
        lambda x: jf.metrics.kkt_violation(SOLVED_ONCE, x),
        lambda x: jf.metrics.frechet_distance(x[0], SAMPLES[1]),
        lambda x: jf.metrics.reconstructed_energy(x, SAMPLES),
        lambda x: jf.preprocess.Standardization(np.zeros(6), np.ones(6)).transform(x[0]),
        lambda x: jf.gcca.Views.from_sparse([csr_matrix(y) for y in x], center=True),
    ],
)
def test_rows_that_single_precision_loses_are_refused(function):
    with pytest.raises(ValueError, match=r"^\w+(\[0\])?: wanted features .*, got feature 0"):
        function(FAR)
    function(SAMPLES)
    function(SAMPLES.astype(float))


def test_principal_axes_of_rows_far_from_zero_keep_double_precision():
    basis = np.eye(6)[:, :2]
    (found,) = np.abs(jf.pca.principal_axes(basis, [FAR[0]])).T[:1]
    scores = FAR[0] @ basis
    np.testing.assert_allclose(found[:2], np.abs(np.linalg.svd(scores)[2][0]), atol=1e-9)


def test_a_few_rows_may_be_close_by_chance():
    rows = 1 + np.asarray([[0, 0, 0], [1e-6, 1, 2]])
    found = jf.preprocess.Standardization(np.zeros(3), np.ones(3)).transform(rows)
    np.testing.assert_allclose(found, rows, rtol=1e-6)


def test_views_are_centred_before_they_are_rounded():
    times = 1.7e9 + 1e3 * SAMPLES.astype(float)
    views = jf.gcca.Views.from_arrays(list(times), center=True)
    wanted = times - times.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(views.data.values, wanted, rtol=1e-4, atol=1e-2)
    with pytest.raises(ValueError, match=r"arrays\[0\]: wanted features that single precision"):
        jf.gcca.Views.from_arrays(list(times))


def test_masked_entries_of_an_estimators_table_are_missing():
    rows, groups = SAMPLES.reshape(-1, 6), np.repeat(np.arange(5), 40)
    masked = np.ma.masked_array(rows, rows > 9)
    assert masked.mask.any()
    with pytest.raises(ValueError, match="contains NaN"):
        jf.estimators.FederatedPCA(2).fit(masked, groups=groups)
    gaps = np.where(masked.mask, np.nan, rows)
    found, wanted = (
        jf.estimators.FederatedPCA(2, impute=(2, 1), random_state=0).fit(x, groups=groups)
        for x in (masked, gaps)
    )
    np.testing.assert_array_equal(found.components_, wanted.components_)


# --- half precision, offsets and lost runs -------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
def test_half_precision_has_a_unit_of_its_own(scale):
    clients = jf.Clients.from_samples(SAMPLES * np.float32(scale))
    one, half = (
        jf.rollout(jf.pca.Pooled(2), clients, rounds=1, key=KEY, channel=way).result.shared
        for way in (channel.lossless(), channel.cast("float16"))
    )
    np.testing.assert_allclose(half @ half.T, one @ one.T, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [1e3, 1e5, 3e5])
def test_a_common_offset_leaves_imputed_entries_as_good(offset):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 80, 2)) @ rng.normal(size=(2, 8)) + 0.1 * rng.normal(size=(5, 80, 8))
    missing = rng.random(x.shape) < 0.2

    def error(offset):
        given = np.where(missing, np.nan, x + offset).astype(np.float32)
        clients = jf.Clients.from_samples(given, missing="mask")
        model = jf.fit(jf.preprocess.Impute(2, 1), clients, rounds=50, key=KEY).result.local
        completed = np.asarray(model.transform(clients).data.values, float) - offset
        return np.sqrt(np.mean((completed - x)[missing] ** 2))

    assert error(offset) < 1.1 * error(0.0) + 1e-7 * offset


@pytest.mark.slow
def test_a_robust_run_without_any_message_has_diverged():
    clients = jf.Clients.from_samples(SAMPLES)
    nothing = eqx.tree_at(lambda c: c.data.values, clients, jnp.full_like(SAMPLES, jnp.nan))
    for algorithm in (jf.pca.Pooled(2), jf.pca.PerPCA(1, 1)):
        robust = aggregation.Robust(algorithm, groups=5)
        run = jax.jit(lambda c, robust=robust: jf.rollout(robust, c, rounds=3, key=KEY))
        for found in (jf.fit(robust, nothing, rounds=3, key=KEY, throw=False), run(nothing)):
            assert found.status == jf.Status.diverged
        assert run(clients).status != jf.Status.diverged
