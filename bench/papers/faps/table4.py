"""Clients of uneven size: rounds and errors of all three methods, and of other local rules."""

from typing import Any

import jax
import numpy as np

import papers
from jaxfed.pca import FAPS
from papers.faps._problems import (
    FIVE,
    POWER,
    PRINTED,
    ROUNDS,
    SSI,
    TEN,
    alone,
    fewer,
    geometric,
    power,
    printed,
    put,
    starts_of,
    together,
)
from papers.report import Found, Labels, cells
from papers.runs import Seeds

_SIZES = tuple(1000 * i for i in range(1, 9))  # of the clients


def run(seeds: Seeds) -> Found:
    """Every method from the same starts."""
    measured: dict[Labels, Any] = {}
    with jax.enable_x64(True):
        values = geometric(500, 1.01)
        first = alone(10, values, seeds, 700)
        put(measured, first, SSI)
        for name, algorithm, rounds in (
            (POWER, power(10), 700),
            (PRINTED, printed(10), 600),
            (FIVE, FAPS(10), 300),
            (TEN, FAPS(10, local_steps=10), 200),
        ):
            runs = together(algorithm, values, _SIZES, seeds, rounds)
            put(measured, runs, name, beside=first.rounds[: len(seeds)])
    rounds = {name: np.asarray(measured[name, ROUNDS]) for name in (SSI, POWER, PRINTED)}
    paper = papers.find("faps/table4").paper
    claimed = {
        ("claim", f"{PRINTED} takes fewer rounds than {rival}, by"): fewer(
            rounds[PRINTED],
            rounds[rival][: len(seeds)],
            paper[PRINTED, ROUNDS],
            paper[rival, ROUNDS],
        )
        for rival in (SSI, POWER)
    }
    return Found(
        cells(measured, by="median") | claimed,
        notes=[
            f"{SSI.capitalize()}: {len(starts_of(seeds))} starts; the others: {len(seeds)} draws "
            "of data and start, where the reference has five.",
        ],
    )
