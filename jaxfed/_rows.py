"""The rows of each client of a table, by one sort however many clients there are."""

import numpy as np
from jaxtyping import Int, Shaped

from jaxfed._names import natural

Rows = Int[np.ndarray, " rows"] | slice


def rows_of_each(codes: Int[np.ndarray, " n"]) -> list[Rows]:
    """Return the rows of each code from 0 on, in order; slices if the table is sorted by code."""
    ends = np.cumsum(np.bincount(codes))
    if np.all(codes[1:] >= codes[:-1]):  # no copy of the rows
        return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return list(np.split(np.argsort(codes, kind="stable"), ends[:-1]))


def rows_by_name(names: Shaped[np.ndarray, " n"]) -> dict[str, Rows]:
    """Return the rows of each name, of texts, in their natural order."""
    known, codes = np.unique(names, return_inverse=True)
    found = dict(zip(known.tolist(), rows_of_each(codes), strict=True))
    return {name: found[name] for name in sorted(found, key=natural)}
