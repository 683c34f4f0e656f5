"""Subspace error against the number of clients."""

from collections.abc import Mapping, Sequence

from papers.perpca._growth import (
    AUTHORS,
    BOTH,
    ONCE,
    OURS,
    PUBLISHED,
    SHARED,
    SLOPE,
    WELL_POSED,
    growing,
    known,
)
from papers.report import Found, Interval, Target
from papers.runs import Seeds

CLIENTS = {PUBLISHED: (10, 30, 100, 300), WELL_POSED: (10, 30, 100, 300, 1000)}


def run(seeds: Seeds, *, clients: Mapping[str, Sequence[int]] = CLIENTS) -> Found:
    """All seeds of a number of clients and method in one compiled call."""
    return growing(seeds, "clients", clients, _LAW)


# Mean and standard deviation of the reference's draws (`bench/reference_values.py`), 12 of the
# published setting and 24 of the well-posed one.
_LAW = {
    (PUBLISHED, AUTHORS, BOTH): (
        (0.1284, 0.0344),
        (0.06088, 0.0118),
        (0.03684, 0.00394),
        (0.02889, 0.00103),
    ),
    (PUBLISHED, AUTHORS, SHARED): (
        (0.05922, 0.0202),
        (0.01998, 0.00608),
        (0.006272, 0.00189),
        (0.001793, 0.000476),
    ),
    (PUBLISHED, ONCE, BOTH): ((7.671, 0.118), (7.168, 0.0644), (7.135, 0.0159), (7.108, 0.00295)),
    (PUBLISHED, ONCE, SHARED): (
        (3.988, 0.00991),
        (3.985, 0.0102),
        (3.995, 0.00293),
        (3.999, 0.000808),
    ),
    (WELL_POSED, ONCE, BOTH): (
        (0.01031, 0.00186),
        (0.006941, 0.00041),
        (0.005956, 0.000208),
        (0.005691, 9.59e-05),
        (0.005613, 5.48e-05),
    ),
    (WELL_POSED, ONCE, SHARED): (
        (0.003528, 0.0013),
        (0.001039, 0.000257),
        (0.0002939, 7.68e-05),
        (0.0001045, 2.85e-05),
        (3.306e-05, 1.01e-05),
    ),
}
_SAID = {BOTH: Interval(-0.8, 0, "falls slowly"), SHARED: Interval(-2, -0.8, "falls faster")}
TARGET = Target(
    run,
    title="Shi & Kontar (2024), Figure 6: subspace error and number of clients",
    columns=("setting", "method", "quantity", "N"),
    reference=known(_LAW, CLIENTS),
    paper={
        (setting, method, quantity, SLOPE): said
        for setting, method in ((PUBLISHED, AUTHORS), (WELL_POSED, OURS))
        for quantity, said in _SAID.items()
    },
    notes=[
        "10,000 samples of the rich clients. Published: as in Figure 4, from the start of the "
        "authors' script. Well-posed: as there. What all clients share is learned from all of "
        "them, the local components are not.",
        "The paper prints no slopes; what is said to fall faster should fall nearly as 1/N.",
    ],
)
