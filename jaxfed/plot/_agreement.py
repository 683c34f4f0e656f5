"""How well each view gives each component of a common representation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxfed.core.checks import check_texts
from jaxfed.plot._figure import bare, canvas, check_figure, host, texts


def agreement(
    shares: Float[Array | np.ndarray, "views rank"],
    names: Sequence[str],
    *,
    figure: Any = None,
) -> Any:
    """Draw a table of views by components, shaded by how much of a component a view gives.

    Args:
        shares: of each component, from 0 to 1, that a view's map gives.
        names: of the views.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.

    Returns:
        The Matplotlib figure.

    Raises:
        ValueError: if the shares are not `(views, rank)` or the names not one per view.
        ImportError: if Matplotlib is not installed.
    """
    check_figure(figure)
    values = host("shares", shares, 2, "shares of shape (views, rank)")
    views, rank = values.shape
    check_texts("names", names)
    texts("names", names, views)
    figure = canvas(figure, 1.6 + 0.34 * rank, 0.9 + 0.3 * views)
    axes = figure.subplots()
    image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    bare(axes)
    axes.set_yticks(range(views), names, fontsize=8)
    axes.set_xlabel("component", fontsize=9)
    figure.colorbar(image, ax=axes).ax.tick_params(labelsize=8)
    return figure
