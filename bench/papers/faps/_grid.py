"""Section 5.4 of Wang, Liu & Zhang (2022): synthetic problems of other sizes and spectra."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxfed.pca import FAPS
from jaxfed.plot._figure import colour
from papers.drawing import graphs, legend
from papers.faps import _problems as problems
from papers.report import Found, Labels, cells
from papers.runs import Seeds

RATIOS = {f"ratio 1 + 10^-{x}": 1 + 10**-x for x in (1, 1.5, 2, 2.5)}

SAME = "2000 to 5000", "160000 to 256000"  # n and m, on which subspace iteration does not depend

Grid = dict[tuple[str, str, str], problems.Outcomes]  # by group, setting and method


@jax.enable_x64(True)
def grid(seeds: Seeds) -> Grid:
    """Outcomes of section 5.4."""
    runs: Grid = {}
    slow = problems.geometric(300, 1.01)
    for p in (10, 20, 30, 40):
        runs["p", f"p = {p}", problems.SSI] = problems.alone(p, slow, seeds, 700)
    runs["n", SAME[0], problems.SSI] = runs["p", "p = 20", problems.SSI]
    runs["m", SAME[1], problems.SSI] = runs["p", "p = 10", problems.SSI]
    for name, ratio in RATIOS.items():
        values = problems.geometric(600 if ratio < 1.01 else 300, ratio)
        runs["ratio", name, problems.SSI] = problems.alone(
            10, values, seeds, 2000 if ratio < 1.01 else 700
        )

    few, even, scaled = problems.few_of(seeds), (1000,) * 8, problems.geometric(250, 1.01)
    for method, make in (
        (problems.POWER, problems.power),
        (problems.PRINTED, problems.printed),
        (problems.FIVE, FAPS),
    ):
        run = partial(problems.together, seeds=few, rounds=600)
        runs["p", "p = 10", method] = run(make(10), scaled, even)
        runs["p", "p = 20", method] = runs["n", SAME[0], method] = run(make(20), scaled, even)
        runs["m", SAME[1], method] = run(make(10), scaled, (1625,) * 8)
        for name, ratio in list(RATIOS.items())[:2]:
            runs["ratio", name, method] = run(make(10), problems.geometric(250, ratio), even)
    return runs


def rounds(runs: Grid) -> Found:
    """Figure 2: rounds by group and setting."""
    ordered = sorted(runs, key=lambda labels: "nmpr".index(labels[0][0]))
    measured = {(*labels, problems.ROUNDS): runs[labels].rounds for labels in ordered}

    def draw() -> Any:
        groups = list(dict.fromkeys(labels[0] for labels in runs))
        titles = [(f"varying {group}", "setting", problems.ROUNDS) for group in groups]
        figure = None
        for group, axes in zip(groups, graphs(titles, 3.6), strict=True):
            settings = list(dict.fromkeys(s for g, s, _ in runs if g == group))
            for i, method in enumerate(
                (problems.SSI, problems.POWER, problems.PRINTED, problems.FIVE)
            ):
                points = [
                    (settings.index(s), np.median(run.rounds))
                    for (g, s, m), run in runs.items()
                    if (g, m) == (group, method)
                ]
                x, y = zip(*points, strict=True)
                axes.plot(x, y, marker="o", markersize=4, color=colour(i), label=method)
            axes.set_xticks(range(len(settings)), settings, fontsize=6, rotation=20)
            axes.set_yscale("log")
            figure = axes.figure
        legend(axes)  # pyright: ignore[reportPossiblyUnbound]
        return figure

    return Found(cells(measured, by="median"), figures={"figure2": draw})


def errors(runs: Grid) -> Found:
    """Table 2: means over the problems of a group, for each seed."""
    measured: dict[Labels, Any] = {}
    for group, _, method in runs:
        members = [run for labels, run in runs.items() if (labels[0], labels[2]) == (group, method)]
        measured[group, method, problems.KKT] = np.mean([run.kkt for run in members], axis=0)
        measured[group, method, problems.ERROR] = np.mean([run.error for run in members], axis=0)
    return Found(cells(measured, by="median"))
