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
from jaxfed.core.buckets import (
    each_first,
    filled,
    first_of,
    is_buckets,
    layout_of,
    picked,
    unlike,
)
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

    @property
    def numbers(self) -> Int[np.ndarray, " rows"]:
        """Each row's client, counted from 0; `size` and more for rows that fill up devices."""
        if self.clients.blocks is None:
            return np.arange(len(self.clients.ids))
        return self.clients.layout.numbers

    @property
    def rows(self) -> slice | Int[Array, " clients"]:
        """Each client's row."""
        clients = self.clients
        # A slice moves nothing.
        full = clients.blocks is None or self.size == len(clients.ids)
        return slice(self.size) if full else jnp.asarray(clients.layout.rows)

    def cut(self, tree: PyTree) -> PyTree:
        """Arrays as the clients were given: those of several processes stay where they lie."""
        if self.clients.blocks is not None:
            return tree
        return jax.tree.map(lambda x: x[: self.size], tree)

    def in_rows(self, values: Float[Array, " clients"]) -> Float[Array, " rows"]:
        """One number a client, and 0 for rows that fill up devices."""
        rows = len(self.clients.ids)
        if self.clients.blocks is None:
            return jnp.pad(values, (0, rows - self.size))
        return jnp.zeros(rows, values.dtype).at[self.clients.layout.rows].set(values)


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
    if len(clients.ids) % multiple or is_buckets(clients.data):
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
    places = jnp.asarray(problem.numbers)
    local_start = None if start is None else start.local
    if clients.blocks is None:
        local_start = jax.tree.map(lambda x: x[places % problem.size], local_start)
    own = clients.data, clients.ids, clients.weights, places, local_start
    heard, (first, broken) = announced(problem, start, own, problem.rows)
    opening = opened(problem, heard, jax.eval_shape(first_of, clients.data), start)
    local = begun(problem, start, opening.downlink, (clients.data, clients.ids, local_start))
    if layout_of(local) is not None:
        raise unlike("kept")
    layout = layout_of(clients.data)
    shapes = shapes_of(
        problem, start, opening.downlink,
        jax.eval_shape(each_first, (clients.data, local, local_start)),
        (1,) if layout is None else layout.sizes,
    )  # fmt: skip
    remembered = layout_of(first) is None and remembers_first(
        problem, jax.eval_shape(first_of, first), shapes.uplink
    )
    if remembered:
        memory = jax.vmap(problem.uplink.memory, axis_size=len(clients.ids))(first)
    else:
        # Where the clients are, as everything that they keep.
        memory = problem.backend.map(
            lambda zeros, _: problem.uplink.memory(zeros), zeros_of(shapes.uplink), clients.ids
        )
    return with_clients(problem, opening, shapes, remembered, (local, memory), broken)


def with_clients(
    problem: Problem, opening: "Opening", shapes: "Shapes", remembered: bool,
    kept: tuple[PyTree, PyTree], broken: Bool[Array, " rows"],
) -> tuple[State, Costs]:  # fmt: skip
    """The first state, with what the clients keep and whose message is not finite, and costs."""
    state = first_state(problem, opening, shapes.uplink, shapes.objective, remembered)
    state = replace(
        state,
        local=kept[0],
        uplink=replace(state.uplink, sender=kept[1]),
        failure=state.failure._replace(clients=broken),
    )
    return state, costs_of(problem, opening, shapes.uplink, shapes.first_bits)


# What follows is some clients' part each.


def announced(
    problem: Problem, start: Personalized | None, own: PyTree, gathering: int | slice | Array
) -> tuple[PyTree, tuple[PyTree, Bool[Array, " rows"]]]:
    """The first messages of some clients.

    Args:
        problem: the run.
        start: the warm start; its shared part alone is looked at.
        own: the clients' data, ids, weights, positions and warm starts.
        gathering: whose messages are gathered; see `collect`.

    Returns:
        What the server hears; and for each client the message, if it is remembered, and whether it
        is not finite.
    """

    def announce(shared, own):
        key, secret, shared_start = shared
        data, client_id, weight, place, local_start = own
        context = channel.Context(place, weight, secret, jnp.zeros((), jnp.int32))
        begun = None if start is None else Personalized(shared_start, local_start)
        sent, broken = first_sent(problem, key, client_id, context, data, begun)
        # Only what both ends may remember is kept.
        kept = sent.decoded if problem.uplink.cumulative else None
        broken &= weight > 0
        # Who only fills up a device sends nothing.
        real = (place < problem.size).astype(weight.dtype)
        heard = first_contribution(sent.payload, sent.decoded, weight, real, broken)
        return heard, (kept, broken)

    shared_start = None if start is None else start.shared
    shared = key_of_start(problem.key), shared_secret(problem.key), shared_start
    return collect(problem.backend, announce, shared, own, gathering)


