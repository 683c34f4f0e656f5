"""Grids of images: what models generate, and what they make of samples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxfed.core.common.checks import check_count, check_text, is_list, refuse
from jaxfed.plot._figure import INK, bare, canvas, check_place, host, named, texts, verbatim, within

ArrayLike = Array | np.ndarray

_SIZE, _LETTER = 0.5, 0.062  # inches: the longer side of an image, and what is written


def samples(
    groups: Mapping[str, Float[ArrayLike, "n d"]],
    image_shape: tuple[int, ...],
    *,
    columns: int = 10,
    notes: Mapping[str, str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw images in rows, each group's after its name.

    Args:
        groups: images by the group's name, such as a client's or a method's.
        image_shape: height and width, or height, width and the three channels of a colour.
        columns: images in a row; what a group has more goes to further rows.
        notes: what is written after a group's images, such as their noise.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into, whose place in the grid of subplots the panels take.

    Returns:
        The figure, or the axes where these were given. White is 0 and black is 1; colours
        are clipped to this range.

    Raises:
        ValueError: if there is no group, a group is not `(images, features)` or does not fit
            `image_shape`, `columns` is not positive, or a note is of no group.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax, panels=True)
    named("groups", groups, "images")
    check_count("columns", columns)
    if notes is not None and not isinstance(notes, Mapping):
        raise refuse("notes", "a dictionary of texts by name", notes)
    for name, note in (notes or {}).items():
        check_text(f"notes[{name!r}]", note)
    if unknown := set(notes or ()) - set(groups):
        raise ValueError(f"notes: wanted names of groups, got {', '.join(sorted(unknown))}")
    images = {
        name: _images(f"groups[{name!r}]", group, image_shape) for name, group in groups.items()
    }
    columns = min(columns, max(map(len, images.values())))
    drawn = _grid(
        [
            (name, part[:columns], (notes or {}).get(name, ""))
            if start == 0
            else ("", part[start : start + columns], "")
            for name, part in images.items()
            for start in range(0, len(part), columns)
        ],
        columns,
        None,
        within(figure, ax),
    )
    return drawn if ax is None else ax


def reconstructions(
    original: Float[ArrayLike, "k d"],
    found: Mapping[str, Float[ArrayLike, "k d"]],
    image_shape: tuple[int, ...],
    *,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw samples and, below each, what models make of it.

    Args:
        original: the samples.
        found: their reconstructions by the name of the method.
        image_shape: height and width, or height, width and the three channels of a colour.
        names: a title for each sample.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into, whose place in the grid of subplots the panels take.

    Returns:
        The figure, or the axes where these were given, one column per sample. White is 0 and
        black is 1.

    Raises:
        ValueError: if there is no reconstruction, or shapes do not fit together.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax, panels=True)
    images = _images("original", original, image_shape)
    named("found", found, "reconstructions")
    rows = [("original", images, "")]
    for name, values in found.items():
        part = _images(f"found[{name!r}]", values, image_shape)
        if len(part) != len(images):
            raise ValueError(
                f"found[{name!r}]: wanted {len(images)} reconstructions, got {len(part)}"
            )
        rows.append((name, part, ""))
    texts("names", names, len(images))
    drawn = _grid(rows, len(images), names, within(figure, ax))
    return drawn if ax is None else ax


def _images(name: str, values: Any, image_shape: tuple[int, ...]) -> np.ndarray:
    array = host(name, values, 2, "images of shape (images, features)")
    if not is_list(image_shape):
        raise refuse("image_shape", "(height, width) or (height, width, 3)", image_shape)
    shape = tuple(image_shape)
    for length in shape:
        check_count("image_shape", length)
    if len(shape) == 3 and shape[-1] == 1:
        shape = shape[:2]
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[-1] != 3):
        raise ValueError(f"image_shape: wanted (height, width) or (height, width, 3), got {shape}")
    if np.prod(shape) != array.shape[1]:
        raise ValueError(
            f"image_shape: {' x '.join(map(str, shape))} is {np.prod(shape)} numbers, {name} has "
            f"{array.shape[1]} features"
        )
    return np.clip(array, 0, 1).reshape(len(array), *shape)


def _grid(
    rows: Sequence[tuple[str, np.ndarray, str]],
    columns: int,
    titles: Sequence[str] | None,
    figure: Any,
) -> Any:
    height, width = (side / max(rows[0][1].shape[1:3]) for side in rows[0][1].shape[1:3])
    before, after = (_LETTER * max(len(row[i]) for row in rows) / (_SIZE * width) for i in (0, 2))
    if figure is None:
        wide = _SIZE * width * (columns + before + after) + 0.3
        figure = canvas(None, wide, _SIZE * height * len(rows) + (0.4 if titles else 0.2))
        figure.get_layout_engine().set(w_pad=0.015, h_pad=0.015)
    # What is written at the sides has columns of its own, so that no image makes room for it.
    ratios = [max(before, 0.01), *[1.0] * columns, max(after, 0.01)]
    grid = figure.subplots(len(rows), columns + 2, squeeze=False, width_ratios=ratios)
    for line, (label, images, note) in zip(grid, rows, strict=True):
        for axes, image in zip(line[1:], images, strict=False):
            axes.imshow(image, cmap=INK, vmin=0, vmax=1, interpolation="nearest")
            bare(axes)
        for axes in (line[0], *line[len(images) + 1 :]):
            axes.set_axis_off()
        for axes, text, side in ((line[0], label, "right"), (line[-1], note, "left")):
            place = 1 if side == "right" else 0
            axes.text(
                place,
                0.5,
                verbatim(text),
                fontsize=7,
                ha=side,
                va="center",
                transform=axes.transAxes,
            ).set_in_layout(False)
    for axes, title in zip(grid[0][1:], titles or (), strict=False):
        axes.set_title(verbatim(title), fontsize=7)
    return figure
