"""Draws samples along shared or local axes, alone or together with the features' loadings."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from scipy.optimize import isotonic_regression

from jaxfed._checks import check_count, check_whole, is_list, refuse
from jaxfed._optional import require
from jaxfed.core.run.result import Fitted
from jaxfed.plot import drawing, projections
from jaxfed.plot.projections import Projected

PIXELS = 2_000  # with more points, they are drawn as pixels
HAIRLINES = 200  # largest number of arrows without a name
REACH = 0.8  # of the longest arrow, relative to the farthest point
ROWS = 8  # of clients along one axis; with more, rows are narrower
ARROW = 0.45  # rows that an arrow takes along one axis
TURN = 0.618034  # spreads points within a row evenly
SHORT = 0.1  # of the longest arrow: shorter ones have no name
LETTERS = 20  # of a name at an arrow
ATTEMPTS = 5  # at making room for names

_Points = Float[np.ndarray, "n axes"]


def scores(
    fitted: Fitted,
    clients: Any,
    axes: Sequence[int] | None = None,
    *,
    groups: Shaped[np.ndarray, " n"] | Sequence[object] | None = None,
    client: int | str | None = None,
    most: int = 100_000,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw samples as points along two shared axes, coloured by client.

    A basis of components is arbitrary within its span, so orthonormal components are turned to
    principal axes (`jaxfed.pca.principal_axes`), to which every client counts equally. Those of an
    estimator are principal axes already, in which every sample counts equally, and stay as they
    are. Labels of orthonormal axes have the share of the samples' squared lengths that is along the
    axis: the explained variance if the samples are centred. Every sample counts once, also where an
    estimator was fitted with weights, and scores are those before `whiten`.

    Up to eight clients have a legend. With more, colours are those of a scale, in the order of the
    clients. Along a single axis, each client has a row.

    Args:
        fitted: a solution, its result, what `jaxfed.load` returned, or an estimator.
        clients: the clients of the run, with their samples centred as in the fit; for an estimator,
            also samples as rows `(n, d)`, as given to its `fit`.
        axes: one or two axes, counted from 1 as in the labels; by default the first two, or the
            only one.
        groups: the client of each row, where `clients` are an estimator's samples.
        client: name or id of a client: only its samples are drawn, along its local axes.
        most: the largest number of points; of more samples, an even selection is drawn. More than
            2,000 points are drawn as pixels, also in files of vector graphics.
        names: names of the clients; their own by default, or numbers.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: if there are no such components or axes, clients hold moments or missing
            entries, are not those of the run, or names do not fit.
        ImportError: if Matplotlib is not installed.
    """
    check_count("most", most)
    found = projections.projected(fitted, clients, groups=groups, client=client, names=names)
    chosen = _chosen(axes, found)
    target = _target(found, chosen, 0, figure, ax)
    _draw_points(target.axes, found, chosen, most)
    return target.returned


