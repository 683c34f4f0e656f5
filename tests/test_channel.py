"""What messages go through, and what they cost to the bit."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf

FEATURES, ROUNDS = 6, 10
COUNTS = (12, 9, 10, 12, 7)
CLIENTS, LONGEST = len(COUNTS), max(COUNTS)


def draw(dtype=np.float32, counts=COUNTS):
    rng = np.random.default_rng(0)
    scales = [3, 2.5, 2, 1.5, 0.4, 0.3]
    return jf.Clients.from_samples(
        [(rng.normal(size=(n, FEATURES)) * scales).astype(dtype) for n in counts]
    )


class Bytes(jf.channel.Channel):
    """A message as raw bytes: a payload of another kind, and nothing lost."""

    def memory(self, message):
        return ()

    def encode(self, key, message, memory):
        return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8), message), memory

    def decode(self, payload):
        return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.float32), payload)

    def receive(self, decoded, memory):
        return decoded, memory


class Differences(jf.channel.Channel):
    """Sends what changed since the last message; either end adds it up."""

    def memory(self, message):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), message)

    def encode(self, key, message, memory):
        return jax.tree.map(jnp.subtract, message, memory), message

    def decode(self, payload):
        return payload

    def receive(self, decoded, memory):
        total = jax.tree.map(jnp.add, decoded, memory)
        return total, total


@functools.partial(jax.jit, static_argnames="rounds")
def solve(algorithm, clients, channel, rounds=ROUNDS):
    return jf.rollout(algorithm, clients, rounds=rounds, key=jax.random.key(0), channel=channel)


def by_hand(algorithm, clients, rounds, key):
    """Personalized PCA's rounds with everybody, without any channel."""
    data = jax.vmap(lambda one, i: algorithm.prepare(one, i, rounds))(clients.data, clients.ids)

    def mean(messages):
        return jax.tree.map(
            lambda x: (clients.weights.reshape(-1, *(x.ndim - 1) * [1]) * x).sum(0), messages
        )

    def keys(t):
        return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, t), clients.ids)

    client_keys = jax.vmap(lambda k: jax.random.split(k)[0])(keys(0))
    uplink, local = jax.vmap(lambda k, one: algorithm.client_init(k, one, None))(client_keys, data)
    server = algorithm.server_init(key, mean(uplink), None)

    def step(carry, t):
        server, local = carry
        downlink = algorithm.downlink(server)
        uplink, local, diagnostics = jax.vmap(algorithm.client_step, (0, None, 0, 0))(
            keys(t), downlink, local, data
        )
        server = algorithm.server_step(key, server, mean(uplink))
        return (server, local), mean(diagnostics)["objective"]

    return jax.lax.scan(step, (server, local), jnp.arange(1, rounds + 1))


def test_lossless_is_the_run_without_channels_to_the_bit():
    algorithm = jf.pca.PerPCA(2, 1, step_size=0.05, start="random")
    clients = draw()
    solution = solve(algorithm, clients, jf.channel.lossless())
    run = jax.jit(by_hand, static_argnames="rounds")
    (server, local), objective = run(algorithm, clients, ROUNDS, jax.random.key(0))
    np.testing.assert_array_equal(solution.server.shared, server.shared)
    np.testing.assert_array_equal(solution.local, local)
    np.testing.assert_array_equal(solution.history["objective"], objective)


@pytest.mark.parametrize("kind", [jf.pca.PerPCA, jf.pca.OneShot])
def test_what_loses_nothing_changes_nothing(kind):
    algorithm, clients = kind(1, 1), draw()
    lossless = solve(algorithm, clients, jf.channel.lossless())
    through_bytes = solve(algorithm, clients, Bytes())
    chex.assert_trees_all_equal(through_bytes.result, lossless.result)
    chex.assert_trees_all_equal(through_bytes.history, lossless.history)


def test_lossless_keeps_every_bit_pattern(key):
    message = {"a": jnp.asarray([0.0, -0.0, jnp.nan, jnp.inf, 1e-45]), "b": jnp.arange(3)}
    channel = jf.channel.lossless()
    payload, memory = channel.encode(key, message, channel.memory(message))
    received, _ = channel.receive(channel.decode(payload), memory)
    for sent, got in zip(jax.tree.leaves(message), jax.tree.leaves(received), strict=True):
        assert got.dtype == sent.dtype
        assert np.asarray(got).tobytes() == np.asarray(sent).tobytes()


