"""Compressors: packed to the byte, unbiased where they say so; memory makes them converge."""

import functools
import math
import os
import subprocess
import sys

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxfed as jf
from jaxfed.core.wire.entropy import decode_symbols, encode_symbols
from jaxfed.core.wire.packing import grouping, pack_symbols, unpack_symbols
from tests import helpers
from tests.helpers import gaussian

FEATURES, CLIENTS, ROUNDS = 6, 5, 40
COUNTS = (20,) * CLIENTS
solve = functools.partial(helpers.solve, rounds=ROUNDS)

LOSSY = {
    "2 bits": lambda: jf.channel.quantize(2, contraction=2.0),
    "3 bits": lambda: jf.channel.quantize(3),
    "8 bits": lambda: jf.channel.quantize(8),
    "short scale": lambda: jf.channel.quantize(3, scale_bits=16),
    "5 symbols": lambda: jf.channel.quantize(levels=2),
    "nearest": lambda: jf.channel.quantize(levels=1, rounding="nearest"),
    "entropy": lambda: jf.channel.quantize(levels=2, rounding="nearest", coding="entropy"),
    "frobenius": lambda: jf.channel.quantize(6, norm="frobenius"),
    "sign": jf.channel.sign,
    "top": lambda: jf.channel.top_k(0.3),
    "random": lambda: jf.channel.random_k(0.3),
    "float16": lambda: jf.channel.cast("float16"),
    "bfloat16": lambda: jf.channel.cast("bfloat16"),
    "chain": lambda: jf.channel.chain(jf.channel.top_k(0.3), jf.channel.quantize(4)),
}


class EightBits(jf.channel.Payload):
    values: jax.Array


class Float8(jf.channel.Compressor):
    """A compressor as a user would write it, with public names only."""

    def compress(self, key, array):
        return EightBits(array.shape, array.dtype, array.astype("float8_e4m3fn"))

    def decompress(self, payload):
        return payload.values.astype(payload.dtype)

    def mean(self, array):
        return array


class Broken(Float8):
    """A compressor, broken in one function."""

    function: str = eqx.field(static=True)
    returned: object = eqx.field(static=True)

    def compress(self, key, array):
        payload = super().compress(key, array)
        return self.returned(payload) if self.function == "compress" else payload

    def decompress(self, payload):
        array = super().decompress(payload)
        return self.returned(array) if self.function == "decompress" else array

    def mean(self, array):
        return self.returned(array) if self.function == "mean" else array


@pytest.mark.parametrize(
    ("function", "returned", "said"),
    [
        ("compress", lambda x: x.values, r"compress: wanted a jaxfed.channel.Payload, got "),
        ("compress", lambda x: EightBits(x.shape, x.dtype, "text"), "compress: .* got 'text'"),
        ("compress", lambda x: EightBits((3,), x.dtype, x.values), r"compress: .* got f32\[3\]"),
        ("decompress", lambda x: "text", "decompress: wanted arrays, got 'text'"),
        (
            "decompress",
            lambda x: x.astype("float16"),
            r"decompress: wanted f32\[6,2\] as was sent, got f16\[6,2\]",
        ),
        ("mean", lambda x: x.sum(), r"mean: wanted f32\[6,2\], got f32\[\]"),
    ],
)
@pytest.mark.parametrize(
    "around",
    [
        lambda x: x,
        jf.channel.difference,
        lambda x: jf.channel.chain(x, jf.channel.sign()),
    ],
    ids=["alone", "difference", "chain"],
)
def test_a_compressor_that_breaks_the_contract_is_named(function, returned, said, around):
    channel = around(Broken(function, returned))
    with pytest.raises(ValueError, match=rf"^Broken\.{said}"):
        jax.eval_shape(solve, jf.pca.SubspaceIteration(2), gaussian(COUNTS), channel=channel)


class Halved(jf.channel.Channel):
    """A channel as a user would write it, which is not a compressor."""

    def memory(self, message):
        return None

    def encode(self, key, message, memory):
        return jax.tree.map(lambda x: x.astype("bfloat16"), message), memory

    def decode(self, payload):
        return payload

    def differentiable(self, decoded, message, memory):
        return jf.channel.straight_through(
            decoded, jax.tree.map(lambda x: (x / 2).astype("bfloat16"), message)
        )

    def receive(self, decoded, last):
        return jax.tree.map(lambda x: x.astype("float32"), decoded)