def begun(problem: Problem, start: Personalized | None, downlink: PyTree, own: PyTree) -> PyTree:
    """The first states of some clients, from their data, ids and warm starts."""

    def initial(shared, own):
        key, downlink, shared_start = shared
        data, client_id, local_start = own
        begun = None if start is None else Personalized(shared_start, local_start)
        return first_local(problem, key, client_id, downlink, data, begun)

    shared_start = None if start is None else start.shared
    return problem.backend.map(initial, (key_of_start(problem.key), downlink, shared_start), own)


class Shapes(NamedTuple):
    """What a round's messages are like, and what the first ones cost."""

    uplink: PyTree
    objective: jax.ShapeDtypeStruct
    first_bits: int | float  # a mean where clients' data differ in shape


def shapes_of(
    problem: Problem, start: Personalized | None, downlink: PyTree, each: Sequence[PyTree],
    times: Sequence[int],
) -> Shapes:  # fmt: skip
    """Shapes of messages, from those of what clients have.

    Args:
        problem: the run.
        start: the warm start.
        downlink: the first.
        each: one client's data, state and warm start, for each size of clients.
        times: how many clients are of that size.

    Raises:
        ValueError: if what clients send in a round depends on the size of their data.
    """

    def message(data, local_start):
        begun = None if start is None else Personalized(start.shared, local_start)
        return wrapped(contract.first_message(problem.algorithm, problem.key, data, begun))

    bits = [
        _cost(problem.first_uplink, jax.eval_shape(message, data, own)) for data, _, own in each
    ]
    steps = [messages_of_round(problem, downlink, local, data) for data, local, _ in each]
    uplink, objective = steps[0]
    if not all(contract.alike(other, uplink) for other, _ in steps):
        raise unlike("sent")
    total, count = sum(map(operator.mul, bits, times)), sum(times)
    return Shapes(uplink, objective, total / count if total % count else total // count)


# What follows is one end's part each, for runs within one program and for those without.


def key_of_start(key: Key[Array, ""]) -> Key[Array, ""]:
    """The key of what comes before the rounds."""
    return jax.random.fold_in(key, 0)


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
    key = _server_key(key_of_start(problem.key))
    server = algorithm.server_init(key, plain(total), like, start)
    server = contract.arrays_of(algorithm, "server_init", server)
    way = problem.first_downlink
    broadcast = _send(way, _keys(problem, 0)[2], algorithm.downlink(server))
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
        if problem.downlink.cumulative and not _everybody(problem)
        else None,
        objective=jnp.full((), jnp.nan, objective.dtype),
        measure=jnp.full((), jnp.inf, objective.dtype),
        failure=Failure(opening.failed.astype(jnp.int32), nobody),
    )


def costs_of(problem: Problem, opening: Opening, uplink: PyTree, first_up: int | float) -> Costs:
    """What messages cost, from their shapes."""
    downlink, payload = opening.downlink, opening.broadcast.payload
    return Costs(
        first_up,
        channel.fixed_bits(payload),
        _cost(problem.uplink, uplink),
        _cost(problem.downlink, jax.eval_shape(lambda: downlink)),
        channel.fixed_bits(downlink),
        opening.written,
        channel.variable_bytes(payload),
    )


