"""Error of local, global and personalized components as heterogeneity grows."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from papers.hierarchical._laws import (
    GLOBAL,
    LOCAL,
    OURS,
    PRINTED,
    at_least_half,
    by_method,
    errors,
    least,
    margins,
    means_of,
    picture,
    reference_of,
    swept,
    values_of,
)
from papers.report import Found, Interval, near
from papers.runs import Seeds

VARIANCES = (0.001, 0.004, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 1.0)
_NAMES = (LOCAL, GLOBAL, OURS, PRINTED)
LAW = {"clients": 200, "features": 30, "rank": 10, "samples": 20}


def run(seeds: Seeds, *, law: Mapping[str, int] = LAW, rounds: int = 30) -> Found:
    """All variances and seeds in one compiled call."""
    variances = list(VARIANCES)
    axes = {"prior_variance": variances, "seed": list(seeds)}
    found = swept(errors, axes, law=law, names=_NAMES, block=2, rounds=rounds)
    values = values_of(found)
    apart = values[GLOBAL] - values[LOCAL]
    known = reference_of("hierarchical/figure1b", VARIANCES, _NAMES)
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
        by_method(found),
        claims=statements,
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
