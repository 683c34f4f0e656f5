"""Base class of algorithms that learn everything from the first messages."""

import abc
from typing import final

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from jaxfed.core.contract.algorithm import Algorithm, Diagnostics
from jaxfed.core.contract.fixed_point import DifferentiatedThrough


def nothing_left() -> Diagnostics:
    """Return the diagnostics of a server whose result is exact, whatever the objective."""
    return {"stopping_measure": jnp.zeros(())}


class OneExchange(Algorithm, DifferentiatedThrough):
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
