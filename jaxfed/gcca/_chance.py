"""How much views agree that have nothing in common."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from scipy.optimize import minimize_scalar


def chance_agreement(features: Sequence[int] | Int[np.ndarray, " views"], entities: int) -> float:
    """The mean squared correlation of independent views with the direction that they fit best.

    Each view fits a direction of the entities by all of its features, that is by a projection. The
    largest eigenvalue of the mean of independent projections tends to the upper end of the free
    convolution of their spectra, for many entities and features in the same proportion. With two
    views of equal size it is (1 + ρ) / 2 for the largest canonical correlation ρ of noise.

    Source: Voiculescu (1986), Addition of certain non-commuting random variables, Journal of
    Functional Analysis; Wachter (1980), The limiting empirical measure of multiple discriminant
    ratios, Annals of Statistics, for two views.

    Args:
        features: of each view.
        entities: number of entities.

    Returns:
        From the share of a view alone to 1, where views together fit any direction.
    """
    share = np.minimum(np.asarray(features, float) / entities, 1)
    if share.sum() >= len(share) - 1:
        return 1.0

    def inverse(logarithm: float) -> float:
        """The inverse of the sum's Cauchy transform, whose least value is the upper end."""
        z = np.exp(logarithm)
        # R-transforms of the projections, without cancellation for small z.
        root = np.sqrt((1 - z) ** 2 + 4 * share * z)
        return float(1 / z + np.sum(2 * share / (1 - z + root)))

    found: float = minimize_scalar(inverse, bounds=(-20, 20), method="bounded").fun  # pyright: ignore[reportAttributeAccessIssue]
    return float(found) / len(share)
