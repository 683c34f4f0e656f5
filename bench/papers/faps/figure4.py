"""Rounds to a KKT violation, and its curves, on arithmetic spectra of three condition numbers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxfed import Algorithm, metrics
from jaxfed.pca import FAPS
from papers.drawing import curves
from papers.faps._problems import (
    FIVE,
    KKT,
    POWER,
    PRINTED,
    SSI,
    alone,
    arithmetic,
    power,
    printed,
    starts_of,
    together,
)
from papers.report import Found, Interval, Labels, Target, ahead, around
from papers.runs import Seeds

_TO = (1e-3, 3e-4, 1e-4)  # KKT violations


def _rounds(violation: float) -> str:
    return f"rounds to KKT {violation:g}"


def run(
    seeds: Seeds,
    *,
    features: int = 300,
    conditions: Sequence[int] = (10, 100, 1000),
    rounds: int = 600,
) -> Found:
    """All curves, without a stopping rule."""
    sizes = (375,) * 8
    methods: dict[str, Callable[[int], Algorithm]]
    methods = {POWER: power, PRINTED: printed, FIVE: FAPS}
    found: dict[tuple[int, str], np.ndarray] = {}
    with jax.enable_x64(True):
        for condition in conditions:
            values = arithmetic(features, condition)
            found[condition, SSI] = alone(10, values, seeds, rounds, None).curve
            for name, make in methods.items():
                runs = together(make(10), values, sizes, seeds, rounds, None)
                found[condition, name] = runs.curve
    measured: dict[Labels, Any] = {}
    for (condition, name), curve in found.items():
        for violation in _TO:
            first = np.asarray(metrics.rounds_to_accuracy(curve, violation))
            measured[condition, name, _rounds(violation)] = np.where(first < 0, np.inf, first)
    for condition in conditions:
        ours, theirs = (measured[condition, name, _rounds(_TO[-1])] for name in (PRINTED, POWER))
        measured["claim", "", f"{PRINTED} takes fewer rounds, {condition}"] = ahead(ours, theirs, 0)
    panels = {
        (f"condition {condition}", "rounds", KKT): {
            name: (1 + np.arange(rounds), np.median(found[condition, name], axis=0))
            for name in (SSI, *methods)
        }
        for condition in conditions
    }
    return Found(
        measured,
        notes=[
            f"Scaled: n = {features}, m = 3000 and 8 clients instead of 1000, 160000 and 128; "
            f"{rounds} rounds. {SSI.capitalize()}: {len(starts_of(seeds))} starts; the others: "
            f"{len(seeds)}.",
        ],
        figures={"figure4": curves(panels, ("linear", "log"))},
        arrays={f"condition {c} | {name}": curve for (c, name), curve in found.items()},
    )


# Mean and standard deviation of the reference's twelve draws.
_DRAWS: dict[tuple[int, str], tuple[tuple[float, float], ...]] = {
    (10, SSI): ((12.83, 0.58), (38.58, 3.4), (88.5, 14)),
    (10, POWER): ((7.75, 0.75), (30.33, 3.3), (74.83, 16)),
    (10, PRINTED): ((125.4, 7.6), (187.3, 9.3), (219.1, 15)),
    (10, FIVE): ((71.33, 7.1), (150.8, 8.7), (210.8, 10)),
    (100, SSI): ((14.08, 0.79), (40.25, 3.3), (90.92, 16)),
    (100, POWER): ((8.583, 0.79), (31.42, 3.4), (76.42, 14)),
    (100, PRINTED): ((128.5, 8.2), (189.5, 11), (221.2, 16)),
    (100, FIVE): ((77.58, 5.5), (157.4, 8.3), (219, 11)),
    (1000, SSI): ((14.33, 0.78), (40.5, 3.4), (91.25, 16)),
    (1000, POWER): ((8.667, 0.89), (31.58, 3.6), (76.17, 14)),
    (1000, PRINTED): ((128.6, 8.8), (189.6, 12), (217.4, 16)),
    (1000, FIVE): ((78.58, 7.1), (153.8, 7.5), (214.4, 7.7)),
}


def _reference() -> dict[Labels, Interval]:
    return {
        (condition, name, _rounds(violation)): around(*law)
        for (condition, name), known in _DRAWS.items()
        for violation, law in zip(_TO, known, strict=True)
    }


TARGET = Target(
    run,
    title="Wang, Liu & Zhang (2022), Figure 4: convergence on arithmetic spectra, p = 10",
    columns=("condition", "method", "quantity"),
    reference=_reference(),
    notes=[
        "The printed order (FAPS fastest, then LocalPower) does not come out: as printed FAPS "
        "is slow; with five local steps it overtakes the others in the end. The claim's rows have "
        f"the rounds to KKT {_TO[-1]:g} that LocalPower takes more, from the same start.",
        "Down to 1e-4 a start changes the rounds by some per cent (`bench/reference_values.py`); "
        "after 600 rounds it changes the violation by a factor of up to seventy, so ends of the "
        "curves are drawn and not compared.",
        "The paper draws its curves and prints no number of them.",
    ],
)
