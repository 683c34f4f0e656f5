"""What one client and the server do of a run that is not one program.

The same functions as in `round.ends`, each compiled by itself, with the wire between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed.core.backends.backend import collect
from jaxfed.core.contract import calls as contract
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round import ends
from jaxfed.core.round.ends import ClientRound
from jaxfed.core.round.problem import (
    Costs,
    Problem,
    State,
    key_of_round,
    key_of_start,
    shared_secret,
)
from jaxfed.core.wire import channel


class Place(NamedTuple):
    """Who a client is among the others."""

    id: Int[Array, ""]
    position: Int[Array, ""]
    weight: Float[Array, ""]

    def context(self, problem: Problem, number: Int[Array, ""]) -> channel.Context:
        """What its channel knows of it in a round."""
        return channel.Context(self.position, self.weight, shared_secret(problem.key), number)


class First(NamedTuple):
    """ONE client's first message."""

    payload: PyTree
    decoded: PyTree  # what the other end makes of it
    broken: Bool[Array, ""]  # whether it is not finite


class Like(NamedTuple):
    """Shapes of a tree of arrays, as something that compiled functions can be told apart by."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    structure: Any

    @classmethod
    def of(cls, tree: PyTree) -> "Like":
        """Those of this tree."""
        leaves, structure = jax.tree.flatten(jax.eval_shape(lambda: tree))
        return cls(tuple(leaves), structure)

    @property
    def tree(self) -> PyTree:
        """The tree, of `jax.ShapeDtypeStruct`."""
        return jax.tree.unflatten(self.structure, self.leaves)


class Opened(NamedTuple):
    """What the server has before the rounds."""

    state: State
    payload: PyTree  # of the first downlink
    costs: Costs


def prepare(problem: Problem, data: PyTree, client_id: Int[Array, ""], number: int) -> PyTree:
    """ONE client's data as its steps need them."""
    return problem.algorithm.prepare(data, client_id, number)


def announce(problem: Problem, place: Place, data: PyTree, start: Personalized | None) -> First:
    """ONE client's message before the rounds."""
    context = place.context(problem, jnp.zeros((), jnp.int32))
    key = key_of_start(problem.key)
    sent, broken = ends.first_sent(problem, key, place.id, context, data, start)
    return First(sent.payload, sent.decoded, broken)


def first_downlink(problem: Problem, payload: PyTree) -> PyTree:
    """The first downlink, as a client receives it."""
    way = problem.first_downlink
    return way.receive(way.decode(payload), None)


def next_downlink(problem: Problem, payload: PyTree, last: PyTree) -> PyTree:
    """A later downlink, as a client receives it.

    Args:
        problem: the run.
        payload: what travelled.
        last: the downlink before, where the channel needs it, else None.
    """
    way = problem.downlink
    return way.receive(way.decode(payload), last)


def begin(
    problem: Problem,
    place: Place,
    downlink: PyTree,
    data: PyTree,
    start: Personalized | None,
    first: PyTree,
) -> tuple[PyTree, PyTree]:
    """ONE client's first state, and its end of the uplink's first memory.

    Args:
        problem: the run.
        place: who it is.
        downlink: the first that it received.
        data: its prepared data.
        start: its part of a warm start.
        first: its first message as it was decoded; None for who has sent none.
    """
    key = key_of_start(problem.key)
    local = ends.first_local(problem, key, place.id, downlink, data, start)
    uplink, _ = ends.messages_of_round(problem, downlink, local, data)
    return local, ends.first_memory(problem, first, uplink)


def step(
    problem: Problem,
    place: Place,
    done: Int[Array, ""],
    downlink: PyTree,
    local: PyTree,
    memory: PyTree,
    data: PyTree,
) -> ClientRound:
    """ONE client's part of the round after so many."""
    key = key_of_round(problem.key, done)
    context = place.context(problem, done + 1)
    return ends.client_round(problem, key, place.id, context, downlink, local, memory, data)


