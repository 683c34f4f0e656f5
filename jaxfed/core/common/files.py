"""Files that are either complete or absent, and locks on folders."""

import glob
import os
import platform
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from jaxfed._names import caller

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Write a temporary file that replaces `path` once it is complete and on disk.

    Args:
        path: the file to write.
        private: whether only its owner may read it.

    Yields:
        The path to write to, which ends in the name of `path`. If an exception is raised, that file
        is removed.

    Raises:
        OSError: if it cannot be written, as on a full disk; an existing file at `path` stays.
    """
    # A name that nobody can know before, and a file that did not exist: whoever else may write to
    # the folder could otherwise put a link there.
    part = path.with_name(f".part-{secrets.token_hex(4)}-{path.name}")
    try:
        # Left by processes that were killed.
        for old in path.parent.glob(f".part-{'[0-9a-f]' * 8}-{glob.escape(path.name)}"):
            old.unlink()
        # With its permissions before it has any content, so that others cannot read it for a
        # moment.
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666))
        yield part
        # First the content, then the name, then the folder's entry: after a power failure, the name
        # must stand for either the old file or the complete new one.
        _sync(part, os.O_RDWR)
        part.replace(path)
        with suppress(OSError):  # Windows cannot open folders
            _sync(path.parent, os.O_RDONLY)
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({reason(error)})") from error
    finally:
        part.unlink(missing_ok=True)


def _sync(path: Path, flags: int) -> None:
    """Have the operating system write its buffers, in case the power fails."""
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def reason(error: Exception) -> str:
    """The reason for an error, in a few words."""
    if isinstance(error.__cause__, OSError):
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextmanager
def locked(
    folder: Path, argument: str, *, private: bool = False, wait: bool = False
) -> Iterator[None]:
    """Lock a folder against all other users.

    The operating system holds the lock on the hidden file `.lock` in the folder, and releases it
    when the process ends, however that happens. The file stays, and names the last holder.

    Args:
        folder: an existing folder.
        argument: the caller's name for it.
        private: whether only its owner may read the hidden file.
        wait: whether to wait until the lock is free.

    Raises:
        BlockingIOError: if another process, or another call in this one, holds the lock, and
            `wait` is false.
        OSError: if the file cannot be written.
    """
    if fcntl is None:
        yield
        return

    def opened(path: str, flags: int) -> int:
        # Links are not followed.
        return os.open(path, flags | os.O_NOFOLLOW, 0o600 if private else 0o666)

    with open(folder / ".lock", "a+", errors="replace", opener=opened) as file:
        _lock(file, folder, argument, wait)
        try:
            yield
        finally:
            # Do not rely on closing the file, which a child process may still have open.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


def _lock(file: TextIO, folder: Path, argument: str, wait: bool) -> None:
    assert fcntl is not None
    # The file is open for appending, so reading would start at its end.
    file.seek(0)
    holder = file.read(200)
    is_ours = not holder or holder.startswith("process ")
    named = holder if holder and is_ours else "another process"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise BlockingIOError(
            f"{argument}: {folder} is in use by {named}; wait until it is done, or name another "
            "folder"
        ) from None
    except OSError as error:
        warnings.warn(
            f"{argument}: {folder} cannot be locked ({error.strerror}); make sure that no other "
            "process uses it",
            stacklevel=caller(),
        )
        return
    if is_ours:  # do not touch somebody else's file that happens to have this name
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
