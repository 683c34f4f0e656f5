"""Rewrites a `.parquet` table so that each client is a row group, for data larger than memory."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxfed._checks import check_flag, check_text, check_texts, checked_path, refuse
from jaxfed._names import natural
from jaxfed._numbers import exact
from jaxfed._optional import require
from jaxfed._refusals import closest
from jaxfed.data._files import StrPath, existing, listing, reading
from jaxfed.data._tables import places_in
from jaxfed.data.sources import CLIENTS, ParquetGroups

CELLS = 2**20  # in memory at a time


class _Owners(NamedTuple):
    """The client of each row."""

    names: list[str]
    counts: Int[np.ndarray, " clients"]


def group_parquet(
    path: StrPath,
    out: StrPath,
    *,
    by: str,
    features: Sequence[str] | None = None,
    progress: bool = False,
) -> ParquetGroups:
    """Rewrite a Parquet file with a column of clients, so that each client is one row group.

    `jaxfed.Clients.from_source` reads such a file client by client. Rows of a client may be
    anywhere in the file, in any row groups. Only a million cells, and the largest client, are in
    memory at any time; a temporary file beside `out` takes as much space as the numbers.

    Args:
        path: the file.
        out: the new file, which is there only once it is complete.
        by: the column of clients, of texts or whole numbers, which is no feature.
        features: the columns of features; by default all columns of numbers but `by`, without the
            index of a data frame.
        progress: whether to show a progress bar.

    Returns:
        The clients of the new file, with their names, in natural order (`site2` before `site10`).

    Raises:
        FileNotFoundError: if the file, or the folder of `out`, does not exist.
        FileExistsError: if `out` exists.
        ImportError: if pyarrow is not installed, or tqdm for the progress bar.
        ValueError: if it is not a Parquet file, a column is missing, is no column of numbers or
            lacks entries, whole numbers exceed 2**53, a column counts the rows and was not chosen,
            or a row has no client.
    """
    path, out = checked_path("path", path), checked_path("out", out)
    check_text("by", by)
    check_flag("progress", progress)
    if features is not None:
        check_texts("features", features)
        if not features:
            raise refuse("features", "at least one column", features)
    path = existing(path)
    if not out.parent.is_dir():
        raise FileNotFoundError(f"out: wanted a file in an existing folder, got {out}")
    if out.exists():
        raise FileExistsError(f"{out}: exists already")
    parquet = require("pyarrow.parquet", extra="parquet")
    with reading(path, "not a Parquet file"):
        file = parquet.ParquetFile(path)
    with file, _bar(2 * file.metadata.num_rows, progress) as bar:
        chosen = _features(path, file.schema_arrow, by, features)
        owners = _owners(path, file, by, bar)
        with tempfile.TemporaryFile(dir=out.parent) as space:
            types = {str(file.schema_arrow.field(name).type) for name in chosen}
            dtype = np.float32 if types == {"float"} else np.float64
            given = file, by, chosen, owners, np.dtype(dtype), space, bar
            rows = _in_order(path, *given, may_count=features is not None)
            _write(out, rows, chosen, owners)
    return ParquetGroups(out)


def _features(path: Path, schema: Any, by: str, given: Sequence[str] | None) -> list[str]:
    types = require("pyarrow.types", extra="parquet")
    names = list(schema.names)
    for name in (by, *(given or ())):
        if names.count(name) != 1:
            raise ValueError(
                f"{path}: wanted one column {name!r}, the columns are {listing(names, 20)}"
                f"{closest(name, names)}"
            )

    def is_number(name: str) -> bool:
        kind = schema.field(name).type
        return types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)

    if given is None:
        known = [names[place] for place in places_in(path, schema, by)]
        given = [name for name in known if name != by and is_number(name)]
        if not given:
            raise ValueError(f"{path}: has no column of numbers besides {by!r}")
    for name in given:
        if name == by or not is_number(name):
            kind = schema.field(name).type
            raise ValueError(f"{path}: wanted columns of numbers as features, got {name!r}, {kind}")
    return list(given)


def _batches(path: Path, file: Any, columns: list[str]) -> Iterator[Any]:
    with reading(path, "not a Parquet file"):
        yield from file.iter_batches(batch_size=max(1, CELLS // len(columns)), columns=columns)


def _names_of(path: Path, by: str, column: Any) -> np.ndarray:
    """The client of each row as a text, as the cells of a `.csv` file.

    Raises:
        ValueError: if a row has none.
    """
    values = column.to_numpy(zero_copy_only=False)
    gaps = column.null_count
    if values.dtype.kind == "f":
        gaps = int(np.isnan(values).sum())
    names = np.char.strip(values.astype(str)) if len(values) else np.zeros(0, "U1")
    if gaps or "" in names:
        raise ValueError(f"{path}: wanted a client of each row in {by!r}, got empty cells")
    return names


def _owners(path: Path, file: Any, by: str, bar: Any) -> _Owners:
    """Read the column of clients alone."""
    found: dict[str, int] = {}
    for batch in _batches(path, file, [by]):
        names, counts = np.unique(_names_of(path, by, batch.column(0)), return_counts=True)
        for name, count in zip(names.tolist(), counts.tolist(), strict=True):
            found[name] = found.get(name, 0) + count
        bar(len(batch))
    if not found:
        raise ValueError(f"{path}: has no rows")
    names = sorted(found, key=natural)
    return _Owners(names, np.asarray([found[name] for name in names]))


def _in_order(
    path: Path,
    file: Any,
    by: str,
    features: list[str],
    owners: _Owners,
    dtype: np.dtype,
    space: Any,
    bar: Any,
    *,
    may_count: bool,
) -> Float[np.ndarray, "rows features"]:
    """Put all rows into a mapped file, client after client.

    Raises:
        ValueError: names a column that lacks entries, has too large whole numbers, or, unless it
            `may_count`, just counts the rows.
    """
    rows = np.memmap(space, dtype, "w+", shape=(int(owners.counts.sum()), len(features)))
    places = {name: place for place, name in enumerate(owners.names)}
    free = np.cumsum(owners.counts) - owners.counts  # the first free row of each client
    before, counters = 0, {} if may_count else dict.fromkeys(features, (0, 1))
    for batch in _batches(path, file, [by, *features]):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in features:
            if gaps := columns[name].null_count:
                raise ValueError(f"{path}: column {name!r} has {gaps} missing values or more")
        given, inverse = np.unique(_names_of(path, by, columns[by]), return_inverse=True)
        own = np.asarray([places[name] for name in given.tolist()])[inverse]
        order = np.argsort(own, kind="stable")
        table = [
            exact(columns[name].to_numpy(zero_copy_only=False), f"{path}: column {name!r}")
            for name in features
        ]
        numbers = before + np.arange(len(batch))
        counters = {
            name: firsts
            for name, column in zip(features, table, strict=True)
            if (firsts := [x for x in counters.get(name, ()) if (column == numbers + x).all()])
        }
        before += len(batch)
        sorted_rows = np.stack(table, axis=1).astype(dtype)[order]
        clients, starts, counts = np.unique(own[order], return_index=True, return_counts=True)
        for client, start, count in zip(clients, starts, counts, strict=True):
            rows[free[client] : free[client] + count] = sorted_rows[start : start + count]
        free[clients] += counts
        bar(len(batch))
    if counters and before > 2:
        raise ValueError(
            f"{path}: column {next(iter(counters))!r} counts the rows and is no feature; choose "
            "others by features="
        )
    return rows


def _write(
    out: Path, rows: Float[np.ndarray, "rows features"], features: list[str], owners: _Owners
) -> None:
    """Write a row group for each client, under another name until all are written."""
    arrow = require("pyarrow", extra="parquet")
    parquet = require("pyarrow.parquet", extra="parquet")
    schema = arrow.schema(
        [(name, arrow.from_numpy_dtype(rows.dtype)) for name in features],
        metadata={CLIENTS: json.dumps(owners.names)},
    )
    number, name = tempfile.mkstemp(suffix=".parquet", prefix=f".{out.stem}-", dir=out.parent)
    os.close(number)
    try:
        with parquet.ParquetWriter(name, schema) as writer:
            start = 0
            for count in owners.counts.tolist():
                own = np.ascontiguousarray(rows[start : start + count].T)
                table = arrow.Table.from_arrays(list(map(arrow.array, own)), schema=schema)
                writer.write_table(table, row_group_size=count)
                start += count
        os.replace(name, out)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def _bar(rows: int, progress: bool) -> Iterator[Callable[[int], object]]:
    if not progress:
        yield lambda count: None
        return
    with require("tqdm.auto", extra="cli").tqdm(total=rows, unit="row", unit_scale=True) as bar:
        yield bar.update
