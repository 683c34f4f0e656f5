"""Reads views: arrays with the same entities as rows and different features."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

from jaxfed._checks import check_texts
from jaxfed.data._arrays import ARRAYS, as_samples, load_numpy, load_one, of_one_type
from jaxfed.data._files import (
    MAX_BYTES,
    StrPath,
    allowed,
    check_archive,
    check_size,
    checked_source,
    existing,
    files_of,
    listing,
    reading,
    stems,
)
from jaxfed.data._tables import TABLES, as_numbers, load_table
from jaxfed.linalg.sparse import checked_rows

ViewArray = Any  # Float[np.ndarray, "entities d_j"] or a scipy.sparse.csr_array


def read_views(
    path: StrPath, *, names: Sequence[str] | None = None, max_bytes: int = MAX_BYTES
) -> tuple[list[ViewArray], list[str]]:
    """Read views of the same entities, which are the rows of every array in the same order.

    An `.npz` file, alone or as the only file of its folder, holds all views: each two-dimensional
    array is a view, and others (labels, names) are ignored. A folder holds one file per view:
    `.npy`, `.npz` with one array, `.csv`, `.parquet`, or an `.npz` written by
    `scipy.sparse.save_npz`, which stays sparse. Numbers and headers are read as in `read_folder`.

    Args:
        path: the file or the folder.
        names: which views to read, in this order; by default all, in natural order.
        max_bytes: memory limit of a compressed file once unpacked and of the two axes of a sparse
            matrix; never less than the file's own size.

    Returns:
        Views, of one floating type, and their names.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ImportError: if a `.parquet` file is read and pyarrow is not installed.
        ValueError: if there are fewer than two views, the numbers of entities differ, dense and
            sparse views are mixed, or a file is malformed.
    """
    path = checked_source("path", path, max_bytes)
    check_texts("names", () if names is None else names)
    files = files_of(path, (*ARRAYS, *TABLES))
    # A single archive holds all views; in any other case each file is one view.
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
    return of_one_type(views), list(views)


def _read_view(path: Path, max_bytes: int) -> ViewArray:
    """The one view of a file."""
    if path.suffix.lower() in TABLES:
        names, columns = load_table(path, max_bytes)
        return as_samples(as_numbers(columns, names, path), str(path))
    if path.suffix.lower() == ".npz" and (view := _read_sparse(path, max_bytes)) is not None:
        return view
    return load_one(path, max_bytes, "one view")


def _read_sparse(path: Path, max_bytes: int) -> ViewArray | None:
    """The matrix that `scipy.sparse.save_npz` wrote; None if the file holds something else."""
    check_archive(existing(path), max_bytes)
    with reading(path, "not a readable archive"):
        with np.load(path, allow_pickle=False) as archive:
            if not {"format", "shape", "data"} <= set(archive.files):
                return None
        loaded = scipy.sparse.load_npz(path)
        # Even an empty matrix takes memory for each row and column.
        check_size(path, 8 * sum(loaded.shape), allowed(path, max_bytes))
        matrix: ViewArray = checked_rows(loaded)
    if 0 in matrix.shape:
        raise ValueError(f"{path}: is empty, shape {matrix.shape}")
    if matrix.nnz:
        # The same conversion and checks as for a dense view.
        matrix.data = as_samples(matrix.data[:, None], f"{path}, its non-zero values")[:, 0]
    else:
        matrix = matrix.astype(np.float32)
    return matrix
