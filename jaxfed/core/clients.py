"""Clients: who takes part, with what data and which weight."""

import abc
import os
from collections.abc import Sequence
from typing import Any, Literal, Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from jaxfed.core.backend import Backend, shard
from jaxfed.core.buckets import (
    Buckets,
    grouped,
    in_order,
    is_buckets,
    layout_of,
    over_parts,
    parts_of,
    take,
)
from jaxfed.core.checks import (
    check_count,
    check_instance,
    check_number,
    checked_path,
    checked_weights,
    host_array,
    is_list,
    is_real,
    is_whole,
    refuse,
    shown,
)
from jaxfed.core.described import is_known
from jaxfed.core.layout import Layout, own_rows, spread
from jaxfed.core.processes import is_here, watched
from jaxfed.core.source import Reader, Source, check_in_memory, is_source, sizes_of, sketched
from jaxfed.linalg import Moment


class Ragged(eqx.Module):
    """Clients' data, filled up along the axes in which clients differ."""

    @property
    @abc.abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """What all clients are filled up to."""

    @abc.abstractmethod
    def filled(self, lengths: tuple[int, ...]) -> Self:
        """The same data of ALL clients, filled up to these lengths, none of them smaller."""


@final
class Samples(Ragged):
    """One client's samples as rows, padded with zero rows up to the longest client.

    With a leading client axis on both fields it holds all clients.
    """

    values: Float[Array, "*clients samples features"]
    count: Float[Array, "*clients"]

    @property
    def mask(self) -> Float[Array, "*clients samples"]:
        """1 for a real row, 0 for padding."""
        rows = jnp.arange(self.values.shape[-2], dtype=self.count.dtype)
        return (rows < self.count[..., None]).astype(self.values.dtype)

    def only(self, samples: int | Int[Array, ""]) -> Self:
        """The first samples, in arrays of the same shapes."""
        count = jnp.minimum(self.count, samples).astype(self.count.dtype)
        fewer = type(self)(self.values, count)
        return type(self)(jnp.where(fewer.mask[..., None] > 0, self.values, 0), count)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The longest client's number of samples."""
        return (self.values.shape[-2],)

    def filled(self, lengths: tuple[int, ...]) -> Self:
        """With more rows of zeros."""
        return type(self)(widened(self.values, {-2: lengths[0]}), self.count)

    def __repr__(self) -> str:
        if not is_known(self.count) or not is_known(self.values):
            return eqx.tree_pformat(self)
        least, most = int(np.min(self.count)), int(np.max(self.count))
        samples = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        return f"{samples} samples of {self.values.shape[-1]:,} features, {self.values.dtype}"


