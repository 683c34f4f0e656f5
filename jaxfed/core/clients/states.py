"""Stores the states of clients read block by block, in host memory or in temporary files."""

import tempfile
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int, PyTree

from jaxfed.core.clients.mapped import release


class States:
    """What clients keep between rounds, in memory or in files that are deleted after use."""

    def __init__(self, like: PyTree, clients: int, folder: Path | None):
        """Allocate the states.

        Args:
            like: shapes and types of what one client keeps.
            clients: number of clients.
            folder: folder for the files; None for memory.
        """

        def room(one):
            shape = (clients, *one.shape)
            if folder is None or 0 in shape:
                return np.empty(shape, one.dtype)
            # On Unix it has no name, so it is gone with the process, however that ends.
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            return np.memmap(file, one.dtype, "w+", shape=shape)

        self._rooms = jax.tree.map(room, like)

    def put(self, places: Int[np.ndarray, " some"], kept: PyTree) -> None:
        """Write the states of the clients at these positions."""
        for room, own in zip(jax.tree.leaves(self._rooms), jax.tree.leaves(kept), strict=True):
            room[places] = np.asarray(own)
            release(room)

    def all(self) -> PyTree:
        """All states, leading axis = clients."""
        return jax.tree.map(np.asarray, self._rooms)


def rows(kept: PyTree, places: Int[np.ndarray, " some"]) -> PyTree:
    """The states of the clients at these positions."""

    def some(x):
        found = np.asarray(x[places])
        release(x)
        return found

    return jax.tree.map(some, kept)
