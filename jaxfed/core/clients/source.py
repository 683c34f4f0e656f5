"""Reads clients' samples block by block because they do not fit into memory."""

import hashlib
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int

from jaxfed._checks import check_count, checked_path, host_array, refuse, shown
from jaxfed._numbers import check_spread, host_floats
from jaxfed.core.clients.checks import check_bucket
from jaxfed.core.clients.layout import OfOneProcess
from jaxfed.core.clients.mapped import (
    TableSequence,
    aligned_empty,
    backing_files,
    check_end,
    copy_into,
    is_usable,
    memory_of,
    read_pages,
    release,
    stamp_of,
)
from jaxfed.core.clients.samples import IncompleteSamples, SampleRows, Samples, sample_shapes
from jaxfed.core.common.buckets import Buckets, grouped

# Rows of a client that show the magnitudes of its features.
SOME_ROWS = 64


class ClientBlock(NamedTuple):
    """Clients that are read together."""

    places: Int[np.ndarray, " block"]  # among all clients
    rows: int  # samples per client, including padding


class Reader:
    """Reads blocks of a sequence of clients. Readers compare by identity."""

    def __init__(
        self,
        source: TableSequence,
        sizes: Int[np.ndarray, " clients"],
        bucket: float | None,
        block_bytes: int,
        states: Path | None,
        kind: type[SampleRows] = Samples,
    ):
        """Divide the clients into blocks; reads at most three clients."""
        self.source, self.sizes, self.states, self.kind = source, sizes, states, kind
        self.files = backing_files(source)
        self._bucket, self._block_bytes = bucket, block_bytes
        one = self._table(0)
        native = one.dtype.newbyteorder("=")
        self.features, self.dtype = one.shape[1], jax.dtypes.canonicalize_dtype(native)
        # Copied, since it may be part of a file.
        self.some_rows = np.array(one[:: -(-len(one) // SOME_ROWS)], self.dtype)
        if native != self.dtype:  # what some clients show; reading all would take too long
            some = sorted({0, len(sizes) // 2, len(sizes) - 1})
            check_spread("source", [np.asarray(self._table(place)) for place in some], some)
        # Whether the digest may read single samples of a client: cheap in a memory map, and needed
        # where samples are computed, since then the file does not tell.
        self._samples_tell = isinstance(memory_of(one).owner, mmap.mmap) or _is_computed(source)
        self.groups = [np.arange(len(sizes))] if bucket is None else grouped(sizes, bucket)
        self.blocks: list[ClientBlock] = []
        for own in self.groups:
            rows = int(sizes[own].max())
            many = max(1, block_bytes // (rows * self.features * self.dtype.itemsize))
            # Make blocks equal in size if possible, since each size is compiled separately.
            for places in np.array_split(own, -(-len(own) // many)):
                self.blocks.append(ClientBlock(places, rows))
        # One entry per file, so that a file of many clients is looked at once for each block.
        self._within = [
            {self.files[place]: place for place in block.places if self.files[place] is not None}
            for block in self.blocks
        ]
        self._stamps = {file: stamp_of(file) for own in self._within for file in own}
        largest = max(len(block.places) * block.rows for block in self.blocks)
        # Two, for the block in use and the one that is read meanwhile; a program may use them
        # without a copy, so neither may be written to before it is done (`Streamed._each`).
        self._buffers = [aligned_empty(largest * self.features, self.dtype) for _ in range(2)]

    def _table(self, place: int) -> np.ndarray:
        table = np.asanyarray(self.source[place])
        if isinstance(table, np.ma.MaskedArray) or table.dtype.kind in "iu":
            name, wanted = f"source[{place}]", "an array (samples, features)"
            table = host_floats(table, name, wanted, missing=self.kind is IncompleteSamples)
        if (
            table.ndim != 2
            or 0 in table.shape
            or not np.issubdtype(table.dtype, np.floating)
            or table.dtype.itemsize not in (4, 8)
        ):
            raise refuse(
                f"source[{place}]", "an array (samples, features) of float32 or float64", table
            )
        check_end(f"source[{place}]", table)
        return table

    def check(self, number: int) -> None:
        """Refuse a block whose files have changed since the clients were created.

        Raises:
            ValueError: names the client and its file.
        """
        for file, place in self._within[number].items():
            if stamp_of(file) != self._stamps[file]:
                raise ValueError(
                    f"source[{place}]: wanted {file} as it was for Clients.from_source, got a file "
                    "that was changed or removed since"
                )

    def digest(self) -> Int[np.ndarray, " words"]:
        """A digest of the source that does not read all samples.

        It covers all sizes and, for each client, the size and modification time of its file and the
        first, middle and last sample. Samples are left out if reading one means reading the whole
        file, unless they are computed from the file's samples.
        """
        digest = hashlib.sha256(self.sizes.tobytes())
        for number in range(len(self.blocks)):
            self.check(number)
        for place, file in enumerate(self.files):
            digest.update(f"{file and self._stamps[file]}".encode())
            if file is None or self._samples_tell:
                table = self._table(place)
                for row in (0, len(table) // 2, -1):
                    digest.update(table[row].tobytes())
                release(table)
        return np.frombuffer(digest.digest(), np.int32)

    def read(self, number: int, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Read a block: its samples, padded with zeros, and each client's number of samples.

        The samples are a view of the source if that is one array of the right type and alignment;
        pages of a memory map are read from disk here.

        Args:
            number: the block.
            slot: 0 or 1, the buffer to overwrite.

        Raises:
            ValueError: if a client's samples have another shape than announced, or its file has
                changed.
        """
        places, rows = self.blocks[number]
        self.check(number)
        counts = self.sizes[places].astype(self.dtype)
        part = self._view(places)
        if part is not None:
            # The file may have been cut since it was mapped; reading beyond its end would kill the
            # process.
            check_end(f"source[{places[0]}:{places[-1] + 1}]", part)
        if part is not None and is_usable(part, self.dtype):
            read_pages(part)
            return part, counts
        shape = len(places), rows, self.features
        values = self._buffers[slot][: math.prod(shape)].reshape(shape)
        if part is not None:
            copy_into(part, values)
        else:
            for row, place in zip(values, places, strict=True):
                self._fill(row, int(place))
        return values, counts

    def _view(self, places: Int[np.ndarray, " block"]) -> np.ndarray | None:
        """The block as a view of the source, if that is one array."""
        if not isinstance(self.source, np.ndarray) or (np.diff(places) != 1).any():
            return None
        # Return a plain array, whose base is still the memory map.
        return np.asarray(self.source[places[0] : places[-1] + 1])

    def _fill(self, row: Float[np.ndarray, "rows features"], place: int) -> None:
        table, count = self._table(place), int(self.sizes[place])
        if table.shape != (count, self.features):
            raise refuse(f"source[{place}]", f"shape {(count, self.features)}", table)
        copy_into(table, row[:count])
        row[count:] = 0

    def subset(self, places: Int[np.ndarray, " chosen"]) -> "Reader":
        """A reader of the clients at these positions."""
        chosen = _Subset(self.source, places), self.sizes[places]
        return Reader(*chosen, self._bucket, self._block_bytes, self.states, self.kind)

    def mapped(self, function: Callable[[Any, Any], Any], complete: bool) -> "Reader":
        """A reader of these clients with other samples; see `Layout.mapped`."""
        chosen = _Mapped(self.source, function), self.sizes
        kind = Samples if complete else self.kind
        return Reader(*chosen, self._bucket, self._block_bytes, self.states, kind)


class _Mapped(Sequence[Any]):
    """A sequence whose members are computed from those of another on access."""

    computed = True

    def __init__(self, source: TableSequence, function: Callable[[Any, Any], Any]):
        self._source, self._function = source, function
        self.files = backing_files(source)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, place: Any) -> Any:
        table = np.asanyarray(self._source[place])
        check_end(f"source[{place}]", table)
        found = self._function(np.asarray(table)[None], [int(place)])[0]
        release(table)
        return found.astype(table.dtype, copy=False)


def _is_computed(source: TableSequence) -> bool:
    return getattr(source, "computed", False)


class _Subset(Sequence[Any]):
    """Some members of a sequence."""

    def __init__(self, source: TableSequence, places: Int[np.ndarray, " chosen"]):
        self._source, self._places = source, places
        self.computed = _is_computed(source)
        files = backing_files(source)
        self.files = [files[place] for place in places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        return self._source[int(self._places[place])]


class Source(eqx.Module):
    """Samples that are not in memory, in place of the data in `Clients`."""

    reader: Reader = eqx.field(static=True)

    def __repr__(self) -> str:
        sizes, reader = self.reader.sizes, self.reader
        least, most = sizes.min(), sizes.max()
        samples = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        return (
            f"{samples} samples of {reader.features:,} features, {reader.dtype}, read in "
            f"{len(reader.blocks):,} blocks"
        )


@final
@dataclass(frozen=True)
class FromSource(OfOneProcess):
    """The layout of samples that are read block by block because they do not fit into memory."""

    data: Source
    length: int
    in_memory = False

    def sketch(self):
        reader = self.data.reader
        parts, places = [], []
        for own in reader.groups:
            shape = len(own), int(reader.sizes[own].max()), reader.features
            counts = reader.sizes[own].astype(reader.dtype)
            shapes = sample_shapes(shape, reader.dtype, reader.kind)
            parts.append(eqx.tree_at(lambda samples: samples.count, shapes, counts))
            places.append(np.asarray(own, np.int32))
        if len(parts) == 1:
            return parts[0]
        return Buckets(tuple(parts), tuple(places), tuple(map(len, places)))

    def identity(self):
        return self.data.reader.digest()

    def take(self, indices):
        return Source(self.data.reader.subset(np.asarray(indices) % self.length))

    def mapped(self, function, *, complete=False):
        return Source(self.data.reader.mapped(function, complete))

    def check_backend(self, backend):
        if backend.apart or not backend.gathers:
            raise ValueError(
                "backend: wanted vmap() or chunked(size) for clients of Clients.from_source, whose "
                f"blocks go to one device, got {backend!r}"
            )

    def check_in_memory(self, what):
        raise ValueError(
            f"clients: wanted data in memory for {what}, as of Clients.from_samples, got those of "
            "Clients.from_source, which fit reads block by block"
        )


def source_of(
    source: TableSequence,
    counts: Any,
    bucket: float | None,
    block_bytes: int,
    states: Any,
    kind: type[SampleRows],
) -> Source:
    """What reads a sequence of clients; arguments as for `Clients.from_source`."""
    check_bucket(bucket)
    check_count("block_bytes", block_bytes)
    folder = None if states is None else checked_path("states", states)
    if folder is not None and not folder.is_dir():
        raise refuse("states", "a folder that is there", states)
    sizes = sample_counts(source, counts)
    return Source(Reader(source, sizes, bucket, block_bytes, folder, kind))


def sample_counts(source: Any, counts: Any) -> Int[np.ndarray, " clients"]:
    """The clients' numbers of samples: given, or found by accessing each client once.

    Raises:
        ValueError: if `source` is not a sequence of clients, or the counts do not match it.
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


def read_ahead(reader: Reader, numbers: Sequence[int]) -> Iterator[tuple[ClientBlock, Any]]:
    """Iterate over blocks with their samples and counts; reads the next one while one is in use.

    Finish with a block before requesting the next, whose samples overwrite it.

    Raises:
        ValueError: as `Reader.read`, or if a file changed while its block was in use.
    """
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(reader.read, numbers[0], 0)
        for position, number in enumerate(numbers):
            found = ahead.result()
            if position + 1 < len(numbers):
                ahead = pool.submit(reader.read, numbers[position + 1], (position + 1) % 2)
            yield reader.blocks[number], found
            # Views of a memory map would otherwise stay in memory, block after block.
            release(found[0])
            reader.check(number)