class Clients(eqx.Module):
    """All clients: their data (leading axis = clients), ids and aggregation weights.

    Random numbers fold in a client's *id*, so results do not depend on the order of clients or
    on how they are spread over devices. Ids are whole numbers of at least 0 that all differ: two
    clients with one id would draw the same noise, which their difference then has not. Weights sum
    to one over the clients.

    Raises:
        ValueError: for ids that do not differ or are negative, unless they are traced.
    """

    data: PyTree
    ids: Int[Array, " clients"]
    weights: Float[Array, " clients"]
    # Of those that are spread over processes: how many each device has. The arrays have a row for
    # each of these and for what fills up devices.
    blocks: tuple[int, ...] | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        """Refuse ids that do not tell clients apart."""
        check_ids(self.ids if self.blocks is None else self._real(self.ids))

    @classmethod
    def from_samples(
        cls,
        arrays: Sequence[ArrayLike] | ArrayLike,
        *,
        weights: Literal["equal", "samples"] | ArrayLike = "equal",
        bucket: float | None = None,
    ) -> Self:
        """Clients from their samples.

        Args:
            arrays: a list of `(samples_i, features)` arrays of any lengths, or one
                `(clients, samples, features)` array. Not centred: that is the caller's choice.
            weights: `"equal"` (each client counts the same, as in Shi & Kontar 2024),
                `"samples"` (by number of samples), or one non-negative number per client.
            bucket: None pads all clients to the longest with rows of zeros. A number, at least 1.1,
                puts those of similar length together, in as few arrays as it takes for all rows,
                padding included, to be at most so many times the data. Results are the same;
                each array is compiled for itself.

        Returns:
            The clients, in single precision unless the arrays are double and JAX has 64 bits
            enabled.

        Raises:
            ValueError: for an empty list, a client without samples, samples that are not
                two-dimensional, feature counts that differ, data that are not real floating
                point numbers or not finite, and unfit weights. The message names the client. For
                a `bucket` below 1.1.
        """
        if bucket is not None:
            check_number("bucket", bucket, "a number of at least 1.1 or None", lambda x: x >= 1.1)
        if isinstance(arrays, np.ndarray | jax.Array) and arrays.ndim == 3:
            values = checked_array(arrays, "arrays")
            if 0 in values.shape:
                raise ValueError(f"arrays: no axis may be empty, got shape {values.shape}")
            sizes = np.full(values.shape[0], values.shape[1])
            data = Samples(values, jnp.asarray(sizes.astype(values.dtype)))
        else:
            if not is_list(arrays):
                raise ValueError(
                    "arrays: wanted a list of (samples, features) arrays or one (clients, "
                    f"samples, features) array, got {shown(arrays)}"
                )
            if len(arrays) == 0:
                raise ValueError("arrays: at least one client is needed, got an empty list")
            tables = [checked_array(array, f"arrays[{i}]") for i, array in enumerate(arrays)]
            check_tables("arrays", tables, "client", 0, "samples", "features")
            sizes = np.asarray([len(table) for table in tables])
            data = _in_buckets(tables, sizes, bucket)
        dtype = jax.tree.leaves(data)[0].dtype
        shares = _shares(weights, len(sizes), sizes, dtype)
        return cls(data, jnp.asarray(np.arange(len(sizes), dtype=np.int32)), shares)

    @classmethod
    def from_source(
        cls,
        source: Sequence[ArrayLike],
        *,
        weights: Literal["equal", "samples"] | ArrayLike = "equal",
        counts: Sequence[int] | None = None,
        bucket: float | None = 1.5,
        block_bytes: int = 2**28,
        states: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Clients whose samples are read when they are needed, block by block: for `fit` alone.

        Two blocks are in memory at any time: one that is computed with, and the next one, which a
        thread reads meanwhile. Each round reads everybody who takes part.

        Args:
            source: `len(source)` clients, of which `source[i]` gives one's samples,
                `(samples_i, features)`: a memory map `(clients, samples, features)`, a list of
                them, `jaxfed.data.NpyFolder`, `jaxfed.data.ParquetGroups`, or anything else that
                can do this from another thread. It must not change.
            weights: as in `from_samples`.
            counts: the clients' numbers of samples. Without, each client is looked at once, for
                which a sequence may have to read it, unless it has `counts` of its own.
            bucket: as in `from_samples`.
            block_bytes: about how large a block is, at least one client.
            states: a folder for what clients keep between rounds, where memory does not hold it
                either; the files are gone when nobody needs them. None for memory.

        Raises:
            ValueError: for what is no sequence of such samples, counts or weights that do not fit,
                and as in `from_samples`. Whether samples are finite is not looked at: messages are.
        """
        if bucket is not None:
            check_number("bucket", bucket, "a number of at least 1.1 or None", lambda x: x >= 1.1)
        check_count("block_bytes", block_bytes)
        folder = None if states is None else checked_path("states", states)
        if folder is not None and not folder.is_dir():
            raise refuse("states", "a folder that is there", states)
        sizes = sizes_of(source, counts)
        data = Source.of(Reader(source, sizes, bucket, block_bytes, folder))
        shares = _shares(weights, len(sizes), sizes, data.reader.dtype)
        return cls(data, jnp.asarray(np.arange(len(sizes), dtype=np.int32)), shares)

    @classmethod
    def from_moments(
        cls,
        matrices: Float[ArrayLike, "clients features features"],
        *,
        counts: Sequence[int] | None = None,
        weights: Literal["equal", "samples"] | ArrayLike = "equal",
    ) -> Self:
        """Clients from their second moments `S_i = Y_iᵀ Y_i / n_i` alone.

        Args:
            matrices: symmetric positive semi-definite matrices, one per client.
            counts: numbers of samples behind them; only needed for `weights="samples"`.
            weights: as in `from_samples`.

        Raises:
            ValueError: if the matrices are not `(clients, features, features)`, not finite or
                not symmetric, or the weights do not fit.
        """
        values = checked_array(matrices, "matrices")
        if values.ndim != 3 or values.shape[1] != values.shape[2] or 0 in values.shape:
            raise ValueError(
                f"matrices: wanted shape (clients, features, features), got {values.shape}"
            )
        if not _traced(values):
            symmetric = np.asarray(values)
            slack = 1e-4 * np.abs(symmetric).max(initial=1e-30)
            if np.abs(symmetric - symmetric.swapaxes(1, 2)).max() > slack:
                raise ValueError("matrices: a second moment is symmetric, these are not")
        if counts is None and isinstance(weights, str) and weights == "samples":
            raise ValueError("counts: weights='samples' needs the numbers of samples")
        sizes = np.ones(len(values)) if counts is None else _checked_counts(counts, len(values))
        moments = jax.vmap(Moment.from_dense)(values, jnp.asarray(sizes.astype(values.dtype)))
        shares = _shares(weights, len(sizes), sizes, values.dtype)
        return cls(moments, jnp.asarray(np.arange(len(sizes), dtype=np.int32)), shares)

    @classmethod
    @watched
    def from_process_local(
        cls,
        own: "Clients",
        *,
        backend: Backend | None = None,
        ids: Sequence[int] | None = None,
        weights: Literal["equal", "samples"] | ArrayLike = "equal",
    ) -> "Clients":
        """The clients of all JAX processes, of which each gives its own and keeps their data.

        All processes call this together, then run `fit`, `rollout` or `grid` on what they get, with
        the same arguments and the same backend. Data stay where they are: processes exchange
        shapes, ids and weights. Results are those of one process that has all clients, in the
        order of the processes.

        Clients' results stay in their processes too: arrays with a leading axis of clients, such as
        `solution.result.local`, lie across processes, with rows of weight 0 wherever a device has
        fewer clients than another. `own` picks out those of this process.

        Args:
            own: this process's clients, made by any constructor; at least one. What they weigh and
                their ids are not taken over.
            backend: that of the runs, a `jf.backend.shard(...)`; by default over all devices.
            ids: of this process's clients; by default they are counted through all processes.
            weights: `"equal"`, `"samples"` (by number of samples), or one non-negative number per
                client of this process, of any scale that is the same in all.

        Returns:
            Clients of the same kind: `len` is the number of all.

        Raises:
            ValueError: in every process, if one of them refuses its arguments, or their clients
                differ in kind, type, features or entities.
            jaxfed.ProcessError: if another process has ended.
        """
        del cls
        backend = shard() if backend is None else backend
        check_instance("backend", backend, Backend, "jaxfed.backend.shard(...)")
        if (sharding := backend.sharding) is None:
            raise refuse("backend", "jaxfed.backend.shard(...)", backend)

        def given() -> tuple[Clients, Array | None]:
            check_instance("own", own, Clients, "this process's jaxfed.Clients")
            if own.blocks is not None or _traced(own.ids):
                raise refuse("own", "clients of this process alone, not traced", own)
            if is_buckets(own.data) or is_source(own.data):
                raise refuse("own", "clients whose samples are in one array, without buckets", own)
            return own, own.data.count if isinstance(own.data, Samples | Moment) else None

        return type(own)(*spread(given, sharding, ids, weights))

    def own(self, tree: PyTree) -> PyTree[np.ndarray]:
        """The parts of this process's clients, of arrays with a leading axis of clients.

        Clients of one process have them all. All processes call this together.

        Args:
            tree: such as `solution.result.local` of a run of these clients.

        Returns:
            NumPy arrays, leading axis = this process's clients, in the order in which they were
            given to `from_process_local`.

        Raises:
            ValueError: if an array has another leading axis.
        """
        like = None if self.blocks is None else jax.tree.leaves(self.data)[0]
        return jax.tree.map(lambda leaf: own_rows(leaf, like, self.layout), tree)

    @property
    def layout(self) -> Layout:
        """Which rows of the arrays are clients."""
        rows = self.ids.shape[-1]
        blocks = (rows,) if self.blocks is None else self.blocks
        return Layout(blocks, rows // len(blocks))

    def _real(self, array: Array) -> Array:
        return array[..., self.layout.rows]

    def __len__(self) -> int:
        return self.ids.shape[-1] if self.blocks is None else sum(self.blocks)

    def __repr__(self) -> str:
        if not is_known(self.ids):
            return eqx.tree_pformat(self)
        return f"{type(self).__name__}({len(self):,} clients: {self.data!r})"

    @property
    def features(self) -> int:
        """Number of features of the samples or moments."""
        return jax.tree.leaves(self.parts[0])[0].shape[-1]

    @property
    def parts(self) -> tuple[PyTree, ...]:
        """The data as rectangular arrays: one tree, or one a bucket, the longest clients first.

        Of a source they are the shapes, and the true numbers of samples.
        """
        return parts_of(self.sketch().data)

    def sketch(self) -> Self:
        """The same clients, with shapes in place of samples that are in no memory."""
        if not is_source(self.data):
            return self
        return eqx.tree_at(lambda c: c.data, self, sketched(self.data, Samples))

    @property
    def counts(self) -> Float[Array, " clients"]:
        """Numbers of samples."""
        counts = over_parts(lambda part: part.count, self.sketch().data)
        return in_order(layout_of(counts), parts_of(counts))

    def unbucketed(self) -> Self:
        """The same clients with all samples in one array, padded to the longest client."""
        check_in_memory("unbucketed", self)
        if not is_buckets(self.data):
            return self
        longest = self.parts[0].values.shape[-2]

        def whole(part: Samples) -> Samples:
            missing = longest - part.values.shape[-2]
            return Samples(jnp.pad(part.values, ((0, 0), (0, missing), (0, 0))), part.count)

        data = over_parts(whole, self.data)
        return eqx.tree_at(lambda c: c.data, self, in_order(data, data.parts))

    def take(self, indices: Int[ArrayLike, " chosen"]) -> Self:
        """The clients at these positions, in this order, with their ids; weights sum to one.

        Raises:
            ValueError: if positions that are not traced are not those of clients, or are traced and
                the clients are in buckets, and for clients of several processes.
        """
        if self.blocks is not None:
            raise refuse("take", "clients of one process, of which it takes some", self)
        if not _traced(indices):
            indices = _checked_positions(indices, len(self))
        if is_source(self.data):
            places = np.asarray(indices) % len(self)
            data = Source.of(self.data.reader.taken(places))
        else:
            data = take(self.data, indices)
        ids, weights = (x[jnp.asarray(indices)] for x in (self.ids, self.weights))
        # Not by the constructor: who is taken twice is refused where it would matter.
        chosen = data, ids, weights / weights.sum()
        return eqx.tree_at(lambda c: (c.data, c.ids, c.weights), self, chosen)

    def restrict(
        self,
        *,
        clients: int | Int[Array, ""] | None = None,
        samples: int | Int[Array, ""] | None = None,
    ) -> Self:
        """The first clients with their first samples, in arrays of the same shapes.

        Samples left out become zero rows that do not count, and clients left out keep their data
        at weight 0: a run's shared part, the remaining clients' local parts and its history are
        those of a run without them. Both numbers may be traced, so that runs with different
        numbers are one compiled function; `take` makes smaller arrays instead.

        Args:
            clients: how many clients remain; all by default.
            samples: how many samples of each remain, where it has as many; all by default.

        Returns:
            The clients; weights sum to one.

        Raises:
            ValueError: if a number that is not traced is not whole, not positive or more than
                there are, or `samples` is given and the clients hold no samples.
        """
        data, weights = self.data, self.weights
        if clients is not None:
            _check_part("clients", clients, len(self))
            weights = jnp.where(self.layout.numbers < clients, weights, 0)
            weights = weights / weights.sum()
        if samples is not None:
            if not isinstance(self.parts[0], Samples):
                raise ValueError(
                    "samples: wanted clients made from samples for this, got clients that hold "
                    f"{type(self.parts[0]).__name__}"
                )
            check_in_memory("restrict(samples=...)", self)
            _check_part("samples", samples, self.parts[0].values.shape[-2])
            data = over_parts(lambda part: part.only(samples), data)
        return type(self)(data, self.ids, weights, self.blocks)


def check_ids(ids: Int[Array, "*data_sets clients"]) -> None:
    """Refuse ids that do not tell clients apart.

    Raises:
        ValueError: for the first id that is negative or occurs twice among the clients of one data
            set; nothing is known of traced ones, or of those of other processes.
    """
    if not isinstance(ids, jax.Array | np.ndarray) or _traced(ids):
        return
    if isinstance(ids, jax.Array) and not is_here(ids):
        return
    for own in np.asarray(ids).reshape(-1, ids.shape[-1]):
        values, counts = np.unique(own, return_counts=True)
        wrong = values[(counts > 1) | (values < 0)]
        if len(wrong):
            raise ValueError(
                "clients: wanted ids that differ, of at least 0, since random numbers are drawn by "
                f"them, got {wrong[0]} {'twice' if wrong[0] >= 0 else ''}".rstrip()
            )


def _in_buckets(
    tables: Sequence[Array], sizes: Int[np.ndarray, " clients"], bucket: float | None
) -> Samples | Buckets:
    """Clients' samples in one array, or in several if that keeps padding within a factor."""
    groups = [np.arange(len(sizes))] if bucket is None else grouped(sizes, float(bucket))
    parts = []
    for own in groups:
        values = padded([tables[int(place)] for place in own])
        # By NumPy: JAX would compile the conversion.
        parts.append(Samples(values, jnp.asarray(sizes[own].astype(values.dtype))))
    if len(parts) == 1:
        return parts[0]
    places = tuple(jnp.asarray(own, jnp.int32) for own in groups)
    return Buckets(tuple(parts), places, tuple(map(len, groups)))


def _check_part(name: str, number: object, most: int) -> None:
    if _traced(number):
        return
    if isinstance(number, jax.Array | np.ndarray) and jnp.issubdtype(number.dtype, jnp.integer):
        number = np.asarray(number)[()]
    if not is_whole(number) or not 1 <= number <= most:  # pyright: ignore[reportOperatorIssue]
        raise refuse(name, f"a whole number from 1 to {most}", number)


def _checked_counts(counts: object, clients: int) -> np.ndarray:
    wanted = f"{clients} positive numbers"
    sizes = host_array("counts", counts, wanted)
    if not is_real(sizes.dtype) or sizes.shape != (clients,):
        raise refuse("counts", wanted, counts)
    if not (np.isfinite(sizes) & (sizes > 0)).all():
        raise refuse("counts", wanted, counts)
    return sizes


def _checked_positions(indices: object, clients: int) -> np.ndarray:
    wanted = f"a list of positions from 0 to {clients - 1}"
    places = host_array("indices", indices, wanted)
    if places.dtype.kind not in "iu" or places.ndim != 1 or not places.size:
        raise refuse("indices", wanted, indices)
    if places.min() < -clients or places.max() >= clients:
        raise refuse("indices", wanted, places.tolist())
    return places


def _traced(value: object) -> bool:
    return isinstance(value, Tracer)


def checked_array(array: ArrayLike, name: str) -> Array:
    """The array in a floating type of JAX, refused if it is not real, floating and finite."""
    if not isinstance(array, jax.Array):
        array = host_array(name, array, "real floating point numbers (float32 or float64)")
        if array.dtype == np.float64:
            # Before the check below: what is too large for single precision becomes infinite.
            with np.errstate(over="ignore"):
                array = array.astype(jax.dtypes.canonicalize_dtype(np.float64))
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 4:
        raise ValueError(
            f"{name}: wanted real floating point numbers (float32 or float64), got {array.dtype}; "
            "convert with .astype(numpy.float32)"
        )
    if not _traced(array):
        finite = np.isfinite(np.asarray(array))
        if not finite.all():
            where = tuple(int(index) for index in np.argwhere(~finite)[0])
            raise ValueError(f"{name}: NaN or infinite value at index {where}")
    return jnp.asarray(array)


def check_tables(name: str, tables: Sequence[Any], owner: str, own: int, *axes: str) -> None:
    """Refuse tables that are no tables, are empty or do not go together.

    Args:
        name: of the argument that they are.
        tables: arrays, dense or sparse.
        owner: what has one of them.
        own: the axis whose length may differ.
        axes: what both axes are, in the plural.

    Raises:
        ValueError: as said above.
    """
    same = axes[1 - own]
    for i, table in enumerate(tables):
        if table.ndim != 2:
            raise ValueError(f"{name}[{i}]: wanted shape ({', '.join(axes)}), got {table.shape}")
        if table.shape[own] == 0:
            raise ValueError(
                f"{name}[{i}]: a {owner} needs at least one {_one(axes[own])}, got none"
            )
        if table.shape[1 - own] == 0:
            raise ValueError(f"{name}[{i}]: at least one {_one(same)} is needed, got none")
        if table.shape[1 - own] != tables[0].shape[1 - own]:
            raise ValueError(
                f"{name}[{i}]: has {table.shape[1 - own]} {same} where {name}[0] has "
                f"{tables[0].shape[1 - own]}; all {owner}s need the same {same}"
            )
        if table.dtype != tables[0].dtype:
            raise ValueError(f"{name}[{i}]: is {table.dtype} where {name}[0] is {tables[0].dtype}")


def _one(plural: str) -> str:
    return plural[:-3] + "y" if plural.endswith("ies") else plural[:-1]


def widened(array: Array, lengths: dict[int, int]) -> Array:
    """An array with zeros up to other lengths of some axes, each counted from the last."""
    more = [(0, 0)] * array.ndim
    for axis, length in lengths.items():
        more[axis] = (0, length - array.shape[axis])
    return jnp.pad(array, more) if any(after for _, after in more) else array


def padded(tables: Sequence[Array]) -> Float[Array, "tables rows columns"]:
    """Tables as one array, filled with zeros up to the longest and the widest."""
    rows, columns = (max(table.shape[axis] for table in tables) for axis in (0, 1))
    if any(_traced(table) for table in tables):
        missing = [((0, rows - len(x)), (0, columns - x.shape[1])) for x in tables]
        return jnp.stack([jnp.pad(x, width) for x, width in zip(tables, missing, strict=True)])
    # Filled on the host: one device operation instead of one (and one compilation) per length.
    block = np.zeros((len(tables), rows, columns), tables[0].dtype)
    for part, table in zip(block, tables, strict=True):
        part[: table.shape[0], : table.shape[1]] = table
    return jnp.asarray(block)


def _shares(
    weights: Literal["equal", "samples"] | ArrayLike, clients: int, sizes: np.ndarray, dtype
) -> Float[Array, " clients"]:
    if isinstance(weights, str):
        if weights not in ("equal", "samples"):
            raise ValueError(f"weights: wanted 'equal', 'samples' or numbers, got {weights!r}")
        raw = np.ones(clients) if weights == "equal" else np.asarray(sizes, float)
        return jnp.asarray((raw / raw.sum()).astype(dtype))
    if _traced(weights):
        return jnp.asarray(weights, dtype) / jnp.sum(jnp.asarray(weights, dtype))
    raw = checked_weights(weights, clients)
    if raw.sum() <= 0:
        raise ValueError("weights: wanted finite, non-negative numbers, not all of them zero")
    return jnp.asarray((raw / raw.sum()).astype(dtype))
