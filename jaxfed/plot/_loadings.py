"""Draws loadings as bars, feature by feature."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxfed._checks import check_count, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import learned_by
from jaxfed.core.run.result import clients_of_run
from jaxfed.plot import drawing, projections

MOST_COMPONENTS = 6  # of a group, and panels in a row
TITLE = 20  # letters of a group's name above a panel


class _Block(NamedTuple):
    """Panels with the same features."""

    note: str  # which features these are, if not all
    features: list[str]
    panels: list[tuple[str, np.ndarray, float]]  # title, bars, end of the scale


def loadings(
    groups: Any,
    clients: Clients | None = None,
    *,
    most: int = 15,
    feature_names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw components as bars, one for each feature.

    Bars to the right are red, bars to the left blue. The components of a group have one scale.
    With few features, all components have the same ones; with many, each group has its own rows.

    Args:
        groups: a solution, its result, what `jaxfed.load` returned, or an estimator: its shared
            components and the local ones of the first clients. Or components in columns by name,
            `(features, rank)`, such as `{"rotated": jaxfed.pca.rotate(axes).loadings}`. Groups that
            are None are left out, and components after the first six of a group.
        clients: the clients of the run, with their samples centred as in the fit: components are
            then turned to principal axes, as in `scores`. Without them, and for an estimator, they
            are drawn as they are.
        most: the largest number of features of a group. Up to it, all are drawn in their order;
            else those with the largest sums of squares over the group's components, the largest on
            top.
        feature_names: names of the features; those of the run by default, or numbers.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes that the panels replace in the grid of subplots.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: if there is no group, a group is not `(features, rank)` or does not fit
            `feature_names`, or clients are given with components by name, hold moments or missing
            entries, or are not those of the run.
        ImportError: if Matplotlib is not installed.
    """
    check_count("most", most)
    arrays = projections.groups_of(groups)
    feature_names = projections.features_of(groups, feature_names)
    if clients is not None:
        if isinstance(groups, Mapping):
            raise refuse("clients", "None with components by name", clients)
        clients = clients_of_run(groups, clients)
        if feature_names is None:
            feature_names = clients.names.features
        tables = projections.tables_of(clients)
        if learned_by(groups) is groups:
            arrays = _turned(arrays, tables)
    names = [drawing.checked_features(feature_names, len(x)) for x in arrays.values()]
    blocks = _blocks(arrays, names, most)
    columns = min(MOST_COMPONENTS, max(len(block.panels) for block in blocks))
    rows = [-(-len(block.panels) // columns) for block in blocks]
    heights = [
        count * (0.15 * len(block.features) + 0.62) + 0.1 * bool(block.note)
        for count, block in zip(rows, blocks, strict=True)
    ]
    panel = drawing.within(figure, ax)
    if panel is None:
        letters = max(len(name) for block in blocks for name in block.features)
        wide = 0.4 + 0.065 * min(letters, drawing.LETTERS) + max(1.3 * columns, 2.5)
        panel = drawing.canvas(None, wide, sum(heights) + 0.1)
    parts = np.atleast_1d(panel.subfigures(len(blocks), 1, height_ratios=heights))
    for part, block, count in zip(parts, blocks, rows, strict=True):
        if block.note:
            part.suptitle(block.note, fontsize=9, x=0.01, ha="left")
        _draw(part.subplots(count, columns, squeeze=False, sharey=True), block)
    return panel if ax is None else ax


def _turned(arrays: dict[str, np.ndarray], tables: projections.Tables) -> dict[str, np.ndarray]:
    """The shared components as principal axes of all clients' samples, each local ones of its."""
    finite = [bool(np.isfinite(np.sum(table, dtype=float))) for table in tables]
    shared = [table for table, is_finite in zip(tables, finite, strict=True) if is_finite]
    local = iter(zip(tables, finite, strict=True))
    found = {}
    for name, array in arrays.items():
        if name == "shared":
            found[name] = projections.turned(array, shared)
        else:
            table, is_finite = next(local)
            found[name] = projections.turned(array, [table] if is_finite else None)
    return found


def _shown(array: np.ndarray, most: int) -> np.ndarray:
    """The positions of the features to draw."""
    if len(array) <= most:
        return np.arange(len(array))
    largest = drawing.limit(array)
    return np.argsort(-np.sum((array / largest) ** 2, axis=1), kind="stable")[:most]


def _blocks(
    arrays: dict[str, np.ndarray], names: list[list[str] | None], most: int
) -> list[_Block]:
    """All groups as one block if they have the same few features, else a block for each."""
    found = []
    for (group, array), own in zip(arrays.items(), names, strict=True):
        array = array[:, :MOST_COMPONENTS]
        shown = _shown(array, most)
        selection = f"{drawing.shortened(group)}: {len(shown)} of {len(array):,} features"
        is_part, end = len(shown) < len(array), 1.08 * drawing.limit(array)
        # Above panels of all groups, each has its group's name.
        title = "" if is_part else f"{drawing.shortened(group, TITLE)}\n"
        found.append(
            _Block(
                selection if is_part else "",
                [f"feature {j}" if own is None else own[j] for j in shown],
                [(f"{title}axis {i}", bars, end) for i, bars in enumerate(array[shown].T, 1)],
            )
        )
    if any(block.note or block.features != found[0].features for block in found):
        return found
    return [found[0]._replace(panels=[panel for block in found for panel in block.panels])]


def _draw(grid: Any, block: _Block) -> None:
    """Draw panels in rows, above one another if they do not fit into one."""
    places = np.arange(len(block.features))
    for axes, (title, bars, end) in zip(grid.ravel(), block.panels, strict=False):
        axes.barh(places, bars, 0.75, color=np.where(bars > 0, *map(drawing.colour, (1, 0))))
        axes.axvline(0, color=drawing.GREY, linewidth=0.6)
        drawing.light(axes)
        axes.grid(visible=False)
        axes.set_xlim(-end, end)
        axes.xaxis.get_major_locator().set_params(nbins=3)
        axes.tick_params(labelsize=7)
        axes.tick_params(axis="y", length=0)
        axes.set_title(title, fontsize=8)
    grid[0, 0].set_ylim(len(places) - 0.5, -0.5)
    grid[0, 0].set_yticks(places, map(drawing.shortened, block.features))
    for axes in grid.ravel()[len(block.panels) :]:
        axes.set_axis_off()
