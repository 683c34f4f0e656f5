"""Heat maps of agreement: views with components, and one half of the data with the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Float, Real

from jaxfed._checks import refuse
from jaxfed.plot import drawing

MOST_NUMBERS = 144  # in tables with more cells, no numbers are written


def agreement(
    shares: Real[ArrayLike, "views rank"],
    names: Sequence[str],
    *,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw a table of views by components, shaded by how much of a component a view captures.

    Args:
        shares: how much of each component a view's map captures, from 0 to 1.
        names: names of the views.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: if the shares are not `(views, rank)`, or there is not one name per view.
        ImportError: if Matplotlib is not installed.
    """
    values = drawing.host("shares", shares, 2, "shares of shape (views, rank)")
    views, rank = values.shape
    drawing.check_names("names", names, views)
    target = drawing.one_axes(figure, ax, 1.6 + 0.34 * rank, 0.9 + 0.3 * views)
    _heat_map(target, values, aspect="auto")
    target.axes.set_yticks(range(views), [drawing.verbatim(name) for name in names], fontsize=8)
    target.axes.set_xlabel("component", fontsize=9)
    return target.returned


def confusion(
    first: Real[ArrayLike, "d r1"],
    second: Real[ArrayLike, "d r2"],
    *,
    names: Sequence[str] = ("first half", "second half"),
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw which components of one half of the data match which of the other half.

    A component that is signal has one partner in the other half, near the diagonal; a component
    that is noise has none. A basis is arbitrary within its span, so pass principal axes of both
    halves (`jaxfed.pca.principal_axes`), whose order and signs are meaningful.

    Args:
        first: components learned from one half of the samples, orthonormal columns.
        second: components learned from the other half.
        names: names of the halves.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given. Cells show squared cosines, from 0 to 1.

    Raises:
        ValueError: if the components are not `(features, rank)` of the same features, or there are
            not two names.
        ImportError: if Matplotlib is not installed.
    """
    wanted = "components of shape (features, rank)"
    left, right = drawing.host("first", first, 2, wanted), drawing.host("second", second, 2, wanted)
    if len(left) != len(right):
        raise refuse("second", f"components of {len(left)} features", second)
    drawing.check_names("names", names, 2)
    squares = np.clip((left.T @ right) ** 2, 0, 1)
    rows, columns = squares.shape
    target = drawing.one_axes(figure, ax, 1.8 + 0.34 * columns, 0.9 + 0.34 * rows)
    axes = target.axes
    _heat_map(target, squares)
    axes.set_xticks(range(columns), range(1, columns + 1), fontsize=7)
    axes.set_yticks(range(rows), range(1, rows + 1), fontsize=7)
    if rows * columns <= MOST_NUMBERS:
        for (i, j), value in np.ndenumerate(squares):
            text = f"{value:.2f}".removeprefix("0").replace("1.00", "1")
            ink = "#111111" if value > 0.6 else "white"
            axes.text(j, i, text, ha="center", va="center", color=ink, fontsize=6)
    axes.set_ylabel(f"components, {drawing.verbatim(names[0])}", fontsize=9)
    axes.set_xlabel(f"components, {drawing.verbatim(names[1])}", fontsize=9)
    return target.returned


def _heat_map(
    target: drawing.DrawingTarget, values: Float[np.ndarray, "rows columns"], **options: Any
) -> None:
    image = target.axes.imshow(values, cmap="viridis", vmin=0, vmax=1, **options)
    drawing.bare(target.axes)
    drawing.colour_bar(target.axes, image)
