"""Shapes of everything that is sent and saved in a run, needed to read the bytes."""

from typing import NamedTuple

import jax
from jaxtyping import PyTree

from jaxfed.core.contract import calls
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round import client, server
from jaxfed.core.round.messages import ClientMessage, Contribution, payload_shapes
from jaxfed.core.round.problem import (
    Broadcast,
    ClientState,
    Problem,
    RunMember,
    State,
    before_rounds,
)
from jaxfed.core.round.shapes import Kind, member_shapes
from jaxfed.core.wire.calls import carried


class _Opened(NamedTuple):
    state: State
    payload: PyTree


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
    uplink: PyTree  # a round's message before its channel, in its reductions
    client: ClientState
    state: State  # the server's


def run_shapes(problem: Problem, kind: Kind, warm_start: Personalized | None) -> Shapes:
    """Find all shapes without computing anything.

    Args:
        problem: the run, as the server knows it.
        kind: shapes of one client's prepared data.
        warm_start: shapes of a warm start with all clients' local parts, or None.
    """
    # Follow the order of a run, since each part depends on earlier ones. Clients call this for
    # every message: only functions of modules are evaluated here, no new closures, so that JAX
    # finds what it has traced before.
    run = problem.for_client
    broadcast = jax.eval_shape(before_rounds, problem, warm_start)
    member = member_shapes(kind, warm_start)
    first = jax.eval_shape(client.first_message, run, broadcast, member)
    everybody = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((problem.size, *x.shape), x.dtype),
        ClientMessage(first.payload, first.not_finite),
    )
    received, _ = jax.eval_shape(server.reduce_first, problem, everybody)
    opening = jax.eval_shape(_opened, problem, received, kind, warm_start)
    downlink = jax.eval_shape(client.receive_first, run, opening.payload)
    broadcast = jax.eval_shape(before_rounds, problem, warm_start, downlink)
    state = jax.eval_shape(client.first_state, run, broadcast, member, first.decoded)
    member = member._replace(state=state)
    message, _ = jax.eval_shape(client.step, run, broadcast, member)
    uplink = jax.eval_shape(_uplink, run, broadcast, member)
    _, end = jax.eval_shape(server.shared_result, problem, opening.state)
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


def _opened(
    problem: Problem, received: Contribution, kind: Kind, warm_start: Personalized | None
) -> _Opened:
    opening = server.open_run(problem, received, (kind,), warm_start)
    return _Opened(opening.state, opening.payload)


def _uplink(run: Problem, broadcast: Broadcast, member: RunMember) -> PyTree:
    assert member.state is not None
    algorithm, local = run.algorithm.at_round(broadcast.round), member.state.local
    arguments = run.key, broadcast.downlink, local, member.data
    return carried(run.uplink, calls.client_step(algorithm, *arguments)[0])
