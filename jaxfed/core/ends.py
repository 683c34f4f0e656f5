"""One end's part each of a run: of ONE client, and of the server.

They are the same in runs within one program and in those without, where a wire is between them.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt32

from jaxfed.core import channel, contract
from jaxfed.core.algorithm import Personalized
from jaxfed.core.problem import (
    Costs,
    Failure,
    Missed,
    Problem,
    State,
    blank,
    everybody,
    key_of_start,
    keys_of,
    server_key_of,
    zeros_of,
)
from jaxfed.core.reduction import Sum, contributions, plain, wrapped


def first_sent(
    problem: Problem,
    key: Key[Array, ""],
    client_id: Int[Array, ""],
    context: channel.Context,
    data: PyTree,
    start: Personalized | None,
) -> tuple["Sent", Bool[Array, ""]]:
    """ONE client's first message on its way, and whether it is not finite."""
    own_key, channel_key = jax.random.split(jax.random.fold_in(key, client_id))
    message = contract.first_message(problem.algorithm, own_key, data, start)
    sent = _send(problem.first_uplink.bind(context), channel_key, wrapped(message))
    return sent, _broken(message)


def first_contribution(
    payload: PyTree, decoded: PyTree, weight: Float[Array, ""], real: Float[Array, ""],
    broken: Bool[Array, ""],
) -> PyTree:  # fmt: skip
    """ONE client's share in what the server hears before the rounds."""
    return contributions(decoded, weight), _bytes(payload, real), _one_more(broken, weight)


class Opening(NamedTuple):
    """What the server has before the rounds."""

    server: PyTree
    first: PyTree  # the first messages, reduced
    failed: Bool[Array, ""]
    broadcast: "Sent"
    downlink: PyTree  # as clients receive it
    written: UInt32[Array, ""]  # bytes of variable length of all first messages


def opened(problem: Problem, heard: PyTree, like: PyTree, start: Personalized | None) -> Opening:
    """The server, from what it heard."""
    algorithm, (total, written, failures) = problem.algorithm, heard
    failed = plain(failures) > 0
    total = _marred(problem.first_uplink.receive(total, None), failed)
    key = server_key_of(key_of_start(problem.key))
    server = algorithm.server_init(key, plain(total), like, start)
    server = contract.arrays_of(algorithm, "server_init", server)
    way = problem.first_downlink
    broadcast = _send(way, keys_of(problem, 0)[2], algorithm.downlink(server))
    downlink = way.receive(broadcast.decoded, None)
    return Opening(server, total, failed, broadcast, downlink, _counted(written))


def first_local(
    problem: Problem,
    key: Key[Array, ""],
    client_id: Int[Array, ""],
    downlink: PyTree,
    data: PyTree,
    start: Personalized | None,
) -> PyTree:
    """ONE client's first state."""
    own_key, _ = jax.random.split(jax.random.fold_in(key, client_id))
    return contract.client_init(problem.algorithm, own_key, downlink, data, start)


def messages_of_round(
    problem: Problem, downlink: PyTree, local: PyTree, data: PyTree
) -> tuple[PyTree, jax.ShapeDtypeStruct]:
    """Shapes of ONE client's uplink and of its objective."""
    step = jax.eval_shape(
        contract.client_step, problem.algorithm, problem.key, downlink, local, data
    )
    return wrapped(step[0]), step[2]["objective"]


def remembers_first(problem: Problem, first: PyTree, uplink: PyTree) -> bool:
    """Whether both ends of the uplink remember the first messages: if they are like a round's."""
    return problem.uplink.cumulative and contract.alike(first, uplink)


def first_memory(problem: Problem, first: PyTree, uplink: PyTree) -> PyTree:
    """What ONE client remembers of its uplink."""
    known = remembers_first(problem, jax.eval_shape(lambda: first), uplink)
    return problem.uplink.memory(first if known else zeros_of(uplink))


