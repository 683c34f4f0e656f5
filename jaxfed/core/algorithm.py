"""The contract: a federated algorithm is five pure functions, written for one client."""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from jaxfed.core.aggregation import Aggregation, Mean
from jaxfed.core.clients import Clients


class Personalized(NamedTuple):
    """What a personalized method learns: one shared part and one part per client.

    For the PCA family `shared` is `(features, shared_rank)` and `local` is
    `(clients, features, local_rank)`, both with orthonormal columns; a method that learns only
    one of the two leaves the other with no columns.
    """

    shared: PyTree
    local: PyTree


class Algorithm(eqx.Module):
    """A federated algorithm: hyperparameters as fields, five pure functions as methods.

    Numeric hyperparameters are traced leaves (`eqx.field(converter=...)`), so `jax.vmap` over an
    algorithm object is a sweep and `jax.grad` with respect to it is a hypergradient; ranks and
    names are static. Everything that is not the algorithm (compression, participation,
    devices, the loop) is composed around these methods by `rollout` and `fit`.

    The messages `uplink` and `downlink` and the states `server` and `local` are pytrees of
    arrays of the algorithm's own choice. `local` never leaves its client. The server is given
    the *aggregate* of the uplinks, never one client's.
    """

    @property
    def needs_everybody(self) -> bool:
        """Whether every client must take part in each round."""
        return False

    def check(self, clients: Clients, start: Personalized | None) -> None:
        """Refuse data or a warm start that do not fit, by static shapes alone.

        Raises:
            ValueError: naming the argument, what was given and what is wanted.
        """

    def prepare(self, data: PyTree, client_id: Int[Array, ""], rounds: int) -> PyTree:
        """Turn ONE client's data into what its steps need, once, before the first round."""
        del client_id, rounds
        return data

    @property
    def start_aggregation(self) -> PyTree[Aggregation]:
        """How the first uplink is aggregated: one aggregation, or a prefix tree of them."""
        return Mean()

    @property
    def aggregation(self) -> PyTree[Aggregation]:
        """How each round's uplink is aggregated: one aggregation, or a prefix tree of them."""
        return Mean()

    @abc.abstractmethod
    def client_init(
        self, key: Key[Array, ""], data: PyTree, start: Personalized | None
    ) -> tuple[PyTree, PyTree]:
        """What ONE client holds and sends before round 1.

        Args:
            key: the client's own random key.
            data: the client's prepared data.
            start: a warm start (`local` is this client's part), or None.

        Returns:
            `(uplink, local)`.
        """

    @abc.abstractmethod
    def server_init(
        self, key: Key[Array, ""], uplink: PyTree, start: Personalized | None
    ) -> PyTree:
        """The server's first state, from the aggregated first uplink and the warm start."""

    @abc.abstractmethod
    def downlink(self, server: PyTree) -> PyTree:
        """What goes down the wire this round."""

    def client_begin(self, downlink: PyTree, local: PyTree, data: PyTree) -> PyTree:
        """ONE client's state once it has seen the first downlink, before its first step."""
        del downlink, data
        return local

    @abc.abstractmethod
    def client_step(
        self, key: Key[Array, ""], downlink: PyTree, local: PyTree, data: PyTree
    ) -> tuple[PyTree, PyTree, Mapping[str, Float[Array, ""]]]:
        """One round of ONE client.

        Returns:
            `(uplink, local, diagnostics)`. Diagnostics are scalars that travel beside the
            message; their weighted means become the history. `"objective"` is always there.
        """

    @abc.abstractmethod
    def server_step(self, key: Key[Array, ""], server: PyTree, uplink: PyTree) -> PyTree:
        """The server's next state, from the aggregated uplink."""

    def server_diagnostics(self, server: PyTree) -> Mapping[str, Float[Array, ""]]:
        """Scalars of the server's state that belong in the history."""
        del server
        return {}

    def stopping_measure(
        self,
        previous: Mapping[str, Float[Array, ""]],
        current: Mapping[str, Float[Array, ""]],
    ) -> Float[Array, ""]:
        """What `tol` is compared with; by default the objective's relative change."""
        change = jnp.abs(current["objective"] - previous["objective"])
        scale = jnp.abs(current["objective"])
        return change / jnp.maximum(scale, jnp.finfo(scale.dtype).tiny)

    @abc.abstractmethod
    def client_result(self, downlink: PyTree, local: PyTree, data: PyTree) -> PyTree:
        """ONE client's personal model, once the rounds are over."""

    def shared_result(self, server: PyTree) -> PyTree:
        """The shared model, once the rounds are over."""
        return self.downlink(server)


class OneExchange(Algorithm):
    """An algorithm that has learned all it will from the first messages, so one round is enough.

    It says what clients send first (`client_init`), what the server makes of it (`server_init`)
    and they of that (`client_begin`); the rounds only report what is `left_over`.
    """

    @abc.abstractmethod
    def left_over(self, downlink: PyTree, local: PyTree, data: PyTree) -> Float[Array, ""]:
        """ONE client's objective."""

    def downlink(self, server):
        """What the server has."""
        return server

    def client_step(self, key, downlink, local, data):
        """Report the objective; nothing is sent any more."""
        del key
        return (), local, {"objective": self.left_over(downlink, local, data)}

    def server_step(self, key, server, uplink):
        """Nothing changes."""
        del key, uplink
        return server

    def client_result(self, downlink, local, data):
        """What the client has."""
        del downlink, data
        return local


def hyperparameter(value: Any) -> Array | None:
    """Field converter of a numeric hyperparameter: a traced leaf, or None where it is automatic."""
    return None if value is None else jnp.asarray(value)
