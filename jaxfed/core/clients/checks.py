"""Checks the data, ids and weights of clients."""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, ArrayLike, Float, Int

from jaxfed._checks import check_number, checked_weights, host_array, is_real, is_whole, refuse
from jaxfed._numbers import check_spread, host_floats, refused, rounded
from jaxfed.core.common.meshes import automatic, is_explicit
from jaxfed.core.common.processes import is_here
from jaxfed.linalg.sums import mean_of_rows

ALIGNMENT = 64  # bytes, of arrays of XLA on processors


def check_ids(ids: Int[Array, "*data_sets clients"]) -> None:
    """Refuse ids that are not unique.

    Traced ids, and those of other processes, cannot be checked.

    Raises:
        ValueError: names the first id that is negative or occurs twice in one data set.
    """
    if not isinstance(ids, jax.Array | np.ndarray) or is_traced(ids):
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


def check_bucket(bucket: object) -> None:
    """Check the padding factor for clients in buckets.

    Raises:
        ValueError: if it is neither None nor a number of at least 1.1.
    """
    if bucket is not None:
        check_number("bucket", bucket, "a number of at least 1.1 or None", lambda x: x >= 1.1)


def check_part(name: str, number: object, most: int) -> None:
    """Check a number of clients or samples to keep, unless it is traced.

    Raises:
        ValueError: if it is not an integer from 1 to `most`.
    """
    if is_traced(number):
        return
    if isinstance(number, jax.Array | np.ndarray) and jnp.issubdtype(number.dtype, jnp.integer):
        number = np.asarray(number)[()]
    if not is_whole(number) or not 1 <= number <= most:
        raise refuse(name, f"a whole number from 1 to {most}", number)


def checked_counts(counts: object, clients: int) -> np.ndarray:
    """The numbers of samples, one per client.

    Raises:
        ValueError: if they are not one positive number per client.
    """
    wanted = f"{clients} positive numbers"
    sizes = host_array("counts", counts, wanted)
    if not is_real(sizes.dtype) or sizes.shape != (clients,):
        raise refuse("counts", wanted, counts)
    if not (np.isfinite(sizes) & (sizes > 0)).all():
        raise refuse("counts", wanted, counts)
    return sizes


def checked_positions(indices: object, clients: int) -> np.ndarray:
    """Positions of clients, of which negative ones count from the end.

    Raises:
        ValueError: if they are not a list of valid positions.
    """
    wanted = f"a list of positions from 0 to {clients - 1}"
    places = host_array("indices", indices, wanted)
    if places.dtype.kind not in "iu" or places.ndim != 1 or not places.size:
        raise refuse("indices", wanted, indices)
    if places.min() < -clients or places.max() >= clients:
        raise refuse("indices", wanted, places.tolist())
    return places


def is_traced(value: object) -> bool:
    """Whether only the shape and type of a value are known."""
    return isinstance(value, Tracer)


def checked_floats(
    array: Any,
    name: str,
    *,
    half: bool = False,
    missing: bool | None = None,
    center: bool = False,
    alone: bool = True,
) -> Any:
    """The array as a floating-point JAX array; refused unless real, floating and finite.

    Args:
        array: the numbers.
        name: of the argument.
        half: whether bfloat16 is allowed.
        missing: whether NaN is allowed for some entries of a row; None if the argument can never
            have missing entries.
        center: whether to subtract the mean row, before numbers are rounded to single precision.
        alone: whether no other array has the same features. If some have, what is on the host
            stays there as it is, for the caller to check by `check_spread` and to round with them.
    """
    types = "float32, float64 or bfloat16" if half else "float32 or float64"
    wanted = f"real floating point numbers ({types})"
    fresh = False
    if not isinstance(array, jax.Array):
        array = host_floats(array, name, wanted, missing=missing)
        if center and array.dtype.kind == "f" and array.ndim == 2 and len(array):
            array = array - np.mean(array, axis=0, dtype=np.float64)
        if alone:
            check_spread(name, [array])
            exact, array = array, rounded(array)
            fresh = array is not exact
    elif center and array.ndim == 2 and len(array):
        array = array - mean_of_rows(array)
    short = array.dtype.itemsize < 4 and not (half and array.dtype == jnp.bfloat16)
    long = array.dtype.itemsize > 8
    if not jnp.issubdtype(array.dtype, jnp.floating) or short or long:
        raise refused(name, wanted, array)
    if not is_traced(array):
        values = np.asarray(array)
        right = ~np.isinf(values) if missing else np.isfinite(values)
        if not right.all():
            where = tuple(int(index) for index in np.argwhere(~right)[0])
            if missing is None or not np.isnan(values[where]):
                raise ValueError(f"{name}: NaN or infinite value at index {where}")
            raise ValueError(
                f"{name}: NaN at index {where}; with missing='mask' NaN stands for an entry that "
                "was not observed"
            )
        if missing and values.size and (empty := np.isnan(values).all(-1)).any():
            where = tuple(int(index) for index in np.argwhere(empty)[0])
            raise ValueError(
                f"{name}: wanted an observed entry in every sample, got none in that at index "
                f"{where}"
            )
        # Most operations fail on explicit mesh axes: leave the array where it lies, but let the
        # compiler place what is computed from it.
        if isinstance(array, jax.Array) and is_explicit(array):
            lies = cast(NamedSharding, array.sharding)
            mesh = automatic(cast(Mesh, lies.mesh))
            array = jax.device_put(array, NamedSharding(mesh, lies.spec))
    return on_device(array, fresh=fresh) if alone else array


