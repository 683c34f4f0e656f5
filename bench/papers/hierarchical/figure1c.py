"""Error against the number of samples."""

from typing import Any

from papers.hierarchical._laws import (
    BOTH,
    GLOBAL,
    LOCAL,
    OURS,
    PRINTED,
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
from papers.report import Found, Labels, Target, at_least, claims, near
from papers.runs import Seeds

FIGURE1C = {
    "standard deviation": {
        5: (1.379, 1.284, 1.2815, 1.280),
        10: (1.358, 1.248, 1.243, 1.239),
        20: (1.320, 1.223, 1.217, 1.206),
        40: (1.283, 1.209, 1.201, 1.178),
        80: (1.231, 1.203, 1.172, 1.148),
        160: (1.165, 1.200, 1.127, 1.111),
    },
    "variance": {
        5: (1.378, 1.396, 1.378),
        10: (1.357, 1.394, 1.357),
        20: (1.320, 1.392, 1.320),
        40: (1.282, 1.390, 1.282),
        80: (1.231, 1.385, 1.231),
        160: (1.165, 1.381, 1.165),
    },
}
_NAMES = (LOCAL, GLOBAL, OURS, PRINTED)
COLUMNS = ("0.1 is the", "n", "method")


def run(seeds: Seeds) -> Found:
    """Both readings, all numbers of samples and seeds."""
    law = {"clients": 100, "features": 100, "rank": 20, "samples": max(FIGURE1C["variance"])}
    measured: dict[Labels, Any] = {}
    statements, panels = {}, {}
    for reading, variance in READINGS.items():
        literal = reading == "variance"
        axes = {
            "samples": list(FIGURE1C[reading]),
            "seed": list(seeds.first(1) if literal else seeds),
        }
        found = swept(
            errors, axes, prior_variance=variance, law=law, solver="gradient", rounds=100,
            names=_NAMES[:3] if literal else _NAMES,
        )  # fmt: skip
        measured |= by_method(found, reading)
        panels[f"0.1 is the {reading}"] = found
        values = values_of(found)
        known = [*FIGURE1C[reading].values()]
        statements |= {
            f"{reading}: personalized smallest: least margin": (
                least(margins(values)), at_least_half(*(min(k[:2]) - k[2] for k in known)),
            ),
            f"{reading}: local beats global at the most samples by": (
                values[GLOBAL][-1] - values[LOCAL][-1], at_least_half(known[-1][1] - known[-1][0]),
            ),
            f"{reading}: global beats local at the fewest samples by": (
                values[LOCAL][0] - values[GLOBAL][0], at_least_half(known[0][0] - known[0][1]),
            ),
            f"{reading}: global does not reach the truth: it ends at": (
                values[GLOBAL][-1], at_least(1 + (known[-1][1] - 1) / 2),
            ),
        }  # fmt: skip
    return Found(
        measured | claims(COLUMNS, statements),
        figures={"figure1c": picture(panels, "samples")},
        arrays=curves_of(panels),
    )


TARGET = Target(
    run,
    title="Ozkara et al. (2023), Figure 1(c): error against the number of samples, m = 100",
    columns=COLUMNS,
    reference={
        (reading, n, name): near(value, TOLERANCE)
        for reading, known in FIGURE1C.items()
        for n, values in known.items()
        for name, value in zip(_NAMES, values, strict=False)
    },
    notes=[
        BOTH,
        "As the variance one data set is enough: that global training wins with few "
        "samples, as the text says, is then not so.",
    ],
)
