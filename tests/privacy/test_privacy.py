"""The server's attacks: exact where messages are products, unsuccessful where they are not."""

import functools

import chex
import jax
import numpy as np
import pytest

import jaxfed as jf
from bench.tables import privacy as table
from jaxfed import privacy
from tests.helpers import decaying_samples

FEATURES, RANK, CLIENTS, ROUNDS = 24, 4, 4, 12
SPAN = FEATURES // RANK  # rounds until the blocks may span all features

DIFFERENCE = jf.channel.difference(jf.channel.top_k(1.0))  # which loses nothing

pytestmark = pytest.mark.usefixtures("x64")


@functools.cache
def decaying():
    """Clients that are alike, as those of the paper."""
    return jf.Clients.from_samples(decaying_samples((60,) * CLIENTS, FEATURES))


SOLVERS = {
    "subspace iteration": jf.pca.SubspaceIteration(RANK),
    "block Lanczos": jf.pca.BlockLanczos(RANK),
    "FAPS": jf.pca.FAPS(RANK),
    "FAPS, KKT": jf.pca.FAPS(RANK, stop="kkt"),
}


@functools.cache
def transcript(name):
    return privacy.record(SOLVERS[name], decaying(), rounds=ROUNDS, key=jax.random.key(0), client=1)


@functools.cache
def secret():
    return privacy.client_matrix(decaying(), 1)


@pytest.mark.slow
def test_the_record_holds_the_messages():
    heard, clients = transcript("subspace iteration"), decaying()
    pooled = sum(privacy.client_matrix(clients, i) for i in range(CLIENTS))
    z = heard.received
    assert z.shape == heard.sent.shape == heard.total.shape == (ROUNDS, FEATURES, RANK)
    np.testing.assert_allclose(heard.sent, secret() @ z, atol=1e-12)
    np.testing.assert_allclose(heard.total, pooled @ z, atol=1e-12)
    run = jf.rollout(SOLVERS["subspace iteration"], clients, rounds=3, key=jax.random.key(0))
    np.testing.assert_allclose(run.result.shared, z[3], atol=1e-10)


@pytest.mark.slow
def test_the_aggregate_of_gathered_messages_is_all_of_them():
    algorithm = jf.pca.LocalPower(RANK, alignment="procrustes")
    heard = privacy.record(algorithm, decaying(), rounds=2, key=jax.random.key(0), client=1)
    second = jax.tree.map(lambda x: x[:, 1], heard.total[0])
    chex.assert_trees_all_equal(second, heard.sent[0])


@pytest.mark.slow
def test_first_messages_are_kept():
    heard, clients = transcript("block Lanczos"), decaying()
    energies = [np.trace(privacy.client_matrix(clients, i)) for i in range(CLIENTS)]
    np.testing.assert_allclose(heard.first.energy, energies[1])
    np.testing.assert_allclose(heard.first_total.energy, sum(energies))


def test_minimum_norm_finds_the_solution_of_least_norm():
    rng = np.random.default_rng(1)
    z, y = rng.normal(size=(2, 6, 2)), rng.normal(size=(2, 6, 2))
    phi = privacy.minimum_norm(z, y)
    np.testing.assert_allclose(phi @ z, y, atol=1e-12)
    stacked = np.concatenate(list(z), axis=1)
    beside = np.eye(6) - stacked @ np.linalg.pinv(stacked)
    np.testing.assert_allclose(phi @ beside, 0, atol=1e-12)


def test_outside_span_solves_its_equations():
    rng = np.random.default_rng(2)
    truth = rng.normal(size=(8, 8))
    truth = truth + truth.T
    z = np.stack([np.linalg.qr(rng.normal(size=(8, 2)))[0] for _ in range(6)])
    y = truth @ z + z @ rng.normal(size=(6, 2, 2))  # anything within the span
    phi = privacy.outside_span(z, y)
    np.testing.assert_allclose(phi, truth - np.trace(truth) / 8 * np.eye(8), atol=1e-8)
    few = privacy.outside_span(z[:1], y[:1])
    assert privacy.relative_error(few, truth, calibrated=True) > 0.3


@pytest.mark.parametrize("name", ["subspace iteration", "block Lanczos", "FAPS, KKT"])
def test_products_reveal_the_matrix(name):
    errors = privacy.linear_attack(transcript(name), secret())
    assert errors.shape == (ROUNDS,)
    assert errors[0] > 0.5 and errors[SPAN - 2] > 1e-2
    # Converging blocks are nearly dependent; another round gains some digits.
    last = errors[SPAN - 1] if name == "block Lanczos" else errors[SPAN]
    assert last < 1e-5
    chosen = privacy.linear_attack(transcript(name), secret(), at=[1, SPAN])
    np.testing.assert_allclose(chosen, errors[[0, SPAN - 1]])


def test_masked_messages_do_not_reveal_the_matrix():
    heard = transcript("FAPS")
    assert privacy.linear_attack(heard, secret()).min() > 0.8
    assert privacy.linear_attack(heard, secret(), calibrated=True).min() > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["subspace iteration", "FAPS"])
def test_a_server_that_restarts_learns_the_matrix(name):
    attack = functools.partial(
        privacy.restart_attack, SOLVERS[name], decaying(), key=jax.random.key(1), client=1
    )
    assert attack() < 1e-6
    assert attack(restarts=SPAN - 3) > 0.1
    if name == "FAPS":
        assert attack(calibrated=False) > 0.1  # a multiple of the identity is hidden
        assert attack(norm_factor=0.15) < 1e-6  # but the penalty reveals it


