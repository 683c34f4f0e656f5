"""How a run ended: what its status, its summary and its advice say, and that the advice helps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.core.round.measure import left_by_gains, left_by_objectives
from jaxfed.core.run.status import Status, status_of, verdict

KEY = jax.random.key(0)
GRADIENT = partial(jf.pca.PerPCA, solver="gradient")
CLIENTS = 12


def clients(seed=0, samples=20):
    """One shared direction, one of each client's own, and noise, in eight features."""
    rng = np.random.default_rng(seed)
    frame = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    own = np.stack([frame[:, [0, 1 + i % 7]] * [2.0, 1.5] for i in range(CLIENTS)])
    values = rng.normal(size=(CLIENTS, samples, 2)) @ own.mT
    return jf.Clients.from_samples(
        (values + 0.3 * rng.normal(size=values.shape)).astype(np.float32)
    )


def fitted(algorithm=None, rounds=60, **options):
    algorithm = jf.pca.PerPCA(1, 1, solver="gradient") if algorithm is None else algorithm
    return jf.fit(algorithm, clients(), rounds=rounds, key=KEY, **options)


def named(objective, measure, xp=np):
    """The status of a run with this history."""
    history = {
        "objective": xp.asarray(objective, float),
        "stopping_measure": xp.full(len(objective), measure, float),
    }
    return status_of(verdict(history, None, False, xp), xp.asarray(False), xp)


# --- the measure ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.3, 0.9, 0.99])
def test_what_is_left_follows_from_gains_that_shrink(rate):
    gains = jnp.asarray(rate ** np.arange(12), jnp.float32)
    exact = float(gains[-1] / (1 - rate))
    assert exact <= left_by_gains(gains) <= 1.01 * exact / rate**2
    objectives = 1 + np.cumsum(-(rate ** np.arange(30)))[-12:] * 0.01
    left = 0.01 * rate**30 / (1 - rate)
    assert left - 1e-6 <= left_by_objectives(jnp.asarray(objectives)) <= 20 * left / rate**12 + 1e-4


def test_one_round_that_hardly_moves_meets_no_tolerance():
    gains = jnp.full(12, 0.1).at[-1].set(1e-9)
    assert left_by_gains(gains) > 0.1
    assert left_by_objectives(jnp.arange(12.0).at[-1].set(10.0)) > 0.1
    # Where a run leaves a saddle, gains are small but grow.
    assert np.isinf(left_by_gains(jnp.asarray(1e-8 * 1.5 ** np.arange(12))))
    assert np.isinf(left_by_gains(jnp.full(12, jnp.nan)))
    assert np.isinf(left_by_objectives(jnp.full(12, jnp.nan)))
    assert left_by_objectives(jnp.ones(12)) == 0


# --- the status -----------------------------------------------------------------------------------


@pytest.mark.parametrize("xp", [np, jnp])
def test_each_end_has_its_name(xp):
    rng, rounds = np.random.default_rng(0), np.arange(100.0)
    noise = 1 + 0.05 * rng.normal(size=100)
    cases = {
        "converged": (np.exp(-rounds) + 1, 1e-5),
        "round_limit": (np.exp(-rounds / 60), 0.3),
        "rising": (2.0**rounds, 0.3),  # no stretch of it varies less than it has risen
        "noisy": (noise, 0.3),
    }
    for name, (objective, measure) in cases.items():
        assert named(objective, measure, xp) == getattr(Status, name), name
    # After a fall, against the lowest level and not the first round.
    assert named(np.concatenate([np.exp(-rounds), 0.02 * rounds]), 1.0, xp) == Status.rising
    # A measure that is small says more than an objective that rose on the way.
    assert named(2 - np.exp(-rounds), 1e-5, xp) == Status.converged
    assert named(np.ones(3), np.inf, xp) == Status.round_limit
    assert named(np.zeros(0), 1.0, np) == Status.round_limit


def test_noise_alone_neither_rises_nor_falls():
    rng = np.random.default_rng(0)
    found = [named(1 + rng.normal(size=100) / 10, 0.3) == Status.noisy for _ in range(200)]
    assert np.mean(found) > 0.97


def test_status_is_data():
    def run(step):
        algorithm = jf.pca.PerPCA(1, 1, solver="gradient", step_size=step, start="random")
        return jf.rollout(algorithm, clients(), rounds=200, key=KEY).status

    steps = jnp.asarray([0.1, 1e-4])
    both = jax.jit(jax.vmap(run))(steps)
    np.testing.assert_array_equal(both == Status.converged, [True, False])
    slow = jf.pca.PerPCA(1, 1, solver="gradient", step_size=1e-4, start="random")
    # The host, which knows the history, names it as the compiled program does.
    assert fitted(slow).status == Status.round_limit


def test_the_summary_begins_with_the_verdict():
    assert fitted().summary().startswith("verdict    converged: ")
    short = fitted(rounds=2)
    assert short.summary().startswith("verdict    round limit: ")
    (remark,) = short.remarks()
    assert "Too few rounds" in remark and remark in short.summary()


# --- the advice -----------------------------------------------------------------------------------


def test_more_rounds_help_where_they_are_advised():
    slow = jf.pca.PerPCA(1, 1, solver="gradient", step_size=1e-2, start="random")
    short = fitted(slow, 60)
    assert short.status == Status.round_limit
    (remark,) = short.remarks()
    assert "more rounds" in remark and "warm_start=" in remark
    longer = fitted(slow, 2000, warm_start=short)
    assert longer.status == Status.converged and longer.remarks() == ()


