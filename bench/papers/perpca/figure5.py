"""Subspace error against the dimension of the data."""

from collections.abc import Sequence

from papers.perpca._growth import BOTH, ONCE, OURS, SHARED, SLOPE, growing, known
from papers.report import Found, Target, near
from papers.runs import Seeds

DIMENSIONS = (15, 30, 60, 120)


def run(seeds: Seeds, *, dimensions: Sequence[int] = DIMENSIONS) -> Found:
    """All seeds of a dimension and method in one compiled call."""
    return growing(seeds, "features", dimensions)


# Mean and standard deviation of the reference's 12 draws (`bench/reference_values.py`).
_LAW = {
    BOTH: (
        (0.00598, 0.000165),
        (0.01535, 0.000209),
        (0.03444, 0.000523),
        (0.07217, 0.000748),
    ),
    SHARED: (
        (0.0002896, 7.57e-05),
        (0.0004708, 8.34e-05),
        (0.001055, 0.000137),
        (0.001904, 0.000225),
    ),
}
TARGET = Target(
    run,
    title="Shi & Kontar (2024), Figure 5 and Corollary 3: subspace error and dimension",
    columns=("method", "quantity", "d"),
    reference=known(_LAW, DIMENSIONS),
    paper={(method, BOTH, SLOPE): near(2, 0.3) for method in (OURS, ONCE)},
    notes=[
        "10,000 samples of the rich clients, in the well-posed setting of Figure 4, where PerPCA "
        "converges; from the published start of the authors' script the picture is that start's.",
        "The error grows as d, not as its square: it is what d directions of noise make, and "
        "Corollary 3's d² is a bound. The paper sees its curve as almost quadratic.",
    ],
)