def result(problem: Problem, downlink: PyTree, local: PyTree, data: PyTree) -> PyTree:
    """ONE client's model; `downlink` is what the server has to send, as it is."""
    return contract.client_result(problem.algorithm, downlink, local, data)


class Said(NamedTuple):
    """What arrived from ONE client."""

    payload: PyTree
    diagnostics: PyTree
    broken: Bool[Array, ""]


class Heard(NamedTuple):
    """What arrived from clients, leading axis = clients; anything where nothing did."""

    payload: PyTree
    diagnostics: PyTree
    broken: Bool[Array, " clients"]


def heard(said: Sequence[Said | None]) -> Heard:
    """What arrived, None from who is absent; somebody is there."""
    somebody = next(one for one in said if one is not None)
    nothing = jax.tree.map(jnp.zeros_like, somebody)
    rows = [nothing if one is None else one for one in said]
    return Heard(*jax.tree.map(lambda *x: jnp.stack(x), *rows))


def open_server(problem: Problem, heard: Heard, like: Like, start: Personalized | None) -> Opened:
    """The server before the rounds, from everybody's first messages.

    Args:
        problem: the run.
        heard: the first messages.
        like: shapes of one client's prepared data.
        start: a warm start.
    """
    way, data = problem.first_uplink, like.tree

    def one(_, own):
        payload, broken, weight = own
        real, broken = jnp.ones_like(weight), broken & (weight > 0)
        decoded = way.decode(payload)
        return ends.first_contribution(payload, decoded, weight, real, broken), broken

    own = heard.payload, heard.broken, problem.clients.weights
    total, broken = collect(problem.backend, one, None, own, problem.size)
    opening = ends.opened(problem, total, data, start)
    first, uplink, objective = messages(problem, opening.downlink, data, start)
    remembered = ends.remembers_first(problem, first.decoded, uplink)
    state = ends.first_state(problem, opening, uplink, objective, remembered)
    state = replace(state, failure=state.failure._replace(clients=broken))
    costs = ends.costs_of(problem, opening, uplink, channel.fixed_bits(first.payload))
    return Opened(state, opening.broadcast.payload, costs)


def messages(problem: Problem, downlink: PyTree, data: PyTree, start: Personalized | None):
    """Shapes of ONE client's first message, of a round's uplink, and of its objective."""
    place = anywhere()
    own_start = None if start is None else Personalized(start.shared, _one_of(start.local))
    first = jax.eval_shape(announce, problem, place, data, own_start)

    def local(downlink, data, start):
        key = key_of_start(problem.key)
        return ends.first_local(problem, key, place.id, downlink, data, start)

    own = jax.eval_shape(local, downlink, data, own_start)
    return first, *ends.messages_of_round(problem, downlink, own, data)


def _one_of(local: PyTree) -> PyTree:
    return jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), local)


def anywhere() -> Place:
    """A place, where only shapes count."""
    zero = jnp.zeros((), jnp.int32)
    return Place(zero, zero, jnp.ones(()))


def serve(
    problem: Problem,
    state: State,
    heard: Heard,
    inclusion: Float[Array, " clients"],
) -> tuple[State, dict[str, Array], PyTree]:
    """The server's part of a round, and the payload of the next downlink.

    Args:
        problem: the run.
        state: the state before.
        heard: what arrived; a row each for all clients, whoever is absent.
        inclusion: who took part.
    """

    def one(_, own):
        payload, diagnostics, broken, weight, present = own
        broken = broken & (weight * present.astype(weight.dtype) > 0)
        lost = (present > 0) & ~jnp.isfinite(diagnostics["objective"])
        arrived = ClientRound(
            payload, problem.uplink.decode(payload), diagnostics, broken, None, None
        )
        return ends.contribution(problem, arrived, weight, present), lost | broken

    own = (*heard, problem.clients.weights, inclusion)
    number = problem.participation.number(problem.size)
    if number is not None and number != problem.size and problem.backend.gathers:
        chosen = jnp.nonzero(inclusion, size=number)[0]
        picked = jax.tree.map(lambda x: x[chosen], own)
        reduced, lost = collect(problem.backend, one, None, picked, number)
        lost = jnp.zeros(problem.size, bool).at[chosen].set(lost)
    else:
        reduced, lost = collect(problem.backend, one, None, own, problem.size)
    after, record = ends.server_round(problem, state, inclusion, reduced, lost)
    return after, record, ends.broadcast_of(problem, state, after)


