"""Draws components and samples as images."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Real

from jaxfed._checks import check_count, refuse
from jaxfed.plot import drawing, projections

_SIZE = 0.75  # width of an image of a component, in inches


def components(
    groups: Any,
    image_shape: tuple[int, int] | None = None,
    *,
    feature_names: Sequence[str] | None = None,
    columns: int = 12,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw groups of components, each group under its name and with its own colour scale.

    Args:
        groups: a solution, its result, what `jaxfed.load` returned, or an estimator: its shared
            components and the local ones of the first clients. Or components in columns by name,
            `(features, rank)`, such as `{"client 3": solution.result.local[3]}`. Groups that are
            None are left out.
        image_shape: height and width if features are pixels: each component is then an image.
            Otherwise, a group is one image with a row per component and a column per feature.
        feature_names: names of the features, if they are not pixels; by default those of an
            estimator that was fitted to a data frame.
        columns: images in a row.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes that the panels replace in the grid of subplots.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: if there is no group, or a group is not `(features, rank)` or does not fit
            `image_shape` or `feature_names`.
        ImportError: if Matplotlib is not installed.
    """
    check_count("columns", columns)
    arrays = projections.groups_of(groups)
    feature_names = projections.features_of(groups, feature_names)
    labels = [drawing.checked_features(feature_names, len(x)) for x in arrays.values()]
    panel = drawing.within(figure, ax)
    if image_shape is None:
        drawn = _as_rows(arrays, panel, labels[0])
        return drawn if ax is None else ax
    images = {
        name: drawing.as_images(f"groups[{name!r}]", group.T, image_shape)
        for name, group in arrays.items()
    }
    height, width = image_shape
    columns = min(columns, max(map(len, images.values())))
    rows = [-(-len(group) // columns) for group in images.values()]
    if panel is None:
        # A group's name may be longer than its images are wide.
        columns = max(columns, math.ceil(0.08 * max(map(len, images)) / _SIZE))
        tall = _SIZE * height / width * sum(rows) + 0.3 * len(rows)
        panel = drawing.canvas(None, _SIZE * columns, tall)
    # Use a subfigure for each group, because a row of axes has no title of its own.
    parts = np.atleast_1d(panel.subfigures(len(images), 1, height_ratios=[r + 0.3 for r in rows]))
    for (name, group), part, number in zip(images.items(), parts, rows, strict=True):
        part.suptitle(drawing.verbatim(name), fontsize=10, x=0.01, ha="left")
        grid = part.subplots(number, columns, squeeze=False).ravel()
        for axes, image in zip(grid, group, strict=False):
            drawing.signed_image(axes, image, drawing.limit(group))
        for axes in grid[len(group) :]:
            axes.set_axis_off()
    return panel if ax is None else ax


def separation(
    original: Real[ArrayLike, "k d"],
    shared: Real[ArrayLike, "k d"] | None,
    local: Real[ArrayLike, "k d"] | None,
    image_shape: tuple[int, int],
    *,
    mean: Real[ArrayLike, " d"] | None = None,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw samples above their shared part, their local part, and the sum of the two.

    Args:
        original: the samples.
        shared: their projections onto the shared components, `(x - mean) @ U @ U.T`, or None.
        local: their projections onto their client's local components, or None.
        image_shape: height and width of an image.
        mean: the mean that was subtracted before the fit; it is added to the sum.
        names: a title for each sample.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes that the panels replace in the grid of subplots.

    Returns:
        The figure, or the axes if given, with one column per sample.

    Raises:
        ValueError: if shapes do not match, or both parts are None.
        ImportError: if Matplotlib is not installed.
    """
    samples = drawing.host("original", original, 2, "samples of shape (samples, features)")
    parts = {
        name: drawing.host(name, part, 2, f"numbers of shape {samples.shape}")
        for name, part in (("shared", shared), ("local", local))
        if part is not None
    }
    if not parts:
        raise ValueError("shared, local: wanted at least one of the parts, got none")
    for name, part in parts.items():
        if part.shape != samples.shape:
            raise ValueError(f"{name}: wanted shape {samples.shape}, got {part.shape}")
    centre = np.zeros(samples.shape[1])
    if mean is not None:
        centre = drawing.host("mean", mean, 1, f"{samples.shape[1]} numbers")
        if centre.shape != samples.shape[1:]:
            raise refuse("mean", f"{samples.shape[1]} numbers", mean)
    drawing.check_names("names", names, len(samples))
    rows = {"original": samples} | {f"{name} part": part for name, part in parts.items()}
    rows["together"] = centre + np.sum(list(parts.values()), axis=0)
    images = {name: drawing.as_images("original", row, image_shape) for name, row in rows.items()}
    height, width = image_shape
    tall = 0.95 * len(rows) * height / width + 0.3
    panel = drawing.canvas(drawing.within(figure, ax), 0.95 * len(samples) + 0.5, tall)
    grid = panel.subplots(len(rows), len(samples), squeeze=False)
    # Samples and sums share one colour scale, the two parts another.
    low, high = float(min(samples.min(), 0)), float(samples.max())
    end = drawing.limit(list(parts.values()))
    for (label, row), line in zip(images.items(), grid, strict=True):
        for axes, image in zip(line, row, strict=True):
            if label.endswith("part"):
                drawing.signed_image(axes, image, end)
            else:
                look = {"cmap": drawing.INK, "interpolation": drawing.SMOOTH}
                axes.imshow(image, vmin=low, vmax=high, **look)
                drawing.bare(axes)
        line[0].set_ylabel(label, fontsize=10)
    for axes, name in zip(grid[0], names or (), strict=False):
        axes.set_title(drawing.verbatim(name), fontsize=10)
    return panel if ax is None else ax


def _as_rows(groups: Mapping[str, np.ndarray], figure: Any, names: list[str] | None) -> Any:
    """Each group as one image with a row per component, above the features' names if they fit."""
    ranks = [group.shape[1] for group in groups.values()]
    below = 0.3 if names is None else 0.3 + 0.07 * max(map(len, names))
    figure = drawing.canvas(figure, 7.0, 0.25 * sum(ranks) + 0.45 * len(ranks) + below)
    grid = figure.subplots(len(groups), 1, squeeze=False, height_ratios=ranks)[:, 0]
    for axes, (name, group) in zip(grid, groups.items(), strict=True):
        drawing.signed_image(
            axes, group.T, drawing.limit(group), aspect="auto", interpolation="nearest"
        )
        axes.set_yticks(range(group.shape[1]), range(1, group.shape[1] + 1), fontsize=7)
        axes.set_title(drawing.verbatim(name), fontsize=9, loc="left")
    for axes in grid[:-1]:
        axes.tick_params(labelbottom=False)
    drawing.label_features(grid[-1], names)
    return figure