def first_state(
    problem: Problem,
    opening: Opening,
    uplink: PyTree,
    objective: jax.ShapeDtypeStruct,
    remembered: bool,
) -> State:
    """The server's side of the first state."""
    nobody = jnp.zeros(problem.size, bool)
    known = None
    if problem.uplink.cumulative:
        known = opening.first if remembered else zeros_of(uplink)
    downlink = opening.downlink
    return State(
        round=jnp.zeros((), jnp.int32),
        server=opening.server,
        local=None,
        uplink=channel.Link(problem.uplink, None, known),
        downlink=channel.Link(problem.downlink, problem.downlink.memory(downlink), downlink),
        broadcast_bytes=channel.variable_bytes(opening.broadcast.payload),
        missed=Missed(nobody.astype(jnp.int32), nobody.astype(jnp.uint32))
        if problem.downlink.cumulative and not everybody(problem)
        else None,
        objective=jnp.full((), jnp.nan, objective.dtype),
        measure=jnp.full((), jnp.inf, objective.dtype),
        failure=Failure(opening.failed.astype(jnp.int32), nobody),
    )


def costs_of(problem: Problem, opening: Opening, uplink: PyTree, first_up: int | float) -> Costs:
    """What messages cost, from their shapes."""
    downlink, payload = opening.downlink, opening.broadcast.payload
    up = payload_of(problem.uplink, uplink)
    down = payload_of(problem.downlink, jax.eval_shape(lambda: downlink))
    return Costs(
        first_up,
        channel.fixed_bits(payload),
        channel.fixed_bits(up),
        channel.fixed_bits(down),
        channel.fixed_bits(downlink),
        opening.written,
        channel.variable_bytes(payload),
        channel.varies(up) or channel.varies(down),
    )


class Sent(NamedTuple):
    """A message on its way."""

    payload: PyTree
    decoded: PyTree  # what the other end makes of it, which can be differentiated
    memory: PyTree  # the sender's, after


def _send(way: channel.Channel, key: Key[Array, ""], message: PyTree, *memory: PyTree) -> Sent:
    """A message, encoded and decoded; without a memory it is the first."""
    (before,) = memory or (way.memory(message),)
    payload, after = way.encode(key, message, before)
    return Sent(payload, way.differentiable(way.decode(payload), message, before), after)


def _broken(message: PyTree) -> Bool[Array, ""]:
    """Whether a client sends what is not finite."""
    numbers = [x for x in jax.tree.leaves(message) if jnp.issubdtype(x.dtype, jnp.inexact)]
    # Zero times what is not finite is NaN; a sum is faster than a conjunction.
    return ~jnp.isfinite(sum((jnp.sum(x * 0) for x in numbers), jnp.zeros(())))


def _one_more(broken: Bool[Array, ""], like: Float[Array, ""]) -> PyTree:
    """The contribution to the number of those, in the one sum that a round takes anyway."""
    return contributions(Sum(broken.astype(like.dtype)), jnp.ones_like(like))


