"""Samples in sparse matrices, which are centred without a dense copy of all."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import scipy.sparse
from jax.experimental.sparse import BCOO
from jaxtyping import Float, Int

from jaxfed._checks import check_list, check_name
from jaxfed.core.clients.checks import check_tables, checked_floats
from jaxfed.linalg.sparse import checked_rows

Center = Literal["shared", "local", "none"]
# As many columns of a second moment are computed at a time.
BLOCK = 512


class DenseParts(NamedTuple):
    """Centred samples, or their second moments, whichever are smaller; the others are None."""

    samples: list[Float[np.ndarray, "samples features"]] | None
    moments: Float[np.ndarray, "clients features features"] | None
    counts: Int[np.ndarray, " clients"]


def dense_parts(matrices: Sequence[Any], center: Center) -> DenseParts:
    """Centre clients' samples, for `Clients.from_sparse_samples`."""
    check_list("matrices", matrices, "(samples, features) matrices, one per client")
    check_name("center", center, ("shared", "local", "none"))
    options: dict[str, Any] = {"dense": "Clients.from_samples", "alone": False}
    rows = [sparse_rows(x, f"matrices[{i}]", **options) for i, x in enumerate(matrices)]
    check_tables("matrices", rows, "client", 0, "samples", "features")
    counts = np.asarray([x.shape[0] for x in rows])
    longest, features = int(counts.max()), rows[0].shape[1]
    dtype = rows[0].dtype
    columns: list[Any] = [scipy.sparse.csc_array(x, dtype=np.float64) for x in rows]
    if center != "none":
        columns = _shifted(columns)
    means = np.stack([x.sum(axis=0) / n for x, n in zip(columns, counts, strict=True)])
    if center == "shared":
        means[:] = counts @ means / counts.sum()
    elif center == "none":
        means[:] = 0
    precision = jax.dtypes.canonicalize_dtype(dtype)
    if longest < features or not _holds_squares(columns, precision):
        dense = [(x.toarray() - y).astype(dtype) for x, y in zip(columns, means, strict=True)]
        return DenseParts(dense, None, counts)
    moments = np.empty((len(rows), features, features), precision)
    for own, x, y in zip(moments, columns, means, strict=True):
        _fill_moment(own, x, y)
    return DenseParts(None, moments, counts)


def sparse_rows(matrix: Any, name: str, *, dense: str, alone: bool = True) -> Any:
    """Convert a matrix to one of SciPy by rows, each position once.

    Args:
        matrix: of `scipy.sparse` in any format, or a `BCOO`.
        name: of the argument.
        dense: the function that takes dense ones, for the message.
        alone: as in `checked_floats`.

    Raises:
        ValueError: if it is not sparse, has wrong indices, or values are not finite real numbers.
    """
    from_jax = isinstance(matrix, BCOO) and matrix.n_batch == matrix.n_dense == 0
    if not (from_jax or scipy.sparse.issparse(matrix)):
        raise ValueError(
            f"{name}: wanted a matrix of scipy.sparse or a BCOO, got {type(matrix).__name__}; "
            f"{dense} takes dense ones"
        )
    try:
        rows = checked_rows(_from_jax(matrix) if from_jax else matrix)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    values = np.asarray(checked_floats(rows.data, f"{name}, its non-zero values", alone=alone))
    return scipy.sparse.csr_array((values, rows.indices, rows.indptr), rows.shape)


def _from_jax(matrix: BCOO) -> scipy.sparse.coo_array:
    places = np.asarray(matrix.indices)
    inside = places[:, 0] < matrix.shape[0]  # JAX pads lists with positions outside the matrix
    return scipy.sparse.coo_array(
        (np.asarray(matrix.data)[inside], tuple(places[inside].T)), shape=matrix.shape
    )


def _shifted(columns: list[Any]) -> list[Any]:
    """Subtract a constant from features without zeros, whose squares may exceed their deviations.

    A feature with zeros deviates from its mean by as much as its size.
    """
    full = np.all([np.diff(x.indptr) == x.shape[0] for x in columns], axis=0)
    first = np.zeros(len(full))
    first[full] = columns[0].data[columns[0].indptr[:-1][full]]
    moved = []
    for x in columns:
        values = x.data - np.repeat(first, np.diff(x.indptr))
        moved.append(scipy.sparse.csc_array((values, x.indices, x.indptr), x.shape))
    return moved


def _holds_squares(columns: list[Any], precision: np.dtype) -> bool:
    """Whether squares of the largest samples are far from where this precision ends."""
    largest = max(float(np.abs(x.data).max(initial=0)) for x in columns)
    limits = np.finfo(precision)
    return largest == 0 or float(limits.tiny) ** 0.25 < largest < float(limits.max) ** 0.25


def _fill_moment(
    moment: Float[np.ndarray, "features features"], columns: Any, center: Float[np.ndarray, " _"]
) -> None:
    """Fill in ONE client's second moment about a centre, in double precision block by block."""
    samples, features = columns.shape
    # The sum of (x - c)(x - c)' is that of xx', less that of c(x - c / 2)' and its transpose.
    half = columns.sum(axis=0) / samples - center / 2
    for start in range(0, features, BLOCK):
        block = slice(start, min(start + BLOCK, features))
        products = columns[:, : block.stop].T @ columns[:, block].toarray() / samples
        products -= np.outer(center[: block.stop], half[block])
        products -= np.outer(half[: block.stop], center[block])
        moment[: block.stop, block] = products
        moment[block, : block.stop] = products.T
