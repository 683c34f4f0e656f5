"""Error against the number of clients."""

from typing import Any

import numpy as np

from papers.hierarchical._laws import (
    BOTH,
    GLOBAL,
    LOCAL,
    OURS,
    READINGS,
    TOLERANCE,
    at_least_half,
    by_method,
    curves_of,
    errors,
    least,
    margins,
    picture,
    swept,
    values_of,
)
from papers.report import Found, Interval, Labels, Target, at_most, claims, near
from papers.runs import Seeds

FIGURE1D = {
    3: (1.349, 1.348),
    5: (1.348, 1.344),
    10: (1.335, 1.331),
    20: (1.318, 1.311),
    50: (1.280, 1.274),
    100: (1.248, 1.243),
    200: (1.224, 1.220),
}
COLUMNS = ("0.1 is the", "m", "method")


def run(seeds: Seeds) -> Found:
    """Both readings, all numbers of clients and seeds."""
    sizes = list(FIGURE1D)
    law = {"clients": max(sizes), "features": 100, "rank": 20, "samples": 10}
    measured: dict[Labels, Any] = {}
    statements, panels = {}, {}
    for reading, variance in READINGS.items():
        axes = {"clients": sizes, "seed": list(seeds.first(1) if reading == "variance" else seeds)}
        found = swept(
            errors, axes, prior_variance=variance, law=law, names=(LOCAL, GLOBAL, OURS),
            solver="gradient", rounds=100,
        )  # fmt: skip
        measured |= by_method(found, reading)
        panels[f"0.1 is the {reading}"] = found
        values = values_of(found)
        local, everybody, ours = (values[name] for name in (LOCAL, GLOBAL, OURS))
        known = np.asarray([*FIGURE1D.values()]).T
        statements |= {
            f"{reading}: personalized smallest: least margin": (
                least(margins(values)), at_least_half(*(known[0] - known[1])),
            ),
            f"{reading}: local does not change: by": (
                np.ptp(local.mean(1)), at_most(TOLERANCE),
            ),
            f"{reading}: global falls by": (
                everybody[0] - everybody[-1], at_least_half(known[0][0] - known[0][-1]),
            ),
            f"{reading}: personalized falls by": (
                ours[0] - ours[-1], at_least_half(known[1][0] - known[1][-1]),
            ),
        }  # fmt: skip
    return Found(
        measured | claims(COLUMNS, statements),
        figures={"figure1d": picture(panels, "clients")},
        arrays=curves_of(panels),
    )


def _reference() -> dict[Labels, Interval]:
    known = {(reading, m, LOCAL): 1.358 for reading in READINGS for m in FIGURE1D}
    for m, values in FIGURE1D.items():
        for name, value in zip((GLOBAL, OURS), values, strict=True):
            known["standard deviation", m, name] = value
    fewest, *_, most = FIGURE1D
    known |= {("variance", fewest, GLOBAL): 1.367, ("variance", most, GLOBAL): 1.396}
    known["variance", most, OURS] = 1.357
    return {labels: near(value, TOLERANCE) for labels, value in known.items()}


TARGET = Target(
    run,
    title="Ozkara et al. (2023), Figure 1(d): error against the number of clients, n = 10",
    columns=COLUMNS,
    reference=_reference(),
    notes=[
        BOTH,
        "Runs with fewer clients are padded and masked, so that all are one compiled "
        "call. With three clients the errors scatter by more than the margin.",
    ],
)
