"""Where a client or the server keeps the states of the last rounds, on its own disk."""

from pathlib import Path

from jaxfed.core.store.series import Series


def states(folder: Path) -> Series:
    """The states in a folder, by round, which only their owner may read."""
    return Series(folder, "jaxfed.deploy.state", private=True)
