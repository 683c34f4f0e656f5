"""The loop: traced as a whole, or driven from the host in chunks."""

from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse

import jaxfed as jf
from jaxfed.core.run.compiling import compiler_options, options_for_linear_algebra
from jaxfed.testing._compare import compilations
from tests.helpers import planted_samples

FEATURES, CLIENTS, ROUNDS = 5, 4, 12


def sampled():
    """Clients in double precision where it is enabled, and else in single."""
    samples = planted_samples((9, 12, 7, 12), FEATURES, [3.0], [2.0], seed=4)
    return jf.Clients.from_samples(samples)


def perpca():
    return jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.02, start="random")


def objective(result):
    """A metric: the variance left over, which is also what the algorithm reports."""
    values, count = sampled().data.values, sampled().data.count
    shared, local = result
    rest = values - values @ shared @ shared.T - values @ local @ jnp.swapaxes(local, 1, 2)
    return {"after": ((rest**2).sum(axis=(1, 2)) / count).mean()}


def fit(key, *, rounds=ROUNDS, **arguments):
    return jf.fit(perpca(), sampled(), rounds=rounds, key=key, **arguments)


def identical(given, wanted):
    chex.assert_trees_all_equal(
        (given.result, given.server, given.local, given.history, given.state),
        (wanted.result, wanted.server, wanted.local, wanted.history, wanted.state),
    )
    assert given.rounds == wanted.rounds


def test_other_rounds_and_tolerances_compile_nothing(key):
    whole = fit(key)
    fit(key, tol=1e-9)
    with compilations() as compiled:
        fewer = fit(key, rounds=5)
        fit(key, rounds=3 * ROUNDS, tol=1e-3)
    assert not compiled
    assert whole.stops is fewer.stops is False
    np.testing.assert_array_equal(fewer.history["objective"], whole.history["objective"][:5])


# --- history ------------------------------------------------------------------------------------


def test_history_has_one_entry_a_round(key):
    history = fit(key, metrics=objective).history
    names = {"objective", "stopping_measure", "participants", "bits_up", "bits_down", "after"}
    names |= {"shared_energy", "local_energy"}
    assert set(history) == names
    for name, values in history.items():
        assert isinstance(values, np.ndarray), name
        assert values.shape == (ROUNDS,), name
        # The first rounds are too few for a measure.
        assert (
            not np.isnan(values).any() if name == "stopping_measure" else np.isfinite(values).all()
        )


def test_step_sizes_and_their_decay_are_in_the_history(key):
    algorithm = jf.pca.PerPCA(1, 1, solver="gradient", decay=0.5)
    assert set(jf.fit(algorithm, sampled(), rounds=2, key=key).history) == {
        "objective",
        "participants",
        "bits_up",
        "bits_down",
        "stopping_measure",
        "shared_energy",
        "local_energy",
        "step_size",
    }


@pytest.mark.slow
def test_the_objective_is_evaluated_where_the_round_starts(key, x64):
    history = fit(key, metrics=objective).history
    np.testing.assert_allclose(history["objective"][1:], history["after"][:-1], rtol=1e-12)
    assert history["objective"][-1] < 0.9 * history["objective"][0]


@pytest.mark.slow
def test_metrics_between_their_rounds_are_nan(key, x64):
    often = fit(key, metrics=objective).history["after"]
    seldom = fit(key, metrics=objective, metrics_every=5).history["after"]
    due = np.arange(1, ROUNDS + 1) % 5 == 0
    np.testing.assert_array_equal(np.isnan(seldom), ~due)
    np.testing.assert_allclose(seldom[due], often[due], rtol=1e-12)
    traced = jax.jit(
        lambda: jf.rollout(
            perpca(), sampled(), rounds=ROUNDS, key=key, metrics=objective, metrics_every=5
        ).history["after"]
    )()
    np.testing.assert_allclose(traced, seldom, rtol=1e-12)


def test_metrics_may_be_integers(key):
    def ranks(result):
        return {"rank": jnp.linalg.matrix_rank(result.shared), "one": 1.0}

    history = fit(key, rounds=4, metrics=ranks, metrics_every=2).history
    np.testing.assert_array_equal(history["rank"], [np.nan, 1, np.nan, 1])
    np.testing.assert_array_equal(history["one"], [np.nan, 1, np.nan, 1])


