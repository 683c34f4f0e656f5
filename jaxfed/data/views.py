"""Reader of views: several arrays with the same entities as rows, each with its own features."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from jaxfed.data._arrays import ARRAYS, as_samples, check_names, load_numpy
from jaxfed.data._files import (
    MAX_BYTES,
    StrPath,
    TooLarge,
    allowed,
    check_archive,
    check_size,
    checked_source,
    existing,
    files_in,
    listing,
    stems,
)
from jaxfed.data._tables import TABLES, as_numbers, load_table
from jaxfed.linalg.sparse import checked_rows

ViewArray = Any  # Float[np.ndarray, "entities d_j"] or a scipy.sparse.csr_array


def read_views(
    path: StrPath, *, names: Sequence[str] | None = None, max_bytes: int = MAX_BYTES
) -> tuple[list[ViewArray], list[str]]:
    """Read views of the same entities, which are the rows of every array, in the same order.

    An `.npz` file, alone or the only one of its folder, holds all views: its two-dimensional
    arrays are one each, others (labels, names) are passed over. A folder holds one file for each
    view: `.npy`, `.npz` with one array, `.csv`, `.parquet`, or `.npz` as `scipy.sparse.save_npz`
    writes it, which stays sparse. Numbers and headers are read as by `read_folder`.

    Args:
        path: the file or the folder.
        names: which views to read, in this order. Default: all, in natural order.
        max_bytes: the most memory that a compressed file, or the two axes of a sparse matrix, may
            take once unpacked; never less than the file's own size.

    Returns:
        Views, of one floating type, and their names.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ImportError: if a `.parquet` file is read and pyarrow is not installed.
        ValueError: for fewer than two views, views with different numbers of entities, dense and
            sparse ones together, or a malformed file.
    """
    path = checked_source("path", path, max_bytes)
    check_names(names)
    files = files_in(path, (*ARRAYS, *TABLES)) if path.is_dir() else [existing(path)]
    if len(files) == 1 and files[0].suffix.lower() == ".npz":
        arrays = load_numpy(files[0], names, max_bytes)
        if names is None:
            arrays = {name: array for name, array in arrays.items() if array.ndim == 2}
        views = {name: as_samples(array, f"{path}: {name}") for name, array in arrays.items()}
    else:
        by_name = dict(zip(stems(files), files, strict=True))
        if missing := [name for name in names or () if name not in by_name]:
            raise ValueError(f"{path}: holds {listing(by_name, 20)}, not {', '.join(missing)}")
        views = {name: _read_view(by_name[name], max_bytes) for name in (names or by_name)}
    if len(views) < 2:
        raise ValueError(f"{path}: wanted two views or more, found {listing(views) or 'none'}")
    first, reference = next(iter(views.items()))
    for name, view in views.items():
        if view.shape[0] != reference.shape[0]:
            raise ValueError(
                f"{path}: views must have the same entities as rows, but {first} has "
                f"{reference.shape[0]} and {name} has {view.shape[0]}"
            )
        if scipy.sparse.issparse(view) != scipy.sparse.issparse(reference):
            raise ValueError(f"{path}: of {first} and {name} only one is sparse; make both so")
    dtype = np.result_type(*(view.dtype for view in views.values()))
    return [view.astype(dtype, copy=False) for view in views.values()], list(views)


def _read_view(path: Path, max_bytes: int) -> ViewArray:
    """The one view of a file."""
    if path.suffix.lower() in TABLES:
        names, columns = load_table(path, max_bytes)
        return as_samples(as_numbers(columns, names, path), str(path))
    if path.suffix.lower() == ".npz" and (view := _read_sparse(path, max_bytes)) is not None:
        return view
    arrays = load_numpy(path, None, max_bytes)
    if len(arrays) != 1:
        raise ValueError(
            f"{path}: holds the arrays {listing(arrays)}; in a folder each file is one view"
        )
    (array,) = arrays.values()
    return as_samples(array, str(path))


def _read_sparse(path: Path, max_bytes: int) -> ViewArray | None:
    """The matrix that `scipy.sparse.save_npz` wrote, None where the file holds something else."""
    check_archive(existing(path), max_bytes)
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not {"format", "shape", "data"} <= set(archive.files):
                return None
        loaded = scipy.sparse.load_npz(path)
        # As small as the file may be, its axes may be long, and each has its place in memory.
        check_size(path, 8 * sum(loaded.shape), allowed(path, max_bytes))
        matrix: ViewArray = checked_rows(loaded)
    except TooLarge:
        raise
    except Exception as error:  # of every kind, by what is damaged
        raise ValueError(f"{path}: not a readable archive ({error})") from error
    if 0 in matrix.shape:
        raise ValueError(f"{path}: is empty, shape {matrix.shape}")
    if matrix.nnz:
        # As those of a dense view: real, finite, floating.
        matrix.data = as_samples(matrix.data[:, None], f"{path}, its non-zero values")[:, 0]
    else:
        matrix = matrix.astype(np.float32)
    return matrix
