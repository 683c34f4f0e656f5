"""The contract: a federated algorithm is five pure functions written for one client."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, final, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Key, PyTree

from jaxfed.core.common.printing import as_call
from jaxfed.core.contract.bases import Bases

# Scalars for the history, by name.
Diagnostics = Mapping[str, Float[Array, ""]]


class Personalized(NamedTuple):
    """A personalized result: one shared part and one part per client.

    For the PCA family `shared` is `(features, shared_rank)` and `local` is
    `(clients, features, local_rank)`, both with orthonormal columns. A part that a method does not
    learn is None.

    It has no names, so functions that take it match clients and features by position. The solution,
    and what `jaxfed.load` returns, know the names: pass these where the order may be another.
    """

    shared: PyTree
    local: PyTree


@runtime_checkable
class ClientsLike(Protocol):
    """The properties of a run's clients that checks of algorithms and channels may use.

    `Clients` has all of them. Values may be traced; shapes and types are always static.

    Attributes:
        data: all clients' data, with a leading axis of clients, or in buckets.
        ids: `(clients,)` whole numbers.
        weights: `(clients,)` weights that sum to one.
        parts: the data as rectangular trees, starting with the longest clients.
        features: number of features in the samples, moments or views.
    """

    data: PyTree
    ids: Array
    weights: Array

    @property
    def parts(self) -> tuple[PyTree, ...]:
        """The data as rectangular trees with a leading axis of clients."""
        ...

    @property
    def features(self) -> int:
        """The number of features."""
        ...

    def __len__(self) -> int: ...


class Algorithm(eqx.Module):
    """A federated algorithm: hyperparameters as fields, five pure functions as methods.

    Declare numeric hyperparameters with `eqx.field(converter=jf.hyperparameter)`. They become
    traced leaves, so `jax.vmap` over an algorithm is a sweep and `jax.grad` with respect to it is a
    hypergradient. Ranks and names are static. `rollout` and `fit` add everything else: compression,
    participation, devices and the loop.

    A run calls the methods in this order::

        data = prepare(data)                          each client, once
        first = first_message(data)                   each client; reduced on its way
        server = server_init(first)                   the server
        local = client_init(downlink(server), data)   each client

        uplink, local = client_step(downlink(server), local, data)     every round, each
        server = server_step(server, uplink)                           participant; reduced

    Messages and the states `server` and `local` are pytrees of arrays that the algorithm chooses.
    Use None for a missing part, never an empty array. Message parts are reduced to weighted means
    unless they are wrapped in `Sum`, `Max`, `Gram` or `Gather` (see `jaxfed.reduction`); the server
    receives the same structure, reduced. A message with NaN or infinity ends the run (see
    `jaxfed.Status`). `local` never leaves its client.

    To change what another algorithm does in some of these methods, inherit from
    `jaxfed.contract.Wrapper`.
    """

    def __repr__(self) -> str:
        return as_call(self)

    # Not annotated, so that an algorithm can replace them by a value or by a property.
    needs_everybody = False
    """Whether every client must take part in each round."""

    quadratic_in_samples = False
    """Whether a sample times the root of a weight counts as that many samples.

    True if samples enter through second moments or cross products alone. `jaxfed.inference` can
    then resample them.
    """

    private = False
    """Whether noise that its clients draw protects persons in its messages.

    On separate machines, a client then draws with a key of its own, and sends no diagnostics.
    """

    sums_moments = False
    """Whether it sends the sum of the clients' second moments, once, and nothing else."""

    eigenvectors = 0
    """How many leading eigenvectors of clients' second moments, or of views, the result is made of.

    Or of how many other components that depend on sums of squares. `fit` computes in double
    precision if single would lose some of them.
    """

    stochastic = False
    """Whether steps use random parts of the data, so that the objective never settles."""

    calls_libraries = False
    """Whether products and factorizations, which libraries compute, are nearly all of a round."""

    @abc.abstractmethod
    def server_init(
        self, key: Key[Array, ""], first: PyTree, like: PyTree, warm_start: Personalized | None
    ) -> PyTree:
        """Create the server's initial state.

        Args:
            key: random key.
            first: the reduced first messages.
            like: shapes and types of one client's prepared data (`jax.ShapeDtypeStruct`).
            warm_start: a warm start with all clients' local parts, or None.
        """

    @abc.abstractmethod
    def downlink(self, server: PyTree) -> PyTree:
        """Return what the server sends to the clients of a round."""

    @abc.abstractmethod
    def client_init(
        self, key: Key[Array, ""], downlink: PyTree, data: PyTree, warm_start: Personalized | None
    ) -> PyTree:
        """Create ONE client's initial state from the first downlink.

        Args:
            key: the client's random key, the same as for its first message.
            downlink: the server's message.
            data: the client's prepared data.
            warm_start: a warm start whose `local` is this client's part, or None. `local` is None
                for a new client, which has no local part yet (see `jaxfed.personalize`).
        """

    @abc.abstractmethod
    def client_step(
        self, key: Key[Array, ""], downlink: PyTree, local: PyTree, data: PyTree
    ) -> tuple[PyTree, PyTree, Diagnostics]:
        """Compute one round of ONE client.

        Returns:
            `(uplink, local, diagnostics)`. Diagnostics are scalars sent with the message; their
            weighted means go into the history. They must include `"objective"`, and may include
            `"gap"`, the client's part of that of `server_step`, and `"objective_scale"`, which
            gaps are relative to where the objective's zero means nothing, as a log-likelihood's.
        """

    @abc.abstractmethod
    def server_step(
        self, key: Key[Array, ""], server: PyTree, uplink: PyTree
    ) -> tuple[PyTree, Diagnostics]:
        """Compute one round of the server.

        Args:
            key: random key.
            server: the state before the round.
            uplink: the participants' messages, reduced.

        Returns:
            `(server, diagnostics)`. Diagnostics go into the history; an `"objective"` replaces the
            clients' mean. A `"gap"` is what a step is predicted to lower the objective by, such as
            the squared gradient by the curvature; the clients' mean is added to the server's. From
            the gaps of some rounds, or from objectives if there are none, follows the stopping
            measure: how much the objective will still fall, relative to itself. The history has it
            as `"stopping_measure"`. An algorithm that has a measure of its own returns it by this
            name.
        """

    # --- optional methods ----------------------------------------------------------------------

    def check(self, clients: ClientsLike, warm_start: Personalized | None) -> None:
        """Refuse unsuitable data or warm starts, from static shapes alone where possible.

        Raises:
            ValueError: names the argument, what was wanted and what was given.
        """

    def prepare(self, data: PyTree, client_id: Int[Array, ""], rounds: int) -> PyTree:
        """Convert ONE client's data once, before any message, to what its steps need."""
        del client_id, rounds
        return data

    def first_message(
        self, key: Key[Array, ""], data: PyTree, warm_start: Personalized | None
    ) -> PyTree:
        """Return what ONE client sends before the first round; nothing by default."""
        del key, data, warm_start

    def feasible(self, downlink: PyTree, data: PyTree) -> PyTree:
        """Return what clients use of a downlink that a channel changed; by default all of it.

        The objective of components that are no longer orthonormal means nothing, so an algorithm
        whose objective assumes them orthonormal makes them so.

        Args:
            downlink: the server's message as received.
            data: ONE client's prepared data.
        """
        del data
        return downlink

    def client_result(self, downlink: PyTree, local: PyTree, data: PyTree) -> PyTree:
        """Return ONE client's personal model after the last round; its state by default."""
        del downlink, data
        return local

    def shared_result(self, server: PyTree) -> PyTree:
        """Return the shared model after the last round; the next downlink by default."""
        return self.downlink(server)

    def for_other_data(self, server: PyTree) -> PyTree:
        """Return the server's state as the start of a run on other data of the same clients.

        None, the default, if such a run must start from the result alone, as from a warm start. To
        carry over what the result lacks, such as a learned variance, return the state without what
        only its own data determine: products, gradients, objectives and energies. Resamples of
        `jaxfed.inference` start from it.

        Args:
            server: the state after the last round.
        """
        del server

    def at_round(self, number: Int[Array, ""]) -> Self:
        """Return the algorithm for one round, if its steps depend on the round number.

        Runs call this before each step of a client or the server. To use the number, store it in a
        field that is None until then::

            def at_round(self, number):
                return eqx.tree_at(
                    lambda x: x.round, self, number, is_leaf=lambda x: x is None
                )

        Args:
            number: the round, counted from 1.
        """
        del number
        return self

    def different_starts(self, count: int) -> Sequence["Algorithm"]:
        """Return algorithms that differ from this one in their starts alone; see `MultiStart`.

        By default copies of this one, whose starts must then differ by the random key.

        Args:
            count: how many to return.
        """
        return [self] * count

    def remarks(self, result: Personalized, history: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Return what a reader should know before relying on a result, in sentences.

        Called on the host after a run.

        Args:
            result: the run's result.
            history: the run's `(rounds,)` arrays by name.
        """
        del result, history
        return ()

    def through(self) -> "Algorithm":
        """Return the algorithm whose round differentiates a solution; by default this one.

        Name another one if this one's state is not a point (it remembers earlier rounds), is
        larger, or converges more slowly. It must have the same solutions as fixed points of its
        round. It starts at the result, and its own result is differentiated.

        Raises:
            ValueError: if the rounds have no fixed point, as with minibatches; the message begins
                with `adjoint: `.
        """
        return self

    def bases(self, server: PyTree, local: PyTree) -> Bases:
        """Select the parts of the states that are orthonormal bases of subspaces; by default none.

        Rotating them at a fixed point of the round gives another fixed point. The linear system of
        an implicit derivative is singular along these rotations unless it knows them. Select them,
        transpose those whose components are rows, and do nothing else.

        Args:
            server: the server's state.
            local: ONE client's state.
        """
        del server, local
        return Bases()

    @property
    def energy_weighted(self) -> bool:
        """Whether a client's influence grows with the energy of its samples; False by default.

        If True, `fit` warns about clients with far more energy than the others.
        """
        return False


def nothing_left() -> Diagnostics:
    """Return the diagnostics of a server whose result is exact, whatever the objective."""
    return {"stopping_measure": jnp.zeros(())}


class OneExchange(Algorithm):
    """An algorithm that learns everything from the first messages, so one round is enough.

    Subclasses define what clients send first (`first_message`), what the server makes of it
    (`server_init`) and what clients make of that (`client_init`). The round only reports the
    objective.
    """

    @abc.abstractmethod
    def residual_variance(self, downlink: PyTree, local: PyTree, data: PyTree) -> Float[Array, ""]:
        """ONE client's objective."""

    @final
    def through(self) -> Algorithm:
        """Refuse, since no rounds converge to the result.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "adjoint: wanted an algorithm whose rounds converge for an implicit derivative, and "
            f"{type(self).__name__} has no rounds; adjoint.unrolled() is exact"
        )

    @final
    def downlink(self, server: PyTree) -> PyTree:
        """Send the server's state."""
        return server

    @final
    def client_step(
        self, key: Key[Array, ""], downlink: PyTree, local: PyTree, data: PyTree
    ) -> tuple[PyTree, PyTree, Diagnostics]:
        """Report the objective; send nothing."""
        del key
        # None rather than empty arrays: a message without parts has no bits.
        return None, local, {"objective": self.residual_variance(downlink, local, data)}

    @final
    def server_step(
        self, key: Key[Array, ""], server: PyTree, uplink: PyTree
    ) -> tuple[PyTree, Diagnostics]:
        """Leave the state unchanged."""
        del key, uplink
        return server, nothing_left()


def hyperparameter(value: ArrayLike | None) -> Any:
    """Convert a numeric hyperparameter to a traced leaf; None means automatic.

    Integers become floats, which have derivatives.
    """
    if isinstance(value, int):
        value = float(value)
    elif isinstance(value, np.ndarray | np.integer) and value.dtype.kind in "iu":
        value = value.astype(float)
    return None if value is None else jnp.asarray(value)


def without_batches(algorithm: Algorithm, batch_size: int | None) -> Algorithm:
    """The algorithm itself, for `through`, if each step uses all samples or entities.

    Raises:
        ValueError: if steps use random batches.
    """
    if batch_size is not None:
        raise ValueError(
            f"adjoint: wanted {type(algorithm).__name__}(batch_size=None) for an implicit "
            f"derivative, since batches at random have no fixed point, got {batch_size}"
        )
    return algorithm
