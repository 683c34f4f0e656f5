"""`Clients` holds the clients' data, ids and weights."""

import os
from collections.abc import Sequence
from typing import Any, Literal, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PyTree, Real

from jaxfed._checks import check_instance, refuse
from jaxfed.core.backends.backend import Backend
from jaxfed.core.backends.devices import shard
from jaxfed.core.clients.bucketed import Bucketed
from jaxfed.core.clients.checks import (
    check_bucket,
    check_ids,
    check_part,
    checked_positions,
    is_traced,
    shares_of,
)
from jaxfed.core.clients.frames import split_frame
from jaxfed.core.clients.guarantee import Guarantee, note
from jaxfed.core.clients.labelled import LabelledArray
from jaxfed.core.clients.layout import Layout, Padded
from jaxfed.core.clients.mapped import TableSequence
from jaxfed.core.clients.names import NAMELESS, Names, checked_names, named_tables, replace_names
from jaxfed.core.clients.samples import at_least_single, kind_of, moments_of, samples_of
from jaxfed.core.clients.source import FromSource, Source, source_of
from jaxfed.core.clients.sparse import dense_parts
from jaxfed.core.clients.spread import Spread, spread
from jaxfed.core.common.buckets import Buckets, in_order, layout_of, parts_of
from jaxfed.core.common.printing import is_known
from jaxfed.core.common.processes import watched


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
    guarantee: Guarantee | None = eqx.field(static=True, default=None)  # of released moments
    imputed: bool = eqx.field(static=True, default=False)  # whether missing entries were filled in
    # On the host: programs are compiled for clients without names.
    names: Names = eqx.field(static=True, default=NAMELESS)

    def __check_init__(self):
        """Refuse repeated or negative ids."""
        self.check_ids()

    def check_ids(self) -> None:
        """Raise a `ValueError` for repeated or negative ids, unless they are unknown."""
        # Padding rows repeat the ids of other rows.
        check_ids(self.ids if self.blocks is None else self.ids[..., self.layout.rows(len(self))])

    @classmethod
    def from_samples(
        cls,
        arrays: Sequence[Any] | ArrayLike | LabelledArray,
        *,
        names: Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        weights: Literal["equal", "samples"] | ArrayLike | Sequence[float] = "equal",
        bucket: float | None = None,
        missing: Literal["refuse", "mask"] = "refuse",
    ) -> Self:
        """Create clients from their samples.

        Args:
            arrays: a list of `(samples_i, features)` arrays of any lengths, or one
                `(clients, samples, features)` array, not centred, also integers, masked arrays,
                data frames, arrays of xarray or a dataset, each variable a client; no rows for a
                client of weight 0. Or what `jaxfed.data` has read.
            names: the clients' names, distinct texts, which solutions and files keep; by default
                the names of arrays of xarray, if they differ, or the coordinates of clients.
            features: their names; by default the columns of data frames, or the coordinates of the
                last dimension, put in this order.
            weights: `"equal"` (each client counts the same, as in Shi & Kontar 2024), `"samples"`
                (by number of samples), or one non-negative number per client.
            bucket: None pads all clients with rows of zeros to the longest. A number of at least
                1.1 groups clients of similar length into few arrays, whose rows with padding are
                within this factor of the data. Results are the same; each array is compiled.
            missing: `"refuse"` refuses NaN; `"mask"` treats NaN as an entry that was not observed.
                `jaxfed.preprocess.Impute` completes such samples for all algorithms.

        Returns:
            The clients, in double precision if the arrays are and JAX has 64 bits enabled, else in
            single; of bfloat16 arrays, samples stay in it, in half the memory and reading time.

        Raises:
            ValueError: if there are no clients, a client has no samples, samples are not
                two-dimensional, features differ in number or by name, data are not real,
                floating-point and finite, a sample has no observed entry, or the names, weights or
                `bucket` are unsuitable. The message names the client.
        """
        kind = kind_of(missing)
        check_bucket(bucket)
        tables, names, features = named_tables(arrays, names, features)
        data, sizes = samples_of(tables, bucket, kind)
        dtype = at_least_single(jax.tree.leaves(data)[0].dtype)
        return cls._of_sizes(data, sizes, weights, dtype, names, features)

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        *,
        by: str,
        features: Sequence[str] | None = None,
        weights: Literal["equal", "samples"] | ArrayLike | Sequence[float] = "equal",
        bucket: float | None = None,
        missing: Literal["refuse", "mask"] = "refuse",
    ) -> Self:
        """Create clients from one data frame, of which a column names each row's client.

        Args:
            frame: of pandas, polars or pyarrow.
            by: the column of clients, which is no feature; its values become their names, in
                natural order (`site2` before `site10`).
            features: the columns of features; all others by default.
            weights: as in `from_samples`.
            bucket: as in `from_samples`.
            missing: as in `from_samples`.

        Raises:
            ValueError: if there is no such column, a row has no client, a feature does not hold
                numbers, or as in `from_samples`. The message names the column.
        """
        found = split_frame(frame, by, features, missing=missing == "mask")
        options: dict[str, Any] = {"weights": weights, "bucket": bucket, "missing": missing}
        return cls.from_samples(**found, **options)

    @classmethod
    def from_source(
        cls,
        source: TableSequence,
        *,
        names: Sequence[str] | None = None,
        features: Sequence[str] | None = None,
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
            names: the clients' names; by default the `names` of the sequence, if it has some.
            features: the features' names; by default the `features` of the sequence.
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
        data = source_of(source, counts, bucket, block_bytes, states, kind_of(missing))
        sizes = data.reader.sizes
        names = getattr(source, "names", None) if names is None else names
        features = getattr(source, "features", None) if features is None else features
        return cls._of_sizes(data, sizes, weights, data.reader.dtype, names, features)

    @classmethod
    def from_moments(
        cls,
        matrices: Real[ArrayLike, "clients features features"] | Sequence[ArrayLike],
        *,
        names: Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        counts: Sequence[int] | ArrayLike | None = None,
        weights: Literal["equal", "samples"] | ArrayLike | Sequence[float] = "equal",
    ) -> Self:
        """Create clients from their second moments `S_i = Y_iᵀ Y_i / n_i` alone.

        Args:
            matrices: symmetric positive semi-definite matrices, one per client.
            names: the clients' names.
            features: the features' names.
            counts: numbers of samples, or sums of their weights, by default 1, for
                `weights="samples"` and likelihoods.
            weights: as in `from_samples`.

        Raises:
            ValueError: if the matrices are not `(clients, features, features)`, finite and
                symmetric, or the weights are unsuitable.
        """
        if counts is None and isinstance(weights, str) and weights == "samples":
            raise ValueError("counts: weights='samples' needs the numbers of samples")
        moments, sizes = moments_of(matrices, counts)
        return cls._of_sizes(moments, sizes, weights, moments.count.dtype, names, features)

    @classmethod
    def from_sparse_samples(
        cls,
        matrices: Sequence[Any],
        *,
        center: Literal["shared", "local", "none"] = "none",
        names: Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        weights: Literal["equal", "samples"] | ArrayLike | Sequence[float] = "equal",
    ) -> Self:
        """Create clients from sparse matrices of their samples, such as counts of words or genes.

        Clients hold whichever is smaller: their second moments, `(features, features)` each, for
        algorithms that take `from_moments`, or if all have fewer samples than features, dense
        samples; these also where single precision loses squares. Moments are computed in double
        precision from the sparse matrices, which are never dense all at once.

        Args:
            matrices: one `(samples_i, features)` matrix per client: a `scipy.sparse` matrix in any
                format, or a `jax.experimental.sparse.BCOO`.
            center: subtract the mean of all samples (`"shared"`), each client's own (`"local"`), or
                nothing. Zeros stay zeros in the matrices.
            names: the clients' names.
            features: the features' names.
            weights: as in `from_samples`.

        Returns:
            The clients, in double precision if the values are and JAX has 64 bits enabled, else in
            single.

        Raises:
            ValueError: if matrices are not sparse, indices are outside a matrix, or as in
                `from_samples`.
        """
        found = dense_parts(matrices, center)
        options: dict[str, Any] = {"names": names, "features": features, "weights": weights}
        if found.samples is not None:
            return cls.from_samples(found.samples, **options)
        assert found.moments is not None
        return cls.from_moments(found.moments, counts=found.counts, **options)

    @classmethod
    def _of_sizes(
        cls, data: PyTree, sizes: np.ndarray, weights: Any, dtype: Any, names: Any, features: Any
    ) -> Self:
        """Create clients with the numbers of samples `sizes`, numbered from 0."""
        shares = shares_of(weights, len(sizes), sizes, dtype)
        found = cls(data, jnp.asarray(np.arange(len(sizes), dtype=np.int32)), shares)
        names = checked_names("names", names, len(sizes), "client")
        features = checked_names("features", features, found.features, "feature")
        return replace_names(found, Names(names, features))

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

        def check() -> None:
            check_instance("own", own, Clients, "this process's jaxfed.Clients")

        return type(own)(**spread(own, check, sharding, ids, weights)._asdict())

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
        return f"{type(self).__name__}({len(self):,} clients: {self.data!r}{note(self.guarantee)})"

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
        return eqx.tree_at(lambda c: c.data, self, in_order(layout_of(data), parts_of(data)))

    def take(self, indices: Int[ArrayLike, " chosen"] | Sequence[int]) -> Self:
        """Select clients by position, in this order, with their ids; weights sum to one.

        Raises:
            ValueError: if a known position is out of range, positions are traced and clients are in
                buckets, or clients span several processes.
        """
        places: Any = indices if is_traced(indices) else checked_positions(indices, len(self))
        data = self.layout.take(places)
        ids, weights = (x[jnp.asarray(places)] for x in (self.ids, self.weights))
        # Bypass the constructor, which refuses equal ids: a client may be taken twice, as long as
        # no run draws random numbers by id.
        chosen = data, ids, weights / weights.sum()
        found = eqx.tree_at(lambda c: (c.data, c.ids, c.weights), self, chosen)
        return replace_names(found, self.names.take(places))

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
            if not hasattr(type(held := self.parts[0]), "only"):
                wanted = "clients made from samples for this, got clients that hold"
                raise ValueError(f"samples: wanted {wanted} {type(held).__name__}")
            self.layout.check_in_memory("restrict(samples=...)")
            check_part("samples", samples, self.parts[0].values.shape[-2])
            data = self.layout.over_parts(lambda part: part.only(samples))
        return eqx.tree_at(lambda c: (c.data, c.weights), self, (data, weights))
