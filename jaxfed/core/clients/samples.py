"""Clients' samples in one array, complete or with missing entries, padded with zeros."""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, Self, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxfed._checks import check_name, is_list, shown
from jaxfed.core.clients.checks import (
    checked_counts,
    checked_floats,
    checked_moments,
    checked_samples,
    is_traced,
    on_device,
    zeros_to_lend,
)
from jaxfed.core.common.buckets import Buckets, grouped
from jaxfed.core.common.printing import is_known
from jaxfed.linalg import Moment


class Ragged(eqx.Module):
    """Clients' data, padded along the axes in which clients differ."""

    summed_by_index: ClassVar[bool] = False
    """Whether products with the data are sums by index, as for sparse data."""
    factored: ClassVar[bool] = False
    """Whether algorithms factor the data themselves, and not their squares."""

    @property
    @abc.abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """The padded lengths of the axes in which clients differ."""

    @abc.abstractmethod
    def filled(self, lengths: tuple[int, ...]) -> Self:
        """Pad all clients' data to these lengths, which must not be smaller."""


class SampleRows(Ragged):
    """One client's samples as rows, padded with zero rows up to the longest client.

    With a leading client axis on both fields it holds all clients. Computations use the precision
    of `count`: single if the samples are bfloat16.
    """

    values: Float[Array, "*clients samples features"]
    count: Float[Array, "*clients"]

    @property
    @abc.abstractmethod
    def observed(self) -> Bool[Array, "*clients samples features"]:
        """Which entries were observed; False for padding."""

    @final
    @property
    def mask(self) -> Float[Array, "*clients samples"]:
        """1 for real rows, 0 for padding."""
        rows = jnp.arange(self.values.shape[-2], dtype=self.count.dtype)
        return (rows < self.count[..., None]).astype(self.count.dtype)

    @final
    def only(self, samples: int | Int[Array, ""]) -> Self:
        """Keep only the first samples, in arrays of the same shapes."""
        count = jnp.minimum(self.count, samples).astype(self.count.dtype)
        return type(self)(self.values, count).with_values(self.values)

    @final
    def with_values(self, values: Float[Array, "*clients samples features"]) -> Self:
        """Replace the samples, converted to the same type; padding stays zero."""
        # The new values may fill padding rows, as subtracting a mean does; products and sums over
        # all rows rely on zeros there.
        kept = jnp.where(self.mask[..., None] > 0, values, 0)
        return type(self)(kept.astype(self.values.dtype), self.count)

    @final
    def completed(self) -> "Samples":
        """Return the same values as complete samples."""
        return Samples(self.values, self.count)

    @final
    @property
    def lengths(self) -> tuple[int, ...]:
        """The longest client's number of samples."""
        return (self.values.shape[-2],)

    @final
    def filled(self, lengths: tuple[int, ...]) -> Self:
        """Pad with more zero rows."""
        return type(self)(widened(self.values, {-2: lengths[0]}), self.count)

    def __repr__(self) -> str:
        if not is_known(self.count) or not is_known(self.values):
            return eqx.tree_pformat(self)
        least, most = int(np.min(self.count)), int(np.max(self.count))
        samples = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        return f"{samples} samples of {self.values.shape[-1]:,} features, {self.values.dtype}"


@final
class Samples(SampleRows):
    """One client's complete samples."""

    @property
    def observed(self) -> Bool[Array, "*clients samples features"]:
        """All entries of real rows."""
        return jnp.broadcast_to(self.mask[..., None] > 0, self.values.shape)

    @property
    def energy(self) -> Float[Array, "*clients"]:
        """The mean squared norm of a sample."""
        values = self.values.astype(self.count.dtype)
        return jnp.sum(values * values, axis=(-2, -1)) / jnp.maximum(self.count, 1)


@final
class IncompleteSamples(SampleRows):
    """One client's samples, with NaN for entries that were not observed."""

    @property
    def observed(self) -> Bool[Array, "*clients samples features"]:
        """Entries of real rows that are not NaN."""
        return ~jnp.isnan(self.values) & (self.mask[..., None] > 0)

    @property
    def energy(self) -> Float[Array, "*clients"]:
        """The mean square of an observed entry, times the number of features."""
        observed = self.observed
        values = jnp.where(observed, self.values, 0).astype(self.count.dtype)
        entries = jnp.sum(observed, axis=(-2, -1), dtype=self.count.dtype)
        mean = jnp.sum(values * values, axis=(-2, -1)) / jnp.maximum(entries, 1)
        return mean * values.shape[-1]


def kind_of(missing: str) -> type[SampleRows]:
    """Return the type of samples for an argument `missing`.

    Raises:
        ValueError: if it is neither "refuse" nor "mask".
    """
    check_name("missing", missing, ("refuse", "mask"))
    return IncompleteSamples if missing == "mask" else Samples


def check_rows(clients: Any) -> None:
    """Refuse clients that do not hold samples, complete or not.

    Raises:
        ValueError: names what they hold.
    """
    if not all(isinstance(part, SampleRows) for part in clients.parts):
        raise other_data("samples, as of Clients.from_samples or from_source", clients.parts[0])


def check_complete_samples(clients: Any, caller: str) -> None:
    """Refuse clients whose data are not complete samples in memory, for a function of this name.

    Raises:
        ValueError: says so.
    """
    clients.layout.check_in_memory(caller)
    for part in clients.parts:
        if not isinstance(part, Samples):
            raise other_data("samples, as of Clients.from_samples", part)


