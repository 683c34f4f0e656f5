"""What a backend is: it maps one client's work over all clients and reduces what they send."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from jaxfed.core.common.buckets import in_order, layout_of, shapes_differ, split
from jaxfed.core.common.returned import described
from jaxfed.core.contract.reduction import Part, Reduction, is_part, joined, separated

AXIS = "clients"
Device = Any  # type checkers take jax.Device for a variable

# One client's work: (what all clients share, what is this client's own) -> (its contributions to
# what is reduced over clients, what the client keeps).
Work = Callable[[PyTree, PyTree], tuple[PyTree[Reduction], PyTree]]


class Backend(eqx.Module):
    """Maps one client's work over all clients and reduces what they send.

    One whose clients are all on one device is shorter as a `jaxfed.backend.OneDevice`.
    """

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
            The contributions of all, reduced, and what the clients of each part keep, leading axis
            = its clients.
        """

    def in_blocks(self, size: int, remembered: tuple[str, ...]) -> "Backend":
        """The same numbers from at most `size` clients at a time, for derivatives in less memory.

        By default it is this backend itself, which saves none.

        Args:
            size: clients in a block.
            remembered: names, as of `jax.ad_checkpoint.checkpoint_name`, of the values to store for
                the backward pass, which computes all others again.
        """
        del size, remembered
        return self

    @property
    @final
    def processes(self) -> int:
        """How many processes it spreads clients over."""
        if self.sharding is None:
            return 1
        return len({device.process_index for device in self.sharding.device_set})

    @final
    def checked_parts(
        self, work: Work, shared: PyTree, parts: tuple[PyTree, ...]
    ) -> tuple[PyTree[Reduction], tuple[PyTree, ...]]:
        """What `over_parts` returns.

        Raises:
            ValueError: if that is not what it promises; the message names the backend's class.
        """
        dimensions: Any = None

        def observed(shared: PyTree, own: PyTree):
            nonlocal dimensions
            result = work(shared, own)
            # Numbers of axes alone: the arrays belong to the trace that calls this.
            dimensions = jax.tree.map(jnp.ndim, result)
            return result

        result = self.over_parts(observed, shared, parts)
        total, kept = pair(self, "over_parts", result)
        if not isinstance(kept, tuple) or len(kept) != len(parts):
            raise _broken(self, "over_parts", f"a tuple of {len(parts)} as what is kept", kept)
        for own, one in zip(parts, kept, strict=True):
            clients = length(own)
            if any(jnp.shape(leaf)[:1] != (clients,) for leaf in jax.tree.leaves(one)):
                wanted = f"what is kept with a leading axis of {clients} clients"
                raise _broken(self, "over_parts", wanted, one)
        if dimensions is not None:
            _check_structure(self, dimensions, total, kept)
        return total, kept

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
            ValueError: if contributions of clients in different buckets do not add up, or if
                `over_parts` returns anything but what it promises.
        """
        total, kept = self.checked_parts(work, shared, split(own))
        return total, in_order(layout_of(own), kept)

    @final
    def map(self, work: Callable[[PyTree, PyTree], PyTree], shared: PyTree, own: PyTree) -> PyTree:
        """What each client's `work(shared, own)` gives, leading axis = clients."""
        return self.map_reduce(lambda *arguments: (None, work(*arguments)), shared, own)[1]


def collect(
    backend: Backend,
    work: Callable[[PyTree, PyTree], tuple[PyTree[Part], PyTree]],
    shared: PyTree,
    own: PyTree,
    gathering: int | slice | Array,
) -> tuple[PyTree[Part], PyTree]:
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

    total, (gathered, kept) = backend.map_reduce(split, shared, own)
    if layout_of(gathered) is not None:
        raise shapes_differ("gathered")
    which = slice(gathering) if isinstance(gathering, int) else gathering
    return joined(total, jax.tree.map(lambda x: x[which], gathered)), kept


def length(own: PyTree) -> int:
    """How many clients have what is in a tree with a leading axis of clients."""
    return jax.tree.leaves(own)[0].shape[0]


def pair(backend: Backend, method: str, result: Any) -> tuple[PyTree, PyTree]:
    """What a method of a backend returned, as `(reduced, kept)`.

    Raises:
        ValueError: if it is anything else.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise _broken(backend, method, "(reduced, kept)", result)
    return result


def _check_structure(
    backend: Backend, dimensions: Any, total: PyTree, kept: tuple[PyTree, ...]
) -> None:
    """Compare what a backend returned with what one client's work returned.

    Args:
        backend: the backend.
        dimensions: how many axes each array of `(sent, kept)` had.
        total: what the backend returned of what was sent.
        kept: what it returned of what each part's clients kept.
    """
    sent, one = dimensions
    for whole in kept:
        if jax.tree.structure(whole) != jax.tree.structure(one):
            raise _broken(backend, "over_parts", "what the work returned as what is kept", whole)
    wanted, found = (jax.tree.leaves(tree, is_leaf=is_part) for tree in (sent, total))
    if len(wanted) != len(found) or not all(map(is_part, found)):
        raise _broken(backend, "over_parts", "what the work sent, reduced over clients", total)
    for contribution, part in zip(wanted, found, strict=True):
        # A reduction may return one of another kind, whose arrays are others.
        axes = [jnp.ndim(x) for x in jax.tree.leaves(part)]
        if type(part) is type(contribution) and axes != jax.tree.leaves(contribution):
            raise _broken(backend, "over_parts", "parts without an axis of clients", part)


def _broken(backend: Backend, method: str, wanted: str, given: Any) -> ValueError:
    name = f"{type(backend).__name__}.{method}"
    return ValueError(f"backend: wanted of {name} {wanted}, got {described(given)}")
