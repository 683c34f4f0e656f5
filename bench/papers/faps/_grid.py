"""Section 5.4 of Wang, Liu & Zhang (2022): synthetic problems of other sizes and spectra."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfed.pca import SubspaceIteration
from jaxfed.plot.drawing import colour
from papers.drawing import graphs, legend
from papers.faps import _problems as problems
from papers.intervals import at_least
from papers.report import Found, Labels, cells
from papers.runs import Seeds

ROUNDS = 3000  # at most, as printed
FIRST = 7 + 3 + 1  # products of LocalPower's first rounds with a client's matrix beyond one each


class Setting(NamedTuple):
    """The sizes and the spectrum of a problem."""

    features: int
    samples: int  # of all clients together
    rank: int
    ratio: float  # of a singular value to the next


SETTINGS = (
    {("n", f"n = {n}"): Setting(n, 128_000, 20, 1.01) for n in (2000, 3000, 4000, 5000)}
    | {("m", f"m = {m}"): Setting(2000, m, 10, 1.01) for m in (160_000, 192_000, 224_000, 256_000)}
    | {("p", f"p = {p}"): Setting(1000, 128_000, p, 1.01) for p in (10, 20, 30, 40)}
    | {
        ("ratio", f"ratio 1 + 10^-{x}"): Setting(1000, 256_000, 10, 1 + 10**-x)
        for x in (1, 1.5, 2, 2.5)
    }
)

METHODS = (problems.SSI, *problems.PAPERS)
Grid = dict[tuple[str, str, str], problems.Outcomes]  # by group, setting and method


@jax.enable_x64(True)
def grid(
    seeds: Seeds,
    *,
    settings: Mapping[tuple[str, str], Setting] = SETTINGS,
    clients: int = 128,
    rounds: int = ROUNDS,
) -> Grid:
    """Outcomes of section 5.4: of every start of subspace iteration, and the first of the others.

    Settings of the same samples and spectrum have the same data.
    """
    runs: Grid = {}
    data: dict[tuple[int, float], list[tuple[Labels, int, problems.Large]]] = {}
    for part, (labels, (features, samples, rank, ratio)) in enumerate(settings.items()):
        problem = problems.large(seeds, problems.geometric(features, ratio), rank, part)
        runs[*labels, problems.SSI] = problems.as_printed(
            SubspaceIteration(rank, stop="objective"), problem, rounds
        )
        data.setdefault((samples, ratio), []).append((labels, rank, problem))
    for (samples, _), members in data.items():
        parts = problems.parts_of(seeds, clients, samples, members[0][2].values)
        for labels, rank, problem in members:
            for method, make in problems.PAPERS.items():
                runs[*labels, method] = problems.as_printed(make(rank), problem, rounds, parts)
    return {(*labels, m): runs[*labels, m] for labels in settings for m in METHODS}


def rounds(runs: Grid) -> Found:
    """Figure 2: rounds, and products in the place of seconds, by group and setting."""
    measured: dict[Labels, Any] = {}
    for labels, run in runs.items():
        measured[*labels, problems.ROUNDS] = run.rounds
        more = FIRST if labels[2] == problems.POWER else 0
        measured[*labels, problems.PRODUCTS] = run.products + more
    groups: dict[str, list[str]] = {}
    for group, setting, method in runs:
        if method == problems.SSI:
            groups.setdefault(group, []).append(setting)

    def draw() -> Any:
        figure = None
        titles = [(f"varying {group}", "setting", problems.ROUNDS) for group in groups]
        for (group, settings), axes in zip(groups.items(), graphs(titles, 3.6), strict=True):
            for i, method in enumerate(METHODS):
                # Of the starts that all methods have.
                count = len(runs[group, settings[0], problems.PRINTED].rounds)
                heights = [np.median(runs[group, s, method].rounds[:count]) for s in settings]
                axes.plot(heights, marker="o", markersize=4, color=colour(i), label=method)
            axes.set_xticks(range(len(settings)), settings, fontsize=6, rotation=20)
            axes.set_yscale("log")
            figure = axes.figure
        legend(axes)  # pyright: ignore[reportPossiblyUnbound]
        return figure

    claims = {}
    for group, settings in groups.items():
        for rival in (problems.SSI, problems.POWER):
            margins = []
            for setting in settings:
                ours = runs[group, setting, problems.PRINTED].rounds
                margins.append(runs[group, setting, rival].rounds[: len(ours)] - ours)
            text = f"varying {group}, {problems.PRINTED} takes fewer rounds than {rival}, by"
            claims[text] = np.min(margins, axis=0), at_least(1)
    return Found(cells(measured, by="median"), figures={"figure2": draw}, claims=claims)


def errors(runs: Grid) -> Found:
    """Table 2: means over the problems of a group, for each seed."""
    measured: dict[Labels, Any] = {}
    for group, _, method in runs:
        members = [run for labels, run in runs.items() if (labels[0], labels[2]) == (group, method)]
        measured[group, method, problems.KKT] = np.mean([run.kkt for run in members], axis=0)
        measured[group, method, problems.ERROR] = np.mean([run.error for run in members], axis=0)
    return Found(cells(measured, by="median"))
