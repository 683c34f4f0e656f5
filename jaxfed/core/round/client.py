"""The client's part of a run: its messages, its initial state, its final model."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Int, Key, PyTree

from jaxfed.core.contract import calls
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.round.messages import ClientMessage, is_not_finite, send
from jaxfed.core.round.problem import Broadcast, ClientState, Problem, RunMember, zeros_of
from jaxfed.core.wire.calls import bind, carried
from jaxfed.core.wire.calls import memory as initial_memory
from jaxfed.core.wire.channel import Channel, Context


class Answer(NamedTuple):
    """A client's answer to a broadcast, before its channel."""

    uplink: PyTree  # as the algorithm returns it
    message: PyTree  # the same as its channel carries it, in its reductions
    local: PyTree  # these two are None before the rounds
    diagnostics: PyTree


def prepare(problem: Problem, data: PyTree, client_id: Int[Array, ""], rounds: int) -> PyTree:
    """Prepare the client's data once, before its steps use them."""
    return problem.algorithm.prepare(data, client_id, rounds)


def answer(problem: Problem, broadcast: Broadcast, member: RunMember) -> Answer:
    """Take the algorithm's step; before the rounds, make its first message."""
    algorithm, wire, state = problem.algorithm, problem.wire, member.state
    key, _ = _keys(broadcast, member)
    if state is None:
        warm_start = _warm_start(broadcast, member)
        uplink = calls.first_message(algorithm, key, member.data, warm_start)
        return Answer(uplink, carried(wire.first_up, uplink), None, None)
    algorithm = algorithm.at_round(broadcast.round)
    downlink = _received(algorithm, wire.down, broadcast, member.data)
    uplink, local, found = calls.client_step(algorithm, key, downlink, state.local, member.data)
    return Answer(uplink, carried(wire.up, uplink), local, found)


def exchange(
    problem: Problem, broadcast: Broadcast, member: RunMember
) -> tuple[ClientMessage, PyTree]:
    """Answer a broadcast.

    Returns:
        The message, and what the client keeps: its state; before the rounds its message as the
        server receives it, if uplink differences may start from it, else None.
    """
    wire, state, made = problem.wire, member.state, answer(problem, broadcast, member)
    # `bind` gives the channel what it may know of its client: `secure_sum` masks by position and
    # weighs the message itself.
    way = bind(wire.first_up if state is None else wire.up, _context(broadcast, member))
    memory = initial_memory(way, made.message) if state is None else state.memory
    transit = send(way, _keys(broadcast, member)[1], made.message, memory)
    # Look for NaN in the message itself: once encoded, it may look like ordinary numbers.
    failed = is_not_finite(made.uplink)
    message = ClientMessage(transit.payload, failed, made.diagnostics, transit.decoded)
    if state is None:
        return message, transit.decoded if wire.up.cumulative else None
    return message, ClientState(made.local, transit.memory)


def first_state(
    problem: Problem, broadcast: Broadcast, member: RunMember, first: PyTree = None
) -> ClientState:
    """The client's state before the first round.

    Args:
        problem: the run.
        broadcast: with the first downlink.
        member: the client.
        first: its first message as the server received it, or None if it sent none.
    """
    local = first_local(problem, broadcast, member)
    # Known from shapes alone, while the program is traced: the memory must have one structure,
    # whatever the values.
    later = member._replace(state=ClientState(local, None))
    uplink = jax.eval_shape(answer, problem, broadcast, later).message
    shapes = jax.eval_shape(lambda: first)
    remembers = remembers_first(problem, shapes, uplink)
    # The server starts from the same message (`known` in `server.open_run`); the sum of differences
    # is right only as long as both ends agree.
    memory = problem.wire.up.memory(first if remembers else zeros_of(uplink))
    return ClientState(local, memory)


def first_local(problem: Problem, broadcast: Broadcast, member: RunMember) -> PyTree:
    """The algorithm's part of the client's initial state."""
    key, _ = _keys(broadcast, member)
    warm_start = _warm_start(broadcast, member)
    downlink = _received(problem.algorithm, problem.wire.first_down, broadcast, member.data)
    return calls.client_init(problem.algorithm, key, downlink, member.data, warm_start)


def remembers_first(problem: Problem, first: PyTree, uplink: PyTree) -> bool:
    """Whether uplink differences start from the first message.

    They do if it has the shapes of a round's message.

    Args:
        problem: the run.
        first: shapes of a first message.
        uplink: shapes of a round's message.
    """
    return problem.wire.up.cumulative and calls.alike(first, uplink)


def result(problem: Problem, downlink: PyTree, local: PyTree, data: PyTree) -> PyTree:
    """The client's own model, from the server's next downlink before compression."""
    return calls.client_result(problem.algorithm, downlink, local, data)


def _keys(broadcast: Broadcast, member: RunMember) -> tuple[Key[Array, ""], Key[Array, ""]]:
    """The client's key and its channel's key."""
    # Fold in the id, not the position, so that draws do not depend on the other clients. Split
    # whatever the channel, so that the algorithm draws the same numbers through any of them.
    key, channel_key = jax.random.split(jax.random.fold_in(broadcast.key, member.id))
    return key, channel_key


def _received(algorithm: Algorithm, way: Channel, broadcast: Broadcast, data: PyTree) -> PyTree:
    """The downlink as the client uses it; what settles becomes exact by itself."""
    return broadcast.downlink if way.settles else algorithm.feasible(broadcast.downlink, data)


def _context(broadcast: Broadcast, member: RunMember) -> Context:
    return Context(member.position, member.weight, broadcast.secret, broadcast.round)


def _warm_start(broadcast: Broadcast, member: RunMember) -> Personalized | None:
    if broadcast.warm_start is None:
        return None
    return Personalized(broadcast.warm_start.shared, member.warm_start)
