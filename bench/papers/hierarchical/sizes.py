"""Error against the numbers of samples and of clients: Figures 1(c) and 1(d)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from papers.hierarchical import _laws as laws
from papers.intervals import Interval, at_least, at_most
from papers.report import Found, Labels
from papers.runs import Seeds

SAMPLES = (5, 10, 20, 40, 80, 160)
CLIENTS = (3, 5, 10, 20, 50, 100, 200)
METHODS = (laws.LOCAL, laws.GLOBAL, laws.OURS)

Values = Mapping[str, np.ndarray]
Claims = dict[str, tuple[Any, Interval]]


def samples(seeds: Seeds) -> Found:
    """Figure 1(c): both readings, all numbers of samples and seeds."""

    def claims(reading: str, values: Values) -> Claims:
        known = laws.reference_of("hierarchical/figure1c", SAMPLES, METHODS, reading)
        apart, apart_known = (v[laws.GLOBAL] - v[laws.LOCAL] for v in (values, known))
        return {
            "personalized smallest: least margin": (
                laws.least(laws.margins(values)),
                laws.at_least_half(
                    *(np.minimum(known[laws.LOCAL], known[laws.GLOBAL]) - known[laws.OURS])
                ),
            ),
            "local beats global at the most samples by": (
                apart[-1],
                laws.at_least_half(apart_known[-1]),
            ),
            "global beats local at the fewest samples by": (
                -apart[0],
                laws.at_least_half(-apart_known[0]),
            ),
            "global does not reach the truth: it ends at": (
                values[laws.GLOBAL][-1],
                at_least(1 + (known[laws.GLOBAL][-1] - 1) / 2),
            ),
        }

    law = {"clients": 100, "samples": max(SAMPLES)}
    names = (*METHODS, laws.PRINTED)
    return _both_readings(seeds, "figure1c", {"samples": SAMPLES}, law, names, claims)


def clients(seeds: Seeds) -> Found:
    """Figure 1(d): both readings, all numbers of clients and seeds."""
    known = laws.reference_of("hierarchical/figure1d", CLIENTS, METHODS, "standard deviation")

    def claims(reading: str, values: Values) -> Claims:
        del reading
        return {
            "personalized smallest: least margin": (
                laws.least(laws.margins(values)),
                laws.at_least_half(*(known[laws.GLOBAL] - known[laws.OURS])),
            ),
            "local does not change: by": (
                np.ptp(values[laws.LOCAL].mean(1)),
                at_most(laws.TOLERANCE),
            ),
            "global falls by": (
                values[laws.GLOBAL][0] - values[laws.GLOBAL][-1],
                laws.at_least_half(known[laws.GLOBAL][0] - known[laws.GLOBAL][-1]),
            ),
            "personalized falls by": (
                values[laws.OURS][0] - values[laws.OURS][-1],
                laws.at_least_half(known[laws.OURS][0] - known[laws.OURS][-1]),
            ),
        }

    law = {"clients": max(CLIENTS), "samples": 10}
    return _both_readings(seeds, "figure1d", {"clients": CLIENTS}, law, METHODS, claims)


def _both_readings(
    seeds: Seeds,
    figure: str,
    axis: Mapping[str, Sequence[int]],
    law: Mapping[str, int],
    names: Sequence[str],
    claims: Callable[[str, Values], Claims],
) -> Found:
    """All sizes, with the caption's number as the standard deviation and as the variance.

    Args:
        seeds: of the runs; as the variance one data set is enough.
        figure: name of the picture's file.
        axis: the sizes, by the name of what they count.
        law: the largest sizes.
        names: the methods; the last of four is not run with the number as the variance.
        claims: statements of the paper, from a reading and the values of each method.
    """
    measured: dict[Labels, Any] = {}
    statements, panels = {}, {}
    for reading, variance in laws.READINGS.items():
        literal = reading == "variance"
        found = laws.swept(
            laws.errors,
            {name: list(places) for name, places in axis.items()}
            | {"seed": list(seeds.first(1) if literal else seeds)},
            prior_variance=variance,
            law={"features": 100, "rank": 20, **law},
            solver="gradient",
            rounds=100,
            names=names[:3] if literal else names,
        )
        measured |= laws.by_method(found, reading)
        panels[f"0.1 is the {reading}"] = found
        of_reading = claims(reading, laws.values_of(found))
        statements |= {f"{reading}: {text}": given for text, given in of_reading.items()}
    return Found(
        measured,
        claims=statements,
        figures={figure: laws.picture(panels, *axis)},
        arrays=laws.curves_of(panels),
    )
