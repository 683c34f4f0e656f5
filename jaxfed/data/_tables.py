"""Loads tables from `.csv` and `.parquet` files."""

import re
import warnings
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from jaxfed._names import caller
from jaxfed._numbers import LARGEST, exact
from jaxfed._optional import require
from jaxfed.data._arrays import instead
from jaxfed.data._dialect import (
    LINES,
    Dialect,
    chosen,
    doubt,
    is_number,
    is_rising,
    looks_like_header,
    number,
    read_rows,
)
from jaxfed.data._files import allowed, check_size, existing, listing, reading

TABLES = (".csv", ".parquet")
Column = Sequence[str] | np.ndarray
#: Cells that mean a missing number; a row with only these is not a header.
_MISSING = frozenset(
    ("", "#N/A", "#NA", "<NA>", "N/A", "NA", "n/a", "NULL", "null", "None", "nil", "?", "-", ".")
)
#: The header of a column without a name, as pandas writes it and as pandas reads it back.
_NAMELESS = re.compile(r"(Unnamed: \d+(\.\d+)?)?")
#: Whole numbers that may be too long for double precision.
_WHOLE = re.compile("[+-]?[0-9]{16,999}")


def load_table(
    path: Path,
    max_bytes: int,
    client_column: str | None = None,
    missing: bool | None = None,
    dialect: Dialect | None = None,
) -> tuple[list[str], list[Column]]:
    """Column names and columns of one table, with values as in the file.

    The index of a data frame is dropped with a warning, because it is not a feature.
    """
    how = Dialect() if dialect is None else dialect
    found = load_columns(path, max_bytes, how, client_column, missing)
    return found if dialect is None else chosen(path, *found, client_column, dialect)


def load_columns(
    path: Path,
    max_bytes: int,
    dialect: Dialect,
    client_column: str | None = None,
    missing: bool | None = None,
) -> tuple[list[str], list[Column]]:
    """As `load_table`, also those columns that are no features."""
    match path.suffix.lower():
        case ".csv":
            return _load_csv(path, client_column, dialect)
        case ".parquet":
            return _load_parquet(path, max_bytes, client_column, missing)
        case _:
            raise ValueError(f"{path}: wanted a .csv or .parquet file")


def _places(
    path: Path, names: list[str], client_column: str | None, index: Collection[str] = ()
) -> list[int]:
    """The positions of all columns except those of a data frame's index.

    The index has the given names; in `.csv` files it comes first and has no name.
    """
    places = [place for place, name in enumerate(names) if name != client_column]
    first = list(takewhile(lambda place: _NAMELESS.fullmatch(names[place]), places))
    out = [place for place in places if place in first or names[place] in index]
    if len(out) == len(names):
        raise ValueError(f"{path}: has no column besides the index of a data frame")
    if out:
        warnings.warn(
            f"{path.parent}: left out {listing(repr(names[place]) for place in out)}, the index of "
            "a data frame, which is no feature; write tables with index=False, or make it a named "
            "column by reset_index()",
            stacklevel=caller(),
        )
    return [place for place in range(len(names)) if place not in out]


def places_in(path: Path, schema: Any, client_column: str | None = None) -> list[int]:
    """The positions of a `.parquet` file's columns except those that pandas calls an index."""
    with reading(path, "damaged metadata of pandas"):
        described = (schema.pandas_metadata or {}).get("index_columns", ())
        # An index that just counts rows is not stored: a range takes the place of its name.
        index = [name for name in described if isinstance(name, str)]
    return _places(path, schema.names, client_column, index)


def _load_csv(
    path: Path, client_column: str | None, dialect: Dialect
) -> tuple[list[str], list[Column]]:
    rows, decimal = read_rows(existing(path), dialect)
    if not rows:
        raise ValueError(f"{path}: is empty")
    width = len(rows[0][1])
    for line, row in rows:
        if len(row) != width:
            raise ValueError(
                f"{path}: ragged, line {line} has {len(row)} cells and line {rows[0][0]} "
                f"has {width}"
            )
    table = [row for _, row in rows]
    names = [str(k) for k in range(width)]
    is_header = dialect.header
    if is_header is None:
        is_header = client_column in table[0] or _is_header(path, rows, decimal)
    if is_header:
        names = table.pop(0)
    if not table:
        raise ValueError(f"{path}: has a header and no rows")
    columns: list[Column] = list(zip(*table, strict=True))
    if decimal != ".":
        columns = [
            column if name in (client_column, dialect.id_column) else _with_points(column, decimal)
            for name, column in zip(names, columns, strict=True)
        ]
    places = _places(path, names, client_column)
    return [names[place] for place in places], [columns[place] for place in places]


