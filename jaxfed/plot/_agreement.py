"""Tables of agreement: of views with a representation, of two halves with each other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxfed.core.common.checks import check_texts, refuse
from jaxfed.plot._figure import bare, check_place, host, one_axes, texts, verbatim

WRITTEN = 144  # cells at most whose numbers are written


def agreement(
    shares: Float[Array | np.ndarray, "views rank"],
    names: Sequence[str],
    *,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw a table of views by components, shaded by how much of a component a view gives.

    Args:
        shares: of each component, from 0 to 1, that a view's map gives.
        names: of the views.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes where these were given.

    Raises:
        ValueError: if the shares are not `(views, rank)` or the names not one per view.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax)
    values = host("shares", shares, 2, "shares of shape (views, rank)")
    views, rank = values.shape
    check_texts("names", names)
    texts("names", names, views)
    axes, drawn = one_axes(figure, ax, 1.6 + 0.34 * rank, 0.9 + 0.3 * views)
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    bare(axes)
    axes.set_yticks(range(views), [verbatim(name) for name in names], fontsize=8)
    axes.set_xlabel("component", fontsize=9)
    axes.get_figure().colorbar(image, ax=axes).ax.tick_params(labelsize=8)
    return drawn


def confusion(
    first: Float[Array | np.ndarray, "d r1"],
    second: Float[Array | np.ndarray, "d r2"],
    *,
    names: Sequence[str] = ("first half", "second half"),
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw which components of one half of the data are which of the other half.

    A component that is signal has one partner in the other half, near the diagonal; one that is
    noise has none. A basis is arbitrary within what it spans: take principal axes of both
    (`jaxfed.pca.principal_axes`), whose order and signs mean something.

    Args:
        first: components learned from one half of the samples, orthonormal columns.
        second: those learned from the other half.
        names: of the halves.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes where these were given. Cells hold squared cosines, from 0 to 1.

    Raises:
        ValueError: for components that are not `(features, rank)` or of other features, and names
            that are not two.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax)
    bases = [
        host(name, basis, 2, "components of shape (features, rank)")
        for name, basis in (("first", first), ("second", second))
    ]
    if len(bases[0]) != len(bases[1]):
        raise refuse("second", f"components of {len(bases[0])} features", second)
    check_texts("names", names)
    texts("names", names, 2)
    squares = np.clip((bases[0].T @ bases[1]) ** 2, 0, 1)
    rows, columns = squares.shape
    axes, drawn = one_axes(figure, ax, 1.8 + 0.34 * columns, 0.9 + 0.34 * rows)
    image = axes.imshow(squares, cmap="viridis", vmin=0, vmax=1)
    bare(axes)
    axes.set_xticks(range(columns), range(1, columns + 1), fontsize=7)
    axes.set_yticks(range(rows), range(1, rows + 1), fontsize=7)
    if rows * columns <= WRITTEN:
        for (i, j), value in np.ndenumerate(squares):
            text = f"{value:.2f}".removeprefix("0").replace("1.00", "1")
            ink = "#111111" if value > 0.6 else "white"
            axes.text(j, i, text, ha="center", va="center", color=ink, fontsize=6)
    axes.set_ylabel(f"components, {verbatim(names[0])}", fontsize=9)
    axes.set_xlabel(f"components, {verbatim(names[1])}", fontsize=9)
    axes.get_figure().colorbar(image, ax=axes).ax.tick_params(labelsize=8)
    return drawn