def ended(problem: Problem, state: State) -> tuple[PyTree, PyTree]:
    """The shared model, and the downlink, as it is, that clients make their own of."""
    algorithm = problem.algorithm
    return algorithm.shared_result(state.server), algorithm.downlink(state.server)


class Shapes(NamedTuple):
    """Shapes of what travels and of what is kept: `jax.ShapeDtypeStruct` in place of arrays."""

    first: PyTree  # payloads: of a first message, the first downlink, an uplink and a downlink
    first_down: PyTree
    up: PyTree
    down: PyTree
    diagnostics: PyTree
    downlink: PyTree  # as it is received
    end: PyTree  # the downlink, as it is
    decoded: PyTree  # a first message, as it is received
    uplink: PyTree  # a message as it is, and how it is reduced
    local: PyTree
    memory: PyTree
    state: State  # the server's


def shapes(problem: Problem, data: PyTree, start: Personalized | None) -> Shapes:
    """All of them, without computing anything.

    Args:
        problem: the run, as the server knows it.
        data: shapes of one client's prepared data.
        start: shapes of a warm start, with the local parts of all clients, or None.
    """
    place, client = anywhere(), eqx.tree_at(lambda p: p.clients, problem, None)
    own_start = None if start is None else Personalized(start.shared, _one_of(start.local))
    first = jax.eval_shape(announce, client, place, data, own_start)
    everybody = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((problem.size, *x.shape), x.dtype),
        Heard(first.payload, None, first.broken),
    )
    opened = jax.eval_shape(
        lambda problem, heard, start: open_server(problem, heard, Like.of(data), start),
        problem, everybody, start,
    )  # fmt: skip
    down = jax.eval_shape(first_downlink, client, opened.payload)
    uplink = messages(problem, down, data, start)[1]
    local, memory = jax.eval_shape(begin, client, place, down, data, own_start, first.decoded)
    done = jnp.zeros((), jnp.int32)
    went = jax.eval_shape(step, client, place, done, down, local, memory, data)
    payload = jax.eval_shape(ends.broadcast_of, problem, opened.state, opened.state)
    end = jax.eval_shape(ended, problem, opened.state)[1]
    return Shapes(
        first.payload, opened.payload, went.payload, payload, went.diagnostics, down, end,
        first.decoded, uplink, local, memory, opened.state,
    )  # fmt: skip


class Programs(NamedTuple):
    """The functions of this module, compiled."""

    prepare: Callable[..., Any]
    announce: Callable[..., Any]
    first_downlink: Callable[..., Any]
    next_downlink: Callable[..., Any]
    begin: Callable[..., Any]
    step: Callable[..., Any]
    result: Callable[..., Any]
    open_server: Callable[..., Any]
    inclusion: Callable[..., Any]
    serve: Callable[..., Any]
    ended: Callable[..., Any]


def last_known(problem: Problem, downlink: PyTree) -> PyTree:
    """The downlink before, where the next one needs it."""
    return downlink if problem.downlink.cumulative else None


@cache
def programs(**options: bool | int) -> Programs:
    """Each function as a program of its own.

    Args:
        options: those of `jaxfed.core.run.compiling.compiler_options`.
    """
    jit: Any = partial(jax.jit, compiler_options=options)
    return Programs(
        prepare=jit(prepare, static_argnums=3),
        announce=jit(announce),
        first_downlink=jit(first_downlink),
        next_downlink=jit(next_downlink),
        begin=jit(begin),
        step=jit(step),
        result=jit(result),
        open_server=jit(open_server, static_argnums=2),
        inclusion=jit(ends.chosen_inclusion),
        serve=jit(serve),
        ended=jit(ended),
    )