LOSSY["somebody else's"] = Float8
LOSSY["somebody else's in a chain"] = lambda: jf.channel.chain(jf.channel.top_k(0.3), Float8())
# XLA converts eight-bit floats by way of float16, which some processors lack.
IN_HALF_PRECISION = {"float16", "somebody else's", "somebody else's in a chain"}
every_compressor = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.float16) if n in IN_HALF_PRECISION else n for n in LOSSY],
)


@jax.jit
def encoded(channel, key, message):
    return channel.encode(key, message, channel.memory(message))[0]


@jax.jit
def arrived_of(channel, payload):
    return channel.decode(payload)


pack = jax.jit(pack_symbols, static_argnums=1)
unpack = jax.jit(unpack_symbols, static_argnums=(1, 2))


@given(
    seed=st.integers(0, 2**20),
    count=st.sampled_from([1, 7, 8, 9, 23]),
    symbols=st.sampled_from([2, 3, 5, 7, 9, 15, 63, 255]),
)
def test_packing_round_trips_and_wastes_no_byte(seed, count, symbols):
    codes = np.random.default_rng(seed).integers(0, symbols, count).astype(np.uint8)
    packed = pack(jnp.asarray(codes), symbols)
    together, width = grouping(symbols)
    groups = math.ceil(len(codes) / together)
    assert packed.nbytes == math.ceil(groups * width / 8)
    np.testing.assert_array_equal(unpack(packed, len(codes), symbols), codes)


def test_groups_of_symbols():
    assert [grouping(s) for s in (2, 3, 5, 7, 15, 255)] == [
        (1, 1),
        (5, 8),
        (3, 7),
        (1, 3),
        (1, 4),
        (1, 8),
    ]


@every_compressor
def test_bits_are_the_bytes_of_the_payload(name, key, tmp_path):
    """What a message costs is what it takes on disk."""
    message = {"frame": jax.random.normal(key, (50, 5)), "one": jnp.float32(7), "id": jnp.int32(3)}
    channel = LOSSY[name]()
    payload = encoded(channel, key, message)
    (tmp_path / "payload").write_bytes(jf.channel.to_bytes(payload))
    assert 8 * (tmp_path / "payload").stat().st_size == jf.channel.bits(payload)
    if name != "entropy":  # where not all of an array travels
        raw = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(payload)]
        assert jf.channel.to_bytes(payload) == b"".join(raw)

    decoded = channel.decode(payload)
    sent = jf.channel.to_bytes(payload)
    read = jf.channel.from_bytes(sent, jax.eval_shape(lambda: payload))
    assert jf.channel.to_bytes(read) == sent
    chex.assert_trees_all_equal(channel.decode(read), decoded)
    for wrong in (sent[:-1], sent + b"x"):
        with pytest.raises(ValueError, match="data: wanted"):
            jf.channel.from_bytes(wrong, payload)
    chex.assert_trees_all_equal_shapes_and_dtypes(decoded, message)
    assert decoded["one"] == 7 and decoded["id"] == 3  # scalars are never compressed


@pytest.mark.parametrize(
    ("name", "entry", "scale"),
    [
        ("2 bits", 8 / 5, 32),
        ("3 bits", 3, 32),
        ("8 bits", 8, 32),
        ("5 symbols", 7 / 3, 32),
        ("short scale", 3, 16),
    ],
)
def test_bits_of_an_entry(name, entry, scale, key):
    payload, _ = LOSSY[name]().encode(key, jnp.ones((50, 12)), ())
    assert jf.channel.bits(payload) == 50 * 12 * entry + scale


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.float16)])
def test_rounding_of_half_precision_is_unbiased(dtype, key):
    """Rounded in half precision itself, a position near a level loses its chance of the next."""
    step = float(jnp.finfo(dtype).eps)
    values = jnp.asarray([3.0, 1 + step, 2 - step, -2.6875, 0.0078125, -0.40625], dtype)
    message = jnp.tile(values, 4000)  # levels are the whole numbers, and exact in the type
    channel = jf.channel.quantize(3)

    @jax.vmap  # not compiled as a whole, which may keep more digits than the type has
    def sent(key):
        told = channel.decode(channel.encode(key, message, ())[0])
        return told.astype(jnp.float32).reshape(4000, -1).mean(0)

    means = np.asarray(sent(jax.random.split(key, 100)), np.float64)
    exact = np.asarray(values, np.float64)
    chance = exact - np.floor(exact)
    error = np.sqrt(chance * (1 - chance) / (100 * 4000))
    # Probabilities are multiples of 2^-16.
    assert (np.abs(means.mean(axis=0) - exact) <= 4 * error + 2**-17).all()


