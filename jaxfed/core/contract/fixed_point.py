"""Optional declarations about an algorithm's fixed points, for `adjoint.implicit`.

By default, a solution is differentiated by the algorithm's own round, and no part of its states
represents a subspace. An algorithm for which that is wrong inherits from one or both of these
classes as well as from `Algorithm`.
"""

import abc

import equinox as eqx
from jaxtyping import PyTree

from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.contract.bases import Bases


class DifferentiatedThrough(eqx.Module):
    """An algorithm that names the round by which its solutions are differentiated.

    Name another algorithm if this one's state is not a point (it remembers earlier rounds), is
    larger, or converges more slowly.
    """

    @abc.abstractmethod
    def through(self) -> Algorithm:
        """Return the algorithm whose round differentiates a solution, possibly this one.

        Another algorithm must have the same solutions as fixed points of its round. It starts at
        the result, and its own result is differentiated.

        Raises:
            ValueError: if the rounds have no fixed point, as with minibatches; the message begins
                with `adjoint: `.
        """


class HasBases(eqx.Module):
    """An algorithm whose states hold orthonormal bases of subspaces.

    Rotating them at a fixed point of the round gives another fixed point. The linear system of an
    implicit derivative is singular along these rotations unless it knows them.
    """

    @abc.abstractmethod
    def bases(self, server: PyTree, local: PyTree) -> Bases:
        """Select the parts of the states that are bases.

        Select them, transpose those whose components are rows, and do nothing else.

        Args:
            server: the server's state.
            local: ONE client's state.
        """


def through(algorithm: Algorithm) -> Algorithm:
    """The algorithm whose round differentiates a solution implicitly; itself by default.

    Raises:
        ValueError: if the rounds have no fixed point.
    """
    return algorithm.through() if isinstance(algorithm, DifferentiatedThrough) else algorithm


def bases(algorithm: Algorithm, server: PyTree, local: PyTree) -> Bases:
    """The bases in the server's and ONE client's state; none by default."""
    return algorithm.bases(server, local) if isinstance(algorithm, HasBases) else Bases()


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
