"""A folder of numbered files: rounds of a run, blocks of a grid, states of a deployment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfed.core.store.arrays import Content, read, write

PATTERN = "[0-9]" * 8 + ".npz"


class Series:
    """Files of one kind in a folder, named by their numbers."""

    def __init__(self, folder: Path, kind: str, *, private: bool = False):
        """Use a folder, which need not exist yet.

        Args:
            folder: the folder.
            kind: name of the files' layout.
            private: whether only their owner may read the folder and its files.
        """
        self.folder, self.kind, self.private = folder, kind, private

    def save(self, number: int, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Write a file, which is on disk when this returns.

        Raises:
            OSError: if it cannot be written; an earlier file of this number stays.
        """
        self.folder.mkdir(0o700 if self.private else 0o777, parents=True, exist_ok=True)
        write(self.path(number), self.kind, header, arrays, private=self.private)

    def load(self, number: int) -> Content | None:
        """Read the file with this number; None if it does not exist.

        Raises:
            ValueError: if it is damaged or of another layout.
        """
        path = self.path(number)
        try:
            return read(path, self.kind)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error})") from error

    def numbers(self) -> list[int]:
        """The numbers of all files, in order."""
        return sorted(int(path.stem) for path in self.folder.glob(PATTERN))

    def remove_before(self, number: int) -> None:
        """Remove all files with smaller numbers."""
        for old in self.numbers():
            if old < number:
                self.path(old).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove all files, complete or not, and nothing else."""
        for file in [*self.folder.glob(PATTERN), *self.folder.glob(f".part-*{PATTERN}")]:
            if not file.is_symlink():
                file.unlink()

    def path(self, number: int) -> Path:
        """The path of the file with this number."""
        return self.folder / f"{number:08d}.npz"
