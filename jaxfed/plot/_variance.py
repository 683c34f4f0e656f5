"""Draws the variance that components explain: in order, and by client and kind."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import ArrayLike, Real

from jaxfed._checks import check_count, check_instance, check_number, refuse
from jaxfed.metrics import EnergyShares
from jaxfed.plot import drawing

MOST_NAMES = 40  # with more clients, their names are not written


def scree(
    variances: Mapping[str, Real[ArrayLike, "..."] | Sequence[float]],
    *,
    total: float | None = None,
    chosen: Mapping[str, int] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw the variance along each component in order: a scree plot.

    Args:
        variances: by name, the eigenvalues of a second moment, `(r,)`, or of every client's,
            `(clients, r)`, drawn as their mean in a band from the smallest to the largest.
        total: the total variance; if given, the axis shows shares of it in percent.
        chosen: ranks by name, each marked by a vertical line after that component.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: if variances are negative or of another shape, or the total or a rank is not
            positive.
        ImportError: if Matplotlib is not installed.
    """
    drawing.check_named("variances", variances, "variances")
    wanted = "variances of shape (components,) or (clients, components)"
    curves = {}
    for name, values in variances.items():
        axes = 2 if np.ndim(values) == 2 else 1
        curves[name] = np.atleast_2d(drawing.host(f"variances[{name!r}]", values, axes, wanted))
        if curves[name].min() < 0:
            raise ValueError(f"variances[{name!r}]: wanted none below 0, got {curves[name].min()}")
    if total is not None:
        check_number("total", total, "a positive number or None", lambda x: x > 0)
    for name, rank in (chosen or {}).items():
        check_count(f"chosen[{name!r}]", rank)
    scale = 1.0 if total is None else 100 / float(total)
    target = drawing.one_axes(figure, ax, 5.0, 3.0)
    axes = target.axes
    for position, (name, values) in enumerate(curves.items()):
        places = np.arange(1, values.shape[1] + 1)
        look = {"color": drawing.colour(position), "linewidth": 1.2, "markersize": 3.5}
        axes.plot(places, scale * values.mean(axis=0), "o-", label=drawing.verbatim(name), **look)
        if len(values) > 1:
            ends = scale * values.min(axis=0), scale * values.max(axis=0)
            axes.fill_between(places, *ends, color=look["color"], alpha=0.15, lw=0)
    drawing.marked(axes.axvline, {name: rank + 0.5 for name, rank in (chosen or {}).items()})
    drawing.light(axes)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("component", fontsize=9)
    axes.set_ylabel("variance" if total is None else "share of the variance (%)", fontsize=9)
    if len(curves) + len(chosen or ()) > 1:
        axes.legend(fontsize=8, frameon=False)
    return target.returned


def variance_shares(
    shares: EnergyShares,
    *,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw how each client's variance splits into the shared, the local and the rest.

    Args:
        shares: `jaxfed.metrics.separation(..., per_client=True)`, three arrays `(clients,)`.
        names: names of the clients; written beside the bars of at most 40 clients.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given, with a bar per client and the most shared on top.

    Raises:
        ValueError: if shares are not three arrays of one length, or names are not one per client.
        ImportError: if Matplotlib is not installed.
    """
    check_instance("shares", shares, EnergyShares, "what jaxfed.metrics.separation returned")
    parts = [
        100 * drawing.host(f"shares.{name}", part, 1, "a share for each client")
        for name, part in zip(EnergyShares._fields, shares, strict=True)
    ]
    clients = len(parts[0])
    if {len(part) for part in parts} != {clients}:
        raise refuse("shares", "arrays of one length", shares)
    drawing.check_names("names", names, clients)
    # Bars are drawn from the bottom, so sort the most shared client last.
    order = np.argsort(parts[0], kind="stable")
    written = names is not None and clients <= MOST_NAMES
    bar = 0.2 if written else 0.06
    target = drawing.one_axes(figure, ax, 5.0, 1.1 + min(clients, MOST_NAMES) * bar)
    axes = target.axes
    left = np.zeros(clients)
    looks = ((drawing.colour(0), "shared"), (drawing.colour(1), "local"), ("#9aa1ab66", "neither"))
    for part, (look, name) in zip(parts, looks, strict=True):
        height = 0.8 if written else 1.0
        axes.barh(np.arange(clients), part[order], height, left, color=look, label=name)
        left += part[order]
    drawing.light(axes)
    axes.grid(visible=False)
    axes.set_yticks([])
    if names is not None and written:
        axes.set_yticks(
            range(clients), [drawing.verbatim(names[int(i)]) for i in order], fontsize=7
        )
    else:
        axes.set_ylabel(f"{clients:,} clients", fontsize=9)
    axes.margins(x=0, y=0.01)
    axes.set_xlabel("share of the client's variance (%)", fontsize=9)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return target.returned
