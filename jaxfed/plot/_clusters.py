"""Clients as points of a plane."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Shaped

from jaxfed.core.common.checks import check_text, checked_labels, host_array, refuse
from jaxfed.pca import embed_clients
from jaxfed.plot._figure import bare, check_place, colour, host, one_axes, texts, verbatim


def clusters(
    embedding: Float[Array | np.ndarray, "m 2"],
    labels: Shaped[Array | np.ndarray, " m"] | Sequence[object],
    *,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw clients as points, coloured by cluster or class.

    Args:
        embedding: a point for each client, e.g. from multidimensional scaling of their distances.
        labels: each client's cluster or class.
        names: a text beside each point.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes where these were given.

    Raises:
        ValueError: if points are not `(clients, 2)`, or labels or names are not one per client.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax)
    points = host("embedding", embedding, 2, "points of shape (clients, 2)")
    if points.shape[1] != 2:
        raise ValueError(f"embedding: wanted points of shape (clients, 2), got {points.shape}")
    classes = checked_labels("labels", labels, len(points))
    texts("names", names, len(points))
    axes, drawn = one_axes(figure, ax, 5.0, 4.0)
    _classes(axes, points, classes)
    _finish(axes, points, names)
    return drawn


def client_map(
    clients: Float[Array | np.ndarray, "m d r"] | Float[Array | np.ndarray, "m 2"],
    metadata: Shaped[Array | np.ndarray, " m"] | Sequence[object] | None = None,
    *,
    label: str | None = None,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw clients where their local components place them, coloured by what is known of them.

    Args:
        clients: their local components, `(m, d, r)`, which `jaxfed.pca.embed_clients` places so
            that distances tell how much they differ; or points of a plane, `(m, 2)`.
        metadata: real numbers, such as temperatures, coloured along a scale; or classes: texts,
            truth values, whole numbers. None leaves all alike.
        label: what the metadata are.
        names: a text beside each point.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes where these were given.

    Raises:
        ValueError: for clients of other shapes, fewer than two of them, and metadata or names that
            are not one for each.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax)
    wanted = "local components (clients, features, rank), or points (clients, 2)"
    points = host_array("clients", clients, wanted)
    points = host("clients", points, 3 if points.ndim == 3 else 2, wanted)
    if len(points) < 2 or (points.ndim == 2 and points.shape[1] != 2):
        raise refuse("clients", f"{wanted}, of two clients at least", clients)
    texts("names", names, len(points))
    if label is not None:
        check_text("label", label)
    values = None
    if metadata is not None:
        values = host_array("metadata", metadata, "a number or a class for each client")
    real = values is not None and values.dtype.kind == "f"
    if real:
        values = host("metadata", values, 1, "a number for each client")
        if len(values) != len(points):
            raise refuse("metadata", f"{len(points)} numbers", metadata)
    elif values is not None:
        values = checked_labels("metadata", values, len(points))
    if points.ndim == 3:
        points = np.asarray(embed_clients(points))
    axes, drawn = one_axes(figure, ax, 5.0, 4.0)
    if real:
        style = {"s": 36, "cmap": "viridis", "linewidths": 0.5, "edgecolors": "white"}
        seen = axes.scatter(*points.T, c=values, **style)
        bar = axes.get_figure().colorbar(seen, ax=axes)
        bar.ax.tick_params(labelsize=8)
        bar.set_label(verbatim(label or ""), fontsize=9)
    elif values is not None:
        _classes(axes, points, values)
    else:
        axes.scatter(*points.T, s=36, color=colour(0), linewidths=0.5, edgecolors="white")
    _finish(axes, points, names)
    if axes.get_legend() is not None and label is not None:
        axes.get_legend().set_title(verbatim(label), prop={"size": 9})
    return drawn


def _classes(axes: Any, points: np.ndarray, classes: np.ndarray) -> None:
    for position, value in enumerate(np.unique(classes)):
        own = points[classes == value]
        # Colours repeat after eight classes, markers then change.
        marker = "osD^vP"[position // 8 % 6]
        style = {"s": 36, "marker": marker, "color": colour(position), "alpha": 0.85}
        style |= {"linewidths": 0.5, "edgecolors": "white"}
        axes.scatter(*own.T, label=verbatim(str(value)), **style)


def _finish(axes: Any, points: np.ndarray, names: Sequence[str] | None) -> None:
    for point, name in zip(points, names or (), strict=False):
        place = {"xytext": (4, 4), "textcoords": "offset points"}
        axes.annotate(verbatim(name), point, fontsize=7, **place)
    # Only distances mean something, and all directions the same.
    bare(axes)
    axes.set_aspect("equal", adjustable="datalim")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