def other_data(wanted: str, data: PyTree, name: str = "clients") -> ValueError:
    """Return the error for clients that hold other data than wanted; the caller raises it."""
    todo = (
        ", in which entries are missing; jaxfed.preprocess.Impute completes them"
        if isinstance(data, IncompleteSamples)
        else ""
    )
    return ValueError(f"{name}: wanted {wanted}, got data of type {type(data).__name__}{todo}")


def are_of_samples(data: PyTree) -> bool:
    """Whether data are samples or statistics of samples, whose `count` is a number of samples.

    These have an `energy`, the mean squared norm of a sample.
    """
    return hasattr(type(data), "energy")


def known_counts(data: PyTree) -> np.ndarray | None:
    """Return the numbers of samples; None if they are unknown, as in second moments without any."""
    if not are_of_samples(data):
        return None
    counts = np.asarray(data.count, float)
    # Second moments count as those of one sample if nothing else was said.
    return None if isinstance(data, Moment) and np.all(counts == 1) else counts


def sample_shapes(
    shape: tuple[int, ...], dtype: np.dtype, kind: type[SampleRows] = Samples
) -> SampleRows:
    """Return the shapes of samples in at least single precision, without values."""

    def zeros():
        return kind(jnp.zeros(shape, dtype), jnp.zeros(shape[:-2], dtype))

    return jax.eval_shape(zeros)


def samples_of(
    arrays: Any, bucket: float | None, kind: type[SampleRows]
) -> tuple[SampleRows | Buckets, Int[np.ndarray, " clients"]]:
    """The samples of all clients, checked, and their numbers; as for `Clients.from_samples`."""
    missing = kind is IncompleteSamples
    if isinstance(arrays, np.ndarray | jax.Array) and arrays.ndim == 3:
        values = checked_floats(arrays, "arrays", half=True, missing=missing)
        if 0 in values.shape:
            raise ValueError(f"arrays: no axis may be empty, got shape {values.shape}")
        sizes = np.full(values.shape[0], values.shape[1])
        return kind(values, jnp.asarray(sizes.astype(at_least_single(values.dtype)))), sizes
    if not is_list(arrays):
        raise ValueError(
            "arrays: wanted a list of (samples, features) arrays or one (clients, samples, "
            f"features) array, got {shown(arrays)}"
        )
    if len(arrays) == 0:
        raise ValueError("arrays: at least one client is needed, got an empty list")
    for i, table in enumerate(arrays):
        if scipy.sparse.issparse(table):
            todo = "jaxfed.Clients.from_sparse_samples takes those of sparse matrices"
            raise ValueError(f"arrays[{i}]: wanted dense samples, got a sparse matrix; {todo}")
    tables = checked_samples(arrays, "arrays", missing)
    sizes = np.asarray([len(table) for table in tables])
    return in_buckets(tables, sizes, bucket, kind), sizes


def moments_of(matrices: Any, counts: Any) -> tuple[Moment, np.ndarray]:
    """The second moments of all clients, checked, and their numbers of samples, by default 1."""
    values = checked_moments(matrices)
    sizes = np.ones(len(values)) if counts is None else checked_counts(counts, len(values))
    return jax.vmap(Moment.from_dense)(values, jnp.asarray(sizes.astype(values.dtype))), sizes


def in_buckets(
    tables: Sequence[Array | np.ndarray],
    sizes: Int[np.ndarray, " clients"],
    bucket: float | None,
    kind: type[SampleRows] = Samples,
) -> SampleRows | Buckets:
    """Put clients' samples into one array, or into several that limit padding to a factor."""
    groups = [np.arange(len(sizes))] if bucket is None else grouped(sizes, float(bucket))
    parts = []
    for own in groups:
        values = padded([tables[int(place)] for place in own])
        # With NumPy, since JAX would compile the conversion.
        counts = sizes[own].astype(at_least_single(values.dtype))
        parts.append(kind(values, jnp.asarray(counts)))
    if len(parts) == 1:
        return parts[0]
    places = tuple(jnp.asarray(own, jnp.int32) for own in groups)
    return Buckets(tuple(parts), places, tuple(map(len, groups)))


def at_least_single(dtype: DTypeLike) -> np.dtype:
    """Return the precision of computations with samples of a type."""
    return jnp.promote_types(dtype, jnp.float32)


def widened(array: Array, lengths: dict[int, int]) -> Array:
    """Pad an array with zeros to these lengths of axes, which are counted from the last."""
    more = [(0, 0)] * array.ndim
    for axis, length in lengths.items():
        more[axis] = (0, length - array.shape[axis])
    return jnp.pad(array, more) if any(after for _, after in more) else array


def padded(tables: Sequence[Array | np.ndarray]) -> Float[Array, "tables rows columns"]:
    """Stack tables in one array of JAX's precision, padded with zeros to the longest and widest."""
    rows, columns = (max(table.shape[axis] for table in tables) for axis in (0, 1))
    if any(is_traced(table) for table in tables):
        missing = [((0, rows - len(x)), (0, columns - x.shape[1])) for x in tables]
        return jnp.stack([jnp.pad(x, width) for x, width in zip(tables, missing, strict=True)])
    # On the host: one device operation, rather than one, with its compilation, per length.
    dtype = jax.dtypes.canonicalize_dtype(tables[0].dtype)
    block = zeros_to_lend((len(tables), rows, columns), dtype)
    for part, table in zip(block, tables, strict=True):
        part[: table.shape[0], : table.shape[1]] = table
    return on_device(block, fresh=True)
