"""Draws how sure the components of a personalized PCA are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxfed._checks import check_instance
from jaxfed.inference import Confidence
from jaxfed.plot import drawing
from jaxfed.plot._variance import MOST_NAMES

NORMAL = 1.96  # standard errors on either side that a 95 % band spans


def bands(
    confidence: Confidence,
    image_shape: tuple[int, int] | None = None,
    *,
    feature_names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw each shared axis with its standard errors.

    Axes whose variances cannot be told apart are named together: within their span, each of them is
    arbitrary.

    Args:
        confidence: result of `jaxfed.inference.confidence`.
        image_shape: height and width if features are pixels: each axis is then an image, red above
            zero and blue below, and its standard errors are an image below it, darker where they
            are larger. Otherwise, an axis is a line over the features in a band of ± 1.96 standard
            errors.
        feature_names: names of the features, if they are not pixels.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes that the panels replace in the grid of subplots.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: if `confidence` is no `Confidence`, or its features do not fit `image_shape` or
            `feature_names`.
        ImportError: if Matplotlib is not installed.
    """
    _check(confidence)
    values, errors = confidence.axes.T, confidence.axes_std.T
    names = _axis_names(confidence)
    labels = drawing.checked_features(feature_names, values.shape[1])
    panel = drawing.within(figure, ax)
    if image_shape is None:
        drawn = _lines(values, errors, names, labels, panel)
    else:
        values, errors = (
            drawing.as_images("confidence", part, image_shape) for part in (values, errors)
        )
        drawn = _images(values, errors, names, panel)
    return drawn if ax is None else ax


def angles(confidence: Confidence, *, figure: Any = None, ax: Any = None) -> Any:
    """Draw the bounds of the angles to the true components, in degrees.

    Args:
        confidence: result of `jaxfed.inference.confidence`.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given: a bar from 0 to the bound for the shared subspace, and for
        each axis or span of axes that is determined by itself.

    Raises:
        ValueError: if `confidence` is no `Confidence`.
        ImportError: if Matplotlib is not installed.
    """
    _check(confidence)
    names = ["shared subspace", *map(_group_name, confidence.groups)]
    bounds = np.degrees([confidence.angle, *confidence.group_angles])
    target = drawing.one_axes(figure, ax, 5.0, 0.9 + 0.24 * len(names))
    axes, places = target.axes, np.arange(len(names))[::-1]
    colours = [drawing.colour(0)] + [drawing.colour(1)] * (len(names) - 1)
    axes.barh(places, bounds, 0.6, color=colours)
    _finish(axes, places, names)
    axes.set_xlim(0, max(1.15 * float(bounds.max()), 1e-3))
    for place, bound in zip(places, bounds, strict=True):
        axes.text(bound, place, f" {bound:.1f}°", va="center", fontsize=8)
    axes.set_xlabel(f"{confidence.level:.0%} bound of the angle (degrees)", fontsize=9)
    return target.returned


def distances(
    confidence: Confidence,
    *,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw the share of each client's energy outside the shared subspace, with its interval.

    Args:
        confidence: result of `jaxfed.inference.confidence`.
        names: names of the clients; written beside the intervals of at most 40 clients.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given, with the client closest to the shared subspace on top.

    Raises:
        ValueError: if `confidence` is no `Confidence`, or names are not one per client.
        ImportError: if Matplotlib is not installed.
    """
    _check(confidence)
    estimate, lower, upper = (100 * np.asarray(part) for part in confidence.distance)
    clients = len(estimate)
    drawing.check_names("names", names, clients)
    written = clients <= MOST_NAMES
    target = drawing.one_axes(figure, ax, 5.0, 0.9 + min(clients, MOST_NAMES) * 0.2)
    # Intervals are drawn from the bottom, so sort the closest client last.
    axes, order = target.axes, np.argsort(-estimate, kind="stable")
    axes.hlines(np.arange(clients), lower[order], upper[order], color=drawing.colour(0), lw=1.6)
    axes.plot(estimate[order], np.arange(clients), "o", color=drawing.colour(0), markersize=3.5)
    shown = [names[int(i)] if names else f"client {i}" for i in order] if written else []
    _finish(axes, np.arange(clients)[: len(shown)], shown)
    axes.set_ylim(-0.6, clients - 0.4)
    if not written:
        axes.set_ylabel(f"{clients:,} clients", fontsize=9)
    axes.set_xlabel("energy outside the shared subspace (%)", fontsize=9)
    return target.returned


def _check(confidence: Confidence) -> None:
    wanted = "the result of jaxfed.inference.confidence"
    check_instance("confidence", confidence, Confidence, wanted)


def _group_name(group: tuple[int, ...]) -> str:
    # A group consists of neighbours.
    return f"axis {group[0] + 1}" if len(group) == 1 else f"span of axes {_ends(group)}"


def _ends(group: tuple[int, ...]) -> str:
    return f"{group[0] + 1}–{group[-1] + 1}"


def _axis_names(confidence: Confidence) -> list[str]:
    return [
        f"axis {i + 1}" + f", in span {_ends(group)}" * (len(group) > 1)
        for group in confidence.groups
        for i in group
    ]


def _finish(axes: Any, places: np.ndarray, names: Sequence[str]) -> None:
    """Style a graph with named rows."""
    drawing.light(axes)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(places, [drawing.verbatim(name) for name in names], fontsize=8)


def _lines(
    values: np.ndarray,
    errors: np.ndarray,
    names: list[str],
    features: list[str] | None,
    figure: Any,
) -> Any:
    """Each axis as a line in a band."""
    figure = drawing.canvas(figure, 7.0, 0.9 * len(values) + 0.4)
    grid = figure.subplots(len(values), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    places = np.arange(values.shape[1])
    for axes, line, error, name in zip(grid, values, errors, names, strict=True):
        ends = line - NORMAL * error, line + NORMAL * error
        axes.axhline(0, color=drawing.GREY, linewidth=0.6)
        axes.fill_between(places, *ends, color=drawing.colour(0), alpha=0.25, lw=0)
        axes.plot(places, line, color=drawing.colour(0), linewidth=1.2)
        drawing.light(axes)
        axes.set_title(name, fontsize=9, loc="left")
    drawing.label_features(grid[-1], features)
    return figure


def _images(values: np.ndarray, errors: np.ndarray, names: list[str], figure: Any) -> Any:
    """Each axis as an image above that of its standard errors."""
    height, width = values.shape[1:]
    figure = drawing.canvas(figure, 0.95 * len(values) + 0.5, 1.9 * height / width + 0.4)
    grid = figure.subplots(2, len(values), squeeze=False)
    end, largest = drawing.limit(values), drawing.limit(errors)
    for column, value, error, name in zip(grid.T, values, errors, names, strict=True):
        drawing.signed_image(column[0], value, end)
        column[0].set_title(name.replace(", ", "\n"), fontsize=8)
        look = {"cmap": drawing.INK, "interpolation": drawing.SMOOTH}
        column[1].imshow(error, vmin=0, vmax=largest, **look)
        drawing.bare(column[1])
    grid[0, 0].set_ylabel("axis", fontsize=8)
    grid[1, 0].set_ylabel("standard\nerror", fontsize=8)
    return figure
