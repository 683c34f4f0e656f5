"""Runs each client and the server as separate compiled programs, as separate machines do."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round import client, server
from jaxfed.core.round.messages import ClientMessage, receive
from jaxfed.core.round.problem import Problem, RunMember, State, zeros_of
from jaxfed.core.round.protocol import Kind, protocol
from jaxfed.core.round.rounds import Collected, Engine, Sent, one_round
from jaxfed.core.round.server import Closing
from jaxfed.core.round.whole import WHOLE
from jaxfed.core.run.runner import Programs


@final
class Separate(Engine):
    """Runs clients one after another, with the programs that separate machines run.

    Server and clients decode messages in their own programs, so the numbers equal, bit for bit,
    those of a deployment on machines of one kind.
    """

    def __init__(self, programs: Programs):
        """Run them with these programs."""
        self._programs = programs

    def call(self, function, *arguments):
        return self._programs(function)(*arguments)

    def prepared(self, problem, rounds):
        # One program for all clients, as on their own machines: their data and ids are its
        # arguments.
        prepare = self._programs(client.prepare, static_argnums=(3,))
        clients, run = problem.clients, problem.for_client
        data = [
            prepare(run, _at(clients.data, i), clients.ids[i], rounds) for i in range(problem.size)
        ]
        return eqx.tree_at(lambda p: p.clients.data, problem, stacked(data))

    def kinds(self, problem):
        return (Kind.of(jax.eval_shape(_at, problem.clients.data, 0), problem.size),)

    def exchange(self, problem, broadcast, warm_start, state, inclusion):
        messages: list[ClientMessage | None] = [None] * problem.size
        firsts, after = [], None if state is None else state.clients
        # Only participants compute; the others' rows are zeros, which `inclusion` keeps out.
        there = np.ones(problem.size) if inclusion is None else np.asarray(inclusion)
        for i in np.flatnonzero(there > 0).tolist():
            member = _member(problem, warm_start, i)
            if state is not None:
                member = member._replace(state=_at(state.clients, i))
            message, kept = self.call(client.exchange, problem.for_client, broadcast, member)
            # The server decodes payloads itself, as in a deployment, where only they travel.
            messages[i] = message._replace(decoded=None)
            if state is None:
                firsts.append(kept)
            else:
                after = _with(after, i, kept)
        like = next((message for message in messages if message is not None), None)
        if like is None:
            like = protocol(problem, self.kinds(problem), None, broadcast.downlink).message
        arrived = in_rows(messages, like)
        received, failed = self.call(server.reduce, problem.for_server, arrived, inclusion)
        return Collected(received, stacked(firsts) if state is None else after, failed)

    def first_states(self, problem, warm_start, broadcast, first):
        def own(i):
            return broadcast, _member(problem, warm_start, i), _at(first, i)

        return stacked(self._of_each(problem, client.first_state, own))

    def received(self, problem, before, sent):
        return received(self, problem, before, sent)

    def local_results(self, problem, state, downlink):
        def own(i):
            return downlink, _at(state.local, i), _at(problem.clients.data, i)

        return stacked(self._of_each(problem, client.result, own))

    def _of_each(
        self, problem: Problem, function: Callable, own: Callable[[int], tuple]
    ) -> list[Any]:
        """Call a function for each client in turn, with that client's arguments."""
        return [self.call(function, problem.for_client, *own(i)) for i in range(problem.size)]

    def text(self, problem, state):
        # All programs of a round follow from this one.
        return jax.jit(_one_round).lower(problem, state).as_text()


def _one_round(problem: Problem, state: State) -> tuple[State, dict[str, Array]]:
    return one_round(problem, state, WHOLE)


# --- shared with deployments on separate machines -------------------------------------------------


def in_rows(messages: Sequence[ClientMessage | None], like: ClientMessage) -> ClientMessage:
    """Messages with a row per client; zeros for absent ones.

    Args:
        messages: by client; None for absent ones.
        like: such a message, or its shapes.
    """
    nothing = zeros_of(like)
    return stacked([nothing if message is None else message for message in messages])


def received(engine: Engine, problem: Problem, before: State | None, sent: Sent) -> Sent:
    """The server's result of a round with its downlink as clients decode it."""
    way, last = problem.wire.first_down, None
    if before is not None and isinstance(sent, Closing):
        if not int(sent.record["participants"]):  # the round did not take place
            return sent
        way = problem.wire.down
        last = before.downlink.receiver if way.cumulative else None
    downlink = engine.call(receive, way, sent.payload, last)
    link = replace(sent.state.downlink, receiver=downlink)
    return sent._replace(state=replace(sent.state, downlink=link))


def stacked(trees: Sequence[PyTree]) -> PyTree:
    """Stack trees of the same structure along a leading axis of clients."""
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


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
