"""What all pictures share: how a figure is made, and its colours."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfed._optional import require
from jaxfed.core.common.checks import check_count, check_texts, host_array, is_list, is_real, refuse

SIGNED = "RdBu_r"  # components and parts of a sample: white is zero
INK = "gray_r"  # samples with values from zero up
SMOOTH = "bicubic"  # few pixels are easier to see so
COLOURS = ("#0b5fa5", "#d1495b", "#2a9d6f", "#e09f3e", "#7b5ea7", "#5c6770", "#17a2b8", "#a3543a")
GREY = "#6b7280"


def canvas(figure: Any, width: float, height: float) -> Any:
    """The figure to draw into, or a new one of this size in inches.

    A `Figure` made without pyplot is garbage like any other object once nobody holds it.
    """
    if figure is not None:
        return figure
    new = require("matplotlib.figure", extra="plot").Figure(
        figsize=(width, height), layout="constrained"
    )
    new.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    return new


def one_axes(figure: Any, ax: Any, width: float, height: float) -> tuple[Any, Any]:
    """The axes to draw into, and what the caller gets back: the figure, or its own axes."""
    if ax is not None:
        return ax, ax
    figure = canvas(figure, width, height)
    return figure.subplots(), figure


def within(figure: Any, ax: Any) -> Any:
    """The figure for several panels; in the place of `ax` if that is given."""
    if ax is None:
        return figure
    ax.set_axis_off()
    return ax.get_figure(root=False).add_subfigure(ax.get_subplotspec())


def check_place(figure: Any, ax: Any, *, panels: bool = False) -> None:
    """Refuse what nothing can be drawn into."""
    if figure is not None and not (hasattr(figure, "subplots") and hasattr(figure, "subfigures")):
        raise refuse("figure", "a Matplotlib figure or subfigure, or None", figure)
    if ax is None:
        return
    if figure is not None:
        raise ValueError("figure, ax: wanted one of the two at most, got both")
    if not hasattr(ax, "imshow"):
        raise refuse("ax", "Matplotlib axes, or None", ax)
    if panels and ax.get_subplotspec() is None:
        raise ValueError(
            "ax: wanted axes of a grid, such as plt.subplots makes, for several panels; got axes "
            "that stand by themselves"
        )


def bare(axes: Any) -> None:
    """An image's axes: no ticks, a hairline as frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(linewidth=0.4, color="#c5c9d0")


def light(axes: Any) -> None:
    """A graph's axes: open to the top and right, small grey ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelsize=8)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)


def colour(position: int) -> str:
    """The colour of the curve or class at this position; they repeat after eight."""
    return COLOURS[position % len(COLOURS)]


def limit(values: Any) -> float:
    """The end of a colour scale that is symmetric about zero."""
    return float(np.max(np.abs(values), initial=0.0)) or 1.0


def host(name: str, array: Any, ndim: int, wanted: str, *, finite: bool = True) -> np.ndarray:
    """Numbers on the host, refused if they have another number of axes or are empty."""
    values = host_array(name, array, wanted)
    if not is_real(values.dtype) or values.ndim != ndim or 0 in values.shape:
        raise refuse(name, wanted, array)
    if finite and not np.isfinite(values).all():
        raise ValueError(f"{name}: wanted finite numbers, got NaN or infinity")
    return values


def texts(name: str, given: Any, number: int) -> None:
    """Refuse what is not so many texts, or None."""
    if given is not None:
        check_texts(name, given)
        if len(given) != number:
            raise ValueError(f"{name}: wanted {number}, got {len(given)}")


def verbatim(text: str) -> str:
    """A text to be drawn as it is, where Matplotlib would take `$` for mathematics."""
    return text.replace("$", r"\$")


def named(name: str, given: Any, wanted: str) -> None:
    """Refuse what is no dictionary with names, or one of nothing."""
    if not isinstance(given, Mapping) or not given or not all(isinstance(k, str) for k in given):
        raise refuse(name, f"a dictionary of {wanted} by name, at least one", given)


def image_shape_of(features: int, image_shape: tuple[int, int] | None) -> tuple[int, int]:
    """Height and width, checked against the number of features."""
    if image_shape is None:
        raise ValueError(f"image_shape: wanted (height, width) of the {features} features")
    if not is_list(image_shape) or len(image_shape) != 2:
        raise refuse("image_shape", "(height, width)", image_shape)
    height, width = image_shape
    check_count("image_shape", height)
    check_count("image_shape", width)
    if height * width != features:
        raise ValueError(
            f"image_shape: {height} x {width} is {height * width} pixels, "
            f"there are {features} features"
        )
    return height, width
