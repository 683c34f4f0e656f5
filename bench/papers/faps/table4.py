"""Clients of uneven size: rounds and errors of all three methods, and of other local rules."""

from typing import Any

import jax
import numpy as np

import papers
from jaxfed.pca import FAPS
from papers.faps import _problems as problems
from papers.report import Found, Labels, cells
from papers.runs import Seeds

_SIZES = tuple(1000 * i for i in range(1, 9))  # of the clients


def run(seeds: Seeds) -> Found:
    """Every method from the same starts."""
    measured: dict[Labels, Any] = {}
    with jax.enable_x64(True):
        values = problems.geometric(500, 1.01)
        first = problems.alone(10, values, seeds, 700)
        problems.put(measured, first, problems.SSI)
        for name, algorithm, rounds in (
            (problems.POWER, problems.power(10), 700),
            (problems.PRINTED, problems.printed(10), 600),
            (problems.FIVE, FAPS(10, stop="objective"), 300),
            (problems.TEN, FAPS(10, local_steps=10, stop="objective"), 200),
        ):
            runs = problems.together(algorithm, values, _SIZES, seeds, rounds)
            problems.put(measured, runs, name, beside=first.rounds[: len(seeds)])
    rounds = {
        name: np.asarray(measured[name, problems.ROUNDS])
        for name in (problems.SSI, problems.POWER, problems.PRINTED)
    }
    paper = papers.find("faps/table4").paper
    claimed = {
        ("claim", f"{problems.PRINTED} takes fewer rounds than {rival}, by"): problems.fewer(
            rounds[problems.PRINTED],
            rounds[rival][: len(seeds)],
            paper[problems.PRINTED, problems.ROUNDS],
            paper[rival, problems.ROUNDS],
        )
        for rival in (problems.SSI, problems.POWER)
    }
    return Found(
        cells(measured, by="median") | claimed,
        notes=[
            f"{problems.started(seeds)}; the others: {len(seeds)} draws of data and start, where "
            "the reference has five."
        ],
    )
