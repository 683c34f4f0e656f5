"""More views: the same cost in each round as without compression."""

from typing import Any

import jax
import numpy as np

from papers.drawing import curves as curves_drawn
from papers.gcca import _linear as linear
from papers.report import Found, Labels, cells
from papers.runs import Seeds

SECONDS, GROWN = "processor time of a round / full precision's", "the same / that of 10 views"
GAP = "largest relative gap of any round"
_FULL, _COARSE = f"{linear.FULL}, rounds to 1.5x", "3 bits, rounds to 1.5x"
NUMBERS = (10, 50, 100)  # of views


def run(seeds: Seeds, *, draws: int = 17, rounds: int = 200) -> Found:
    """All draws of a seed in one compiled call for each number of views and kind of message."""
    measured: dict[Labels, list[float]] = {}
    seconds: dict[Labels, list[float]] = {}
    panels: dict[tuple[str, str, str], dict[str, Any]] = {}  # of the first seed
    for seed in seeds:
        keys = jax.random.split(jax.random.key(seed), draws)
        first = 0.0
        for number in NUMBERS:
            views = linear.drawn_views(keys, views=number)
            least, start = linear.least_of(views), linear.warm(views)
            exact = linear.costs_of(views, start, keys, batch=None, rounds=rounds)
            quantized = linear.costs_of(views, start, keys, 3, batch=None, rounds=rounds)
            ours, theirs = quantized.mean(0), exact.mean(0)
            for label, value in (
                (GAP, np.max(np.abs(ours - theirs) / theirs)),
                (_FULL, linear.position_at(exact, least, 1.5)),
                (_COARSE, linear.position_at(quantized, least, 1.5)),
            ):
                measured.setdefault((number, label), []).append(value)
            theirs, ours = (
                linear.processor_time(views, start, keys, bits, batch=None) for bits in (None, 3)
            )
            first = first or ours
            panel = panels.setdefault((f"{number} views", "processor time, s", "cost"), {})
            for name, cost, spent in (
                (linear.FULL, exact.mean(0), theirs),
                ("3 bits", quantized.mean(0), ours),
            ):
                panel.setdefault(name, (np.arange(1, rounds + 2) * spent / draws, cost))
            seconds.setdefault((number, SECONDS), []).append(ours / theirs)
            seconds.setdefault((number, GROWN), []).append(ours / first)
    notes = [
        f"{draws} draws a seed, {rounds} rounds. The paper prints no number of its curves. "
        "The reference's gaps are allowed a half of themselves: they are largest values."
    ]
    without = "the paper prints no number of its seconds"
    return Found(
        measured | cells(seconds, incomparable=without), notes, {"figure7": curves_drawn(panels)}
    )
