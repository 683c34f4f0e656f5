"""Gaussian noise for moments that is sampled exactly, on a grid, from the system's randomness."""

from typing import Any

import numpy as np
from jaxtyping import Float

from jaxfed._optional import require

BITS = 36  # of the noise's standard deviation, in units of the grid
MOST = 60  # bits of a number on the grid


def with_exact_noise(
    matrix: Float[np.ndarray, "features features"], deviation: float, noise_multiplier: float
) -> Float[np.ndarray, "features features"]:
    """Add `exact_noise` to a symmetric matrix.

    It is isotropic in the Frobenius norm, with the standard deviation on the diagonal.

    Args:
        matrix: in double precision.
        deviation: as in `exact_noise`.
        noise_multiplier: as in `exact_noise`.
    """
    rows, columns = np.triu_indices(len(matrix))
    lengths = np.where(rows == columns, 1, 2**0.5)  # entries beside the diagonal count twice
    noisy = exact_noise(matrix[rows, columns] * lengths, deviation, noise_multiplier)
    found = np.zeros_like(matrix)
    found[rows, columns] = found[columns, rows] = noisy / lengths
    return found


def exact_noise(
    entries: Float[np.ndarray, " entries"], deviation: float, noise_multiplier: float
) -> Float[np.ndarray, " entries"]:
    r"""Round numbers to a grid, and add noise of the discrete Gaussian distribution.

    To round moves each of two neighbours by at most \(\sqrt{k} / 2\) steps of the grid, with k
    entries, so the noise is larger by \(\sigma \sqrt{k}\) steps. At \(2^{36}\) steps, the discrete
    distribution has the \(\varepsilon\) and \(\delta\) of the continuous one.

    Source: Canonne, Kamath & Steinke (2020), The discrete Gaussian for differential privacy, whose
    sampler OpenDP has; Mironov (2012), On significance of the least significant bits for
    differential privacy, for why floating-point noise is not enough.

    Args:
        entries: in double precision.
        deviation: \(\sigma \Delta\).
        noise_multiplier: \(\sigma\).

    Raises:
        ImportError: if OpenDP is not installed.
    """
    opendp: Any = require("opendp.prelude", extra="privacy")
    opendp.enable_features("contrib")  # as the library calls all that has no formal proof yet
    largest = float(np.max(np.abs(entries))) / deviation
    step = deviation / 2.0 ** min(BITS, MOST - np.ceil(np.log2(max(largest, 1))))
    scale = deviation / step + noise_multiplier * len(entries) ** 0.5
    space = opendp.vector_domain(opendp.atom_domain(T="i64")), opendp.l2_distance(T="f64")
    noisy = opendp.m.make_gaussian(*space, scale=scale)
    drawn = noisy([int(x) for x in np.rint(entries / step)])
    return np.asarray(drawn, float) * step
