"""One round of a run, and what comes before the first: pure functions of a problem and a state."""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt32

from jaxfed.core import channel, contract, participation
from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.backend import Backend, collect
from jaxfed.core.buckets import each_first, filled, first_of, layout_of, picked, unlike
from jaxfed.core.clients import Clients
from jaxfed.core.reduction import Sum, contributions, plain, wrapped
from jaxfed.core.release import Release


class Problem(eqx.Module):
    """Everything that does not change from round to round."""

    algorithm: Algorithm
    clients: Clients  # prepared, and padded to what the backend needs
    uplink: channel.Channel
    downlink: channel.Channel
    first_uplink: channel.Channel
    first_downlink: channel.Channel
    participation: participation.Participation
    backend: Backend
    key: Key[Array, ""]
    earlier: tuple[Release, ...]  # of the run whose solution is the warm start
    size: int = eqx.field(static=True)  # clients without the padding


class Missed(NamedTuple):
    """What clients have not received of the broadcasts, for them to catch up with."""

    messages: Int[Array, " clients"]
    bytes: UInt32[Array, " clients"]  # of their parts of variable length


class Failure(NamedTuple):
    """The first round in which an objective or a message was not finite, and at whom."""

    round: Int[Array, ""]  # counted from 1, to which the first messages count; 0 if there was none
    clients: Bool[Array, " clients"]  # with the padding, as long as a run lasts


class State(eqx.Module):
    """Everything that changes from round to round."""

    round: Int[Array, ""]
    server: PyTree
    local: PyTree
    uplink: channel.Link
    downlink: channel.Link
    broadcast_bytes: UInt32[Array, ""]  # the last downlink's parts of variable length
    missed: Missed | None  # where it matters
    objective: Float[Array, ""]  # of the last round
    measure: Float[Array, ""]  # what a tolerance is compared with
    failure: Failure


class Costs(eqx.Module):
    """What messages cost: bits of their parts of fixed length, bytes of the others."""

    first_up: int | float = eqx.field(static=True)  # a mean where clients' data differ in shape
    first_down: int = eqx.field(static=True)
    up: int = eqx.field(static=True)
    down: int = eqx.field(static=True)
    whole_down: int = eqx.field(static=True)  # of a downlink as it is
    first_bytes_up: UInt32[Array, ""]  # of all clients together
    first_bytes_down: UInt32[Array, ""]


# What a round's messages took, for the history's bits: bytes that all participants sent, and the
# broadcast's; broadcasts that they received, and bytes of those that had been missed; and how many
# got the whole message instead.
TRAFFIC = ("bytes_up", "broadcast_bytes", "messages_down", "missed_bytes", "whole_down")


# ---------------------------------------------------------------------------------------------
# Before the first round.


def prepared(problem: Problem, rounds: int) -> Problem:
    """Pad the clients to what the backend needs and let the algorithm prepare their data."""
    clients, multiple = problem.clients, problem.backend.multiple
    if multiple > 1:
        # Copies of real clients with weight 0: zeros could make NaN in a derivative.
        data, whose = filled(clients.data, problem.size, multiple)
        weights = jnp.pad(clients.weights, (0, len(whose) - problem.size))
        clients = eqx.tree_at(
            lambda c: (c.data, c.ids, c.weights), clients, (data, clients.ids[whose], weights)
        )

    def prepare(_, own):
        data, client_id = own
        return problem.algorithm.prepare(data, client_id, rounds)

    data = problem.backend.map(prepare, None, (clients.data, clients.ids))
    # Not by their constructor: those that fill up devices have the ids of others.
    clients = eqx.tree_at(lambda c: c.data, clients, data)
    return eqx.tree_at(lambda p: p.clients, problem, clients)


def begin(problem: Problem, start: Personalized | None) -> tuple[State, Costs]:
    """Everybody's first state, and what messages cost."""
    clients = problem.clients
    places = jnp.arange(len(clients))
    local_start = None if start is None else start.local
    local_start = jax.tree.map(lambda x: x[places % problem.size], local_start)
    own = clients.data, clients.ids, clients.weights, places, local_start
    sent, (first, broken) = announced(problem, start, own, problem.size)
    like = jax.eval_shape(first_of, clients.data)
    opening = opened(problem, start, sent, like)
    local = initial(problem, start, opening.downlink, (clients.data, clients.ids, local_start))
    if layout_of(local) is not None:
        raise unlike("kept")
    layout = layout_of(clients.data)
    shapes = shapes_of(
        problem, start, opening.downlink,
        jax.eval_shape(each_first, (clients.data, local, local_start)),
        (1,) if layout is None else layout.sizes,
    )  # fmt: skip
    sender = senders(problem, shapes, first, len(clients))
    return begun(problem, opening, shapes, first, local, sender, broken)


