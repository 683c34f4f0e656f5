"""The client's part of a run: first message, initial state, step per round, final model."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Int, Key, PyTree

from jaxfed.core.contract import calls
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.round.messages import ClientMessage, is_not_finite, send, send_first
from jaxfed.core.round.problem import Broadcast, ClientState, Problem, RunMember, zeros_of
from jaxfed.core.wire.calls import bind, carried
from jaxfed.core.wire.channel import Channel, Context


class RoundShapes(NamedTuple):
    """Shapes of the message that one client sends in a round."""

    uplink: PyTree
    objective: jax.ShapeDtypeStruct


def prepare(problem: Problem, data: PyTree, client_id: Int[Array, ""], rounds: int) -> PyTree:
    """Prepare the client's data once, before its steps use them."""
    return problem.algorithm.prepare(data, client_id, rounds)


def first_message(problem: Problem, broadcast: Broadcast, member: RunMember) -> ClientMessage:
    """The client's message before the first round."""
    key, channel_key = _keys(broadcast, member)
    warm_start = _warm_start(broadcast, member)
    message = calls.first_message(problem.algorithm, key, member.data, warm_start)
    # `bind` gives the channel what it may know of its client: `secure_sum` masks by position and
    # weighs the message itself.
    way = bind(problem.first_uplink, _context(broadcast, member))
    transit = send_first(way, channel_key, carried(way, message))
    return ClientMessage(transit.payload, is_not_finite(message), decoded=transit.decoded)


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
    uplink = round_shapes(problem, broadcast, local, member.data).uplink
    # Known from shapes alone, while the program is traced: the memory must have one structure,
    # whatever the values.
    shapes = jax.eval_shape(lambda: first)
    remembers = remembers_first(problem, shapes, uplink)
    # The server starts from the same message (`known` in `server.open_run`); the sum of differences
    # is right only as long as both ends agree.
    memory = problem.uplink.memory(first if remembers else zeros_of(uplink))
    return ClientState(local, memory)


def first_local(problem: Problem, broadcast: Broadcast, member: RunMember) -> PyTree:
    """The algorithm's part of the client's initial state."""
    key, _ = _keys(broadcast, member)
    warm_start = _warm_start(broadcast, member)
    downlink = _received(problem.algorithm, problem.first_downlink, broadcast, member.data)
    return calls.client_init(problem.algorithm, key, downlink, member.data, warm_start)


def remembers_first(problem: Problem, first: PyTree, uplink: PyTree) -> bool:
    """Whether uplink differences start from the first message.

    They do if it has the shapes of a round's message.

    Args:
        problem: the run.
        first: shapes of a first message.
        uplink: shapes of a round's message.
    """
    return problem.uplink.cumulative and calls.alike(first, uplink)


def round_shapes(
    problem: Problem, broadcast: Broadcast, local: PyTree, data: PyTree
) -> RoundShapes:
    """Shapes of the client's message in a round, found without computing it."""

    def of_round(algorithm, number, *arguments):
        uplink, _, diagnostics = calls.client_step(algorithm.at_round(number), *arguments)
        return RoundShapes(carried(problem.uplink, uplink), diagnostics["objective"])

    return jax.eval_shape(
        of_round,
        problem.algorithm,
        broadcast.round,
        # Any key will do, since nothing is computed.
        problem.key,
        broadcast.downlink,
        local,
        data,
    )


def step(
    problem: Problem, broadcast: Broadcast, member: RunMember
) -> tuple[ClientMessage, ClientState]:
    """Take the algorithm's step and send the uplink."""
    assert member.state is not None
    key, channel_key = _keys(broadcast, member)
    algorithm = problem.algorithm.at_round(broadcast.round)
    downlink = _received(algorithm, problem.downlink, broadcast, member.data)
    uplink, local, diagnostics = calls.client_step(
        algorithm, key, downlink, member.state.local, member.data
    )
    way = bind(problem.uplink, _context(broadcast, member))
    transit = send(way, channel_key, carried(way, uplink), member.state.memory)
    # Look for NaN in the message itself: once encoded, it may look like ordinary numbers.
    message = ClientMessage(transit.payload, is_not_finite(uplink), diagnostics, transit.decoded)
    return message, ClientState(local, transit.memory)


def receive_first(problem: Problem, payload: PyTree) -> PyTree:
    """Decode the payload of the first downlink."""
    way = problem.first_downlink
    return way.receive(way.decode(payload), None)


def receive(problem: Problem, payload: PyTree, last: PyTree) -> PyTree:
    """Decode the payload of a later downlink; difference channels need the previous one."""
    way = problem.downlink
    return way.receive(way.decode(payload), last)


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
