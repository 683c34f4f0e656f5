"""One round of a run, and what comes before the first: pure functions of a problem and a state."""

from collections.abc import Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxfed.core import aggregation, backend, channel, participation
from jaxfed.core.algorithm import Algorithm, Personalized
from jaxfed.core.clients import Clients

LOSSLESS, EVERYBODY = channel.lossless(), participation.everybody()


class Problem(eqx.Module):
    """Everything that does not change from round to round."""

    algorithm: Algorithm
    clients: Clients  # prepared, and padded to what the backend needs
    uplink: channel.Channel
    downlink: channel.Channel
    participation: participation.Participation
    backend: backend.Backend
    key: Key[Array, ""]
    size: int = eqx.field(static=True)  # clients without the padding


class State(eqx.Module):
    """Everything that changes from round to round."""

    round: Int[Array, ""]
    server: PyTree
    local: PyTree
    uplink_memory: PyTree  # one per client
    uplink_mean_memory: PyTree  # the server's
    downlink_memory: PyTree  # the server's, as sender
    downlink_copy: PyTree  # the clients', all alike
    diagnostics: Mapping[str, Float[Array, ""]]  # of the last round
    measure: Float[Array, ""]  # what a tolerance is compared with


# ---------------------------------------------------------------------------------------------
# Before the first round.


def prepared(problem: Problem, rounds: int) -> Problem:
    """Pad the clients to what the backend needs and let the algorithm prepare their data."""
    clients, shortage = problem.clients, -problem.size % problem.backend.multiple
    if shortage:
        # Copies of real clients with weight 0: zeros could make NaN in a derivative.
        index = jnp.arange(problem.size + shortage) % problem.size
        weights = jnp.pad(clients.weights, (0, shortage))
        clients = eqx.tree_at(
            lambda c: c.weights, jax.tree.map(lambda x: x[index], clients), weights
        )

    def prepare(_, own):
        data, client_id = own
        return backend.NOTHING, problem.algorithm.prepare(data, client_id, rounds)

    _, data = problem.backend.map_reduce(prepare, (), (clients.data, clients.ids))
    return eqx.tree_at(lambda p: p.clients, problem, Clients(data, clients.ids, clients.weights))


def client_start(problem: Problem, key, data, start, client_id):
    """ONE client's start: its first message and state."""
    key, _ = jax.random.split(jax.random.fold_in(key, client_id))
    return problem.algorithm.client_init(key, data, start)


def begin(problem: Problem, start: Personalized | None) -> State:
    """Everybody's first state, from the clients' first messages."""
    algorithm, clients = problem.algorithm, problem.clients
    rules = algorithm.start_aggregation
    padded = len(clients) - problem.size

    def work(shared, own):
        key, shared_start = shared
        data, client_id, weight, local_start = own
        start = None if shared_start is None else Personalized(shared_start, local_start)
        uplink, local = client_start(problem, key, data, start, client_id)
        # Only what both ends may remember is kept.
        kept = uplink if problem.uplink.cumulative else None
        return aggregation.split(rules, uplink, weight), (local, kept)

    key = jax.random.fold_in(problem.key, 0)
    shared_start, local_start = (None, None) if start is None else start
    index = jnp.arange(len(clients)) % problem.size
    local_start = jax.tree.map(lambda x: x[index] if padded else x, local_start)
    sent, (local, first) = problem.backend.map_reduce(
        work, (key, shared_start), (clients.data, clients.ids, clients.weights, local_start)
    )
    if padded:
        sent["stack"] = jax.tree.map(lambda x: x[: problem.size], sent["stack"])
    total = aggregation.join(rules, sent)
    server = algorithm.server_init(_server_key(key), total, start)

    downlink = algorithm.downlink(server)
    downlink_memory = problem.downlink.memory(downlink)
    _, local = problem.backend.map_reduce(
        lambda downlink, own: (backend.NOTHING, algorithm.client_begin(downlink, *own)),
        downlink,
        (local, clients.data),
    )
    one = jax.tree.map(lambda x: x[0], (clients.data, local))
    uplink, _, diagnostics = jax.eval_shape(algorithm.client_step, key, downlink, one[1], one[0])
    if problem.uplink.cumulative and _same_kind(problem, first, uplink):
        uplink_memory = jax.vmap(problem.uplink.memory)(first)
        uplink_mean_memory = problem.uplink.memory(total)
    else:
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), uplink)
        uplink_mean_memory = problem.uplink.memory(blank)
        uplink_memory = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (len(clients), *jnp.shape(x))), uplink_mean_memory
        )

    def seated(memory, position, weight):
        ones = jax.tree.map(lambda x: jnp.ones((), x.dtype), uplink)
        rules = algorithm.aggregation
        share = aggregation.join(rules, aggregation.split(rules, ones, weight))
        return problem.uplink.seated(memory, channel.Seat(position, share, _secret(problem.key)))

    uplink_memory = jax.vmap(seated)(uplink_memory, jnp.arange(len(clients)), clients.weights)
    dtype = diagnostics["objective"].dtype
    blank = {name: jnp.full((), jnp.nan, leaf.dtype) for name, leaf in diagnostics.items()}
    for name, value in algorithm.server_diagnostics(server).items():
        blank[name] = jnp.full((), jnp.nan, jnp.asarray(value).dtype)
    return State(
        round=jnp.zeros((), jnp.int32),
        server=server,
        local=local,
        uplink_memory=uplink_memory,
        uplink_mean_memory=uplink_mean_memory,
        downlink_memory=downlink_memory,
        downlink_copy=downlink_memory,
        diagnostics=blank,
        measure=jnp.full((), jnp.inf, dtype),
    )


