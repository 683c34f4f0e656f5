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
    diagnostics: PyTree = None  # of a round
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


def send_first(way: channel.Channel, key: Key[Array, ""], message: PyTree) -> Transit:
    """Encode and decode the first message of a channel, which has no memory yet."""
    return send(way, key, message, calls.memory(way, message))


def payload_shapes(way: channel.Channel, message: PyTree) -> PyTree:
    """Shapes of the payload that a channel makes of a message with these shapes."""

    def payload(message):
        # Some channels encode only for a given client; for shapes, any client will do.
        zero, key = jnp.zeros((), jnp.int32), jax.random.key(0)
        bound = calls.bind(way, channel.Context(zero, jnp.ones(()), key, zero))
        return send_first(bound, key, message).payload

    return jax.eval_shape(payload, message)


def is_not_finite(message: PyTree) -> Bool[Array, ""]:
    """Whether a message contains NaN or infinity."""
    numbers = [x for x in jax.tree.leaves(message) if jnp.issubdtype(x.dtype, jnp.inexact)]
    # Zero times NaN or infinity is NaN, and so is any sum with it; one sum is faster than a
    # conjunction over all entries.
    return ~jnp.isfinite(sum((jnp.sum(x * 0) for x in numbers), jnp.zeros(())))


def nan_where_failed(message: PyTree, failed: Bool[Array, ""]) -> PyTree:
    """The received message, or NaN throughout if a client's message was not finite.

    This is needed because channels such as quantizers can turn NaN into ordinary numbers.
    """

    def one(x):
        return jnp.where(failed, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(one, message)


def first_contribution(
    message: ClientMessage,
    client_id: Int[Array, ""],
    weight: Float[Array, ""],
    real: Float[Array, ""],
) -> Contribution:
    """One client's share in the reduction of the first messages.

    Args:
        message: the client's message.
        client_id: the client's id.
        weight: the client's weight.
        real: 1, or 0 for padding, which sends nothing.
    """
    return Contribution(
        contributions(message.decoded, weight, client_id),
        _bytes(message.payload, real),
        _failure(message.not_finite, weight),
    )


def round_contribution(
    message: ClientMessage,
    client_id: Int[Array, ""],
    weight: Float[Array, ""],
    present: Float[Array, ""],
    cumulative: bool,
) -> Contribution:
    """One client's share in the reduction of a round's messages.

    Args:
        message: the client's message.
        client_id: the client's id.
        weight: the client's weight.
        present: the factor on its weight in this round; 0 if it is absent.
        cumulative: whether messages are differences from the previous ones.
    """
    share = weight * present.astype(weight.dtype)
    # A difference channel adds to the last messages of all clients, which the server has, and
    # participants change only their own. So `present`, as a factor that makes up for absent
    # clients, must not scale the change.
    changed = weight * (present > 0).astype(weight.dtype) if cumulative else share
    # Sum diagnostics with their weights, so that the server can divide by the total weight.
    diagnostics, shares = contributions((message.diagnostics, jnp.ones_like(weight)), share)
    return Contribution(
        contributions(message.decoded, changed, client_id),
        # Not `weight`: a participant of weight 0 sends its bytes too.
        _bytes(message.payload, present),
        _failure(message.not_finite, weight),
        diagnostics,
        shares,
    )


def total_bytes(contribution: Contribution) -> UInt32[Array, ""]:
    """Bytes that all clients sent in parts of variable length."""
    if contribution.bytes is None:
        return jnp.zeros((), jnp.uint32)
    return plain(contribution.bytes)


def _bytes(payload: PyTree, present: Float[Array, ""]) -> PyTree:
    if not channel.varies(payload):
        return None
    return contributions(Sum(channel.variable_bytes(payload)), present)


def _failure(not_finite: Bool[Array, ""], like: Float[Array, ""]) -> PyTree:
    # Part of the round's sum over clients, so that it costs no second one. It counts every client:
    # the callers have cleared the flags of absent ones, of padding and of clients of weight 0.
    return contributions(Sum(not_finite.astype(like.dtype)), jnp.ones_like(like))
