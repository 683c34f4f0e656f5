"""The door for numbers: what users have on the host, as floating-point numbers of JAX's precision.

Means and spreads are computed in double precision before anything is rounded.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Int

from jaxfed._checks import checked_array, host_array
from jaxfed._names import caller

# Whole numbers up to this one are exact in double precision.
LARGEST = 2**53
# Of a feature's deviations, single precision must keep three digits.
SHARE = 1e-3
# Deviations below this share of the mean are rounding errors of double precision.
NOISE = 1e-13
MANY = 8  # samples that tell the spread of a feature


class UnitsWarning(UserWarning):
    """Features are in such unlike units, or so far from zero, that components lose digits."""


def precision_of(dtype: np.dtype) -> AbstractContextManager[Any]:
    """Let JAX compute in the precision of a table, within this block and thread alone."""
    return jax.enable_x64(True) if dtype == np.float64 else nullcontext()


def host_floats(given: Any, name: str, wanted: str, *, missing: bool | None = None) -> np.ndarray:
    """Host data as an array of floating-point numbers that loses nothing.

    Integers become doubles. A data frame is its columns; masked entries and missing values become
    NaN.

    Args:
        given: a NumPy array, a nested list, a masked array, an array of xarray, or a data frame of
            numbers.
        name: of the argument.
        wanted: what errors say is wanted.
        missing: whether NaN is allowed; None if the argument can never have missing entries.

    Raises:
        ValueError: if the data are not real numbers, whole numbers are too large, or entries are
            missing and `missing` is not True. The message names the column of a data frame.
    """
    if hasattr(given, "columns") and hasattr(given, "dtypes"):
        return _columns(given, name, missing)
    if hasattr(given, "dims") and hasattr(given, "coords"):
        given = given.values
    if np.ma.is_masked(given):
        _check_missing(name, "masked entries", missing)
    return exact(host_array(name, unmasked(given), wanted), name)


def unmasked(given: Any) -> Any:
    """A masked array as an array with NaN for its masked entries; anything else as it is."""
    if not isinstance(given, np.ma.MaskedArray):
        return given
    data = np.asarray(given.data)
    return np.where(np.ma.getmaskarray(given), np.nan, data) if np.ma.is_masked(given) else data


def exact(array: np.ndarray, name: str) -> np.ndarray:
    """Whole numbers as doubles; other arrays as they are.

    Raises:
        ValueError: if some are too large to be exact.
    """
    if array.dtype.kind not in "iu":
        return array
    # Python's numbers, since -2**63 has no positive counterpart of its own type.
    extremes = [int(array.min()), int(array.max())] if array.size else []
    if any(abs(extreme) > LARGEST for extreme in extremes):
        raise ValueError(
            f"{name}: wanted whole numbers up to 2**53, which double precision holds exactly, got "
            f"{max(extremes, key=abs)}; subtract a constant first"
        )
    return array.astype(np.float64)


def rounded(array: np.ndarray) -> np.ndarray:
    """Doubles in JAX's precision; other arrays as they are."""
    if array.dtype != np.float64:
        return array
    # Large numbers become infinite, which the caller refuses.
    with np.errstate(over="ignore"):
        return array.astype(jax.dtypes.canonicalize_dtype(np.float64))


def check_spread(name: str, tables: Sequence[Any], places: Sequence[int] | None = None) -> None:
    """Refuse features that single precision loses: too large, or far from zero and varying little.

    All tables count together: what varies little in one alone is not lost for all. It warns, since
    models of that table alone lose it.

    Args:
        name: of the argument.
        tables: arrays before they are rounded, whose last axis holds the same features; the first
            of three axes counts clients. What is not on the host has been rounded, and is skipped.
        places: the client of each table, for the message; in order by default.

    Raises:
        ValueError: names the feature, by number.
    """
    if jax.dtypes.canonicalize_dtype(np.float64) != np.float32:
        return
    # An array of all clients' samples is a table for each.
    tables = [table for x in tables for table in (x if x.ndim == 3 else [x])]
    known = {
        place: x
        for place, x in zip(range(len(tables)) if places is None else places, tables, strict=True)
        if isinstance(x, np.ndarray) and x.dtype == np.float64 and x.ndim > 1 and x.size
    }
    if not known:
        return
    low, high, own = np.inf, -np.inf, {}
    for place, x in known.items():
        # Without NaN, which stands for a missing entry. A feature that spreads widely is not lost.
        least, most = (f.reduce(x, axis=tuple(range(x.ndim - 1))) for f in (np.fmin, np.fmax))
        low, high = np.fmin(low, least), np.fmax(high, most)
        # A few numbers may be close by chance, and deviations are at most half of the spread.
        size = np.maximum(np.abs(least), np.abs(most))
        with np.errstate(invalid="ignore", over="ignore"):  # of numbers that the caller refuses
            spread = most - least
            near = (2 * NOISE * size < spread) & (spread < 32 * _least(np.float32) * size)
        if near.any() and x[..., 0].size >= MANY:
            own[place] = np.flatnonzero(near)
    largest = np.maximum(np.abs(low), np.abs(high))
    if (infinite := (largest > np.finfo(np.float32).max) & np.isfinite(largest)).any():
        place = int(np.argmax(infinite))
        raise ValueError(
            f"{name}: wanted numbers that single precision holds, got {largest[place]:.3g} as "
            f"feature {place} (from 0); divide by a constant, or compute in double precision: "
            "jax.config.update('jax_enable_x64', True)"
        )
    with np.errstate(invalid="ignore", over="ignore"):  # of numbers that the caller refuses
        doubtful = np.flatnonzero(high - low < 32 * _least(np.float32) * largest)
    for place in doubtful[np.isfinite(largest[doubtful])]:
        values = np.concatenate([x[..., place].ravel() for x in known.values()])
        spread = float(np.nanstd(values))
        if is_lost(spread, largest[place], np.float32):
            raise ValueError(
                f"{name}: wanted features that single precision holds, got feature {place} (from "
                f"0), which varies by {spread:.3g} about {np.nanmean(values):.10g}; subtract a "
                "constant from it, or compute in double precision: "
                "jax.config.update('jax_enable_x64', True)"
            )
    if len(tables) > 1:
        _warn_of_lost(name, known, own)


