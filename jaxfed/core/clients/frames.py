"""Splits a data frame over clients by a column."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxfed._checks import check_text, check_texts, refuse
from jaxfed._numbers import host_floats
from jaxfed._refusals import closest
from jaxfed._rows import rows_by_name
from jaxfed.core.clients.names import listed_texts


def split_frame(
    frame: Any, by: str, features: Sequence[str] | None, *, missing: bool
) -> dict[str, Any]:
    """Each client's samples, and the names of clients and features, for `Clients.from_samples`.

    Args:
        frame: a data frame of pandas or polars, or a table of pyarrow.
        by: the column that names each row's client.
        features: the columns of features; None for all others.
        missing: whether entries of features may be missing, which become NaN.

    Raises:
        ValueError: names the column that is not there, does not hold numbers, or lacks entries.
    """
    columns = getattr(frame, "column_names", getattr(frame, "columns", None))
    if columns is None or not hasattr(frame, "__getitem__") or not hasattr(frame, "shape"):
        raise refuse("frame", "a data frame of pandas, polars or pyarrow", frame)
    columns = list(columns)
    check_text("by", by)
    if features is not None:
        check_texts("features", features := listed_texts(features))
    chosen = [x for x in columns if x != by] if features is None else list(features)
    for argument, name in [("by", by), *(("features", each) for each in chosen)]:
        if columns.count(name) != 1:
            many = "twice" if name in columns else f"no {name!r}{closest(name, map(str, columns))}"
            wanted = f"one of {', '.join(map(str, columns[:20]))}"
            raise ValueError(f"{argument}: wanted {wanted}, each once, got {many}")
    if by in chosen:
        raise refuse("features", f"columns besides {by!r}, which names the clients", chosen)
    if not chosen or not len(frame):
        raise refuse("frame", f"rows, and a column besides {by!r}", frame)
    owners = _texts(frame[by], by)
    if hasattr(frame, "iloc"):
        table = host_floats(frame[chosen], "frame", "", missing=missing)
    else:
        table = np.stack([_numbers(frame[name], name) for name in chosen], axis=1)
    clients = rows_by_name(owners)
    return {
        "arrays": [table[rows] for rows in clients.values()],
        "names": list(clients),
        "features": list(map(str, chosen)),
    }


def _texts(column: Any, name: str) -> np.ndarray:
    """The clients' names, row by row."""
    gaps = column.isna() if hasattr(column, "isna") else column.is_null()
    owners = np.asarray(column).astype(str)
    if np.any(np.asarray(gaps)) or "" in owners:
        raise refuse("by", "a column that names each row's client, without empty cells", name)
    return owners


def _numbers(column: Any, name: str) -> np.ndarray:
    """A column of numbers of a data frame without pandas; missing entries are NaN."""
    values = np.asarray(column)
    if values.dtype.kind not in "iuf":
        kind = getattr(column, "dtype", getattr(column, "type", values.dtype))
        raise ValueError(
            f"frame: wanted columns of numbers, got column {name!r} of type {kind}; leave it out "
            "by features=, or convert it to numbers"
        )
    return host_floats(values, f"frame, column {name!r}", "numbers").astype(np.float64)
