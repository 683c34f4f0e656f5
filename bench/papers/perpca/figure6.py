"""Subspace error against the number of clients."""

from collections.abc import Sequence

from papers.perpca._growth import BOTH, OURS, SHARED, SLOPE, growing, known
from papers.report import Found, Interval, Target
from papers.runs import Seeds

CLIENTS = (10, 30, 100, 300, 1000)


def run(seeds: Seeds, *, clients: Sequence[int] = CLIENTS) -> Found:
    """All seeds of a number of clients and method in one compiled call."""
    return growing(seeds, "clients", clients)


# Mean and standard deviation of the reference's 24 draws (`bench/reference_values.py`).
_LAW = {
    BOTH: (
        (0.01031, 0.00186),
        (0.006941, 0.00041),
        (0.005956, 0.000208),
        (0.005691, 9.59e-05),
        (0.005613, 5.48e-05),
    ),
    SHARED: (
        (0.003528, 0.0013),
        (0.001039, 0.000257),
        (0.0002939, 7.68e-05),
        (0.0001045, 2.85e-05),
        (3.306e-05, 1.01e-05),
    ),
}
TARGET = Target(
    run,
    title="Shi & Kontar (2024), Figure 6: subspace error and number of clients",
    columns=("method", "quantity", "N"),
    reference=known(_LAW, CLIENTS),
    paper={
        (OURS, BOTH, SLOPE): Interval(-0.5, 0, "falls slowly"),
        (OURS, SHARED, SLOPE): Interval(-2, -0.5, "falls faster"),
    },
    notes=[
        "10,000 samples of the rich clients, in the well-posed setting of Figure 4. What all "
        "clients share is learned from all of them, the local components are not.",
    ],
)