encode = jax.jit(encode_symbols, static_argnums=1)
decode = jax.jit(decode_symbols, static_argnums=(1, 2))


@pytest.mark.parametrize(
    ("count", "kinds"), [(1, 2), (7, 5), (500, 3), (1025, 5), (2500, 5), (3000, 255)]
)
def test_entropy_coding_round_trips_at_the_least_length(count, kinds):
    rng = np.random.default_rng(count)
    for spread in (0.01, 0.3, 1.0, 100.0):  # from nearly one symbol to nearly uniform
        codes = rng.choice(kinds, count, p=rng.dirichlet(np.full(kinds, spread))).astype(np.uint8)
        stream = encode(jnp.asarray(codes), kinds)
        np.testing.assert_array_equal(decode(stream, count, kinds), codes)
        shares = np.bincount(codes, minlength=kinds) / count
        entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()
        written = 8 * len(jf.channel.to_bytes(stream))
        assert written == jf.channel.bits(stream)
        # The fixed cost: the frequencies, and for each lane a word and its rounding.
        lanes = math.ceil(count / 1024)
        known = 16 * (kinds - 1) + 32 * lanes
        # Frequencies are multiples of 2^-12 and at least one.
        assert count * entropy - 16 * lanes <= written - known + 32 * lanes
        assert written <= known + count * entropy + count * (kinds / 2**12 * 3 + 1e-3) + 16


@pytest.mark.slow
def test_decoding_needs_only_the_payload(key):
    """What follows the words that count is never read."""
    channel, x = LOSSY["entropy"](), jax.random.normal(key, (40, 30))
    payload = encoded(channel, key, x)
    words = payload.stream.words
    sent = int(words.used)
    assert 0 < sent < len(words.words)
    wrong = eqx.tree_at(lambda p: p.stream.words.words, payload, words.words.at[sent:].set(0xABCD))
    np.testing.assert_array_equal(channel.decode(wrong), channel.decode(payload))
    fixed = jf.channel.quantize(levels=2, rounding="nearest")
    np.testing.assert_array_equal(channel.decode(payload), fixed.decode(encoded(fixed, key, x)))


class Logged(jf.channel.Channel):
    """Writes each message to the log, as the bytes that travel."""

    inner: jf.channel.Channel
    log: list = eqx.field(static=True)

    def memory(self, message):
        return self.inner.memory(message)

    def encode(self, key, message, memory):
        payload, memory = self.inner.encode(key, message, memory)
        jax.debug.callback(lambda p: self.log.append(len(jf.channel.to_bytes(p))), payload)
        return payload, memory

    def decode(self, payload):
        return self.inner.decode(payload)

    def differentiable(self, decoded, message, memory):
        return self.inner.differentiable(decoded, message, memory)

    def receive(self, decoded, last):
        return self.inner.receive(decoded, last)


@pytest.mark.slow
def test_a_run_counts_the_bytes_written():
    """Messages of varying lengths in both directions; absent clients write none."""
    rng = np.random.default_rng(0)
    clients = jf.Clients.from_samples(rng.normal(size=(CLIENTS, 80, 60)).astype(np.float32))
    up, down = Logged(LOSSY["entropy"](), []), Logged(LOSSY["entropy"](), [])

    @jax.jit
    def run(clients):
        return jf.rollout(
            jf.pca.SubspaceIteration(3),
            clients,
            rounds=4,
            key=jax.random.key(0),
            channel=jf.Wire(up, down, jf.channel.lossless()),
            participation=jf.participation.uniform(4),
            backend=jf.backend.chunked(2),
        )

    history = run(clients).history
    jax.effects_barrier()
    # The last broadcast is for a round that does not take place.
    assert len(up.log) == 4 * 4 and len(down.log) == 4
    assert len(set(up.log)) > 4
    np.testing.assert_allclose(history["bits_up"][-1], 8 * sum(up.log) / CLIENTS, rtol=1e-6)
    # The first broadcast is from before the rounds, and exact.
    broadcast = 32 * 180 + 8 * sum(down.log[:-1]) * 4 / CLIENTS
    np.testing.assert_allclose(history["bits_down"][-1], broadcast, rtol=1e-6)


