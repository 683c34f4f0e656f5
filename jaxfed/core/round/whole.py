"""The engine for clients in memory: one program contains the whole round."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxfed.core.backends.backend import collect
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.buckets import each_first, filled, layout_of, select, shapes_differ
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.round import client
from jaxfed.core.round.messages import first_contribution, round_contribution
from jaxfed.core.round.problem import Broadcast, ClientState, Problem, RunMember, before_rounds
from jaxfed.core.round.rounds import Collected, Engine
from jaxfed.core.round.shapes import Kind


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

    def first_messages(self, problem, warm_start):
        broadcast = before_rounds(problem, warm_start)
        return first_messages(problem, broadcast, members_of(problem, warm_start), problem.rows)

    def first_states(self, problem, warm_start, broadcast, first):
        if layout_of(first) is not None:  # messages of several shapes differ from a round's
            first = None
        members = members_of(problem, warm_start)
        return first_states(problem, broadcast, members, first)

    def steps(self, problem, state, inclusion, broadcast):
        present = problem.in_rows(inclusion)
        members = members_of(problem, None)._replace(state=state.clients, present=present)
        number = problem.participation.number(problem.size)
        if number is None or problem.everybody or not problem.backend.gathers:
            return steps(problem, broadcast, members, problem.rows)
        # Compute only the participants; the other clients keep their states.
        some = select(members, present > 0, number)
        found = steps(problem, broadcast, some.own, some.wanted)
        before = state.clients, jnp.zeros(len(problem.clients.ids), bool)
        kept, failed = jax.tree.map(
            lambda whole, x: whole.at[some.positions].set(x), before, (found.kept, found.failed)
        )
        return found._replace(kept=kept, failed=failed)

    def opened(self, problem, opening):
        del problem
        return opening

    def closed(self, problem, before, closing):
        del problem, before
        return closing

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


def first_messages(
    problem: Problem, broadcast: Broadcast, members: RunMember, gathering: int | slice | Array
) -> Collected:
    """The first messages of some clients.

    Args:
        problem: the run.
        broadcast: the broadcast before the first round.
        members: the clients.
        gathering: whose messages are gathered; see `collect`.
    """

    def work(broadcast: Broadcast, member: RunMember):
        # Padding rows are copies of clients and are mapped like them, since all devices run one
        # program on equally many rows; weight 0 and `real` keep them out of sums and counts.
        message = client.first_message(problem, broadcast, member)
        not_finite = message.not_finite & (member.weight > 0)
        real = (member.position < problem.size).astype(member.weight.dtype)
        message = message._replace(not_finite=not_finite)
        received = first_contribution(message, member.id, member.weight, real)
        # Clients keep it only if uplink differences may start from it; it is as large as a message
        # for each client.
        kept = message.decoded if problem.uplink.cumulative else None
        return received, (kept, not_finite)

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


def steps(
    problem: Problem, broadcast: Broadcast, members: RunMember, gathering: int | slice | Array
) -> Collected:
    """The steps of some clients; those that are absent keep their states."""

    def work(broadcast: Broadcast, member: RunMember):
        assert member.present is not None
        weight, there = member.weight, member.present > 0
        message, after = client.step(problem, broadcast, member)
        present = weight * member.present.astype(weight.dtype) > 0
        # A NaN of an absent client or of padding must not end the run.
        not_finite = message.not_finite & present
        message = message._replace(not_finite=not_finite)
        cumulative = problem.uplink.cumulative
        received = round_contribution(message, member.id, weight, member.present, cumulative)
        if not problem.everybody:
            # Absent clients are mapped like the others, but must keep their state, and with it the
            # memory of their channel.
            after = jax.tree.map(lambda new, old: jnp.where(there, new, old), after, member.state)
        lost = there & ~jnp.isfinite(message.diagnostics["objective"])
        return received, (after, lost | not_finite)

    received, (kept, failed) = collect(problem.backend, work, broadcast, members, gathering)
    return Collected(received, kept, failed)


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
