"""Six feature views of handwritten digits, and splits of the entities to classify them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxfed.data import read_views
from jaxfed.gcca import Views
from papers._files import data_file, data_folder

_DIGITS = (
    "mfeat.npz with arrays fou, fac, kar, pix, zer, mor and labels",
    "the Multiple Features data of the UCI repository",
)
NAMES = ("fou", "fac", "kar", "pix", "zer", "mor")
SPLITS = 5  # of the entities, into 70 per cent to learn a classifier from and the rest
OFF = "accuracy off full precision's, in standard errors"


def read_digits(data: Path | None) -> tuple[Views, Int[np.ndarray, " entities"]]:
    """The views, standardized, and the digits."""
    path = data_file(data_folder(data, "mfeat", *_DIGITS), "mfeat.npz")
    arrays, _ = read_views(path, names=NAMES)
    with np.load(path, allow_pickle=False) as archive:
        labels = archive["labels"]
    doubles = [np.asarray(x, np.float64) for x in arrays]
    return Views.from_arrays([(x - x.mean(0)) / x.std(0) for x in doubles]), labels


def splits(entities: int, seed: int) -> Iterator[list[np.ndarray]]:
    """The positions to test on and those to learn from."""
    rng = np.random.default_rng(seed)
    for _ in range(SPLITS):
        yield np.split(rng.permutation(entities), [round(0.3 * entities)])


def off(found: np.ndarray, full: np.ndarray, entities: int) -> float:
    """How far accuracies are from those of full precision, in standard errors of one of them.

    From the scatter over splits, or of one entity where there is none.
    """
    error = max(full.std(ddof=1), 1 / entities) / SPLITS**0.5
    return float((found - full).mean() / error)