@pytest.mark.parametrize("way", ["up", "down"])
def test_memory_at_both_ends(way, x64):
    """Difference coding rounds a little, and only adds up if each end keeps its own memory."""
    algorithm, clients = jf.pca.PerPCA(1, 1, decay=0.7), draw(np.float64)
    lossless = jf.channel.lossless()
    channel = {"up": (Differences(), lossless), "down": (lossless, Differences())}
    given = solve(algorithm, clients, channel[way])
    wanted = solve(algorithm, clients, lossless)
    chex.assert_trees_all_close(given.result, wanted.result, atol=1e-9)
    chex.assert_trees_all_close(given.history, wanted.history, rtol=1e-9)


# --- bits: their exact numbers for every algorithm are in test_contract.py -----------------------

TRIANGLE = FEATURES * (FEATURES + 1) // 2  # numbers in a symmetric matrix


@pytest.mark.parametrize("way", ["fit", "rollout"])
def test_bits_of_single_precision(way, key):
    algorithm, clients = jf.pca.PerPCA(1, 1, decay=0.5), draw()
    if way == "fit":
        history = jf.fit(algorithm, clients, rounds=ROUNDS, key=key).history
        assert history["bits_up"].dtype == history["bits_down"].dtype == np.float64
    else:
        history = solve(algorithm, clients, jf.channel.lossless()).history
    rounds = np.arange(1, ROUNDS + 1)
    np.testing.assert_array_equal(history["bits_up"], 32 * (TRIANGLE + 1 + 7 * rounds))
    np.testing.assert_array_equal(history["bits_down"], 32 * 7 * rounds)


def test_few_samples_travel_as_they_are(key):
    """A client with fewer samples than features sends those, rather than a matrix."""
    counts = (2, 3, 1)
    history = jf.fit(jf.pca.Pooled(2), draw(counts=counts), rounds=1, key=key).history
    np.testing.assert_array_equal(history["bits_up"], [32 * max(counts) * FEATURES])


def test_bits_of_a_warm_start_are_those_of_what_it_still_sends(key):
    """The largest eigenvalue for the automatic step, but no second moment."""
    start = jf.Personalized(np.eye(FEATURES, 1), np.zeros((CLIENTS, FEATURES, 0)))
    history = jf.fit(jf.pca.PerPCA(1, 1), draw(), rounds=3, key=key, warm_start=start).history
    np.testing.assert_array_equal(history["bits_up"], 32 * (1 + 6 * np.arange(1, 4)))


def test_bits_follow_the_payload(key):
    class Half(Bytes):
        """Sends the upper half of each number."""

        def encode(self, key, message, memory):
            return jax.tree.map(lambda x: x.astype(jnp.bfloat16), message), memory

        def decode(self, payload):
            return jax.tree.map(lambda x: x.astype(jnp.float32), payload)

    algorithm, clients = jf.pca.PerPCA(1, 1, step_size=0.1), draw()
    history = jf.fit(
        algorithm, clients, rounds=3, key=key, channel=(Half(), jf.channel.lossless())
    ).history
    rounds = np.arange(1, 4)
    # The exchange before the rounds is exact.
    np.testing.assert_array_equal(history["bits_up"], 32 * TRIANGLE + 16 * 6 * rounds)
    np.testing.assert_array_equal(history["bits_down"], 32 * 6 * rounds)


def test_bits_stay_exact_beyond_single_precision(key):
    """2^24 bits are soon sent; the count must not stop there."""
    rng = np.random.default_rng(0)
    clients = jf.Clients.from_samples(rng.normal(size=(1, 2, 3001)).astype(np.float32))
    algorithm = jf.pca.PerPCA(1, 1, step_size=0.1, start="random")
    rounds = 400
    history = jf.fit(algorithm, clients, rounds=rounds, key=key).history
    wanted = 32 * 3001 * np.arange(2, rounds + 2)
    assert wanted[-1] > 2**24
    np.testing.assert_array_equal(history["bits_up"], wanted)


@pytest.mark.parametrize(
    "channel", [None, "lossless", (jf.channel.lossless(),), 3 * (jf.channel.lossless(),)]
)
def test_what_is_no_channel_is_refused(channel, key):
    with pytest.raises(ValueError, match=r"^channel: wanted a channel or a pair"):
        jf.fit(jf.pca.Local(1), draw(), rounds=1, key=key, channel=channel)