@pytest.mark.parametrize("name", ["3 bits", "8 bits", "5 symbols", "frobenius", "random"])
def test_unbiased_and_within_the_variance_bound(name, key):
    """Draws enough that a bias of one hundredth of a level would be seen."""
    channel = LOSSY[name]()
    x = jax.random.normal(key, (8,))
    draws = 100_000

    @jax.jit
    @jax.vmap
    def through(key):
        return channel.decode(channel.encode(key, x, ())[0])

    values = np.asarray(through(jax.random.split(key, draws)), np.float64)
    error = values.std(axis=0) / np.sqrt(draws)
    assert (np.abs(values.mean(axis=0) - x) <= 4 * error + 1e-6).all()
    spread = np.square(values - x).sum(axis=1).mean()
    if name == "random":
        assert spread <= (1 / 0.3 - 1) * np.square(x).sum() * 1.05
    else:
        scale = np.linalg.norm(x) if name == "frobenius" else np.abs(x).max()
        # Rounding up or down has a variance of at most a quarter.
        assert spread <= len(x) * (scale / channel.levels) ** 2 / 4
        assert np.abs(values - x).max() <= scale / channel.levels * (1 + 1e-6)


@pytest.mark.slow
def test_zeros_stay_zero_and_the_largest_entry_exact(key):
    for bits in (2, 3, 8):
        channel = jf.channel.quantize(bits)
        assert not channel.decode(channel.encode(key, jnp.zeros(9), ())[0]).any()
        x = jnp.array([0.1, -5.0, 2.0])
        assert channel.decode(channel.encode(key, x, ())[0])[1] == -5.0


def test_the_scale_bounds_double_precision_entries(key, x64):
    x = jnp.array([1 + 1e-12, 0.5])  # above the nearest number of single precision
    payload, _ = jf.channel.quantize(3).encode(key, x, ())
    assert payload.scale.dtype == jnp.float32
    assert payload.scale.astype(jnp.float64) >= x[0]


def test_top_k_keeps_the_largest(key):
    x = jnp.array([0.1, -5.0, 2.0, 0.3, -0.2, 4.0])
    kept = jf.channel.top_k(0.5).decode(jf.channel.top_k(0.5).encode(key, x, ())[0])
    np.testing.assert_array_equal(kept, [0, -5, 2, 0, 0, 4])


def test_sign_has_the_mean_magnitude(key):
    x = jnp.array([1.0, -3.0, 2.0, 0.0])
    channel = jf.channel.sign()
    np.testing.assert_allclose(channel.decode(channel.encode(key, x, ())[0]), [1.5, -1.5, 1.5, 1.5])


@pytest.mark.parametrize(
    "name", ["3 bits", "5 symbols", "nearest", "entropy", "top", "bfloat16", "chain"]
)
def test_differences_forget_nothing(name, key):
    """A message that stays the same arrives exactly after some rounds, at both ends alike."""
    channel = jf.channel.difference(LOSSY[name]())
    message = jax.random.normal(key, (40, 3))
    sender = receiver = channel.memory(jnp.zeros_like(message))

    @jax.jit
    def send(key, sender, receiver):
        payload, sender = channel.encode(key, message, sender)
        return sender, channel.receive(channel.decode(payload), receiver)

    for round_key in jax.random.split(key, 80):
        sender, receiver = send(round_key, sender, receiver)
        np.testing.assert_array_equal(sender, receiver)
    assert jnp.abs(receiver - message).max() <= 1e-5


def test_one_level_needs_a_contraction(key):
    """At one level the error in the largest entry is as large as that entry."""
    message = jax.random.normal(key, (500, 5))

    def left(contraction):
        channel = jf.channel.difference(jf.channel.quantize(2, contraction=contraction))
        memory = channel.memory(jnp.zeros_like(message))
        for round_key in jax.random.split(key, 30):
            _, memory = channel.encode(round_key, message, memory)
        return jnp.linalg.norm(memory - message) / jnp.linalg.norm(message)

    assert left(2.0) < 0.01
    assert left(1.0) > 0.5


