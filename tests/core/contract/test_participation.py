"""Who takes part in a round, and what becomes of those who do not."""

import contextlib
import functools
import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from tests.helpers import gaussian

FEATURES, CLIENTS, ROUNDS = 5, 6, 8
sampled = functools.partial(gaussian, (9,) * CLIENTS, (3, 2.5, 2, 1.5, 1), dtype=float)


def perpca():
    return jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.05, start="random")


def trajectory(participation, backend, key):
    """The clients' states before the first round and after each round."""
    states = []

    def record(solution):
        states.append(np.asarray(solution.local))

    solution = jf.fit(
        perpca(),
        sampled(),
        rounds=ROUNDS,
        key=key,
        participation=participation,
        backend=backend,
        callbacks=[record],
        rounds_per_chunk=1,
    )
    return np.stack(states), solution


BACKENDS = {
    "vmap": jf.backend.vmap,
    "chunked": lambda: jf.backend.chunked(4),
    "shard": lambda: jf.backend.shard(4),
}
SHARD = pytest.param("shard", marks=pytest.mark.timeout(120))

PRESENT = np.array(
    [
        [True, False, True, False, False, True],
        [False, False, False, False, True, False],
        [True, True, True, True, True, True],
    ]
)


@pytest.mark.parametrize("name", ["vmap", "chunked", SHARD])
def test_absent_clients_keep_their_state_to_the_bit(name, key):
    states, solution = trajectory(jf.participation.mask(PRESENT), BACKENDS[name](), key)
    for t in range(1, ROUNDS):
        # After the last row, the mask starts over.
        present = PRESENT[t % len(PRESENT)]
        changed = (states[t] != states[t - 1]).any(axis=(1, 2))
        np.testing.assert_array_equal(changed, present)
    np.testing.assert_array_equal(
        solution.history["participants"], np.resize(PRESENT.sum(axis=1), ROUNDS)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vmap", "chunked", SHARD])
def test_a_fixed_number_is_drawn_anew_each_round(name, key):
    states, solution = trajectory(jf.participation.uniform(2), BACKENDS[name](), key)
    changed = (states[1:] != states[:-1]).any(axis=(2, 3))
    assert (changed.sum(axis=1) == 2).all()
    assert len({tuple(row) for row in changed}) > 1
    assert (solution.history["participants"] == 2).all()


def test_weighted_sums_over_participants_are_unbiased():
    size, draws = 2, 4000
    participation = jf.participation.uniform(size)
    everyone = jnp.int32(0), jnp.arange(CLIENTS), jnp.full(CLIENTS, 1 / CLIENTS)
    factors = jax.vmap(lambda key: participation.inclusion(key, *everyone))(
        jax.random.split(jax.random.key(1), draws)
    )
    assert set(np.unique(factors)) == {0.0, CLIENTS / size}
    assert ((factors > 0).sum(axis=1) == size).all()
    # Each client's chance, then any weighted sum, within five standard errors.
    chance = (factors > 0).mean(axis=0)
    expected = size / CLIENTS
    assert np.abs(chance - expected).max() < 5 * np.sqrt(expected * (1 - expected) / draws)
    rng = np.random.default_rng(0)
    weights, messages = rng.dirichlet(np.ones(CLIENTS)), rng.normal(size=CLIENTS)
    sums = np.asarray(factors) @ (weights * messages)
    assert abs(sums.mean() - weights @ messages) < 5 * sums.std() / np.sqrt(draws)
    assert sums.std() > 0.1


def test_draws_do_not_depend_on_the_order_of_clients(key):
    participation, ids = jf.participation.uniform(3), jnp.asarray([4, 0, 11, 7, 2, 5])
    order = np.array([5, 2, 0, 1, 4, 3])
    equal = jnp.full(6, 1 / 6)
    factors = participation.inclusion(key, jnp.int32(0), ids, equal)
    permuted = participation.inclusion(key, jnp.int32(0), ids[order], equal)
    np.testing.assert_array_equal(permuted, factors[order])


class Report(jf.Algorithm):
    """Sends a number of each client, of which the server keeps the mean."""

    def server_init(self, key, first, like, warm_start):
        return jnp.zeros(())

    def downlink(self, server):
        return server

    def client_init(self, key, downlink, data, warm_start):
        return jnp.zeros(())

    def client_step(self, key, downlink, local, data):
        energy = (data.values**2).sum() / data.count
        return energy, local + 1, {"objective": energy}

    def server_step(self, key, server, uplink):
        return uplink, {"mean": uplink, "steps": jnp.int32(1)}


def weighted(weights):
    clients = sampled()
    return jf.Clients(clients.data, clients.ids, jnp.asarray(weights))


def test_the_mean_that_the_server_sees_is_unbiased():
    """Averaged over keys, the server receives what it receives under full participation."""
    clients = weighted([0.3, 0.1, 0.1, 0.2, 0.25, 0.05])

    @jax.jit
    @jax.vmap
    def server(key):
        participation = jf.participation.uniform(2)
        return jf.rollout(Report(), clients, rounds=1, key=key, participation=participation).server

    sums = np.asarray(server(jax.random.split(jax.random.key(0), 2000)))
    traces = np.einsum("mnd,mnd->m", clients.data.values, clients.data.values) / 9
    assert abs(sums.mean() - clients.weights @ traces) < 5 * sums.std() / np.sqrt(len(sums))
    assert sums.std() > 0.1


def test_diagnostics_are_means_over_the_participants(key):
    clients = weighted([0.3, 0.1, 0.1, 0.2, 0.25, 0.05])
    participation = jf.participation.uniform(2)
    run = jf.rollout(Report(), clients, rounds=1, key=key, participation=participation)
    energies = np.einsum("mnd,mnd->m", clients.data.values, clients.data.values) / 9
    weights = np.where(run.local > 0, clients.weights, 0)
    assert (weights > 0).sum() == 2
    expected = np.average(energies, weights=weights)
    np.testing.assert_allclose(run.history["objective"], [expected], rtol=1e-6)


def test_a_mask_gives_the_weighted_mean_of_the_present(key):
    """The weights of a round did not always sum to one."""
    clients = weighted([0.3, 0.1, 0.1, 0.2, 0.25, 0.05])
    given = jf.participation.mask(PRESENT)
    run = jf.fit(Report(), clients, rounds=3, key=key, participation=given)
    np.testing.assert_allclose(run.history["mean"], run.history["objective"], rtol=1e-6)


@pytest.mark.parametrize("name", ["vmap", "chunked", SHARD])
def test_a_round_without_any_weight_is_skipped(name, key):
    """It used to end the run, and to blame the step size."""
    clients = weighted([0.5, 0.2, 0.3, 0.0, 0.0, 0.0])
    present = np.array([[True, False, False, True, False, False], [False] * 3 + [True] * 3])
    run = jf.fit(
        Report(),
        clients,
        rounds=4,
        key=key,
        participation=jf.participation.mask(present),
        backend=BACKENDS[name](),
    )
    assert run.status == jf.Status.round_limit and run.rounds == 4
    np.testing.assert_array_equal(np.isnan(run.history["objective"]), [False, True] * 2)
    np.testing.assert_array_equal(np.isnan(run.history["mean"]), [False, True] * 2)
    np.testing.assert_array_equal(run.history["steps"], [1, 0] * 2)
    np.testing.assert_array_equal(run.history["participants"], [2, 0] * 2)
    np.testing.assert_array_equal(run.local, [2, 0, 0, 2, 0, 0])
    np.testing.assert_allclose(run.server, (np.asarray(clients.data.values[0]) ** 2).sum() / 9)
    np.testing.assert_allclose(run.history["bits_up"] * CLIENTS, 32 * np.array([2, 2, 4, 4]))


def test_drawn_clients_may_have_no_weight(key):
    """Rounds without any weight are skipped, under difference coding too."""
    clients = weighted([1.0] + [0.0] * 5)
    through = jf.channel.difference(jf.channel.top_k(1.0))
    run = jf.fit(
        Report(),
        clients,
        rounds=12,
        key=key,
        participation=jf.participation.uniform(2),
        channel=through,
    )
    drawn = run.history["participants"]
    assert set(drawn) == {0, 2} and run.status == jf.Status.round_limit
    assert int(run.local.sum()) == drawn.sum()


@pytest.mark.slow
def test_drawing_everybody_equals_full_participation(key, x64):
    """Drawing all clients is the same as the default."""
    run = jax.jit(
        lambda p: jf.rollout(perpca(), sampled(), rounds=ROUNDS, key=key, participation=p)
    )
    wanted = run(None)
    given = run(jf.participation.uniform(CLIENTS))
    chex.assert_trees_all_close(given.result, wanted.result, atol=1e-12)
    chex.assert_trees_all_close(given.history, wanted.history, rtol=1e-12)


def test_bits_count_participants_only(key):
    solution = jf.fit(
        perpca(), sampled(), rounds=ROUNDS, key=key, participation=jf.participation.mask(PRESENT)
    )
    rounds_of_a_client = np.cumsum(np.resize(PRESENT.sum(axis=1), ROUNDS)) / CLIENTS
    frame = 32 * FEATURES
    up, down = solution.history["bits_up"], solution.history["bits_down"]
    np.testing.assert_allclose(up, frame * rounds_of_a_client, rtol=1e-15)
    # The first downlink goes to every client.
    later = rounds_of_a_client - rounds_of_a_client[0]
    np.testing.assert_allclose(down, frame * (1 + later), rtol=1e-15)


@contextlib.contextmanager
def compiled(caplog):
    """What is compiled within the block, as a list."""
    found = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        caplog.clear()
        yield found
        found += [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]


@pytest.mark.slow
def test_other_participants_compile_nothing(key, caplog):
    clients = sampled()

    def fit(participation, key):
        return jf.fit(perpca(), clients, rounds=ROUNDS, key=key, participation=participation)

    jax.clear_caches()  # of other tests
    with compiled(caplog) as first:
        given = fit(jf.participation.mask(PRESENT), key)
        drawn = fit(jf.participation.uniform(3), key)
    assert first
    flipped, another_key = jf.participation.mask(PRESENT[::-1]), jax.random.key(5)
    with compiled(caplog) as again:
        others = fit(flipped, key), fit(jf.participation.uniform(3), another_key)
    assert not again
    for one, other in zip((given, drawn), others, strict=True):
        assert (one.result.local != other.result.local).any()
    assert (others[0].history["participants"] == np.resize(PRESENT[::-1].sum(axis=1), ROUNDS)).all()


@pytest.mark.parametrize("size", [0, -3, 2.5, "all", None])
def test_bad_sizes_are_refused(size):
    with pytest.raises(ValueError, match=r"^size: wanted a whole number"):
        jf.participation.uniform(size)


@pytest.mark.parametrize(
    ("present", "message"),
    [
        (np.ones(CLIENTS), "wanted a boolean array"),
        (np.ones((2, 3, CLIENTS), bool), "wanted a boolean array"),
        (PRESENT & [[True], [False], [True]], "each round needs at least one client"),
        (np.ones((0, CLIENTS), bool), "at least one"),
    ],
)
def test_bad_masks_are_refused(present, message):
    with pytest.raises(ValueError, match=rf"^present: .*{message}"):
        jf.participation.mask(present)


@pytest.mark.parametrize(
    ("participation", "message"),
    [
        (jf.participation.uniform(CLIENTS + 1), "7 clients a round were asked for, there are 6"),
        (jf.participation.mask(np.ones(4, bool)), "the mask is for 4 clients, there are 6"),
        (0.5, "wanted one of jaxfed.participation, got 0.5"),
    ],
)
def test_participation_that_does_not_fit_the_clients_is_refused(participation, message, key):
    for run in (jf.fit, jf.rollout):
        with pytest.raises(ValueError, match=rf"^participation: {message}"):
            run(perpca(), sampled(), rounds=2, key=key, participation=participation)


@pytest.mark.parametrize(
    "factors",
    [np.ones(2, np.float32), np.ones((CLIENTS, 1), np.float32), np.ones(CLIENTS, int), "all", None],
)
def test_a_custom_one_that_breaks_the_contract_is_named(factors, key):
    class Broken(jf.participation.Participation):
        def number(self, clients):
            return None

        def inclusion(self, key, round_index, ids, weights):
            return factors

        def turns(self, rounds, clients):
            return np.full(clients, rounds)

    wanted = r"^participation: wanted of Broken\.inclusion a floating-point array of \(6,\), got "
    with pytest.raises(ValueError, match=wanted):
        jf.fit(perpca(), sampled(), rounds=2, key=key, participation=Broken())