def _marred(message: PyTree, failed: Bool[Array, ""]) -> PyTree:
    """What was received: NaN if a message is not finite, whatever clipped or hid that."""

    def marred(x):
        return jnp.where(failed, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    return jax.tree.map(marred, message)


def _bytes(payload: PyTree, present: Float[Array, ""]) -> PyTree:
    """The contribution to the bytes of variable length; None where there are none."""
    if not channel.varies(payload):
        return None
    return contributions(Sum(channel.variable_bytes(payload)), present)


def _counted(written: PyTree) -> UInt32[Array, ""]:
    return jnp.zeros((), jnp.uint32) if written is None else plain(written)


def payload_of(way: channel.Channel, message: PyTree) -> PyTree:
    """Shapes of what a message of these shapes becomes."""

    def payload(message):
        zero = jnp.zeros((), jnp.int32)
        key = jax.random.key(0)
        bound = way.bind(channel.Context(zero, jnp.ones(()), key, zero))
        return bound.encode(key, message, bound.memory(message))[0]

    return jax.eval_shape(payload, message)


def chosen_inclusion(problem: Problem, done: Int[Array, ""]) -> Float[Array, " clients"]:
    """Who takes part in the round after so many: factors on the clients' weights."""
    clients = problem.clients
    ids, weights = clients.ids[problem.rows], clients.weights[problem.rows]
    choice_key = keys_of(problem, done)[1]
    inclusion = problem.participation.inclusion(choice_key, done, ids, weights)
    if everybody(problem):
        return inclusion
    # Of participants without any weight there is no mean: nobody takes part then.
    return jnp.where(inclusion @ weights != 0, inclusion, 0)


class ClientRound(NamedTuple):
    """What ONE client's round makes."""

    payload: PyTree
    decoded: PyTree
    diagnostics: Any
    broken: Bool[Array, ""]  # whether the message is not finite
    local: PyTree
    memory: PyTree  # of its end of the uplink


def client_round(
    problem: Problem,
    key: Key[Array, ""],
    client_id: Int[Array, ""],
    context: channel.Context,
    downlink: PyTree,
    local: PyTree,
    memory: PyTree,
    data: PyTree,
) -> ClientRound:
    """ONE client's part of a round: its step, and what of it goes up the wire."""
    step_key, channel_key = jax.random.split(jax.random.fold_in(key, client_id))
    uplink, local, diagnostics = contract.client_step(
        problem.algorithm, step_key, downlink, local, data
    )
    sent = _send(problem.uplink.bind(context), channel_key, wrapped(uplink), memory)
    broken = _broken(uplink)
    return ClientRound(sent.payload, sent.decoded, diagnostics, broken, local, sent.memory)


def contribution(
    problem: Problem, step: ClientRound, weight: Float[Array, ""], present: Float[Array, ""]
) -> PyTree:
    """ONE client's share in what the server hears, from what arrived."""
    share = weight * present.astype(weight.dtype)
    # Of absent clients the server has the last message already: they have changed nothing.
    there = present > 0
    changed = weight * there.astype(weight.dtype) if problem.uplink.cumulative else share
    return (
        contributions(step.decoded, changed),
        contributions((step.diagnostics, jnp.ones_like(weight)), share),
        _bytes(step.payload, present),
        _one_more(step.broken, weight),
    )


def server_round(
    problem: Problem,
    state: State,
    inclusion: Float[Array, " clients"],
    heard: PyTree,
    failed_clients: Bool[Array, " padded_clients"],
) -> tuple[State, dict[str, Array]]:
    """The server's part of a round: its step, and down the wire.

    Args:
        problem: the run.
        state: the state before, with the clients' own parts as they are after.
        inclusion: who took part.
        heard: their contributions, reduced.
        failed_clients: who of them has what is not finite.
    """
    server_key = keys_of(problem, state.round)[0]
    message, told, written, failures = heard
    failed = plain(failures) > 0
    message = _marred(problem.uplink.receive(message, state.uplink.receiver), failed)
    server, measured = contract.server_step(
        problem.algorithm, server_key, state.server, plain(message)
    )

    # Diagnostics are means over the participants, so that they stay comparable between rounds.
    diagnostics, share = plain(told)
    share = jnp.where(share != 0, share, 1)
    diagnostics = {name: value / share for name, value in diagnostics.items()}
    # Not finite if one participant's is not.
    sound = jnp.isfinite(diagnostics["objective"]) & ~failed
    diagnostics |= measured
    measure = diagnostics.get("stopping_measure")
    if measure is None:
        measure = _relative_change(state.objective, diagnostics["objective"])

    downlink, missed, traffic = _broadcast(problem, state, server, inclusion > 0)
    known = message if problem.uplink.cumulative else None
    new_state = replace(
        state,
        round=state.round + 1,
        server=server,
        uplink=replace(state.uplink, receiver=known),
        downlink=downlink[0],
        broadcast_bytes=downlink[1],
        missed=missed,
        objective=diagnostics["objective"].astype(state.objective.dtype),
        measure=jnp.where(jnp.isnan(measure), jnp.inf, measure).astype(state.measure.dtype),
        failure=_failure(state, sound, failed_clients),
    )
    if not everybody(problem):
        happens = (inclusion > 0).any()
        new_state = _chosen(happens, new_state, replace(state, round=new_state.round))
        none = jax.tree.map(lambda x: blank(x.shape, x.dtype), diagnostics)
        diagnostics = _chosen(happens, diagnostics, none)
    participants = (inclusion > 0).sum(dtype=jnp.int32)
    traffic["bytes_up"] = _counted(written)
    return new_state, {**diagnostics, "participants": participants, **traffic}


def _chosen(condition: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _relative_change(previous: Float[Array, ""], current: Float[Array, ""]) -> Float[Array, ""]:
    size = jnp.abs(current)
    return jnp.abs(current - previous) / jnp.maximum(size, jnp.finfo(size.dtype).tiny)


def _failure(state: State, finite: Bool[Array, ""], failed: Bool[Array, " m"]) -> Failure:
    """The first failure of all, whose round and clients stay."""
    now = Failure(jnp.where(finite, 0, state.round + 1).astype(jnp.int32), failed)
    return _chosen(state.failure.round == 0, now, state.failure)


def _broadcast(
    problem: Problem, state: State, server: PyTree, present: Bool[Array, " m"]
) -> tuple[tuple[channel.Link, UInt32[Array, ""]], Missed | None, dict[str, Array]]:
    """The next downlink, what clients still miss, and what this round's took."""
    way, link = problem.downlink, state.downlink
    message = problem.algorithm.downlink(server)
    sent = _send(way, keys_of(problem, state.round + 1)[2], message, link.sender)
    received = way.receive(sent.decoded, link.receiver)

    # The first downlink is that of round 1, and everybody has it.
    new = (state.round > 0).astype(jnp.int32)
    count = present.sum(dtype=jnp.int32)
    none = jnp.zeros((), jnp.int32)
    messages, missed_bytes, whole, missed = new * count, none.astype(jnp.uint32), none, None
    if state.missed is not None:
        due = Missed(state.missed.messages + new, state.missed.bytes)
        one, all_of_it = channel.fixed_bits(sent.payload), channel.fixed_bits(message)
        last = jnp.where(new > 0, state.broadcast_bytes, 0)
        bits = one * due.messages.astype(float) + 8 * (due.bytes.astype(float) + last)
        catches_up, resent = present & (bits < all_of_it), present & (bits >= all_of_it)
        messages = jnp.where(catches_up, due.messages, 0).sum(dtype=jnp.int32)
        missed_bytes = jnp.where(catches_up, due.bytes, 0).sum(dtype=jnp.uint32)
        whole = resent.sum(dtype=jnp.int32)
        later = due._replace(bytes=due.bytes + last)
        missed = jax.tree.map(lambda x: jnp.where(present, 0, x), later)
    traffic: dict[str, Any] = {
        "broadcast_bytes": jnp.where(new > 0, state.broadcast_bytes, 0),
        "messages_down": messages,
        "missed_bytes": missed_bytes,
        "whole_down": whole,
    }
    bytes_now = channel.variable_bytes(sent.payload)
    return (channel.Link(way, sent.memory, received), bytes_now), missed, traffic


def broadcast_of(problem: Problem, before: State, after: State) -> PyTree:
    """What the server sends after a round, as it travels."""
    message = problem.algorithm.downlink(after.server)
    key = keys_of(problem, before.round + 1)[2]
    return _send(problem.downlink, key, message, before.downlink.sender).payload
