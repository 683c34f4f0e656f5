"""Layouts define how the clients' data are stored, and the operations on each kind of storage."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from jaxfed.core.backends.backend import Backend
from jaxfed.core.common.buckets import Buckets, over_parts, parts_of


class Layout(abc.ABC):
    """A way to store the clients' data; each is a subclass.

    Arrays have one row per client along their leading axis. Since all devices need equally many
    rows, there may be padding: copies of clients with weight 0.
    """

    in_memory: ClassVar[bool]
    """Whether the data are arrays that one program can take."""

    in_one_process: ClassVar[bool]
    """Whether this process has all clients' data."""

    # --- data ------------------------------------------------------------------------------------

    @final
    @property
    def parts(self) -> tuple[PyTree, ...]:
        """The data or their shapes as rectangular trees, starting with the longest clients."""
        return parts_of(self.sketch())

    @abc.abstractmethod
    def sketch(self) -> PyTree:
        """The data, or their shapes if they are not in memory."""

    @abc.abstractmethod
    def identity(self) -> PyTree:
        """Arrays that differ if the data do: the data, or a digest of them."""

    @final
    def over_parts(self, function: Callable[[PyTree], PyTree]) -> PyTree:
        """Apply a function to each rectangular tree, or to its shapes."""
        return over_parts(function, self.sketch())

    @abc.abstractmethod
    def take(self, indices: Int[ArrayLike, " chosen"] | Sequence[int]) -> PyTree:
        """The data of the clients at these positions.

        Raises:
            ValueError: if this layout does not support it.
        """

    @abc.abstractmethod
    def mapped(self, function: Callable[[Any, Any], Any], *, complete: bool = False) -> PyTree:
        """Replace the samples by others of the same shapes and type; lazily read ones stay lazy.

        Args:
            function: maps the samples of some clients, `(some, samples, features)`, and their rows
                (positions or a slice) to new samples. It acts on each sample alone, and takes NumPy
                and JAX arrays.
            complete: whether the function completes samples with missing entries.
        """

    # --- rows ------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def numbers(self) -> Int[np.ndarray, " rows"]:
        """Each row's client, counted from 0; the number of clients or more for padding."""

    @abc.abstractmethod
    def rows(self, clients: int) -> slice | Int[Array, " clients"]:
        """Each client's row; a slice if no row has to move."""

    @abc.abstractmethod
    def with_all_rows(self, tree: PyTree, clients: int) -> PyTree:
        """Add padding to arrays with one row per client, such as a warm start."""

    @abc.abstractmethod
    def without_more_rows(self, tree: PyTree, clients: int) -> PyTree:
        """Remove padding from arrays, such as a result."""

    @abc.abstractmethod
    def in_rows(self, values: Float[Array, " clients"]) -> Float[Array, " rows"]:
        """One number per client, and 0 for padding."""

    @abc.abstractmethod
    def own_rows(self, array: Any) -> np.ndarray:
        """The rows of this process's clients, in their original order.

        Raises:
            ValueError: if the array has another leading axis.
        """

    # --- combinations ----------------------------------------------------------------------------

    @abc.abstractmethod
    def check_backend(self, backend: Backend) -> None:
        """Refuse a backend that cannot map these clients.

        Raises:
            ValueError: says which backends can.
        """

    @abc.abstractmethod
    def check_in_memory(self, what: str) -> None:
        """Refuse data that are not in memory.

        Raises:
            ValueError: says what needs them in memory.
        """


class InMemory(Layout):
    """The data are arrays in memory."""

    in_memory = True
    data: PyTree

    @final
    def sketch(self):
        return self.data

    @final
    def identity(self):
        return self.data

    @final
    def mapped(self, function, *, complete=False):
        def of(part: Any, places: Any) -> Any:
            found = part.with_values(function(part.values, places))
            return found.completed() if complete else found

        data = self.data
        if not isinstance(data, Buckets):
            return of(data, slice(None))
        parts = tuple(map(of, data.parts, data.places))
        return Buckets(parts, data.places, data.sizes)

    @final
    def check_in_memory(self, what):
        pass


class OfOneProcess(Layout):
    """All clients are in this process. Padding comes last."""

    in_one_process = True

    length: int
    """The number of rows."""

    @final
    @property
    def numbers(self):
        return np.arange(self.length)

    @final
    def rows(self, clients):
        return slice(clients)

    @final
    def with_all_rows(self, tree, clients):
        whose = jnp.arange(self.length) % clients
        # Traced positions cannot index NumPy arrays, such as a warm start from a file.
        return jax.tree.map(lambda x: jnp.asarray(x)[whose], tree)

    @final
    def without_more_rows(self, tree, clients):
        return jax.tree.map(lambda x: x[:clients], tree)

    @final
    def in_rows(self, values):
        return jnp.pad(values, (0, self.length - len(values)))

    @final
    def own_rows(self, array):
        check_leading(array, self.length)
        return np.asarray(array)


@final
@dataclass(frozen=True)
class Padded(InMemory, OfOneProcess):
    """One rectangular tree of arrays in memory."""

    data: PyTree
    length: int

    def take(self, indices):
        return jax.tree.map(lambda x: x[jnp.asarray(indices)], self.data)

    def check_backend(self, backend):
        pass


def check_leading(array: Any, rows: int) -> None:
    """Refuse an array without one row per client.

    Raises:
        ValueError: states the wanted leading axis.
    """
    if np.shape(array)[:1] != (rows,):
        raise ValueError(
            f"tree: wanted arrays with a leading axis of {rows}, the clients and their padding, "
            f"got shape {np.shape(array)}"
        )