def _same_kind(problem: Problem, first: PyTree, uplink: PyTree) -> bool:
    """Whether a round's uplink looks like the first one, and is aggregated like it."""
    algorithm = problem.algorithm
    one = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), first)
    rules = eqx.tree_equal(algorithm.start_aggregation, algorithm.aggregation)
    return rules is True and bool(eqx.tree_equal(one, jax.eval_shape(lambda: uplink)))


# ---------------------------------------------------------------------------------------------
# A round.


def _server_key(key: Key[Array, ""]) -> Key[Array, ""]:
    # Client ids are non-negative, so no client ever folds in this number.
    return jax.random.fold_in(key, jnp.uint32(2**32 - 1))


def _secret(key: Key[Array, ""]) -> Key[Array, ""]:
    """What the clients have in common and the server has not."""
    return jax.random.fold_in(_server_key(key), 0)  # no round folds in the largest number


def _keys(problem: Problem, done: Int[Array, ""] | int) -> Key[Array, " 3"]:
    """The next round's keys: the server's, the participation's and the downlink's."""
    return jax.random.split(_server_key(jax.random.fold_in(problem.key, done + 1)), 3)


def _received(problem: Problem, state: State, key: Key[Array, ""]):
    """The next round's downlink as clients have it, its payload, and both ends' memories."""
    algorithm = problem.algorithm
    payload, memory = problem.downlink.encode(
        key, algorithm.downlink(state.server), state.downlink_memory
    )
    downlink, copy = problem.downlink.receive(problem.downlink.decode(payload), state.downlink_copy)
    if not isinstance(problem.downlink, type(LOSSLESS)):
        # Round 1 is about what the clients have from the exact exchange before it.
        downlink = jax.tree.map(
            lambda exact, received: jnp.where(state.round == 0, exact, received),
            algorithm.downlink(state.server),
            downlink,
        )
    return downlink, payload, memory, copy


def objectives(problem: Problem, state: State) -> Float[Array, " clients"]:
    """What each client would report in the next round, whether it takes part or not."""
    key = jax.random.fold_in(problem.key, state.round + 1)
    downlink = _received(problem, state, _keys(problem, state.round)[2])[0]

    def work(shared, own):
        key, downlink = shared
        data, local, client_id = own
        step_key, _ = jax.random.split(jax.random.fold_in(key, client_id))
        diagnostics = problem.algorithm.client_step(step_key, downlink, local, data)[2]
        return backend.NOTHING, diagnostics["objective"]

    own = (problem.clients.data, state.local, problem.clients.ids)
    return problem.backend.map_reduce(work, (key, downlink), own)[1][: problem.size]