def announced(
    problem: Problem, start: Personalized | None, own: PyTree, gathering: int
) -> tuple[PyTree, tuple[PyTree, Bool[Array, " clients"]]]:
    """The first messages of some clients.

    Args:
        problem: what does not change.
        start: the warm start; its shared part alone is looked at.
        own: their data, ids, weights, positions and warm starts.
        gathering: whose messages are gathered; see `collect`.

    Returns:
        What they send, reduced, with the bytes of variable length and the number of messages that
        are not finite; and for each client the message, if it is remembered, and whether it is one
        of these.
    """
    algorithm = problem.algorithm

    def announce(shared, own):
        key, secret, shared_start = shared
        data, client_id, weight, place, local_start = own
        own_key, channel_key = jax.random.split(jax.random.fold_in(key, client_id))
        begun = None if start is None else Personalized(shared_start, local_start)
        message = contract.first_message(algorithm, own_key, data, begun)
        context = channel.Context(place, weight, secret, jnp.zeros((), jnp.int32))
        sent = _send(problem.first_uplink.bind(context), channel_key, wrapped(message))
        # Who only fills up a device sends nothing.
        real = (place < problem.size).astype(weight.dtype)
        written = _bytes(sent.payload, real)
        # Only what both ends may remember is kept.
        kept = sent.decoded if problem.uplink.cumulative else None
        broken = _broken(message, weight)
        sent_on = contributions(sent.decoded, weight), written, _one_more(broken, weight)
        return sent_on, (kept, broken)

    shared = (
        jax.random.fold_in(problem.key, 0), shared_secret(problem.key),
        None if start is None else start.shared,
    )  # fmt: skip
    return collect(problem.backend, announce, shared, own, gathering)


class Opening(NamedTuple):
    """What there is once the server has the first messages."""

    server: PyTree
    received: PyTree  # the first messages, reduced
    failed: Bool[Array, ""]
    downlink: PyTree  # what the clients have of the first broadcast
    fixed_bits: Any  # of that broadcast, a whole number
    bytes_up: UInt32[Array, ""]
    bytes_down: UInt32[Array, ""]


def opened(problem: Problem, start: Personalized | None, sent: PyTree, like: PyTree) -> Opening:
    """The server's first state and broadcast.

    Args:
        problem: what does not change.
        start: the warm start.
        sent: what all clients sent first, reduced.
        like: shapes and types of one client's prepared data.
    """
    algorithm = problem.algorithm
    total, written, failures = sent
    failed = plain(failures) > 0
    total = _marred(problem.first_uplink.receive(total, None), failed)
    key = _server_key(jax.random.fold_in(problem.key, 0))
    server = algorithm.server_init(key, plain(total), like, start)
    server = contract.arrays_of(algorithm, "server_init", server)
    way = problem.first_downlink
    broadcast = _send(way, _keys(problem, 0)[2], algorithm.downlink(server))
    return Opening(
        server, total, failed, way.receive(broadcast.decoded, None),
        channel.fixed_bits(broadcast.payload), _counted(written),
        channel.variable_bytes(broadcast.payload),
    )  # fmt: skip


def initial(problem: Problem, start: Personalized | None, downlink: PyTree, own: PyTree) -> PyTree:
    """The first states of some clients, from their data, ids and warm starts."""

    def work(shared, own):
        key, downlink, shared_start = shared
        data, client_id, local_start = own
        own_key, _ = jax.random.split(jax.random.fold_in(key, client_id))
        begun = None if start is None else Personalized(shared_start, local_start)
        return contract.client_init(problem.algorithm, own_key, downlink, data, begun)

    shared_start = None if start is None else start.shared
    key = jax.random.fold_in(problem.key, 0)
    return problem.backend.map(work, (key, downlink, shared_start), own)


