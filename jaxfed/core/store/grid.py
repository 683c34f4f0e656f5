"""The folder of a grid: what it is of, and the blocks that are finished."""

import hashlib
import io
import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxfed._names import caller
from jaxfed._versions import versions
from jaxfed.core.common.files import replacing
from jaxfed.core.store.checkpoint import CheckpointError


def discard(folder: Path) -> None:
    """Remove what grids kept in a folder, and nothing else."""
    for block in folder.glob(_BLOCKS):
        block.unlink()
    (folder / _DESCRIBED).unlink(missing_ok=True)


_DESCRIBED, _BLOCKS = "grid.json", "[0-9]" * 8 + ".npz"


class Store:
    """The folder of a grid: a file that describes it, and a file for each finished block."""

    def __init__(self, folder: Path, axes, computation: str, names: list[str], values: list):
        self.folder = folder
        # Other versions give other last bits.
        compared = {name: versions()[name] for name in ("jax", "jaxlib")}
        self.identity = {
            "axes": {name: values.tolist() for name, values in axes.items()},
            "versions": compared,
            "computation": computation,
        }
        described = json.dumps(self.identity).encode()
        self.digest = hashlib.sha256(described).hexdigest()[:16]
        self.names, self.values = names, values
        folder.mkdir(parents=True, exist_ok=True)
        self._refuse_others()

    def _refuse_others(self) -> None:
        visible = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        if visible and not self._described.exists():
            raise CheckpointError(f"folder: {self.folder} holds something else than a grid")

    @property
    def _described(self) -> Path:
        return self.folder / _DESCRIBED

    def kept(self) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """What an earlier call with the same arguments left; the folder is this grid's from now on.

        Raises:
            ValueError: if the folder is another grid's, or what describes it is damaged.
        """
        self._refuse_others()
        if not self._described.exists():
            with replacing(self._described) as part:
                part.write_text(json.dumps(self.identity, indent=1))
            return []
        self._compare()
        found, done = [], np.zeros(len(self.values[0]), bool)
        for path in sorted(self.folder.glob(_BLOCKS)):
            content = path.read_bytes()
            try:
                chosen, arrays = self._read(content)
                if done[chosen].any():
                    raise ValueError("another block has the same points")
            except Exception as error:  # reading damaged files ends in exceptions of every kind
                warnings.warn(
                    f"folder: {path} is damaged ({error}); its points are computed again",
                    stacklevel=caller(),
                )
                path.unlink()
                continue
            done[chosen] = True
            found.append((chosen, arrays))
        return found

    def keep(self, chosen: np.ndarray, arrays: Sequence[np.ndarray]) -> None:
        """Write a finished block; complete or not at all."""
        named = {f"value {name}": x for name, x in zip(self.names, arrays, strict=True)}
        with replacing(self.folder / f"{chosen[0]:08d}.npz") as part, part.open("wb") as file:
            np.savez(file, grid=self.digest, index=chosen, **named)  # pyright: ignore[reportArgumentType]

    def _compare(self) -> None:
        try:
            saved = json.loads(self._described.read_text())
            axes, compared, computation = (saved[name] for name in self.identity)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"folder: {self._described} is damaged ({error}); remove {self.folder} to begin "
                "anew, or name another folder"
            ) from error
        for kind, given, wanted in (
            ("another grid; its axes", axes, self.identity["axes"]),
            ("a grid of other versions; its", compared, self.identity["versions"]),
        ):
            if given != wanted:
                raise CheckpointError(
                    f"folder: {self.folder} holds {kind} are {given}, this one's are {wanted}"
                )
        if computation != self.identity["computation"]:
            raise CheckpointError(
                f"folder: {self.folder} holds a grid of another computation: another algorithm, "
                "other data, keys or rounds"
            )

    def _read(self, content: bytes) -> tuple[np.ndarray, list[np.ndarray]]:
        """A block's points and its arrays; any exception says that it is damaged."""
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            if str(file["grid"]) != self.digest:
                raise ValueError("it is a block of another grid")
            chosen = file["index"]
            arrays = [file[f"value {name}"] for name in self.names]
        total = len(self.values[0])
        if chosen.ndim != 1 or len(np.unique(chosen)) != len(chosen):
            raise ValueError("its points are no list of different numbers")
        if not ((chosen >= 0) & (chosen < total)).all():
            raise ValueError(f"its points go beyond the grid's {total}")
        for name, array, whole in zip(self.names, arrays, self.values, strict=True):
            wanted = (len(chosen), *whole.shape[1:])
            # NumPy stores the bits of types that are not its own, such as bfloat16, without a name.
            fits = array.dtype == whole.dtype or array.dtype.str == f"|V{whole.dtype.itemsize}"
            if array.shape != wanted or not fits:
                raise ValueError(
                    f"{name}: wanted shape {wanted} and {whole.dtype}, got {array.shape} and "
                    f"{array.dtype}"
                )
        return chosen, [
            array.view(whole.dtype) for array, whole in zip(arrays, self.values, strict=True)
        ]
