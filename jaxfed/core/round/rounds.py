"""One round of a run, and what comes before the first: pure functions of a problem and a state."""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jaxfed.core.backends.backend import collect
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.buckets import (
    each_first,
    filled,
    first_of,
    is_buckets,
    layout_of,
    picked,
    unlike,
)
from jaxfed.core.contract import calls as contract
from jaxfed.core.contract import participation
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.contract.reduction import wrapped
from jaxfed.core.round.ends import (
    Opening,
    chosen_inclusion,
    client_round,
    contribution,
    costs_of,
    first_contribution,
    first_local,
    first_sent,
    first_state,
    messages_of_round,
    opened,
    payload_of,
    remembers_first,
    server_round,
)
from jaxfed.core.round.problem import (
    Costs,
    Problem,
    State,
    everybody,
    key_of_round,
    key_of_start,
    shared_secret,
    zeros_of,
)
from jaxfed.core.wire import channel
from jaxfed.core.wire.release import Release


def prepared(problem: Problem, rounds: int) -> Problem:
    """Pad the clients to what the backend needs and let the algorithm prepare their data."""
    clients, multiple = problem.clients, problem.backend.multiple
    if len(clients.ids) % multiple or is_buckets(clients.data):
        # Copies of real clients with weight 0: zeros could make NaN in a derivative.
        data, whose = filled(clients.data, problem.size, multiple)
        weights = jnp.pad(clients.weights, (0, len(whose) - problem.size))
        clients = eqx.tree_at(
            lambda c: (c.data, c.ids, c.weights), clients, (data, clients.ids[whose], weights)
        )

    data = _prepared(problem, clients, rounds)
    # Not by their constructor: those that fill up devices have the ids of others.
    clients = eqx.tree_at(lambda c: c.data, clients, data)
    return eqx.tree_at(lambda p: p.clients, problem, clients)


def _prepared(problem: Problem, clients: Clients, rounds: int) -> PyTree:
    """Their data as the algorithm prepares them."""

    def prepare(_, own):
        data, client_id = own
        return problem.algorithm.prepare(data, client_id, rounds)

    own = clients.data, clients.ids
    if is_buckets(clients.data):
        return problem.backend.map(prepare, None, own)
    made: tuple[Any, list[int | None]] = None, []

    def new_alone(_, own):
        nonlocal made
        leaves, tree = jax.tree.flatten(prepare(None, own))
        given = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(own[0]))}
        made = tree, [given.get(id(leaf)) for leaf in leaves]
        return [leaf for leaf, place in zip(leaves, made[1], strict=True) if place is None]

    # What is passed on as it was given is not computed, and not held twice.
    new = iter(problem.backend.map(new_alone, None, own))
    tree, places = made
    old = jax.tree.leaves(clients.data)
    return jax.tree.unflatten(tree, [next(new) if x is None else old[x] for x in places])


def begin(problem: Problem, start: Personalized | None) -> tuple[State, Costs]:
    """Everybody's first state, and what messages cost."""
    clients = problem.clients
    places = jnp.asarray(problem.numbers)
    local_start = None if start is None else start.local
    if clients.blocks is None:
        local_start = jax.tree.map(lambda x: x[places % problem.size], local_start)
    own = clients.data, clients.ids, clients.weights, places, local_start
    heard, (first, broken) = announced(problem, start, own, problem.rows)
    opening = opened(problem, heard, jax.eval_shape(first_of, clients.data), start)
    local = begun(problem, start, opening.downlink, (clients.data, clients.ids, local_start))
    if layout_of(local) is not None:
        raise unlike("kept")
    layout = layout_of(clients.data)
    shapes = shapes_of(
        problem, start, opening.downlink,
        jax.eval_shape(each_first, (clients.data, local, local_start)),
        (1,) if layout is None else layout.sizes,
    )  # fmt: skip
    remembered = layout_of(first) is None and remembers_first(
        problem, jax.eval_shape(first_of, first), shapes.uplink
    )
    if remembered:
        memory = jax.vmap(problem.uplink.memory, axis_size=len(clients.ids))(first)
    else:
        # Where the clients are, as everything that they keep.
        memory = problem.backend.map(
            lambda zeros, _: problem.uplink.memory(zeros), zeros_of(shapes.uplink), clients.ids
        )
    return with_clients(problem, opening, shapes, remembered, (local, memory), broken)


