"""`Clients`: their data, ids and weights."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PyTree

from jaxfed._checks import (
    check_count,
    check_instance,
    checked_path,
    is_list,
    refuse,
    shown,
)
from jaxfed.core.backends.backend import Backend
from jaxfed.core.backends.devices import shard
from jaxfed.core.clients.bucketed import Bucketed
from jaxfed.core.clients.checks import (
    check_bucket,
    check_ids,
    check_part,
    check_tables,
    checked_array,
    checked_counts,
    checked_positions,
    is_traced,
    shares_of,
)
from jaxfed.core.clients.layout import Layout, Padded
from jaxfed.core.clients.mapped import Tables
from jaxfed.core.clients.samples import are_of_samples, at_least_single, in_buckets, kind_of
from jaxfed.core.clients.source import FromSource, Reader, Source, sizes_of
from jaxfed.core.clients.spread import Spread, spread
from jaxfed.core.common.buckets import Buckets, in_order, layout_of, parts_of
from jaxfed.core.common.printing import is_known
from jaxfed.core.common.processes import watched
from jaxfed.linalg import Moment


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
    # Of clients that are spread over processes: how many each device has, without padding.
    blocks: tuple[int, ...] | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        """Refuse ids that do not tell clients apart."""
        self.check_ids()

    def check_ids(self) -> None:
        """Refuse ids that do not tell clients apart, as far as they are known.

        Raises:
            ValueError: for ids that do not differ or are negative.
        """
        # Padding has the ids of other rows.
        check_ids(self.ids if self.blocks is None else self.ids[..., self.layout.rows(len(self))])

    @classmethod
    def from_samples(
        cls,
        arrays: Sequence[ArrayLike] | ArrayLike,
        *,
        weights: Literal["equal", "samples"] | ArrayLike | Sequence[float] = "equal",
        bucket: float | None = None,
        missing: Literal["refuse", "mask"] = "refuse",
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
            missing: what NaN is: refused, or with `"mask"` an entry that was not observed.
                `jaxfed.preprocess.Impute` completes such samples, for all algorithms.

        Returns:
            The clients, in single precision unless the arrays are double and JAX has 64 bits
            enabled, or bfloat16: then the samples stay so, which is half of the memory and of
            what is read, and all else is in single precision.

        Raises:
            ValueError: for an empty list, a client without samples, samples that are not
                two-dimensional, feature counts that differ, data that are not real floating
                point numbers or not finite, a sample without any observed entry, and unfit
                weights. The message names the client. For a `bucket` below 1.1.
        """
        kind = kind_of(missing)
        checked = partial(checked_array, half=True, missing=missing == "mask")
        check_bucket(bucket)
        if isinstance(arrays, np.ndarray | jax.Array) and arrays.ndim == 3:
            values = checked(arrays, "arrays")
            if 0 in values.shape:
                raise ValueError(f"arrays: no axis may be empty, got shape {values.shape}")
            sizes = np.full(values.shape[0], values.shape[1])
            data = kind(values, jnp.asarray(sizes.astype(at_least_single(values.dtype))))
        else:
            if not is_list(arrays):
                raise ValueError(
                    "arrays: wanted a list of (samples, features) arrays or one (clients, "
                    f"samples, features) array, got {shown(arrays)}"
                )
            if len(arrays) == 0:
                raise ValueError("arrays: at least one client is needed, got an empty list")
            tables = [checked(array, f"arrays[{i}]") for i, array in enumerate(arrays)]
            check_tables("arrays", tables, "client", 0, "samples", "features")
            sizes = np.asarray([len(table) for table in tables])
            data = in_buckets(tables, sizes, bucket, kind)
        dtype = at_least_single(jax.tree.leaves(data)[0].dtype)
        shares = shares_of(weights, len(sizes), sizes, dtype)
        return cls(data, jnp.asarray(np.arange(len(sizes), dtype=np.int32)), shares)

    @classmethod
    def from_source(
        cls,
        source: Tables,
        *,
        weights: Literal["equal", "samples"] | ArrayLike | Sequence[float] = "equal",
        counts: Sequence[int] | None = None,
        bucket: float | None = 1.5,
        block_bytes: int = 2**28,
        states: str | os.PathLike[str] | None = None,
        missing: Literal["refuse", "mask"] = "refuse",
    ) -> Self:
        """Clients whose samples are read when they are needed, block by block: for `fit` alone.

        Two blocks are in memory at any time: one that is computed with, and the next one, which a
        thread reads meanwhile. Each round reads everybody who takes part.

        Args:
            source: `len(source)` clients, of which `source[i]` gives one's samples,
                `(samples_i, features)`: a memory map `(clients, samples, features)`, a list of
                them, `jaxfed.data.NpyFolder`, `jaxfed.data.ParquetGroups`, or anything else that
                can do this from another thread. It must not change; a run refuses files that do.
            weights: as in `from_samples`.
            counts: the clients' numbers of samples. Without, each client is looked at once, for
                which a sequence may have to read it, unless it has `counts` of its own.
            bucket: as in `from_samples`.
            block_bytes: about how large a block is, at least one client.
            states: a folder for what clients keep between rounds, where memory does not hold it
                either; the files are gone when nobody needs them. None for memory.
            missing: as in `from_samples`.

        Raises:
            ValueError: for what is no sequence of such samples, counts or weights that do not fit,
                and as in `from_samples`. Whether samples are finite is not looked at: messages are.
        """
        check_bucket(bucket)
        check_count("block_bytes", block_bytes)
        folder = None if states is None else checked_path("states", states)
        if folder is not None and not folder.is_dir():
            raise refuse("states", "a folder that is there", states)
        sizes = sizes_of(source, counts)
        data = Source(Reader(source, sizes, bucket, block_bytes, folder, kind_of(missing)))
        shares = shares_of(weights, len(sizes), sizes, data.reader.dtype)
        return cls(data, jnp.asarray(np.arange(len(sizes), dtype=np.int32)), shares)

    @classmethod
    def from_moments(
        cls,
        matrices: Float[ArrayLike, "clients features features"] | Sequence[ArrayLike],
        *,
        counts: Sequence[int] | None = None,
        weights: Literal["equal", "samples"] | ArrayLike | Sequence[float] = "equal",
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
        if not is_traced(values):
            symmetric = np.asarray(values)
            slack = 1e-4 * np.abs(symmetric).max(initial=1e-30)
            if np.abs(symmetric - symmetric.swapaxes(1, 2)).max() > slack:
                raise ValueError("matrices: a second moment is symmetric, these are not")
        if counts is None and isinstance(weights, str) and weights == "samples":
            raise ValueError("counts: weights='samples' needs the numbers of samples")
        sizes = np.ones(len(values)) if counts is None else checked_counts(counts, len(values))
        moments = jax.vmap(Moment.from_dense)(values, jnp.asarray(sizes.astype(values.dtype)))
        shares = shares_of(weights, len(sizes), sizes, values.dtype)
        return cls(moments, jnp.asarray(np.arange(len(sizes), dtype=np.int32)), shares)

    @classmethod
    @watched
    def from_process_local(
        cls,
        own: "Clients",
        *,
        backend: Backend | None = None,
        ids: Sequence[int] | None = None,
        weights: Literal["equal", "samples"] | ArrayLike | Sequence[float] = "equal",
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
            own: this process's clients, made by any constructor; at least one. Their weights and
                ids are ignored.
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
            if is_traced(own.ids) or not own.layout.in_one_process:
                raise refuse("own", "clients of this process alone, not traced", own)
            if not own.layout.in_memory or len(own.parts) > 1:
                raise refuse("own", "clients whose samples are in one array, without buckets", own)
            return own, own.data.count if are_of_samples(own.data) else None

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
        return jax.tree.map(self.layout.own_rows, tree)

    @property
    def layout(self) -> Layout:
        """How the data are stored."""
        length = self.ids.shape[-1]
        if isinstance(self.data, Buckets):
            return Bucketed(self.data, length)
        if isinstance(self.data, Source):
            return FromSource(self.data, length)
        if self.blocks is not None:
            return Spread(self.data, self.blocks, length)
        return Padded(self.data, length)

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
        return self.layout.parts

    def sketch(self) -> Self:
        """The same clients, with shapes in place of samples that are in no memory."""
        return eqx.tree_at(lambda c: c.data, self, self.layout.sketch())

    def identity(self) -> Self:
        """The same clients, with a digest in place of samples that are in no memory."""
        return eqx.tree_at(lambda c: c.data, self, self.layout.identity())

    @property
    def counts(self) -> Float[Array, " clients"] | Float[np.ndarray, " clients"]:
        """Numbers of samples."""
        counts = self.layout.over_parts(lambda part: part.count)
        return in_order(layout_of(counts), parts_of(counts))

    def unbucketed(self) -> Self:
        """The same clients with all samples in one array, padded to the longest client."""
        self.layout.check_in_memory("unbucketed")
        if len(self.parts) == 1:
            return self
        lengths = self.parts[0].lengths
        data = self.layout.over_parts(lambda part: part.filled(lengths))
        data = in_order(layout_of(data), parts_of(data))
        return eqx.tree_at(lambda c: c.data, self, data)

    def take(self, indices: Int[ArrayLike, " chosen"] | Sequence[int]) -> Self:
        """The clients at these positions, in this order, with their ids; weights sum to one.

        Raises:
            ValueError: if positions that are not traced are not those of clients, or are traced and
                the clients are in buckets, and for clients of several processes.
        """
        known = not is_traced(indices)
        places: Any = checked_positions(indices, len(self)) if known else indices
        data = self.layout.take(places)
        ids, weights = (x[jnp.asarray(places)] for x in (self.ids, self.weights))
        # Not by the constructor, which refuses equal ids: clients may be taken twice, as long as no
        # run draws random numbers by their ids.
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
            check_part("clients", clients, len(self))
            weights = jnp.where(self.layout.numbers < clients, weights, 0)
            weights = weights / weights.sum()
        if samples is not None:
            if not hasattr(type(self.parts[0]), "only"):
                raise ValueError(
                    "samples: wanted clients made from samples for this, got clients that hold "
                    f"{type(self.parts[0]).__name__}"
                )
            self.layout.check_in_memory("restrict(samples=...)")
            check_part("samples", samples, self.parts[0].values.shape[-2])
            data = self.layout.over_parts(lambda part: part.only(samples))
        return type(self)(data, self.ids, weights, self.blocks)
