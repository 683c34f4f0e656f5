"""Messages between clients and server: encoding, reduction over clients, checks for NaN."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt32

from jaxfed.core.contract.reduction import Sum, contributions, plain
from jaxfed.core.wire import calls, channel


class Transit(NamedTuple):
    """A message at the stages of a channel."""

    payload: PyTree  # the encoded message
    decoded: PyTree  # as the receiver decodes it; differentiable
    memory: PyTree  # the sender's, after sending


class ClientMessage(NamedTuple):
    """A client's message with its diagnostics, or many clients' along a leading axis."""

    payload: PyTree
    not_finite: Bool[Array, "*members"]
    diagnostics: PyTree = None  # None before the first round
    decoded: PyTree = None  # None until the server decodes it


class Contribution(NamedTuple):
    """A client's share in what the server receives, or many clients' shares, reduced."""

    message: PyTree
    bytes: PyTree  # in parts of variable length; None if messages have none
    failures: PyTree  # number of messages that are not finite
    diagnostics: PyTree = None
    share: PyTree = None  # of the diagnostics: the clients' weights


def send(way: channel.Channel, key: Key[Array, ""], message: PyTree, memory: PyTree) -> Transit:
    """Encode a message and decode it."""
    payload, after = calls.encode(way, key, message, memory)
    return Transit(payload, calls.decode(way, payload, message, memory), after)


def receive(way: channel.Channel, payload: PyTree, last: PyTree) -> PyTree:
    """Decode a payload; difference channels need the previous message."""
    return way.receive(way.decode(payload), last)


def payload_shapes(way: channel.Channel, message: PyTree) -> PyTree:
    """Shapes of the payload that a channel makes of a message with these shapes."""
    return jax.eval_shape(_payload, way, message)


def _payload(way: channel.Channel, message: PyTree) -> PyTree:
    # Some channels encode only for a given client; for shapes, any client will do.
    zero, key = jnp.zeros((), jnp.int32), jax.random.key(0)
    bound = calls.bind(way, channel.Context(zero, jnp.ones(()), key, zero))
    return send(bound, key, message, calls.memory(bound, message)).payload


def is_not_finite(message: PyTree) -> Bool[Array, ""]:
    """Whether a message contains NaN or infinity."""
    numbers = [x for x in jax.tree.leaves(message) if jnp.issubdtype(x.dtype, jnp.inexact)]
    # Zero times NaN or infinity is NaN, and so is any sum with it; one sum is faster than a
    # conjunction over all entries.
    return ~jnp.isfinite(sum((jnp.sum(x * 0) for x in numbers), jnp.zeros(())))


def reduced_message(
    way: channel.Channel, received: Contribution, last: PyTree
) -> tuple[PyTree, Bool[Array, ""]]:
    """The clients' message as the server receives it, and whether it has failed.

    One client's NaN must not be averaged away, nor be decoded to a number, as by quantizers: if a
    client's message was not finite, the whole message is NaN.

    Args:
        way: the channel.
        received: the clients' messages, reduced.
        last: the previous message for a cumulative channel, else None.
    """
    failed = plain(received.failures) > 0

    def one(x):
        return jnp.where(failed, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(one, way.receive(received.message, last)), failed


def contribution(
    message: ClientMessage,
    client_id: Int[Array, ""],
    weight: Float[Array, ""],
    present: Float[Array, ""],
    cumulative: bool,
) -> tuple[Contribution, Bool[Array, ""]]:
    """One client's share in the reduction of the messages, and whether it has failed.

    Args:
        message: the client's message.
        client_id: the client's id.
        weight: the client's weight.
        present: the factor on its weight in this round; 0 if it is absent or padding.
        cumulative: whether messages are differences from the previous ones.
    """
    there, share = present > 0, weight * present.astype(weight.dtype)
    # A difference channel adds to the last messages of all clients, which the server has, and
    # participants change only their own. So `present`, as a factor that makes up for absent
    # clients, must not scale the change.
    changed = weight * there.astype(weight.dtype) if cumulative else share
    # A NaN of an absent client, of padding or of a client of weight 0 must not end the run.
    failed = not_finite = message.not_finite & (share > 0)
    diagnostics = shares = None
    if message.diagnostics is not None:
        # Sum them with their weights, so that the server can divide by the total weight.
        diagnostics, shares = contributions((message.diagnostics, jnp.ones_like(weight)), share)
        failed |= there & ~jnp.isfinite(message.diagnostics["objective"])
    # Not `weight`: a participant of weight 0 sends its bytes too.
    sent = None
    if channel.varies(message.payload):
        sent = contributions(Sum(channel.variable_bytes(message.payload)), present)
    # Part of the round's sum over clients, so that it costs no second one.
    failures = Sum(not_finite.astype(weight.dtype))
    decoded = contributions(message.decoded, changed, client_id)
    return Contribution(decoded, sent, failures, diagnostics, shares), failed


def total_bytes(contribution: Contribution) -> UInt32[Array, ""]:
    """Bytes that all clients sent in parts of variable length."""
    if contribution.bytes is None:
        return jnp.zeros((), jnp.uint32)
    return plain(contribution.bytes)
