"""Draws graphs of labelled grids of runs."""

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxfed._checks import check_instance, check_list, check_name, check_texts
from jaxfed._optional import require
from jaxfed.plot import drawing

if TYPE_CHECKING:
    from xarray import DataArray, Dataset


class _Line(NamedTuple):
    """One line of the graph: means, standard deviations, and the settings it belongs to."""

    mean: np.ndarray
    deviation: np.ndarray
    settings: list[str]


def grid(
    found: "Dataset",
    x: str,
    *,
    over: str | Sequence[str] = (),
    names: Sequence[str] | None = None,
    scale: Literal["log", "linear"] = "log",
    label: str | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw a grid's variables along one dimension, with a line per variable and other setting.

    Args:
        found: the result of `jaxfed.grid`, a part of it, or any other `xarray.Dataset`.
        x: the dimension of the horizontal axis; without coordinates, it is numbered from 0.
        over: dimensions to average over, such as seeds; a band shows one standard deviation (with
            n - 1). NaN values are not skipped.
        names: the variables to draw, in this order; all by default.
        scale: scale of the horizontal axis.
        label: label of the vertical axis; by default the name of the only variable.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: if a dimension or variable does not exist, or a variable lacks `x` or has
            another dimension without coordinates.
        ImportError: if Matplotlib is not installed.
    """
    dataset = require("xarray", extra="sweep").Dataset
    check_instance("found", found, dataset, "an xarray.Dataset")
    check_name("scale", scale, ("log", "linear"))
    if names is not None:
        check_list("names", names, "names of variables")
        check_texts("names", names)
    over = (over,) if isinstance(over, str) else over
    dimensions = list(found.dims)
    for name in over:
        if name not in dimensions:
            raise ValueError(f"over: wanted some of the dimensions {dimensions}, got {name!r}")
    if x not in dimensions or x in over:
        left = [name for name in dimensions if name not in over]
        raise ValueError(f"x: wanted one of the dimensions {left}, got {x!r}")
    chosen = [str(name) for name in found] if names is None else list(names)
    for name in chosen:
        if name not in list(found):
            raise ValueError(f"names: wanted some of {list(found)}, got {name!r}")
    along = found[x].values
    lines = {name: _lines(found[name], x, over) for name in chosen}
    target = drawing.one_axes(figure, ax, 5.0, 3.4)
    axes = target.axes
    for i, name in enumerate(chosen):
        for j, line in enumerate(lines[name]):
            # With several variables, colours distinguish them, and dashes their settings.
            look = {"color": drawing.colour(i if len(chosen) > 1 else j), "linewidth": 1.2}
            dashes = ("-", "--", ":", "-.")[j % 4 if len(chosen) > 1 else 0]
            text = ", ".join([_words(name), *line.settings])
            axes.plot(along, line.mean, label=text, linestyle=dashes, **look)
            if np.isfinite(line.deviation).all():
                ends = line.mean - line.deviation, line.mean + line.deviation
                axes.fill_between(along, *ends, color=look["color"], alpha=0.15, lw=0)
    drawing.light(axes)
    axes.set_xscale(scale)
    axes.set_xlabel(_words(x), fontsize=9)
    if label is not None or len(chosen) == 1:
        axes.set_ylabel(label or _words(chosen[0]), fontsize=9)
    number = sum(map(len, lines.values()))
    if number > 1:
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if number > 6 else {}
        axes.legend(fontsize=7, frameon=False, **beside)
    return target.returned


def _lines(values: "DataArray", x: str, over: Sequence[str]) -> list[_Line]:
    """The lines of one variable."""
    if x not in values.dims:
        raise ValueError(
            f"names: wanted variables along {x!r}, got {values.name!r} of {values.dims}"
        )
    over = [name for name in over if name in values.dims]
    mean = values.mean(over, skipna=False) if over else values
    # A single value has no standard deviation.
    several = math.prod(values.sizes[name] for name in over) > 1
    sd = values.std(over, ddof=1, skipna=False) if several else mean * np.nan
    others = [name for name in mean.dims if name != x]
    for name in others:
        if name not in mean.coords:
            raise ValueError(
                f"names: {values.name!r} has the dimension {name!r}, which has no coordinates; "
                "reduce it, choose from it by isel, or give it coordinates"
            )
    lines = []
    for position in itertools.product(*(range(mean.sizes[name]) for name in others)):
        place = dict(zip(others, position, strict=True))
        words = [
            f"{_words(name)} {_value(mean[name].values[i])}"
            for name, i in place.items()
            if mean.sizes[name] > 1
        ]
        lines.append(_Line(mean.isel(place).values, sd.isel(place).values, words))
    return lines


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, np.number) else str(value)


def _words(name: Any) -> str:
    return str(name).replace("_", " ")
