"""`jaxfed fit ... --ranges`: public ranges of features, which released units need."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxfed import data
from jaxfed.cli._options import option
from jaxfed.core.clients.names import listing
from jaxfed.privacy.units import FACTOR, ReleasedUnits

COLUMNS = ("lower", "upper")
SHARE = 3  # of the epsilon of moments that units cost by default: a tenth of all 1/σ², nearly
# Of a half range: that of numbers spread evenly over it is 0.58, and more are at or beyond its ends
WIDE = 0.75
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


def warn(released: ReleasedUnits, ranges: Ranges, features: Sequence[str] | None) -> None:
    """Warn of released units that ranges make useless, which costs no privacy."""
    half = (ranges.upper - ranges.lower) / 2
    scale = np.asarray(released.units.scale, float) / half
    mean = (np.asarray(released.units.mean, float) - ranges.lower) / half - 1
    error = released.mean_error / half
    # The noise of a variance, from those of the mean square and of the squared mean.
    noise = np.hypot(FACTOR * error, 2 * mean * error)
    numbered = [f"feature {k} (from 0)" for k in range(len(scale))]
    names = numbered if features is None else list(features)
    for places, problem in (
        (scale**2 < 2 * noise, "are hardly above their noise; narrower ranges, or more"),
        (scale > WIDE, "are those of numbers at the ends of the range or beyond; wider ranges, or"),
    ):
        if places.any():
            listed = listing([names[k] for k in np.flatnonzero(places)])
            warnings.warn(
                f"--ranges: the released deviations of {listed} {problem} --ranges-epsilon help",
                stacklevel=2,
            )