def test_shorter_steps_help_where_they_are_advised():
    best = fitted()
    long = fitted(jf.pca.PerPCA(1, 1, solver="gradient", step_size=3.0), 40, warm_start=best)
    assert long.status in (Status.rising, Status.noisy)
    if long.status == Status.rising:
        assert "step_size=" in long.remarks()[0]
    assert fitted(jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.1)).status == Status.converged


@pytest.mark.parametrize(
    "model",
    [jf.pca.PerPCA, *(pytest.param(x, marks=pytest.mark.slow) for x in (GRADIENT, jf.pca.HMF))],
    ids=["PerPCA", "gradient", "HMF"],
)
def test_a_local_component_that_all_clients_have_is_no_success(model):
    """Moments that are exact, on which the start is a saddle of the objective."""
    rng = np.random.default_rng(0)
    frame = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    own = np.stack([frame[:, [0, 1, 2 + i % 8]] * [4**0.5, 2**0.5, 1.5**0.5] for i in range(8)])
    moments = own @ own.mT + 0.25 * np.eye(10)
    samples = np.linalg.cholesky(moments).mT * 10**0.5
    data = jf.Clients.from_samples(samples.astype(np.float32))

    def run(start):
        return jf.fit(model(2, 1, start=start), data, rounds=60, key=KEY)

    poor, good = run("local_first"), run("common")
    assert poor.history["objective"][-1] > 1.3 * good.history["objective"][-1]
    assert poor.status == Status.suboptimal and good.status == Status.converged
    assert 'start="common"' in poor.remarks()[0] and good.remarks() == ()
    traced = jax.jit(
        lambda: jf.rollout(model(2, 1, start="local_first"), data, rounds=60, key=KEY).status
    )()
    assert traced == Status.suboptimal


@pytest.mark.slow
def test_differences_help_where_they_are_advised():
    channel = jf.channel.quantize(3)
    lossy = fitted(rounds=150, channel=channel)
    assert lossy.status in (Status.noisy, Status.rising)
    assert "jaxfed.channel.difference(...)" in lossy.remarks()[0]
    cured = fitted(rounds=150, channel=jf.channel.difference(channel))
    assert cured.status == Status.converged and cured.remarks() == ()
    np.testing.assert_allclose(
        cured.history["objective"][-1], fitted().history["objective"][-1], rtol=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        jf.pca.PerPCA(1, 1, solver="gradient"),
        jf.pca.HierarchicalPCA(2),
        jf.pca.EmpiricalBayesPCA(2),
    ],
)
def test_remembering_helps_where_it_is_advised(algorithm):
    some = {"participation": jf.participation.uniform(2), "rounds": 200}
    few = fitted(algorithm, **some)
    assert few.status in (Status.noisy, Status.rising)
    words = "jaxfed.channel.difference(jaxfed.channel.lossless())"
    assert words in few.remarks()[0]
    cured = fitted(algorithm, **some, channel=jf.channel.difference(jf.channel.lossless()))
    assert cured.status == Status.converged and cured.remarks() == ()


# --- what is shown --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(jf.pca.PerPCA(1, 1, solver="gradient"), marks=pytest.mark.slow),
        jf.pca.PerPCA(1, 1),
    ],
    ids=["gradient", "quasi-Newton"],
)
def test_no_objective_is_shown_that_no_components_have(algorithm):
    """Received components are longer or shorter than one, and so seem to capture more."""
    best = fitted(jf.pca.PerPCA(1, 1, local_penalty=0.0)).history["objective"][-1]
    lossy = fitted(algorithm, channel=jf.channel.quantize(3))
    assert lossy.history["objective"].min() >= best * (1 - 1e-5)


def test_an_estimator_warns_in_its_own_words():
    pytest.importorskip("sklearn")
    from sklearn.exceptions import ConvergenceWarning

    from jaxfed.estimators import FederatedGCCA

    rng = np.random.default_rng(0)
    # Ill-conditioned, so that gradient steps take long.
    tables = [rng.normal(size=(60, 6)) * np.logspace(0, -2, 6) for _ in range(3)]
    model = FederatedGCCA(2, rounds=15, solver="gradient", random_state=0)
    with pytest.warns(ConvergenceWarning, match=r"more rounds \(rounds=\)"):
        model.fit(tables)
    assert "warm_start" not in model.summary_


@pytest.mark.slow
def test_the_command_line_exits_with_a_status_of_its_own(tmp_path, capsys):
    from jaxfed.cli import main

    rng = np.random.default_rng(0)
    (data := tmp_path / "data").mkdir()
    for i in range(6):
        np.save(data / f"{i}.npy", rng.normal(size=(20, 8)).astype(np.float32))
    command = ["fit", "perpca", "--data", str(data), "--shared-rank", "2", "--local-rank", "2"]
    command += ["--held-out", "0", "--tol", "1e-9", "--rounds"]
    assert main([*command, "8", "--out", str(tmp_path / "short")]) == 3
    said = capsys.readouterr().out
    assert "run more rounds (--rounds)" in said and "warm_start" not in said
    assert (tmp_path / "short" / "result.npz").exists()
    assert main(["info", str(tmp_path / "short")]) == 0
    assert capsys.readouterr().out.startswith("verdict    round limit: ")
    assert main([*command, "800", "--out", str(tmp_path / "long")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", [jf.pca.PerPCA, GRADIENT, jf.pca.HMF])
@pytest.mark.parametrize("rank", [0, 1])
def test_data_that_components_reproduce_are_a_success(model, rank):
    """Their objective is nothing but rounding, of which gains must not count as large."""
    rows = np.random.default_rng(0).normal(size=(30, rank)) @ np.ones((rank, 6)) + (rank == 0)
    samples = jf.Clients.from_samples([rows.astype(np.float32)] * 3)
    run = jf.fit(model(2, 1), samples, rounds=30, key=KEY)
    assert run.status == Status.converged
