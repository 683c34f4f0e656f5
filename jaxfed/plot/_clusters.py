"""Clients as points in a plane."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Real, Shaped

from jaxfed._checks import checked_labels, host_array, refuse
from jaxfed.pca import embed_clients
from jaxfed.plot import drawing

_POINTS = {"s": 36, "linewidths": 0.5, "edgecolors": "white"}


def clusters(
    embedding: Real[ArrayLike, "m 2"],
    labels: Shaped[ArrayLike, " m"] | Sequence[object],
    *,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw clients as points, coloured by cluster or class.

    Args:
        embedding: a point for each client, for example from multidimensional scaling.
        labels: each client's cluster or class.
        names: a label beside each point.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: if points are not `(clients, 2)`, or labels or names are not one per client.
        ImportError: if Matplotlib is not installed.
    """
    points = drawing.host("embedding", embedding, 2, "points of shape (clients, 2)")
    if points.shape[1] != 2:
        raise refuse("embedding", "points of shape (clients, 2)", embedding)
    classes = checked_labels("labels", labels, len(points))
    drawing.check_names("names", names, len(points))
    target = drawing.one_axes(figure, ax, 5.0, 4.0)
    _classes(target.axes, points, classes)
    _finish(target.axes, points, names)
    return target.returned


def client_map(
    clients: Real[ArrayLike, "m d r"] | Real[ArrayLike, "m 2"],
    metadata: Shaped[ArrayLike, " m"] | Sequence[object] | None = None,
    *,
    label: str | None = None,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw clients so that similar local components are close, coloured by metadata.

    Args:
        clients: local components, `(m, d, r)`, which `jaxfed.pca.embed_clients` places so that
            distances show how much they differ; or points in a plane, `(m, 2)`.
        metadata: floats, such as temperatures, coloured along a scale; or classes: strings,
            booleans or integers. None colours all clients alike.
        label: a description of the metadata.
        names: a label beside each point.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: if there are fewer than two clients, their shape is another one, or metadata or
            names are not one per client.
        ImportError: if Matplotlib is not installed.
    """
    wanted = "local components (clients, features, rank) or points (clients, 2), of two clients"
    points = host_array("clients", clients, wanted)
    # Three axes are components, which are placed below; two are points.
    points = drawing.host("clients", points, 3 if points.ndim == 3 else 2, wanted)
    if len(points) < 2 or (points.ndim == 2 and points.shape[1] != 2):
        raise refuse("clients", wanted, clients)
    drawing.check_names("names", names, len(points))
    values = None
    if metadata is not None:
        values = host_array("metadata", metadata, "a number or a class for each client")
        # Integers are classes, since cluster numbers have no scale.
        if values.dtype.kind == "f":
            values = drawing.host("metadata", values, 1, "a number for each client")
            if len(values) != len(points):
                raise refuse("metadata", f"{len(points)} numbers", metadata)
        else:
            values = checked_labels("metadata", values, len(points))
    if points.ndim == 3:
        points = np.asarray(embed_clients(points))
    target = drawing.one_axes(figure, ax, 5.0, 4.0)
    axes = target.axes
    if values is None:
        axes.scatter(*points.T, color=drawing.colour(0), **_POINTS)
    elif values.dtype.kind == "f":
        drawn = axes.scatter(*points.T, c=values, cmap="viridis", **_POINTS)
        drawing.colour_bar(axes, drawn, label or "")
    else:
        _classes(axes, points, values)
    _finish(axes, points, names)
    if axes.get_legend() is not None and label is not None:
        axes.get_legend().set_title(drawing.verbatim(label), prop={"size": 9})
    return target.returned


def _classes(axes: Any, points: Real[np.ndarray, "m 2"], classes: np.ndarray) -> None:
    """Scatter the points, one colour per class."""
    for position, value in enumerate(np.unique(classes)):
        # Colours repeat after eight classes; then the marker changes.
        marker = "osD^vP"[position // 8 % 6]
        look = {"marker": marker, "color": drawing.colour(position), "alpha": 0.85}
        axes.scatter(
            *points[classes == value].T, label=drawing.verbatim(str(value)), **look, **_POINTS
        )


def _finish(axes: Any, points: Real[np.ndarray, "m 2"], names: Sequence[str] | None) -> None:
    """Add names and a legend, and give both axes the same scale."""
    for point, name in zip(points, names or (), strict=False):
        place = {"xytext": (4, 4), "textcoords": "offset points"}
        axes.annotate(drawing.verbatim(name), point, fontsize=7, **place)
    axes.margins(0.12)  # for the names
    drawing.bare(axes)  # coordinates have no meaning, only distances
    axes.set_aspect("equal", adjustable="datalim")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
