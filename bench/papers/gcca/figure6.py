"""The cost in the end by batch size, with three bits."""

from itertools import pairwise
from typing import Any

import numpy as np

import papers
from papers.drawing import curves as curves_drawn
from papers.gcca._linear import costs_of, drawn, least_of, processor_time
from papers.intervals import at_most
from papers.report import Found, Labels, ahead, cells, claim
from papers.runs import Seeds

RATIO, SECONDS = "cost / least cost", "processor time of a round / full gradient's"
BATCHES = (10, 50, 150, 500)  # of 500 entities


def run(seeds: Seeds, *, draws: int = 10, rounds: int = 1000) -> Found:
    """All draws of a seed in one compiled call for each batch size."""
    measured: dict[Labels, Any] = {}
    seconds: dict[Labels, Any] = {}
    curves: dict[int, list[Any]] = {}
    for keys, views, start in drawn(seeds, draws):
        least = float(np.mean(least_of(views)))
        for batch in BATCHES:
            whole = None if batch == 500 else batch
            mean = costs_of(views, start, keys, 3, batch=whole, rounds=rounds).mean(0)
            curves.setdefault(batch, []).append(mean / least)
            measured.setdefault((batch, RATIO), []).append(mean[-1] / least)
            spent = processor_time(views, start, keys, 3, batch=whole)
            seconds.setdefault((batch, SECONDS), []).append(spent)
    # The same draws in batches of all sizes: what they differ by scatters less than they do.
    known, steps = papers.known("gcca/figure6"), {}
    for small, large in pairwise(BATCHES):
        steps[f"{small} above {large}"] = ahead(
            measured[large, RATIO],
            measured[small, RATIO],
            (known[small, RATIO] - known[large, RATIO]) / 2,
        )
        share = np.divide(seconds[small, SECONDS], seconds[large, SECONDS])
        steps[f"{small} takes less time than {large}: share of it"] = claim(share, at_most(1.0))
    of_full = np.asarray(seconds[500, SECONDS])
    times = np.arange(rounds + 1)
    panels = {
        ("", "rounds", RATIO): {
            f"batches of {batch}": (1 + times, np.mean(y, 0)) for batch, y in curves.items()
        },
        ("", "processor time, in rounds of full gradients", RATIO): {
            f"batches of {batch}": (
                (1 + times) * np.mean(np.asarray(seconds[batch, SECONDS]) / of_full),
                np.mean(y, 0),
            )
            for batch, y in curves.items()
        },
    }
    shares = {labels: values / of_full for labels, values in seconds.items() if labels[0] != 500}
    return Found(
        measured
        | cells(shares, incomparable="the paper prints no number of its seconds")
        | {("claim", name): cell for name, cell in steps.items()},
        notes=[f"Each seed is a mean over {draws} draws; the cost after {rounds} rounds."],
        figures={"figure6": curves_drawn(panels)},
    )
