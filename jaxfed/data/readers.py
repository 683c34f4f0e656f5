"""Read clients' samples from files: arrays, tables, images, and the IDX format of MNIST.

Readers of clients return `(arrays, names)`: one `(n_i, d)` array per client and its name, in
natural order (`client2` before `client10`). Booleans and whole numbers up to 2**24 become float32,
larger ones float64, so that nothing is lost; if any file holds float64, all arrays become float64.
Malformed input is never repaired silently. It is refused with the file's name and the reason:
missing entries (unless `missing="mask"`), text instead of a number, pickled objects, files with
different features.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Shaped

from jaxfed._checks import check_name, check_options, check_texts
from jaxfed._refusals import closest
from jaxfed._rows import rows_by_name
from jaxfed.data._arrays import (
    ARRAYS,
    ClientTables,
    as_samples,
    load_numpy,
    load_one,
    of_one_type,
)
from jaxfed.data._dialect import Dialect, check_no_tables
from jaxfed.data._files import (
    MAX_BYTES,
    StrPath,
    checked_source,
    content,
    existing,
    files_in,
    files_of,
    listing,
    stems,
)
from jaxfed.data._pictures import PICTURES, read_pictures
from jaxfed.data._tables import TABLES, as_numbers, load_table
from jaxfed.data.single_cell import read_anndata

Missing = Literal["refuse", "mask"]
CELLS = (".h5ad",)


def read_folder(
    path: StrPath,
    *,
    client_column: str | None = None,
    missing: Missing = "refuse",
    max_bytes: int = MAX_BYTES,
    **options: Any,
) -> ClientTables:
    """Read the clients of a folder or a file in any supported format.

    The suffix decides: `.npy` and `.npz` are read by `read_arrays`, `.csv` and `.parquet` by
    `read_table`, `.h5ad` by `read_anndata`; in a folder of images, each image is one client with
    its rows as samples. Files with other suffixes are ignored. Formats must not be mixed.

    Args:
        path: a folder with one file per client, or one file that holds all clients.
        client_column: the column of a single table that names each row's client, or each cell's
            in all `.h5ad` files.
        missing: `"mask"` keeps NaN, empty cells, `NA` and the like as NaN, which
            `jaxfed.Clients.from_samples` accepts as missing entries, and so are genes that some
            `.h5ad` files lack; `"refuse"` refuses missing entries, and leaves out such genes.
        max_bytes: memory limit of a compressed file or an image after decompression; never less
            than the file's own size.
        options: how tables are written and which columns are features, as for `read_table`.

    Returns:
        Samples and name of each client.

    Raises:
        FileNotFoundError: if `path` does not exist.
        ValueError: if no format or several formats are found, or a file is malformed.
    """
    check_options(options, read_table, without=("path", "client_column", "missing", "max_bytes"))
    path = checked_source("path", path, max_bytes)
    format_name, files = _format_of(path)
    if format_name == "tables":
        common: dict[str, Any] = {"client_column": client_column, "missing": missing}
        return read_table(path, max_bytes=max_bytes, **common, **options)
    if format_name == "cells":
        if client_column is None and not path.is_dir():
            raise ValueError(f"{path}: one file holds all clients, name their client_column")
        return _of_cells(path, files, client_column, missing, **options)
    check_no_tables(path, client_column=client_column, **options)
    if format_name == "arrays":
        return read_arrays(path, missing=missing, max_bytes=max_bytes)
    images = read_pictures(files, color=False, max_bytes=max_bytes)
    return ClientTables(list(images), stems(files))


def read_client(
    path: StrPath,
    *,
    missing: Missing = "refuse",
    max_bytes: int = MAX_BYTES,
    **options: Any,
) -> ClientTables:
    """Read the samples of one client, as a machine of a deployment holds them.

    Args:
        path: a file with the client's samples, `.csv`, `.parquet`, `.npy`, `.npz` or `.h5ad`; or a
            folder of such files or of images, whose samples follow each other.
        missing: as in `read_folder`.
        max_bytes: as in `read_folder`.
        options: how tables are written and which columns are features, as for `read_table`.

    Returns:
        One array, the name of the file or the folder, and the features' names.

    Raises:
        FileNotFoundError: if `path` does not exist.
        ValueError: as in `read_folder`.
    """
    check_options(options, read_table, without=("path", "client_column", "missing", "max_bytes"))
    path = checked_source("path", path, max_bytes)
    format_name, files = _format_of(path)
    if format_name == "tables":
        found = _of_tables(path, files, missing, max_bytes, **options)
    elif format_name == "cells":
        found = _of_cells(path, files, None, missing, **options)
    elif path.is_dir():
        found = read_folder(path, missing=missing, max_bytes=max_bytes, **options)
    elif format_name == "arrays":
        check_no_tables(path, **options)
        found = _of_arrays(path, files, None, missing, max_bytes)
    else:
        raise ValueError(f"{path}: wanted a table, an array, or a folder, got an image")
    return ClientTables([np.concatenate(found.samples)], [path.stem], found.features)


def read_arrays(
    path: StrPath,
    *,
    names: Sequence[str] | None = None,
    same_features: bool = True,
    missing: Missing = "refuse",
    max_bytes: int = MAX_BYTES,
) -> ClientTables:
    """Read clients from `.npy` and `.npz` files.

    A folder holds one file per client with one `(n_i, d)` array each. A single file holds all
    clients: each array of an `.npz` file is one client, or one `(m, n, d)` array holds m clients.
    Pickled objects are never loaded.

    Args:
        path: the folder or the file.
        names: which arrays of an `.npz` file to read; all by default.
        same_features: whether all arrays must have the same number of features; views of the same
            samples need not.
        missing: whether NaN is refused or kept, as in `read_folder`.
        max_bytes: memory limit of an `.npz` file after decompression; never less than its own size.

    Returns:
        Samples and name of each client.

    Raises:
        FileNotFoundError: if `path` does not exist.
        ValueError: if a file is malformed or clients have different features.
    """
    path = checked_source("path", path, max_bytes)
    check_texts("names", () if names is None else names)
    masked = _masked(missing)
    if path.is_dir():
        files = files_in(path, ARRAYS)
        return _of_arrays(path, files, names, missing, max_bytes, same_features=same_features)
    entries = load_numpy(existing(path), names, max_bytes)
    if len(entries) == 1:
        ((name, array),) = entries.items()
        if array.ndim == 3:
            label = name or path.stem
            entries = {f"{label}[{i}]": block for i, block in enumerate(array)}
        elif path.suffix.lower() == ".npy":
            raise ValueError(
                f"{path}: holds one array of shape {array.shape}; for all clients in one "
                "file it must be (clients, samples, features)"
            )
    arrays = {name: as_samples(array, f"{path}: {name}", masked) for name, array in entries.items()}
    return ClientTables(_alike(arrays, path, same_features=same_features), list(arrays))


def read_table(
    path: StrPath,
    *,
    client_column: str | None = None,
    missing: Missing = "refuse",
    max_bytes: int = MAX_BYTES,
    sep: str | None = None,
    decimal: str | None = None,
    comment: str | None = None,
    header: bool | None = None,
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    id_column: str | None = None,
    encoding: str | None = None,
) -> ClientTables:
    """Read clients from `.csv` or `.parquet` tables, with features as columns.

    A folder holds one table per client; in a single table, `client_column` names each row's client.
    Tables with column names must all have the same ones. Columns that only count rows are refused.
    The index of a data frame is not a feature and is dropped with a warning: in `.parquet` the
    columns that pandas marks as index, in `.csv` leading columns without a name.

    By itself, a `.csv` file tells how it is written: in UTF-8, or as the mark at its beginning says
    (UTF-8, UTF-16, UTF-32); lines that begin with `#` are comments. The first row is its header if
    it holds `client_column`; if it has a name above a number; if none of its cells is a number and
    not all are missing values (`NA`, empty and the like); if it counts 0, 1, 2, ... over three
    columns or more, like the unnamed columns of a data frame; or if it alone is evenly spaced, as
    wavelengths are.

    Args:
        path: a folder of tables or one table.
        client_column: the column that names each row's client.
        missing: whether missing entries are refused or kept as NaN, as in `read_folder`.
        max_bytes: memory limit of a `.parquet` file after decompression; never less than its size.
        sep: the character between cells of `.csv` files; by default found, of `,`, `;`, tab, `|`
            and blanks.
        decimal: their decimal sign, `"."` or `","`; found by default.
        comment: the character with which comments begin; `#` by default.
        header: whether the first row names the columns; found by default.
        columns: the columns of features; all others by default.
        drop: columns that are no features.
        id_column: the column that names the rows, no feature.
        encoding: how `.csv` files without a mark are written, by Python's name of the encoding,
            such as `"cp1252"` for older files of Windows, or `"latin-1"`; UTF-8 by default.

    Returns:
        Samples (float64 from `.csv`) and name of each client, and the features' names.

    Raises:
        FileNotFoundError: if `path` does not exist.
        ImportError: if a `.parquet` file is read and pyarrow is not installed.
        ValueError: if a table is ragged, not numeric, incomplete, in another encoding, or does not
            match the others.
    """
    path, masked = checked_source("path", path, max_bytes), _masked(missing)
    dialect = Dialect(sep, decimal, comment, header, columns, drop, id_column, encoding)
    dialect.check()
    files = files_of(path, TABLES)
    dialect.check(files)
    if client_column is None and path.is_dir():
        return _of_tables(path, files, missing, max_bytes, **dialect._asdict())
    if client_column is not None:
        if len(files) > 1:
            raise ValueError(
                f"{path}: client_column={client_column!r} is for one table, "
                f"but the folder holds {len(files)}"
            )
        return _by_client(files[0], client_column, max_bytes, masked, dialect)
    raise ValueError(f"{path}: one table holds all clients, name their client_column")


def read_images(
    folder: StrPath, *, color: bool = False, max_bytes: int = MAX_BYTES
) -> Float[np.ndarray, "m h w ..."]:
    """Read a folder of images of one size, in natural order of their names.

    Args:
        folder: the folder.
        color: whether to keep three colour channels; by default images become grayscale.
        max_bytes: memory limit of an image, at 16 bytes per pixel; never less than its own size.
            Pillow itself refuses images with more than twice `PIL.Image.MAX_IMAGE_PIXELS`.

    Returns:
        float32 values in [0, 1], shape `(m, h, w)`, or `(m, h, w, 3)` in colour.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ImportError: if Pillow is not installed.
        ValueError: if there is no image, one cannot be read, or sizes differ.
    """
    files = files_in(checked_source("folder", folder, max_bytes), PICTURES)
    return np.stack(read_pictures(files, color=color, max_bytes=max_bytes))


#: Element types of the IDX format by code; all big-endian.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: StrPath, *, max_bytes: int = MAX_BYTES) -> Shaped[np.ndarray, "..."]:
    """Read an IDX file, the format of MNIST, with or without gzip compression.

    The header consists of two zero bytes, a code for the element type, the number of dimensions,
    and each dimension as a big-endian 32-bit integer. The elements follow.

    Args:
        path: the file.
        max_bytes: memory limit of a compressed file after decompression.

    Returns:
        The array in the file's own element type.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if the header or the length of the file is wrong.
    """
    path = checked_source("path", path, max_bytes)
    stored = content(path, max_bytes)
    if len(stored) < 4 or stored[:2] != b"\0\0" or stored[2] not in _IDX_TYPES:
        raise ValueError(
            f"{path}: not an IDX file, it begins with {stored[:4].hex(' ') or 'nothing'} and not "
            "with 00 00, a type code and the number of dimensions"
        )
    dtype, ndim = np.dtype(_IDX_TYPES[stored[2]]), stored[3]
    start = 4 + 4 * ndim
    if len(stored) < start:
        raise ValueError(f"{path}: truncated inside the header of {ndim} dimensions")
    shape = tuple(int(n) for n in np.frombuffer(stored[4:start], ">u4"))
    # Python's product does not overflow for forged shapes.
    expected = start + math.prod(shape) * dtype.itemsize
    if len(stored) != expected:
        reason = "truncated" if len(stored) < expected else "too long"
        raise ValueError(
            f"{path}: {reason}, shape {shape} of {dtype.name} needs {expected} bytes, "
            f"got {len(stored)}"
        )
    return np.frombuffer(stored, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _format_of(path: Path) -> tuple[str, list[Path]]:
    """The only format in a folder, or of a file, and its files."""
    files = files_of(path)
    formats = {
        "arrays": ARRAYS,
        ".csv": (".csv",),
        ".parquet": (".parquet",),
        "cells": CELLS,
        "images": PICTURES,
    }
    present = {
        name: found
        for name, suffixes in formats.items()
        if (found := [file for file in files if file.suffix.lower() in suffixes])
    }
    if not present:
        raise ValueError(
            f"{path}: no file with a recognised suffix "
            f"({', '.join((*ARRAYS, *TABLES, *CELLS, *PICTURES))}); found {listing(files)}"
        )
    if len(present) > 1:
        examples = " and ".join(found[0].name for found in present.values())
        raise ValueError(f"{path}: formats are mixed, e.g. {examples}; keep one format a folder")
    ((name, found),) = present.items()
    return "tables" if name in TABLES else name, found


def _of_cells(
    path: Path, files: Sequence[Path], client_column: str | None, missing: Missing, **options: Any
) -> ClientTables:
    """Read clients from files of single cells, by a column or one each."""
    check_no_tables(path, **options)
    genes = "all" if _masked(missing) else "common"
    return read_anndata(list(files), client_column, genes=genes)


def _of_arrays(
    path: Path,
    files: Sequence[Path],
    names: Sequence[str] | None,
    missing: Missing,
    max_bytes: int,
    *,
    same_features: bool = True,
) -> ClientTables:
    """Read clients from files with one array each."""
    masked, one = _masked(missing), "one client with one array, choose it by names=[...]"
    arrays = {file.name: load_one(file, max_bytes, one, names, masked) for file in files}
    return ClientTables(_alike(arrays, path, same_features=same_features), stems(list(files)))


def _of_tables(
    path: Path, files: Sequence[Path], missing: Missing, max_bytes: int, **options: Any
) -> ClientTables:
    """Read clients from one table each; the options are those of `Dialect`."""
    masked, dialect = _masked(missing), Dialect(**options)
    dialect.check(files)
    if len({file.suffix.lower() for file in files}) > 1:
        raise ValueError(f"{path}: holds .csv and .parquet files; keep one format a folder")
    load = partial(load_table, max_bytes=max_bytes, missing=masked, dialect=dialect)
    tables = {file.name: (file, *load(file)) for file in files}
    first, known, _ = next(iter(tables.values()))
    arrays = {}
    # Different numbers of columns are found below, with the numbers in the message.
    for name, (file, other, cells) in tables.items():
        if len(other) == len(known) and other != known:
            raise ValueError(
                f"{path}: {first.name} and {name} have different columns, "
                f"{listing(known)} against {listing(other)}"
            )
        arrays[name] = as_samples(as_numbers(cells, other, file, masked), str(file), masked)
    return ClientTables(_alike(arrays, path), stems(list(files)), _named(known))


def _alike(
    arrays: dict[str, np.ndarray], path: Path, *, same_features: bool = True
) -> list[np.ndarray]:
    """Convert arrays to their common type, and check that they have the same features."""
    first, reference = next(iter(arrays.items()))
    for name, array in arrays.items():
        if same_features and array.shape[1] != reference.shape[1]:
            raise ValueError(
                f"{path}: clients must have the same features, but {first} has "
                f"{reference.shape[1]} and {name} has {array.shape[1]}"
            )
    return of_one_type(arrays)


def _masked(missing: str) -> bool:
    """Return whether missing entries are kept."""
    check_name("missing", missing, ("refuse", "mask"))
    return missing == "mask"


def _by_client(
    path: Path, client_column: str, max_bytes: int, masked: bool, dialect: Dialect
) -> ClientTables:
    """Group the rows of one table by client."""
    names, columns = load_table(path, max_bytes, client_column, masked, dialect)
    if names.count(client_column) != 1:
        raise ValueError(
            f"{path}: wanted one column {client_column!r}, the columns are {listing(names, 20)}"
            f"{closest(client_column, names)}"
        )
    place = names.index(client_column)
    # As strings, because numbers and names may both label clients.
    given = np.asarray(columns.pop(place))
    if given.dtype.kind == "f" and (gaps := int(np.isnan(given).sum())):
        raise ValueError(f"{path}: column {client_column!r} has {gaps} missing values")
    owners = np.char.strip(given.astype(str))  # as the cells of a .csv file
    if "" in owners:
        raise ValueError(f"{path}: column {client_column!r} has empty cells")
    features = names[:place] + names[place + 1 :]
    if not features:
        raise ValueError(f"{path}: has no column besides {client_column!r}")
    samples = as_samples(as_numbers(columns, features, path, masked), str(path), masked)
    clients = rows_by_name(owners)
    tables = [samples[rows] for rows in clients.values()]
    return ClientTables(tables, list(clients), _named(features))


def _named(columns: list[str]) -> list[str] | None:
    """Return the names of columns, unless they are just numbered."""
    return None if columns == [str(k) for k in range(len(columns))] else columns
