"""Records the messages between a server and one client without changing the run."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from jaxfed import backend, channel
from jaxfed._checks import check_instance, check_whole, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import like
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.contract.reduction import plain
from jaxfed.core.contract.wrapper import Wrapper
from jaxfed.core.round.client import exchange
from jaxfed.core.round.problem import Problem, broadcast_of
from jaxfed.core.round.rounds import begin, one_round
from jaxfed.core.round.whole import WHOLE, members_of, prepared
from jaxfed.core.run.arguments import problem_of
from jaxfed.core.run.result import Fitted
from jaxfed.core.wire.wire import Wire

LOSSLESS = channel.lossless()


class Transcript(NamedTuple):
    """The messages between a server and one client, as NumPy arrays in double precision.

    Attributes:
        features: number of features.
        first: the client's message before the first round.
        first_total: the aggregate of all clients' first messages.
        received: the server's broadcasts, with a leading axis of rounds.
        sent: the client's messages, with a leading axis of rounds.
        total: the aggregates of all clients' messages, with a leading axis of rounds.
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
    warm_start: Fitted | None = None,
    channel: channel.Channel | Wire = LOSSLESS,
) -> Transcript:
    """Run an algorithm and record the messages between the server and one client.

    The rounds are those of `jaxfed.rollout` with the same arguments. Messages are recorded as
    decoded by the receiver, with the channel's losses; a masked message is decoded as if it were
    the sum.

    Args:
        algorithm: the algorithm to run.
        clients: the clients; all of them take part.
        rounds: number of rounds.
        key: random key.
        client: position of the client whose messages are recorded.
        warm_start: as in `jaxfed.rollout`.
        channel: as in `jaxfed.rollout`.

    Returns:
        The messages.

    Raises:
        ValueError: if there is no such client, and as in `jaxfed.rollout`.
    """
    check_client(clients, client)
    problem, start = problem_of(
        algorithm, like(clients, warm_start), rounds, key, warm_start, channel, None, backend.vmap()
    )
    up, *others = problem.wire.channels
    recorded = replace(
        problem, algorithm=_Recorded(problem.algorithm), wire=Wire(_Tap(up), *others)
    )
    transcript = _run(recorded, start, jnp.asarray(client), rounds)
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), transcript)
    return found._replace(features=clients.features)


class _Memory(NamedTuple):
    memory: PyTree  # of the channel itself
    message: PyTree  # the last message, as its receiver decodes it


@final
class _Tap(channel.Channel):
    """An uplink that stores a client's last message as decoded by the receiver."""

    inner: channel.Channel

    @property
    def cumulative(self) -> bool:
        return self.inner.cumulative

    def bind(self, context):
        return replace(self, inner=self.inner.bind(context))

    def memory(self, message):
        return _Memory(self.inner.memory(message), message)

    def encode(self, key, message, memory):
        payload, after = self.inner.encode(key, message, memory.memory)
        received = self.inner.receive(self.inner.decode(payload), memory.message)
        decoded = jax.tree.unflatten(jax.tree.structure(message), jax.tree.leaves(received))
        return payload, _Memory(after, decoded)

    def decode(self, payload):
        return self.inner.decode(payload)

    def differentiable(self, decoded, message, memory):
        return self.inner.differentiable(decoded, message, memory.memory)

    def receive(self, decoded, last):
        return self.inner.receive(decoded, last)


@final
class _Recorded(Wrapper):
    """An algorithm whose server adds the aggregates that it receives to the diagnostics."""

    algorithm: Algorithm

    def inner_server(self, server):
        return server[0]

    def server_init(self, key, first, like, warm_start):
        return self.algorithm.server_init(key, first, like, warm_start), first

    def server_step(self, key, server, uplink) -> tuple[PyTree, Any]:
        after, diagnostics = self.algorithm.server_step(key, server[0], uplink)
        received = {f"uplink {i}": leaf for i, leaf in enumerate(jax.tree.leaves(uplink))}
        return (after, server[1]), {**diagnostics, **received}


@partial(jax.jit, static_argnames="rounds")  # compiled once for all records of a shape
def _run(
    problem: Problem, warm_start: Personalized | None, client: Int[Array, ""], rounds: int
) -> Transcript:
    """The transcript as JAX arrays, without the number of features."""
    problem = prepared(problem, rounds)
    state, _ = begin(problem, warm_start, WHOLE)

    def step(state, _):
        received = state.downlink.receiver
        state, diagnostics = one_round(problem, state, WHOLE)
        sent = plain(jax.tree.map(lambda x: x[client], state.uplink.sender.message))
        leaves = [diagnostics[f"uplink {i}"] for i in range(len(jax.tree.leaves(sent)))]
        return state, (received, sent, jax.tree.unflatten(jax.tree.structure(sent), leaves))

    _, rest = jax.lax.scan(step, state, length=rounds)
    first = _first_message(problem, warm_start, client)
    return Transcript(0, first, state.server[1], *rest)


def _first_message(
    problem: Problem, warm_start: Personalized | None, client: Int[Array, ""]
) -> PyTree:
    """One client's message before the first round, as decoded by the receiver."""
    member = jax.tree.map(lambda x: x[client], members_of(problem, warm_start))
    message, _ = exchange(problem, broadcast_of(problem, 0, None, warm_start), member)
    return plain(problem.wire.first_up.receive(message.decoded, None))


def check_client(clients: Clients, client: int) -> None:
    """Check that there is such a client, and that clients are not in buckets."""
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    check_whole("client", client, least=0, most=len(clients) - 1)
    if len(clients.parts) > 1:
        raise refuse("clients", "clients without buckets, as of clients.unbucketed()", clients)
