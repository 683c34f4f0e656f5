"""What a run is, what changes in it from round to round, and where its random keys come from."""

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


class Problem(eqx.Module):
    """Everything that does not change from round to round."""

    algorithm: Algorithm
    clients: Clients  # prepared, and padded to what the backend needs
    uplink: channel.Channel
    downlink: channel.Channel
    first_uplink: channel.Channel
    first_downlink: channel.Channel
    participation: Participation
    backend: Backend
    key: Key[Array, ""]
    size: int = eqx.field(static=True)  # clients without the padding

    @property
    def positions(self) -> Int[np.ndarray, " rows"]:
        """Each row's client, counted from 0; `size` and more for rows that fill up devices."""
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
        """The run as the server knows it: without the clients' data."""
        clients = eqx.tree_at(lambda c: c.data, self.clients, None, is_leaf=lambda x: x is None)
        return replace(self, clients=clients)

    @property
    def for_client(self) -> "Problem":
        """The run as a client knows it: without anything of the others."""
        return replace(self, clients=None)

    def cut(self, tree: PyTree) -> PyTree:
        """Arrays as the clients were given: those of several processes stay where they lie."""
        return self.clients.layout.without_more_rows(tree, self.size)

    def in_rows(self, values: Float[Array, " clients"]) -> Float[Array, " rows"]:
        """One number a client, and 0 for rows that fill up devices."""
        return self.clients.layout.in_rows(values)


class ClientState(NamedTuple):
    """What clients keep between rounds."""

    local: PyTree  # the algorithm's state
    memory: PyTree  # of their end of the uplink


class Member(NamedTuple):
    """A client of a run, or many of them along a leading axis."""

    data: PyTree  # prepared
    id: Int[Array, "*members"]
    weight: Float[Array, "*members"]
    position: Int[Array, "*members"]  # see `Problem.positions`
    start: PyTree = None  # its local part of a warm start
    state: ClientState | None = None
    present: Float[Array, "*members"] | None = None  # a factor on its weight; 0: takes no part


class Broadcast(NamedTuple):
    """What all clients get for a round, or for what comes before the first."""

    key: Key[Array, ""]
    secret: Key[Array, ""]  # which the server does not know
    round: Int[Array, ""]  # 0 before the first
    downlink: PyTree = None
    start: Personalized | None = None  # the shared part of a warm start


class Missed(NamedTuple):
    """What clients have not received of the broadcasts, for them to catch up with."""

    messages: Int[Array, " clients"]
    bytes: UInt32[Array, " clients"]  # of their parts of variable length


class Failure(NamedTuple):
    """The first round in which an objective or a message was not finite, and at whom."""

    round: Int[Array, ""]  # counted from 1, to which the first messages count; 0 if there was none
    clients: Bool[Array, " clients"]  # with the padding, as long as a run lasts


class State(eqx.Module):
    """Everything that changes from round to round.

    The clients' part, `clients`, lies with the clients; the server has the rest, `for_server`.
    """

    round: Int[Array, ""]
    server: PyTree
    local: PyTree
    uplink: channel.Link
    downlink: channel.Link
    broadcast_bytes: UInt32[Array, ""]  # the last downlink's parts of variable length
    missed: Missed | None  # where it matters
    objective: Float[Array, ""]  # of the last round
    measure: Float[Array, ""]  # what a tolerance is compared with
    failure: Failure

    @property
    def clients(self) -> ClientState:
        """What the clients keep, leading axis = clients."""
        return ClientState(self.local, self.uplink.sender)

    @property
    def for_server(self) -> "State":
        """Without what the clients keep."""
        return self.with_clients(ClientState(None, None))

    def with_clients(self, clients: ClientState) -> "State":
        """With this in place of what the clients keep."""
        uplink = replace(self.uplink, sender=clients.memory)
        return replace(self, local=clients.local, uplink=uplink)


class Costs(eqx.Module):
    """What messages cost: bits of their parts of fixed length, bytes of the others."""

    first_up: int | float = eqx.field(static=True)  # a mean where clients' data differ in shape
    first_down: int = eqx.field(static=True)
    up: int = eqx.field(static=True)
    down: int = eqx.field(static=True)
    whole_down: int = eqx.field(static=True)  # of a downlink as it is
    first_bytes_up: UInt32[Array, ""]  # of all clients together
    first_bytes_down: UInt32[Array, ""]
    varies: bool = eqx.field(static=True)  # whether a round's messages have parts of that kind


# What a round's messages took, for the history's bits: bytes that all participants sent, and the
# broadcast's; broadcasts that they received, and bytes of those that had been missed; and how many
# got the whole message instead.
TRAFFIC = ("bytes_up", "broadcast_bytes", "messages_down", "missed_bytes", "whole_down")


def server_key_of(key: Key[Array, ""]) -> Key[Array, ""]:
    """The server's key of a round, and of what comes before them."""
    # Client ids are non-negative, so no client ever folds in this number.
    return jax.random.fold_in(key, jnp.uint32(2**32 - 1))


def shared_secret(key: Key[Array, ""]) -> Key[Array, ""]:
    """What the clients have in common and the server has not."""
    return jax.random.fold_in(server_key_of(key), 0)  # no round folds in the largest number


class ServerKeys(NamedTuple):
    """The server's random keys of one round."""

    step: Key[Array, ""]
    participation: Key[Array, ""]
    downlink: Key[Array, ""]  # of the message that opens the round


def server_keys(problem: Problem, done: Int[Array, ""] | int) -> ServerKeys:
    """The server's keys of the round after so many."""
    key = server_key_of(jax.random.fold_in(problem.key, done + 1))
    return ServerKeys(*jax.random.split(key, 3))


def before_rounds(
    problem: Problem, start: Personalized | None, downlink: PyTree = None
) -> Broadcast:
    """What clients get before the first round, with the first downlink once there is one."""
    key, zero = jax.random.fold_in(problem.key, 0), jnp.zeros((), jnp.int32)
    shared = None if start is None else Personalized(start.shared, None)
    return Broadcast(key, shared_secret(problem.key), zero, downlink, shared)


def for_round(problem: Problem, done: Int[Array, ""], downlink: PyTree) -> Broadcast:
    """What clients get for the round after so many."""
    number = done + 1
    key = jax.random.fold_in(problem.key, number)
    return Broadcast(key, shared_secret(problem.key), number, downlink)


def zeros_of(like: PyTree) -> PyTree:
    """Zeros of these shapes and types."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def blank(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """What the history says where nothing was computed."""
    number = jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 0
    return jnp.full(shape, number, dtype)
