"""Calls a channel's functions and checks their results while they are traced.

Each function raises a `ValueError` that names the channel's function. The checks need only shapes
and types, so only `receive` is traced again.
"""

import dataclasses
from collections.abc import Iterator

import jax
from jaxtyping import Array, Key, PyTree

from jaxfed._checks import check_instance
from jaxfed.core.common.returned import check_alike, check_arrays, described
from jaxfed.core.contract.algorithm import ClientsLike
from jaxfed.core.contract.reduction import Part, each, plain, wrapped
from jaxfed.core.wire.channel import Channel, Context


def can_refuse(channel: Channel) -> bool:
    """Whether the channel, or one inside it, refuses some runs."""
    return any(type(one).check is not Channel.check for one in _with_inner(channel))


def check(
    channel: Channel, clients: ClientsLike, participants: int | None, message: PyTree
) -> None:
    """Let the channel, and those inside it, refuse a run in which it is the uplink."""
    for one in _with_inner(channel):
        one.check(clients, participants, message)


def _with_inner(channel: Channel) -> Iterator[Channel]:
    yield channel
    for field in dataclasses.fields(channel):
        if isinstance(inner := getattr(channel, field.name), Channel):
            yield from _with_inner(inner)


def carried(channel: Channel, message: PyTree) -> PyTree[Part]:
    """The message in its reductions, each a sum if the channel needs that."""
    message = wrapped(message)
    needs_sum = any(one.needs_sum for one in _with_inner(channel))
    return each(_as_sum, message) if needs_sum else message


def _as_sum(part: Part) -> Part:
    found = part.as_sum()
    check_instance(f"{_name(part)}.as_sum", found, Part, "a part of a message")
    return found


def bind(channel: Channel, context: Context) -> Channel:
    """The channel for one client in one round."""
    bound = channel.bind(context)
    check_instance(f"{_name(channel)}.bind", bound, Channel, "a jaxfed.channel.Channel")
    return bound


def for_start(channel: Channel) -> Channel:
    """The channel for messages before the rounds."""
    found = channel.for_start()
    check_instance(f"{_name(channel)}.for_start", found, Channel, "a jaxfed.channel.Channel")
    return found


def memory(channel: Channel, message: PyTree) -> PyTree:
    """The sender's initial memory: a tree of arrays."""
    first = channel.memory(message)
    check_arrays(f"{_name(channel)}.memory: wanted", first)
    return first


def encode(
    channel: Channel, key: Key[Array, ""], message: PyTree, memory: PyTree
) -> tuple[PyTree, PyTree]:
    """The payload and the sender's next memory, like the previous one."""
    where = f"{_name(channel)}.encode: wanted"
    result = channel.encode(key, message, memory)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"{where} (payload, memory), got {described(result)}")
    payload, after = result
    check_arrays(where, payload)
    check_alike(f"{where} a memory like that before,", memory, after)
    return payload, after


def decode(channel: Channel, payload: PyTree, message: PyTree, memory: PyTree) -> PyTree:
    """Decode a payload, with the channel's derivative; once received, it is like the message.

    Args:
        channel: the channel of the message.
        payload: the result of `encode`.
        message: the original message.
        memory: the sender's memory before.
    """
    name = _name(channel)
    decoded = channel.decode(payload)
    check_arrays(f"{name}.decode: wanted", decoded)
    decoded = channel.differentiable(decoded, message, memory)
    check_arrays(f"{name}.differentiable: wanted", decoded)
    # The server receives the reduction of many messages, which has the shapes of one.
    last = message if channel.cumulative else None
    received = jax.eval_shape(channel.receive, decoded, last)
    check_alike(
        f"{name}.receive(decode(payload)): wanted", plain(message), plain(received), " as was sent"
    )
    return decoded


def _name(given: object) -> str:
    return type(given).__name__
