"""One round of a run, and what comes before the first: pure functions of a problem and a state."""

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

    first_up: int = eqx.field(static=True)
    first_down: int = eqx.field(static=True)
    up: int = eqx.field(static=True)
    down: int = eqx.field(static=True)
    whole_down: int = eqx.field(static=True)  # of a downlink as it is
    first_bytes_up: UInt32[Array, ""]  # of all clients together
    first_bytes_down: UInt32[Array, ""]
    varies: bool = eqx.field(static=True)  # whether a round's messages have parts of that kind


# What a round's messages took, for the history's bits: bytes that all participants sent, and the
# broadcast's; broadcasts that they received, and bytes of those that had been missed; and how many
# got the whole message instead.
TRAFFIC = ("bytes_up", "broadcast_bytes", "messages_down", "missed_bytes", "whole_down")


# ---------------------------------------------------------------------------------------------
# Before the first round.


def prepared(problem: Problem, rounds: int) -> Problem:
    """Pad the clients to what the backend needs and let the algorithm prepare their data."""
    clients, shortage = problem.clients, -problem.size % problem.backend.multiple
    if shortage:
        # Copies of real clients with weight 0: zeros could make NaN in a derivative.
        index = jnp.arange(problem.size + shortage) % problem.size
        weights = jnp.pad(clients.weights, (0, shortage))
        clients = eqx.tree_at(
            lambda c: c.weights, jax.tree.map(lambda x: x[index], clients), weights
        )

    made: tuple[Any, list[int | None]] = None, []

    def prepare(_, own):
        nonlocal made
        data, client_id = own
        leaves, tree = jax.tree.flatten(problem.algorithm.prepare(data, client_id, rounds))
        given = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(data))}
        made = tree, [given.get(id(leaf)) for leaf in leaves]
        return [leaf for leaf, place in zip(leaves, made[1], strict=True) if place is None]

    # What is passed on as it was given is not computed, and not held twice.
    new = iter(problem.backend.map(prepare, None, (clients.data, clients.ids)))
    tree, places = made
    old = jax.tree.leaves(clients.data)
    data = jax.tree.unflatten(tree, [next(new) if x is None else old[x] for x in places])
    # Not by their constructor: those that fill up devices have the ids of others.
    clients = eqx.tree_at(lambda c: c.data, clients, data)
    return eqx.tree_at(lambda p: p.clients, problem, clients)


def begin(problem: Problem, start: Personalized | None) -> tuple[State, Costs]:
    """Everybody's first state, and what messages cost."""
    algorithm, clients = problem.algorithm, problem.clients
    key = jax.random.fold_in(problem.key, 0)
    shared_start, local_start = (None, None) if start is None else start
    places = jnp.arange(len(clients))
    local_start = jax.tree.map(lambda x: x[places % problem.size], local_start)
    first_up = 0

    def starting(shared: PyTree, local: PyTree) -> Personalized | None:
        return None if start is None else Personalized(shared, local)

    def announce(shared, own):
        nonlocal first_up
        key, secret, shared_start = shared
        data, client_id, weight, place, local_start = own
        own_key, channel_key = jax.random.split(jax.random.fold_in(key, client_id))
        message = contract.first_message(
            algorithm, own_key, data, starting(shared_start, local_start)
        )
        context = channel.Context(place, weight, secret, jnp.zeros((), jnp.int32))
        sent = _send(problem.first_uplink.bind(context), channel_key, wrapped(message))
        first_up = channel.fixed_bits(sent.payload)
        # Who only fills up a device sends nothing.
        real = (place < problem.size).astype(weight.dtype)
        written = _bytes(sent.payload, real)
        # Only what both ends may remember is kept.
        kept = sent.decoded if problem.uplink.cumulative else None
        broken = _broken(message, weight)
        sent_on = contributions(sent.decoded, weight), written, _one_more(broken, weight)
        return sent_on, (kept, broken)

    (total, written, failures), (first, broken) = collect(
        problem.backend,
        announce,
        (key, shared_secret(problem.key), shared_start),
        (clients.data, clients.ids, clients.weights, places, local_start),
        problem.size,
    )
    failed = plain(failures) > 0
    total = _marred(problem.first_uplink.receive(total, None), failed)
    like = jax.eval_shape(_first_of, clients.data)
    server = algorithm.server_init(_server_key(key), plain(total), like, start)
    server = contract.arrays_of(algorithm, "server_init", server)

    way = problem.first_downlink
    broadcast = _send(way, _keys(problem, 0)[2], algorithm.downlink(server))
    downlink = way.receive(broadcast.decoded, None)

    def initial(shared, own):
        key, downlink, shared_start = shared
        data, client_id, local_start = own
        own_key, _ = jax.random.split(jax.random.fold_in(key, client_id))
        begun = starting(shared_start, local_start)
        return contract.client_init(algorithm, own_key, downlink, data, begun)

    local = problem.backend.map(
        initial, (key, downlink, shared_start), (clients.data, clients.ids, local_start)
    )

    own_data, own_local = jax.eval_shape(_first_of, (clients.data, local))
    step = jax.eval_shape(contract.client_step, algorithm, key, downlink, own_local, own_data)
    uplink, objective = wrapped(step[0]), step[2]["objective"]
    nobody = jnp.zeros(problem.size, bool)
    state = State(
        round=jnp.zeros((), jnp.int32),
        server=server,
        local=local,
        uplink=_first_link(problem, uplink, first, total),
        downlink=channel.Link(problem.downlink, problem.downlink.memory(downlink), downlink),
        broadcast_bytes=channel.variable_bytes(broadcast.payload),
        missed=Missed(nobody.astype(jnp.int32), nobody.astype(jnp.uint32))
        if problem.downlink.cumulative and not _everybody(problem)
        else None,
        objective=jnp.full((), jnp.nan, objective.dtype),
        measure=jnp.full((), jnp.inf, objective.dtype),
        failure=Failure(failed.astype(jnp.int32), broken),
    )
    up = _payload(problem.uplink, uplink)
    down = _payload(problem.downlink, jax.eval_shape(lambda: downlink))
    costs = Costs(
        first_up,
        channel.fixed_bits(broadcast.payload),
        channel.fixed_bits(up),
        channel.fixed_bits(down),
        channel.fixed_bits(downlink),
        _counted(written),
        state.broadcast_bytes,
        channel.varies(up) or channel.varies(down),
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


def _first_link(problem: Problem, uplink: PyTree, first: PyTree, total: PyTree) -> channel.Link:
    """What both ends of the uplink remember: the first messages, if they are like a round's."""
    way = problem.uplink
    if way.cumulative and contract.alike(jax.eval_shape(_first_of, first), uplink):
        sender = jax.vmap(way.memory, axis_size=len(problem.clients))(first)
        return channel.Link(way, sender, total)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), uplink)
    sender = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (len(problem.clients), *x.shape)), way.memory(zeros)
    )
    return channel.Link(way, sender, zeros if way.cumulative else None)


