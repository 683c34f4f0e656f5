"""Messages between clients and server: sent, summed up over clients, and found not finite."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, PyTree, UInt32

from jaxfed.core.contract.reduction import Sum, contributions, plain
from jaxfed.core.wire import calls, channel


class Transit(NamedTuple):
    """A message on its way through a channel."""

    payload: PyTree  # what travels
    decoded: PyTree  # what the other end makes of it, which can be differentiated
    memory: PyTree  # the sender's, after


class Message(NamedTuple):
    """A client's message and what it says beside it; or those of many, along a leading axis."""

    payload: PyTree
    not_finite: Bool[Array, "*members"]
    diagnostics: PyTree = None  # of a round
    decoded: PyTree = None  # None where the server is yet to decode it


class Contribution(NamedTuple):
    """A client's share in what the server receives, or the reduction of many clients' shares."""

    message: PyTree
    bytes: PyTree  # of parts of variable length; None where messages have none
    failures: PyTree  # how many messages are not finite
    diagnostics: PyTree = None
    share: PyTree = None  # of the diagnostics: the clients' weights


def send(way: channel.Channel, key: Key[Array, ""], message: PyTree, memory: PyTree) -> Transit:
    """Encode a message and decode it."""
    payload, after = calls.encode(way, key, message, memory)
    return Transit(payload, calls.decode(way, payload, message, memory), after)


def send_first(way: channel.Channel, key: Key[Array, ""], message: PyTree) -> Transit:
    """Encode the first message of its channel, which has no memory yet, and decode it."""
    return send(way, key, message, calls.memory(way, message))


def payload_shapes(way: channel.Channel, message: PyTree) -> PyTree:
    """Shapes of what a message of these shapes becomes on its way."""

    def payload(message):
        zero, key = jnp.zeros((), jnp.int32), jax.random.key(0)
        bound = way.bind(channel.Context(zero, jnp.ones(()), key, zero))
        return send_first(bound, key, message).payload

    return jax.eval_shape(payload, message)


def is_not_finite(message: PyTree) -> Bool[Array, ""]:
    """Whether any number of a message is NaN or infinite."""
    numbers = [x for x in jax.tree.leaves(message) if jnp.issubdtype(x.dtype, jnp.inexact)]
    # Zero times what is not finite is NaN; a sum is faster than a conjunction.
    return ~jnp.isfinite(sum((jnp.sum(x * 0) for x in numbers), jnp.zeros(())))


def poisoned(message: PyTree, failed: Bool[Array, ""]) -> PyTree:
    """A received message, all NaN if a client's was not finite, which a channel may have hidden."""

    def one(x):
        return jnp.where(failed, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(one, message)


def first_contribution(
    message: Message, weight: Float[Array, ""], real: Float[Array, ""]
) -> Contribution:
    """ONE client's share in what the server receives before the rounds.

    Args:
        message: the client's.
        weight: the client's.
        real: 0 for a copy that only fills up a device and sends nothing, else 1.
    """
    return Contribution(
        contributions(message.decoded, weight),
        _bytes(message.payload, real),
        _failure(message.not_finite, weight),
    )


def round_contribution(
    message: Message, weight: Float[Array, ""], present: Float[Array, ""], cumulative: bool
) -> Contribution:
    """ONE client's share in what the server receives in a round.

    Args:
        message: the client's.
        weight: the client's.
        present: the factor on its weight in this round, 0 if it takes no part.
        cumulative: whether messages are differences to those before.
    """
    share = weight * present.astype(weight.dtype)
    # Of absent clients the server has the last message already: they have changed nothing.
    changed = weight * (present > 0).astype(weight.dtype) if cumulative else share
    diagnostics, shares = contributions((message.diagnostics, jnp.ones_like(weight)), share)
    return Contribution(
        contributions(message.decoded, changed),
        _bytes(message.payload, present),
        _failure(message.not_finite, weight),
        diagnostics,
        shares,
    )


def total_bytes(contribution: Contribution) -> UInt32[Array, ""]:
    """Bytes of variable length that all clients sent."""
    if contribution.bytes is None:
        return jnp.zeros((), jnp.uint32)
    return plain(contribution.bytes)


def _bytes(payload: PyTree, present: Float[Array, ""]) -> PyTree:
    if not channel.varies(payload):
        return None
    return contributions(Sum(channel.variable_bytes(payload)), present)


def _failure(not_finite: Bool[Array, ""], like: Float[Array, ""]) -> PyTree:
    # Counted in the one sum over clients that a round takes anyway.
    return contributions(Sum(not_finite.astype(like.dtype)), jnp.ones_like(like))
