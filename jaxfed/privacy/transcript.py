"""What passes between a server and one client, overheard without changing the run."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from jaxfed import backend, channel
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.checks import check_instance, check_whole, refuse
from jaxfed.core.contract.algorithm import Algorithm, Diagnostics, Personalized
from jaxfed.core.contract.reduction import plain, wrapped
from jaxfed.core.round.problem import Problem, shared_secret
from jaxfed.core.round.rounds import begin, one_round, prepared
from jaxfed.core.run.arguments import problem_of
from jaxfed.core.run.solution import Solution
from jaxfed.core.wire.wire import Wire

LOSSLESS = channel.lossless()


class Transcript(NamedTuple):
    """What passed between a server and one client, as NumPy arrays in double precision.

    Attributes:
        features: number of features.
        first: the client's message before the first round.
        first_total: the aggregate of all clients' first messages.
        received: what the server broadcast, leading axis = rounds.
        sent: what the client sent back, leading axis = rounds.
        total: the aggregate of all clients' messages, leading axis = rounds.
    """

    features: int
    first: PyTree
    first_total: PyTree
    received: PyTree
    sent: PyTree
    total: PyTree


def record(
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    key: Key[Array, ""],
    client: int = 0,
    warm_start: Solution | Personalized | None = None,
    channel: channel.Channel | Wire = LOSSLESS,
) -> Transcript:
    """Run an algorithm, and keep what one client and the server say to each other.

    The rounds are those of `jaxfed.rollout` with the same arguments. Messages are what the
    receiver makes of the payload, so that a channel's losses are in them; of a masked one, as if it
    were the sum.

    Args:
        algorithm: what to run.
        clients: whom to run it on; everybody takes part.
        rounds: how many rounds.
        key: random key.
        client: position of the client that is listened to.
        warm_start: as in `jaxfed.rollout`.
        channel: as in `jaxfed.rollout`.

    Returns:
        The messages.

    Raises:
        ValueError: if there is no such client, and as `jaxfed.rollout`.
    """
    check_client(clients, client)
    problem, start = problem_of(
        algorithm, clients, rounds, key, warm_start, channel, None, backend.vmap()
    )
    overheard = replace(
        problem, algorithm=_Overheard(problem.algorithm), uplink=_Tap(problem.uplink)
    )
    first, first_total, rest = _listened(overheard, start, client, rounds)
    return Transcript(clients.features, *_double((first, first_total, *rest)))


class _Seen(NamedTuple):
    memory: PyTree  # the channel's own
    message: PyTree  # the last one, as who receives it alone understands it


@final
class _Tap(channel.Channel):
    """An uplink that remembers a client's last message as its receiver understood it."""

    inner: channel.Channel

    @property
    def cumulative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.cumulative

    def bind(self, context):
        return replace(self, inner=self.inner.bind(context))

    def memory(self, message):
        return _Seen(self.inner.memory(message), message)

    def encode(self, key, message, memory):
        payload, after = self.inner.encode(key, message, memory.memory)
        received = self.inner.receive(self.inner.decode(payload), memory.message)
        seen = jax.tree.unflatten(jax.tree.structure(message), jax.tree.leaves(received))
        return payload, _Seen(after, seen)

    def decode(self, payload):
        return self.inner.decode(payload)

    def differentiable(self, decoded, message, memory):
        return self.inner.differentiable(decoded, message, memory.memory)

    def receive(self, decoded, last):
        return self.inner.receive(decoded, last)


@final
class _Overheard(Algorithm):
    """An algorithm whose server tells what it receives: first messages, and each round's."""

    inner: Algorithm

    def prepare(self, data, client_id, rounds):
        return self.inner.prepare(data, client_id, rounds)

    def first_message(self, key, data, start):
        return self.inner.first_message(key, data, start)

    def server_init(self, key, first, like, start):
        return self.inner.server_init(key, first, like, start), first

    def downlink(self, server):
        return self.inner.downlink(server[0])

    def client_init(self, key, downlink, data, start):
        return self.inner.client_init(key, downlink, data, start)

    def client_step(self, key, downlink, local, data):
        return self.inner.client_step(key, downlink, local, data)

    def server_step(self, key, server, uplink) -> tuple[PyTree, Diagnostics]:
        after, diagnostics = self.inner.server_step(key, server[0], uplink)
        heard = {f"heard {i}": leaf for i, leaf in enumerate(jax.tree.leaves(uplink))}
        return (after, server[1]), {**diagnostics, **heard}


@partial(jax.jit, static_argnames="rounds")  # compiled once for all records of a shape
def _listened(
    problem: Problem, start: Personalized | None, client: int, rounds: int
) -> tuple[PyTree, PyTree, tuple[PyTree, PyTree, PyTree]]:
    """The client's first message, all clients', and of each round downlink, uplink and total."""
    problem = prepared(problem, rounds)
    state, _ = begin(problem, start)

    def listen(state, _):
        received = state.downlink.receiver
        state, told = one_round(problem, state)
        sent = plain(jax.tree.map(lambda x: x[client], state.uplink.sender.message))
        leaves = [told[f"heard {i}"] for i in range(len(jax.tree.leaves(sent)))]
        return state, (received, sent, jax.tree.unflatten(jax.tree.structure(sent), leaves))

    first = _announced(problem, start, client)
    return first, state.server[1], jax.lax.scan(listen, state, length=rounds)[1]


def _announced(problem: Problem, start: Personalized | None, client: int) -> PyTree:
    """One client's message before the first round, as its receiver understands it alone."""
    data, number, weight, own = jax.tree.map(
        lambda x: x[client],
        (
            problem.clients.data,
            problem.clients.ids,
            problem.clients.weights,
            None if start is None else start.local,
        ),
    )
    begun = None if start is None else Personalized(start.shared, own)
    key = jax.random.fold_in(jax.random.fold_in(problem.key, 0), number)
    own_key, channel_key = jax.random.split(key)
    message = wrapped(problem.algorithm.first_message(own_key, data, begun))
    place = channel.Context(
        jnp.asarray(client), weight, shared_secret(problem.key), jnp.zeros((), jnp.int32)
    )
    way = problem.first_uplink.bind(place)
    payload, _ = way.encode(channel_key, message, way.memory(message))
    return plain(way.receive(way.decode(payload), None))


def _double(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def check_client(clients: Clients, client: int) -> None:
    """Refuse what is no client whose messages can be told apart.

    Raises:
        ValueError: as said above.
    """
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    check_whole("client", client, least=0, most=len(clients) - 1)
    if len(clients.parts) > 1:
        raise refuse("clients", "clients without buckets, as of clients.unbucketed()", clients)