def with_clients(
    problem: Problem, opening: "Opening", shapes: "Shapes", remembered: bool,
    kept: tuple[PyTree, PyTree], broken: Bool[Array, " rows"],
) -> tuple[State, Costs]:  # fmt: skip
    """The first state, with what the clients keep and whose message is not finite, and costs."""
    state = first_state(problem, opening, shapes.uplink, shapes.objective, remembered)
    state = replace(
        state,
        local=kept[0],
        uplink=replace(state.uplink, sender=kept[1]),
        failure=state.failure._replace(clients=broken),
    )
    return state, costs_of(problem, opening, shapes.uplink, shapes.first_bits)


def announced(
    problem: Problem, start: Personalized | None, own: PyTree, gathering: int | slice | Array
) -> tuple[PyTree, tuple[PyTree, Bool[Array, " rows"]]]:
    """The first messages of some clients.

    Args:
        problem: the run.
        start: the warm start; its shared part alone is looked at.
        own: the clients' data, ids, weights, positions and warm starts.
        gathering: whose messages are gathered; see `collect`.

    Returns:
        What the server hears; and for each client the message, if it is remembered, and whether it
        is not finite.
    """

    def announce(shared, own):
        key, secret, shared_start = shared
        data, client_id, weight, place, local_start = own
        context = channel.Context(place, weight, secret, jnp.zeros((), jnp.int32))
        begun = None if start is None else Personalized(shared_start, local_start)
        sent, broken = first_sent(problem, key, client_id, context, data, begun)
        # Only what both ends may remember is kept.
        kept = sent.decoded if problem.uplink.cumulative else None
        broken &= weight > 0
        # Who only fills up a device sends nothing.
        real = (place < problem.size).astype(weight.dtype)
        heard = first_contribution(sent.payload, sent.decoded, weight, real, broken)
        return heard, (kept, broken)

    shared_start = None if start is None else start.shared
    shared = key_of_start(problem.key), shared_secret(problem.key), shared_start
    return collect(problem.backend, announce, shared, own, gathering)


def begun(problem: Problem, start: Personalized | None, downlink: PyTree, own: PyTree) -> PyTree:
    """The first states of some clients, from their data, ids and warm starts."""

    def initial(shared, own):
        key, downlink, shared_start = shared
        data, client_id, local_start = own
        begun = None if start is None else Personalized(shared_start, local_start)
        return first_local(problem, key, client_id, downlink, data, begun)

    shared_start = None if start is None else start.shared
    return problem.backend.map(initial, (key_of_start(problem.key), downlink, shared_start), own)


class Shapes(NamedTuple):
    """What a round's messages are like, and what the first ones cost."""

    uplink: PyTree
    objective: jax.ShapeDtypeStruct
    first_bits: int | float  # a mean where clients' data differ in shape


