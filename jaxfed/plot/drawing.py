"""Helpers of all plots: figures and axes, colours, and checks of arrays and names."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxfed._checks import check_count, check_texts, host_array, is_real, refuse
from jaxfed._optional import require

SIGNED = "RdBu_r"  # for values of both signs: zero is white
INK = "gray_r"  # for values from zero up
SMOOTH = "bicubic"  # interpolation: few pixels are easier to recognize when blurred
COLOURS = ("#0b5fa5", "#d1495b", "#2a9d6f", "#e09f3e", "#7b5ea7", "#5c6770", "#17a2b8", "#a3543a")
GREY = "#6b7280"
MOST_FEATURES = 60  # with more features, their names are not written
LETTERS = 32  # of a name beside a picture


class DrawingTarget(NamedTuple):
    """Axes to draw into, and what the plotting function returns: a new figure or given axes."""

    axes: Any
    returned: Any


def canvas(figure: Any, width: float, height: float) -> Any:
    """The given figure, or a new one of this size in inches.

    The new figure is created without pyplot, which would keep it in memory.
    """
    if figure is not None:
        return figure
    new = require("matplotlib.figure", extra="plot").Figure(
        figsize=(width, height), layout="constrained"
    )
    new.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
    return new


def one_axes(figure: Any, ax: Any, width: float, height: float) -> DrawingTarget:
    """Axes for a single plot: the given ones, or those of a figure of this size in inches."""
    _check_place(figure, ax)
    if ax is not None:
        return DrawingTarget(ax, ax)
    figure = canvas(figure, width, height)
    return DrawingTarget(figure.subplots(), figure)


def within(figure: Any, ax: Any) -> Any:
    """The figure for several panels, which takes the place of `ax` in its grid if given."""
    _check_place(figure, ax)
    if ax is None:
        return figure
    if ax.get_subplotspec() is None:
        raise ValueError("ax: wanted axes of a grid, such as from plt.subplots, for several panels")
    ax.set_axis_off()
    return ax.get_figure(root=False).add_subfigure(ax.get_subplotspec())


def _check_place(figure: Any, ax: Any) -> None:
    if figure is not None and ax is not None:
        raise ValueError("figure, ax: wanted at most one of the two, got both")
    if figure is not None and not hasattr(figure, "subfigures"):
        raise refuse("figure", "a Matplotlib figure or subfigure, or None", figure)
    if ax is not None and not hasattr(ax, "imshow"):
        raise refuse("ax", "Matplotlib axes, or None", ax)


def bare(axes: Any) -> None:
    """Style the axes of an image: no ticks, a hairline frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(linewidth=0.4, color="#c5c9d0")


def light(axes: Any) -> None:
    """Style the axes of a graph: open at the top and right, small grey ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelsize=8)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)


def without_zoom(axes: Any) -> None:
    """Show at least a thousandth of the values' size, so that rounding looks flat."""
    low, high = axes.get_ylim()
    least = 1e-3 * max(abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)


def colour(position: int) -> str:
    """The colour of the curve or class at this position; colours repeat after eight."""
    return COLOURS[position % len(COLOURS)]


def colour_bar(axes: Any, drawn: Any, label: str = "") -> None:
    """Add a colour bar for an image or a scatter plot."""
    bar = axes.get_figure().colorbar(drawn, ax=axes)
    bar.ax.tick_params(labelsize=8)
    bar.set_label(verbatim(label), fontsize=9)


def marked(line: Callable[..., Any], places: Mapping[str, float] | None) -> None:
    """Draw a broken line at each place, with `axes.axhline` or `axes.axvline`.

    A first curve has none of their colours.
    """
    for position, (name, place) in enumerate((places or {}).items()):
        dashes = ("--", "-.", ":")[position % 3]
        look = {"linestyle": dashes, "color": colour(position + 1), "linewidth": 1.4}
        line(place, label=verbatim(name), **look)


def signed_image(axes: Any, image: np.ndarray, end: float, **options: Any) -> None:
    """Draw an image of values from `-end` to `end`."""
    options = {"interpolation": SMOOTH} | options
    axes.imshow(image, cmap=SIGNED, vmin=-end, vmax=end, **options)
    bare(axes)


def limit(values: Any) -> float:
    """The end of a colour scale that is symmetric about zero."""
    return float(np.max(np.abs(values), initial=0.0)) or 1.0


def verbatim(text: str) -> str:
    """Escape a text, because Matplotlib would read `$` as mathematics."""
    return text.replace("$", r"\$")


def shortened(text: str, letters: int = LETTERS) -> str:
    """A name as `verbatim`, with the middle left out of a very long one."""
    if len(text) > letters:
        last = letters // 3
        text = f"{text[: letters - last - 1]}…{text[-last:]}"
    return verbatim(text)


def host(name: str, array: Any, ndim: int, wanted: str, *, finite: bool = True) -> np.ndarray:
    """Real numbers on the host with this number of axes, none of them empty."""
    values = host_array(name, array, wanted)
    if not is_real(values.dtype) or values.ndim != ndim or 0 in values.shape:
        raise refuse(name, wanted, array)
    if finite and not np.isfinite(values).all():
        raise ValueError(f"{name}: wanted finite numbers, got NaN or infinity")
    return values


def check_names(name: str, given: Sequence[str] | None, number: int) -> None:
    """Check that there is one string for each of `number` objects, unless it is None."""
    if given is not None:
        check_texts(name, given)
        if len(given) != number:
            raise ValueError(f"{name}: wanted {number}, got {len(given)}")


def checked_features(names: Any, number: int) -> list[str] | None:
    """The features' names, from a list or an array, or None."""
    labels = names.tolist() if isinstance(names, np.ndarray) else names
    check_names("feature_names", labels, number)
    return None if labels is None else list(labels)


def label_features(axes: Any, names: list[str] | None) -> None:
    """Label an x axis that counts features, by their names if these fit."""
    axes.tick_params(labelsize=7)
    if names is None or len(names) > MOST_FEATURES:
        ticker = require("matplotlib.ticker", extra="plot")
        axes.xaxis.set_major_locator(ticker.MaxNLocator(10, integer=True))
        axes.set_xlabel("feature", fontsize=8)
        return
    upright = {"rotation": 90} if max(map(len, names)) * len(names) > 80 else {}
    axes.set_xticks(range(len(names)), map(verbatim, names), **upright)


def check_named(name: str, given: Mapping[str, Any], wanted: str) -> None:
    """Accept a dictionary that is not empty."""
    if not isinstance(given, Mapping) or not given:
        raise refuse(name, f"a dictionary of {wanted} by name, at least one", given)


def as_images(
    name: str, array: np.ndarray, image_shape: Sequence[int] | None, *, colours: bool = False
) -> np.ndarray:
    """Rows of features as images, `(images, height, width)` or with three channels last."""
    wanted = "(height, width) or (height, width, 3)" if colours else "(height, width)"
    if image_shape is None:
        raise refuse("image_shape", f"{wanted} of {array.shape[1]} features", image_shape)
    shape = tuple(image_shape)
    if colours and len(shape) == 3 and shape[-1] == 1:
        shape = shape[:2]
    if len(shape) != 2 and not (colours and len(shape) == 3 and shape[-1] == 3):
        raise refuse("image_shape", wanted, image_shape)
    for length in shape:
        check_count("image_shape", length)
    if math.prod(shape) != array.shape[1]:
        raise ValueError(
            f"image_shape: {' x '.join(map(str, shape))} is {math.prod(shape)} numbers, {name} has "
            f"{array.shape[1]} features"
        )
    return array.reshape(len(array), *shape)
