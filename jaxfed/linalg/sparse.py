"""Checks sparse matrices from users, whose indices may be wrong."""

from typing import Any

import numpy as np
import scipy.sparse


def checked_rows(matrix: Any) -> scipy.sparse.csr_array:
    """A sparse matrix in row format, without duplicate entries, after a check of its indices.

    SciPy's compiled conversions and products read and write wherever the indices point, even
    outside of the arrays, so everything is checked first.

    Args:
        matrix: a `scipy.sparse` matrix with two axes, in any format. It is not modified.

    Raises:
        ValueError: if it has other axes, or indices outside the matrix or its arrays.
    """
    if len(matrix.shape) != 2:
        raise ValueError(f"wanted two axes, got shape {matrix.shape}")
    match matrix.format:
        case "csr" | "csc" | "bsr":
            parts = (matrix.data, matrix.indices, matrix.indptr)
            matrix = type(matrix)(parts, shape=matrix.shape)
            matrix.check_format(full_check=True)
            # The full check skips these if the last one is zero, and compares differences, which
            # may overflow.
            if (matrix.indptr[1:] < matrix.indptr[:-1]).any():
                raise ValueError("the index pointer must not decrease")
        case "coo":
            matrix = scipy.sparse.coo_array((matrix.data, matrix.coords), shape=matrix.shape)
        case "dia":
            rows, columns = matrix.shape
            if not ((matrix.offsets > -rows) & (matrix.offsets < columns)).all():
                raise ValueError(f"the diagonals lie outside the shape {matrix.shape}")
            matrix = scipy.sparse.dia_array((matrix.data, matrix.offsets), shape=matrix.shape)
        case "lil":
            counts = [len(places) for places in matrix.rows]
            rows = np.repeat(np.arange(matrix.shape[0]), counts)
            columns = np.array([k for places in matrix.rows for k in places], np.int64)
            values = np.array([x for entries in matrix.data for x in entries], matrix.dtype)
            matrix = scipy.sparse.coo_array((values, (rows, columns)), shape=matrix.shape)
    found = scipy.sparse.csr_array(matrix)
    if not found.has_canonical_format:
        found = found.copy()
        found.sum_duplicates()
    return found
