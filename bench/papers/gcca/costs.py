"""Costs by rounds: warm and random starts (Figure 3), and numbers of bits (Figure 4)."""

from typing import Any

import numpy as np

from papers.communication import bits_per_variable
from papers.drawing import curves
from papers.gcca import _linear as linear
from papers.report import Found, Labels
from papers.runs import Seeds


class _Curves:
    """Mean costs of each seed's draws, by what tells the curves apart."""

    def __init__(self, *at: int):
        self.at = at  # the rounds whose costs are compared
        self.measured: dict[Labels, list[float]] = {}
        self.of_seeds: dict[str, list[np.ndarray]] = {}

    def add(self, *labels: str, costs: linear.Costs) -> None:
        """Record a seed's draws."""
        mean = costs.mean(0)
        self.of_seeds.setdefault(", ".join(labels), []).append(mean)
        for t in self.at:
            if t < len(mean):
                row = (*labels, f"cost after {t} rounds")
                self.measured.setdefault(row, []).append(mean[t])

    def found(self, notes: list[str], figures: dict[str, Any]) -> Found:
        """What a target found."""
        arrays = {name: np.stack(values) for name, values in self.of_seeds.items()}
        return Found(self.measured, notes, figures, arrays)

    def means(self) -> dict[str, np.ndarray]:
        """Over the seeds."""
        return {name: np.mean(values, 0) for name, values in self.of_seeds.items()}

    def by_position(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The means along their positions, counted from 1."""
        return {name: (1 + np.arange(len(y)), y) for name, y in self.means().items()}


def by_start(seeds: Seeds, *, draws: int = 50, rounds: int = 4000) -> Found:
    """All draws of a seed in one compiled call for each start and kind of message."""
    found = _Curves(1, 2, 10, 100, 1000)
    for keys, views, warm in linear.drawn(seeds, draws):
        for start, start_point in (("warm", warm), ("random", linear.random_start(views, keys))):
            # From the random start, the authors' programs take full gradients in both.
            few = linear.BATCH if start == "warm" else None
            for name, bits, batch in (("AltMaxVar", None, None), ("CuteMaxVar", 3, few)):
                costs = linear.costs_of(views, start_point, keys, bits, batch=batch, rounds=rounds)
                found.add(name, start, costs=costs)
    return found.found(
        [f"Each seed is a mean over {draws} draws; {rounds} rounds."],
        {"figure3": curves({("cost", "position", "cost"): found.by_position()})},
    )


def by_bits(seeds: Seeds, *, draws: int = 50, rounds: int = 100) -> Found:
    """All draws of a seed in one compiled call for each number of bits."""
    found = _Curves(1, 5, 10, 17, 100)
    messages = {linear.FULL: None} | {f"{bits} bits": bits for bits in (2, 3, 4, 5)}
    for keys, views, start in linear.drawn(seeds, draws):
        for name, bits in messages.items():
            found.add(name, costs=linear.costs_of(views, start, keys, bits, rounds=rounds))
    per_variable = {
        name: ([bits_per_variable(t, messages[name] or 32) for t in range(len(y))], y)
        for name, y in found.means().items()
    }
    return found.found(
        [
            f"Each seed is a mean over {draws} draws; the paper draws its curves and prints no "
            "number of them. A draw's slowest direction makes the mean cost scatter: the "
            "reference's numbers, of draws of its own, are allowed 35 per cent."
        ],
        {
            "rounds": curves({("rounds", "position", "cost"): found.by_position()}),
            "bits": curves({("bits", "bits per variable", "cost"): per_variable}),
        },
    )
