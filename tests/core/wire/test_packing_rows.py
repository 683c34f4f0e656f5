"""What a TPU packs row by row is bit for bit what processors pack entry by entry."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxfed as jf
from jaxfed.core.wire import quantization as q
from jaxfed.core.wire.packing import grouping, pack_rows, pack_symbols, stays_in_rows, unpack_rows

WHOLE = st.tuples(st.integers(1, 127), st.integers(1, 3), st.lists(st.integers(1, 5), max_size=2))


@pytest.mark.slow
@given(WHOLE, st.integers(0, 99))
def test_rows_are_packed_into_the_same_bytes(case, seed):
    levels, times, rest = case
    symbols = 2 * levels + 1
    together, width = grouping(symbols)
    shape = (times * together * (8 if width < 8 else 1), *rest)
    assert stays_in_rows(shape, symbols)
    codes = np.random.default_rng(seed).integers(0, symbols, shape).astype(np.uint8)

    @jax.jit
    def both(codes):
        packed = pack_rows(codes, symbols)
        return packed, pack_symbols(codes.reshape(-1), symbols), unpack_rows(packed, shape, symbols)

    packed, wanted, unpacked = both(codes)
    np.testing.assert_array_equal(packed, wanted)
    np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.slow
@given(
    st.integers(1, 127),
    st.lists(st.integers(1, 24), min_size=1, max_size=3),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 99),
)
def test_messages_are(levels, shape, clients, nearest, seed):
    """Of any shape, none at all included, and what is made of them again."""
    shape, rng = tuple(shape), np.random.default_rng(seed)
    x = rng.normal(size=(clients, *shape)).astype(np.float32)
    peaks = np.max(np.abs(x), axis=tuple(range(1, x.ndim)))
    seeds = None if nearest else rng.integers(0, 2**32, (clients, 2)).astype(np.uint32)

    @jax.jit
    def packed(x, scales, seeds):
        ways = q._quantized_in_rows, q._quantized_in_turn
        return [jax.vmap(partial(way, levels=levels))(x, scales, seeds) for way in ways]

    rows, turn = packed(x, levels / peaks, seeds)
    np.testing.assert_array_equal(rows, turn)

    @jax.jit
    def restored(rows, steps):
        ways = q._restored_in_rows, q._restored_in_turn
        return [jax.vmap(partial(way, shape=shape, levels=levels))(rows, steps) for way in ways]

    again, turn = restored(rows, peaks / levels)
    np.testing.assert_array_equal(again, turn)
    assert np.all(np.abs(again - x) <= 1.001 * (peaks / levels).reshape(-1, *[1] * len(shape)))


def round_trip(channel, key, messages):
    def one(key, message):
        return channel.decode(channel.encode(key, message, None)[0])

    return jax.vmap(one)(jax.random.split(key, len(messages)), messages)


@pytest.mark.parametrize("bits", [3, 8])
def test_programs_for_tpus_leave_entries_where_they_are(bits, key):
    """And those for processors have them in turn."""
    messages = jax.ShapeDtypeStruct((5, 16, 3), jnp.float32)
    traced = jax.jit(partial(round_trip, jf.channel.quantize(bits))).trace(key, messages)
    for platform, moved in ("tpu", False), ("cpu", True), ("cuda", True):
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("tensor<5x48xf32>" in program) == moved, platform


def test_the_derivative_stays_straight_through(key):
    channel, message = jf.channel.quantize(3), jax.random.normal(key, (16, 3))

    def sent(message):
        payload, memory = channel.encode(key, message, None)
        return channel.differentiable(channel.decode(payload), message, memory)

    value, slope = jax.jvp(sent, (message,), (jnp.ones_like(message),))
    assert not np.array_equal(value, message)
    np.testing.assert_array_equal(slope, jnp.ones_like(message))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_ends_the_run(bad, key):
    """As before: rounding to whole numbers does not hide it."""
    x = jax.random.normal(key, (3, 20, 16)).at[1, 2, 3].set(bad)
    clients = jf.Clients(jf.Samples(x, jnp.full(3, 20.0)), jnp.arange(3), jnp.full(3, 1 / 3))
    with pytest.raises(jf.DivergenceError):
        jf.fit(
            jf.pca.SubspaceIteration(2),
            clients,
            rounds=2,
            key=key,
            channel=jf.channel.quantize(3),
        )