def _payload(way: channel.Channel, message: PyTree) -> PyTree:
    """Shapes of what a message of these shapes becomes."""

    def payload(message):
        zero = jnp.zeros((), jnp.int32)
        key = jax.random.key(0)
        bound = way.bind(channel.Context(zero, jnp.ones(()), key, zero))
        return bound.encode(key, message, bound.memory(message))[0]

    return jax.eval_shape(payload, message)


def _first_of(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)


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
    algorithm, clients = problem.algorithm, problem.clients
    everybody, chosen = _everybody(problem), None
    key = jax.random.fold_in(problem.key, state.round + 1)
    server_key, choice_key, _ = _keys(problem, state.round)
    ids, weights = clients.ids[: problem.size], clients.weights[: problem.size]
    inclusion = problem.participation.inclusion(choice_key, state.round, ids, weights)
    # Of participants without any weight there is no mean: nobody takes part then.
    happens = inclusion @ weights != 0
    inclusion = inclusion if everybody else jnp.where(happens, inclusion, 0)
    padded = jnp.pad(inclusion, (0, len(clients) - problem.size))

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

    shared = (key, shared_secret(problem.key), state.round + 1, state.downlink.receiver)
    before = state.local, state.uplink.sender
    own = (
        clients.data, *before, clients.ids, clients.weights, jnp.arange(len(clients)), padded,
    )  # fmt: skip
    number = problem.participation.number(problem.size)
    if number is not None and not everybody and problem.backend.gathers:
        # Only the participants are computed; the others' states are left where they are.
        chosen = jnp.nonzero(padded, size=number)[0]
        picked = jax.tree.map(lambda x: x[chosen], own)
        sent, found = collect(problem.backend, work, shared, picked, number)
        nobody = jnp.zeros(len(clients), bool)
        whole = before, (nobody, nobody)
        found = jax.tree.map(lambda whole, x: whole.at[chosen].set(x), whole, found)
    else:
        sent, found = collect(problem.backend, work, shared, own, problem.size)
    (local, sender), (lost, broken) = found
    message, told, written, failures = sent
    failed = plain(failures) > 0
    message = _marred(problem.uplink.receive(message, state.uplink.receiver), failed)
    server, measured = contract.server_step(algorithm, server_key, state.server, plain(message))

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
    if not everybody:
        link = channel.Link(problem.uplink, sender, state.uplink.receiver)
        unchanged = replace(state, round=new_state.round, local=local, uplink=link)
        new_state = _chosen(happens, new_state, unchanged)
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
    local = jax.tree.map(lambda x: x[: problem.size], local)
    return Personalized(algorithm.shared_result(state.server), local)
