"""Updates of solutions: warm, with the settings of the run before, and what they say of drift."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.stream import Forgetting
from tests.helpers import gaussian

KEYS = jax.random.split(jax.random.key(0), 3)
SPREAD = (3, 2.5, 2, 1.5, 0.4, 0.3)
PERPCA = jf.pca.PerPCA(2, 1, solver="gradient")


def clients(ids=(0, 1, 2), seed=0):
    made = gaussian((12,) * len(ids), SPREAD, seed=seed)
    return jf.Clients(made.data, jnp.asarray(ids, jnp.int32), made.weights)


def solved(algorithm=PERPCA, rounds=20, **options):
    return jf.fit(algorithm, clients(), rounds=rounds, key=KEYS[0], **options)


def test_it_is_a_warm_fit():
    before, newer = solved(), clients((2, 0, 1), seed=1)
    found = jf.update(before, newer, rounds=4, key=KEYS[1])
    wanted = jf.fit(PERPCA, newer, rounds=4, key=KEYS[1], warm_start=before)
    chex.assert_trees_all_equal(found.result, wanted.result)
    drift = found.history.pop("drift")
    chex.assert_trees_all_equal(found.history, wanted.history)
    assert np.isnan(drift[:-1]).all() and 0 < drift[-1] < 1


@pytest.mark.slow
def test_channel_and_participation_are_those_of_the_run():
    wire = jf.Wire(jf.channel.quantize(6), jf.channel.cast(jnp.bfloat16), jf.channel.quantize(8))
    some = jf.participation.uniform(2)
    before = solved(channel=wire, participation=some)
    assert before.wire.channels == wire.channels
    found = jf.update(before, clients(seed=1), rounds=3, key=KEYS[1])
    options = {"rounds": 3, "key": KEYS[1], "warm_start": before}
    wanted = jf.fit(PERPCA, clients(seed=1), channel=wire, participation=some, **options)
    chex.assert_trees_all_equal(found.result, wanted.result)
    np.testing.assert_array_equal(found.history["bits_up"], wanted.history["bits_up"])
    again = jf.update(found, clients(seed=2), rounds=1, key=KEYS[2])
    assert again.wire.channels == wire.channels
    assert again.history["participants"].tolist() == [2]
    # All that the clients have sent counts.
    assert [each.channel for each in again.releases] == 3 * [wire.first_up, wire.up]
    open_again = jf.update(
        again, clients(), rounds=1, key=KEYS[2], channel=jf.channel.lossless(), participation=None
    )
    assert open_again.wire.up == jf.channel.lossless()


def test_the_first_objective_is_that_of_the_models_before():
    before, newer = solved(), clients(seed=1)
    found = jf.update(before, newer, rounds=2, key=KEYS[1])
    errors = jf.metrics.reconstruction_error(before, newer.data.values)
    np.testing.assert_allclose(found.history["objective"][0], np.mean(errors), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [PERPCA, jf.pca.PerPCA(2, 1), jf.pca.SubspaceIteration(2), jf.pca.BlockLanczos(2)],
)
def test_drift_is_the_sine_of_the_largest_angle(algorithm):
    before = solved(algorithm)
    found = jf.update(before, clients(seed=1), rounds=2, key=KEYS[1])
    x, y = (np.asarray(each.result.shared, float) for each in (before, found))
    # The sines are the singular values of one basis beside the other.
    largest = np.linalg.norm(y - x @ (x.T @ y), 2)
    np.testing.assert_allclose(found.history["drift"][-1], largest, rtol=1e-4)
    assert np.isnan(found.history["drift"][:-1]).all()


def test_what_is_no_basis_has_no_drift():
    before = solved(jf.pca.Local(2), rounds=1)
    assert "drift" not in jf.update(before, clients(seed=1), rounds=1, key=KEYS[1]).history


@pytest.mark.slow
def test_clients_come_and_go():
    before, newer = solved(), clients((7, 2), seed=1)
    found = jf.update(before, newer, rounds=3, key=KEYS[1])
    assert found.ids.tolist() == [7, 2]
    new = jf.personalize(PERPCA, before, newer.take([0]))
    local = jnp.concatenate([new.local, before.result.local[2:]])
    start = jf.Personalized(before.result.shared, local)
    wanted = jf.fit(PERPCA, newer, rounds=3, key=KEYS[1], warm_start=start)
    chex.assert_trees_all_close(found.result, wanted.result, atol=1e-6)


@pytest.mark.slow
def test_a_turning_subspace_is_followed(x64):
    """One round a step, within 5 % of a refit, of half a degree a step."""
    features, members = 12, 10
    rng = np.random.default_rng(0)
    plane = np.linalg.qr(rng.normal(size=(features, 4)))[0]
    rule, kept, last, errors = Forgetting(0.3), None, None, []
    algorithm = jf.pca.PerPCA(2, 1, solver="gradient", variant="power")
    for step in range(40):
        angle = np.deg2rad(0.5 * step)
        shared = plane[:, :2] * np.cos(angle) + plane[:, 2:] * np.sin(angle)
        samples = rng.normal(size=(members, 20, 2)) @ shared.T
        samples = samples + 0.3 * rng.normal(size=(members, 20, features))
        kept = rule.update(kept, jf.Clients.from_samples(samples))
        refit = jf.fit(algorithm, kept, rounds=50, key=KEYS[0])
        last = refit if last is None else jf.update(last, kept, rounds=1, key=KEYS[0])
        if step >= 20:
            each = [
                float(jf.metrics.projector_distance(solution.result.shared, shared))
                for solution in (last, refit)
            ]
            errors.append(each)
    follow, again = np.mean(errors, axis=0)
    assert follow < 1.05 * again


def test_bad_input_is_refused():
    before = solved()
    with pytest.raises(ValueError, match=r"^rounds: wanted a positive"):
        jf.update(before, clients(), rounds=0, key=KEYS[1])
    with pytest.raises(ValueError, match=r"^clients: wanted jaxfed.Clients"):
        jf.update(before, np.ones((3, 4)), rounds=1, key=KEYS[1])
    other = gaussian((5, 5, 5), (1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"^warm_start: wanted shared components of shape"):
        jf.update(before, other, rounds=1, key=KEYS[1])
    with pytest.raises(ValueError, match=r"^first_down: wanted one of jaxfed.channel"):
        jf.Wire(*[jf.channel.lossless()] * 3, "none")  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 3])
def test_machines_may_hold_moments(rank, tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    from jaxfed.deploy import exchange
    from tests.deploy.federation import Federation, check_equal

    rule, kept = Forgetting(0.3, rank), None
    for seed in range(2):
        kept = rule.update(kept, clients(seed=seed))
    monkeypatch.setattr(exchange, "PAUSE", 0.0)
    alone = "tests.deploy.federation.alone"
    monkeypatch.setattr(alone, lambda clients, number: clients.take([number]))
    deployed = Federation(tmp_path, PERPCA, kept)
    check_equal(deployed, deployed.run(3), deployed.fit(3))


@pytest.mark.parametrize("rank", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_a_stream_goes_on_from_its_file_as_if_it_had_not_stopped(rank, tmp_path):
    """New sensors come, one has no readings for a day, and nothing but a file is left at night."""
    rule, algorithm = Forgetting(0.3, rank), jf.pca.HierarchicalPCA(2, 0.1)
    rng = np.random.default_rng(0)
    days = []
    for sensors in (3, 4, 4, 5):
        tables = [rng.normal(size=(9, 6)).astype(np.float32) * SPREAD for _ in range(sensors)]
        days.append([table.astype(np.float32) for table in tables])
    days[2][1] = days[2][1][:0]

    def next_day(number, moments, before):
        newer = jf.Clients.from_samples(days[number], weights="samples")
        moments = rule.update(moments, newer)
        return moments, jf.update(
            before, moments, algorithm=algorithm, rounds=2, key=KEYS[number % 3]
        )

    moments = rule.update(None, jf.Clients.from_samples(days[0]))
    solution = jf.fit(algorithm, moments, rounds=5, key=KEYS[0])
    others, stopped = moments, solution
    for number in range(1, len(days)):
        moments, solution = next_day(number, moments, solution)
        stopped.save(tmp_path / "night.npz", moments=others)
        saved = jf.load(tmp_path / "night.npz")
        others, stopped = next_day(number, saved.moments, saved)
        chex.assert_trees_all_equal(others, moments)
        chex.assert_trees_all_equal(stopped.result, solution.result)
        chex.assert_trees_all_equal(stopped.history, solution.history)
        assert stopped.history["drift"][-1] > 0
    assert stopped.ids.tolist() == [0, 1, 2, 3, 4]
    assert (tmp_path / "night.npz").stat().st_mode & 0o077 == 0


def test_a_file_continues_only_with_what_it_lacks(tmp_path):
    quantized = jf.channel.quantize(8)
    solved(rounds=1, channel=quantized, participation=jf.participation.uniform(2)).save(
        tmp_path / "run.npz"
    )
    saved = jf.load(tmp_path / "run.npz")
    options = {"rounds": 1, "key": KEYS[1], "algorithm": PERPCA, "channel": quantized}
    for missing, wanted in {
        "algorithm": r"that of the file, PerPCA\(",
        "channel": r"that of the run, Wire\(quantize\(levels=127",
        "participation": r"that of the run, uniform\(2\)",
    }.items():
        with pytest.raises(ValueError, match=f"^{missing}: wanted {wanted}"):
            jf.update(saved, clients(), **{k: v for k, v in options.items() if k != missing})
    options["participation"] = jf.participation.everybody()
    assert jf.update(saved, clients(), **options).wire.up == quantized
    with pytest.raises(ValueError, match=r"^moments: wanted jaxfed.Clients with moments"):
        solved(rounds=1).save(tmp_path / "run.npz", moments=clients())


def test_a_sensor_without_readings_has_weight_zero_and_keeps_its_summary(x64):
    made = gaussian((12,) * 3, SPREAD, dtype=np.float64)
    tables = list(np.asarray(made.data.values))
    newer = jf.Clients.from_samples([tables[0], tables[1][:0], tables[2]], weights="samples")
    assert newer.weights.tolist() == [0.5, 0, 0.5]
    with_gap = jf.fit(PERPCA, newer, rounds=3, key=KEYS[0])
    without = jf.fit(PERPCA, newer.take([0, 2]), rounds=3, key=KEYS[0])
    np.testing.assert_allclose(with_gap.result.shared, without.result.shared, atol=1e-12)
    assert np.isfinite(with_gap.result.local).all()

    rule = Forgetting(0.3)
    first = rule.update(None, newer)
    after = rule.update(first, made)  # its first readings
    np.testing.assert_allclose(after.data.dense[1], rule.update(None, made).data.dense[1])
    np.testing.assert_allclose(after.weights, 1 / 3, rtol=1e-6)
    again = rule.update(after, newer)
    np.testing.assert_array_equal(again.data.dense[1], after.data.dense[1])
    np.testing.assert_allclose(again.weights, 1 / 3, rtol=1e-6)
    traced = jax.jit(lambda *both: rule.update(*both))(after, newer)
    np.testing.assert_allclose(traced.data.dense, again.data.dense, rtol=1e-5)
    np.testing.assert_allclose(traced.weights, again.weights, rtol=1e-6)

    with pytest.raises(ValueError, match=r"^arrays\[1\]: a client needs at least one sample"):
        jf.Clients.from_samples([tables[0], tables[1][:0]])
    with pytest.raises(ValueError, match=r"^arrays\[1\]: .*, or weight 0, got none"):
        jf.Clients.from_samples([tables[0], tables[1][:0]], weights=[1, 2])
    with pytest.raises(ValueError, match=r"^arrays\[0\]: a client needs"):
        jf.Clients.from_samples([tables[1][:0]], weights="samples")