def test_metrics_cannot_take_the_name_of_a_diagnostic(key):
    with pytest.raises(ValueError, match=r"^metrics: .*'objective'"):
        fit(key, rounds=2, metrics=lambda result: {"objective": result.shared.sum()})


# --- chunks, callbacks, progress ----------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 5, 100])
def test_chunks_of_rounds_change_no_bit(every, key):
    identical(fit(key, metrics=objective, rounds_per_chunk=every), fit(key, metrics=objective))


def test_callbacks_see_every_chunk_and_change_no_bit(key):
    seen, alone = [], fit(key)
    watched = fit(key, callbacks=[lambda s: seen.append(s.rounds), seen.append], rounds_per_chunk=5)
    assert seen[::2] == [5, 10, 12]
    for solution in seen[1::2]:
        assert all(len(values) == solution.rounds for values in solution.history.values())
        np.testing.assert_array_equal(
            solution.history["objective"], alone.history["objective"][: solution.rounds]
        )
    identical(seen[-1], alone)
    identical(watched, alone)


def test_a_callback_can_stop_the_run_and_all_are_called(key):
    called = []
    solution = fit(
        key,
        rounds_per_chunk=2,
        callbacks=[lambda s: s.rounds >= 6, lambda s: called.append(s.rounds)],
    )
    assert solution.rounds == 6
    assert called == [2, 4, 6]
    identical(solution, fit(key, rounds=12, rounds_per_chunk=6, callbacks=[lambda s: True]))


def test_a_stopped_run_equals_the_start_of_the_whole_run(key):
    stopped = fit(key, rounds_per_chunk=6, callbacks=[lambda s: True])
    whole = fit(key)
    for name, values in stopped.history.items():
        np.testing.assert_array_equal(values, whole.history[name][:6])


@pytest.mark.parametrize("every", [None, 5])
def test_the_progress_bar_shows_rounds_and_objective(every, key, capsys):
    shown = fit(key, progress=True, rounds_per_chunk=every)
    text = capsys.readouterr().err
    assert f"{ROUNDS}/{ROUNDS}" in text
    assert f"objective={shown.history['objective'][-1]:.6g}" in text
    fit(key)
    assert capsys.readouterr().err == ""


# --- tolerance ----------------------------------------------------------------------------------


def test_a_tolerance_stops_and_chunks_do_not_matter(key, x64):
    clients, rounds, tol = sampled(), 500, 1e-6
    arguments = {"key": key, "rounds": rounds, "tol": tol}
    whole = jf.fit(perpca(), clients, **arguments)
    objective = whole.history["objective"]
    measure = whole.history["stopping_measure"]
    assert 3 < whole.rounds < rounds
    assert len(objective) == whole.rounds
    assert measure[-1] <= tol < measure[:-1].min()
    # As near to the limit as the tolerance says.
    limit = jf.fit(perpca(), clients, rounds=5 * rounds, key=key).history["objective"][-1]
    assert 0 <= objective[-1] / limit - 1 <= tol

    chunked = jf.fit(perpca(), clients, rounds_per_chunk=7, **arguments)
    assert chunked.rounds == whole.rounds
    chex.assert_trees_all_close(chunked.result, whole.result, atol=1e-12)

    traced = jax.jit(lambda: jf.rollout(perpca(), clients, **arguments))()
    assert traced.rounds == whole.rounds
    chex.assert_trees_all_close(traced.result, whole.result, atol=1e-12)
    assert traced.history["objective"].shape == (rounds,)
    np.testing.assert_allclose(traced.history["objective"][: whole.rounds], objective)
    assert np.isnan(traced.history["objective"][whole.rounds :]).all()
    without = jf.fit(perpca(), clients, rounds=whole.rounds, key=key)
    chex.assert_trees_all_close(without.result, whole.result, atol=1e-12)


@pytest.mark.slow
def test_a_tolerance_that_is_never_met_runs_all_rounds(key, x64):
    solution = fit(key, tol=0.0)
    assert solution.rounds == ROUNDS
    chex.assert_trees_all_close(solution.result, fit(key).result, atol=1e-12)


