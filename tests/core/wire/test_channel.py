"""What messages go through, and what they cost to the bit."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from tests import helpers
from tests.helpers import gaussian

FEATURES, ROUNDS = 6, 10
COUNTS = (12, 9, 10, 12, 7)
CLIENTS, LONGEST = len(COUNTS), max(COUNTS)
solve = functools.partial(helpers.solve, rounds=ROUNDS)


class Bytes(jf.channel.Channel):
    """A message as raw bytes: a payload of another type, without loss."""

    settles = True

    def memory(self, message):
        return None

    def encode(self, key, message, memory):
        return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8), message), memory

    def decode(self, payload):
        return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.float32), payload)

    def differentiable(self, decoded, message, memory):
        return jf.channel.straight_through(decoded, message)

    def receive(self, decoded, last):
        return decoded


class Differences(jf.channel.Channel):
    """Sends what changed since the last message; either end adds it up."""

    cumulative = True

    def memory(self, message):
        return message

    def encode(self, key, message, memory):
        return jax.tree.map(jnp.subtract, message, memory), message

    def decode(self, payload):
        return payload

    def differentiable(self, decoded, message, memory):
        return decoded

    def receive(self, decoded, last):
        return jax.tree.map(jnp.add, decoded, last)

    def for_start(self):
        return jf.channel.lossless()


def by_hand(algorithm, clients, rounds, key):
    """Rounds of personalized PCA with full participation, without any channel."""
    data = jax.vmap(lambda one, i: algorithm.prepare(one, i, rounds))(clients.data, clients.ids)

    def mean(messages):
        return jax.tree.map(
            lambda x: (clients.weights.reshape(-1, *(x.ndim - 1) * [1]) * x).sum(0), messages
        )

    def keys(t):
        return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, t), clients.ids)

    client_keys = jax.vmap(lambda k: jax.random.split(k)[0])(keys(0))
    like = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), data)
    server_key = jax.random.fold_in(jax.random.fold_in(key, 0), jnp.uint32(2**32 - 1))
    server = algorithm.server_init(server_key, {}, like, None)
    local = jax.vmap(
        lambda k, one: algorithm.client_init(k, algorithm.downlink(server), one, None)
    )(client_keys, data)

    def step(carry, t):
        server, local = carry
        downlink = algorithm.downlink(server)
        uplink, local, diagnostics = jax.vmap(algorithm.client_step, (0, None, 0, 0))(
            keys(t), downlink, local, data
        )
        server, _ = algorithm.server_step(key, server, mean(uplink))
        return (server, local), mean(diagnostics)["objective"]

    return jax.lax.scan(step, (server, local), jnp.arange(1, rounds + 1))


def test_a_lossless_channel_changes_no_bit_of_a_run():
    algorithm = jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.05, start="random")
    clients = gaussian(COUNTS)
    solution = solve(algorithm, clients, channel=jf.channel.lossless())
    run = jax.jit(by_hand, static_argnames="rounds")
    (server, local), objective = run(algorithm, clients, ROUNDS, jax.random.key(0))
    np.testing.assert_array_equal(solution.server.shared, server.shared)
    np.testing.assert_array_equal(solution.local, local)
    np.testing.assert_array_equal(solution.history["objective"], objective)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [functools.partial(jf.pca.PerPCA, solver="gradient"), jf.pca.OneShot]
)
def test_an_exact_channel_changes_nothing(kind):
    algorithm, clients = kind(1, 1), gaussian(COUNTS)
    lossless = solve(algorithm, clients, channel=jf.channel.lossless())
    through_bytes = solve(algorithm, clients, channel=Bytes())
    chex.assert_trees_all_equal(through_bytes.result, lossless.result)
    chex.assert_trees_all_equal(through_bytes.history, lossless.history)


def test_lossless_keeps_every_bit_pattern(key):
    message = {"a": jnp.asarray([0.0, -0.0, jnp.nan, jnp.inf, 1e-45]), "b": jnp.arange(3)}
    channel = jf.channel.lossless()
    payload, memory = channel.encode(key, message, channel.memory(message))
    received = channel.receive(channel.decode(payload), memory)
    for sent, got in zip(jax.tree.leaves(message), jax.tree.leaves(received), strict=True):
        assert got.dtype == sent.dtype
        assert np.asarray(got).tobytes() == np.asarray(sent).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["up", "down"])
def test_memory_at_both_ends(way, x64):
    """Difference coding rounds a little, and only adds up if each end keeps its own memory."""
    algorithm, clients = (
        jf.pca.PerPCA(1, 1, solver="gradient", decay=0.7),
        gaussian(COUNTS, dtype=np.float64),
    )
    lossless = jf.channel.lossless()
    channel = {"up": jf.Wire(Differences(), lossless), "down": jf.Wire(lossless, Differences())}
    given = solve(algorithm, clients, channel=channel[way])
    wanted = solve(algorithm, clients, channel=lossless)
    chex.assert_trees_all_close(given.result, wanted.result, atol=1e-9)
    chex.assert_trees_all_close(given.history, wanted.history, rtol=1e-9)


class Choosy(Bytes):
    """Refuses runs of five clients."""

    def check(self, clients, participants, message):
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(message))
        if (len(clients), participants) == (5, 5):
            raise ValueError("channel: wanted other than five clients")


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [lambda x: x, jf.channel.difference, jf.channel.error_feedback])
def test_a_channel_may_refuse_a_run(wrapped, key):
    clients, algorithm = gaussian(COUNTS), jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.05)
    options = {"rounds": 1, "key": key, "channel": jf.Wire(wrapped(Choosy()), Bytes())}
    with pytest.raises(ValueError, match="other than five"):
        jf.fit(algorithm, clients, **options)
    assert jf.fit(algorithm, clients.take([0, 1, 2]), **options).rounds == 1


@pytest.mark.slow
def test_keys_of_other_generators_draw_the_same_however_clients_are_mapped():
    clients, algorithm = gaussian(COUNTS), jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.05)
    channel, key = jf.channel.difference(jf.channel.random_k(0.5)), jax.random.key(3, impl="rbg")

    def shared(key, backend):
        run = jf.rollout(algorithm, clients, rounds=2, key=key, channel=channel, backend=backend)
        return run.result.shared

    one = shared(key, jf.backend.vmap())
    np.testing.assert_allclose(shared(key, jf.backend.chunked(2)), one, atol=1e-5)
    both = jax.vmap(lambda key: shared(key, jf.backend.vmap()))(
        jnp.stack([key, *jax.random.split(key, 1)])
    )
    np.testing.assert_allclose(both[0], one, atol=1e-5)
    assert np.abs(both[1] - one).max() > 1e-3


class Broken(jf.channel.Channel):
    """Leaves messages as they are, except in the function that is broken."""

    function: str = eqx.field(static=True)
    returned: object = eqx.field(static=True)

    def given(self, function, value):
        if self.function != function:
            return value
        return self.returned(value) if callable(self.returned) else self.returned

    def bind(self, context):
        return self.given("bind", self)

    def for_start(self):
        return self.given("for_start", self)

    def memory(self, message):
        return self.given("memory", None)

    def encode(self, key, message, memory):
        return self.given("encode", (message, memory))

    def decode(self, payload):
        return self.given("decode", payload)

    def differentiable(self, decoded, message, memory):
        return self.given("differentiable", decoded)

    def receive(self, decoded, last):
        return self.given("receive", decoded)


@pytest.mark.parametrize(
    ("function", "returned", "said"),
    [
        ("memory", "text", "memory: wanted arrays, got 'text'"),
        ("encode", None, r"encode: wanted \(payload, memory\), got None"),
        ("encode", ("text", None), "encode: wanted arrays, got 'text'"),
        (
            "encode",
            lambda x: (x[0], jnp.ones(3)),
            "encode: wanted a memory like .* None, got ",
        ),
        ("decode", "text", "decode: wanted arrays, got 'text'"),
        ("differentiable", "text", "differentiable: wanted arrays, got 'text'"),
        (
            "decode",
            lambda x: jax.tree.map(lambda x: x[:1], x),
            r"receive\(decode\(payload\)\): wanted .*f32\[6,2\].* as was sent, got .*f32\[1,2\]",
        ),
        (
            "receive",
            lambda x: jax.tree.map(lambda x: x.astype("float16"), x),
            r"receive\(decode\(payload\)\): wanted .*f32\[6,2\].* as was sent, got .*f16\[6,2\]",
        ),
        ("receive", lambda x: [x], r"receive\(decode\(payload\)\): wanted .* as was sent, got \["),
    ],
)
@pytest.mark.parametrize("way", ["up", "down", "first"])
def test_a_channel_that_breaks_the_contract_is_named_before_anything_is_computed(
    function, returned, said, way
):
    lossless = jf.channel.lossless()
    ways = dict.fromkeys(("up", "down", "first"), lossless) | {way: Broken(function, returned)}
    with pytest.raises(ValueError, match=rf"^Broken\.{said}"):
        jax.eval_shape(
            solve, jf.pca.SubspaceIteration(2), gaussian(COUNTS), channel=jf.Wire(**ways)
        )


AROUND = {
    "difference": jf.channel.difference,
    "chain": jf.channel.chain,
    "masks": lambda inner: jf.channel.secure_sum(len(COUNTS), bits=24, bound=9.0, inner=inner),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    ("function", "returned", "said"),
    [
        ("encode", ("text", None), "encode: wanted arrays, got 'text'"),
        ("decode", lambda x: jax.tree.map(lambda x: x[:1], x), "receive.*: wanted .* as was sent"),
        ("bind", None, "bind: wanted a jaxfed.channel.Channel, got None"),
    ],
)
def test_a_broken_channel_inside_another_is_named(around, function, returned, said):
    lossless = jf.channel.lossless()
    wire = jf.Wire(AROUND[around](Broken(function, returned)), lossless, lossless)
    with pytest.raises(ValueError, match=rf"^Broken\.{said}"):
        jax.eval_shape(solve, jf.pca.SubspaceIteration(2), gaussian(COUNTS), channel=wire)


@pytest.mark.parametrize("way", ["up", "down"])
def test_for_start_must_return_a_channel(way):
    ways = dict.fromkeys(("up", "down"), jf.channel.lossless())
    with pytest.raises(ValueError, match=r"^Broken\.for_start: wanted a .*Channel, got 'sign'"):
        jf.Wire(**ways | {way: Broken("for_start", "sign")})


# --- bits: their exact numbers for every algorithm are in test_contract.py -----------------------

# Numbers in the first message of `PerPCA(1, 1, solver="gradient")`: two components.
FIRST = 2 * FEATURES


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fit", "rollout"])
def test_bits_of_single_precision(way, key):
    algorithm, clients = jf.pca.PerPCA(1, 1, solver="gradient", decay=0.5), gaussian(COUNTS)
    if way == "fit":
        history = jf.fit(algorithm, clients, rounds=ROUNDS, key=key).history
        assert history["bits_up"].dtype == history["bits_down"].dtype == np.float64
    else:
        history = solve(algorithm, clients, channel=jf.channel.lossless()).history
    rounds = np.arange(1, ROUNDS + 1)
    np.testing.assert_array_equal(history["bits_up"], 32 * (FIRST + 1 + 7 * rounds))
    np.testing.assert_array_equal(history["bits_down"], 32 * 7 * rounds)


def test_few_samples_are_sent_as_they_are(key):
    """A client with fewer samples than features sends those, rather than a matrix."""
    counts = (2, 3, 1)
    history = jf.fit(jf.pca.Pooled(2), gaussian(counts), rounds=1, key=key).history
    np.testing.assert_array_equal(history["bits_up"], [32 * max(counts) * FEATURES])


def test_a_warm_start_sends_no_second_moment(key):
    """The largest eigenvalue for the automatic step, but no second moment."""
    start = jf.Personalized(np.eye(FEATURES, 1), None)
    history = jf.fit(
        jf.pca.PerPCA(1, 1, solver="gradient"),
        gaussian(COUNTS),
        rounds=3,
        key=key,
        warm_start=start,
    ).history
    np.testing.assert_array_equal(history["bits_up"], 32 * (1 + 6 * np.arange(1, 4)))


def test_bits_are_those_of_the_payload(key):
    class Half(Bytes):
        """Sends the upper half of each number."""

        def encode(self, key, message, memory):
            return jax.tree.map(lambda x: x.astype(jnp.bfloat16), message), memory

        def decode(self, payload):
            return jax.tree.map(lambda x: x.astype(jnp.float32), payload)

    algorithm, clients = jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.1), gaussian(COUNTS)
    history = jf.fit(
        algorithm,
        clients,
        rounds=3,
        key=key,
        channel=jf.Wire(Half(), jf.channel.lossless(), jf.channel.lossless()),
    ).history
    rounds = np.arange(1, 4)
    np.testing.assert_array_equal(history["bits_up"], 32 * FIRST + 16 * 6 * rounds)
    np.testing.assert_array_equal(history["bits_down"], 32 * 6 * rounds)


@pytest.mark.slow
def test_bits_stay_exact_beyond_single_precision(key):
    """2^24 bits are soon sent; the count must not stop there."""
    rng = np.random.default_rng(0)
    clients = jf.Clients.from_samples(rng.normal(size=(1, 2, 3001)).astype(np.float32))
    algorithm = jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.1, start="random")
    rounds = 400
    history = jf.fit(algorithm, clients, rounds=rounds, key=key).history
    wanted = 32 * 3001 * np.arange(1, rounds + 1)
    assert wanted[-1] > 2**24
    np.testing.assert_array_equal(history["bits_up"], wanted)


@pytest.mark.parametrize(
    "channel", [None, "lossless", 2 * (jf.channel.lossless(),), 3 * (jf.channel.lossless(),)]
)
def test_only_channels_are_accepted(channel, key):
    with pytest.raises(ValueError, match=r"^channel: wanted a channel, or jf\.Wire\(up, down\)"):
        jf.fit(jf.pca.Local(1), gaussian(COUNTS), rounds=1, key=key, channel=channel)


@pytest.mark.parametrize("name", ["up", "down", "first"])
def test_a_wire_is_made_of_channels(name):
    channels = dict.fromkeys(("up", "down", "first"), jf.channel.sign()) | {name: "sign"}
    with pytest.raises(ValueError, match=rf"^{name}: wanted one of jaxfed.channel, got 'sign'"):
        jf.Wire(**channels)


# --- the exchange before the rounds --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channel", "up", "down"),
    [
        (jf.channel.quantize(3), 8 * FIRST + 32, 8 * 6 + 32),
        (jf.channel.difference(jf.channel.quantize(3)), 8 * FIRST + 32, 8 * 6 + 32),
        (jf.Wire(jf.channel.sign(), jf.channel.lossless()), 8 * FIRST + 32, 32 * 6),
        (jf.Wire(jf.channel.lossless(), jf.channel.quantize(3)), 32 * FIRST, 8 * 6 + 32),
        (
            jf.Wire(jf.channel.quantize(3), jf.channel.lossless(), jf.channel.cast("bfloat16")),
            16 * FIRST,
            16 * 6,
        ),
    ],
)
def test_the_start_is_a_message_too(channel, up, down, key):
    algorithm, clients = jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.05), gaussian(COUNTS)
    history = jf.fit(algorithm, clients, rounds=3, key=key, channel=channel).history
    per_round = np.diff(history["bits_up"])[0]
    assert history["bits_up"][0] - per_round == up
    assert history["bits_down"][0] == down


def test_a_start_channel_with_memory_is_refused(key):
    lossless = jf.channel.lossless()
    difference = jf.channel.difference(jf.channel.quantize(3))
    with pytest.raises(ValueError, match=r"^channel: wanted for the start one without memory"):
        channel = jf.Wire(lossless, lossless, difference)
        jf.fit(
            jf.pca.PerPCA(1, 1, solver="gradient"),
            gaussian(COUNTS),
            rounds=1,
            key=key,
            channel=channel,
        )


# --- differences where some are absent -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("channel", [Differences(), jf.channel.difference(jf.channel.top_k(1.0))])
def test_differences_of_the_present_add_up_to_everybodys_mean(channel, x64):
    """The server has the mean of every client's last message, whoever is absent (EF21-PP)."""

    class Report(jf.Algorithm):
        """Clients send a number that changes from round to round; the server keeps the mean."""

        def server_init(self, key, first, like, warm_start):
            return jnp.zeros(2)

        def downlink(self, server):
            return server

        def client_init(self, key, downlink, data, warm_start):
            return jnp.zeros(())

        def client_step(self, key, downlink, local, data):
            message = {"frame": jnp.stack([data.count * (local + 1), local]), "one": local}
            return message, local + 1, {"objective": local}

        def server_step(self, key, server, uplink):
            # A scalar is sent like everything else.
            return jnp.append(uplink["frame"][:1], uplink["one"]), {}

    clients = gaussian(COUNTS, dtype=np.float64)
    present = np.array([[1, 0, 1, 0, 0], [0, 0, 0, 1, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 1]], bool)
    lossless = jf.channel.lossless()
    last, steps, servers = np.zeros((CLIENTS, 2)), np.zeros(CLIENTS), []
    for row in present:
        message = np.stack([np.array(COUNTS) * (steps + 1), steps], axis=1)
        last = np.where(row[:, None], message, last)
        steps += row
        servers.append(last.mean(axis=0))
    for rounds in range(1, 5):
        solution = jf.fit(
            Report(),
            clients,
            rounds=rounds,
            key=jax.random.key(0),
            channel=jf.Wire(channel, lossless),
            participation=jf.participation.mask(present),
        )
        np.testing.assert_allclose(solution.server, servers[rounds - 1], rtol=1e-12)