def biplot(
    fitted: Fitted,
    clients: Any,
    axes: Sequence[int] | None = None,
    *,
    groups: Shaped[np.ndarray, " n"] | Sequence[object] | None = None,
    client: int | str | None = None,
    named: int = 10,
    most: int = 100_000,
    names: Sequence[str] | None = None,
    feature_names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw samples as points along two axes, and features as arrows.

    A feature's arrow is its row of the two axes, times one factor for all features, by which the
    longest arrow is four fifths as long as the farthest point. So the projection of a point onto an
    arrow, times the arrow's length, is proportional to the value of the feature that the two axes
    reconstruct for the sample.

    Source: Gabriel (1971), The biplot graphic display of matrices with application to principal
    component analysis, Biometrika 58 (3).

    Args:
        fitted: as in `scores`.
        clients: as in `scores`.
        axes: as in `scores`. Along a single axis, arrows are above one another.
        groups: as in `scores`.
        client: as in `scores`.
        named: the largest number of features that have an arrow and their name: those with the
            longest arrows, of at least a tenth of the longest. The next 200 are thin lines.
        most: as in `scores`.
        names: names of the clients.
        feature_names: names of the features; those of the run by default, or numbers.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: as in `scores`.
        ImportError: if Matplotlib is not installed.
    """
    check_count("named", named)
    check_count("most", most)
    found = projections.projected(
        fitted, clients, groups=groups, client=client, names=names, feature_names=feature_names
    )
    chosen = _chosen(axes, found)
    arrows = found.axes[:, chosen]
    lengths = np.linalg.norm(arrows, axis=1)
    named = min(named, int(np.sum(lengths >= SHORT * lengths.max())))
    target = _target(found, chosen, named if len(chosen) == 1 else 0, figure, ax)
    points = _draw_points(target.axes, found, chosen, most, alpha=0.45)
    farthest = np.linalg.norm(points, axis=1).max()
    ends = arrows * (REACH * farthest / lengths.max() if farthest and lengths.max() else 1)
    _draw_arrows(target.axes, ends, np.argsort(-lengths, kind="stable"), named, found.features)
    return target.returned


def _chosen(axes: Sequence[int] | None, found: Projected) -> list[int]:
    """The positions of the axes to draw."""
    rank = found.axes.shape[1]
    if axes is None:
        return list(range(min(rank, 2)))
    wanted = f"one or two different axes from 1 to {rank}"
    if not is_list(axes) or len(axes) not in (1, 2) or len(set(axes)) != len(axes):
        raise refuse("axes", wanted, axes)
    for number in axes:
        check_whole("axes", number, most=rank)
    return [int(number) - 1 for number in axes]


def _target(
    found: Projected, chosen: list[int], arrows: int, figure: Any, ax: Any
) -> drawing.DrawingTarget:
    if len(chosen) == 2:
        return drawing.one_axes(figure, ax, 6.2, 4.2)
    rows = min(len(found.names), ROWS) + ARROW * arrows
    return drawing.one_axes(figure, ax, 5.4, 0.8 + 0.4 * rows)


def _draw_points(
    axes: Any, found: Projected, chosen: list[int], most: int, alpha: float = 0.7
) -> _Points:
    """Draw an even selection of the samples, and label the axes; return the points."""
    counts = [len(x) for x in found.scores]
    owners = np.repeat(np.arange(len(counts)), counts)
    points = np.concatenate(found.scores)[:, chosen]
    # Clients take turns, so that the last one does not hide the others.
    turns = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    places = np.concatenate([np.arange(count) * TURN % 1 - 0.5 for count in counts])
    kept = np.unique(np.linspace(0, len(points) - 1, min(most, len(points))).astype(int))
    kept = kept[np.argsort(turns[kept], kind="stable")]
    points, owners = points[kept], owners[kept]
    look = {
        "s": float(np.clip(6000 / len(points), 3, 18)),
        "alpha": alpha,
        "linewidths": 0,
        "rasterized": len(points) > PIXELS,
    }
    drawing.light(axes)
    axes.grid(visible=False)
    axes.axvline(0, color=drawing.GREY, linewidth=0.5, zorder=0)
    titles = [_title(found, axis) for axis in chosen]
    axes.set_xlabel(titles[0], fontsize=9)
    if len(chosen) == 1:
        _draw_rows(axes, found, points[:, 0], owners + 0.7 * places[kept], look)
        return points
    axes.axhline(0, color=drawing.GREY, linewidth=0.5, zorder=0)
    axes.set_ylabel(titles[1], fontsize=9)
    if len(counts) > len(drawing.COLOURS):
        _draw_on_scale(axes, found, points, owners, look)
    else:
        colours = np.asarray(drawing.COLOURS)[owners]
        axes.scatter(*points.T, c=colours, **look)
        if len(counts) > 1:
            for place, name in enumerate(found.names):
                entry = {"color": drawing.colour(place), "label": drawing.shortened(name)}
                axes.scatter([], [], s=18, linewidths=0, **entry)
            axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_aspect("equal", adjustable="datalim")
    return points


def _title(found: Projected, axis: int) -> str:
    share = "" if found.shares is None else f" ({found.shares[axis]:.1%})"
    owner = f" of {drawing.shortened(found.names[0])}" if found.label.startswith("local") else ""
    return f"{found.label} {axis + 1}{owner}{share}"


def _draw_on_scale(
    axes: Any, found: Projected, points: _Points, owners: np.ndarray, look: dict[str, Any]
) -> None:
    """Colour points by their client's place, and name some clients beside the scale."""
    last = len(found.names) - 1
    # Without the end of the scale, which is hard to see on white.
    drawn = axes.scatter(*points.T, c=owners, cmap="viridis", vmin=0, vmax=last / 0.9, **look)
    drawing.colour_bar(axes, drawn)
    places = np.unique(np.linspace(0, last, 5).astype(int))
    names = [drawing.shortened(found.names[i]) for i in places]
    drawn.colorbar.set_ticks(places, labels=names)
    drawn.colorbar.solids.set(alpha=1)
    drawn.colorbar.ax.set_ylim(last, 0)


def _draw_rows(
    axes: Any, found: Projected, points: np.ndarray, places: np.ndarray, look: dict[str, Any]
) -> None:
    """Give each client a row along a single axis."""
    clients = len(found.names)
    few = clients <= ROWS
    height = min(1, ROWS / clients)
    owners = np.rint(places).astype(int)
    colours = np.asarray(drawing.COLOURS)[owners] if few else drawing.colour(0)
    axes.scatter(points, height * places, c=colours, **look)
    axes.set_ylim(height * (clients - 0.4), -0.6 * height)
    if few:
        axes.set_yticks(range(clients), map(drawing.shortened, found.names), fontsize=8)
    else:
        axes.set_yticks([])
        axes.set_ylabel(f"{clients:,} clients", fontsize=9)


def _draw_arrows(
    axes: Any,
    ends: _Points,
    order: np.ndarray,
    named: int,
    features: list[str] | None,
) -> None:
    """Draw the longest arrows with their names, and others as thin lines."""
    labels = [f"feature {j}" if features is None else features[j] for j in order[:named]]
    tips, others = ends[order[:named]], ends[order[named : named + HAIRLINES]]
    if ends.shape[1] == 1:
        places = -1 - ARROW * np.arange(named)[::-1]
        starts, tips = np.column_stack([0 * places, places]), np.column_stack([tips, places])
        axes.set_ylim(axes.get_ylim()[0], places.min() - 0.6)
    else:
        starts = np.zeros_like(tips)
        lines = require("matplotlib.collections", extra="plot").LineCollection
        segments = np.stack([np.zeros_like(others), others], axis=1)
        axes.add_collection(lines(segments, colors=drawing.GREY, linewidths=0.4, alpha=0.7))
    axes.update_datalim(ends if ends.shape[1] == 2 else tips)
    axes.margins(0.12)  # for the names
    axes.autoscale_view(scaley=ends.shape[1] == 2)
    look = {"arrowstyle": "-|>", "linewidth": 1, "color": "#000000", "shrinkA": 0, "shrinkB": 0}
    for start, tip in zip(starts, tips, strict=True):
        axes.annotate("", tip, start, arrowprops=look)
    _write_names(axes, tips, labels)


def _widen(axes: Any, before: float, after: float) -> None:
    """Show more to the left and right, by shares of the width."""
    low, high = axes.get_xlim()
    middle = sum(axes.get_ylim()) / 2
    ends = low - 1.2 * before * (high - low), high + 1.2 * after * (high - low)
    axes.update_datalim([(end, middle) for end in ends])
    axes.margins(x=0.01)  # the names fill the rest
    axes.autoscale_view(scaley=axes.get_autoscaley_on())


def _write_names(axes: Any, tips: Float[np.ndarray, "k 2"], names: list[str]) -> None:
    """Write names beside the tips of arrows, moved as little as keeps them apart and within."""
    whole, right = axes.get_figure(root=True), tips[:, 0] >= 0
    line = {"arrowstyle": "-", "linewidth": 0.4, "color": drawing.GREY, "shrinkA": 0, "shrinkB": 0}
    texts = []
    for tip, name, is_right in zip(tips, names, right, strict=True):
        look = {"ha": "left" if is_right else "right", "va": "center", "fontsize": 8}
        look |= {"textcoords": "offset points", "arrowprops": line}
        texts.append(axes.annotate(drawing.shortened(name, LETTERS), tip, (0, 0), **look))
        texts[-1].set_in_layout(False)
    whole.draw_without_rendering()  # the places of axes and tips are known only then
    unit, sizes = whole.dpi / 72, np.array([text.get_window_extent().size for text in texts])
    sizes[:, 0] *= 1.06  # in other resolutions, letters have slightly other widths
    gap, signs = 4 * unit, np.where(right, 1, -1)
    for _ in range(ATTEMPTS):
        inside, pixels = axes.get_window_extent(), axes.transData.transform(tips)
        ends = pixels[:, 0] + signs * (gap + sizes[:, 0])
        over = np.array([inside.x0 - ends.min(), ends.max() - inside.x1]).clip(0) / inside.width
        if not over.any():
            break
        _widen(axes, *over)
        whole.draw_without_rendering()
    inside, pixels = axes.get_window_extent(), axes.transData.transform(tips)
    line_height = sizes[:, 1].max()
    for side in (True, False):
        own = np.flatnonzero(right == side)
        own = own[np.argsort(pixels[own, 1], kind="stable")]
        if not own.size:
            continue
        # Heights that are at least a line apart: without the lines, they must not fall.
        lines = line_height * np.arange(len(own))
        heights = isotonic_regression(pixels[own, 1] - lines).x
        least, most = inside.y0 + line_height / 2, inside.y1 - line_height / 2 - lines[-1]
        heights = np.clip(heights, least, max(least, most)) + lines
        for i, height in zip(own, heights, strict=True):
            texts[i].set_position((signs[i] * gap / unit, (height - pixels[i, 1]) / unit))
