"""Rounds to a KKT violation, and its curves, on arithmetic spectra of three condition numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxfed import Algorithm
from jaxfed.pca import FAPS
from papers.communication import rounds_to
from papers.drawing import curves
from papers.faps import _problems as problems
from papers.report import Found, Labels, ahead
from papers.runs import Seeds

CONDITIONS = (10, 100, 1000)
METHODS: Mapping[str, Callable[[int], Algorithm]] = problems.PAPERS | {problems.FIVE: FAPS}
_TO = (1e-3, 3e-4, 1e-4)  # KKT violations


def _rounds(violation: float) -> str:
    return f"rounds to KKT {violation:g}"


def full(seeds: Seeds, *, clients: int = 128, rounds: int = 200) -> Found:
    """The printed size and methods, of one draw of data and start for three seeds."""
    few = problems.few_of(seeds)
    found = run(
        few, features=1000, clients=clients, rounds=rounds, methods=problems.PAPERS, in_turn=True
    )
    ends: dict[Labels, Any] = {}
    for condition in CONDITIONS:
        printed, power = (
            found.arrays[f"condition {condition} | {name}"][:, -1]
            for name in (problems.PRINTED, problems.POWER)
        )
        text = f"{problems.PRINTED} ends at less of {problems.POWER}'s violation, {condition}"
        ends["claim", "", text] = ahead(printed / power, np.ones(len(few)), 0)
    return replace(found, measured=found.measured | ends)


def run(
    seeds: Seeds,
    *,
    features: int = 300,
    clients: int = 8,
    conditions: Sequence[int] = CONDITIONS,
    rounds: int = 600,
    methods: Mapping[str, Callable[[int], Algorithm]] = METHODS,
    in_turn: bool = False,
) -> Found:
    """All curves, without a stopping rule; a client has a quarter more samples than features."""
    sizes = (features * 5 // 4,) * clients
    found: dict[tuple[int, str], np.ndarray] = {}
    with jax.enable_x64(True):
        for condition in conditions:
            values = problems.arithmetic(features, condition)
            alone = problems.alone(10, values, seeds, rounds, None, in_turn=in_turn)
            found[condition, problems.SSI] = alone.curve
            data = problems.drawn(seeds, sizes, values)
            for name, make in methods.items():
                runs = problems.on(data, make(10), values, seeds, rounds, None, in_turn=in_turn)
                found[condition, name] = runs.curve
    measured: dict[Labels, Any] = {}
    for (condition, name), curve in found.items():
        for violation in _TO:
            first = rounds_to(curve, violation)
            measured[condition, name, _rounds(violation)] = np.where(first < 0, np.inf, first)
    for condition in conditions:
        ours, theirs = (
            measured[condition, name, _rounds(_TO[-1])]
            for name in (problems.PRINTED, problems.POWER)
        )
        measured["claim", "", f"{problems.PRINTED} takes fewer rounds, {condition}"] = ahead(
            ours, theirs, 0
        )
    panels = {
        (f"condition {condition}", "rounds", problems.KKT): {
            name: (1 + np.arange(rounds), np.median(found[condition, name], axis=0))
            for name in (problems.SSI, *methods)
        }
        for condition in conditions
    }
    return Found(
        measured,
        notes=[
            f"n = {features}, m = {sum(sizes)} and {clients} clients; the paper has 1000, 160000 "
            f"and 128. {rounds} rounds. {problems.started(seeds)}; the others: {len(seeds)}."
        ],
        figures={"figure4": curves(panels, ("linear", "log"))},
        arrays={f"condition {c} | {name}": curve for (c, name), curve in found.items()},
    )
