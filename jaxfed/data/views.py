"""Reads views: arrays with the same entities as rows and different features."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from jaxtyping import Float, Int

from jaxfed._checks import check_options, check_texts
from jaxfed._refusals import closest
from jaxfed.data._arrays import ARRAYS, as_samples, load_numpy, load_one, of_one_type
from jaxfed.data._dialect import Dialect, check_no_tables, chosen
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
from jaxfed.data._tables import TABLES, Column, as_numbers, load_columns
from jaxfed.data.readers import read_table
from jaxfed.linalg.sparse import checked_rows

ViewArray = Any  # Float[np.ndarray, "entities d_j"] or a scipy.sparse.csr_array


def read_views(
    path: StrPath,
    *,
    names: Sequence[str] | None = None,
    max_bytes: int = MAX_BYTES,
    **options: Any,
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
        options: how tables are written and which columns are features, as for `read_table`. A view
            takes those of `columns` and `drop` that it has. `id_column` names the entities of every
            view, whose rows are put in the order of the first view.

    Returns:
        Views, of one floating type, and their names.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ImportError: if a `.parquet` file is read and pyarrow is not installed.
        ValueError: if there are fewer than two views, the numbers or ids of entities differ, dense
            and sparse views are mixed, or a file is malformed.
    """
    check_options(options, read_table, without=("path", "client_column", "missing", "max_bytes"))
    path = checked_source("path", path, max_bytes)
    check_texts("names", () if names is None else names)
    dialect = Dialect(**options)
    dialect.check()
    files = files_of(path, (*ARRAYS, *TABLES))
    dialect.check([x for x in files if x.suffix.lower() in TABLES])
    if dialect.id_column is not None or not any(x.suffix.lower() in TABLES for x in files):
        for file in files:
            if file.suffix.lower() not in TABLES:
                check_no_tables(file, **options)
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
        chosen_files = {name: by_name[name] for name in (names or by_name)}
        views = _read_files(path, chosen_files, max_bytes, dialect)
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


def _read_files(
    path: Path, files: dict[str, Path], max_bytes: int, dialect: Dialect
) -> dict[str, ViewArray]:
    """The views of a folder's files; with a column of ids, in the order of the first view's."""
    tables = {
        name: load_columns(file, max_bytes, dialect)
        for name, file in files.items()
        if file.suffix.lower() in TABLES
    }
    known = {column for columns, _ in tables.values() for column in columns}
    for column in (*dialect.drop, *(dialect.columns or ())):
        if tables and column not in known:
            hint = closest(column, sorted(known))
            raise ValueError(f"{path}: no view has a column {column!r}{hint}")
    views = {
        name: _of_table(file, *tables[name], dialect)
        if name in tables
        else _read_view(file, max_bytes)
        for name, file in files.items()
    }
    if dialect.id_column is None:
        return views
    ids = {
        name: np.asarray(cells[columns.index(dialect.id_column)]).astype(str)
        for name, (columns, cells) in tables.items()
    }
    first = next(iter(ids))
    return {
        name: view[_order(files[name], dialect.id_column, ids[name], first, ids[first])]
        for name, view in views.items()
    }


def _of_table(
    path: Path, names: list[str], columns: list[Column], dialect: Dialect
) -> Float[np.ndarray, "entities d"]:
    """The view of a table, of those of the columns and the columns to drop that it has."""
    wanted = dialect.columns and [name for name in dialect.columns if name in names]
    if dialect.columns and not wanted:
        raise ValueError(
            f"{path}: wanted some of the columns {listing(dialect.columns)}, it has "
            f"{listing(names, 20)}"
        )
    drop = [name for name in dialect.drop if name in names]
    own = dialect._replace(columns=wanted, drop=drop)
    names, columns = chosen(path, names, columns, None, own)
    if not names:
        raise ValueError(f"{path}: has no column besides those that are left out")
    return as_samples(as_numbers(columns, names, path), str(path))


def _order(
    path: Path, column: str, ids: np.ndarray, first: str, wanted: np.ndarray
) -> Int[np.ndarray, " entities"]:
    """The positions of the first view's ids in those of a view.

    Raises:
        ValueError: names an id that is there twice, or that only one of them has.
    """
    values, counts = np.unique(ids, return_counts=True)
    if counts.max() > 1:
        raise ValueError(f"{path}: column {column!r} has {str(values[counts.argmax()])!r} twice")
    for kind, missing in (
        ("lacks", np.setdiff1d(wanted, ids)),
        ("has besides", np.setdiff1d(ids, wanted)),
    ):
        if len(missing):
            raise ValueError(
                f"{path}: wanted the entities of {first} in column {column!r}, it {kind} "
                f"{listing(missing.tolist())}; jaxfed.gcca.align matches views of other entities"
            )
    return np.argsort(ids)[np.searchsorted(values, wanted)]


def _read_view(path: Path, max_bytes: int) -> ViewArray:
    """The one view of a file of arrays."""
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
