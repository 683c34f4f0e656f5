"""The engine for clients in memory: one program contains the whole round."""

import hashlib
import re
from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxfed.core.backends.backend import collect
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.buckets import each_first, filled, layout_of, select, shapes_differ
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round import client
from jaxfed.core.round.messages import contribution
from jaxfed.core.round.problem import Broadcast, ClientState, Problem, RunMember
from jaxfed.core.round.protocol import Kind
from jaxfed.core.round.rounds import Collected, Engine


class Whole(Engine):
    """Maps all clients with the problem's backend within the caller's program."""

    def call(self, function, *arguments):
        return function(*arguments)

    def kinds(self, problem):
        data = problem.clients.data
        layout = layout_of(data)
        counts = (1,) if layout is None else layout.sizes
        ones = jax.eval_shape(each_first, data)
        return tuple(Kind.of(one, count) for one, count in zip(ones, counts, strict=True))

    def exchange(self, problem, broadcast, warm_start, state, inclusion):
        members = members_of(problem, warm_start)
        if state is None or inclusion is None:
            real = problem.positions < problem.size
            present = jnp.asarray(real, problem.clients.weights.dtype)
            return exchange(problem, broadcast, members._replace(present=present), problem.rows)
        present = problem.in_rows(inclusion)
        members = members._replace(state=state.clients, present=present)
        number = problem.participation.number(problem.size)
        if number is None or problem.everybody or not problem.backend.gathers:
            return exchange(problem, broadcast, members, problem.rows)
        # Compute only the participants; the other clients keep their states.
        some = select(members, present > 0, number)
        found = exchange(problem, broadcast, some.own, some.wanted)
        before = state.clients, jnp.zeros(len(problem.clients.ids), bool)
        kept, failed = jax.tree.map(
            lambda whole, x: whole.at[some.positions].set(x), before, (found.kept, found.failed)
        )
        return found._replace(kept=kept, failed=failed)

    def first_states(self, problem, warm_start, broadcast, first):
        if layout_of(first) is not None:  # messages of several shapes differ from a round's
            first = None
        members = members_of(problem, warm_start)
        return first_states(problem, broadcast, members, first)

    def local_results(self, problem, state, downlink):
        local = results(problem, downlink, state.local, problem.clients.data)
        if layout_of(local) is not None:
            raise shapes_differ("left")
        return problem.cut(local)


WHOLE = Whole()


def members_of(problem: Problem, warm_start: Personalized | None) -> RunMember:
    """All clients of a run, with their local parts of a warm start."""
    clients, positions = problem.clients, jnp.asarray(problem.positions)
    local = None if warm_start is None else warm_start.local
    local = clients.layout.with_all_rows(local, problem.size)
    return RunMember(clients.data, clients.ids, clients.weights, positions, local)


# --- all clients or one block of them, within one program ----------------------------------------


def exchange(
    problem: Problem, broadcast: Broadcast, members: RunMember, gathering: int | slice | Array
) -> Collected:
    """The part of some clients in a round; those that are absent keep their states.

    Args:
        problem: the run.
        broadcast: of the round.
        members: the clients.
        gathering: whose messages are gathered; see `collect`.
    """
    way = problem.wire.first_up if members.state is None else problem.wire.up

    def work(broadcast: Broadcast, member: RunMember):
        # Padding rows are copies of clients and are mapped like them, since all devices run one
        # program on equally many rows; weight 0 and absence keep them out of sums and counts.
        assert member.present is not None
        message, kept = client.exchange(problem, broadcast, member)
        received, failed = contribution(
            message, member.id, member.weight, member.present, way.cumulative
        )
        if member.state is not None and not problem.everybody:
            # Absent clients are mapped like the others, but must keep their state, and with it the
            # memory of their channel.
            there = member.present > 0
            kept = jax.tree.map(lambda new, old: jnp.where(there, new, old), kept, member.state)
        return received, (kept, failed)

    received, (kept, failed) = collect(problem.backend, work, broadcast, members, gathering)
    return Collected(received, kept, failed)