class Shapes(NamedTuple):
    """What a round's messages are like, and what the first ones cost."""

    uplink: PyTree
    objective: Any
    first_bits: int | float


def shapes_of(
    problem: Problem, start: Personalized | None, downlink: PyTree, each: Sequence[PyTree],
    times: Sequence[int],
) -> Shapes:  # fmt: skip
    """Shapes of messages, from those of what clients have.

    Args:
        problem: what does not change.
        start: the warm start.
        downlink: the first.
        each: one client's data, state and warm start, for each size of clients.
        times: how many clients are of that size.

    Raises:
        ValueError: if what clients send in a round depends on the size of their data.
    """
    algorithm, key = problem.algorithm, problem.key

    def message(data, local_start):
        begun = None if start is None else Personalized(start.shared, local_start)
        return wrapped(contract.first_message(algorithm, key, data, begun))

    bits = [
        _cost(problem.first_uplink, jax.eval_shape(message, data, own)) for data, _, own in each
    ]
    steps = [
        jax.eval_shape(contract.client_step, algorithm, key, downlink, local, data)
        for data, local, _ in each
    ]
    uplink = wrapped(steps[0][0])
    if not all(contract.alike(wrapped(step[0]), uplink) for step in steps):
        raise unlike("sent")
    total = sum(map(operator.mul, bits, times))
    whole = total % sum(times) == 0
    mean = total // sum(times) if whole else total / sum(times)
    return Shapes(uplink, steps[0][2]["objective"], mean)


def _remembered(problem: Problem, uplink: PyTree, first: PyTree) -> bool:
    """Whether both ends of the uplink go on from the first messages, which are like a round's."""
    return (
        problem.uplink.cumulative
        and layout_of(first) is None
        and contract.alike(jax.eval_shape(first_of, first), uplink)
    )


def senders(problem: Problem, shapes: Shapes, first: PyTree, clients: int) -> PyTree:
    """What so many clients remember of what they sent, from their first messages."""
    way = problem.uplink
    if _remembered(problem, shapes.uplink, first):
        return jax.vmap(way.memory, axis_size=clients)(first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.uplink)
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (clients, *x.shape)), way.memory(zeros))


def begun(
    problem: Problem, opening: Opening, shapes: Shapes, first: PyTree, local: PyTree,
    sender: PyTree, broken: Bool[Array, " clients"],
) -> tuple[State, Costs]:  # fmt: skip
    """The state before the first round, and what messages cost, from its parts."""
    downlink, receiver = opening.downlink, None
    if problem.uplink.cumulative:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.uplink)
        receiver = opening.received if _remembered(problem, shapes.uplink, first) else zeros
    nobody = jnp.zeros(problem.size, bool)
    state = State(
        round=jnp.zeros((), jnp.int32),
        server=opening.server,
        local=local,
        uplink=channel.Link(problem.uplink, sender, receiver),
        downlink=channel.Link(problem.downlink, problem.downlink.memory(downlink), downlink),
        broadcast_bytes=opening.bytes_down,
        missed=Missed(nobody.astype(jnp.int32), nobody.astype(jnp.uint32))
        if problem.downlink.cumulative and not _everybody(problem)
        else None,
        objective=jnp.full((), jnp.nan, shapes.objective.dtype),
        measure=jnp.full((), jnp.inf, shapes.objective.dtype),
        failure=Failure(opening.failed.astype(jnp.int32), broken),
    )
    costs = Costs(
        shapes.first_bits,
        opening.fixed_bits,
        _cost(problem.uplink, shapes.uplink),
        _cost(problem.downlink, jax.eval_shape(lambda: downlink)),
        channel.fixed_bits(downlink),
        opening.bytes_up,
        opening.bytes_down,
    )
    return state, costs


class _Sent(NamedTuple):
    payload: PyTree
    decoded: PyTree  # what the other end makes of it, which can be differentiated
    memory: PyTree  # the sender's, after


def _send(way: channel.Channel, key: Key[Array, ""], message: PyTree, *memory: PyTree) -> _Sent:
    """A message, encoded and decoded; without a memory it is the first."""
    (before,) = memory or (way.memory(message),)
    payload, after = way.encode(key, message, before)
    return _Sent(payload, way.differentiable(way.decode(payload), message, before), after)


