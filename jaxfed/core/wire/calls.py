"""Calls a channel's functions and checks their results while they are traced.

Each function raises a `ValueError` that names the channel's function. The checks need only shapes
and types, so only `receive` is traced again.
"""

import dataclasses
from collections.abc import Iterator

import jax
from jaxtyping import Array, Key, PyTree

from jaxfed._checks import check_instance
from jaxfed.core.common.returned import broken, returned
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


def sharers(channel: Channel) -> int:
    """How many clients a sum needs for what the channel, and those inside it, promise of it."""
    return max(one.sharers for one in _with_inner(channel))


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
    return returned(part, "as_sum", part.as_sum(), Part, "a part of a message")


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
    return returned(channel, "memory", channel.memory(message))


def encode(
    channel: Channel, key: Key[Array, ""], message: PyTree, memory: PyTree
) -> tuple[PyTree, PyTree]:
    """The payload and the sender's next memory, like the previous one."""
    result = channel.encode(key, message, memory)
    if not isinstance(result, tuple) or len(result) != 2:
        raise broken(channel, "encode", "(payload, memory)", result)
    payload, after = result
    returned(channel, "encode", payload)
    return payload, returned(channel, "encode", after, memory, "a memory like that before, {}")


def decode(channel: Channel, payload: PyTree, message: PyTree, memory: PyTree) -> PyTree:
    """Decode a payload, with the channel's derivative; once received, it is like the message.

    Args:
        channel: the channel of the message.
        payload: the result of `encode`.
        message: the original message.
        memory: the sender's memory before.
    """
    decoded = returned(channel, "decode", channel.decode(payload))
    decoded = channel.differentiable(decoded, message, memory)
    returned(channel, "differentiable", decoded)
    # The server receives the reduction of many messages, which has the shapes of one.
    last = message if channel.cumulative else None
    received = plain(jax.eval_shape(channel.receive, decoded, last))
    returned(channel, "receive(decode(payload))", received, plain(message), "{} as was sent")
    return decoded


def _name(given: object) -> str:
    return type(given).__name__
