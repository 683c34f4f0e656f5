"""Error of local, global and personalized components as heterogeneity grows."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from papers.hierarchical._laws import (
    GLOBAL,
    LOCAL,
    OURS,
    PRINTED,
    TOLERANCE,
    at_least_half,
    by_method,
    errors,
    least,
    margins,
    means_of,
    picture,
    swept,
    values_of,
)
from papers.report import Found, Interval, Target, claims, near
from papers.runs import Seeds

FIGURE1B = {
    0.001: (1.425, 1.0236, 1.0231, 1.0232),
    0.004: (1.425, 1.0746, 1.0692, 1.0701),
    0.01: (1.425, 1.1544, 1.1351, 1.1355),
    0.02: (1.425, 1.248, 1.213, 1.203),
    0.04: (1.426, 1.366, 1.332, 1.284),
    0.06: (1.425, 1.439, 1.380, 1.343),
    0.1: (1.425, 1.528, 1.410, 1.399),
    0.2: (1.424, 1.630, 1.423, 1.424),
    1.0: (1.423, 1.628, 1.4225, 1.4223),
}
_NAMES = (LOCAL, GLOBAL, OURS, PRINTED)
COLUMNS = ("prior variance", "method")
LAW = {"clients": 200, "features": 30, "rank": 10, "samples": 20}


def run(seeds: Seeds, *, law: Mapping[str, int] = LAW, rounds: int = 30) -> Found:
    """All variances and seeds in one compiled call."""
    variances = list(FIGURE1B)
    axes = {"prior_variance": variances, "seed": list(seeds)}
    found = swept(errors, axes, law=law, names=_NAMES, block=2, rounds=rounds)
    values = values_of(found)
    apart = values[GLOBAL] - values[LOCAL]
    known = dict(zip(_NAMES, np.asarray([*FIGURE1B.values()]).T, strict=True))
    apart_known = known[GLOBAL] - known[LOCAL]
    statements = {
        "personalized smallest: least margin": (
            least(margins(values)),
            at_least_half(*(np.minimum(known[LOCAL], known[GLOBAL]) - known[OURS])),
        ),
        "global beats local at the smallest variance by": (
            -apart[0], at_least_half(-apart_known[0]),
        ),
        "local beats global at the largest variance by": (
            apart[-1], at_least_half(apart_known[-1]),
        ),
        # Between the variances of the grid on either side of the reference's 0.057.
        "global and local cross at": (
            [_crossing(variances, seed) for seed in apart.T], Interval(0.04, 0.06, "0.057"),
        ),
        "personalized is global at the smallest variance, but for": (
            values[GLOBAL][0] - values[OURS][0], near(0, 0.005),
        ),
        "personalized is local at the largest variance, but for": (
            values[LOCAL][-1] - values[OURS][-1], near(0, 0.005),
        ),
    }  # fmt: skip
    return Found(
        by_method(found) | claims(COLUMNS, statements),
        figures={"figure1b": picture({"n = 20": found}, "prior_variance")},
        arrays={"variance": variances} | means_of(found),
    )


def _crossing(variances: Sequence[float], apart: Float[np.ndarray, " places"]) -> float:
    """Where a difference first becomes positive, on a line; NaN where it does not."""
    first = int(np.argmax(apart > 0))
    if first == 0:
        return float("nan")
    around = slice(first - 1, first + 1)
    return float(np.interp(0, apart[around], variances[around]))


TARGET = Target(
    run,
    title="Ozkara et al. (2023), Figure 1(b): error against heterogeneity, n = 20",
    columns=COLUMNS,
    reference={
        (variance, name): near(value, TOLERANCE)
        for variance, values in FIGURE1B.items()
        for name, value in zip(_NAMES, values, strict=True)
    },
    notes=[
        "The optimum of each problem, by eigenvectors (personalized) and steps (the others).",
        "Fact 1 prints half of the likelihood's gradient: that is the same problem with half "
        "the prior variance, which helps, because the optimum with the true variance "
        "regularizes too little.",
    ],
)
