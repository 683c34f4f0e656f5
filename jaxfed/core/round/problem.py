"""What a run is, what changes in it from round to round, and where its random keys come from."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, UInt32

from jaxfed.core.backends.backend import Backend
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract import participation
from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.wire import channel


class Problem(eqx.Module):
    """Everything that does not change from round to round."""

    algorithm: Algorithm
    clients: Clients  # prepared, and padded to what the backend needs
    uplink: channel.Channel
    downlink: channel.Channel
    first_uplink: channel.Channel
    first_downlink: channel.Channel
    participation: participation.Participation
    backend: Backend
    key: Key[Array, ""]
    size: int = eqx.field(static=True)  # clients without the padding

    @property
    def numbers(self) -> Int[np.ndarray, " rows"]:
        """Each row's client, counted from 0; `size` and more for rows that fill up devices."""
        if self.clients.blocks is None:
            return np.arange(len(self.clients.ids))
        return self.clients.layout.numbers

    @property
    def rows(self) -> slice | Int[Array, " clients"]:
        """Each client's row."""
        clients = self.clients
        # A slice moves nothing.
        full = clients.blocks is None or self.size == len(clients.ids)
        return slice(self.size) if full else jnp.asarray(clients.layout.rows)

    def cut(self, tree: PyTree) -> PyTree:
        """Arrays as the clients were given: those of several processes stay where they lie."""
        if self.clients.blocks is not None:
            return tree
        return jax.tree.map(lambda x: x[: self.size], tree)

    def in_rows(self, values: Float[Array, " clients"]) -> Float[Array, " rows"]:
        """One number a client, and 0 for rows that fill up devices."""
        rows = len(self.clients.ids)
        if self.clients.blocks is None:
            return jnp.pad(values, (0, rows - self.size))
        return jnp.zeros(rows, values.dtype).at[self.clients.layout.rows].set(values)


class Missed(NamedTuple):
    """What clients have not received of the broadcasts, for them to catch up with."""

    messages: Int[Array, " clients"]
    bytes: UInt32[Array, " clients"]  # of their parts of variable length


class Failure(NamedTuple):
    """The first round in which an objective or a message was not finite, and at whom."""

    round: Int[Array, ""]  # counted from 1, to which the first messages count; 0 if there was none
    clients: Bool[Array, " clients"]  # with the padding, as long as a run lasts


class State(eqx.Module):
    """Everything that changes from round to round."""

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


def everybody(problem: Problem) -> bool:
    """Whether all clients take part in each round."""
    return problem.participation.number(problem.size) == problem.size


def server_key_of(key: Key[Array, ""]) -> Key[Array, ""]:
    """The server's key of a round, and of what comes before them."""
    # Client ids are non-negative, so no client ever folds in this number.
    return jax.random.fold_in(key, jnp.uint32(2**32 - 1))


def shared_secret(key: Key[Array, ""]) -> Key[Array, ""]:
    """What the clients have in common and the server has not."""
    return jax.random.fold_in(server_key_of(key), 0)  # no round folds in the largest number


def keys_of(problem: Problem, done: Int[Array, ""] | int) -> Key[Array, " 3"]:
    """The next round's keys: the server's, the participation's and the downlink's."""
    return jax.random.split(server_key_of(jax.random.fold_in(problem.key, done + 1)), 3)


def key_of_start(key: Key[Array, ""]) -> Key[Array, ""]:
    """The key of what comes before the rounds."""
    return jax.random.fold_in(key, 0)


def key_of_round(key: Key[Array, ""], done: Int[Array, ""]) -> Key[Array, ""]:
    """The key of the round after so many."""
    return jax.random.fold_in(key, done + 1)


def zeros_of(like: PyTree) -> PyTree:
    """Zeros of these shapes and types."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


def blank(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """What the history says where nothing was computed."""
    number = jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 0
    return jnp.full(shape, number, dtype)
