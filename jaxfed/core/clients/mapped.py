"""Memory-mapped files: find an array's file, and read and release its pages."""

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.lib.array_utils import byte_bounds

_POPULATE_READ = 22  # Linux's `MADV_POPULATE_READ`, which `mmap` does not define
ALIGNMENT = 64  # bytes; compiled CPU programs use aligned arrays without a copy


@runtime_checkable
class TableSequence(Protocol):
    """One table per client, by position: a list, an array, or any other sequence."""

    def __len__(self) -> int:
        """The number of clients."""
        ...

    def __getitem__(self, place: Any, /) -> Any:
        """One client's table."""
        ...


def release(array: Any) -> None:
    """Release the memory of the mapped pages that hold an array.

    The file keeps their content, and so may the system's cache.
    """
    if (mapping := _mapping(array)) is None:
        return
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    first, last = (address - start for address in byte_bounds(array))
    # The system takes whole pages. A neighbour's numbers on the first and last one are read again
    # from the file when needed.
    first -= first % mmap.PAGESIZE
    mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def copy_into(part: np.ndarray, into: np.ndarray) -> None:
    """Copy part of a source; numbers too large for the type become infinite."""
    with np.errstate(over="ignore"):
        np.copyto(into, part, casting="same_kind")
    release(part)


def backing_files(source: TableSequence) -> list[str | os.PathLike[str] | None]:
    """Each client's file, if the source names it or its arrays are memory maps; else None."""
    if isinstance(source, np.ndarray):
        return [memory_of(source).file] * len(source)
    if isinstance(source, list | tuple):
        return [memory_of(member).file for member in source]
    files = getattr(source, "files", None)
    if not isinstance(files, list | tuple) or len(files) != len(source):
        return [None] * len(source)
    return [file if isinstance(file, str | os.PathLike) else None for file in files]


def stamp_of(file: Any) -> tuple[int, int] | None:
    """A file's size in bytes and modification time; None if it cannot be found."""
    with suppress(OSError):
        found = os.stat(file)
        return found.st_size, found.st_mtime_ns
    return None


class Storage(NamedTuple):
    """Where an array's numbers are stored."""

    owner: Any  # the object that owns the memory
    file: str | None  # of a memory map
    offset: int  # of the map within its file


def memory_of(array: Any) -> Storage:
    """Where an array's numbers are stored."""
    file, offset = None, 0
    while isinstance(array, np.ndarray):
        file = getattr(array, "filename", None) or file
        offset = getattr(array, "offset", None) or offset
        array = array.base
    # `numpy.memmap` maps from the last multiple of the granularity at or before the offset.
    return Storage(array, file and os.fspath(file), offset - offset % mmap.ALLOCATIONGRANULARITY)


def check_end(name: str, array: np.ndarray) -> None:
    """Refuse an array mapped beyond the end of its file: reading it would kill the process."""
    mapping, _, start = memory_of(array)
    if isinstance(mapping, mmap.mmap):
        with suppress(OSError):  # of a map without a file
            if mapping.size() < (end := start + len(mapping)):
                raise ValueError(
                    f"{name}: wanted a file of {end:,} bytes, which is mapped, got "
                    f"{mapping.size():,}"
                )


def is_usable(part: np.ndarray, dtype: np.dtype) -> bool:
    """Whether compiled programs can use the array without a copy."""
    lies_well = part.flags.c_contiguous and part.ctypes.data % ALIGNMENT == 0
    return lies_well and part.dtype == dtype


def read_pages(part: np.ndarray) -> None:
    """Read the pages of a contiguous mapped array into memory."""
    if (mapping := _mapping(part)) and not _populated(part):
        mapping.madvise(mmap.MADV_SEQUENTIAL)  # makes the system read further ahead
        # Looking at one byte of a page reads all of it.
        part.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max()


def _populated(part: np.ndarray) -> bool:
    """Read all pages in one call (Linux 5.14 and later); return whether that succeeded.

    It uses ctypes, because `mmap.madvise` would hold the interpreter lock meanwhile.
    """
    if sys.platform != "linux":
        return False
    first, last = byte_bounds(part)
    first -= first % mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    return madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _POPULATE_READ) == 0


def _mapping(array: Any) -> mmap.mmap | None:
    """The memory map of an array, if its pages can be read again from the file."""
    shared = hasattr(mmap, "MADV_DONTNEED")  # not on Windows
    while isinstance(array, np.ndarray):
        # Pages written to in a private map exist nowhere else.
        shared = shared and getattr(array, "mode", "r") != "c"
        array = array.base
    return array if shared and isinstance(array, mmap.mmap) else None


def aligned_empty(numbers: int, dtype: np.dtype) -> np.ndarray:
    """An empty array that compiled programs can use without a copy."""
    whole = np.empty(numbers * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + numbers * dtype.itemsize].view(dtype)
