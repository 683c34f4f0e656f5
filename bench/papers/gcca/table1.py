"""Rounds to multiples of the least cost, and compression ratios, by bits."""

import numpy as np

from jaxfed import channel as channels
from papers.gcca import _linear as linear
from papers.intervals import at_most
from papers.report import Found, Labels
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
    for seed, (keys, views, start) in zip(seeds, linear.drawn(seeds, draws), strict=True):
        least = linear.least_of(views)
        entries = start.shared[0].size
        at = {}
        for bits in (None, 3, 4, 5):
            name = linear.FULL if bits is None else f"{bits} bits"
            costs, sent = linear.solved(
                views, start, keys, linear.wire_of(bits), linear.BATCH, rounds
            )
            arrays[f"{name} | seed {seed}"] = costs.mean(0)
            for goal in linear.GOALS:
                at[bits, goal] = linear.position_at(costs, least, goal)
                measured.setdefault((name, f"rounds to {goal}x"), []).append(at[bits, goal])
            if bits is not None:
                ratio = linear.saved(at[bits, 1.5], at[None, 1.5], bits)
                measured.setdefault((name, RATIO), []).append(ratio)
                ratio = linear.saved_in_all(
                    linear.bits_sent(sent, at[bits, 1.5]), at[None, 1.5], entries
                )
                measured.setdefault((name, RATIO_IN_ALL), []).append(ratio)
        costs, sent = linear.solved(views, start, keys, CODED, linear.BATCH, rounds)
        arrays[f"{CODED_NAME} | seed {seed}"] = costs.mean(0)
        for goal in linear.GOALS:
            reached = linear.position_at(costs, least, goal)
            measured.setdefault((CODED_NAME, f"rounds to {goal}x"), []).append(reached)
        bits = linear.bits_an_entry(sent, reached, entries)
        ratio = linear.saved(reached, at[None, 1.5], bits)
        measured.setdefault((CODED_NAME, "bits an entry"), []).append(bits)
        measured.setdefault((CODED_NAME, RATIO), []).append(ratio)
        ratio = linear.saved_in_all(linear.bits_sent(sent, reached), at[None, 1.5], entries)
        measured.setdefault((CODED_NAME, RATIO_IN_ALL), []).append(ratio)
        for contraction in (1.0, 2.0):
            costs = linear.costs_of(views, start, keys, 2, rounds=rounds, contraction=contraction)
            name = "2 bits" if contraction == 1 else "2 bits, contraction 2"
            arrays[f"{name} | seed {seed}"] = costs.mean(0)
            label = "least cost of any round" if contraction == 1 else "rounds to 1.5x"
            value = (
                costs.mean(0).min() if contraction == 1 else linear.position_at(costs, least, 1.5)
            )
            measured.setdefault((name, label), []).append(float(value))
    with np.errstate(invalid="ignore"):  # NaN where neither gets there, which differs
        more = {
            f"rounds to 1.5x that {name} needs more than {linear.FULL}": (
                np.subtract(
                    measured[name, "rounds to 1.5x"], measured[linear.FULL, "rounds to 1.5x"]
                ),
                at_most(1),
            )
            for name in ("3 bits", "4 bits", "5 bits", CODED_NAME)
        }
    return Found(
        measured,
        claims=more,
        notes=[
            f"Each seed is a mean over {draws} draws, the same for all bits; batches of "
            f"{linear.BATCH}, 10 inner steps, warm start."
        ],
        arrays=arrays,
    )
