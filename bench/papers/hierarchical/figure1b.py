"""Error of local, global and personalized components as heterogeneity grows."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from papers.hierarchical import _laws as laws
from papers.intervals import Interval, near
from papers.report import Found
from papers.runs import Seeds

VARIANCES = (0.001, 0.004, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 1.0)
_NAMES = (laws.LOCAL, laws.GLOBAL, laws.OURS, laws.PRINTED)
LAW = {"clients": 200, "features": 30, "rank": 10, "samples": 20}


def run(seeds: Seeds, *, law: Mapping[str, int] = LAW, rounds: int = 30) -> Found:
    """All variances and seeds in one compiled call."""
    variances = list(VARIANCES)
    axes = {"prior_variance": variances, "seed": list(seeds)}
    found = laws.swept(laws.errors, axes, law=law, names=_NAMES, runs_at_once=2, rounds=rounds)
    values = laws.values_of(found)
    apart = values[laws.GLOBAL] - values[laws.LOCAL]
    known = laws.reference_of("hierarchical/figure1b", VARIANCES, _NAMES)
    apart_known = known[laws.GLOBAL] - known[laws.LOCAL]
    statements = {
        "personalized smallest: least margin": (
            laws.least(laws.margins(values)),
            laws.at_least_half(
                *(np.minimum(known[laws.LOCAL], known[laws.GLOBAL]) - known[laws.OURS])
            ),
        ),
        "global beats local at the smallest variance by": (
            -apart[0],
            laws.at_least_half(-apart_known[0]),
        ),
        "local beats global at the largest variance by": (
            apart[-1],
            laws.at_least_half(apart_known[-1]),
        ),
        # Between the variances of the grid on either side of the reference's 0.057.
        "global and local cross at": (
            [_crossing(variances, seed) for seed in apart.T],
            Interval(0.04, 0.06, "0.057"),
        ),
        "personalized is global at the smallest variance, but for": (
            values[laws.GLOBAL][0] - values[laws.OURS][0],
            near(0, 0.005),
        ),
        "personalized is local at the largest variance, but for": (
            values[laws.LOCAL][-1] - values[laws.OURS][-1],
            near(0, 0.005),
        ),
    }
    return Found(
        laws.by_method(found),
        claims=statements,
        figures={"figure1b": laws.picture({"n = 20": found}, "prior_variance")},
        arrays={"variance": variances} | laws.means_of(found),
    )


def _crossing(variances: Sequence[float], apart: Float[np.ndarray, " places"]) -> float:
    """Where a difference first becomes positive, on a line; NaN where it does not."""
    first = int(np.argmax(apart > 0))
    if first == 0:
        return float("nan")
    around = slice(first - 1, first + 1)
    return float(np.interp(0, apart[around], variances[around]))
