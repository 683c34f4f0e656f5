"""The server's part of a run: open the run, then open and close each round."""

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed.core.backends.backend import collect
from jaxfed.core.contract import calls
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.reduction import plain
from jaxfed.core.contract.remarks import ENERGIES
from jaxfed.core.round.measure import (
    WINDOW,
    extended,
    left_by_gains,
    left_by_objectives,
    size_of,
)
from jaxfed.core.round.messages import (
    ClientMessage,
    Contribution,
    contribution,
    reduced_message,
    send,
    total_bytes,
)
from jaxfed.core.round.problem import (
    Broadcast,
    Costs,
    Failure,
    Missed,
    Problem,
    State,
    blank,
    broadcast_of,
    server_key_of,
    server_keys,
    zeros_of,
)
from jaxfed.core.round.protocol import Kind, protocol, received_shapes
from jaxfed.core.wire import channel
from jaxfed.core.wire.calls import memory


class Opening(NamedTuple):
    """The server's result before the first round."""

    state: State
    costs: Costs
    payload: PyTree  # of the first downlink


class Closing(NamedTuple):
    """The server's result of a round."""

    state: State
    record: dict[str, Array]  # for the history
    payload: PyTree  # of the next downlink


def open_run(
    problem: Problem,
    received: Contribution,
    kinds: tuple[Kind, ...],
    warm_start: Personalized | None,
) -> Opening:
    """Initialise the server from the first messages and send the first downlink.

    Args:
        problem: the run.
        received: all clients' first messages, reduced.
        kinds: shapes of the clients' data, starting with the largest.
        warm_start: a warm start.

    Raises:
        ValueError: if what clients keep or send in a round depends on the size of their data.
    """
    algorithm, way = problem.algorithm, problem.wire.first_down
    first, failed = reduced_message(problem.wire.first_up, received, None)
    key = server_key_of(jax.random.fold_in(problem.key, 0))
    # The largest clients' shapes, in which every client's data fit; the server sees no values.
    server = algorithm.server_init(key, plain(first), kinds[0].data, warm_start)
    server = calls.checked_result(algorithm, "server_init", server)
    # This downlink opens round 1, hence the keys of zero rounds done.
    message = algorithm.downlink(server)
    transit = send(way, server_keys(problem, 0).downlink, message, memory(way, message))
    # What follows is about the downlink as clients have it, after the channel.
    downlink = way.receive(transit.decoded, None)

    shapes = protocol(problem, kinds, warm_start, downlink)
    dtype = shapes.diagnostics["objective"].dtype
    # Both ends of a difference channel must start from the message as decoded.
    known = None
    if problem.wire.up.cumulative:
        known = first if shapes.remembered else zeros_of(received_shapes(shapes.uplink))
    nobody = jnp.zeros(problem.size, bool)
    state = State(
        round=jnp.zeros((), jnp.int32),
        server=server,
        local=None,
        uplink=channel.Link(problem.wire.up, None, known),
        downlink=channel.Link(problem.wire.down, problem.wire.down.memory(downlink), downlink),
        broadcast_bytes=channel.variable_bytes(transit.payload),
        missed=Missed(nobody.astype(jnp.int32), nobody.astype(jnp.uint32))
        if problem.wire.down.cumulative and not problem.everybody
        else None,
        # NaN and infinity: the first rounds have nothing to compare with, and meet no tolerance.
        first_objective=jnp.full((), jnp.nan, dtype),
        window=jnp.full(WINDOW, jnp.nan, dtype),
        measure=jnp.full((), jnp.inf, dtype),
        failure=Failure(failed.astype(jnp.int32), nobody),
    )
    # Shapes determine the bits of all messages; only variable parts need measuring.
    sent = channel.variable_bytes(transit.payload)
    costs = shapes.costs(total_bytes(received), sent)
    return Opening(state, costs, transit.payload)


def inclusion_of(problem: Problem, done: Int[Array, ""]) -> Float[Array, " clients"]:
    """Factors on the clients' weights in round `done + 1`; 0 for absent clients."""
    clients = problem.clients
    ids, weights = clients.ids[problem.rows], clients.weights[problem.rows]
    key = server_keys(problem, done).participation
    inclusion = problem.participation.inclusion(key, done, ids, weights)
    calls.check_inclusion(problem.participation, len(ids), inclusion)
    if problem.everybody:
        return inclusion
    # If all participants have weight 0, there is no mean and the round does not take place.
    return jnp.where(inclusion @ weights != 0, inclusion, 0)