def zeros_of(like: PyTree) -> PyTree:
    """Zeros of these shapes and types."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


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
    finite = [jnp.isfinite(x).all() for x in numbers]
    return ~jnp.asarray([True, *finite]).all()


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
    inclusion, shared = turn_of(problem, state)
    present = problem.in_rows(inclusion)
    own = (
        clients.data, *before, clients.ids, clients.weights, jnp.asarray(problem.numbers), present,
    )  # fmt: skip
    number = problem.participation.number(problem.size)
    if number is not None and not _everybody(problem) and problem.backend.gathers:
        # Only the participants are computed; the others' states are left where they are.
        some, chosen, which = picked(own, present > 0, number)
        heard, found = stepped(problem, shared, some, which)
        nobody = jnp.zeros(len(clients.ids), bool)
        whole = before, (nobody, nobody)
        found = jax.tree.map(lambda whole, x: whole.at[chosen].set(x), whole, found)
    else:
        heard, found = stepped(problem, shared, own, problem.rows)
    (local, sender), (lost, broken) = found
    uplink = replace(state.uplink, sender=sender)
    # Whatever the server makes of it, participants have done their steps.
    state = replace(state, local=local, uplink=uplink)
    return server_round(problem, state, inclusion, heard, lost | broken)


def turn_of(problem: Problem, state: State) -> tuple[Float[Array, " clients"], PyTree]:
    """Who takes part in the next round, and what all of them get for it."""
    key = key_of_round(problem.key, state.round)
    shared = (key, shared_secret(problem.key), state.round + 1, state.downlink.receiver)
    return chosen_inclusion(problem, state.round), shared


def stepped(
    problem: Problem, shared: PyTree, own: PyTree, gathering: int | slice | Array
) -> tuple[PyTree, tuple[PyTree, PyTree]]:
    """The steps of some clients.

    Args:
        problem: the run.
        shared: what all of them get.
        own: their data, states, memories, ids, weights, positions and presence.
        gathering: whose messages are gathered; see `collect`.

    Returns:
        What the server hears; and for each client its state and memory, and whether its objective
        and its message are not finite.
    """
    everybody = _everybody(problem)

    def work(shared, own):
        data, local, memory, client_id, weight, place, present = own
        known = channel.Context(place, weight, shared[1], shared[2])
        step = client_round(problem, shared[0], client_id, known, shared[3], local, memory, data)
        broken = step.broken & (weight * present.astype(weight.dtype) > 0)
        heard = contribution(problem, step._replace(broken=broken), weight, present)
        there = present > 0
        kept = step.local, step.memory
        if not everybody:
            kept = jax.tree.map(lambda new, old: jnp.where(there, new, old), kept, (local, memory))
        lost = there & ~jnp.isfinite(step.diagnostics["objective"])
        return heard, (kept, (lost, broken))

    return collect(problem.backend, work, shared, own, gathering)


def key_of_round(key: Key[Array, ""], done: Int[Array, ""]) -> Key[Array, ""]:
    """The key of the round after so many."""
    return jax.random.fold_in(key, done + 1)


def chosen_inclusion(problem: Problem, done: Int[Array, ""]) -> Float[Array, " clients"]:
    """Who takes part in the round after so many: factors on the clients' weights."""
    clients = problem.clients
    ids, weights = clients.ids[problem.rows], clients.weights[problem.rows]
    choice_key = _keys(problem, done)[1]
    inclusion = problem.participation.inclusion(choice_key, done, ids, weights)
    if _everybody(problem):
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
    failed_clients: Bool[Array, " clients"],
) -> tuple[State, dict[str, Array]]:
    """The server's part of a round: its step, and down the wire.

    Args:
        problem: the run.
        state: the state before, with the clients' own parts as they are after.
        inclusion: who took part.
        heard: their contributions, reduced.
        failed_clients: who of them has what is not finite.
    """
    server_key = _keys(problem, state.round)[0]
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
    if not _everybody(problem):
        happens = (inclusion > 0).any()
        new_state = _chosen(happens, new_state, replace(state, round=new_state.round))
        none = jax.tree.map(lambda x: blank(x.shape, x.dtype), diagnostics)
        diagnostics = _chosen(happens, diagnostics, none)
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


def broadcast_of(problem: Problem, before: State, after: State) -> PyTree:
    """What the server sends after a round, as it travels."""
    message = problem.algorithm.downlink(after.server)
    key = _keys(problem, before.round + 1)[2]
    return _send(problem.downlink, key, message, before.downlink.sender).payload


def released(problem: Problem, state: State, costs: Costs) -> tuple[Release, ...]:
    """What has left the clients up to this state, the rounds' messages last."""
    weights = problem.clients.weights[problem.rows]
    everybody, some = participation.everybody(), problem.participation
    times = jnp.maximum(state.round, state.failure.round)
    kept = jax.tree.leaves((state.local, state.uplink.sender))
    return (
        *problem.earlier,
        Release(problem.first_uplink, everybody, costs.first_up, 1, weights, stateless=True),
        Release(problem.uplink, some, costs.up, times, weights, stateless=not kept),
    )


def result_of(problem: Problem, state: State) -> Personalized:
    """The models at this state; of clients that were padded here, without the padding."""
    algorithm = problem.algorithm
    downlink = algorithm.downlink(state.server)
    local = problem.backend.map(
        lambda downlink, own: contract.client_result(algorithm, downlink, *own),
        downlink,
        (state.local, problem.clients.data),
    )
    if layout_of(local) is not None:
        raise unlike("left")
    local = problem.cut(local)
    return Personalized(algorithm.shared_result(state.server), local)
