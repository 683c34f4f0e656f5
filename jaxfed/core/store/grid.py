"""Stores the finished blocks of a grid in a folder, each file with the grid's identity."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxfed._names import caller
from jaxfed._versions import versions
from jaxfed.core.store.identity import CheckpointError, Identity, check_same, text_and_digest
from jaxfed.core.store.series import Series

KIND = "jaxfed.block"
POINTS, VALUE = "points", "value "


class GridBlock(NamedTuple):
    """Some points of a grid and their results.

    Attributes:
        points: `(p,)` numbers of the points.
        values: one array per name, leading axis = points.
    """

    points: np.ndarray
    values: Sequence[np.ndarray]


class Store:
    """The folder of a grid."""

    def __init__(
        self,
        folder: Path,
        axes: Mapping[str, np.ndarray],
        computation: str,
        names: Sequence[str],
    ):
        """Use a folder, created if missing.

        Args:
            folder: the folder.
            axes: the values along each axis.
            computation: a digest of the grid's function and data.
            names: names of the results.

        Raises:
            ValueError: if the folder holds something else.
        """
        self.folder, self.names = folder, names
        # Other versions may compute other last bits.
        compared = {name: versions()[name] for name in ("jax", "jaxlib")}
        self.identity: Identity = {
            "axes": text_and_digest({name: along.tolist() for name, along in axes.items()}),
            "versions": text_and_digest(compared),
            "computation": ["", computation],
        }
        self._blocks = Series(folder, KIND)
        folder.mkdir(parents=True, exist_ok=True)
        visible = [path for path in folder.iterdir() if not path.name.startswith(".")]
        if visible and not self._blocks.numbers():
            raise CheckpointError(
                f"folder: wanted an empty one or that of a grid, got {folder}, which holds "
                "something else than a grid"
            )

    def load(self) -> Iterator[GridBlock]:
        """Iterate over the blocks of an earlier call.

        Raises:
            ValueError: if the folder, or a block in it, belongs to another grid.

        Warns:
            UserWarning: if a block is damaged; it is then removed.
        """
        contents, damaged = {}, {}
        for number in self._blocks.numbers():
            try:
                if found := self._blocks.load(number):
                    contents[number] = found
            except ValueError as error:
                damaged[number] = error
        if damaged and not contents:  # keep files of others that happen to have such names
            raise CheckpointError(
                f"folder: wanted the blocks of a grid, got {self.folder}, which holds something "
                "else than a grid, or damaged blocks only"
            )
        for header, arrays in contents.values():
            check_same("folder", self.folder, "grid", header["identity"], self.identity)
            yield GridBlock(arrays[POINTS], [arrays[VALUE + name] for name in self.names])
        for number, error in damaged.items():
            warnings.warn(f"folder: {error}; its points are computed again", stacklevel=caller())
            self._blocks.path(number).unlink()

    def save(self, block: GridBlock) -> None:
        """Write a finished block, completely or not at all."""
        values = {VALUE + name: x for name, x in zip(self.names, block.values, strict=True)}
        arrays = {POINTS: block.points, **values}
        # No two blocks of a grid begin with the same point, so this number names one, also after a
        # resumed call has cut the missing points differently.
        self._blocks.save(int(block.points[0]), {"identity": self.identity}, arrays)
