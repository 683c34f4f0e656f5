"""What components explain: of the whole in their order, and of each client by their kind."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxfed.core.common.checks import check_count, check_number, refuse
from jaxfed.metrics import EnergyShares
from jaxfed.plot._figure import (
    GREY,
    check_place,
    colour,
    host,
    light,
    named,
    one_axes,
    texts,
    verbatim,
)

ArrayLike = Array | np.ndarray
NAMED = 40  # clients at most whose names are written


def scree(
    variances: Mapping[str, Float[ArrayLike, "*clients r"]],
    *,
    total: float | None = None,
    chosen: Mapping[str, int] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw the variance along each component, the first components first: a scree plot.

    Args:
        variances: by name, such as the eigenvalues of a second moment, `(r,)`, or those of every
            client, `(clients, r)`: then the mean, in a band from the smallest to the largest.
        total: what they are shares of; without it the axis has the variances themselves.
        chosen: a rank under each name, to be marked by a vertical line after that component.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes where these were given.

    Raises:
        ValueError: for variances that are negative or not of these shapes, a total that is not
            positive, and a rank that is not positive.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax)
    named("variances", variances, "variances")
    wanted = "variances of shape (components,) or (clients, components)"
    curves = {}
    for name, values in variances.items():
        axes = 2 if np.ndim(values) == 2 else 1
        curves[name] = np.atleast_2d(host(f"variances[{name!r}]", values, axes, wanted))
        if curves[name].min() < 0:
            raise ValueError(f"variances[{name!r}]: wanted none below 0, got {curves[name].min()}")
    if total is not None:
        check_number("total", total, "a positive number or None", lambda x: x > 0)
    if chosen is not None:
        named("chosen", chosen, "ranks")
        for name, rank in chosen.items():
            check_count(f"chosen[{name!r}]", rank)
    scale = 1.0 if total is None else 100 / float(total)
    axes, drawn = one_axes(figure, ax, 5.0, 3.0)
    for position, (name, values) in enumerate(curves.items()):
        places = np.arange(1, values.shape[1] + 1)
        look = {"color": colour(position), "linewidth": 1.2, "markersize": 3.5}
        axes.plot(places, scale * values.mean(axis=0), "o-", label=verbatim(name), **look)
        if len(values) > 1:
            ends = scale * values.min(axis=0), scale * values.max(axis=0)
            axes.fill_between(places, *ends, color=look["color"], alpha=0.15, lw=0)
    for position, (name, rank) in enumerate((chosen or {}).items()):
        style = {"linestyle": ("--", ":", "-.")[position % 3], "color": GREY, "linewidth": 1.0}
        axes.axvline(rank + 0.5, label=verbatim(name), **style)
    light(axes)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("component", fontsize=9)
    axes.set_ylabel("variance" if total is None else "share of the variance (%)", fontsize=9)
    if len(curves) + len(chosen or ()) > 1:
        axes.legend(fontsize=8, frameon=False)
    return drawn


def variance_shares(
    shares: EnergyShares,
    *,
    names: Sequence[str] | None = None,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw how each client's variance splits: in shared components, in its own, in neither.

    Args:
        shares: `jaxfed.metrics.separation(..., per_client=True)`, three arrays `(clients,)`.
        names: of the clients; written beside the bars of up to 40 of them.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes where these were given. A bar for each client, the most shared on
        top.

    Raises:
        ValueError: for shares that are not three arrays of one length, and other names than one
            for each client.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax)
    if not isinstance(shares, tuple) or len(shares) != len(EnergyShares._fields):
        raise refuse("shares", "those of jaxfed.metrics.separation", shares)
    parts = [
        100 * host(f"shares.{name}", part, 1, "a share for each client")
        for name, part in zip(EnergyShares._fields, shares, strict=True)
    ]
    clients = len(parts[0])
    if {len(part) for part in parts} != {clients}:
        raise refuse("shares", "arrays of one length", shares)
    texts("names", names, clients)
    order = np.argsort(parts[0], kind="stable")
    written = names is not None and clients <= NAMED
    axes, drawn = one_axes(figure, ax, 5.0, 1.1 + min(clients, NAMED) * (0.2 if written else 0.06))
    left = np.zeros(clients)
    looks = ((colour(0), "shared"), (colour(1), "local"), ("#9aa1ab66", "neither"))
    for part, (look, name) in zip(parts, looks, strict=True):
        height = 0.8 if written else 1.0
        axes.barh(np.arange(clients), part[order], height, left, color=look, label=name)
        left += part[order]
    light(axes)
    axes.grid(visible=False)
    axes.set_yticks([])
    if names is not None and written:
        axes.set_yticks(range(clients), [verbatim(names[int(i)]) for i in order], fontsize=7)
    else:
        axes.set_ylabel(f"{clients:,} clients", fontsize=9)
    axes.margins(x=0, y=0.01)
    axes.set_xlabel("share of the client's variance (%)", fontsize=9)
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    return drawn