def call_round(problem: Problem, state: State) -> tuple[Float[Array, " clients"], Broadcast]:
    """The participants of the next round and its broadcast."""
    broadcast = broadcast_of(problem, state.round + 1, state.downlink.receiver)
    return inclusion_of(problem, state.round), broadcast


def reduce(
    problem: Problem, messages: ClientMessage, inclusion: Float[Array, " m"] | None
) -> tuple[Contribution, Bool[Array, " m"]]:
    """Decode and reduce the clients' messages.

    Args:
        problem: the run.
        messages: a row per client, including absent ones.
        inclusion: factors on the clients' weights; 0 for absent ones. None before the rounds, when
            all clients send.

    Returns:
        The reduction, and for each client whether its objective or message is not finite.
    """
    clients, backend, size = problem.clients, problem.backend, problem.size
    way = problem.wire.first_up if inclusion is None else problem.wire.up

    def one(_, arrival):
        message, client_id, weight, present = arrival
        message = message._replace(decoded=way.decode(message.payload))
        return contribution(message, client_id, weight, present, way.cumulative)

    present = jnp.ones_like(clients.weights) if inclusion is None else inclusion
    arrivals = messages, clients.ids, clients.weights, present
    number = problem.participation.number(size)
    if inclusion is None or number is None or problem.everybody or not backend.gathers:
        return collect(backend, one, None, arrivals, size)
    # The number is static, so only the participants' messages are decoded and gathered. If the
    # round does not take place, this is client 0 repeated, which counts as absent.
    chosen = jnp.nonzero(inclusion, size=number)[0]
    participants = jax.tree.map(lambda x: x[chosen], arrivals)
    received, failed = collect(backend, one, None, participants, number)
    return received, jnp.zeros(size, bool).at[chosen].set(failed)


def close_round(
    problem: Problem,
    state: State,
    inclusion: Float[Array, " clients"],
    received: Contribution,
    failed_clients: Bool[Array, " rows"],
) -> Closing:
    """Take the algorithm's server step and send the next downlink.

    Args:
        problem: the run.
        state: the server's state before the round.
        inclusion: factors on the clients' weights; 0 for absent ones.
        received: the participants' messages, reduced.
        failed_clients: clients whose objective or message is not finite.
    """
    message, failed = reduced_message(problem.wire.up, received, state.uplink.receiver)
    key = server_keys(problem, state.round).step
    algorithm = problem.algorithm.at_round(state.round + 1)
    server, found = calls.server_step(algorithm, key, state.server, plain(message))
    measured = dict(found)

    # Average over participants, so that rounds with different participants are comparable.
    share = plain(received.share)
    # No participant has weight: the sums are zero as well, and the round does not take place.
    share = jnp.where(share != 0, share, 1)
    diagnostics = {name: x / share for name, x in plain(received.diagnostics).items()}
    # A sum with one NaN is NaN, so this covers every participant that has weight. The server may
    # replace the clients' mean by an objective of its own, so test both.
    sound = jnp.isfinite(diagnostics["objective"]) & ~failed
    gaps = [each.pop("gap") for each in (diagnostics, measured) if "gap" in each]
    scale = diagnostics.pop("objective_scale", None)
    diagnostics |= measured
    objective = diagnostics["objective"].astype(state.measure.dtype)
    sound &= ~jnp.isnan(objective)
    first = jnp.where(jnp.isnan(state.first_objective), objective, state.first_objective)
    first = jax.lax.stop_gradient(first)
    captured = sum(diagnostics[name] for name in ENERGIES if name in diagnostics)
    size = size_of(objective, first, captured, scale)
    if gaps:
        gap = sum(gaps) / size
        if problem.wire.up.cumulative and not problem.everybody:
            # The mean of all memories changes until each client has taken part, which takes so
            # many rounds. Without memories, gaps of different participants scatter already.
            gap = gap * (problem.size / jnp.maximum(jnp.sum(inclusion > 0), 1))
        window = extended(state.window, gap)
        measure = left_by_gains(window)
    else:
        window = extended(state.window, objective)
        measure = left_by_objectives(window / size)
    if problem.hides:
        # Machines send no objectives through it, and the server counts zeros.
        measure = jnp.where((objective == 0) & (first == 0), jnp.nan, measure)
    given = diagnostics.get("stopping_measure", measure).astype(state.measure.dtype)
    diagnostics["stopping_measure"] = given
    measure = jnp.where(jnp.isnan(given), jnp.inf, given)

    present = inclusion > 0
    down = _send_down(problem, state, server, present)
    after = replace(
        state,
        round=state.round + 1,
        server=server,
        # Only a difference channel needs the last message again. As received, it is the reduction
        # of what all clients have in their memories.
        uplink=replace(state.uplink, receiver=message if problem.wire.up.cumulative else None),
        downlink=down.link,
        broadcast_bytes=channel.variable_bytes(down.payload),
        missed=down.missed,
        first_objective=first,
        window=window,
        measure=measure.astype(state.measure.dtype),
        failure=_failure(state, sound, failed_clients),
    )
    if not problem.everybody:
        # A round without participants changes only the round number: nothing was sent, so neither
        # the downlink nor what clients have yet to receive may advance.
        happens = present.any()
        after = _chosen(happens, after, replace(state, round=after.round))
        none = jax.tree.map(lambda x: blank(x.shape, x.dtype), diagnostics)
        diagnostics = _chosen(happens, diagnostics, none)
    record = {
        **diagnostics,
        "participants": present.sum(dtype=jnp.int32),
        "bytes_up": total_bytes(received),
        **down.traffic,
    }
    return Closing(after, record, down.payload)


