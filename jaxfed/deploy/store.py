"""States on a machine's own disk: complete or absent, by run, owner and round."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxfed.core.common.files import replacing

LAYOUT = ["jaxfed.deploy.state", 1]


class Kept(NamedTuple):
    """What one file holds."""

    words: dict[str, Any]
    leaves: list[np.ndarray]

    def tree(self, like: PyTree) -> PyTree:
        """The arrays, in the structure of `like`.

        Raises:
            ValueError: if they are not of its shapes and types.
        """
        wanted, structure = jax.tree.flatten(like)
        found = [(leaf.shape, leaf.dtype) for leaf in self.leaves]
        if found != [(tuple(x.shape), x.dtype) for x in wanted]:
            raise ValueError(
                "state: what was saved is of another run: its arrays have other shapes"
            )
        return jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in self.leaves])


class Store:
    """One folder of states, each with its number, for their owner alone.

    A file is an uncompressed `.npz`: the entry `header`, a JSON text with the layout's name and
    number, types and what else is to be known, and the arrays `0000`, `0001`, ... Nothing in it
    runs.
    """

    def __init__(self, folder: Path):
        """Use this folder, which need not be there yet."""
        self.folder = folder

    def save(self, number: int, words: Mapping[str, Any], tree: PyTree) -> None:
        """Write a state; when this returns it is on the disk.

        Raises:
            OSError: if it cannot be written; what was there stays.
        """
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        types = [leaf.dtype.name for leaf in leaves]
        header = json.dumps({"format": LAYOUT, "types": types, "words": dict(words)})
        # Types that NumPy does not know (bfloat16) as bytes.
        arrays = {
            f"{i:04d}": np.frombuffer(leaf.tobytes(), np.uint8) for i, leaf in enumerate(leaves)
        }
        shapes = {f"shape_{i:04d}": np.asarray(x.shape, np.int64) for i, x in enumerate(leaves)}
        with replacing(self._path(number), private=True) as part, part.open("wb") as file:
            np.savez(file, header=np.asarray(header), **arrays, **shapes)  # pyright: ignore[reportArgumentType]
            file.flush()
            os.fsync(file.fileno())
        _keep_name(self.folder)

    def load(self, number: int) -> Kept | None:
        """The state with this number; None where there is none.

        Raises:
            ValueError: if the file is damaged or of another layout.
        """
        path = self._path(number)
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as stored:
                header = json.loads(str(stored["header"]))
                if header["format"] != LAYOUT:
                    raise ValueError(f"wanted format {LAYOUT}, got {header['format']}")
                leaves = [
                    stored[f"{i:04d}"].view(jnp.dtype(name)).reshape(stored[f"shape_{i:04d}"])
                    for i, name in enumerate(header["types"])
                ]
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            raise ValueError(f"state: {path} is damaged ({error})") from error
        return Kept(header["words"], leaves)

    def numbers(self) -> list[int]:
        """Of all states, in order."""
        return sorted(int(path.stem) for path in self.folder.glob("[0-9]*.npz"))

    def forget_before(self, number: int) -> None:
        """Remove states that nobody will ask for."""
        for old in self.numbers():
            if old < number:
                self._path(old).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.npz"


def _keep_name(folder: Path) -> None:
    """So that the name, too, outlives a power cut."""
    with suppress(OSError):  # Windows opens no folders
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