def test_a_returning_client_receives_what_it_missed_and_it_is_counted(key):
    present = np.array([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    clients = jf.Clients.from_samples(np.random.default_rng(0).normal(size=(5, 9, 40)).astype("f"))
    algorithm = jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.05)
    channel = jf.Wire(jf.channel.lossless(), jf.channel.difference(jf.channel.quantize(3)))
    run = functools.partial(jf.fit, algorithm, clients, key=key, channel=channel)
    away = run(rounds=16, participation=jf.participation.mask(np.resize(present, (16, 5))))
    message, whole = 3 * 80 + 32, 32 * 80
    received = [8 * 80 + 32]  # the first
    received += [message * n / 5 for n in (4, 4, 5 + 2)]
    np.testing.assert_allclose(np.cumsum(received), away.history["bits_down"][:4], rtol=1e-12)
    # A client that missed more than the whole message costs receives the whole message.
    long = np.ones((16, 5), bool)
    long[1:14, 2] = False
    back = run(rounds=16, participation=jf.participation.mask(long)).history["bits_down"]
    np.testing.assert_allclose(np.diff(back)[12], message * 4 / 5, rtol=1e-12)
    np.testing.assert_allclose(np.diff(back)[13], (message * 4 + whole) / 5, rtol=1e-12)