def shared_result(problem: Problem, state: State) -> tuple[PyTree, PyTree]:
    """The shared model, and the uncompressed downlink from which clients make theirs."""
    algorithm = problem.algorithm
    return algorithm.shared_result(state.server), algorithm.downlink(state.server)


def _chosen(condition: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), one, other)


def _failure(state: State, finite: Bool[Array, ""], failed: Bool[Array, " m"]) -> Failure:
    """The run's first failure, which later ones do not replace."""
    now = Failure(jnp.where(finite, 0, state.round + 1).astype(jnp.int32), failed)
    return _chosen(state.failure.round == 0, now, state.failure)


class _Down(NamedTuple):
    """The next downlink, what clients have yet to receive, and this round's traffic."""

    link: channel.Link
    payload: PyTree
    missed: Missed | None
    traffic: dict[str, Array]


def _send_down(
    problem: Problem, state: State, server: PyTree, present: Bool[Array, " clients"]
) -> _Down:
    way, link = problem.wire.down, state.downlink
    message = problem.algorithm.downlink(server)
    transit = send(way, server_keys(problem, state.round + 1).downlink, message, link.sender)
    received = way.receive(transit.decoded, link.receiver)

    # This round pays for the message that opened it, whose recipients are known only now; the
    # message made here is paid for by the next round. All clients received the first downlink,
    # which opened round 1 and is counted with the start (`Costs.first_down`).
    new = (state.round > 0).astype(jnp.int32)
    none = jnp.zeros((), jnp.int32)
    last = jnp.where(new > 0, state.broadcast_bytes, 0)
    messages, whole = new * present.sum(dtype=jnp.int32), none
    missed_bytes, missed = none.astype(jnp.uint32), None
    if state.missed is not None:
        # A returning client gets all differences it missed, or the whole downlink if that is not
        # longer. Compare as floating-point numbers, since the products may exceed 32 bits.
        due = Missed(state.missed.messages + new, state.missed.bytes)
        one, all_of_it = channel.fixed_bits(transit.payload), channel.fixed_bits(message)
        bits = one * due.messages.astype(float) + 8 * (due.bytes.astype(float) + last)
        catches_up, resent = present & (bits < all_of_it), present & (bits >= all_of_it)
        messages = jnp.where(catches_up, due.messages, 0).sum(dtype=jnp.int32)
        missed_bytes = jnp.where(catches_up, due.bytes, 0).sum(dtype=jnp.uint32)
        whole = resent.sum(dtype=jnp.int32)
        later = due._replace(bytes=due.bytes + last)
        missed = jax.tree.map(lambda x: jnp.where(present, 0, x), later)
    traffic = {
        "broadcast_bytes": last,
        "messages_down": messages,
        "missed_bytes": missed_bytes,
        "whole_down": whole,
    }
    return _Down(channel.Link(way, transit.memory, received), transit.payload, missed, traffic)
