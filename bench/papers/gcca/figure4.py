"""Cost against bits per variable and against rounds, by bits."""

from typing import Any

import jax
import numpy as np

from jaxfed.gcca import bits_per_variable
from papers.drawing import curves as curves_drawn
from papers.gcca._linear import FULL, costs_of, drawn_views, warm
from papers.report import Found, Labels
from papers.runs import Seeds

_AT = (1, 5, 10, 17, 100)  # rounds


def run(seeds: Seeds, *, draws: int = 50, rounds: int = 100) -> Found:
    """All draws of a seed in one compiled call for each number of bits."""
    measured: dict[Labels, list[float]] = {}
    curves: dict[str, list[Any]] = {}
    for seed in seeds:
        keys = jax.random.split(jax.random.key(seed), draws)
        views = drawn_views(keys)
        start = warm(views)
        for bits in (None, 2, 3, 4, 5):
            name = FULL if bits is None else f"{bits} bits"
            mean = costs_of(views, start, keys, bits, rounds=rounds).mean(0)
            curves.setdefault(name, []).append(mean)
            for t in _AT:
                if t <= rounds:
                    measured.setdefault((name, f"cost after {t} rounds"), []).append(mean[t])
    means = {name: np.mean(values, 0) for name, values in curves.items()}
    by_rounds = {name: (1 + np.arange(rounds + 1), y) for name, y in means.items()}
    by_bits = {
        name: (
            [bits_per_variable(t, 32 if name == FULL else int(name[0])) for t in range(len(y))],
            y,
        )
        for name, y in means.items()
    }
    return Found(
        measured,
        notes=[
            f"Each seed is a mean over {draws} draws; the paper draws its curves and prints no "
            "number of them. A draw's slowest direction makes the mean cost scatter: the "
            "reference's numbers, of draws of its own, are allowed 35 per cent.",
        ],
        figures={
            "rounds": curves_drawn({("rounds", "position", "cost"): by_rounds}),
            "bits": curves_drawn({("bits", "bits per variable", "cost"): by_bits}),
        },
        arrays={name: np.stack(values) for name, values in curves.items()},
    )
