"""Readers of real files: arrays, tables, images and the IDX format of MNIST.

Readers of clients return `(arrays, names)`: one `(n_i, d)` array per client and its name, in
natural order (`client2` before `client10`). Integers and booleans become float32; where any file
holds float64 all arrays do. Malformed input is refused with the file's name and the reason, never
repaired silently: missing values, text in a number's place, pickled objects, files that disagree
about the features.
"""

import csv
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Shaped

from jaxfed._checks import check_flag, check_text, check_texts
from jaxfed._optional import require
from jaxfed.data._files import (
    MAX_BYTES,
    StrPath,
    TooLarge,
    allowed,
    check_archive,
    check_size,
    checked_source,
    content,
    existing,
    files_in,
    listing,
    natural,
    stems,
)

ClientArrays = tuple[list[Float[np.ndarray, "n_i d"]], list[str]]

ARRAYS = (".npy", ".npz")
TABLES = (".csv", ".parquet")
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
# Whatever a file is called, Pillow tries all formats that it knows; for one it starts a program.
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM")

#: What cells hold in the place of a missing number; a row of nothing else names no columns.
_MISSING = frozenset(
    ("", "#N/A", "#NA", "<NA>", "N/A", "NA", "n/a", "NULL", "null", "None", "nil", "?", "-", ".")
)


def read_folder(
    path: StrPath, *, client_column: str | None = None, max_bytes: int = MAX_BYTES
) -> ClientArrays:
    """Read the clients of a folder or a file, whatever its format.

    The suffix decides: `.npy` and `.npz` as in `read_arrays`, `.csv` and `.parquet` as in
    `read_table`; in a folder of images each image is one client with its rows as samples. Files
    with other suffixes are ignored, formats must not be mixed.

    Args:
        path: a folder with one file for each client, or one file that holds all of them.
        client_column: the column of one table that tells whose row it is.
        max_bytes: the most memory that a compressed file or a picture may take once unpacked; never
            less than its own size.

    Returns:
        Samples and name of each client.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ValueError: if no format is recognised, several are, or a file is malformed.
    """
    path = checked_source("path", path, max_bytes)
    _check_column(client_column)
    files = files_in(path) if path.is_dir() else [existing(path)]
    formats = {
        "arrays": [file for file in files if file.suffix.lower() in ARRAYS],
        "csv": [file for file in files if file.suffix.lower() == ".csv"],
        "parquet": [file for file in files if file.suffix.lower() == ".parquet"],
        "images": [file for file in files if file.suffix.lower() in _IMAGES],
    }
    present = {name: found for name, found in formats.items() if found}
    if not present:
        raise ValueError(
            f"{path}: no file with a recognised suffix "
            f"({', '.join((*ARRAYS, *TABLES, *_IMAGES))}); found {listing(files)}"
        )
    if len(present) > 1:
        examples = " and ".join(found[0].name for found in present.values())
        raise ValueError(f"{path}: formats are mixed, e.g. {examples}; keep one format a folder")
    (format_name,) = present
    if format_name in ("csv", "parquet"):
        return read_table(path, client_column=client_column, max_bytes=max_bytes)
    if client_column is not None:
        raise ValueError(f"{path}: client_column={client_column!r} is for tables")
    if format_name == "arrays":
        return read_arrays(path, max_bytes=max_bytes)
    images = _read_image_files(present["images"], color=False, max_bytes=max_bytes)
    return images, stems(present["images"])


def read_arrays(
    path: StrPath,
    *,
    names: Sequence[str] | None = None,
    same_features: bool = True,
    max_bytes: int = MAX_BYTES,
) -> ClientArrays:
    """Read clients from `.npy` and `.npz` files.

    A folder holds one file for each client, with one `(n_i, d)` array in it. One file holds all
    clients: the arrays of an `.npz` are one client each, and a single `(m, n, d)` array is m
    clients. Pickled objects are never loaded.

    Args:
        path: the folder or the file.
        names: which arrays of an `.npz` file to read. Default: all.
        same_features: whether arrays must agree about the number of features; views of the same
            samples need not.
        max_bytes: the most memory that an `.npz` file may take once unpacked; never
            less than its own size.

    Returns:
        Samples and name of each client.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ValueError: if a file is malformed or clients disagree about the features.
    """
    path = checked_source("path", path, max_bytes)
    check_names(names)
    check_flag("same_features", same_features)
    if not path.is_dir():
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
        arrays = {name: as_samples(array, f"{path}: {name}") for name, array in entries.items()}
        labels = list(arrays)
    else:
        arrays, files = {}, files_in(path, ARRAYS)
        for file in files:
            entries = load_numpy(file, names, max_bytes)
            if len(entries) != 1:
                raise ValueError(
                    f"{file}: holds the arrays {', '.join(entries)}; in a folder each file is one "
                    "client with one array, choose it by names=[...]"
                )
            (array,) = entries.values()
            arrays[file.name] = as_samples(array, str(file))
        labels = stems(files)
    return _alike(arrays, path, same_features=same_features), labels


