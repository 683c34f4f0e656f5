"""A channel's functions, held to the contract where they are traced.

Only shapes and types are looked at, so that nothing is traced for it but `receive`.
"""

import jax
from jaxtyping import Array, Key, PyTree

from jaxfed.core.common.returned import check_alike, check_arrays, described
from jaxfed.core.contract.reduction import plain
from jaxfed.core.wire.channel import Channel


def memory(channel: Channel, message: PyTree) -> PyTree:
    """The sender's first memory.

    Raises:
        ValueError: for a tree of anything but arrays.
    """
    first = channel.memory(message)
    check_arrays(f"{_name(channel)}.memory: wanted", first)
    return first


def encode(
    channel: Channel, key: Key[Array, ""], message: PyTree, memory: PyTree
) -> tuple[PyTree, PyTree]:
    """The payload, and the sender's next memory.

    Raises:
        ValueError: for a wrong number of results, a payload of anything but arrays, or a memory of
            other shapes or types than before.
    """
    where = f"{_name(channel)}.encode: wanted"
    result = channel.encode(key, message, memory)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{where} (payload, memory), got {described(result)}")
    payload, after = result
    check_arrays(where, payload)
    check_alike(f"{where} a memory like that before,", memory, after)
    return payload, after


def decode(channel: Channel, payload: PyTree, message: PyTree, memory: PyTree) -> PyTree:
    """What the other end makes of a payload, with the channel's derivative.

    Args:
        channel: the way.
        payload: what `encode` gave.
        message: what was sent.
        memory: the sender's memory before.

    Raises:
        ValueError: if what is received in the end has other shapes or types than the message.
    """
    name = _name(channel)
    decoded = channel.decode(payload)
    check_arrays(f"{name}.decode: wanted", decoded)
    decoded = channel.differentiable(decoded, message, memory)
    check_arrays(f"{name}.differentiable: wanted", decoded)
    # The receiver does this with the reduction of many, which has the shapes of one.
    last = message if channel.cumulative else None
    received = jax.eval_shape(channel.receive, decoded, last)
    check_alike(
        f"{name}.receive(decode(payload)): wanted", plain(message), plain(received), " as was sent"
    )
    return decoded


def _name(channel: Channel) -> str:
    return type(channel).__name__