def checked_samples(arrays: Sequence[Any], name: str, missing: bool) -> list[Array | np.ndarray]:
    """Each client's samples, on the host as they are; see `checked_floats` and `check_tables`.

    Args:
        arrays: the clients' samples.
        name: of the argument.
        missing: whether NaN is allowed for some entries of a sample.

    Raises:
        ValueError: names the client, or a feature that single precision loses.
    """
    places = [f"{name}[{i}]" for i in range(len(arrays))]
    tables = [
        checked_floats(array, place, half=True, missing=missing, alone=False)
        for array, place in zip(arrays, places, strict=True)
    ]
    check_tables(name, tables, "client", 0, "samples", "features", empty=True)
    check_spread(name, tables)
    return tables


def checked_moments(matrices: Any) -> Array:
    """The clients' second moments as one JAX array.

    Raises:
        ValueError: if they are not `(clients, features, features)`, finite and symmetric.
    """
    values = checked_floats(matrices, "matrices")
    if values.ndim != 3 or values.shape[1] != values.shape[2] or 0 in values.shape:
        raise ValueError(
            f"matrices: wanted shape (clients, features, features), got {values.shape}"
        )
    if not is_traced(values):
        symmetric = np.asarray(values)
        slack = 1e-4 * np.abs(symmetric).max(initial=0)
        if np.abs(symmetric - symmetric.swapaxes(1, 2)).max() > slack:
            raise ValueError("matrices: a second moment is symmetric, these are not")
    return values


def on_device(array: ArrayLike | Sequence[Any], *, fresh: bool = False) -> Array:
    """Convert to a JAX array, without a program for each shape of a NumPy array.

    `jnp.asarray` would compile one.

    Args:
        array: the numbers.
        fresh: whether nobody else holds the array.
    """
    if isinstance(array, np.ndarray) and jax.sharding.get_abstract_mesh().empty:
        # JAX may use the memory that it gets.
        return jax.device_put(array if fresh else np.array(array))
    return jnp.asarray(array)


def zeros_to_lend(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return zeros at an address from which JAX takes them without a copy on processors."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def check_tables(
    name: str, tables: Sequence[Any], owner: str, own: int, *axes: str, empty: bool = False
) -> None:
    """Check that tables have two axes, are not empty, and agree in type and in all but one axis.

    Args:
        name: of the argument.
        tables: arrays, dense or sparse.
        owner: what a table belongs to, such as a client, for the message.
        own: the axis whose length may differ.
        axes: names of both axes, in the plural.
        empty: whether the axis whose length may differ may have no entries.

    Raises:
        ValueError: names the first unsuitable table.
    """
    same = axes[1 - own]
    for i, table in enumerate(tables):
        if table.ndim != 2:
            raise ValueError(f"{name}[{i}]: wanted shape ({', '.join(axes)}), got {table.shape}")
        if table.shape[own] == 0 and not empty:
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
        given, first = (jax.dtypes.canonicalize_dtype(x.dtype) for x in (table, tables[0]))
        if given != first:
            raise ValueError(f"{name}[{i}]: is {given} where {name}[0] is {first}")


def _one(plural: str) -> str:
    return plural[:-3] + "y" if plural.endswith("ies") else plural[:-1]


def shares_of(
    weights: Literal["equal", "samples"] | ArrayLike | Sequence[float],
    clients: int,
    sizes: np.ndarray,
    dtype,
) -> Float[Array, " clients"]:
    """The clients' weights, which sum to one.

    Args:
        weights: as in `Clients.from_samples`.
        clients: number of clients.
        sizes: their numbers of samples.
        dtype: of the result.

    Raises:
        ValueError: if the weights are unsuitable.
    """
    if isinstance(weights, str):
        if weights not in ("equal", "samples"):
            raise ValueError(f"weights: wanted 'equal', 'samples' or numbers, got {weights!r}")
        # Normalised in double precision and rounded once.
        raw = np.ones(clients) if weights == "equal" else np.asarray(sizes, float)
    else:
        raw = np.ones(clients) if is_traced(weights) else checked_weights(weights, clients)
    for i in np.flatnonzero((np.asarray(sizes) == 0) & ((raw > 0) | ~np.any(sizes))):
        raise ValueError(f"arrays[{i}]: a client needs at least one sample, or weight 0, got none")
    if is_traced(weights):
        return jnp.asarray(weights, dtype) / jnp.sum(jnp.asarray(weights, dtype))
    if raw.sum() <= 0:
        raise ValueError("weights: wanted finite, non-negative numbers, not all of them zero")
    return jnp.asarray((raw / raw.sum()).astype(dtype))
