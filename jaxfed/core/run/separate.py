"""Runs each client and the server as separate compiled programs, as separate machines do."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round import client, server
from jaxfed.core.round.messages import ClientMessage
from jaxfed.core.round.problem import Broadcast, Problem, RunMember, State, before_rounds
from jaxfed.core.round.rounds import Collected, Engine
from jaxfed.core.round.server import Closing, Opening
from jaxfed.core.round.shapes import Kind, member_shapes
from jaxfed.core.run import loop
from jaxfed.core.run.runner import FromHost, LocalRunner, Programs


@final
class Separate(FromHost, LocalRunner):
    """Runs clients one after another, with the programs that separate machines run.

    Server and clients decode messages in their own programs, so the numbers equal, bit for bit,
    those of a deployment on machines of one kind.
    """

    def __init__(self, problem: Problem, programs: Programs):
        """Run this problem with these programs."""
        self.problem, self.programs = problem, programs

    def prepared(self, problem, rounds):
        # One program for all clients, as on their own machines: their data and ids are its
        # arguments.
        prepare = self.programs(client.prepare, static_argnums=(3,))
        clients, run = problem.clients, problem.for_client
        data = [
            prepare(run, _at(clients.data, i), clients.ids[i], rounds) for i in range(problem.size)
        ]
        return eqx.tree_at(lambda p: p.clients.data, problem, stacked(data))

    def before_round(self, state):
        return state

    def kinds(self, problem):
        return (Kind.of(jax.eval_shape(_at, problem.clients.data, 0), problem.size),)

    def first_messages(self, problem, warm_start):
        broadcast = self.call(before_rounds, problem.for_server, warm_start)

        def own(i):
            return broadcast, _member(problem, warm_start, i)

        messages = self._of_each(problem, client.first_message, own)
        first = stacked([message.decoded for message in messages])
        # The server decodes payloads itself, as in a deployment, where only they travel.
        arrived = stacked([message._replace(decoded=None) for message in messages])
        received, failed = self.call(server.reduce_first, problem.for_server, arrived)
        return Collected(received, first if problem.uplink.cumulative else None, failed)

    def first_states(self, problem, warm_start, broadcast, first):
        def own(i):
            return broadcast, _member(problem, warm_start, i), _at(first, i)

        return stacked(self._of_each(problem, client.first_state, own))

    def steps(self, problem, state, inclusion, broadcast):
        kept = state.clients
        messages: list[ClientMessage | None] = [None] * problem.size
        # Only participants compute; the others' rows are zeros, which `inclusion` keeps out.
        for i in np.flatnonzero(np.asarray(inclusion) > 0).tolist():
            member = _member(problem, None, i)._replace(state=_at(kept, i))
            message, after = self.call(client.step, problem.for_client, broadcast, member)
            messages[i] = message._replace(decoded=None)
            kept = _with(kept, i, after)
        arrived = in_rows(messages, lambda: self._message_shapes(problem, state, broadcast))
        received, failed = self.call(server.reduce_round, problem.for_server, arrived, inclusion)
        return Collected(received, kept, failed)

    def _message_shapes(
        self, problem: Problem, state: State, broadcast: Broadcast
    ) -> ClientMessage:
        one = jax.eval_shape(_at, state.clients, 0)
        member = member_shapes(self.kinds(problem)[0], None)._replace(state=one)
        step = partial(client.step, problem.for_client)
        return jax.eval_shape(step, broadcast, member)[0]._replace(decoded=None)

    def opened(self, problem, opening):
        return received_first(self, problem, opening)

    def closed(self, problem, before, closing):
        return received(self, problem, before, closing)

    def local_results(self, problem, state, downlink):
        def own(i):
            return downlink, _at(state.local, i), _at(problem.clients.data, i)

        return stacked(self._of_each(problem, client.result, own))

    def _of_each(
        self, problem: Problem, function: Callable, own: Callable[[int], tuple]
    ) -> list[Any]:
        """Call a function for each client in turn, with that client's arguments."""
        return [self.call(function, problem.for_client, *own(i)) for i in range(problem.size)]

    def lower(self, state, tol, options):
        return jax.jit(loop.advance).lower(self.problem, state, tol, options).as_text()


# --- shared with deployments on separate machines -------------------------------------------------


def in_rows(
    messages: Sequence[ClientMessage | None], shapes: Callable[[], ClientMessage]
) -> ClientMessage:
    """Messages with a row per client; zeros for absent ones.

    Args:
        messages: by client; None for absent ones.
        shapes: returns the shapes of a message; called if all clients are absent.
    """
    present = [message for message in messages if message is not None]
    like = present[0] if present else shapes()
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return stacked([nothing if message is None else message for message in messages])


def received_first(engine: Engine, problem: Problem, opening: Opening) -> Opening:
    """The opening of a run with the downlink as clients decode it."""
    downlink = engine.call(client.receive_first, problem.for_client, opening.payload)
    return opening._replace(state=_with_downlink(opening.state, downlink))


def received(engine: Engine, problem: Problem, before: State, closing: Closing) -> Closing:
    """The closing of a round with the next downlink as clients decode it."""
    last = before.downlink.receiver if problem.downlink.cumulative else None
    downlink = engine.call(client.receive, problem.for_client, closing.payload, last)
    if not int(closing.record["participants"]):  # the round did not take place
        return closing
    return closing._replace(state=_with_downlink(closing.state, downlink))


def stacked(trees: Sequence[PyTree]) -> PyTree:
    """Stack trees of the same structure along a leading axis of clients."""
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _with_downlink(state: State, downlink: PyTree) -> State:
    return replace(state, downlink=replace(state.downlink, receiver=downlink))


def _member(problem: Problem, warm_start: Personalized | None, i: int) -> RunMember:
    clients = problem.clients
    return RunMember(
        data=_at(clients.data, i),
        id=clients.ids[i],
        weight=clients.weights[i],
        position=jnp.asarray(i, jnp.int32),
        warm_start=None if warm_start is None else _at(warm_start.local, i),
    )


@jax.jit
def _at(tree: PyTree, i: int | Int[Array, ""]) -> PyTree:
    return jax.tree.map(lambda x: x[i], tree)


@jax.jit
def _with(whole: PyTree, i: int | Int[Array, ""], part: PyTree) -> PyTree:
    return jax.tree.map(lambda whole, x: whole.at[i].set(x), whole, part)
