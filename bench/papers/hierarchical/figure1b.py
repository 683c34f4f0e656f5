"""Error of local, global and personalized components as heterogeneity grows."""

from collections.abc import Mapping

import numpy as np

from papers.hierarchical._laws import (
    GLOBAL,
    LOCAL,
    OURS,
    PRINTED,
    TOLERANCE,
    by_method,
    errors,
    margin,
    means_of,
    picture,
    swept,
)
from papers.report import Found, Target, at_least, claims, near
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
    means = means_of(found)
    apart = means[GLOBAL] - means[LOCAL]
    first, crossing = int(np.argmax(apart > 0)), np.nan  # where they do not cross
    if first > 0:
        crossing = np.interp(0, apart[first - 1 : first + 1], variances[first - 1 : first + 1])
    statements = {
        "personalized smallest: least margin": (margin(means).min(), at_least(-0.001)),
        "global beats local at the smallest variance by": (-apart[0], at_least(0.1)),
        "local beats global at the largest variance by": (apart[-1], at_least(0.1)),
        "global and local cross at": (crossing, near(0.057, 0.006)),
        "personalized is global at the smallest variance, but for": (
            means[GLOBAL][0] - means[OURS][0], near(0, 0.005),
        ),
        "personalized is local at the largest variance, but for": (
            means[LOCAL][-1] - means[OURS][-1], near(0, 0.005),
        ),
    }  # fmt: skip
    return Found(
        by_method(found) | claims(COLUMNS, statements),
        figures={"figure1b": picture({"n = 20": found}, "prior_variance")},
        arrays={"variance": variances} | means,
    )


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
