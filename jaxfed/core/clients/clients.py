"""`Clients` holds the clients' data, ids and weights."""

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
    checked_counts,
    checked_floats,
    checked_positions,
    is_traced,
    shares_of,
)
from jaxfed.core.clients.layout import Layout, Padded
from jaxfed.core.clients.mapped import TableSequence
from jaxfed.core.clients.samples import at_least_single, in_buckets, kind_of
from jaxfed.core.clients.source import FromSource, Reader, Source, sample_counts
from jaxfed.core.clients.spread import Spread, spread
from jaxfed.core.common.buckets import Buckets, in_order, layout_of, parts_of
from jaxfed.core.common.printing import is_known
from jaxfed.core.common.processes import watched
from jaxfed.linalg import Moment


class Clients(eqx.Module):
    """All clients: their data (leading axis = clients), ids and aggregation weights.

    Random numbers fold in a client's *id*, so results do not depend on the order of clients or on
    how they are spread over devices. Ids are unique non-negative integers: two clients with the
    same id would draw the same noise, which cancels in their difference. Weights sum to one over
    the clients.

    Raises:
        ValueError: if ids are repeated or negative, unless they are traced.
    """

    data: PyTree
    ids: Int[Array, " clients"]
    weights: Float[Array, " clients"]
    # For clients spread over processes: the number of clients per device, without padding.
    blocks: tuple[int, ...] | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        """Refuse repeated or negative ids."""
        self.check_ids()

    def check_ids(self) -> None:
        """Refuse repeated or negative ids, unless they are unknown.

        Raises:
            ValueError: if ids are repeated or negative.
        """
        # Padding rows repeat the ids of other rows.
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
        """Create clients from their samples.

        Args:
            arrays: a list of `(samples_i, features)` arrays of any lengths, or one
                `(clients, samples, features)` array, not centred; none for a client of weight 0.
            weights: `"equal"` (each client counts the same, as in Shi & Kontar 2024), `"samples"`
                (by number of samples), or one non-negative number per client.
            bucket: None pads all clients with rows of zeros to the longest. A number of at least
                1.1 groups clients of similar length into as few arrays as keep the total number of
                rows, with padding, within this factor of the data. Results are the same; each array
                is compiled separately.
            missing: `"refuse"` refuses NaN; `"mask"` treats NaN as an entry that was not observed.
                `jaxfed.preprocess.Impute` completes such samples for all algorithms.

        Returns:
            The clients, in double precision if the arrays are and JAX has 64 bits enabled, in
            bfloat16 if the arrays are, else in single precision. With bfloat16, samples take half
            the memory and time to read, and everything else is in single precision.

        Raises:
            ValueError: if there are no clients, a client has no samples, samples are not
                two-dimensional, feature counts differ, data are not real, floating-point and
                finite, a sample has no observed entry, or the weights or `bucket` are unsuitable.
                The message names the client.
        """
        kind = kind_of(missing)
        checked = partial(checked_floats, half=True, missing=missing == "mask")
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
            check_tables("arrays", tables, "client", 0, "samples", "features", empty=True)
            sizes = np.asarray([len(table) for table in tables])
            data = in_buckets(tables, sizes, bucket, kind)
        dtype = at_least_single(jax.tree.leaves(data)[0].dtype)
        shares = shares_of(weights, len(sizes), sizes, dtype)
        return cls(data, jnp.asarray(np.arange(len(sizes), dtype=np.int32)), shares)

    @classmethod
    def from_source(
        cls,
        source: TableSequence,
        *,
        weights: Literal["equal", "samples"] | ArrayLike | Sequence[float] = "equal",
        counts: Sequence[int] | None = None,
        bucket: float | None = 1.5,
        block_bytes: int = 2**28,
        states: str | os.PathLike[str] | None = None,
        missing: Literal["refuse", "mask"] = "refuse",
    ) -> Self:
        """Create clients whose samples are read block by block, when needed; only for `fit`.

        Two blocks are in memory at any time: the one in use, and the next one, which a thread reads
        meanwhile. Each round reads the samples of all participants.

        Args:
            source: a sequence in which `source[i]` is one client's samples,
                `(samples_i, features)`: a memory map `(clients, samples, features)`, a list of
                memory maps, `jaxfed.data.NpyFolder`, `jaxfed.data.ParquetGroups`, or any other
                sequence that can be read from another thread. It must not change; a run refuses
                files that changed.
            weights: as in `from_samples`.
            counts: the clients' numbers of samples. By default the `counts` of the sequence, or
                else each client is accessed once, which may mean reading it.
            bucket: as in `from_samples`.
            block_bytes: approximate size of a block, which has at least one client.
            states: a folder for what clients keep between rounds, if it does not fit in memory
                either; its files are deleted after use. None keeps it in memory.
            missing: as in `from_samples`.

        Raises:
            ValueError: if `source` is not such a sequence, counts or weights are unsuitable, or as
                in `from_samples`. Samples are not checked for NaN or infinity, but messages are.
        """
        check_bucket(bucket)
        check_count("block_bytes", block_bytes)
        folder = None if states is None else checked_path("states", states)
        if folder is not None and not folder.is_dir():
            raise refuse("states", "a folder that is there", states)
        sizes = sample_counts(source, counts)
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
        """Create clients from their second moments `S_i = Y_iᵀ Y_i / n_i` alone.

        Args:
            matrices: symmetric positive semi-definite matrices, one per client.
            counts: numbers of samples, by default 1, for `weights="samples"` and likelihoods.
            weights: as in `from_samples`.

        Raises:
            ValueError: if the matrices are not `(clients, features, features)`, finite and
                symmetric, or the weights are unsuitable.
        """
        values = checked_floats(matrices, "matrices")
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
        """Combine the clients of all JAX processes, each of which keeps its own data.

        All processes call this together, then call `fit`, `rollout` or `grid` with the result, the
        same arguments and the same backend. Processes exchange only shapes, ids and weights.
        Results equal those of one process that has all clients in the order of the processes.

        Clients' results stay in their processes too: arrays with a leading axis of clients, such as
        `solution.result.local`, are distributed, with padding rows of weight 0 where devices have
        fewer clients than others. `own` extracts those of this process.

        Args:
            own: this process's clients, made by any constructor; at least one. Their weights and
                ids are ignored.
            backend: the backend of the runs, a `jf.backend.shard(...)`; over all devices by
                default.
            ids: ids of this process's clients; by default they are numbered across processes.
            weights: `"equal"`, `"samples"` (by number of samples), or one non-negative number per
                client of this process, on a scale common to all processes.

        Returns:
            Clients of the same kind, whose `len` is the number over all processes.

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

        def given() -> Clients:
            check_instance("own", own, Clients, "this process's jaxfed.Clients")
            if is_traced(own.ids) or not own.layout.in_one_process:
                raise refuse("own", "clients of this process alone, not traced", own)
            if not own.layout.in_memory or len(own.parts) > 1:
                raise refuse("own", "clients whose samples are in one array, without buckets", own)
            return own

        return type(own)(*spread(given, sharding, ids, weights))

    def own(self, tree: PyTree) -> PyTree[np.ndarray]:
        """Extract this process's clients from arrays with a leading axis of clients.

        If there is one process, these are all clients. All processes call this together.

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
        """The data as rectangular arrays: one tree, or one per bucket, longest clients first.

        For a source, these are shapes, with the true numbers of samples.
        """
        return self.layout.parts

    def sketch(self) -> Self:
        """These clients, with shapes in place of samples that are not in memory."""
        return eqx.tree_at(lambda c: c.data, self, self.layout.sketch())

    def identity(self) -> Self:
        """These clients, with a digest in place of samples that are not in memory."""
        return eqx.tree_at(lambda c: c.data, self, self.layout.identity())

    @property
    def counts(self) -> Float[Array, " clients"] | Float[np.ndarray, " clients"]:
        """Numbers of samples."""
        counts = self.layout.over_parts(lambda part: part.count)
        return in_order(layout_of(counts), parts_of(counts))

    def unbucketed(self) -> Self:
        """These clients with all samples in one array, padded to the longest client."""
        self.layout.check_in_memory("unbucketed")
        if len(self.parts) == 1:
            return self
        lengths = self.parts[0].lengths
        data = self.layout.over_parts(lambda part: part.filled(lengths))
        data = in_order(layout_of(data), parts_of(data))
        return eqx.tree_at(lambda c: c.data, self, data)

    def take(self, indices: Int[ArrayLike, " chosen"] | Sequence[int]) -> Self:
        """Select clients by position, in this order, with their ids; weights sum to one.

        Raises:
            ValueError: if a known position is out of range, positions are traced and clients are in
                buckets, or clients span several processes.
        """
        known = not is_traced(indices)
        places: Any = checked_positions(indices, len(self)) if known else indices
        data = self.layout.take(places)
        ids, weights = (x[jnp.asarray(places)] for x in (self.ids, self.weights))
        # Bypass the constructor, which refuses equal ids: a client may be taken twice, as long as
        # no run draws random numbers by id.
        chosen = data, ids, weights / weights.sum()
        return eqx.tree_at(lambda c: (c.data, c.ids, c.weights), self, chosen)

    def restrict(
        self,
        *,
        clients: int | Int[Array, ""] | None = None,
        samples: int | Int[Array, ""] | None = None,
    ) -> Self:
        """Restrict to the first clients and their first samples, in arrays of the same shapes.

        Excluded samples become zero rows that do not count, and excluded clients keep their data at
        weight 0: a run's shared part, its history and the other clients' local parts equal those of
        a run without them. Both numbers may be traced, so that runs with different numbers share
        one compiled function; `take` makes smaller arrays instead.

        Args:
            clients: number of clients to keep; all by default.
            samples: largest number of samples to keep of each client; all by default.

        Returns:
            The clients; weights sum to one.

        Raises:
            ValueError: if a known number is not an integer from 1 to the number available, or
                `samples` is given and the clients hold no samples.
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
