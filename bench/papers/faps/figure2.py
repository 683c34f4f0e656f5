"""Rounds of the three methods on synthetic problems of different sizes and spectra."""

from typing import Any

import numpy as np

from jaxfed.plot._figure import colour
from papers.drawing import graphs, legend
from papers.faps._grid import NOTES, RATIOS, SAME, Grid, grid
from papers.faps._problems import FIVE, POWER, PRINTED, ROUNDS, SSI
from papers.report import Found, Interval, Labels, Target, cells, within


def run(runs: Grid) -> Found:
    """Rounds by group and setting."""
    ordered = sorted(runs, key=lambda labels: "nmpr".index(labels[0][0]))
    measured = {(*labels, ROUNDS): runs[labels].rounds for labels in ordered}

    def draw() -> Any:
        groups = list(dict.fromkeys(labels[0] for labels in runs))
        titles = [(f"varying {group}", "setting", ROUNDS) for group in groups]
        figure = None
        for group, axes in zip(groups, graphs(titles, 3.6), strict=True):
            settings = list(dict.fromkeys(s for g, s, _ in runs if g == group))
            for i, method in enumerate((SSI, POWER, PRINTED, FIVE)):
                points = [(settings.index(s), np.median(run.rounds)) for (g, s, m), run in
                          runs.items() if (g, m) == (group, method)]  # fmt: skip
                x, y = zip(*points, strict=True)
                axes.plot(x, y, marker="o", markersize=4, color=colour(i), label=method)
            axes.set_xticks(range(len(settings)), settings, fontsize=6, rotation=20)
            axes.set_yscale("log")
            figure = axes.figure
        legend(axes)  # pyright: ignore[reportPossiblyUnbound]
        return figure

    return Found(cells(measured, by="median"), figures={"figure2": draw})


def _reference() -> dict[Labels, Interval]:
    # Of the four settings of n, 296, 351, 276 and 314.
    medians = {("n", SAME[0]): 305, ("m", SAME[1]): 331}
    medians |= {("p", "p = 10"): 331, ("p", "p = 20"): 324, ("p", "p = 30"): 327}
    medians |= {("p", "p = 40"): 319}
    medians |= {("ratio", x): m for x, m in zip(RATIOS, (45, 123, 331, 866), strict=True)}
    return {(*labels, SSI, ROUNDS): within(median, 0.2) for labels, median in medians.items()}


TARGET = Target(
    run,
    experiment=grid,
    title="Wang, Liu & Zhang (2022), Figure 2: rounds on synthetic problems",
    columns=("varying", "setting", "method", "quantity"),
    reference=_reference(),
    notes=[
        "The paper draws its numbers and does not print them. The reference's are medians of 8 to "
        "16 starts, which are allowed a fifth: quartiles of one start are a fifth away.",
        *NOTES,
    ],
)
