"""Where a client or the server keeps states and secrets on its own disk."""

import os
from pathlib import Path

from jaxfed.core.common.files import replacing
from jaxfed.core.store.series import Series
from jaxfed.deploy.masks import KEY


def home_of(folder: Path, client: int) -> Path:
    """The folder of one client, below that of a machine's states."""
    return folder / f"client-{client}"


def states(folder: Path) -> Series:
    """The states in a folder, by round, which only their owner may read."""
    return Series(folder, "jaxfed.deploy.state", private=True)


def make_private(*folders: Path) -> None:
    """Create folders, each in the one before; nobody else may read what is in them."""
    for place in folders:
        place.mkdir(0o700, parents=True, exist_ok=True)


def secret_of(folder: Path) -> bytes:
    """The secret that belongs to a folder, drawn when it is first needed.

    Raises:
        ValueError: if its file holds something else.
    """
    path = folder / "secret"
    if not path.exists():
        make_private(folder.parent, folder)
        with replacing(path, private=True) as part:
            part.write_bytes(os.urandom(KEY))
    found = path.read_bytes()
    if len(found) != KEY:
        raise ValueError(f"secret: wanted {KEY} bytes in {path}, got {len(found)}")
    return found
