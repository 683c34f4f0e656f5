"""Base class of algorithms around another algorithm."""

from collections.abc import Mapping, Sequence
from typing import final

import equinox as eqx
import numpy as np
from jaxtyping import Array, Int, Key, PyTree

from jaxfed.core.contract.algorithm import Algorithm, ClientsLike, Diagnostics, Personalized
from jaxfed.core.contract.bases import Bases


class Wrapper(Algorithm):
    """An algorithm around another one, which does everything that the wrapper does not define.

    Every method has a default here, as the optional ones of `Algorithm` have: it calls the same
    method of `algorithm`. A subclass defines those that it changes. If its server's state or its
    prepared data hold more than the algorithm's, it says by `inner_server` and `inner_data` where
    those are.

    One method of the algorithm is not called: `for_other_data`, whose result would have to be put
    into the wrapper's state again.
    """

    algorithm: eqx.AbstractVar[Algorithm]

    def inner_server(self, server: PyTree) -> PyTree:
        """Select the algorithm's part of the server's state; by default all of it."""
        return server

    def inner_data(self, data: PyTree) -> PyTree:
        """Select the algorithm's part of ONE client's prepared data; by default all of it."""
        return data

    @property
    def needs_everybody(self) -> bool:
        """Whether every client must take part in each round."""
        return self.algorithm.needs_everybody

    @property
    def quadratic_in_samples(self) -> bool:
        """Whether a sample times the root of a weight counts as that many samples."""
        return self.algorithm.quadratic_in_samples

    @property
    def eigenvectors(self) -> int:
        """How many leading eigenvectors of second moments the algorithm's result is made of."""
        return self.algorithm.eigenvectors

    @property
    def stochastic(self) -> bool:
        """Whether steps use random parts of the data."""
        return self.algorithm.stochastic

    @property
    def private(self) -> bool:
        """Whether noise that clients draw protects persons."""
        return self.algorithm.private

    @property
    def energy_weighted(self) -> bool:
        """Whether a client's influence grows with the energy of its samples."""
        return self.algorithm.energy_weighted

    def check(self, clients: ClientsLike, warm_start: Personalized | None) -> None:
        """Let the algorithm check the data and the warm start."""
        self.algorithm.check(clients, warm_start)

    def different_starts(self, count: int) -> Sequence[Algorithm]:
        """Return this wrapper around algorithms that differ in their starts."""
        return [self._around(each) for each in self.algorithm.different_starts(count)]

    def at_round(self, number: Int[Array, ""]) -> "Wrapper":
        """Return the wrapper around the algorithm for one round."""
        return self._around(self.algorithm.at_round(number))

    def prepare(self, data: PyTree, client_id: Int[Array, ""], rounds: int) -> PyTree:
        """Return what the algorithm prepares."""
        return self.algorithm.prepare(data, client_id, rounds)

    def first_message(
        self, key: Key[Array, ""], data: PyTree, warm_start: Personalized | None
    ) -> PyTree:
        """Return the algorithm's first message."""
        return self.algorithm.first_message(key, self.inner_data(data), warm_start)

    def server_init(
        self, key: Key[Array, ""], first: PyTree, like: PyTree, warm_start: Personalized | None
    ) -> PyTree:
        """Return the algorithm's state."""
        return self.algorithm.server_init(key, first, self.inner_data(like), warm_start)

    def downlink(self, server: PyTree) -> PyTree:
        """Return the algorithm's downlink."""
        return self.algorithm.downlink(self.inner_server(server))

    def feasible(self, downlink: PyTree, data: PyTree) -> PyTree:
        """Return the algorithm's downlink as its clients use it."""
        return self.algorithm.feasible(downlink, self.inner_data(data))

    def client_init(
        self, key: Key[Array, ""], downlink: PyTree, data: PyTree, warm_start: Personalized | None
    ) -> PyTree:
        """Return the algorithm's local state."""
        return self.algorithm.client_init(key, downlink, self.inner_data(data), warm_start)

    def client_step(
        self, key: Key[Array, ""], downlink: PyTree, local: PyTree, data: PyTree
    ) -> tuple[PyTree, PyTree, Diagnostics]:
        """Take the algorithm's step."""
        return self.algorithm.client_step(key, downlink, local, self.inner_data(data))

    def server_step(
        self, key: Key[Array, ""], server: PyTree, uplink: PyTree
    ) -> tuple[PyTree, Diagnostics]:
        """Take the algorithm's step; a subclass with a state of its own must define it."""
        return self.algorithm.server_step(key, server, uplink)

    def client_result(self, downlink: PyTree, local: PyTree, data: PyTree) -> PyTree:
        """Return the algorithm's local result."""
        return self.algorithm.client_result(downlink, local, self.inner_data(data))

    def shared_result(self, server: PyTree) -> PyTree:
        """Return the algorithm's shared result."""
        return self.algorithm.shared_result(self.inner_server(server))

    def remarks(self, result: Personalized, history: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        """Return the algorithm's remarks."""
        return self.algorithm.remarks(result, history)

    def through(self) -> Algorithm:
        """Return the wrapper around the algorithm by whose round its solutions are differentiated.

        Only if that one differs in settings at most: two algorithms with the same solutions may
        have different ones once their messages are changed. Otherwise return the wrapper itself;
        `bases` then refuses if the state of its algorithm is not a point.
        """
        inner = self.algorithm.through()
        return self._around(inner) if type(inner) is type(self.algorithm) else self

    def bases(self, server: PyTree, local: PyTree) -> Bases:
        """Return the algorithm's bases; see `inner_bases`."""
        return self.inner_bases(server, local)

    @final
    def inner_bases(self, server: PyTree, local: PyTree) -> Bases:
        """Return the algorithm's bases.

        Raises:
            ValueError: if the algorithm has none of its own and is differentiated through one of
                another kind, because its own state includes earlier rounds.
        """
        found = self.algorithm.bases(self.inner_server(server), local)
        if not any(found) and type(self.algorithm.through()) is not type(self.algorithm):
            raise ValueError(
                f"adjoint: wanted for {type(self).__name__} an algorithm that can be "
                f"differentiated by its own round, got {type(self.algorithm).__name__}; take "
                "adjoint.unrolled()"
            )
        return found

    @final
    def _around(self, algorithm: Algorithm) -> "Wrapper":
        return eqx.tree_at(lambda x: x.algorithm, self, algorithm)