@pytest.mark.slow
def test_the_tolerance_may_be_traced(key):
    rounds = jax.jit(
        jax.vmap(lambda tol: jf.rollout(perpca(), sampled(), rounds=600, key=key, tol=tol).rounds)
    )(jnp.asarray([1e-1, 1e-3, 0.0]))
    assert rounds[0] < rounds[1] < rounds[2] == 600


# --- early stopping -----------------------------------------------------------------------------


def scripted(stopping, values):
    """The number of chunks until it stops, given one value per chunk."""
    state, solution = stopping.init(), fit(jax.random.key(0), rounds=1)
    for t in range(1, len(values) + 1):
        history = {"error": np.asarray(values[:t], float)}
        state, stop = stopping.update(state, replace(solution, history=history, rounds=t))
        if stop:
            return t
    return None


def test_early_stopping_waits():
    stopping = jf.EarlyStopping("error", patience=2)
    for _ in range(2):  # it keeps no state itself
        assert scripted(stopping, [5, 4, 6, 3, 4, 4, 4, 1]) == 7
    assert scripted(jf.EarlyStopping("error", patience=0), [5, 4, 4, 3]) == 3
    assert scripted(jf.EarlyStopping("error", patience=3), [5, 4, 3, 2, 1]) is None


def test_early_stopping_requires_a_real_improvement():
    stopping = jf.EarlyStopping("error", patience=1, min_delta=0.5)
    assert scripted(stopping, [5, 4.8, 4.6, 1]) == 3


def test_early_stopping_ignores_rounds_without_a_measurement():
    nan = np.nan
    stopping = jf.EarlyStopping("error", patience=1)
    assert scripted(stopping, [nan, nan, nan, 5, nan, nan, 4, nan, nan, nan, 6, nan, 6]) == 13


@pytest.mark.slow
def test_early_stopping_in_a_run(key, x64):
    """With `best`, the models with the smallest value of the metric are returned, not the last."""
    target, seen = float(fit(key).history["objective"][7]), []

    def gap(result):
        return {"gap": abs(objective(result)["after"] - target)}

    stopping = jf.EarlyStopping("gap", patience=1)
    for _ in range(2):  # a second run with the same object is like the first
        seen.clear()
        arguments = {"metrics": gap, "rounds_per_chunk": 1}
        solution = fit(
            key, callbacks=[stopping, lambda s: seen.append(s.rounds)], best="gap", **arguments
        )
        # The objective after seven rounds is evaluated where the eighth begins.
        assert solution.rounds == len(solution.history["gap"]) == 7
        np.testing.assert_allclose(objective(solution.result)["after"], target, rtol=1e-12)
        assert seen[-1] == 9
        assert solution.status == jf.Status.stopped
    assert fit(key, callbacks=[stopping], **arguments).rounds == 9


@pytest.mark.parametrize(
    ("metric", "every"), [(lambda r: jnp.nan * r.shared.sum(), 1), (lambda r: r.shared.sum(), 50)]
)
def test_a_metric_that_is_never_a_number_chooses_no_round(metric, every, key):
    def metrics(result):
        return {"gap": metric(result)}

    chosen = fit(key, best="gap", metrics=metrics, metrics_every=every, rounds_per_chunk=3)
    assert chosen.status == jf.Status.unmeasured
    chex.assert_trees_all_equal(chosen.result, fit(key, rounds_per_chunk=3).result)


def test_early_stopping_refuses_metrics_it_cannot_watch(key):
    with pytest.raises(ValueError, match=r"^monitor: wanted one of .*objective.*, got 'loss'"):
        fit(key, callbacks=[jf.EarlyStopping("loss")])
    with pytest.raises(ValueError, match=r"^best: wanted one of .*objective.*, got 'loss'"):
        fit(key, best="loss")
    for name, wrong in (("patience", -1), ("min_delta", -0.1), ("patience", (1,))):
        with pytest.raises(ValueError, match=rf"^{name}: wanted"):
            jf.EarlyStopping("error", **{name: wrong})


