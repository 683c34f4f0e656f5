"""`jaxfed fit ... --ranges`: public ranges of features, which released units need."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxfed import data
from jaxfed.cli._options import option
from jaxfed.core.clients.names import listing

COLUMNS = ("lower", "upper")
SHARE = 3  # of the epsilon of moments that units cost by default: a tenth of all 1/σ², nearly
OPTIONS = [
    option(
        "--ranges",
        Path,
        "table with the columns feature, lower and upper: public ranges of the features, with "
        "--epsilon; their means and standard deviations are then released with noise as well, and "
        "standardize all samples",
        None,
        metavar="FILE",
    ),
    option(
        "--ranges-epsilon",
        float,
        f"epsilon of this release, with --ranges; default: 1/{SHARE} of --epsilon",
        None,
    ),
]


class Ranges(NamedTuple):
    """The ends of the features' ranges."""

    lower: Float[np.ndarray, " d"]
    upper: Float[np.ndarray, " d"]


def read(path: Path) -> dict[str, tuple[float, float]]:
    """Read the ranges by the features' names.

    Raises:
        ValueError: if the file is no such table, or a range is none.
        OSError: if it cannot be read.
    """
    names = {"client_column": "feature", "header": True, "columns": COLUMNS}
    tables = data.read_table(path, **names)
    found = {}
    for name, rows in zip(tables.names, tables.samples, strict=True):
        if len(rows) > 1:
            raise ValueError(
                f"--ranges: wanted one range of each feature, got {len(rows)} of {name}"
            )
        lower, upper = found[name] = (float(rows[0, 0]), float(rows[0, 1]))
        if not (np.isfinite(rows).all() and lower < upper):
            raise ValueError(
                f"--ranges: wanted lower below upper, two finite numbers, got {lower:g} and "
                f"{upper:g} of {name}"
            )
    return found


def of_features(path: Path, features: Sequence[str] | None, number: int) -> Ranges:
    """Read the ranges of the features, in their order; the file may have more.

    Args:
        path: the file.
        features: the names of the features; None if they have positions from 0 on.
        number: of the features.

    Raises:
        ValueError: as `read`, or if a feature has no range.
    """
    found = read(path)
    wanted = [str(k) for k in range(number)] if features is None else list(features)
    if missing := [name for name in wanted if name not in found]:
        said = "feature, by its position from 0 on" if features is None else "feature of the data"
        raise ValueError(
            f"--ranges: wanted a range of each {said}, got none of {listing(missing)}, but of "
            f"{listing(list(found))}"
        )
    return Ranges(*np.array([found[name] for name in wanted]).T)
