"""What rounding and packing of messages reads and writes, by the count of the TPU's compiler."""

from math import prod
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import jaxfed as jf
from jaxfed.core.wire import quantization
from tests.accelerators.tpu_compiler import array, chip, compiled

# Clients, features, rank.
SHAPES = [(50, 784, 5), (1000, 64, 8), (16, 1024, 16), (100_000, 32, 3)]


def bytes_an_entry(channel, shape):
    """Of a round's way up: encoded, decoded, averaged, and the senders' memories."""

    def one(key, message, memory):
        payload, memory = channel.encode(key, message, memory)
        return channel.decode(payload), memory

    def uplink(key, messages, memories):
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(messages)))
        decoded, memories = jax.vmap(one)(keys, messages, memories)
        ones = jnp.full(len(messages), 1 / len(messages))
        return jnp.tensordot(ones, decoded, 1, precision="highest"), memories

    place = jax.sharding.SingleDeviceSharding(chip())
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=place)
    program = compiled(uplink, key, array(*shape), array(*shape))
    return program.cost_analysis()["bytes accessed"] / prod(shape)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_stay_move_less(shape, bits):
    channel = jf.channel.difference(jf.channel.quantize(bits))
    with (
        mock.patch.object(quantization, "_quantized", quantization._quantized_in_turn),
        mock.patch.object(quantization, "_restored", quantization._restored_in_turn),
    ):
        in_turn = bytes_an_entry(channel, shape)
    in_rows = bytes_an_entry(channel, shape)
    print(shape, bits, f"{in_turn:.1f} {in_rows:.1f}")
    assert in_rows < 0.75 * in_turn