def read_table(
    path: StrPath, *, client_column: str | None = None, max_bytes: int = MAX_BYTES
) -> ClientArrays:
    """Read clients from `.csv` or `.parquet` tables, features in columns.

    A folder holds one table for each client, or `client_column` names the column of one table
    that tells whose row it is. The first row of a `.csv` file is its header if it holds
    `client_column`, if no cell is a number and not all stand for missing values (`NA`, empty and
    the like), or if it counts 0, 1, 2, ... (three columns or more) as unnamed columns of data
    frames do. Where tables have column names, all must have the same.

    Args:
        path: a folder of tables or one table.
        client_column: the column that tells whose row it is.
        max_bytes: the most memory that a `.parquet` file may take once unpacked; never
            less than its own size.

    Returns:
        Samples (float64 from `.csv`) and name of each client.

    Raises:
        FileNotFoundError: if there is nothing at `path`.
        ImportError: if a `.parquet` file is read and pyarrow is not installed.
        ValueError: if a table is ragged, not numeric, incomplete, or disagrees with another.
    """
    path = checked_source("path", path, max_bytes)
    _check_column(client_column)
    files = files_in(path, TABLES) if path.is_dir() else [existing(path)]
    if len({file.suffix.lower() for file in files}) > 1:
        raise ValueError(f"{path}: holds .csv and .parquet files; keep one format a folder")
    if client_column is not None:
        if len(files) > 1:
            raise ValueError(
                f"{path}: client_column={client_column!r} is for one table, "
                f"but the folder holds {len(files)}"
            )
        return _by_client(files[0], client_column, max_bytes)
    if not path.is_dir():
        raise ValueError(f"{path}: one table holds all clients, name their client_column")
    tables = {file.name: (file, *load_table(file, max_bytes)) for file in files}
    first, columns, _ = next(iter(tables.values()))
    arrays = {}
    for name, (file, other, cells) in tables.items():
        if len(other) == len(columns) and other != columns:
            raise ValueError(
                f"{path}: {first.name} and {name} have different columns, "
                f"{listing(columns)} against {listing(other)}"
            )
        arrays[name] = as_samples(as_numbers(cells, other, file), str(file))
    return _alike(arrays, path), stems(files)


def read_images(
    folder: StrPath, *, color: bool = False, max_bytes: int = MAX_BYTES
) -> Float[np.ndarray, "m h w ..."]:
    """Read a folder of images of one size, in natural order of their names.

    Args:
        folder: the folder.
        color: whether to keep three colour channels; by default images become grayscale.
        max_bytes: the most memory that a picture may take, at 16 bytes a pixel; never less than its
            own size. Beyond twice its `PIL.Image.MAX_IMAGE_PIXELS` Pillow refuses by itself.

    Returns:
        float32 values in [0, 1], shape `(m, h, w)`, or `(m, h, w, 3)` in colour.

    Raises:
        FileNotFoundError: if the folder does not exist.
        ImportError: if Pillow is not installed.
        ValueError: if there is no image, one cannot be read, or sizes differ.
    """
    check_flag("color", color)
    files = files_in(checked_source("folder", folder, max_bytes), _IMAGES)
    return np.stack(_read_image_files(files, color=color, max_bytes=max_bytes))


