"""Draw graphs side by side, as most figures of the papers are laid out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfed.plot.drawing import canvas, colour, light


def graphs(titles: Sequence[tuple[str, str, str]], width: float = 4.2) -> Iterator[Any]:
    """Axes side by side in one figure, each with title, horizontal and vertical label."""
    figure = canvas(None, width * len(titles), 3.4)
    for axes, (title, x, y) in zip(
        np.atleast_1d(figure.subplots(1, len(titles))), titles, strict=True
    ):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(x, fontsize=9)
        axes.set_ylabel(y, fontsize=9)
        light(axes)
        yield axes


def curves(
    panels: Mapping[tuple[str, str, str], Mapping[str, tuple[Any, Any]]],
    scales: tuple[str, str] = ("log", "log"),
    **style: Any,
) -> Callable[[], Any]:
    """A figure of named lines.

    Args:
        panels: the lines of each graph, by its title and its horizontal and vertical label; a line
            is its places and its heights, by its name.
        scales: horizontal and vertical, `"linear"` or `"log"`.
        style: of every line, as `plot` of Matplotlib's axes takes it.

    Returns:
        What draws it.
    """

    def draw() -> Any:
        figure = None
        for lines, axes in zip(panels.values(), graphs(list(panels)), strict=True):
            for i, (name, (x, y)) in enumerate(lines.items()):
                axes.plot(x, y, color=colour(i), label=name, **style)
            axes.set_xscale(scales[0])
            axes.set_yscale(scales[1])
            legend(axes)
            figure = axes.figure
        return figure

    return draw


def legend(axes: Any, fontsize: float = 7, **options: Any) -> None:
    """Names of the lines, without a frame."""
    axes.legend(fontsize=fontsize, frameon=False, **options)
