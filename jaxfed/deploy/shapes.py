"""Shapes of everything that is sent and saved in a run, needed to read the bytes."""

from functools import partial
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round import client, server
from jaxfed.core.round.messages import Message, payload_shapes
from jaxfed.core.round.problem import ClientState, Problem, State, before_rounds
from jaxfed.core.round.shapes import Kind, member_shapes


class Shapes(NamedTuple):
    """What is sent and saved, with `jax.ShapeDtypeStruct` in place of arrays."""

    first: PyTree  # payloads of a first message, the first downlink, an uplink and a downlink
    first_down: PyTree
    up: PyTree
    down: PyTree
    diagnostics: PyTree
    downlink: PyTree  # as it is received
    end: PyTree  # the downlink from which clients make their models
    decoded: PyTree  # a first message, as it is received
    uplink: PyTree  # a message as it is, and how it is reduced
    client: ClientState
    state: State  # the server's


def shapes_of(problem: Problem, kind: Kind, start: Personalized | None) -> Shapes:
    """Find all shapes without computing anything.

    Args:
        problem: the run, as the server knows it.
        kind: shapes of one client's prepared data.
        start: shapes of a warm start with all clients' local parts, or None.
    """
    # Follow the order of a run, since each part depends on earlier ones.
    run = problem.for_client
    broadcast = jax.eval_shape(partial(before_rounds, problem), start)
    member = member_shapes(kind, start)
    first = jax.eval_shape(partial(client.first_message, run), broadcast, member)
    everybody = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((problem.size, *x.shape), x.dtype),
        Message(first.payload, first.not_finite),
    )
    received, _ = jax.eval_shape(partial(server.reduce_first, problem), everybody)
    opening = jax.eval_shape(
        lambda received, start: server.open_run(problem, received, (kind,), start), received, start
    )
    downlink = jax.eval_shape(partial(client.receive_first, run), opening.payload)
    broadcast = jax.eval_shape(partial(before_rounds, problem), start, downlink)
    state = jax.eval_shape(partial(client.first_state, run), broadcast, member, first.decoded)
    member = member._replace(state=state)
    message, _ = jax.eval_shape(partial(client.step, run), broadcast, member)
    local = jax.eval_shape(partial(client.first_local, run), broadcast, member)
    uplink = client.round_shapes(run, broadcast, local, member.data).uplink
    _, end = jax.eval_shape(partial(server.shared_result, problem), opening.state)
    return Shapes(
        first=first.payload,
        first_down=opening.payload,
        up=message.payload,
        down=payload_shapes(problem.downlink, end),
        diagnostics=message.diagnostics,
        downlink=downlink,
        end=end,
        decoded=first.decoded,
        uplink=uplink,
        client=state,
        state=opening.state,
    )
