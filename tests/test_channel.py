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
    return jf.rollout(
        algorithm, clients, rounds=rounds, key=jax.random.key(0), channel=channel
    )


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
    algorithm = jf.pca.PerPCA(2, 2, step_size=0.05, start="random")
    clients = draw()
    solution = solve(algorithm, clients, jf.channel.lossless())
    run = jax.jit(by_hand, static_argnames="rounds")
    (server, local), objective = run(algorithm, clients, ROUNDS, jax.random.key(0))
    np.testing.assert_array_equal(solution.server.shared, server.shared)
    np.testing.assert_array_equal(solution.local, local)
    np.testing.assert_array_equal(solution.history["objective"], objective)


ALGORITHMS = {
    "PerPCA": lambda: jf.pca.PerPCA(2, 2, decay=0.7),
    "VarProPerPCA": lambda: jf.pca.VarProPerPCA(2, 2),
    "OneShot": lambda: jf.pca.OneShot(2, 2),
    "Pooled": lambda: jf.pca.Pooled(2),
    "Local": lambda: jf.pca.Local(2),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_loses_nothing_changes_nothing(name):
    algorithm, clients = ALGORITHMS[name](), draw()
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


@pytest.mark.parametrize("way", ["up", "down", "both"])
def test_memory_at_both_ends(way, x64):
    """Difference coding rounds a little, and only adds up if each end keeps its own memory."""
    algorithm, clients = jf.pca.PerPCA(2, 2, decay=0.7), draw(np.float64)
    lossless = jf.channel.lossless()
    channel = {"up": (Differences(), lossless), "down": (lossless, Differences())}
    given = solve(algorithm, clients, channel.get(way, Differences()))
    wanted = solve(algorithm, clients, lossless)
    chex.assert_trees_all_close(given.result, wanted.result, atol=1e-9)
    chex.assert_trees_all_close(given.history, wanted.history, rtol=1e-9)


# --- bits ---------------------------------------------------------------------------------------

TRIANGLE = FEATURES * (FEATURES + 1) // 2  # numbers in a symmetric matrix


# Numbers in the first uplink, in a round's uplink and in a round's downlink. With these samples
# the second moment is what is sent, being smaller than the samples.
COSTS = {
    "PerPCA": (lambda: jf.pca.PerPCA(2, 3, step_size=0.1), TRIANGLE, 12, 12),
    "PerPCA automatic": (lambda: jf.pca.PerPCA(2, 3), TRIANGLE + 1, 12, 13),
    "PerPCA decay": (lambda: jf.pca.PerPCA(2, 3, step_size=0.1, decay=0.5), TRIANGLE, 13, 13),
    "PerPCA random": (lambda: jf.pca.PerPCA(2, 3, step_size=0.1, start="random"), 12, 12, 12),
    "PerPCA polar": (
        lambda: jf.pca.PerPCA(1, (1, 2, 3, 0, 1), variant="polar"), TRIANGLE + 1, 6, 7,
    ),
    "VarProPerPCA": (lambda: jf.pca.VarProPerPCA(2, 3), TRIANGLE, 13, 12),
    "OneShot projector": (lambda: jf.pca.OneShot(2, 3), 30, 0, 12),
    "OneShot spectrum": (lambda: jf.pca.OneShot(1, 2, method="spectrum"), 18, 0, 6),
    "OneShot local_first": (lambda: jf.pca.OneShot(2, 3, method="local_first"), TRIANGLE, 0, 12),
    "Pooled": (lambda: jf.pca.Pooled(3), TRIANGLE, 0, 18),
    "Local": (lambda: jf.pca.Local(3), 0, 0, 0),
}  # fmt: skip


def test_costs_cover_every_algorithm():
    exported = {
        value
        for value in vars(jf.pca).values()
        if isinstance(value, type) and issubclass(value, jf.Algorithm)
    }
    assert {type(make()) for make, *_ in COSTS.values()} == exported


def traced(algorithm, clients, rounds, **arguments):
    """The history, from a run that is only traced: bits need nothing but shapes."""
    zeros = jax.eval_shape(
        lambda: jf.rollout(
            algorithm, clients, rounds=rounds, key=jax.random.key(0), **arguments
        )
    )
    return zeros.history


@pytest.mark.parametrize(("name", "dtype"), [(name, np.float32) for name in COSTS] + [("PerPCA automatic", np.float64)])
def test_bits_are_exact(name, dtype):
    make, first, up, down = COSTS[name]
    with jax.enable_x64(dtype is np.float64):
        history = jf.fit(make(), draw(dtype), rounds=4, key=jax.random.key(0)).history
    width, rounds = np.dtype(dtype).itemsize * 8, np.arange(1, 5)
    np.testing.assert_array_equal(history["bits_up"], width * (first + up * rounds))
    np.testing.assert_array_equal(history["bits_down"], width * down * rounds)
    assert history["bits_up"].dtype == history["bits_down"].dtype == np.float64
    assert (history["participants"] == CLIENTS).all()


def test_few_samples_travel_as_they_are(key):
    """A client with fewer samples than features sends those, rather than a matrix."""
    counts = (2, 3, 1)
    history = jf.fit(
        jf.pca.Pooled(2), draw(counts=counts), rounds=1, key=key
    ).history
    np.testing.assert_array_equal(history["bits_up"], [32 * max(counts) * FEATURES])


def test_bits_of_a_warm_start_are_those_of_what_it_still_sends(key):
    clients = draw()
    start = jf.fit(jf.pca.OneShot(2, 3), clients, rounds=1, key=key)
    for step_size, first in ((None, 1), (0.1, 0)):
        algorithm = jf.pca.PerPCA(2, 3, step_size=step_size)
        history = jf.fit(algorithm, clients, rounds=3, key=key, warm_start=start).history
        np.testing.assert_array_equal(history["bits_up"], 32 * (first + 12 * np.arange(1, 4)))


def test_bits_follow_the_payload(key):
    class Half(Bytes):
        """Sends the upper half of each number."""

        def encode(self, key, message, memory):
            return jax.tree.map(lambda x: x.astype(jnp.bfloat16), message), memory

        def decode(self, payload):
            return jax.tree.map(lambda x: x.astype(jnp.float32), payload)

    algorithm, clients = jf.pca.PerPCA(2, 3, step_size=0.1), draw()
    history = jf.fit(
        algorithm, clients, rounds=3, key=key, channel=(Half(), jf.channel.lossless())
    ).history
    rounds = np.arange(1, 4)
    np.testing.assert_array_equal(history["bits_up"], 16 * (TRIANGLE + 12 * rounds))
    np.testing.assert_array_equal(history["bits_down"], 32 * 12 * rounds)


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
