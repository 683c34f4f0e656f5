"""The finished blocks of a grid in a folder, each a file that says which grid it belongs to."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxfed._names import caller
from jaxfed._versions import versions
from jaxfed.core.store.arrays import read, write
from jaxfed.core.store.identity import CheckpointError, Identity, check_same, described

KIND = "jaxfed.block"
BLOCKS = "[0-9]" * 8 + ".npz"
VALUE = "value "


class Store:
    """The folder of a grid."""

    def __init__(
        self,
        folder: Path,
        axes: Mapping[str, np.ndarray],
        computation: str,
        values: Mapping[str, np.ndarray],
    ):
        """Use a folder, which is made if it is not there.

        Args:
            folder: the folder.
            axes: the values along each axis.
            computation: a digest of the grid's function and data.
            values: arrays of the shapes and types of all results, points first.

        Raises:
            ValueError: if the folder holds something else.
        """
        self.folder, self.values = folder, values
        # Other versions give other last bits.
        compared = {name: versions()[name] for name in ("jax", "jaxlib")}
        self.identity: Identity = {
            "axes": described({name: along.tolist() for name, along in axes.items()}),
            "versions": described(compared),
            "computation": ["", computation],
        }
        folder.mkdir(parents=True, exist_ok=True)
        visible = [path for path in folder.iterdir() if not path.name.startswith(".")]
        if visible and not any(folder.glob(BLOCKS)):
            raise CheckpointError(f"folder: {folder} holds something else than a grid")

    def load(self) -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
        """The points and the results of each block that an earlier call left.

        Raises:
            ValueError: if the folder, or a block in it, is another grid's.

        Warns:
            UserWarning: if a block is damaged, which is then removed.
        """
        contents, damaged = {}, {}
        for path in sorted(self.folder.glob(BLOCKS)):
            try:
                contents[path] = read(path, KIND)
            except ValueError as error:
                damaged[path] = error
        if damaged and not contents:  # somebody's data may have such names
            raise CheckpointError(
                f"folder: {self.folder} holds something else than a grid, or all of its blocks are "
                "damaged"
            )
        done = np.zeros(len(next(iter(self.values.values()))), bool)
        for path, (header, arrays) in contents.items():
            check_same(f"folder: {self.folder}", "grid", header["identity"], self.identity)
            try:
                points, results = self._checked(arrays)
                if done[points].any():
                    raise ValueError("another block has the same points")
            except ValueError as error:
                damaged[path] = error
                continue
            done[points] = True
            yield points, results
        for path, error in damaged.items():
            warnings.warn(
                f"folder: {path} is damaged ({error}); its points are computed again",
                stacklevel=caller(),
            )
            path.unlink()

    def save(self, points: np.ndarray, results: Sequence[np.ndarray]) -> None:
        """Write a finished block; complete or not at all."""
        arrays = {VALUE + name: x for name, x in zip(self.values, results, strict=True)}
        path = self.folder / f"{points[0]:08d}.npz"
        write(path, KIND, {"identity": self.identity}, arrays | {"index": points})

    def _checked(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """A block's points and results; a `ValueError` says that it is damaged."""
        if arrays.keys() != {"index", *(VALUE + name for name in self.values)}:
            raise ValueError(f"it has other arrays, {sorted(arrays)}")
        points, total = arrays["index"], len(next(iter(self.values.values())))
        if points.ndim != 1 or points.dtype.kind != "i" or len(np.unique(points)) != len(points):
            raise ValueError("its points are no list of different numbers")
        if not ((points >= 0) & (points < total)).all():
            raise ValueError(f"its points go beyond the grid's {total}")
        results = [arrays[VALUE + name] for name in self.values]
        for (name, whole), found in zip(self.values.items(), results, strict=True):
            wanted = (len(points), *whole.shape[1:])
            if (found.shape, found.dtype) != (wanted, whole.dtype):
                raise ValueError(
                    f"{name}: wanted shape {wanted} and {whole.dtype}, got {found.shape} and "
                    f"{found.dtype}"
                )
        return points, results


def discard(folder: Path) -> None:
    """Remove what grids kept in a folder, and nothing else."""
    for block in folder.glob(BLOCKS):
        block.unlink()