def test_error_feedback_loses_nothing_in_the_sum(key):
    channel = jf.channel.error_feedback(jf.channel.top_k(0.2))
    messages = jax.random.normal(key, (60, 20))
    memory, total = channel.memory(messages[0]), jnp.zeros(20)
    for message in messages:
        payload, memory = channel.encode(key, message, memory)
        total += channel.receive(channel.decode(payload), None)
    chex.assert_trees_all_close(total + memory, messages.sum(0), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "3 bits",
        "bfloat16",
        *(x for x in ("5 symbols", "top")),
    ],
)
def test_runs_with_differences_end_where_lossless_ones_do(name, x64):
    """So many rounds take the slowest, the largest entries, to 2e-11, whichever way it gets there.

    Iterates of different processors part (another entry is the largest, another number is rounded
    up) and meet again: that figure is the worst of thirty runs on data changed by 3e-7.
    """
    algorithm, clients = jf.pca.PerPCA(1, 1, solver="gradient"), gaussian(COUNTS, dtype=np.float64)
    wanted = solve(algorithm, clients, channel=jf.channel.lossless(), rounds=1200)
    given = solve(algorithm, clients, channel=jf.channel.difference(LOSSY[name]()), rounds=1200)
    chex.assert_trees_all_close(
        given.history["objective"][-1], wanted.history["objective"][-1], rtol=1e-9
    )
    assert given.history["bits_up"][-1] < 0.6 * wanted.history["bits_up"][-1]


@pytest.mark.slow
def test_without_memory_coarse_messages_do_not_converge():
    algorithm, clients = jf.pca.PerPCA(1, 1, solver="gradient"), gaussian(COUNTS)

    def restless(channel):
        history = solve(algorithm, clients, channel=channel, rounds=400).history
        return history["objective"][-100:].std()

    coarse = jf.channel.quantize(3)
    assert restless(coarse) > 1e-2
    assert restless(jf.channel.difference(coarse)) < 1e-4


@pytest.mark.slow
def test_differences_start_from_what_arrived_before_the_rounds():
    """Then both ends hold it already, and the first round has nothing new to say."""

    class Still(jf.Algorithm):
        def first_message(self, key, data, warm_start):
            return 3.7 * jnp.ones((FEATURES, 2))

        def server_init(self, key, first, like, warm_start):
            return first

        def downlink(self, server):
            return server

        def client_init(self, key, downlink, data, warm_start):
            return None

        def client_step(self, key, downlink, local, data):
            return 3.7 * jnp.ones((FEATURES, 2)), local, {"objective": data.count}

        def server_step(self, key, server, uplink):
            return uplink, {}

    channel = jf.channel.difference(jf.channel.quantize(2))
    for rounds in (1, 3):
        solution = solve(Still(), gaussian(COUNTS), channel=channel, rounds=rounds)
        np.testing.assert_allclose(solution.server, 3.7, rtol=1e-6)


@pytest.mark.parametrize("name", ["3 bits", "2 bits", "8 bits", "random", "frobenius", "entropy"])
def test_derivatives_are_those_of_the_mean_of_what_arrives(name, key, x64):
    """Exactly, where rounding is unbiased: every draw has the derivative of the mean over draws."""
    channel = LOSSY[name]()
    x, direction = jax.random.normal(key, (2, 12, 4))
    wanted = direction / getattr(channel, "contraction", 1.0)

    def through(x, key):
        memory = channel.memory(x)
        payload, _ = channel.encode(key, x, memory)
        return channel.differentiable(channel.decode(payload), x, memory)

    @jax.jit
    def derived(key):
        value, change = jax.jvp(lambda x: through(x, key), (x,), (direction,))
        _, back = jax.vjp(lambda x: through(x, key), x)
        payload, _ = channel.encode(key, x, channel.memory(x))
        return change, back(direction)[0], value, channel.decode(payload)

    for draw_key in jax.random.split(key, 3):
        change, back, value, arrived = derived(draw_key)
        np.testing.assert_allclose(change, wanted, rtol=1e-12)
        np.testing.assert_allclose(back, wanted, rtol=1e-12)
        np.testing.assert_array_equal(value, arrived)


class Descent(jf.Algorithm):
    """Steps towards the mean of all samples, a run that compiles quickly."""

    step_size: jax.Array

    def check(self, clients, warm_start):
        pass

    def server_init(self, key, first, like, warm_start):
        return jnp.ones(like.values.shape[-1:], like.values.dtype)

    def downlink(self, server):
        return server

    def client_init(self, key, downlink, data, warm_start):
        return None

    def client_step(self, key, downlink, local, data):
        away = downlink - data.values.sum(0) / data.count
        return downlink - self.step_size * away, local, {"objective": jnp.sum(away**2)}

    def server_step(self, key, server, uplink):
        return uplink, {}


