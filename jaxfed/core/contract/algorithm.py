"""The contract: a federated algorithm is five pure functions, written for one client."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key, PyTree

from jaxfed.core.common.printing import described

# Scalars for the history, by name.
Diagnostics = Mapping[str, Float[Array, ""]]


class Personalized(NamedTuple):
    """What a personalized method learns: one shared part and one part per client.

    For the PCA family `shared` is `(features, shared_rank)` and `local` is
    `(clients, features, local_rank)`, both with orthonormal columns. A method that learns only one
    of the two leaves None in place of the other.
    """

    shared: PyTree
    local: PyTree


@runtime_checkable
class ClientsLike(Protocol):
    """What the checks of algorithms and channels may ask of a run's clients; `Clients` has it all.

    Values may be traced; shapes and types never are.

    Attributes:
        data: of all clients, leading axis = clients, or in buckets.
        ids: `(clients,)` whole numbers.
        weights: `(clients,)` shares that sum to one.
        parts: the data as rectangular trees, those of the longest clients first.
        features: how many features the samples, moments or views have.
    """

    data: PyTree
    ids: Array
    weights: Array

    @property
    def parts(self) -> tuple[PyTree, ...]:
        """Rectangular trees of data, leading axis = clients."""
        ...

    @property
    def features(self) -> int:
        """The number of features."""
        ...

    def __len__(self) -> int: ...


class Algorithm(eqx.Module):
    """A federated algorithm: hyperparameters as fields, five pure functions as methods.

    Numeric hyperparameters are traced leaves, `eqx.field(converter=jf.hyperparameter)`, so that
    `jax.vmap` over an algorithm object is a sweep and `jax.grad` by it a hypergradient; ranks and
    names are static. Everything that is not the algorithm (compression, participation, devices,
    the loop) is composed around these methods by `rollout` and `fit`.

    What happens, in this order::

        data = prepare(data)                          each client, once
        first = first_message(data)                   each client; reduced on its way
        server = server_init(first)                   the server
        local = client_init(downlink(server), data)   each client

        uplink, local = client_step(downlink(server), local, data)     every round, each
        server = server_step(server, uplink)                           participant; reduced

    Messages and the states `server` and `local` are pytrees of arrays of the algorithm's own
    choice; a part that does not exist is None, never an array without elements. A part of a message
    that is not to become a weighted mean is wrapped in `Sum`, `Max`, `Gram` or `Gather` (see
    `jaxfed.reduction`), and the server gets the same structure, reduced. A message that is not
    finite ends the run (see `jaxfed.Status`). `local` never leaves its client.

    What implicit derivatives may have to know besides is in two classes to inherit from as well,
    `jaxfed.adjoint.DifferentiatedThrough` and `jaxfed.adjoint.HasBases`; what a reader of its
    results should know, in `jaxfed.HasRemarks`.
    """

    def __repr__(self) -> str:
        return described(self)

    needs_everybody: ClassVar[bool] = False
    """Whether every client must take part in each round."""

    @abc.abstractmethod
    def server_init(
        self, key: Key[Array, ""], first: PyTree, like: PyTree, start: Personalized | None
    ) -> PyTree:
        """The server's first state.

        Args:
            key: random key.
            first: the reduced first messages.
            like: shapes and types of one client's prepared data (`jax.ShapeDtypeStruct`).
            start: a warm start, with the local parts of all clients, or None.
        """

    @abc.abstractmethod
    def downlink(self, server: PyTree) -> PyTree:
        """What the server sends to the clients of a round."""

    @abc.abstractmethod
    def client_init(
        self, key: Key[Array, ""], downlink: PyTree, data: PyTree, start: Personalized | None
    ) -> PyTree:
        """ONE client's first state, once it has the first downlink.

        Args:
            key: the client's own random key, the same as for its first message.
            downlink: what the server sent.
            data: the client's prepared data.
            start: a warm start, or None. `local` is this client's part; None for a new client,
                which has none (see `jaxfed.personalize`).
        """

    @abc.abstractmethod
    def client_step(
        self, key: Key[Array, ""], downlink: PyTree, local: PyTree, data: PyTree
    ) -> tuple[PyTree, PyTree, Diagnostics]:
        """One round of ONE client.

        Returns:
            `(uplink, local, diagnostics)`. Diagnostics are scalars that travel beside the message;
            their weighted means become the history. `"objective"` is always among them.
        """

    @abc.abstractmethod
    def server_step(
        self, key: Key[Array, ""], server: PyTree, uplink: PyTree
    ) -> tuple[PyTree, Diagnostics]:
        """One round of the server.

        Args:
            key: random key.
            server: the state before.
            uplink: the participants' messages, reduced.

        Returns:
            `(server, diagnostics)`. Diagnostics go into the history. A `"stopping_measure"` among
            them is what a tolerance is compared with, in place of the objective's relative change;
            an `"objective"` takes the place of the clients' mean.
        """

    # --- with defaults -------------------------------------------------------------------------

    def check(self, clients: ClientsLike, start: Personalized | None) -> None:
        """Refuse data or a warm start that do not fit, by static shapes alone where possible.

        Raises:
            ValueError: naming the argument, what was wanted and what was given.
        """

    def prepare(self, data: PyTree, client_id: Int[Array, ""], rounds: int) -> PyTree:
        """Turn ONE client's data into what its steps need, once, before anything is sent."""
        del client_id, rounds
        return data

    def first_message(
        self, key: Key[Array, ""], data: PyTree, start: Personalized | None
    ) -> PyTree:
        """What ONE client sends before the first round; nothing by default."""
        del key, data, start

    def client_result(self, downlink: PyTree, local: PyTree, data: PyTree) -> PyTree:
        """ONE client's personal model, once the rounds are over; its state by default."""
        del downlink, data
        return local

    def shared_result(self, server: PyTree) -> PyTree:
        """The shared model, once the rounds are over; what would be sent next by default."""
        return self.downlink(server)

    def at_round(self, number: Int[Array, ""]) -> Self:
        """The algorithm as it is in one round, for steps that depend on its number.

        Called before each step of a client and of the server. An algorithm that wants to know keeps
        the number in a field of its own, None until then::

            def at_round(self, number):
                return dataclasses.replace(self, round=number)

        Args:
            number: of the round, counted from 1.
        """
        del number
        return self

    @property
    def energy_weighted(self) -> bool:
        """Whether a client's influence grows with the energy of its samples; no by default.

        Then `fit` warns of clients whose energy is far above the others'.
        """
        return False


def hyperparameter(value: ArrayLike | None) -> Any:
    """Field converter of a numeric hyperparameter: a traced leaf, or None where it is automatic.

    Whole numbers become real ones, of which more fit, and which have derivatives.
    """
    if isinstance(value, int):
        value = float(value)
    elif isinstance(value, np.ndarray | np.integer) and value.dtype.kind in "iu":
        value = value.astype(float)
    return None if value is None else jnp.asarray(value)