def _warn_of_lost(
    name: str,
    tables: Mapping[int, np.ndarray],
    doubtful: Mapping[int, Int[np.ndarray, " features"]],
) -> None:
    """Warn of features that vary within some tables by less than single precision holds.

    Args:
        name: of the argument.
        tables: by client.
        doubtful: the features that may do so, by client.
    """
    found = {}
    for place, features in doubtful.items():
        values = tables[place].reshape(-1, tables[place].shape[-1])[:, features]
        lost = is_lost(np.nanstd(values, axis=0), np.nanmax(np.abs(values), axis=0), np.float32)
        if lost.any():
            found[place] = features[np.argmax(lost)]
    if not found:
        return
    table, feature = next(iter(found.items()))
    values = tables[table][..., feature]
    others = f" and in {len(found) - 1} more" if len(found) > 1 else ""
    warnings.warn(
        f"{name}: wanted features whose deviations within a client single precision holds, got "
        f"feature {feature} (from 0), which varies by {np.nanstd(values):.3g} about "
        f"{np.nanmean(values):.10g} in {name}[{table}]{others}; models of these clients alone lose "
        "it: subtract each client's mean, or compute in double precision: "
        "jax.config.update('jax_enable_x64', True)",
        UnitsWarning,
        stacklevel=caller(),
    )


def is_lost(spread: Any, largest: Any, dtype: DTypeLike) -> Any:
    """Whether this precision loses the deviations of features whose numbers are this large."""
    return (NOISE * largest < spread) & (spread < _least(dtype) * largest)


def _least(dtype: DTypeLike) -> float:
    """The smallest spread that this precision holds, as a share of the largest number."""
    return float(np.finfo(dtype).eps) / 2 / SHARE


def checked_rows(argument: str, given: Any, axes: str, **options: bool) -> Array:
    """Samples as a JAX array: `checked_array`, without features that single precision loses.

    Args:
        argument: its name.
        given: an array, or lists of numbers.
        axes: names of its axes, features last.
        options: those of `checked_array`.

    Raises:
        ValueError: as in `checked_array` and `check_spread`.
    """
    array = checked_array(argument, given, axes, **options)
    # A few numbers may be close by chance.
    if not isinstance(given, jax.Array) and np.prod(array.shape[:-1]) >= MANY:
        check_spread(argument, [np.asarray(given)])
    return array


def _columns(frame: Any, name: str, missing: bool | None) -> np.ndarray:
    """The columns of a data frame of numbers."""
    for column, dtype in zip(frame.columns, frame.dtypes, strict=True):
        if getattr(dtype, "kind", "O") not in "iuf":
            raise ValueError(
                f"{name}: wanted columns of numbers, got column {column!r} of type {dtype}; drop "
                "it, or convert it to numbers"
            )
        if getattr(dtype, "kind", "") in "iu" and len(frame):
            extremes = [frame[column].min(), frame[column].max()]
            exact(np.asarray([int(x) for x in extremes if x == x]), f"{name}, column {column!r}")
    table = np.asarray(frame.to_numpy(dtype=np.float64, na_value=np.nan))
    if np.isnan(table).any():
        _check_missing(name, "missing values", missing)
    return table


def _check_missing(name: str, what: str, missing: bool | None) -> None:
    if not missing:
        hint = "" if missing is None else "; missing='mask' takes them as not observed"
        raise ValueError(f"{name}: wanted complete numbers, got {what}{hint}")


def refused(name: str, wanted: str, array: Any) -> ValueError:
    """The error for numbers of another type; the caller raises it."""
    hint = ""
    if jnp.issubdtype(array.dtype, jnp.floating):
        hint = f"; convert with .astype(numpy.float{64 if array.dtype.itemsize > 8 else 32})"
    return ValueError(f"{name}: wanted {wanted}, got {array.dtype}{hint}")
