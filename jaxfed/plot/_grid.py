"""Labelled grids as graphs."""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxfed.core.grid import Grid
from jaxfed.plot._figure import canvas, colour, light


def grid(
    found: Grid,
    x: str,
    *,
    over: str | Sequence[str] = (),
    names: Sequence[str] | None = None,
    scale: Literal["log", "linear"] = "log",
    label: str | None = None,
    figure: Any = None,
) -> Any:
    """Draw the numbers of a grid along one axis, a line for each entry and each other setting.

    Args:
        found: what `jaxfed.grid` returned, or a part of it.
        x: the horizontal axis.
        over: axes to take means over, such as seeds; a band shows one standard deviation.
        names: which entries, in which order; all by default.
        scale: of the horizontal axis.
        label: the vertical axis; by default the name of the only entry.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.

    Returns:
        The Matplotlib figure.

    Raises:
        ValueError: if there is no such axis or entry, or an entry has axes without a name.
        ImportError: if Matplotlib is not installed.
    """
    over = (over,) if isinstance(over, str) else tuple(over)
    mean, sd = found.mean(*over), found.sd(*over)
    if x not in mean.axes:
        raise ValueError(f"x: wanted one of the axes {list(mean.axes)}, got {x!r}")
    names = list(mean.values) if names is None else list(names)
    for name in names:
        if name not in mean.values:
            raise ValueError(f"names: there are {list(mean.values)}, not {name!r}")
        if mean.values[name].ndim > len(mean.axes):
            raise ValueError(
                f"names: {name!r} has axes beyond {list(found.axes)}; name or drop them"
            )
    figure = canvas(figure, 5.0, 3.4)
    axes = figure.subplots()
    others = {name: values for name, values in mean.axes.items() if name != x}
    points = itertools.product(*others.values())
    settings = [dict(zip(others, point, strict=True)) for point in points]
    for i, name in enumerate(names):
        for j, setting in enumerate(settings):
            # Colours tell entries apart and dashes settings, where there are several of both.
            look = {"color": colour(i if len(names) > 1 else j), "linewidth": 1.2}
            dashes = ("-", "--", ":", "-.")[j % 4 if len(names) > 1 else 0]
            words = [f"{_words(k)} {v:g}" for k, v in setting.items() if len(others[k]) > 1]
            line, band = (part.at(**setting).values[name] for part in (mean, sd))
            text = ", ".join([_words(name), *words])
            axes.plot(mean.axes[x], line, label=text, linestyle=dashes, **look)
            if np.isfinite(band).all():
                ends = line - band, line + band
                axes.fill_between(mean.axes[x], *ends, color=look["color"], alpha=0.15, lw=0)
    light(axes)
    axes.set_xscale(scale)
    axes.set_xlabel(_words(x), fontsize=9)
    if label is not None or len(names) == 1:
        axes.set_ylabel(label or _words(names[0]), fontsize=9)
    lines = len(names) * len(settings)
    if lines > 1:
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if lines > 6 else {}
        axes.legend(fontsize=7, frameon=False, **beside)
    return figure


def _words(name: str) -> str:
    return name.replace("_", " ")
