"""What a backend is, and how what it maps is brought together."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, final

import equinox as eqx
import jax
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from jaxfed.core.common.buckets import in_order, layout_of, split, unlike
from jaxfed.core.contract.reduction import Part, Reduction, joined, separated

AXIS = "clients"
Device = Any  # type checkers take jax.Device for a variable

# One client's work: (what all clients share, what is this client's own) -> (its contributions to
# what is reduced over clients, what the client keeps).
Work = Callable[[PyTree, PyTree], tuple[PyTree[Reduction], PyTree]]


class Backend(eqx.Module):
    """Maps one client's work over all clients and reduces what they send."""

    apart: ClassVar[bool] = False
    """Whether `fit` is to run each client's work, and the server's, as a program of its own."""

    @property
    @abc.abstractmethod
    def multiple(self) -> int:
        """Client counts are padded to a multiple of this."""

    @property
    @abc.abstractmethod
    def gathers(self) -> bool:
        """Whether picking out a round's participants is cheaper than masking the others."""

    @property
    @abc.abstractmethod
    def processes(self) -> int:
        """How many processes it spreads clients over."""

    @property
    @abc.abstractmethod
    def sharding(self) -> NamedSharding | None:
        """Where clients of several processes lie; None for a backend that cannot have them."""

    @abc.abstractmethod
    def over_parts(
        self, work: Work, shared: PyTree, parts: tuple[PyTree, ...]
    ) -> tuple[PyTree[Reduction], tuple[PyTree, ...]]:
        """Run `work` for each client of each part.

        Args:
            work: one client's work.
            shared: passed to each client as it is.
            parts: rectangular trees, in each leading axis = its clients, at least one.

        Returns:
            The contributions of all, reduced, and what the clients of each part keep.
        """

    @final
    def map_reduce(
        self, work: Work, shared: PyTree, own: PyTree
    ) -> tuple[PyTree[Reduction], PyTree]:
        """Run `work` for each client.

        Args:
            work: one client's work.
            shared: passed to each client as it is.
            own: leading axis = clients, or in buckets.

        Returns:
            The reduced contributions, and what the clients keep (leading axis = clients; in buckets
            where its shape differs between them).

        Raises:
            ValueError: if contributions of clients in different buckets do not add up.
        """
        reduced, kept = self.over_parts(work, shared, split(own))
        return reduced, in_order(layout_of(own), kept)

    @final
    def map(self, work: Callable[[PyTree, PyTree], PyTree], shared: PyTree, own: PyTree) -> PyTree:
        """What each client's `work(shared, own)` gives, leading axis = clients."""
        return self.map_reduce(lambda *arguments: (None, work(*arguments)), shared, own)[1]


def collect(
    backend: Backend, work: Callable[[PyTree, PyTree], tuple[PyTree[Part], PyTree]],
    shared: PyTree, own: PyTree, gathering: int | slice | Array,
) -> tuple[PyTree[Part], PyTree]:  # fmt: skip
    """Map work over clients that send contributions of any kind, gathered ones included.

    Args:
        backend: how clients are mapped.
        work: one client's work: `(shared, own) -> (contributions, kept)`.
        shared: passed to each client as it is.
        own: leading axis = clients, or in buckets.
        gathering: whose parts are gathered: of so many clients, from the first, or of those that
            are indexed.

    Returns:
        The message, reduced, and what the clients keep (leading axis = clients).

    Raises:
        ValueError: if what is gathered differs in its shape between buckets.
    """

    def split(shared, own):
        sent, kept = work(shared, own)
        summands, gathered = separated(sent)
        # What is gathered stays where it was made, like what the clients keep.
        return summands, (gathered, kept)

    reduced, (gathered, kept) = backend.map_reduce(split, shared, own)
    if layout_of(gathered) is not None:
        raise unlike("gathered")
    which = slice(gathering) if isinstance(gathering, int) else gathering
    return joined(reduced, jax.tree.map(lambda x: x[which], gathered)), kept