# --- warm starts --------------------------------------------------------------------------------

SOURCES = {
    "OneShot": lambda: jf.pca.OneShot(1, 1),
    "OneShot local_first": lambda: jf.pca.OneShot(1, 1, method="local_first"),
    "Pooled": lambda: jf.pca.Pooled(1),
    "PerPCA, gradient": lambda: jf.pca.PerPCA(1, 1, solver="gradient"),
    "PerPCA": lambda: jf.pca.PerPCA(1, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_warm_starts_from_every_algorithm_with_shared_components(source, key):
    clients = sampled()
    start = jf.fit(SOURCES[source](), clients, rounds=3, key=key)
    algorithm = jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.02)
    solution = jf.fit(algorithm, clients, rounds=3, key=key, warm_start=start)
    identical(jf.fit(algorithm, clients, rounds=3, key=key, warm_start=start.result), solution)
    # The first objective is that of the start, with the best local components if it has none.
    values, count = clients.data.values, clients.data.count
    rest = values - values @ start.result.shared @ start.result.shared.T
    local = start.result.local
    if local is None:
        local = jnp.linalg.svd(rest)[2][:, :1].swapaxes(1, 2)
    rest = rest - rest @ local @ jnp.swapaxes(local, 1, 2)
    wanted = ((rest**2).sum(axis=(1, 2)) / count).mean()
    np.testing.assert_allclose(solution.history["objective"][0], wanted, rtol=1e-4)


def test_local_has_nothing_shared_to_start_from(key):
    start = jf.fit(jf.pca.Local(1), sampled(), rounds=1, key=key)
    with pytest.raises(
        ValueError, match=r"^warm_start: wanted shared components of shape \(5, 1\)"
    ):
        jf.fit(perpca(), sampled(), rounds=1, key=key, warm_start=start)


def test_a_warm_start_from_its_own_result_continues_the_run(key, x64):
    clients = sampled()
    half = jf.fit(perpca(), clients, rounds=6, key=key)
    rest = jf.fit(perpca(), clients, rounds=6, key=key, warm_start=half)
    whole = jf.fit(perpca(), clients, rounds=12, key=key)
    chex.assert_trees_all_close(rest.result, whole.result, atol=1e-10)
    np.testing.assert_allclose(
        np.append(half.history["objective"], rest.history["objective"]),
        whole.history["objective"],
        rtol=1e-10,
    )


@pytest.mark.slow
def test_a_warm_start_may_come_from_numpy(key):
    start = jf.fit(jf.pca.OneShot(1, 1), sampled(), rounds=1, key=key).result
    doubles = jf.Personalized(*(np.asarray(part, np.float64) for part in start))
    wanted = fit(key, warm_start=start)
    given = fit(key, warm_start=doubles)
    chex.assert_trees_all_close(given.result, wanted.result, atol=1e-6)

    @jax.jit
    def rollout(clients):
        return jf.rollout(perpca(), clients, rounds=2, key=key, warm_start=doubles)

    traced = rollout(sampled())
    np.testing.assert_allclose(
        traced.history["objective"], wanted.history["objective"][:2], rtol=1e-5
    )


# --- the rest -----------------------------------------------------------------------------------


def test_a_divergence_error_names_its_round_and_clients(key):
    clients = jf.Clients.from_samples(1e15 * sampled().data.values)
    algorithm = jf.pca.PerPCA(1, 1, solver="gradient", step_size=1e30)
    with pytest.raises(
        jf.DivergenceError, match=r"(nan|-?inf|message is not finite) in round \d+, at"
    ) as one:
        jf.fit(algorithm, clients, rounds=20, key=key)
    error = one.value
    assert isinstance(error, FloatingPointError)
    assert set(error.clients) == set(range(len(clients)))
    assert error.solution.rounds == error.round - 1 == len(error.solution.history["objective"])


class Bursts(jf.pca.PerPCA):
    """PerPCA that diverges at one client in round 4."""

    def client_step(self, key, downlink, local, data):
        uplink, moved, diagnostics = super().client_step(key, downlink, local[0], data)
        bad = (local[1] == 3) & (data.moment.count == 7)
        objective = jnp.where(bad, jnp.nan, diagnostics["objective"])
        return uplink, (moved, local[1] + 1), diagnostics | {"objective": objective}

    def client_init(self, key, downlink, data, warm_start):
        return super().client_init(key, downlink, data, warm_start), jnp.int32(0)

    def client_result(self, downlink, local, data):
        return super().client_result(downlink, local[0], data)


@pytest.mark.parametrize("every", [None, 2, 3])
def test_the_last_good_state_is_kept(every, key, x64):
    with pytest.raises(jf.DivergenceError, match=r"is nan in round 4, at client 2;") as one:
        jf.fit(
            Bursts(1, 1, solver="gradient", step_size=0.05),
            sampled(),
            rounds=9,
            key=key,
            rounds_per_chunk=every,
        )
    assert one.value.round == 4 and one.value.clients == (2,)
    wanted = jf.fit(
        jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.05), sampled(), rounds=3, key=key
    )
    chex.assert_trees_all_close(one.value.solution.result, wanted.result, atol=1e-12)
    chex.assert_trees_all_close(one.value.solution.history, wanted.history, rtol=1e-12)


