"""Warm and random start, in full precision and with three bits."""

from typing import Any

import jax
import numpy as np

from papers.drawing import curves as curves_drawn
from papers.gcca._linear import BATCH, costs_of, drawn_views, random_start, warm
from papers.report import Found, Labels
from papers.runs import Seeds

_AT = (1, 2, 10, 100, 1000)  # rounds


def run(seeds: Seeds, *, draws: int = 50, rounds: int = 4000) -> Found:
    """All draws of a seed in one compiled call for each start and kind of message."""
    measured: dict[Labels, list[float]] = {}
    curves: dict[str, list[Any]] = {}
    for seed in seeds:
        keys = jax.random.split(jax.random.key(seed), draws)
        views = drawn_views(keys)
        for start, begun in (("warm", warm(views)), ("random", random_start(views, keys))):
            # From the random start, the authors' programs take full gradients in both.
            few = BATCH if start == "warm" else None
            for name, bits, batch in (("AltMaxVar", None, None), ("CuteMaxVar", 3, few)):
                mean = costs_of(views, begun, keys, bits, batch=batch, rounds=rounds).mean(0)
                curves.setdefault(f"{name}, {start}", []).append(mean)
                for t in _AT:
                    if t <= rounds:
                        labels = (name, start, f"cost after {t} rounds")
                        measured.setdefault(labels, []).append(mean[t])
    x = 1 + np.arange(rounds + 1)
    lines = {name: (x, np.mean(y, 0)) for name, y in curves.items()}
    return Found(
        measured,
        notes=[f"Each seed is a mean over {draws} draws; {rounds} rounds."],
        figures={"figure3": curves_drawn({("cost", "position", "cost"): lines})},
        arrays={name: np.stack(values) for name, values in curves.items()},
    )
