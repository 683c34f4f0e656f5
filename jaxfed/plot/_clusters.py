"""Clients as points of a plane."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxfed.core.checks import checked_labels
from jaxfed.plot._figure import bare, canvas, check_figure, colour, host, texts


def clusters(
    embedding: Float[Array | np.ndarray, "m 2"],
    labels: Shaped[Array | np.ndarray, " m"] | Sequence[object],
    *,
    names: Sequence[str] | None = None,
    figure: Any = None,
) -> Any:
    """Draw clients as points, coloured by cluster or class.

    Args:
        embedding: a point for each client, e.g. from multidimensional scaling of their distances.
        labels: each client's cluster or class.
        names: a text beside each point.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.

    Returns:
        The Matplotlib figure.

    Raises:
        ValueError: if points are not `(clients, 2)`, or labels or names are not one per client.
        ImportError: if Matplotlib is not installed.
    """
    check_figure(figure)
    points = host("embedding", embedding, 2, "points of shape (clients, 2)")
    if points.shape[1] != 2:
        raise ValueError(f"embedding: wanted points of shape (clients, 2), got {points.shape}")
    classes = checked_labels("labels", labels, len(points))
    texts("names", names, len(points))
    figure = canvas(figure, 5.0, 4.0)
    axes = figure.subplots()
    for position, value in enumerate(np.unique(classes)):
        own = points[classes == value]
        # Colours repeat after eight classes, markers then change.
        marker = "osD^vP"[position // 8 % 6]
        style = {"s": 36, "marker": marker, "color": colour(position), "alpha": 0.85}
        axes.scatter(*own.T, label=str(value), linewidths=0.5, edgecolors="white", **style)
    for point, name in zip(points, names or (), strict=False):
        axes.annotate(name, point, xytext=(4, 4), textcoords="offset points", fontsize=7)
    # Only distances mean something, and all directions the same.
    bare(axes)
    axes.set_aspect("equal", adjustable="datalim")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
