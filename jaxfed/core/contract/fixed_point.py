"""What an algorithm may say of its fixed points, for `adjoint.implicit`.

The contract is complete without: a solution is then differentiated by the algorithm's own round,
and no part of its states stands for a subspace. An algorithm for which that is wrong inherits one
of the two classes, or both, beside `Algorithm`.
"""

import abc

import equinox as eqx
from jaxtyping import PyTree

from jaxfed.core.contract.algorithm import Algorithm
from jaxfed.core.contract.bases import Bases


class DifferentiatedThrough(eqx.Module):
    """An algorithm whose solutions are differentiated by a round that it names.

    The round of another algorithm is worth naming where this one's state is no point (a memory of
    earlier rounds), is larger, or is slower to settle.
    """

    @abc.abstractmethod
    def through(self) -> Algorithm:
        """The algorithm by whose round a solution is differentiated, which may be this one.

        Another one has the same solutions at fixed points of its own round; it is started at the
        result, and its own result is what is differentiated.

        Raises:
            ValueError: if the rounds have no fixed point, as those of minibatches; the message
                begins with `adjoint: `.
        """


class HasBases(eqx.Module):
    """An algorithm with orthonormal bases in its states that stand for subspaces.

    Turning them at a fixed point of the round gives another fixed point, and the linear system of
    an implicit derivative is singular along such rotations unless it is told of them.
    """

    @abc.abstractmethod
    def bases(self, server: PyTree, local: PyTree) -> Bases:
        """Which parts of the states are bases.

        They are picked out, transposed where components are rows, and nothing else.

        Args:
            server: the server's state.
            local: ONE client's state.
        """


def through(algorithm: Algorithm) -> Algorithm:
    """The algorithm by whose round a solution is differentiated implicitly; itself by default.

    Raises:
        ValueError: if the rounds have no fixed point.
    """
    return algorithm.through() if isinstance(algorithm, DifferentiatedThrough) else algorithm


def bases(algorithm: Algorithm, server: PyTree, local: PyTree) -> Bases:
    """Which parts of the server's and ONE client's state are bases; none by default."""
    return algorithm.bases(server, local) if isinstance(algorithm, HasBases) else Bases()


def without_batches(algorithm: Algorithm, batch_size: int | None) -> Algorithm:
    """The algorithm itself, for `through`, where each of its steps takes all samples or entities.

    Raises:
        ValueError: where steps take some at random.
    """
    if batch_size is not None:
        raise ValueError(
            f"adjoint: wanted {type(algorithm).__name__}(batch_size=None) for an implicit "
            f"derivative, since batches at random have no fixed point, got {batch_size}"
        )
    return algorithm
