"""Subspace error against the number of clients."""

from collections.abc import Sequence

from papers.perpca._growth import BOTH, OURS, SHARED, SLOPE, growing, known
from papers.report import Found, Interval, Target
from papers.runs import Seeds

CLIENTS = (10, 30, 100, 300, 1000)


def run(seeds: Seeds, *, clients: Sequence[int] = CLIENTS) -> Found:
    """All seeds of a number of clients and method in one compiled call."""
    return growing(seeds, "clients", clients)


# Least and largest of the reference's five draws (`bench/reference_values.py`).
_DRAWS = {
    BOTH: (
        (0.00803, 0.0138),
        (0.00647, 0.00768),
        (0.00579, 0.00628),
        (0.00566, 0.00577),
        (0.00558, 0.00569),
    ),
    SHARED: (
        (0.00173, 0.00561),
        (0.000617, 0.00136),
        (0.000181, 0.000456),
        (7.22e-05, 0.000163),
        (2.25e-05, 4.33e-05),
    ),
}
TARGET = Target(
    run,
    title="Shi & Kontar (2024), Figure 6: subspace error and number of clients",
    columns=("method", "quantity", "N"),
    reference=known(_DRAWS, CLIENTS),
    paper={
        (OURS, BOTH, SLOPE): Interval(-0.5, 0, "falls slowly"),
        (OURS, SHARED, SLOPE): Interval(-2, -0.5, "falls faster"),
    },
    notes=[
        "10,000 samples of the rich clients, in the well-posed setting of Figure 4. What all "
        "clients share is learned from all of them, the local components are not.",
    ],
)
