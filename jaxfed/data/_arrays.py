"""Loads arrays from NumPy's files and converts them to samples."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxfed._names import natural
from jaxfed._numbers import exact
from jaxfed.data._files import check_archive, existing, listing, reading

ARRAYS = (".npy", ".npz")
LARGEST_IN_SINGLE = 2**24


class ClientTables(NamedTuple):
    """The samples of several clients.

    Attributes:
        samples: an array `(n_i, d)` for each client.
        names: the clients' names.
        features: the names of the features; None without names.
    """

    samples: list[Float[np.ndarray, "n_i d"]]
    names: list[str]
    features: list[str] | None = None


def load_numpy(path: Path, names: Sequence[str] | None, max_bytes: int) -> dict[str, np.ndarray]:
    """The arrays of a `.npy` or `.npz` file by name; pickled objects are never loaded."""
    if path.suffix.lower() not in ARRAYS:
        raise ValueError(f"{path}: wanted a .npy or .npz file")
    if zipfile.is_zipfile(existing(path)):
        check_archive(path, max_bytes)
    with reading(path, "cannot be read"):
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            if names is not None:
                raise ValueError("names choose arrays of an .npz file")
            return {path.stem: loaded}
        with loaded:
            missing = [name for name in names or () if name not in loaded.files]
            if missing:
                raise ValueError(f"holds {', '.join(loaded.files)}, not {', '.join(missing)}")
            chosen = names if names is not None else sorted(loaded.files, key=natural)
            entries = {name: loaded[name] for name in chosen}
    # NumPy returns members of the archive that are not arrays as bytes.
    if not entries or not all(isinstance(entry, np.ndarray) for entry in entries.values()):
        raise ValueError(f"{path}: wanted an archive of arrays, it holds {listing(entries)}")
    return entries


def load_one(
    path: Path,
    max_bytes: int,
    one: str,
    names: Sequence[str] | None = None,
    missing: bool | None = None,
) -> Float[np.ndarray, "n d"]:
    """The samples in a file of a folder that holds `one` array; `names` may select it."""
    entries = load_numpy(path, names, max_bytes)
    if len(entries) != 1:
        raise ValueError(
            f"{path}: holds the arrays {listing(entries)}; in a folder each file is {one}"
        )
    (array,) = entries.values()
    return as_samples(array, str(path), missing)


def as_samples(
    array: np.ndarray, where: str, missing: bool | None = None
) -> Float[np.ndarray, "n d"]:
    """A table of finite real numbers, converted to native floats; others are refused.

    Args:
        array: the numbers.
        where: what they are called.
        missing: whether NaN will do, for missing entries; None where it never can.
    """
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{where}: wanted real numbers, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"{where}: wanted shape (samples, features), got {array.shape}")
    if 0 in array.shape:
        raise ValueError(f"{where}: is empty, shape {array.shape}")
    if array.dtype.kind == "f":
        wide = array.dtype.itemsize >= 8
    else:  # whole numbers, as long as single precision holds them
        array = exact(array, where)
        wide = array.dtype == np.float64 and np.abs(array).max() > LARGEST_IN_SINGLE
    array = array.astype(np.float64 if wide else np.float32)
    wrong = np.isinf(array) if missing else ~np.isfinite(array)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        todo = instead(missing) if np.isnan(array[row, column]) else ""
        raise ValueError(
            f"{where}: the value in row {row}, column {column} (from 0) is "
            f"{array[row, column]}, wanted finite numbers{todo}"
        )
    return array


def instead(missing: bool | None) -> str:
    """What the error about a missing entry adds, where there is a choice."""
    if missing is None:
        return ""
    return (
        '; missing="mask" (jaxfed fit ... --impute) takes NaN and empty cells for missing entries'
    )


def of_one_type(arrays: dict[str, Any]) -> list[Any]:
    """The arrays in their common type: float64 if any is."""
    dtype = np.result_type(*(array.dtype for array in arrays.values()))
    return [array.astype(dtype, copy=False) for array in arrays.values()]