class Lost(jf.pca.PerPCA):
    """PerPCA whose server computes an objective that is NaN."""

    def server_step(self, key, server, uplink):
        after, diagnostics = super().server_step(key, server, uplink)
        return after, diagnostics | {"objective": jnp.float32(jnp.nan)}


@pytest.mark.slow
def test_an_objective_of_the_server_that_is_nan_ends_the_run(key):
    with pytest.raises(jf.DivergenceError, match="in round 1"):
        jf.fit(Lost(1, 1, solver="gradient", step_size=0.05), sampled(), rounds=3, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [jf.backend.vmap(), jf.backend.separate()], ids=str)
def test_a_run_with_a_tolerance_may_diverge_before_its_rounds(backend, key):
    clients = jf.Clients.from_samples(1e30 * sampled().data.values)  # their squares are infinite
    with pytest.raises(jf.DivergenceError, match=r"in round 1, at clients 0, 1") as one:
        jf.fit(jf.pca.BlockLanczos(1), clients, rounds=2, key=key, tol=1e-9, backend=backend)
    assert one.value.solution.rounds == 0


@pytest.mark.slow
@pytest.mark.parametrize("rounds_per_chunk", [None, 2])
def test_divergence_may_be_reported_in_the_result(rounds_per_chunk, key):
    algorithm, clients = Bursts(1, 1, solver="gradient", step_size=0.05), sampled()
    solution = jf.fit(
        algorithm, clients, rounds=9, key=key, rounds_per_chunk=rounds_per_chunk, throw=False
    )
    assert solution.status == jf.Status.diverged
    assert solution.rounds == 3 and solution.failure.round == 4
    np.testing.assert_array_equal(np.flatnonzero(solution.failure.clients), [2])
    traced = jax.jit(lambda: jf.rollout(algorithm, clients, rounds=9, key=key, tol=0.0))()
    assert traced.status == jf.Status.diverged
    assert traced.failure.round == 4 and traced.rounds == 4
    np.testing.assert_array_equal(traced.failure.clients, solution.failure.clients)


@pytest.mark.slow
def test_the_status_says_how_a_run_ended(key):
    assert fit(key).status == jf.Status.round_limit
    assert fit(key, rounds=500, tol=1e-3).status == jf.Status.converged
    assert fit(key, rounds_per_chunk=2, callbacks=[lambda s: True]).status == jf.Status.stopped
    clients = sampled()
    run = jax.jit(jax.vmap(lambda tol: jf.rollout(perpca(), clients, rounds=400, key=key, tol=tol)))
    status = run(jnp.asarray([1e-2, 0.0])).status
    np.testing.assert_array_equal(status == jf.Status.converged, [True, False])


def test_old_style_keys_are_accepted(key):
    identical(fit(jax.random.PRNGKey(0), rounds=2), fit(key, rounds=2))


def test_the_key_determines_the_run(key):
    one, same, other = (fit(jax.random.key(seed), rounds=2) for seed in (1, 1, 2))
    identical(one, same)
    assert np.abs(one.result.shared - other.result.shared).max() > 1e-3


