"""Draws how many components the samples show."""

from typing import Any

import numpy as np

from jaxfed._checks import check_instance
from jaxfed.pca.ranks import SuggestedRanks
from jaxfed.plot import drawing


def ranks(ranks: SuggestedRanks, *, figure: Any = None, ax: Any = None) -> Any:
    """Draw the scores of shared and local components beside what chance and noise give.

    Args:
        ranks: result of `jaxfed.pca.suggest_ranks`.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes that the panels replace in the grid of subplots.

    Returns:
        The figure, or the axes if given, with a panel for shared and one for local components. Dots
        are filled up to the number that was found. The grey band ends at the threshold; scores in
        it are not significant. A vertical strip spans the numbers found in subsets of the clients,
        without 2.5 % at each end.

    Raises:
        ValueError: if `ranks` is no `SuggestedRanks`.
        ImportError: if Matplotlib is not installed.
    """
    check_instance("ranks", ranks, SuggestedRanks, "the result of jaxfed.pca.suggest_ranks")
    drawn = drawing.canvas(drawing.within(figure, ax), 6.0, 2.6)
    left, right = drawn.subplots(1, 2)
    _panel(left, ranks, "shared", ranks.shared_scores, ranks.shared, ranks.shared_interval, 0)
    _panel(right, ranks, "local", ranks.local_scores, ranks.local, ranks.local_interval, 1)
    left.set_ylabel("score", fontsize=9)
    lines = [f"the same in {ranks.support:.0%} of subsets"]
    if ranks.suggested is None:
        lines.append("no suggestion")
    drawn.suptitle("\n".join(lines), fontsize=8, color=drawing.GREY)
    return drawn if ax is None else ax


def _panel(
    axes: Any,
    ranks: SuggestedRanks,
    name: str,
    scores: np.ndarray,
    found: int,
    interval: tuple[int, int],
    position: int,
) -> None:
    places, colour = np.arange(1, len(scores) + 1), drawing.colour(position)
    lowest = min(float(scores.min()), 0.0) - 0.1 * max(float(scores.max()), ranks.threshold)
    axes.axhspan(lowest, ranks.threshold, color=drawing.GREY, alpha=0.15, lw=0)
    axes.axvspan(interval[0] - 0.25, interval[1] + 0.25, color=colour, alpha=0.15, lw=0)
    axes.plot(places, scores, color=colour, lw=0.8)
    axes.scatter(places[:found], scores[:found], s=24, color=colour, zorder=3)
    rest = {"facecolor": "white", "edgecolor": colour, "zorder": 3}
    axes.scatter(places[found:], scores[found:], s=24, **rest)
    drawing.light(axes)
    axes.set_ylim(bottom=lowest)
    axes.set_xlim(-0.4 if interval[0] == 0 else 0.4, len(scores) + 0.6)
    axes.set_xticks(places)
    axes.set_xlabel("component", fontsize=9)
    axes.set_title(f"{found} {name}", fontsize=9, loc="left")