def one_round(problem: Problem, state: State) -> tuple[State, dict[str, Array]]:
    """One federated round: down the wire, every participant's step, up the wire, the server."""
    algorithm, clients = problem.algorithm, problem.clients
    rules = aggregation.Added() if problem.uplink.adds_up else algorithm.aggregation
    key = jax.random.fold_in(problem.key, state.round + 1)
    server_key, choice_key, down_key = _keys(problem, state.round)

    downlink, payload, downlink_memory, downlink_copy = _received(problem, state, down_key)
    inclusion = problem.participation.inclusion(
        choice_key, state.round, clients.ids[: problem.size]
    )
    inclusion = jnp.pad(inclusion, (0, len(clients) - problem.size))

    def work(shared, own):
        key, downlink = shared
        data, local, memory, client_id, weight, present = own
        step_key, channel_key = jax.random.split(jax.random.fold_in(key, client_id))
        uplink, new_local, diagnostics = algorithm.client_step(step_key, downlink, local, data)
        payload, new_memory = problem.uplink.encode(channel_key, uplink, memory)
        share = weight * present.astype(weight.dtype)
        sent = aggregation.split(rules, problem.uplink.decode(payload), share)
        written = jnp.where(present > 0, channel.variable_bytes(payload), 0)
        told = {k: jnp.where(share > 0, share * v, 0) for k, v in diagnostics.items()}
        sent["sum"] = (sent["sum"], told, share, written)
        if not everybody:
            new_local, new_memory = jax.tree.map(
                lambda new, old: jnp.where(present > 0, new, old),
                (new_local, new_memory),
                (local, memory),
            )
        return sent, (new_local, new_memory)

    everybody = isinstance(problem.participation, type(EVERYBODY))
    own = (
        clients.data, state.local, state.uplink_memory, clients.ids, clients.weights, inclusion,
    )  # fmt: skip
    if problem.participation.size is not None and problem.backend.gathers:
        # Only the participants are computed; the others' states are left where they are.
        chosen = jnp.nonzero(inclusion, size=problem.participation.size)[0]
        picked = jax.tree.map(lambda x: x[chosen], own)
        sent, kept = problem.backend.map_reduce(work, (key, downlink), picked)
        local, uplink_memory = jax.tree.map(
            lambda whole, part: whole.at[chosen].set(part),
            (state.local, state.uplink_memory),
            kept,
        )
    else:
        sent, (local, uplink_memory) = problem.backend.map_reduce(work, (key, downlink), own)
    totals, diagnostics, share, written = sent["sum"]
    message = aggregation.join(rules, {**sent, "sum": totals})
    message, uplink_mean_memory = problem.uplink.receive(message, state.uplink_mean_memory)
    server = algorithm.server_step(server_key, state.server, message)

    # Diagnostics are means over the participants, so that they stay comparable between rounds.
    diagnostics = {name: value / share for name, value in diagnostics.items()}
    diagnostics |= {k: jnp.asarray(v) for k, v in algorithm.server_diagnostics(server).items()}
    measure = algorithm.stopping_measure(state.diagnostics, diagnostics)
    new_state = State(
        round=state.round + 1,
        server=server,
        local=local,
        uplink_memory=uplink_memory,
        uplink_mean_memory=uplink_mean_memory,
        downlink_memory=downlink_memory,
        downlink_copy=downlink_copy,
        diagnostics=diagnostics,
        measure=jnp.where(jnp.isnan(measure), jnp.inf, measure).astype(state.measure.dtype),
    )
    participants = (inclusion > 0).sum(dtype=jnp.int32)
    varying = dict(zip(VARYING, (written, channel.variable_bytes(payload)), strict=True))
    return new_state, {**diagnostics, "participants": participants, **varying}


def result_of(problem: Problem, state: State) -> Personalized:
    """The models at this state; the padding clients are cut off."""
    algorithm = problem.algorithm
    downlink = algorithm.downlink(state.server)

    def work(downlink, own):
        local, data = own
        return backend.NOTHING, algorithm.client_result(downlink, local, data)

    _, local = problem.backend.map_reduce(work, downlink, (state.local, problem.clients.data))
    local = jax.tree.map(lambda x: x[: problem.size], local)
    return Personalized(algorithm.shared_result(state.server), local)


# ---------------------------------------------------------------------------------------------
# What messages cost.


def bits(problem: Problem, start: Personalized | None) -> tuple[int, int, int, int]:
    """Bits of one client's first uplink and first downlink, and of a round's two messages."""
    first = first_message(problem, start)
    state = jax.eval_shape(begin, problem, start)

    def payloads(state):
        algorithm, key = problem.algorithm, problem.key
        one = jax.tree.map(lambda x: x[0], problem.clients.data)
        local = jax.tree.map(lambda x: x[0], state.local)
        downlink = algorithm.downlink(state.server)
        down, _ = problem.downlink.encode(key, downlink, state.downlink_memory)
        uplink, _, _ = algorithm.client_step(key, downlink, local, one)
        up, _ = problem.uplink.encode(key, uplink, problem.uplink.memory(uplink))
        return downlink, up, down

    received, up, down = jax.eval_shape(payloads, state)
    count = channel.fixed_bits
    return count(first), count(received), count(up), count(down)


def first_message(problem: Problem, start: Personalized | None) -> PyTree:
    """Shapes and types of what one client sends before the rounds."""

    def message(problem, start):
        one = jax.tree.map(lambda x: x[0], problem.clients.data)
        if start is not None:
            start = Personalized(start.shared, jax.tree.map(lambda x: x[0], start.local))
        return client_start(problem, problem.key, one, start, jnp.int32(0))[0]

    return jax.eval_shape(message, problem, start)


# What a round's messages took besides: bytes of all clients together, and of the broadcast.
VARYING = ("bytes_up", "bytes_down")
