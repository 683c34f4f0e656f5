"""Errors over the rounds with more local components than there are."""

from typing import Any

import jax
import numpy as np

from papers.perpca._noiseless import (
    EXTRA,
    FALLEN,
    FALLS,
    LINEARLY,
    STAYED,
    aligned,
    decades,
    decades_drawn,
    descend,
    noiseless,
    rank_name,
    repeated,
    split,
    worst,
)
from papers.report import Found, Interval, Labels, Target
from papers.runs import Seeds

EVERY = 10  # rounds
MOST = 3  # components too many with which the errors still fall


def run(seeds: Seeds, *, rounds: int = 1000, starts: int = 3) -> Found:
    """All starts of a rank in one compiled call."""
    curves: dict[str, dict[str, np.ndarray]] = {}
    with jax.enable_x64(True):
        data_keys, keys = seeds.split(2)
        problem, keys = repeated(noiseless(data_keys), starts), split(keys, starts)
        shared = aligned(problem, keys, 0.35)
        for extra in EXTRA:
            solution = descend(problem, shared, keys, 1 + extra, rounds=rounds, every=EVERY)
            curves[rank_name("r2", extra)] = decades(solution, EVERY)
    measured: dict[Labels, Any] = {}
    for extra in EXTRA:
        rank = rank_name("r2", extra)
        for name, values in curves[rank].items():
            last = values[:, -1]
            if name == "reconstruction":
                measured[rank, f"log10 {name} error"] = worst(last, len(seeds), FALLS, LINEARLY)
            else:
                does = last < FALLEN if extra <= MOST else last > STAYED
                measured[rank, _quantity(name, extra)] = does.reshape(len(seeds), -1).mean(1)
    return Found(
        measured,
        notes=[
            f"Noiseless, step size 0.1, after {rounds} rounds, {starts} random starts per seed at "
            "cosine 0.35 with the true shared component (see perpca/table3). An error has fallen "
            f"if it is below 1e{FALLEN} and stays if it is above 1e{STAYED}.",
        ],
        figures={"figure7": decades_drawn(curves, EVERY)},
        arrays={f"{rank} {name}": v for rank, c in curves.items() for name, v in c.items()},
    )


def _quantity(name: str, extra: int) -> str:
    return f"{name} error {'falls' if extra <= MOST else 'stays'}: share of starts"


# The reference has three runs of each rank, which all do so; that is to be expected once in twenty
# times where the share is 0.37.
_SHARE = Interval(0.05 ** (1 / 3), 1, "3 of 3")
TARGET = Target(
    run,
    title="Shi & Kontar (2024), Figure 7: more local components than there are",
    columns=("rank of V", "quantity"),
    reference={
        (rank_name("r2", extra), _quantity(name, extra)): _SHARE
        for extra in EXTRA
        for name in ("global", "local")
    },
    notes=[
        "Whether the local components take up the shared direction is a matter of the start. The "
        "paper draws one run: errors fall linearly up to three components too many, and do not "
        "with more.",
    ],
)