def shapes_of(
    problem: Problem, start: Personalized | None, downlink: PyTree, each: Sequence[PyTree],
    times: Sequence[int],
) -> Shapes:  # fmt: skip
    """Shapes of messages, from those of what clients have.

    Args:
        problem: the run.
        start: the warm start.
        downlink: the first.
        each: one client's data, state and warm start, for each size of clients.
        times: how many clients are of that size.

    Raises:
        ValueError: if what clients send in a round depends on the size of their data.
    """

    def message(data, local_start):
        begun = None if start is None else Personalized(start.shared, local_start)
        return wrapped(contract.first_message(problem.algorithm, problem.key, data, begun))

    bits = [
        channel.fixed_bits(payload_of(problem.first_uplink, jax.eval_shape(message, data, own)))
        for data, _, own in each
    ]
    steps = [messages_of_round(problem, downlink, local, data) for data, local, _ in each]
    uplink, objective = steps[0]
    if not all(contract.alike(other, uplink) for other, _ in steps):
        raise unlike("sent")
    total, count = sum(map(operator.mul, bits, times)), sum(times)
    return Shapes(uplink, objective, total / count if total % count else total // count)


def one_round(problem: Problem, state: State) -> tuple[State, dict[str, Array]]:
    """One federated round: every participant's step, up the wire, the server, down the wire."""
    clients, before = problem.clients, (state.local, state.uplink.sender)
    inclusion, shared = turn_of(problem, state)
    present = problem.in_rows(inclusion)
    own = (
        clients.data, *before, clients.ids, clients.weights, jnp.asarray(problem.numbers), present,
    )  # fmt: skip
    number = problem.participation.number(problem.size)
    if number is not None and not everybody(problem) and problem.backend.gathers:
        # Only the participants are computed; the others' states are left where they are.
        some, chosen, which = picked(own, present > 0, number)
        heard, found = stepped(problem, shared, some, which)
        nobody = jnp.zeros(len(clients.ids), bool)
        whole = before, (nobody, nobody)
        found = jax.tree.map(lambda whole, x: whole.at[chosen].set(x), whole, found)
    else:
        heard, found = stepped(problem, shared, own, problem.rows)
    (local, sender), (lost, broken) = found
    uplink = replace(state.uplink, sender=sender)
    # Whatever the server makes of it, participants have done their steps.
    state = replace(state, local=local, uplink=uplink)
    return server_round(problem, state, inclusion, heard, lost | broken)


def turn_of(problem: Problem, state: State) -> tuple[Float[Array, " clients"], PyTree]:
    """Who takes part in the next round, and what all of them get for it."""
    key = key_of_round(problem.key, state.round)
    shared = (key, shared_secret(problem.key), state.round + 1, state.downlink.receiver)
    return chosen_inclusion(problem, state.round), shared


def stepped(
    problem: Problem, shared: PyTree, own: PyTree, gathering: int | slice | Array
) -> tuple[PyTree, tuple[PyTree, PyTree]]:
    """The steps of some clients.

    Args:
        problem: the run.
        shared: what all of them get.
        own: their data, states, memories, ids, weights, positions and presence.
        gathering: whose messages are gathered; see `collect`.

    Returns:
        What the server hears; and for each client its state and memory, and whether its objective
        and its message are not finite.
    """
    all_of_them = everybody(problem)

    def work(shared, own):
        data, local, memory, client_id, weight, place, present = own
        known = channel.Context(place, weight, shared[1], shared[2])
        step = client_round(problem, shared[0], client_id, known, shared[3], local, memory, data)
        broken = step.broken & (weight * present.astype(weight.dtype) > 0)
        heard = contribution(problem, step._replace(broken=broken), weight, present)
        there = present > 0
        kept = step.local, step.memory
        if not all_of_them:
            kept = jax.tree.map(lambda new, old: jnp.where(there, new, old), kept, (local, memory))
        lost = there & ~jnp.isfinite(step.diagnostics["objective"])
        return heard, (kept, (lost, broken))

    return collect(problem.backend, work, shared, own, gathering)


def released(problem: Problem, state: State, costs: Costs) -> tuple[Release, ...]:
    """What has left the clients in this run up to this state, the rounds' messages last."""
    weights = problem.clients.weights[problem.rows]
    everyone, some = participation.everybody(), problem.participation
    times = jnp.maximum(state.round, state.failure.round)
    kept = jax.tree.leaves((state.local, state.uplink.sender))
    return (
        Release(problem.first_uplink, everyone, costs.first_up, 1, weights, stateless=True),
        Release(problem.uplink, some, costs.up, times, weights, stateless=not kept),
    )


def result_of(problem: Problem, state: State) -> Personalized:
    """The models at this state; of clients that were padded here, without the padding."""
    algorithm = problem.algorithm
    downlink = algorithm.downlink(state.server)
    local = problem.backend.map(
        lambda downlink, own: contract.client_result(algorithm, downlink, *own),
        downlink,
        (state.local, problem.clients.data),
    )
    if layout_of(local) is not None:
        raise unlike("left")
    local = problem.cut(local)
    return Personalized(algorithm.shared_result(state.server), local)