@jax.jit
def slopes(channel, keys):
    """The derivative of the last objective by the step size, for each of several draws."""
    clients = gaussian(COUNTS)

    def last(step, key):
        run = jf.rollout(Descent(step), clients, rounds=5, key=key, channel=channel)
        return run.history["objective"][-1]

    return jax.vmap(jax.grad(last), (None, 0))(0.1, keys)


@pytest.mark.slow
@every_compressor
@pytest.mark.parametrize("memory", ["none", "difference", "error_feedback"])
def test_every_lossy_run_has_a_derivative(name, memory, key):
    """Where little is lost, the mean over draws is near that of the run without loss."""
    inner, keys = LOSSY[name](), jax.random.split(key, 32)
    given = slopes(inner if memory == "none" else getattr(jf.channel, memory)(inner), keys)
    assert jnp.isfinite(given).all() and (given != 0).any()
    if name in ("8 bits", "bfloat16", "float16") and memory != "error_feedback":
        exact = slopes(jf.channel.lossless(), keys[:1])
        error = given.std() / len(keys) ** 0.5
        assert abs(given.mean() - exact[0]) <= 4 * error + 0.05 * abs(exact[0])


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: jf.channel.quantize(1), "bits"),
        (lambda: jf.channel.quantize(9), "bits"),
        (lambda: jf.channel.quantize(3.0), "bits"),
        (lambda: jf.channel.quantize(), "bits"),
        (lambda: jf.channel.quantize(3, levels=2), "bits"),
        (lambda: jf.channel.quantize(levels=0), "levels"),
        (lambda: jf.channel.quantize(levels=200), "levels"),
        (lambda: jf.channel.quantize(3, norm="l1"), "norm"),
        (lambda: jf.channel.quantize(3, rounding="up"), "rounding"),
        (lambda: jf.channel.quantize(3, coding="huffman"), "coding"),
        (lambda: jf.channel.quantize(3, scale_bits=8), "scale_bits"),
        (lambda: jf.channel.quantize(3, contraction=0.5), "contraction"),
        (lambda: jf.channel.quantize(3, contraction=float("nan")), "contraction"),
        (lambda: jf.channel.top_k(0), "fraction"),
        (lambda: jf.channel.top_k(1.5), "fraction"),
        (lambda: jf.channel.random_k(-0.1), "fraction"),
        (lambda: jf.channel.cast("int8"), "dtype"),
        (lambda: jf.channel.chain(), "compressors"),
        (lambda: jf.channel.chain(jf.channel.gaussian(1.0, 1.0)), "compressor"),
        (lambda: jf.channel.difference(jf.channel.difference(jf.channel.sign())), "compressor"),
        (lambda: jf.channel.chain(jf.channel.error_feedback(jf.channel.sign())), "compressor"),
        (lambda: jf.channel.error_feedback("3 bits"), "compressor"),
    ],
)
def test_bad_settings_are_refused(make, argument):
    with pytest.raises(ValueError, match=rf"^{argument}.*(got|at least)"):
        make()


@pytest.mark.slow
def test_a_chain_of_a_chain_is_the_longer_chain(key):
    top, coarse, half = jf.channel.top_k(0.5), jf.channel.quantize(8), jf.channel.cast("bfloat16")
    random = jf.channel.random_k(0.7)
    x = np.asarray(jax.random.normal(key, (40, 3)))
    kept = np.sort(np.abs(x).reshape(-1))[-60]
    for nested, flat in [
        ([jf.channel.chain(top, half), coarse], [top, half, coarse]),
        ([top, jf.channel.chain(random, half), coarse], [top, random, half, coarse]),
        (
            [jf.channel.chain(jf.channel.chain(top, random), half), coarse],
            [top, random, half, coarse],
        ),
    ]:
        payloads = [encoded(jf.channel.chain(*some), key, x) for some in (nested, flat)]
        assert jf.channel.bits(payloads[0]) == jf.channel.bits(payloads[1])
        decoded = np.asarray(arrived_of(jf.channel.chain(*nested), payloads[0]))
        sent = decoded != 0
        assert 20 < sent.sum() <= 60 and (np.abs(x[sent]) >= kept).all()
        assert (np.sign(decoded) == np.sign(x))[sent].all()
    short = jf.channel.chain(jf.channel.chain(top, half), coarse)
    given = arrived_of(short, encoded(short, key, x))
    np.testing.assert_allclose(given, np.where(np.abs(x) >= kept, x, 0), atol=0.03)