@pytest.mark.parametrize("name", SOLVERS)
def test_a_sum_reveals_no_single_client(name):
    guess = privacy.public_guess(decaying(), 1)
    assert guess > 0.1
    heard = transcript(name)
    errors = privacy.linear_attack(heard, secret(), summed=True, calibrated=True)
    assert errors.min() > 0.9 * guess
    if name != "FAPS, KKT":
        assert (
            privacy.restart_attack(
                SOLVERS[name], decaying(), key=jax.random.key(1), client=1, summed=True
            )
            > 0.9 * guess
        )


@pytest.mark.slow
def test_first_messages():
    clients, key = decaying(), jax.random.key(0)
    errors = {}
    for name, algorithm in {
        "pooled": jf.pca.Pooled(RANK),
        "local": jf.pca.Local(RANK),
        "spectrum": jf.pca.OneShot(1, 2, method="spectrum"),
        "personalized": jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.1),
        "local_first": jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.1, start="local_first"),
    }.items():
        heard = privacy.record(algorithm, clients, rounds=1, key=key, client=1)
        errors[name] = privacy.first_message_attack(heard, secret())
        if name == "pooled":
            summed = privacy.first_message_attack(heard, secret(), summed=True)
            assert summed > 0.9 * privacy.public_guess(clients, 1)
    assert errors["pooled"] < 1e-12
    assert errors["local"] == 1
    assert 1e-3 < errors["spectrum"] < 0.6
    assert 0.3 < errors["personalized"] < 0.5  # its own components
    assert 0.6 < errors["local_first"] < 0.8  # what its own components leave


def test_norms():
    assert privacy.norm_leak(transcript("block Lanczos"), secret()) < 1e-12
    assert privacy.norm_leak(transcript("block Lanczos"), secret(), summed=True) > 1
    assert privacy.norm_leak(transcript("subspace iteration"), secret()) == np.inf
    assert privacy.norm_leak(transcript("FAPS"), secret(), factor=0.15) < 1e-6


@pytest.mark.slow
def test_channels():
    name = "block Lanczos"
    plain, key = transcript(name), jax.random.key(0)
    record = functools.partial(privacy.record, SOLVERS[name], decaying(), rounds=ROUNDS, key=key)
    coded = record(client=1, channel=jf.Wire(DIFFERENCE, DIFFERENCE, jf.channel.lossless()))
    for part in ("received", "sent", "total"):
        before, after = getattr(plain, part)[:SPAN], getattr(coded, part)[:SPAN]
        np.testing.assert_allclose(after, before, atol=1e-9)
    rounded = record(client=1, channel=jf.Wire(jf.channel.cast("float32"), jf.channel.lossless()))
    error = privacy.linear_attack(rounded, secret(), at=[SPAN])[0]
    assert 1e-9 < error < 1e-5


def test_bad_arguments_are_refused():
    clients, key = decaying(), jax.random.key(0)
    with pytest.raises(ValueError, match="client: wanted a whole number from 0 to 3, got 4"):
        privacy.record(SOLVERS["FAPS"], clients, rounds=1, key=key, client=4)
    with pytest.raises(ValueError, match="rounds: "):
        privacy.record(SOLVERS["FAPS"], clients, rounds=0, key=key)
    with pytest.raises(ValueError, match="channel: "):
        privacy.record(SOLVERS["FAPS"], clients, rounds=1, key=key, channel="none")
    assert np.isnan(privacy.relative_error(np.eye(2), np.zeros((2, 2))))


@pytest.mark.slow
def test_the_record_through_differences_is_that_of_the_run():
    """Also where the memory starts from the first message, as that of `MaxVar` does."""
    rng = np.random.default_rng(0)
    views = jf.gcca.Views.from_arrays([rng.normal(size=(FEATURES, 5)) for _ in range(3)])
    algorithm, key = jf.gcca.MaxVar(2), jax.random.key(0)
    through = jf.channel.difference(jf.channel.quantize(3))
    heard = privacy.record(algorithm, views, rounds=4, key=key, channel=through)
    run = jf.fit(algorithm, views, rounds=4, key=key, channel=through)
    left, _, right = np.linalg.svd(heard.total[-1], full_matrices=False)
    np.testing.assert_allclose(left @ right, run.result.shared, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("row", range(21), ids=str)
def test_every_attack_of_the_table_says_something(row):
    """Whichever way round the features are in its messages."""
    rows = table.rows(RANK, rounds=3)
    assert len(rows) == 21
    row = rows[row]._replace(restarts=SPAN)
    errors = table.attacked(row, decaying(), at=(row.rounds,))
    sends_first = errors["first message"] == errors["first message"]
    if row.rounds > 1:
        assert 0 <= errors[f"{row.rounds} rounds"] <= 1 and 0 <= errors["restarts"] <= 1
        assert 0 <= errors["sums only"] <= 1
    else:
        assert sends_first == ("Local" not in row.name)
    if "HierarchicalPCA" in row.name:
        assert errors["first message"] < 1e-12
    if row.name == "`HierarchicalPCA`":
        assert errors["restarts"] < 0.05


def test_cells_of_the_table():
    cell = table.cell
    assert cell(0.744, "–") == "0.7" and cell(0.0123, "–") == "**0.01**"
    assert cell(7e-5, "–") == "**<1e-4**" and cell(5e-16, "–") == "**<1e-13**"
    assert cell(float("nan"), "no") == "no"


@pytest.mark.parametrize("scale", [1e-15, 1e-8, 1.0, 1e8, 1e15])
def test_a_calibrated_error_does_not_depend_on_units(scale):
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(6, 6))
    exact = scale * (truth - 3 * np.eye(6))
    assert privacy.relative_error(exact, truth, calibrated=True) < 1e-12
    assert privacy.relative_error(exact * scale, truth * scale, calibrated=True) < 1e-12
