"""Rounds to multiples of the least cost, and compression ratios, by bits."""

import jax
import numpy as np

from jaxfed import channel as channels
from papers.gcca._linear import (
    BATCH,
    FULL,
    GOALS,
    bits_an_entry,
    bits_sent,
    costs_of,
    drawn_views,
    least_of,
    position_at,
    saved,
    saved_in_all,
    solved,
    warm,
    wire_of,
)
from papers.report import (
    Found,
    Labels,
    at_most,
)
from papers.runs import Seeds

# What goes beyond the paper: rounding to the nearest of five levels, each in as many bits as its
# frequency calls for.
CODED = channels.difference(channels.quantize(levels=2, rounding="nearest", coding="entropy"))
CODED_NAME = "5 symbols, nearest, entropy coded"
RATIO, RATIO_IN_ALL = "compression ratio at 1.5x", "compression ratio at 1.5x, start included"


def run(seeds: Seeds, *, draws: int = 50, rounds: int = 45) -> Found:
    """All draws of a seed in one compiled call for each kind of message."""
    measured: dict[Labels, list[float]] = {}
    arrays = {}
    for seed in seeds:
        keys = jax.random.split(jax.random.key(seed), draws)
        views = drawn_views(keys)
        least, start = least_of(views), warm(views)
        entries = start.shared[0].size
        at = {}
        for bits in (None, 3, 4, 5):
            name = FULL if bits is None else f"{bits} bits"
            costs, sent = solved(views, start, keys, wire_of(bits), BATCH, rounds)
            arrays[f"{name} | seed {seed}"] = costs.mean(0)
            for goal in GOALS:
                at[bits, goal] = position_at(costs, least, goal)
                measured.setdefault((name, f"rounds to {goal}x"), []).append(at[bits, goal])
            if bits is not None:
                ratio = saved(at[bits, 1.5], at[None, 1.5], bits)
                measured.setdefault((name, RATIO), []).append(ratio)
                ratio = saved_in_all(bits_sent(sent, at[bits, 1.5]), at[None, 1.5], entries)
                measured.setdefault((name, RATIO_IN_ALL), []).append(ratio)
        costs, sent = solved(views, start, keys, CODED, BATCH, rounds)
        arrays[f"{CODED_NAME} | seed {seed}"] = costs.mean(0)
        for goal in GOALS:
            reached = position_at(costs, least, goal)
            measured.setdefault((CODED_NAME, f"rounds to {goal}x"), []).append(reached)
        bits = bits_an_entry(sent, reached, entries)
        ratio = saved(reached, at[None, 1.5], bits)
        measured.setdefault((CODED_NAME, "bits an entry"), []).append(bits)
        measured.setdefault((CODED_NAME, RATIO), []).append(ratio)
        ratio = saved_in_all(bits_sent(sent, reached), at[None, 1.5], entries)
        measured.setdefault((CODED_NAME, RATIO_IN_ALL), []).append(ratio)
        for contraction in (1.0, 2.0):
            costs = costs_of(views, start, keys, 2, rounds=rounds, contraction=contraction)
            name = "2 bits" if contraction == 1 else "2 bits, contraction 2"
            arrays[f"{name} | seed {seed}"] = costs.mean(0)
            label = "least cost of any round" if contraction == 1 else "rounds to 1.5x"
            value = costs.mean(0).min() if contraction == 1 else position_at(costs, least, 1.5)
            measured.setdefault((name, label), []).append(float(value))
    with np.errstate(invalid="ignore"):  # NaN where neither gets there, which differs
        more = {
            f"rounds to 1.5x that {name} needs more than {FULL}": (
                np.subtract(measured[name, "rounds to 1.5x"], measured[FULL, "rounds to 1.5x"]),
                at_most(1),
            )
            for name in ("3 bits", "4 bits", "5 bits", CODED_NAME)
        }
    return Found(
        measured,
        claims=more,
        notes=[
            f"Each seed is a mean over {draws} draws, the same for all bits; batches of {BATCH}, "
            "10 inner steps, warm start.",
        ],
        arrays=arrays,
    )