def _is_header(path: Path, rows: list[tuple[int, list[str]]], decimal: str) -> bool:
    """Whether the first line names columns."""
    first = rows[0][1]
    # A data frame without column names numbers its columns, but not its index.
    counted = [cell for cell in first if not _NAMELESS.fullmatch(cell)]
    if len(counted) > 2 and counted == [str(k) for k in range(len(counted))]:
        return True
    numbers = [is_number(number(cell, decimal)) for cell in first]
    if all(numbers):
        return looks_like_header(path, rows, decimal)
    if not any(numbers):
        # A row of missing values could be header or data; without any column name, it is data.
        return not _MISSING.issuperset(first)
    # Numbers and names: a header if a name is above a number, unless it is a misspelt sample.
    if len(rows) < 2 or not any(
        not own and cell not in _MISSING and is_number(number(below, decimal))
        for own, cell, below in zip(numbers, first, rows[1][1], strict=False)
    ):
        # Columns of text, such as ids, beside those of numbers.
        kept = [place for place, own in enumerate(numbers) if own]
        some = [(line, [row[place] for place in kept]) for line, row in rows[:LINES]]
        return looks_like_header(path, some, decimal)
    values = [float(number(x, decimal)) for x in first if is_number(number(x, decimal))]
    if len(values) < 3 or not is_rising(values):
        raise doubt(path, rows[0], "it has names and numbers")
    return True


def _with_points(column: Column, decimal: str) -> Column:
    """A column whose numbers are written with points; other text stays as it is.

    A number whose point is no decimal sign becomes text, since it may group thousands.
    """
    points = [number(cell, decimal) for cell in column]
    return [
        new if is_number(new) or is_number(old) else old
        for new, old in zip(points, column, strict=True)
    ]


def _load_parquet(
    path: Path, max_bytes: int, client_column: str | None, missing: bool | None
) -> tuple[list[str], list[Column]]:
    arrow = require("pyarrow", extra="parquet")
    parquet = require("pyarrow.parquet", extra="parquet")
    limit, size, batches = allowed(existing(path), max_bytes), 0, []
    with reading(path, "not a Parquet file"), parquet.ParquetFile(path) as file:
        # Read a million cells at a time, to stop as soon as the limit is exceeded.
        rows = max(1, 2**20 // max(1, file.metadata.num_columns))
        for batch in file.iter_batches(batch_size=rows):
            check_size(path, size := size + batch.nbytes, limit)
            batches.append(batch)
        table = arrow.Table.from_batches(batches, file.schema_arrow)
    table, columns = table.select(places_in(path, table.schema, client_column)), []
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count and (not missing or name == client_column):
            todo = "" if name == client_column else instead(missing)
            raise ValueError(
                f"{path}: column {name!r} has {column.null_count} missing values{todo}"
            )
        # With missing values, whole numbers become doubles.
        if column.null_count and arrow.types.is_integer(column.type):
            exact(column.drop_null().to_numpy(), f"{path}, column {name!r}")
        columns.append(column.to_numpy())
    return table.column_names, columns


def as_numbers(
    columns: list[Column], names: list[str], path: Path, missing: bool | None = None
) -> np.ndarray:
    """The columns as one array of numbers.

    Args:
        columns: with cells as in the file.
        names: of the columns.
        path: of the file.
        missing: whether cells that stand for a missing number become NaN; None where none can.
    """
    converted = []
    for name, column in zip(names, columns, strict=True):
        values = np.asarray(column)
        if values.dtype.kind == "U":
            cells = ["nan" if missing and cell in _MISSING else cell for cell in column]
            bad = next((k for k, cell in enumerate(cells) if not is_number(cell)), None)
            if bad is not None:
                found = f"is {cells[bad]!r}, not a number{_todo(name, cells[bad])}"
                if cells[bad] in _MISSING:
                    found = f"is {cells[bad]!r}, a missing value{instead(missing)}"
                raise ValueError(
                    f"{path}: column {name!r}, row {bad} (from 0, below any header) {found}"
                )
            values = np.asarray(cells).astype(np.float64)
            if (np.abs(values) > LARGEST).any():
                _check_whole(cells, f"{path}, column {name!r}")
        if values.dtype.kind not in "biuf":
            raise ValueError(
                f"{path}: column {name!r} holds {values.dtype}, not numbers{_todo(name, '')}"
            )
        exact(values, f"{path}, column {name!r}")  # before columns of other types round them
        converted.append(values)
    return np.stack(converted, axis=1)


def _check_whole(cells: Sequence[str], where: str) -> None:
    """Refuse whole numbers that double precision rounds."""
    lost = next((x for x in cells if _WHOLE.fullmatch(x) and int(x) != float(x)), None)
    if lost is not None:
        raise ValueError(
            f"{where}: wanted whole numbers that double precision holds exactly, as it does up to "
            f"2**53, got {lost}; subtract a constant first"
        )


def _todo(name: str, cell: str) -> str:
    """What helps where a column does not hold numbers."""
    for sep, word in ((";", ";"), ("\t", "tabs"), ("|", "|")):
        if len(parts := cell.split(sep)) > 1 and is_number(parts[0].replace(",", ".")):
            return f"; cells seem to be separated by {word}: leave sep (--sep) to be found"
    if is_number(cell.replace("'", ".")):
        return ": its decimal sign is a comma; write numbers without a sign between thousands"
    if is_number(cell.replace(",", ".")):
        return "; its decimal sign seems to be a comma: decimal=',' (--decimal ,)"
    return f"; leave the column out by drop=[{name!r}] (--drop {name})"