def first_states(
    problem: Problem, broadcast: Broadcast, members: RunMember, first: PyTree
) -> ClientState:
    """The initial states of some clients, from what they kept of their first messages."""

    def work(broadcast: Broadcast, own: tuple[RunMember, PyTree]):
        member, first = own
        return client.first_state(problem, broadcast, member, first)

    return problem.backend.map(work, broadcast, (members, first))


def results(problem: Problem, downlink: PyTree, local: PyTree, data: PyTree) -> PyTree:
    """The models of some clients, leading axis = clients."""

    def work(downlink: PyTree, own: tuple[PyTree, PyTree]):
        return client.result(problem, downlink, *own)

    return problem.backend.map(work, downlink, (local, data))


# --- data ----------------------------------------------------------------------------------------


def prepared(problem: Problem, rounds: int) -> Problem:
    """Pad the clients as the backend requires and let the algorithm prepare their data."""
    clients, multiple = problem.clients, problem.backend.multiple
    if any(len(jax.tree.leaves(part)[0]) % multiple for part in clients.parts):
        # Pad with copies at weight 0, since zeros could make derivatives NaN.
        data, whose = filled(clients.data, problem.size, multiple)
        weights = jnp.pad(clients.weights, (0, len(whose) - problem.size))
        clients = eqx.tree_at(
            lambda c: (c.data, c.ids, c.weights), clients, (data, clients.ids[whose], weights)
        )

    data = _prepared(problem, clients, rounds)
    # Bypass the constructor, which refuses the equal ids of padding rows.
    clients = eqx.tree_at(lambda c: c.data, clients, data)
    return eqx.tree_at(lambda p: p.clients, problem, clients)


def rounds_alike(problem: Problem, rounds: int) -> int:
    """The first of a few numbers of rounds for which data are prepared in the same way.

    A program for it serves for all such numbers. If there is none, it is the number itself.
    """
    leaves, tree = jax.tree.flatten(problem)
    types = map(jax.typeof, leaves)  # of Python's numbers, too
    shapes = tuple((tuple(x.shape), x.dtype, x.weak_type) for x in types)
    way = partial(_way, tree, shapes)
    return next((x for x in (4**power for power in range(16)) if way(x) == way(rounds)), rounds)


@cache
def _way(tree: Any, shapes: tuple[tuple[Any, ...], ...], rounds: int) -> bytes:
    """Tell apart the ways in which data are prepared for numbers of rounds."""
    given = [jax.ShapeDtypeStruct(x, dtype, weak_type=weak) for x, dtype, weak in shapes]
    traced = jax.make_jaxpr(partial(prepared, rounds=rounds))(jax.tree.unflatten(tree, given))
    text = re.sub("0x[0-9a-f]+", "", str(traced))  # without addresses
    return hashlib.sha256(
        b"".join([text.encode(), *(np.asarray(x).tobytes() for x in traced.consts)])
    ).digest()


def _prepared(problem: Problem, clients: Clients, rounds: int) -> PyTree:
    """The clients' data, prepared by the algorithm."""

    def prepare(_, own):
        data, client_id = own
        return client.prepare(problem, data, client_id, rounds)

    own = clients.data, clients.ids
    if len(clients.parts) > 1:
        # By its shapes, an algorithm may prepare one bucket differently from another
        # (`linalg.moments.should_densify`).
        return problem.backend.map(prepare, None, own)
    # Every trace of `new_alone` fills `made` in the same way. In a trace, data that `prepare`
    # passes through unchanged are the very objects it was given, so identity tells them from new
    # ones.
    made: tuple[Any, list[int | None]] = None, []

    def new_alone(_, own):
        nonlocal made
        leaves, tree = jax.tree.flatten(prepare(None, own))
        given = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(own[0]))}
        made = tree, [given.get(id(leaf)) for leaf in leaves]
        return [leaf for leaf, place in zip(leaves, made[1], strict=True) if place is None]

    # Do not compute or store again what the algorithm returns unchanged.
    new = iter(problem.backend.map(new_alone, None, own))
    tree, places = made
    old = jax.tree.leaves(clients.data)
    return jax.tree.unflatten(tree, [next(new) if x is None else old[x] for x in places])
