"""Records of a run: what is fixed, what changes each round, and the random keys."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt32

from jaxfed.core.backends.backend import Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Algorithm, Personalized
from jaxfed.core.contract.participation import Participation
from jaxfed.core.wire import channel
from jaxfed.core.wire.wire import Wire


class Problem(eqx.Module):
    """Everything that stays the same from round to round."""

    algorithm: Algorithm
    clients: Clients  # prepared, and padded as the backend requires
    wire: Wire
    participation: Participation
    backend: Backend
    key: Key[Array, ""]
    size: int = eqx.field(static=True)  # number of clients without padding

    @property
    def positions(self) -> Int[np.ndarray, " rows"]:
        """Each row's client, counted from 0; `size` or more for padding rows."""
        return self.clients.layout.numbers

    @property
    def rows(self) -> slice | Int[Array, " clients"]:
        """Each client's row."""
        return self.clients.layout.rows(self.size)

    @property
    def everybody(self) -> bool:
        """Whether all clients take part in each round."""
        return self.participation.number(self.size) == self.size

    @property
    def for_server(self) -> "Problem":
        """The problem as the server knows it: without the clients' data."""
        return _without(lambda problem: problem.clients.data, self)

    @property
    def for_client(self) -> "Problem":
        """The problem as one client knows it: without the other clients."""
        return _without(lambda problem: problem.clients, self)

    @property
    def hides(self) -> bool:
        """Whether separate machines send no diagnostics, which may tell what messages hide."""
        return self.wire.up.private or self.algorithm.private

    def cut(self, tree: PyTree) -> PyTree:
        """Arrays without padding rows, except where clients are spread over processes."""
        return self.clients.layout.without_more_rows(tree, self.size)

    def in_rows(self, values: Float[Array, " clients"]) -> Float[Array, " rows"]:
        """One number per client, and 0 for padding rows."""
        return self.clients.layout.in_rows(values)


def _without(where: Callable[[Problem], PyTree], problem: Problem) -> Problem:
    # It may be None already, as in a deployment, where the server never has the data.
    return eqx.tree_at(where, problem, None, is_leaf=lambda x: x is None)


class ClientState(NamedTuple):
    """What a client keeps between rounds."""

    local: PyTree  # the algorithm's state
    memory: PyTree  # the sender's memory of the uplink channel


class RunMember(NamedTuple):
    """One client of a run, or many along a leading axis."""

    data: PyTree  # prepared
    id: Int[Array, "*members"]
    weight: Float[Array, "*members"]
    position: Int[Array, "*members"]  # see `Problem.positions`
    warm_start: PyTree = None  # the local part of a warm start
    state: ClientState | None = None  # None before the first round
    present: Float[Array, "*members"] | None = None  # factor on its weight; 0 if absent or padding


class Broadcast(NamedTuple):
    """What every client receives for a round; the exchange before the first one is round 0."""

    key: Key[Array, ""]
    secret: Key[Array, ""]  # unknown to the server
    round: Int[Array, ""]
    downlink: PyTree = None
    warm_start: Personalized | None = None  # the shared part of a warm start


class Missed(NamedTuple):
    """The broadcasts that each absent client has yet to receive."""

    messages: Int[Array, " clients"]
    bytes: UInt32[Array, " clients"]  # in parts of variable length


class Failure(NamedTuple):
    """The first round with an objective or message that is not finite, and the clients at fault."""

    round: Int[Array, ""]  # counted from 1, which includes the first messages; 0 for none
    clients: Bool[Array, " clients"]  # with padding rows while the run lasts


class State(eqx.Module):
    """Everything that changes from round to round.

    Clients hold the part `clients`, the server holds the rest, `for_server`.
    """

    round: Int[Array, ""]
    server: PyTree
    local: PyTree
    uplink: channel.Link
    downlink: channel.Link
    broadcast_bytes: UInt32[Array, ""]  # in parts of variable length of the last downlink
    missed: Missed | None  # only where downlinks are differences and clients can be absent
    first_objective: Float[Array, ""]
    window: Float[Array, " window"]  # of gains or objectives, from which the measure follows
    measure: Float[Array, ""]  # compared with the tolerance
    failure: Failure

    @property
    def clients(self) -> ClientState:
        """The clients' part, leading axis = clients."""
        return ClientState(self.local, self.uplink.sender)

    @property
    def for_server(self) -> "State":
        """The state without the clients' part."""
        return self.with_clients(ClientState(None, None))

    def with_clients(self, clients: ClientState) -> "State":
        """This state with another clients' part."""
        uplink = replace(self.uplink, sender=clients.memory)
        return replace(self, local=clients.local, uplink=uplink)


class Costs(eqx.Module):
    """Costs of messages: bits in parts of fixed length, bytes in parts of variable length."""

    first_up: int | float = eqx.field(static=True)  # mean over clients of different shapes
    first_down: int = eqx.field(static=True)
    up: int = eqx.field(static=True)
    down: int = eqx.field(static=True)
    whole_down: int = eqx.field(static=True)  # of a downlink that is not a difference
    first_bytes_up: UInt32[Array | np.ndarray, ""]  # of all clients together
    first_bytes_down: UInt32[Array | np.ndarray, ""]
    varies: bool = eqx.field(static=True)  # whether messages have parts of variable length


# Entries of a round's record from which the history's bits are computed: bytes sent by the
# participants, bytes of the broadcast, number of broadcasts received by them, bytes of broadcasts
# they had missed, and how many received the whole message instead of the missed differences.
TRAFFIC = ("bytes_up", "broadcast_bytes", "messages_down", "missed_bytes", "whole_down")


def server_key_of(key: Key[Array, ""]) -> Key[Array, ""]:
    """The server's key in a round, or before the first round."""
    # No client folds in this number, since client ids are non-negative int32: the server's draws
    # and the clients' come from different keys, though all start from the round's.
    return jax.random.fold_in(key, jnp.uint32(2**32 - 1))


def shared_secret(key: Key[Array, ""]) -> Key[Array, ""]:
    """The key that clients share and the server does not know."""
    return jax.random.fold_in(server_key_of(key), 0)  # no round has the number 2**32 - 1


class ServerKeys(NamedTuple):
    """The server's random keys in one round."""

    step: Key[Array, ""]
    participation: Key[Array, ""]
    downlink: Key[Array, ""]  # of the message that opens the round


def server_keys(problem: Problem, done: Int[Array, ""] | int) -> ServerKeys:
    """The server's keys in round `done + 1`."""
    # The key of the downlink that opens round `done + 1` belongs to that round, although the server
    # encodes it at the end of the round before (`server._send_down`).
    key = server_key_of(jax.random.fold_in(problem.key, done + 1))
    return ServerKeys(*jax.random.split(key, 3))


def broadcast_of(
    problem: Problem,
    number: Int[Array, ""] | int,
    downlink: PyTree = None,
    warm_start: Personalized | None = None,
) -> Broadcast:
    """The broadcast of a round.

    Args:
        problem: the run.
        number: the round, counted from 1; 0 for the exchange before the rounds.
        downlink: the server's message; the first one does not exist yet when clients send theirs.
        warm_start: a warm start, before the rounds.
    """
    key, secret = jax.random.fold_in(problem.key, number), shared_secret(problem.key)
    shared = None if warm_start is None else Personalized(warm_start.shared, None)
    return Broadcast(key, secret, jnp.asarray(number, jnp.int32), downlink, shared)


def zeros_of(like: PyTree) -> PyTree:
    """Zeros of these shapes and types."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def blank(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """A history entry that was not computed: NaN, or 0 for integers."""
    number = jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 0
    return jnp.full(shape, number, dtype)
