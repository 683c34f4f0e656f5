"""Files that are complete or absent, and folders in which one process works at a time."""

import os
import platform
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxfed._names import caller

try:
    import fcntl
except ImportError:  # Windows, where folders are not locked
    fcntl = None


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """A file beside the wanted one, put in its place once it is complete.

    Args:
        path: the wanted file.
        private: whether its owner alone may read it.

    Yields:
        The path to write to. If an exception is raised, what was written there is removed.

    Raises:
        OSError: if it cannot be written, as on a full disk; what was in its place stays.
    """
    part = path.with_name(f".part-{path.name}")
    try:
        if private:
            part.unlink(missing_ok=True)  # with whatever rights
            part.touch(0o600)
        yield part
        part.replace(path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({reason(error)})") from error
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off SIGINT, and SIGTERM where it has a handler, until what is done here is complete.

    Libraries that write in threads and event loops of their own do not end well in the middle.
    """
    handlers, arrived = {}, []
    try:
        if threading.current_thread() is threading.main_thread():  # which alone has handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(handler := signal.getsignal(number)):
                    handlers[number] = handler
                    signal.signal(number, lambda number, _: arrived.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def reason(error: Exception) -> str:
    """In a few words, why something could not be written."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # TensorStore tells it in the middle of many lines.
    if code := re.search(r"os_error_code='([0-9]+)'", str(error)):
        return os.strerror(int(code[1]))
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextmanager
def locked(folder: Path, argument: str) -> Iterator[None]:
    """Keep everybody else out of a folder.

    The operating system holds the lock, on the hidden file `.lock` in the folder, and releases it
    when the process ends, in whatever way. The file itself stays and means nothing.

    Args:
        folder: an existing folder.
        argument: what the caller calls it.

    Raises:
        BlockingIOError: if another process, or another call in this one, holds the lock.
        OSError: if the file cannot be written.
    """
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(file, folder, argument)
        yield
    finally:
        if fcntl is not None:
            # A child process may hold the file open for longer than this one does.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _lock(file: int, folder: Path, argument: str) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(file)
        raise BlockingIOError(
            f"{argument}: {folder} is in use by {holder or 'another process'}; wait until it is "
            "done, or name another folder"
        ) from None
    except OSError as error:
        warnings.warn(
            f"{argument}: {folder} cannot be locked ({error.strerror}); make sure that no other "
            "process uses it",
            stacklevel=caller(),
        )
        return
    if _holder(file) is None:
        return  # a file of somebody else's that happens to have this name is not overwritten
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)


def _holder(file: int) -> str | None:
    """Who wrote the file of a lock, empty if nobody did; None if it holds something else."""
    written = os.pread(file, 200, 0).decode(errors="replace")
    return written if not written or written.startswith("process ") else None
