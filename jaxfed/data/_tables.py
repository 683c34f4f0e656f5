"""Tables in `.csv` and `.parquet` files."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxfed._optional import require
from jaxfed.data._files import TooLarge, allowed, check_size, existing

TABLES = (".csv", ".parquet")
#: What cells hold in the place of a missing number; a row of nothing else names no columns.
_MISSING = frozenset(
    ("", "#N/A", "#NA", "<NA>", "N/A", "NA", "n/a", "NULL", "null", "None", "nil", "?", "-", ".")
)


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
