"""The states of one client, or of the server, on its own disk, each with its round."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfed.core.store.arrays import Content, read, write

KIND = "jaxfed.deploy.state"


class Store:
    """A folder of states that only their owner may read."""

    def __init__(self, folder: Path):
        """Use this folder, which need not be there yet."""
        self.folder = folder

    def save(self, number: int, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Write a state; when this returns it is on the disk.

        Raises:
            OSError: if it cannot be written; what was there stays.
        """
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        write(self._path(number), KIND, header, arrays, private=True)

    def load(self, number: int) -> Content | None:
        """The state with this number; None where there is none.

        Raises:
            ValueError: if the file is damaged or of another layout.
        """
        path = self._path(number)
        try:
            return read(path, KIND)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ValueError(f"state: {path} is damaged ({error})") from error

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
