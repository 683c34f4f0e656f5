"""The base class of backends, which map one client's work over all clients."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from jaxfed.core.common.buckets import in_order, layout_of, shapes_differ, split
from jaxfed.core.common.printing import as_call
from jaxfed.core.common.returned import broken
from jaxfed.core.contract.reduction import Part, Reduction, is_part, joined, separated

AXIS = "clients"
Device = Any  # type checkers take jax.Device for a variable

# One client's work: (what all clients share, what this client owns) -> (its contributions to what
# is reduced over clients, what it keeps).
Work = Callable[[PyTree, PyTree], tuple[PyTree[Reduction], PyTree]]


class Backend(eqx.Module):
    """Maps one client's work over all clients and reduces what they send.

    If all clients are on one device, subclass `jaxfed.backend.OneDevice`, which is shorter.
    """

    def __repr__(self) -> str:
        return as_call(self)

    factory: ClassVar[str] = ""
    """Name of the function that makes it; empty for the class itself."""
    apart: ClassVar[bool] = False
    """Whether `fit` runs each client's work, and the server's, as separate programs."""

    @property
    @abc.abstractmethod
    def multiple(self) -> int:
        """The number of clients is padded to a multiple of this."""

    @property
    @abc.abstractmethod
    def gathers(self) -> bool:
        """Whether selecting a round's participants is cheaper than masking the others."""

    @property
    @abc.abstractmethod
    def sharding(self) -> NamedSharding | None:
        """The sharding of clients of several processes; None if the backend does not support it."""

    @abc.abstractmethod
    def over_parts(
        self, work: Work, shared: PyTree, parts: tuple[PyTree, ...]
    ) -> tuple[PyTree[Reduction], tuple[PyTree, ...]]:
        """Run `work` for each client of each part.

        Args:
            work: one client's work.
            shared: passed unchanged to each client.
            parts: rectangular trees with a leading axis of at least one client.

        Returns:
            The reduction of all contributions, and what the clients of each part keep, leading axis
            = clients of the part.
        """

    def in_blocks(self, size: int, remembered: tuple[str, ...]) -> "Backend":
        """A backend with the same numbers that maps at most `size` clients at a time.

        It saves memory in derivatives. By default this is the backend itself, which saves none.

        Args:
            size: clients per block.
            remembered: names, as given to `jax.ad_checkpoint.checkpoint_name`, of values to store
                for the backward pass, which recomputes all others.
        """
        del size, remembered
        return self

    @property
    @final
    def processes(self) -> int:
        """The number of processes over which it spreads clients."""
        if self.sharding is None:
            return 1
        return len({device.process_index for device in self.sharding.device_set})

    @final
    def map(self, work: Callable[[PyTree, PyTree], PyTree], shared: PyTree, own: PyTree) -> PyTree:
        """The results of `work(shared, own)` for all clients, leading axis = clients."""
        return collect(self, lambda *arguments: (None, work(*arguments)), shared, own, 0)[1]


def collect(
    backend: Backend,
    work: Callable[[PyTree, PyTree], tuple[PyTree[Part], PyTree]],
    shared: PyTree,
    own: PyTree,
    gathering: int | slice | Array,
) -> tuple[PyTree[Part], PyTree]:
    """Map work over clients that send contributions of any kind, including gathered ones.

    Args:
        backend: maps the clients.
        work: one client's work: `(shared, own) -> (contributions, kept)`.
        shared: passed unchanged to each client.
        own: leading axis = clients, or in buckets.
        gathering: the clients whose parts are gathered: the first so many, or by index.

    Returns:
        The reduced message, and what the clients keep (leading axis = clients; in buckets if its
        shape differs between them).

    Raises:
        ValueError: if contributions from different buckets do not add up, gathered parts differ in
            shape between buckets, or `over_parts` breaks its contract.
    """
    one, parts = _One(work), split(own)
    total, kept = checked(backend, one, parts, backend.over_parts(one, shared, parts))
    gathered, kept = in_order(layout_of(own), kept)
    if layout_of(gathered) is not None:
        raise shapes_differ("gathered")
    # Padding, and clients that were selected only to fill a bucket, are dropped here; to reductions
    # they contribute nothing.
    which = slice(gathering) if isinstance(gathering, int) else gathering
    return joined(total, jax.tree.map(lambda x: x[which], gathered)), kept


class _One:
    """One client's work; gathered parts stay where they were computed, like what it keeps.

    Attributes:
        axes: the number of axes of each array that it returned. Not the arrays, which belong to the
            caller's trace.
    """

    def __init__(self, work: Callable[[PyTree, PyTree], tuple[PyTree[Part], PyTree]]):
        self._work, self.axes = work, None

    def __call__(self, shared: PyTree, own: PyTree) -> tuple[PyTree[Reduction], PyTree]:
        sent, kept = self._work(shared, own)
        summands, gathered = separated(sent)
        # Not a tuple: a backend that returns this alone has not returned a pair.
        result = summands, [gathered, kept]
        self.axes = jax.tree.map(jnp.ndim, result)
        return result


def length(own: PyTree) -> int:
    """The number of clients in a tree with a leading axis of clients."""
    return jax.tree.leaves(own)[0].shape[0]


def pair(backend: Backend, method: str, result: Any) -> tuple[PyTree, PyTree]:
    """The result of a backend's method as `(reduced, kept)`.

    Raises:
        ValueError: if it is anything else.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise _broken(backend, method, "(reduced, kept)", result)
    return result


def checked(
    backend: Backend, work: Work, parts: tuple[PyTree, ...], result: Any
) -> tuple[PyTree[Reduction], tuple[PyTree, ...]]:
    """The result of a backend's `over_parts`.

    Args:
        backend: the backend.
        work: the work that it has mapped.
        parts: the clients.
        result: what it returned.

    Raises:
        ValueError: if the result breaks the contract; the message names the backend's class.
    """
    total, kept = pair(backend, "over_parts", result)
    if not isinstance(kept, tuple) or len(kept) != len(parts):
        raise _broken(backend, "over_parts", f"a tuple of {len(parts)} as what is kept", kept)
    for own, one in zip(parts, kept, strict=True):
        clients = length(own)
        if any(jnp.shape(leaf)[:1] != (clients,) for leaf in jax.tree.leaves(one)):
            wanted = f"what is kept with a leading axis of {clients} clients"
            raise _broken(backend, "over_parts", wanted, one)
    # A backend may have wrapped the work for the one inside it, or not called it.
    if (axes := getattr(work, "axes", None)) is None:
        return total, kept
    sent, one = axes
    for whole in kept:
        if jax.tree.structure(whole) != jax.tree.structure(one):
            raise _broken(backend, "over_parts", "what the work returned as what is kept", whole)
    wanted, found = (jax.tree.leaves(tree, is_leaf=is_part) for tree in (sent, total))
    if len(wanted) != len(found) or not all(map(is_part, found)):
        raise _broken(backend, "over_parts", "what the work sent, reduced over clients", total)
    for contribution, part in zip(wanted, found, strict=True):
        # A reduction may return another kind, with other arrays.
        each = [jnp.ndim(x) for x in jax.tree.leaves(part)]
        if type(part) is type(contribution) and each != jax.tree.leaves(contribution):
            raise _broken(backend, "over_parts", "parts without an axis of clients", part)
    return total, kept


def _broken(backend: Backend, method: str, wanted: str, given: Any) -> ValueError:
    return broken(backend, method, wanted, given, "backend")
