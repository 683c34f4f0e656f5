"""Subspace error against the dimension of the data."""

from collections.abc import Sequence

from papers.perpca._growth import BOTH, ONCE, OURS, SHARED, SLOPE, growing, known
from papers.report import Found, Target, near
from papers.runs import Seeds

DIMENSIONS = (15, 30, 60, 120)


def run(seeds: Seeds, *, dimensions: Sequence[int] = DIMENSIONS) -> Found:
    """All seeds of a dimension and method in one compiled call."""
    return growing(seeds, "features", dimensions)


# Least and largest of the reference's five draws (`bench/reference_values.py`).
_DRAWS = {
    BOTH: ((0.00579, 0.00628), (0.0148, 0.0157), (0.0338, 0.0352), (0.0712, 0.0737)),
    SHARED: ((0.00018, 0.000456), (0.000403, 0.000517), (0.000804, 0.00115), (0.00172, 0.00225)),
}
TARGET = Target(
    run,
    title="Shi & Kontar (2024), Figure 5 and Corollary 3: subspace error and dimension",
    columns=("method", "quantity", "d"),
    reference=known(_DRAWS, DIMENSIONS),
    paper={(method, BOTH, SLOPE): near(2, 0.3) for method in (OURS, ONCE)},
    notes=[
        "10,000 samples of the rich clients, in the well-posed setting of Figure 4, where PerPCA "
        "converges; from the published start of the authors' script the picture is that start's.",
        "The error grows as d, not as its square: it is what d directions of noise make, and "
        "Corollary 3's d² is a bound. The paper sees its curve as almost quadratic.",
    ],
)
