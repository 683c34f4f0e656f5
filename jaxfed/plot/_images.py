"""Components and samples as images."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxfed._optional import require
from jaxfed.core.common.checks import check_count, refuse
from jaxfed.plot._figure import (
    INK,
    SIGNED,
    SMOOTH,
    bare,
    canvas,
    check_place,
    host,
    image_shape_of,
    limit,
    named,
    texts,
    verbatim,
    within,
)

ArrayLike = Array | np.ndarray


def components(
    groups: Mapping[str, Float[ArrayLike, "d r"] | None],
    image_shape: tuple[int, int] | None = None,
    *,
    columns: int = 12,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw groups of components, each group under its name and on one colour scale.

    Args:
        groups: components in columns by the group's name, e.g. `{"shared": solution.result.shared,
            "client 3": solution.result.local[3]}`; those that are None are left out.
        image_shape: height and width if features are pixels: each component is then an image.
            Otherwise a group is one picture with a row for each component and a column for each
            feature.
        columns: images in a row.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into, whose place in the grid of subplots the panels take.

    Returns:
        The figure, or the axes where these were given.

    Raises:
        ValueError: if there is no group, or a group is not `(features, rank)` or does not fit
            `image_shape`.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax, panels=True)
    named("groups", groups, "components")
    check_count("columns", columns)
    arrays = {
        name: host(f"groups[{name!r}]", group, 2, "components of shape (features, rank)")
        for name, group in groups.items()
        if group is not None
    }
    if not arrays:
        raise ValueError("groups: wanted at least one group of components, got none")
    figure = within(figure, ax)
    if image_shape is None:
        figure = _as_rows(arrays, figure)
        return figure if ax is None else ax
    shapes = [image_shape_of(len(group), image_shape) for group in arrays.values()]
    height, width = shapes[-1]
    columns = min(columns, max(group.shape[1] for group in arrays.values()))
    rows = [-(-group.shape[1] // columns) for group in arrays.values()]
    if figure is None:
        size = 0.75
        # A name may be longer than its images are wide.
        columns = max(columns, math.ceil(0.08 * max(map(len, arrays)) / size))
        figure = canvas(None, size * columns, size * height / width * sum(rows) + 0.3 * len(rows))
    parts = np.atleast_1d(figure.subfigures(len(arrays), 1, height_ratios=[r + 0.3 for r in rows]))
    for (name, group), part, height_in_images in zip(arrays.items(), parts, rows, strict=True):
        part.suptitle(verbatim(name), fontsize=9, x=0.01, ha="left")
        grid = np.atleast_1d(part.subplots(height_in_images, columns, squeeze=False)).ravel()
        for position, axes in enumerate(grid):
            if position < group.shape[1]:
                _signed(axes, group[:, position].reshape(height, width), limit(group))
            else:
                axes.set_axis_off()
    return figure if ax is None else ax


def separation(
    original: Float[ArrayLike, "k d"],
    shared: Float[ArrayLike, "k d"] | None,
    own: Float[ArrayLike, "k d"] | None,
    image_shape: tuple[int, int],
    *,
    mean: Float[ArrayLike, " d"] | None = None,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw samples beside the shared part, the own part, and what the two make together.

    Args:
        original: the samples.
        shared: their projections onto the shared components, `(x - mean) @ U @ U.T`, or None.
        own: their projections onto their clients' own components, or None.
        image_shape: height and width of an image.
        mean: what was subtracted before the fit; added to the parts again in the last row.
        names: a title for each sample.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into, whose place in the grid of subplots the panels take.

    Returns:
        The figure, or the axes where these were given, one column per sample.

    Raises:
        ValueError: if shapes do not fit together, or both parts are None.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax, panels=True)
    samples = host("original", original, 2, "samples of shape (samples, features)")
    given = {"shared": shared, "own": own}
    parts = {
        name: host(name, part, 2, f"numbers of shape {samples.shape}")
        for name, part in given.items()
        if part is not None
    }
    if not parts:
        raise ValueError("shared, own: wanted at least one of the parts, got none")
    for name, part in parts.items():
        if part.shape != samples.shape:
            raise ValueError(f"{name}: wanted shape {samples.shape}, got {part.shape}")
    if mean is not None:
        mean = host("mean", mean, 1, f"{samples.shape[1]} numbers")
        if mean.shape != samples.shape[1:]:
            raise refuse("mean", f"{samples.shape[1]} numbers", mean)
    texts("names", names, len(samples))
    height, width = image_shape_of(samples.shape[1], image_shape)
    together = np.sum(list(parts.values()), axis=0) + (0 if mean is None else mean)
    rows = ("original", *(f"{name} part" for name in parts), "together")
    figure = canvas(
        within(figure, ax), 0.95 * len(samples) + 0.5, 0.95 * len(rows) * height / width + 0.3
    )
    grid = figure.subplots(len(rows), len(samples), squeeze=False)
    # Originals and reconstructions share one scale, the two parts another.
    low, high = float(min(samples.min(), 0)), float(samples.max())
    signed = limit(list(parts.values()))
    pictures = samples, *parts.values(), together
    for label, line, images in zip(rows, grid, pictures, strict=True):
        for axes, image in zip(line, images, strict=True):
            if label.endswith("part"):
                _signed(axes, image.reshape(height, width), signed)
            else:
                pixels = image.reshape(height, width)
                axes.imshow(pixels, cmap=INK, vmin=low, vmax=high, interpolation=SMOOTH)
                bare(axes)
        line[0].set_ylabel(label, fontsize=8)
    for axes, name in zip(grid[0], names or (), strict=False):
        axes.set_title(verbatim(name), fontsize=8)
    return figure if ax is None else ax


def _as_rows(groups: Mapping[str, np.ndarray], figure: Any) -> Any:
    ranks = [group.shape[1] for group in groups.values()]
    figure = canvas(figure, 7.0, 0.25 * sum(ranks) + 0.45 * len(ranks) + 0.3)
    grid = figure.subplots(len(groups), 1, squeeze=False, height_ratios=ranks)[:, 0]
    for axes, (name, group) in zip(grid, groups.items(), strict=True):
        _signed(axes, group.T, limit(group), aspect="auto", interpolation="nearest")
        axes.set_yticks(range(group.shape[1]), range(1, group.shape[1] + 1), fontsize=7)
        axes.set_title(verbatim(name), fontsize=9, loc="left")
    grid[-1].set_xlabel("feature", fontsize=8)
    grid[-1].xaxis.set_major_locator(
        require("matplotlib.ticker", extra="plot").MaxNLocator(10, integer=True)
    )
    grid[-1].tick_params(labelsize=7)
    return figure


def _signed(axes: Any, image: np.ndarray, end: float, **options: Any) -> None:
    options = {"interpolation": SMOOTH} | options
    axes.imshow(image, cmap=SIGNED, vmin=-end, vmax=end, **options)
    bare(axes)