#: Element types of the IDX format by their code; all big-endian.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: StrPath, *, max_bytes: int = MAX_BYTES) -> Shaped[np.ndarray, "..."]:
    """Read an IDX file, the format of MNIST, compressed by gzip or not.

    The header is two zero bytes, a code of the element type, the number of dimensions, and each
    dimension as a big-endian 32-bit integer; the elements follow.

    Args:
        path: the file.
        max_bytes: the most memory that a compressed file may take once unpacked.

    Returns:
        The array in the file's own element type, so that labels stay integers.

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
    expected = start + math.prod(shape) * dtype.itemsize
    if len(stored) != expected:
        reason = "truncated" if len(stored) < expected else "too long"
        raise ValueError(
            f"{path}: {reason}, shape {shape} of {dtype.name} needs {expected} bytes, "
            f"got {len(stored)}"
        )
    return np.frombuffer(stored, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def check_names(names: Sequence[str] | None) -> None:
    """Refuse what are no names of arrays.

    Raises:
        ValueError: as said above.
    """
    if names is not None:
        check_texts("names", names)


def _check_column(client_column: str | None) -> None:
    if client_column is not None:
        check_text("client_column", client_column)


def load_numpy(path: Path, names: Sequence[str] | None, max_bytes: int) -> dict[str, np.ndarray]:
    """The arrays of a `.npy` or `.npz` file by name; nothing in it is run."""
    if path.suffix.lower() not in ARRAYS:
        raise ValueError(f"{path}: wanted a .npy or .npz file")
    if zipfile.is_zipfile(existing(path)):
        check_archive(path, max_bytes)
    try:
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
    except Exception as error:  # of every kind, by what is damaged
        raise ValueError(f"{path}: {error}") from error
    if not entries or not all(isinstance(entry, np.ndarray) for entry in entries.values()):
        raise ValueError(f"{path}: wanted an archive of arrays, it holds {listing(entries)}")
    return entries


def as_samples(array: np.ndarray, where: str) -> Float[np.ndarray, "n d"]:
    """Check that an array is (samples, features) of finite real numbers, as native floats."""
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{where}: wanted real numbers, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"{where}: wanted shape (samples, features), got {array.shape}")
    if 0 in array.shape:
        raise ValueError(f"{where}: is empty, shape {array.shape}")
    wide = array.dtype.kind == "f" and array.dtype.itemsize >= 8
    array = array.astype(np.float64 if wide else np.float32)
    if not np.isfinite(array).all():
        row, column = np.argwhere(~np.isfinite(array))[0]
        raise ValueError(
            f"{where}: the value in row {row}, column {column} (from 0) is "
            f"{array[row, column]}, wanted finite numbers"
        )
    return array


def _alike(
    arrays: dict[str, np.ndarray], path: Path, *, same_features: bool = True
) -> list[np.ndarray]:
    """Arrays of one type, checked to have the same features."""
    first, reference = next(iter(arrays.items()))
    for name, array in arrays.items():
        if same_features and array.shape[1] != reference.shape[1]:
            raise ValueError(
                f"{path}: clients must have the same features, but {first} has "
                f"{reference.shape[1]} and {name} has {array.shape[1]}"
            )
    dtype = np.result_type(*arrays.values())
    return [array.astype(dtype, copy=False) for array in arrays.values()]


def load_table(
    path: Path, max_bytes: int, client_column: str | None = None
) -> tuple[list[str], list[Sequence]]:
    """Column names and columns of one table, values as they are in the file."""
    match path.suffix.lower():
        case ".csv":
            return _load_csv(path, client_column)
        case ".parquet":
            return _load_parquet(path, max_bytes)
    raise ValueError(f"{path}: wanted a .csv or .parquet file")


def _load_csv(path: Path, client_column: str | None) -> tuple[list[str], list[Sequence]]:
    try:
        with existing(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            rows = [(reader.line_num, row) for row in reader if row]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    except csv.Error as error:
        raise ValueError(f"{path}: {error}") from error
    if not rows:
        raise ValueError(f"{path}: is empty")
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise ValueError(
                f"{path}: ragged, line {line} has {len(row)} cells and line {rows[0][0]} "
                f"has {width}"
            )
    table = [[cell.strip() for cell in row] for _, row in rows]
    names = [str(k) for k in range(width)]
    is_header = (
        client_column in table[0]
        or not (any(map(_is_number, table[0])) or _MISSING.issuperset(table[0]))
        or (width > 2 and table[0] == names)
    )
    if is_header:
        names = table.pop(0)
    if not table:
        raise ValueError(f"{path}: has a header and no rows")
    return names, list(zip(*table, strict=True))


def _load_parquet(path: Path, max_bytes: int) -> tuple[list[str], list[Sequence]]:
    arrow = require("pyarrow", extra="data")
    parquet = require("pyarrow.parquet", extra="data")
    limit, size, batches = allowed(existing(path), max_bytes), 0, []
    try:
        with parquet.ParquetFile(path) as file:
            rows = max(1, 2**20 // max(1, file.metadata.num_columns))
            for batch in file.iter_batches(batch_size=rows):
                check_size(path, size := size + batch.nbytes, limit)
                batches.append(batch)
            table = arrow.Table.from_batches(batches, file.schema_arrow)
    except TooLarge:
        raise
    except Exception as error:  # of every kind, by what is damaged
        raise ValueError(f"{path}: not a Parquet file ({error})") from error
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count:
            raise ValueError(f"{path}: column {name!r} has {column.null_count} missing values")
        columns.append(column.to_numpy())
    return table.column_names, columns


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def as_numbers(columns: list[Sequence], names: list[str], path: Path) -> np.ndarray:
    """Columns as one array of numbers."""
    converted = []
    for name, column in zip(names, columns, strict=True):
        values = np.asarray(column)
        if values.dtype.kind == "U":
            bad = next((k for k, cell in enumerate(column) if not _is_number(cell)), None)
            if bad is not None:
                raise ValueError(
                    f"{path}: column {name!r}, row {bad} (from 0, below any header) is "
                    f"{column[bad]!r}, not a number"
                )
            values = values.astype(np.float64)
        if values.dtype.kind not in "biuf":
            raise ValueError(f"{path}: column {name!r} holds {values.dtype}, not numbers")
        converted.append(values)
    return np.stack(converted, axis=1)


def _by_client(path: Path, client_column: str, max_bytes: int) -> ClientArrays:
    names, columns = load_table(path, max_bytes, client_column)
    if names.count(client_column) != 1:
        raise ValueError(
            f"{path}: wanted one column {client_column!r}, the columns are {listing(names, 20)}"
        )
    place = names.index(client_column)
    owners = np.asarray(columns.pop(place)).astype(str)
    if "" in owners:
        raise ValueError(f"{path}: column {client_column!r} has empty cells")
    features = names[:place] + names[place + 1 :]
    if not features:
        raise ValueError(f"{path}: has no column besides {client_column!r}")
    samples = as_samples(as_numbers(columns, features, path), str(path))
    clients = sorted(set(owners.tolist()), key=natural)
    return [samples[owners == client] for client in clients], clients


def _read_image_files(files: list[Path], *, color: bool, max_bytes: int) -> list[np.ndarray]:
    images = [_read_image(file, color, max_bytes) for file in files]
    for file, image in zip(files, images, strict=True):
        if image.shape != images[0].shape:
            raise ValueError(
                f"{file}: is {image.shape[0]} x {image.shape[1]} pixels, but {files[0].name} is "
                f"{images[0].shape[0]} x {images[0].shape[1]}"
            )
    return images


def _read_image(path: Path, color: bool, max_bytes: int) -> Float[np.ndarray, "h w ..."]:
    pillow = require("PIL.Image", extra="data")
    limit = allowed(existing(path), max_bytes)
    try:
        with pillow.open(path, formats=_FORMATS) as image:
            # As it is decoded, converted, and in single precision.
            check_size(path, 16 * image.height * image.width, limit)
            # Pillow clips 16-bit pixels to 8 bits when it converts; these are grayscale already.
            if image.mode == "F":
                raise ValueError("floating-point pixels have no known range")
            if image.mode.startswith("I"):
                pixels = np.asarray(image).astype(np.float32) / 65535
            else:
                pixels = np.asarray(image.convert("RGB" if color else "L"), np.float32) / 255
    except TooLarge:
        raise
    except Exception as error:  # of every kind, by what is damaged
        raise ValueError(f"{path}: not a readable image ({error})") from error
    if color and pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=-1)
    if not (pixels.min() >= 0 and pixels.max() <= 1):
        raise ValueError(f"{path}: pixels are beyond 16 bits")
    return pixels