def test_inputs_are_left_as_they_were(key):
    """Nothing given is overwritten or donated."""
    algorithm, clients = perpca(), sampled()
    start = jf.fit(jf.pca.OneShot(1, 1), clients, rounds=1, key=key)
    before = jax.tree.map(np.array, (algorithm, clients, start))
    jf.fit(algorithm, clients, rounds=ROUNDS, key=key, warm_start=start, rounds_per_chunk=5)
    chex.assert_trees_all_equal(jax.tree.map(np.array, (algorithm, clients, start)), before)


def test_compiler_options_do_not_override_the_users(monkeypatch, key):
    small, wide = (
        jf.Clients.from_samples(jax.random.normal(key, (2, 6, features))) for features in (4, 100)
    )
    model = jf.models.Autoencoder(100, 60, hidden="relu", key=key)
    network = jf.generative.FedAvg(
        model, jf.models.reconstruction_loss, optax.sgd(0.1), local_steps=1
    )
    level, threads = "xla_backend_optimization_level", "xla_cpu_multi_thread_eigen"

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    options = compiler_options(jf.pca.PerPCA(1, 2, solver="gradient"), small)
    assert options[level] == 1 and options[threads] is False
    assert options_for_linear_algebra(())[level] == 1
    assert compiler_options(jf.pca.BlockLanczos(2), small)[level] == 0  # as fast, compiled faster
    many = jf.Clients.from_samples(np.ones((2, 2**13, 20), np.float32))
    assert compiler_options(jf.pca.BlockLanczos(2), many)[level] == 1
    assert compiler_options(jf.pca.BlockLanczos(2), many.take([0]))[level] == 0
    assert threads not in compiler_options(jf.pca.PerPCA(1, 2, solver="gradient"), wide)
    assert compiler_options(network, wide) == {}  # whose rounds would be slower
    views = jf.gcca.Views.from_sparse([scipy.sparse.eye_array(9, 4, format="coo")] * 2)
    assert level not in compiler_options(jf.gcca.MaxVar(2), views)  # so would these
    on_gpus = compiler_options(jf.pca.PerPCA(1, 2, solver="gradient"), small, "cuda")
    jax.jit(jnp.sin, compiler_options=options | on_gpus)(1.0)  # this version knows them

    monkeypatch.setenv("XLA_FLAGS", f"--{level}=0 --xla_gpu_enable_triton_gemm=true")
    assert level not in compiler_options(jf.pca.PerPCA(1, 2, solver="gradient"), small)
    assert level not in options_for_linear_algebra(())
    assert on_gpus and not compiler_options(jf.pca.PerPCA(1, 2, solver="gradient"), small, "cuda")


def test_compiled_programs_are_cached_where_the_user_asks(tmp_path, monkeypatch):
    set_before = jax.config.jax_compilation_cache_dir
    assert jf.enable_compilation_cache() == Path(set_before)  # what JAX is told already
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        folder = jf.enable_compilation_cache()
        assert folder.is_dir() and folder.is_relative_to(tmp_path / "user")
        assert jax.config.jax_compilation_cache_dir == str(folder)
        assert jf.enable_compilation_cache(tmp_path / "here") == tmp_path / "here"
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="file"):
            jf.enable_compilation_cache(tmp_path / "file")
    finally:
        jax.config.update("jax_compilation_cache_dir", set_before)


@pytest.mark.parametrize("transformation", ["vmap", "jit", "grad"])
def test_fit_under_a_transformation_says_what_to_use(transformation):
    clients = jf.Clients.from_samples(np.ones((3, 4, 5), np.float32))

    def fitted(decay):
        algorithm = jf.pca.PerPCA(1, 1, solver="gradient", decay=decay)
        solution = jf.fit(algorithm, clients, rounds=2, key=jax.random.key(0))
        return solution.history["objective"][-1]

    given = jnp.asarray([0.5, 0.7]) if transformation == "vmap" else 0.5
    with pytest.raises(ValueError, match=r"^fit: wanted .* use rollout within jit, vmap and grad"):
        getattr(jax, transformation)(fitted)(given)
