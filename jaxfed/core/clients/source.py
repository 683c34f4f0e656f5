"""Clients whose samples are read block by block, because memory does not hold all of them."""

import ctypes
import hashlib
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int, PyTree
from numpy.lib.array_utils import byte_bounds

from jaxfed.core.common.buckets import Buckets, grouped
from jaxfed.core.common.checks import host_array, refuse, shown

_POPULATE_READ = 22  # `MADV_POPULATE_READ` of Linux, which `mmap` does not name
ALIGNMENT = 64  # bytes; what lies so is used by a processor's programs where it lies


class Block(NamedTuple):
    """Clients that are read together."""

    places: Int[np.ndarray, " block"]  # among all clients
    rows: int  # samples of each, with padding


class Reader:
    """Reads blocks of a sequence of clients; equal to itself alone."""

    def __init__(
        self, source: Sequence[Any], sizes: Int[np.ndarray, " clients"], bucket: float | None,
        block_bytes: int, states: Path | None,
    ):  # fmt: skip
        """Lay out the blocks; nothing is read but the first client's type and width."""
        self.source, self.sizes, self.states = source, sizes, states
        self.files = files_of(source)
        self._bucket, self._block_bytes = bucket, block_bytes
        one = self._table(0)
        native = one.dtype.newbyteorder("=")
        self.features, self.dtype = one.shape[1], jax.dtypes.canonicalize_dtype(native)
        self._mapped = isinstance(_base(one)[0], mmap.mmap)
        self.groups = [np.arange(len(sizes))] if bucket is None else grouped(sizes, bucket)
        self.blocks: list[Block] = []
        for own in self.groups:
            rows = int(sizes[own].max())
            many = max(1, block_bytes // (rows * self.features * self.dtype.itemsize))
            # As equal as can be, since each size is compiled for itself.
            for places in np.array_split(own, -(-len(own) // many)):
                self.blocks.append(Block(places, rows))
        self._within = [
            {self.files[place]: place for place in block.places if self.files[place] is not None}
            for block in self.blocks
        ]
        self._stamps = {file: _stamp(file) for own in self._within for file in own}
        largest = max(len(block.places) * block.rows for block in self.blocks)
        self._buffers = [_aligned(largest * self.features, self.dtype) for _ in range(2)]

    def _table(self, place: int) -> np.ndarray:
        table = np.asanyarray(self.source[place])
        if (
            table.ndim != 2
            or 0 in table.shape
            or not np.issubdtype(table.dtype, np.floating)
            or table.dtype.itemsize < 4
        ):
            raise refuse(
                f"source[{place}]", "an array (samples, features) of float32 or float64", table
            )
        _check_end(f"source[{place}]", table)
        return table

    def check(self, number: int) -> None:
        """Refuse a block whose files are not as they were when the clients were made.

        Raises:
            ValueError: for one whose size or time of change is another, with its client.
        """
        for file, place in self._within[number].items():
            if _stamp(file) != self._stamps[file]:
                raise ValueError(
                    f"source[{place}]: wanted {file} as it was for Clients.from_source, got it "
                    "changed since, or gone"
                )

    def mark(self) -> Int[np.ndarray, " words"]:
        """What tells sources apart, without reading all of each client.

        It is a digest of all sizes and, of each client, of the size and the time of change of its
        file, and of its first, middle and last sample. Those in a file that is not mapped are left
        out, since to have them is to read it.
        """
        digest = hashlib.sha256(self.sizes.tobytes())
        for number in range(len(self.blocks)):
            self.check(number)
        for place, file in enumerate(self.files):
            digest.update(f"{file and self._stamps[file]}".encode())
            if file is None or self._mapped:
                table = self._table(place)
                for row in (0, len(table) // 2, -1):
                    digest.update(table[row].tobytes())
                release(table)
        return np.frombuffer(digest.digest(), np.int32)

    def read(self, number: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of a block, padded with zeros, and how many each client has.

        They are a part of the source itself where that is one array of the right type that lies as
        programs want it; of a memory map its pages are read from the disk here.

        Args:
            number: of the block.
            slot: 0 or 1; what was read there before may be overwritten.

        Raises:
            ValueError: for a client whose samples are not what they were said to be, or whose file
                has changed.
        """
        places, rows = self.blocks[number]
        self.check(number)
        counts = self.sizes[places].astype(self.dtype)
        part = self._stretch(places)
        if part is not None:
            _check_end(f"source[{places[0]}:{places[-1] + 1}]", part)
        if part is not None and _usable(part, self.dtype):
            _fault_in(part)
            return part, counts
        shape = len(places), rows, self.features
        values = self._buffers[slot][: math.prod(shape)].reshape(shape)
        if part is not None:
            _copy(part, values)
        else:
            for row, place in zip(values, places, strict=True):
                self._fill(row, int(place))
        return values, counts

    def _stretch(self, places: Int[np.ndarray, " block"]) -> np.ndarray | None:
        """The part of the source that a block is, where that is one array."""
        if not isinstance(self.source, np.ndarray) or (np.diff(places) != 1).any():
            return None
        # Plain, and still with the map that it lies in as its base.
        return np.asarray(self.source[places[0] : places[-1] + 1])

    def _fill(self, row: Float[np.ndarray, "rows features"], place: int) -> None:
        table, count = self._table(place), int(self.sizes[place])
        if table.shape != (count, self.features):
            raise refuse(f"source[{place}]", f"shape {(count, self.features)}", table)
        _copy(table, row[:count])
        row[count:] = 0

    def taken(self, places: Int[np.ndarray, " chosen"]) -> "Reader":
        """Of the clients at these positions."""
        return Reader(
            _Chosen(self.source, places), self.sizes[places], self._bucket, self._block_bytes,
            self.states,
        )  # fmt: skip


class _Chosen(Sequence[Any]):
    """Some members of a sequence."""

    def __init__(self, source: Sequence[Any], places: Int[np.ndarray, " chosen"]):
        self._source, self._places = source, places
        files = files_of(source)
        self.files = [files[place] for place in places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        return self._source[int(self._places[place])]


class Source(eqx.Module):
    """Samples of clients that are in no memory; the place of data in `Clients`."""

    reader: Reader = eqx.field(static=True)

    def __repr__(self) -> str:
        sizes, reader = self.reader.sizes, self.reader
        least, most = sizes.min(), sizes.max()
        samples = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        return (
            f"{samples} samples of {reader.features:,} features, {reader.dtype}, read in "
            f"{len(reader.blocks):,} blocks"
        )


def is_source(data: Any) -> bool:
    """Whether clients' data are read block by block."""
    return isinstance(data, Source)


def identified(clients: Any) -> Any:
    """Clients with what tells their source apart in the place of data that are in no memory."""
    if not is_source(clients.data):
        return clients
    return eqx.tree_at(lambda own: own.data, clients, clients.data.reader.mark())


def check_in_memory(what: str, clients: Any) -> None:
    """Refuse clients whose data are read block by block.

    Raises:
        ValueError: saying what needs them in memory.
    """
    if is_source(clients.data):
        raise ValueError(
            f"clients: wanted data in memory for {what}, as of Clients.from_samples, got those of "
            "Clients.from_source, which fit reads block by block"
        )


def sizes_of(source: Any, counts: Any) -> Int[np.ndarray, " clients"]:
    """Numbers of samples, as they are given or found by a look at each client.

    Raises:
        ValueError: for what is no sequence of clients, and counts that are not theirs.
    """
    wanted = "a sequence of (samples, features) arrays, or one (clients, samples, features) array"
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise refuse("source", wanted, source)
    if isinstance(source, str | bytes | dict):
        raise refuse("source", wanted, source)
    if len(source) == 0:
        raise ValueError("source: at least one client is needed, got none")
    if isinstance(source, np.ndarray):
        if source.ndim != 3 or 0 in source.shape:
            raise refuse("source", wanted, source)
        own = np.full(len(source), source.shape[1])
        if counts is not None and not np.array_equal(own, counts):
            raise refuse("counts", f"None, or {len(source)} times {source.shape[1]}", counts)
        return own
    counts = getattr(source, "counts", None) if counts is None else counts
    if counts is None:
        shapes = [np.shape(source[place]) for place in range(len(source))]
        for place, shape in enumerate(shapes):
            if len(shape) != 2 or 0 in shape or shape[1] != shapes[0][1]:
                raise ValueError(
                    f"source[{place}]: wanted samples of as many features as the first client's, "
                    f"{shown(shapes[0])}, got shape {shape}"
                )
        return np.asarray([shape[0] for shape in shapes])
    wanted = f"{len(source)} positive whole numbers, one per client"
    sizes = host_array("counts", counts, wanted)
    if sizes.dtype.kind not in "iu" or sizes.shape != (len(source),) or (sizes < 1).any():
        raise refuse("counts", wanted, counts)
    return sizes.astype(int)


def sketched(source: Source, samples: type) -> PyTree:
    """The shapes of a source's samples, with their true counts."""
    reader = source.reader
    parts, places = [], []
    for own in reader.groups:
        shape = len(own), int(reader.sizes[own].max()), reader.features
        counts = reader.sizes[own].astype(reader.dtype)
        parts.append(samples(jax.ShapeDtypeStruct(shape, reader.dtype), counts))
        places.append(np.asarray(own, np.int32))
    if len(parts) == 1:
        return parts[0]
    return Buckets(tuple(parts), tuple(places), tuple(map(len, places)))


def read_ahead(reader: Reader, numbers: Sequence[int]) -> Iterator[tuple[Block, Any]]:
    """Blocks with their samples and counts, the next one read while one is in use.

    Who asks for the next one must be done with the one before.

    Raises:
        ValueError: as `Reader.read`, also for a file that has changed while a block was in use.
    """
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(reader.read, numbers[0], 0)
        for position, number in enumerate(numbers):
            found = ahead.result()
            if position + 1 < len(numbers):
                ahead = pool.submit(reader.read, numbers[position + 1], (position + 1) % 2)
            yield reader.blocks[number], found
            release(found[0])
            reader.check(number)


class States:
    """What clients keep between rounds, in memory or in files that go when nobody needs them."""

    def __init__(self, like: PyTree, clients: int, folder: Path | None):
        """Room for so many clients.

        Args:
            like: shapes and types of what one of them keeps.
            clients: how many.
            folder: where the files go; None for memory.
        """

        def room(one):
            shape = (clients, *one.shape)
            if folder is None or 0 in shape:
                return np.empty(shape, one.dtype)
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            return np.memmap(file, one.dtype, "w+", shape=shape)

        self._rooms = jax.tree.map(room, like)

    def put(self, places: Int[np.ndarray, " some"], kept: PyTree) -> None:
        """Write what clients at these positions keep."""
        for room, own in zip(jax.tree.leaves(self._rooms), jax.tree.leaves(kept), strict=True):
            room[places] = np.asarray(own)
            release(room)

    def all(self) -> PyTree:
        """What all of them keep, leading axis = clients."""
        return jax.tree.map(np.asarray, self._rooms)


def rows(kept: PyTree, places: Int[np.ndarray, " some"]) -> PyTree:
    """What clients at these positions keep."""

    def some(x):
        found = np.asarray(x[places])
        release(x)
        return found

    return jax.tree.map(some, kept)


def release(array: Any) -> None:
    """Give back the memory of a mapped file's pages that an array lies in; the file keeps them.

    So does the system's cache, as far as it has room.
    """
    if (mapping := _mapping(array)) is None:
        return
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    first, last = (address - start for address in byte_bounds(array))
    first -= first % mmap.PAGESIZE
    mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def _copy(part: np.ndarray, into: np.ndarray) -> None:
    """Copy a part of a source; what is too large for the type becomes infinite."""
    with np.errstate(over="ignore"):
        np.copyto(into, part, casting="same_kind")
    release(part)


def files_of(source: Sequence[Any]) -> list[str | os.PathLike[str] | None]:
    """The file that each client lies in, as far as a source says or its arrays are mapped."""
    if isinstance(source, np.ndarray):
        return [_base(source)[1]] * len(source)
    if isinstance(source, list | tuple):
        return [_base(member)[1] for member in source]
    files = getattr(source, "files", None)
    if not isinstance(files, list | tuple) or len(files) != len(source):
        return [None] * len(source)
    return [file if isinstance(file, str | os.PathLike) else None for file in files]


def _stamp(file: Any) -> tuple[int, int] | None:
    """What changes with a file: its size in bytes, and the time of its last change."""
    with suppress(OSError):
        found = os.stat(file)
        return found.st_size, found.st_mtime_ns
    return None


def _base(array: Any) -> tuple[Any, str | None, int]:
    """What an array's numbers lie in; of a memory map its file, and where in there it begins."""
    file, offset = None, 0
    while isinstance(array, np.ndarray):
        file = getattr(array, "filename", None) or file
        offset = getattr(array, "offset", None) or offset
        array = array.base
    return array, file and os.fspath(file), offset - offset % mmap.ALLOCATIONGRANULARITY


def _check_end(name: str, array: np.ndarray) -> None:
    """Refuse an array beyond whose file's end it is mapped: Python would die of a look at it."""
    mapping, _, start = _base(array)
    if isinstance(mapping, mmap.mmap):
        with suppress(OSError):  # of memory without a file
            if mapping.size() < (end := start + len(mapping)):
                raise ValueError(
                    f"{name}: wanted a file of {end:,} bytes, which is mapped, got "
                    f"{mapping.size():,}"
                )


def _usable(part: np.ndarray, dtype: np.dtype) -> bool:
    """Whether a processor's programs use an array where it lies."""
    return (
        part.dtype == dtype and part.flags.c_contiguous and part.ctypes.data % ALIGNMENT == 0
    )  # fmt: skip


def _fault_in(part: np.ndarray) -> None:
    """Have a mapped file's pages in memory, of an array without gaps."""
    if (mapping := _mapping(part)) and not _populated(part):
        mapping.madvise(mmap.MADV_SEQUENTIAL)  # the system reads further ahead
        part.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max()


def _populated(part: np.ndarray) -> bool:
    """Whether the system, Linux from 5.14 on, read all pages at once, faster than one by one.

    Called so and not by `mmap.madvise`, which would let no other thread run meanwhile.
    """
    if sys.platform != "linux":
        return False
    first, last = byte_bounds(part)
    first -= first % mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    return madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _POPULATE_READ) == 0


def _mapping(array: Any) -> mmap.mmap | None:
    """The mapped file that an array lies in, if its pages can be had again from there."""
    shared = hasattr(mmap, "MADV_DONTNEED")  # not on Windows
    while isinstance(array, np.ndarray):
        # Pages that are written to and not shared exist nowhere else.
        shared = shared and getattr(array, "mode", "r") != "c"
        array = array.base
    return array if shared and isinstance(array, mmap.mmap) else None


def _aligned(numbers: int, dtype: np.dtype) -> np.ndarray:
    whole = np.empty(numbers * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + numbers * dtype.itemsize].view(dtype)