def _broken(message: PyTree, weight: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether a client sends what is not finite, and is heard."""
    numbers = [x for x in jax.tree.leaves(message) if jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = [jnp.isfinite(x).all() for x in numbers]
    return (weight > 0) & ~jnp.asarray([True, *finite]).all()


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


def _cost(way: channel.Channel, message: PyTree) -> int:
    """Bits of a message's parts of fixed length, from its shapes."""

    def payload(message):
        zero = jnp.zeros((), jnp.int32)
        key = jax.random.key(0)
        bound = way.bind(channel.Context(zero, jnp.ones(()), key, zero))
        return bound.encode(key, message, bound.memory(message))[0]

    return channel.fixed_bits(jax.eval_shape(payload, message))


# ---------------------------------------------------------------------------------------------
# A round.


def _everybody(problem: Problem) -> bool:
    return problem.participation.number(problem.size) == problem.size


def _server_key(key: Key[Array, ""]) -> Key[Array, ""]:
    # Client ids are non-negative, so no client ever folds in this number.
    return jax.random.fold_in(key, jnp.uint32(2**32 - 1))


def shared_secret(key: Key[Array, ""]) -> Key[Array, ""]:
    """What the clients have in common and the server has not."""
    return jax.random.fold_in(_server_key(key), 0)  # no round folds in the largest number


def _keys(problem: Problem, done: Int[Array, ""] | int) -> Key[Array, " 3"]:
    """The next round's keys: the server's, the participation's and the downlink's."""
    return jax.random.split(_server_key(jax.random.fold_in(problem.key, done + 1)), 3)


def one_round(problem: Problem, state: State) -> tuple[State, dict[str, Array]]:
    """One federated round: every participant's step, up the wire, the server, down the wire."""
    clients, before = problem.clients, (state.local, state.uplink.sender)
    turn = turn_of(problem, state)
    own = (
        clients.data, *before, clients.ids, clients.weights, jnp.arange(len(clients)), turn.present,
    )  # fmt: skip
    number = problem.participation.number(problem.size)
    if number is not None and not _everybody(problem) and problem.backend.gathers:
        # Only the participants are computed; the others' states are left where they are.
        some, chosen, which = picked(own, turn.present > 0, number)
        sent, found = stepped(problem, turn, some, which)
        nobody = jnp.zeros(len(clients), bool)
        whole = before, (nobody, nobody)
        found = jax.tree.map(lambda whole, x: whole.at[chosen].set(x), whole, found)
    else:
        sent, found = stepped(problem, turn, own, problem.size)
    return closed(problem, state, turn, sent, found)


class Turn(NamedTuple):
    """What is settled before the clients' part of a round."""

    shared: PyTree  # what all of them get
    server_key: Key[Array, ""]
    inclusion: Float[Array, " m"]
    present: Float[Array, " clients"]  # the same, with those that fill up devices
    happens: Bool[Array, ""]


def turn_of(problem: Problem, state: State) -> Turn:
    """Who takes part in the next round, and what is sent to them."""
    clients = problem.clients
    key = jax.random.fold_in(problem.key, state.round + 1)
    server_key, choice_key, _ = _keys(problem, state.round)
    ids, weights = clients.ids[: problem.size], clients.weights[: problem.size]
    inclusion = problem.participation.inclusion(choice_key, state.round, ids, weights)
    # Of participants without any weight there is no mean: nobody takes part then.
    happens = inclusion @ weights != 0
    inclusion = inclusion if _everybody(problem) else jnp.where(happens, inclusion, 0)
    present = jnp.pad(inclusion, (0, len(clients) - problem.size))
    shared = (key, shared_secret(problem.key), state.round + 1, state.downlink.receiver)
    return Turn(shared, server_key, inclusion, present, happens)


def stepped(
    problem: Problem, turn: Turn, own: PyTree, gathering: int | slice | Array
) -> tuple[PyTree, tuple[PyTree, PyTree]]:
    """The steps of some clients.

    Args:
        problem: what does not change.
        turn: what is settled.
        own: their data, states, memories, ids, weights, positions and presence.
        gathering: whose messages are gathered; see `collect`.

    Returns:
        What they send, reduced; and for each client its state and memory, and whether its objective
        and its message are not finite.
    """
    algorithm, everybody = problem.algorithm, _everybody(problem)

    def work(shared, own):
        key, secret, number, downlink = shared
        data, local, memory, client_id, weight, place, present = own
        step_key, channel_key = jax.random.split(jax.random.fold_in(key, client_id))
        uplink, new_local, diagnostics = contract.client_step(
            algorithm, step_key, downlink, local, data
        )
        way = problem.uplink.bind(channel.Context(place, weight, secret, number))
        sent = _send(way, channel_key, wrapped(uplink), memory)
        there = present > 0
        share = weight * present.astype(weight.dtype)
        # Of absent clients the server has the last message already: they have changed nothing.
        changed = weight * there.astype(weight.dtype) if way.cumulative else share
        broken = _broken(uplink, share)
        contributed = (
            contributions(sent.decoded, changed),
            contributions((diagnostics, jnp.ones_like(weight)), share),
            _bytes(sent.payload, present),
            _one_more(broken, weight),
        )
        kept = new_local, sent.memory
        if not everybody:
            kept = jax.tree.map(lambda new, old: jnp.where(there, new, old), kept, (local, memory))
        lost = there & ~jnp.isfinite(diagnostics["objective"])
        return contributed, (kept, (lost, broken))

    return collect(problem.backend, work, turn.shared, own, gathering)


def closed(
    problem: Problem, state: State, turn: Turn, sent: PyTree, found: Any
) -> tuple[State, dict[str, Array]]:
    """The server's part of a round, from what all participants sent and what all clients keep."""
    algorithm, inclusion = problem.algorithm, turn.inclusion
    (local, sender), (lost, broken) = found
    message, told, written, failures = sent
    failed = plain(failures) > 0
    message = _marred(problem.uplink.receive(message, state.uplink.receiver), failed)
    server, measured = contract.server_step(
        algorithm, turn.server_key, state.server, plain(message)
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
    new_state = State(
        round=state.round + 1,
        server=server,
        local=local,
        uplink=channel.Link(problem.uplink, sender, message if problem.uplink.cumulative else None),
        downlink=downlink[0],
        broadcast_bytes=downlink[1],
        missed=missed,
        objective=diagnostics["objective"].astype(state.objective.dtype),
        measure=jnp.where(jnp.isnan(measure), jnp.inf, measure).astype(state.measure.dtype),
        failure=_failure(state, sound, lost | broken),
    )
    if not _everybody(problem):
        link = channel.Link(problem.uplink, sender, state.uplink.receiver)
        unchanged = replace(state, round=new_state.round, local=local, uplink=link)
        new_state = _chosen(turn.happens, new_state, unchanged)
        none = jax.tree.map(lambda x: blank(x.shape, x.dtype), diagnostics)
        diagnostics = _chosen(turn.happens, diagnostics, none)
    participants = (inclusion > 0).sum(dtype=jnp.int32)
    traffic["bytes_up"] = _counted(written)
    return new_state, {**diagnostics, "participants": participants, **traffic}


def _chosen(condition: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def blank(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """What the history says where nothing was computed."""
    number = jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 0
    return jnp.full(shape, number, dtype)


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
    sent = _send(way, _keys(problem, state.round + 1)[2], message, link.sender)
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


def released(problem: Problem, state: State, costs: Costs) -> tuple[Release, ...]:
    """What has left the clients up to this state, the rounds' messages last."""
    weights = problem.clients.weights[: problem.size]
    everybody, some = participation.everybody(), problem.participation
    times = jnp.maximum(state.round, state.failure.round)
    kept = jax.tree.leaves((state.local, state.uplink.sender))
    return (
        *problem.earlier,
        Release(problem.first_uplink, everybody, costs.first_up, 1, weights, stateless=True),
        Release(problem.uplink, some, costs.up, times, weights, stateless=not kept),
    )


def result_of(problem: Problem, state: State) -> Personalized:
    """The models at this state; the padding clients are cut off."""
    algorithm = problem.algorithm
    downlink = algorithm.downlink(state.server)
    local = problem.backend.map(
        lambda downlink, own: contract.client_result(algorithm, downlink, *own),
        downlink,
        (state.local, problem.clients.data),
    )
    if layout_of(local) is not None:
        raise unlike("left")
    local = jax.tree.map(lambda x: x[: problem.size], local)
    return Personalized(algorithm.shared_result(state.server), local)
