"""A run whose clients, and whose server, are programs of their own; the host is the wire."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from jaxfed.core import ends, steps
from jaxfed.core.algorithm import Personalized
from jaxfed.core.loop import Options, finish, metrics_of, with_bits
from jaxfed.core.problem import Costs, Problem, State, blank


class Compiled(NamedTuple):
    """The parts of a run that `fit` drives."""

    run: Callable[..., Any]
    prepare: Callable[..., Any]
    advance: Callable[..., Any]
    finish: Callable[..., Any]
    program: Any = None  # a whole run, where it is one program: (problem, start, tol, options)


@cache
def programs(**options: bool | int) -> Compiled:
    """The parts of a run, from `jaxfed.core.steps`.

    Args:
        options: those of `jaxfed.core.compiling.compiler_options`.
    """
    made = steps.programs(**options)
    measured = jax.jit(metrics_of, static_argnums=1, compiler_options=options)
    prepare, advance = partial(_prepare, made), partial(_advance, made, measured)

    def finished(problem, state, costs, history, tol):
        return finish(problem, state, costs, history, tol, _result(made, problem, state))

    def run(problem, start, tol, options):
        problem, state, costs = prepare(problem, start, options.rounds)
        state, history = advance(problem, state, tol, options)
        history = {name: values[: int(state.round)] for name, values in history.items()}
        history = with_bits(history, jax.tree.map(np.asarray, costs), problem.size, np)
        return finished(problem, state, costs, history, tol)

    return Compiled(run, prepare, advance, finished)


def _place(problem: Problem, i: int) -> steps.Place:
    clients = problem.clients
    return steps.Place(clients.ids[i], jnp.asarray(i, jnp.int32), clients.weights[i])


def of_client(problem: Problem) -> Problem:
    """The run as a client knows it."""
    return replace(problem, clients=None)


def of_server(problem: Problem) -> Problem:
    """The run as the server knows it."""
    clients = eqx.tree_at(lambda c: c.data, problem.clients, None, is_leaf=lambda x: x is None)
    return replace(problem, clients=clients)


def stacked(trees: list[PyTree]) -> PyTree:
    """Along a leading axis of clients."""
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


@jax.jit
def _at(tree: PyTree, i: int | Int[Array, ""]) -> PyTree:
    return jax.tree.map(lambda x: x[i], tree)


@jax.jit
def _with(whole: PyTree, i: int | Int[Array, ""], part: PyTree) -> PyTree:
    return jax.tree.map(lambda whole, x: whole.at[i].set(x), whole, part)


def _prepare(
    made: steps.Programs, problem: Problem, start: Personalized | None, number: int
) -> tuple[Problem, State, Costs]:
    client, everybody = of_client(problem), range(problem.size)
    places = [_place(problem, i) for i in everybody]
    data = [
        made.prepare(client, _at(problem.clients.data, i), places[i].id, number) for i in everybody
    ]
    starts = [start and Personalized(start.shared, _at(start.local, i)) for i in everybody]
    firsts = [made.announce(client, places[i], data[i], starts[i]) for i in everybody]
    heard = steps.Heard(
        stacked([first.payload for first in firsts]), None, stacked([x.broken for x in firsts])
    )
    state, _, costs = opened(made, problem, heard, steps.Like.of(data[0]), start)
    downlink = state.downlink.receiver
    known = [x.decoded if problem.uplink.cumulative else None for x in firsts]
    begun = [
        made.begin(client, places[i], downlink, data[i], starts[i], known[i]) for i in everybody
    ]
    local, memory = stacked(begun)
    state = replace(state, local=local, uplink=replace(state.uplink, sender=memory))
    problem = eqx.tree_at(lambda p: p.clients.data, problem, stacked(data))
    return problem, state, costs


def _advance(
    made: steps.Programs,
    measured: Callable[..., dict[str, Array]],
    problem: Problem,
    state: State,
    tol: Array | float | None,
    options: Options,
) -> tuple[State, dict[str, np.ndarray]]:
    records: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        # One round in any case, as in `Streamed.advance`.
        if options.stops and records:
            assert tol is not None
            if state.measure <= tol or int(state.failure.round):
                break
        state, record = _round(made, problem, state)
        if options.metrics is not None:
            if taken := jax.eval_shape(
                partial(metrics_of, problem, options.metrics), state
            ).keys() & {*record, "bits_up", "bits_down"}:
                raise ValueError(f"metrics: {sorted(taken)} are names of the run's own history")
            values = measured(problem, options.metrics, state)
            if int(state.round) % options.metrics_every:
                values = jax.tree.map(lambda x: blank(x.shape, x.dtype), values)
            record = record | values
        records.append(record)
    return state, {
        name: np.stack([np.asarray(record[name]) for record in records]) for name in records[0]
    }


def _round(made: steps.Programs, problem: Problem, state: State) -> tuple[State, dict[str, Array]]:
    client, server, clients = of_client(problem), of_server(problem), problem.clients
    inclusion = made.inclusion(server, state.round)
    local, memory = state.local, state.uplink.sender
    rows: list[ends.ClientRound | None] = [None] * problem.size
    for i in np.flatnonzero(np.asarray(inclusion) > 0).tolist():
        row = rows[i] = made.step(
            client, _place(problem, i), state.round, state.downlink.receiver,
            _at(local, i), _at(memory, i), _at(clients.data, i),
        )  # fmt: skip
        local, memory = _with((local, memory), i, (row.local, row.memory))
    heard = steps.heard(
        [row and steps.Said(row.payload, row.diagnostics, row.broken) for row in rows]
    )
    bare = replace(state, local=None, uplink=replace(state.uplink, sender=None))
    after, record, _ = served(made, problem, bare, heard, inclusion)
    return replace(after, local=local, uplink=replace(after.uplink, sender=memory)), record


def opened(
    made: steps.Programs,
    problem: Problem,
    heard: steps.Heard,
    like: steps.Like,
    start: Personalized | None,
) -> steps.Opened:
    """The server before the rounds; clients receive the downlink by a program of their own."""
    opened = made.open_server(of_server(problem), heard, like, start)
    downlink = made.first_downlink(of_client(problem), opened.payload)
    link = replace(opened.state.downlink, receiver=downlink)
    return opened._replace(state=replace(opened.state, downlink=link))


def served(
    made: steps.Programs,
    problem: Problem,
    state: State,
    heard: steps.Heard,
    inclusion: Array,
) -> tuple[State, dict[str, Array], PyTree]:
    """The server after a round, its record, and what it sends."""
    after, record, payload = made.serve(of_server(problem), state, heard, inclusion)
    last = steps.last_known(problem, state.downlink.receiver)
    downlink = made.next_downlink(of_client(problem), payload, last)
    if int(record["participants"]):
        after = replace(after, downlink=replace(after.downlink, receiver=downlink))
    return after, record, payload


def _result(made: steps.Programs, problem: Problem, state: State) -> Personalized:
    client = of_client(problem)
    bare = replace(state, local=None, uplink=replace(state.uplink, sender=None))
    shared, downlink = made.ended(of_server(problem), bare)
    local = [
        made.result(client, downlink, _at(state.local, i), _at(problem.clients.data, i))
        for i in range(problem.size)
    ]
    return Personalized(shared, stacked(local))
