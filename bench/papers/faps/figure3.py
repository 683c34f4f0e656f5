"""Rounds of the three methods on images."""

from typing import Any

import numpy as np

from jaxfed.plot._figure import colour
from papers.drawing import graphs, legend
from papers.faps._images import NOTES, Images, images
from papers.faps._problems import FIVE, POWER, PRINTED, ROUNDS, SSI, TO_KKT
from papers.report import Found, Labels, Target, ahead, cells, draws


def run(found: Images) -> Found:
    """Rounds by data set."""
    runs, notes = found
    measured: dict[Labels, Any] = {}
    for labels, run in runs.items():
        measured[(*labels, ROUNDS)], measured[(*labels, TO_KKT)] = run.rounds, run.accurate

    def draw() -> Any:
        names = list(dict.fromkeys(name for name, _ in runs))
        axes = next(iter(graphs([("images", "", ROUNDS)])))
        for i, method in enumerate((SSI, POWER, PRINTED, FIVE)):
            heights = [np.median(runs[name, method].rounds) for name in names]
            places = np.arange(len(names)) + 0.2 * (i - 1.5)
            axes.bar(places, heights, 0.18, color=colour(i), label=method)
        axes.set_xticks(range(len(names)), names)
        legend(axes)
        return axes.figure

    claimed = {}
    for name in dict.fromkeys(name for name, _ in runs):
        ours, theirs = runs[name, PRINTED].rounds, runs[name, SSI].rounds
        text = f"{PRINTED} takes fewer rounds than {SSI}, by"
        claimed[name, "claim", text] = ahead(ours, theirs[: len(ours)], 1)
    return Found(cells(measured, by="median") | claimed, notes, {"figure3": draw})


TARGET = Target(
    run,
    experiment=images,
    title="Wang, Liu & Zhang (2022), Figure 3: rounds on images",
    columns=("images", "method", "quantity"),
    reference={
        ("MNIST", SSI, ROUNDS): draws(26, 36.5, 48),
        ("MNIST", SSI, TO_KKT): draws(23, 32.5, 44),
    },
    notes=[
        *NOTES,
        "The reference has twenty starts of subspace iteration on MNIST's test images.",
        "The paper draws its numbers and does not print them; it says that FAPS takes the fewest.",
    ],
)
