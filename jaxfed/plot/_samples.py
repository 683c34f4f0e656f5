"""Grids of images: generated samples, and reconstructions of samples."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Real

from jaxfed._checks import check_count
from jaxfed.plot import drawing

_SIZE, _LETTER = 0.5, 0.08  # inches: longer side of an image, width of a letter


class _Row(NamedTuple):
    """A row of images with text before and after it."""

    label: str
    images: np.ndarray
    note: str = ""


def samples(
    groups: Mapping[str, Real[ArrayLike, "_n d"]],
    image_shape: tuple[int, ...],
    *,
    columns: int = 10,
    notes: Mapping[str, str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw groups of images in rows, each after its name.

    Args:
        groups: images by the group's name, such as a client's or a method's.
        image_shape: height and width, or height, width and three colour channels.
        columns: images in a row; the rest of a group goes to further rows.
        notes: text to write after a group's images, such as their noise.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes that the panels replace in the grid of subplots.

    Returns:
        The figure, or the axes if given. White is 0 and black is 1; colours are clipped to this
        range.

    Raises:
        ValueError: if there is no group, a group is not `(images, features)` or does not fit
            `image_shape`, `columns` is not positive, or a note belongs to no group.
        ImportError: if Matplotlib is not installed.
    """
    drawing.check_named("groups", groups, "images")
    check_count("columns", columns)
    notes = notes or {}
    if unknown := set(notes) - set(groups):
        raise ValueError(f"notes: wanted names of groups, got {', '.join(sorted(unknown))}")
    rows = []
    for name, group in groups.items():
        images = _clipped(f"groups[{name!r}]", group, image_shape)
        first, *others = (images[i : i + columns] for i in range(0, len(images), columns))
        rows += [_Row(name, first, notes.get(name, "")), *(_Row("", other) for other in others)]
    drawn = _grid(rows, drawing.within(figure, ax))
    return drawn if ax is None else ax


def reconstructions(
    original: Real[ArrayLike, "k d"],
    found: Mapping[str, Real[ArrayLike, "k d"]],
    image_shape: tuple[int, ...],
    *,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw samples and, below each, its reconstructions by several methods.

    Args:
        original: the samples.
        found: their reconstructions, by name of the method.
        image_shape: height and width, or height, width and three colour channels.
        names: a title for each sample.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes that the panels replace in the grid of subplots.

    Returns:
        The figure, or the axes if given, with one column per sample. White is 0 and black is 1.

    Raises:
        ValueError: if there is no reconstruction, or shapes do not match.
        ImportError: if Matplotlib is not installed.
    """
    rows = [_Row("original", _clipped("original", original, image_shape))]
    drawing.check_named("found", found, "reconstructions")
    count = len(rows[0].images)
    for name, values in found.items():
        images = _clipped(f"found[{name!r}]", values, image_shape)
        if len(images) != count:
            raise ValueError(f"found[{name!r}]: wanted {count} reconstructions, got {len(images)}")
        rows.append(_Row(name, images))
    drawing.check_names("names", names, count)
    drawn = _grid(rows, drawing.within(figure, ax), names or ())
    return drawn if ax is None else ax


def _clipped(name: str, values: Any, image_shape: tuple[int, ...]) -> np.ndarray:
    array = drawing.host(name, values, 2, "images of shape (images, features)")
    return np.clip(drawing.as_images(name, array, image_shape, colours=True), 0, 1)


def _grid(rows: list[_Row], figure: Any, titles: Sequence[str] = ()) -> Any:
    columns = max(len(row.images) for row in rows)
    height, width = (side / max(rows[0].images.shape[1:3]) for side in rows[0].images.shape[1:3])
    # Text has its own columns, as wide as the longest one, in units of an image.
    unit = _LETTER / (_SIZE * width)
    before = max(unit * max(len(row.label) for row in rows), 0.01)
    after = max(unit * max(len(row.note) for row in rows), 0.01)
    if figure is None:
        wide = _SIZE * width * (columns + before + after) + 0.3
        figure = drawing.canvas(None, wide, _SIZE * height * len(rows) + (0.4 if titles else 0.2))
        figure.get_layout_engine().set(w_pad=0.015, h_pad=0.015)
    ratios = [before, *[1.0] * columns, after]
    grid = figure.subplots(len(rows), columns + 2, squeeze=False, width_ratios=ratios)
    for line, row in zip(grid, rows, strict=True):
        for axes, image in zip(line[1:], row.images, strict=False):
            axes.imshow(image, cmap=drawing.INK, vmin=0, vmax=1, interpolation="nearest")
            drawing.bare(axes)
        for axes in (line[0], *line[len(row.images) + 1 :]):
            axes.set_axis_off()
        _write(line[0], 1, row.label, "right")
        _write(line[-1], 0, row.note, "left")
    for axes, title in zip(grid[0][1:], titles, strict=False):
        axes.set_title(drawing.verbatim(title), fontsize=9)
    return figure


def _write(axes: Any, place: float, text: str, align: str) -> None:
    options = {"ha": align, "va": "center", "transform": axes.transAxes, "fontsize": 9}
    # Keep it out of the layout, which would otherwise shrink the images to make room.
    axes.text(place, 0.5, drawing.verbatim(text), **options).set_in_layout(False)