@pytest.mark.parametrize(
    "after", [jf.channel.quantize(8), jf.channel.sign(), jf.channel.top_k(0.5)]
)
def test_one_byte_numbers_are_compressed_no_further(after, key):
    x = jax.random.normal(key, (8, 3))
    bytes_alone, further = (
        arrived_of(channel, encoded(channel, key, x))
        for channel in (jf.channel.chain(Float8()), jf.channel.chain(Float8(), after))
    )
    np.testing.assert_array_equal(further, bytes_alone)


def test_channels_that_are_not_compressors_can_be_chained(key):
    channel = Halved()
    message = {"frame": jax.random.normal(key, (8, 3)), "one": jnp.float32(7)}
    rounded = message["frame"].astype("bfloat16").astype("float32")
    for made in (jf.channel.chain(jf.channel.top_k(1.0), channel), jf.channel.chain(channel)):
        payload = encoded(made, key, message)
        assert jf.channel.bits(payload) in (24 * 16 + 32, 24 * 32 + 32)
        np.testing.assert_array_equal(made.decode(payload)["frame"], rounded)

    feedback = jf.channel.error_feedback(channel)
    payload, memory = feedback.encode(key, message, feedback.memory(message))
    np.testing.assert_array_equal(memory["frame"], message["frame"] - rounded)

    made = jf.channel.difference(channel)
    sender = receiver = made.memory(jax.tree.map(jnp.zeros_like, message))
    for _ in range(3):
        payload, sender = made.encode(key, message, sender)
        receiver = made.receive(made.decode(payload), receiver)
        chex.assert_trees_all_equal(sender, receiver)
    np.testing.assert_allclose(receiver["frame"], message["frame"], atol=1e-6)
    slope = jax.grad(lambda x: made.compressor.through(key, x)[1].sum())(message["frame"])
    np.testing.assert_array_equal(slope, jnp.full((8, 3), 0.5))


def test_unsupported_uses_of_differences_are_refused(key):
    channel = jf.channel.difference(jf.channel.quantize(3))
    with pytest.raises(ValueError, match=r"^channel: .*LocalPower"):
        algorithm = jf.pca.LocalPower(2, alignment="sign")
        jf.fit(algorithm, gaussian(COUNTS), rounds=1, key=key, channel=channel)


ONE_CORE = """
import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp, jaxfed as jf

views = jf.gcca.Views.from_arrays(list(jax.random.normal(jax.random.key(0), (2, 16, 3))))
found = jf.fit(
    jf.gcca.MaxVar(2), views, rounds=1, key=jax.random.key(0), channel=jf.channel.quantize(3)
)
shared = found.result.shared
print(len(os.sched_getaffinity(0)), jnp.abs(shared.T @ shared - jnp.eye(2)).max() < 1e-5)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_a_multiple_of_eight_entries_on_one_core(environment):
    """Empty arrays in the packing used to keep decompositions beside it from being compiled."""
    ended = subprocess.run(
        [sys.executable, "-c", ONE_CORE],
        env=environment,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "1 True\n", ended.stderr


@pytest.mark.parametrize("memory", [jf.channel.difference, jf.channel.error_feedback])
@pytest.mark.parametrize(
    "inner", [jf.channel.random_k(0.25), jf.channel.chain(jf.channel.random_k(0.25))], ids=repr
)
def test_what_random_entries_lose_inside_memory_does_not_grow(memory, inner):
    """Scaled by the inverse fraction, each message would lose more than the one before."""
    channel = memory(inner)
    message = jnp.asarray(np.random.default_rng(0).normal(size=40), jnp.float32)

    def step(state, key):
        payload, state = channel.encode(key, message, state)
        return state, channel.decode(payload)

    keys = jax.random.split(jax.random.key(0), 60)
    last, decoded = jax.lax.scan(step, channel.memory(jnp.zeros_like(message)), keys)
    if channel.cumulative:
        np.testing.assert_allclose(last, message, atol=1e-5)
    else:
        np.testing.assert_allclose(decoded.mean(0), message, atol=0.5)
