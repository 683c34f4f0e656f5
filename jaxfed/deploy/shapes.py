"""Shapes of everything that is sent and saved in a run, needed to read the bytes."""

from typing import NamedTuple

import jax

from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round import client, server
from jaxfed.core.round.messages import Contribution
from jaxfed.core.round.problem import Problem, State, broadcast_of
from jaxfed.core.round.protocol import Kind, Protocol, member_shapes, protocol


class Shapes(NamedTuple):
    """What is sent and saved, with `jax.ShapeDtypeStruct` in place of arrays."""

    sent: Protocol
    state: State  # the server's


def run_shapes(problem: Problem, kind: Kind, warm_start: Personalized | None) -> Shapes:
    """Find all shapes without computing anything.

    Args:
        problem: the run, as the server knows it.
        kind: shapes of one client's prepared data.
        warm_start: shapes of a warm start with all clients' local parts, or None.
    """
    # As in `protocol`, no new closures.
    broadcast = jax.eval_shape(broadcast_of, problem, 0, None, warm_start)
    member = member_shapes(kind, warm_start)
    first, _ = jax.eval_shape(client.exchange, problem.for_client, broadcast, member)
    everybody = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((problem.size, *x.shape), x.dtype),
        first._replace(decoded=None),
    )
    received, _ = jax.eval_shape(server.reduce, problem, everybody, None)
    state = jax.eval_shape(_opened, problem, received, kind, warm_start)
    return Shapes(protocol(problem, (kind,), warm_start, state.downlink.receiver), state)


def _opened(
    problem: Problem, received: Contribution, kind: Kind, warm_start: Personalized | None
) -> State:
    return server.open_run(problem, received, (kind,), warm_start).state
