"""Curves of a history over the rounds."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import ArrayLike, Real

from jaxfed._checks import check_name, check_number, refuse
from jaxfed._optional import require
from jaxfed.plot import drawing


def convergence(
    history: Mapping[str, Real[ArrayLike, " _rounds"]],
    quantities: Sequence[str] = ("objective",),
    *,
    levels: Mapping[str, float] | None = None,
    against: Literal["rounds", "bits_up"] = "rounds",
    label: str | None = None,
    bits: bool = False,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw entries of a history over the rounds, each curve under its name.

    Args:
        history: `solution.history`. Rounds in which an entry was not computed are left out.
        quantities: the entries to draw.
        levels: values to compare with: a horizontal line at each, under its name.
        against: the horizontal axis: rounds, or the bits that a client has sent.
        label: label of the vertical axis; by default the name of the only entry.
        bits: also draw the bits that a client has sent, on a second axis at the right.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes if given.

    Raises:
        ValueError: if an entry is not in the history, or bits are requested on both axes.
        ImportError: if Matplotlib is not installed.
    """
    drawing.check_named("history", history, "arrays")
    if not quantities:
        raise refuse("quantities", "names of the history, at least one", quantities)
    check_name("against", against, ("rounds", "bits_up"))
    for name, value in (levels or {}).items():
        check_number(f"levels[{name!r}]", value, "a number")
    if bits and against == "bits_up":
        raise ValueError("bits: wanted False with against='bits_up', got True")
    needed = dict.fromkeys(quantities, "quantities")
    if bits or against == "bits_up":
        needed["bits_up"] = "bits" if bits else "against"
    curves = {}
    for name, argument in needed.items():
        if name not in history:
            raise ValueError(f"{argument}: the history has {sorted(history)}, not {name!r}")
        wanted = "a number for each round"
        curves[name] = drawing.host(f"history[{name!r}]", history[name], 1, wanted, finite=False)
    target = drawing.one_axes(figure, ax, 5.0, 3.0)
    axes = target.axes
    for position, name in enumerate(quantities):
        values = curves[name]
        places = curves["bits_up"] if against == "bits_up" else np.arange(1, len(values) + 1)
        known = np.isfinite(values)
        # A line through one point would be invisible.
        style = "." if known.sum() == 1 else "-"
        look = {"color": drawing.colour(position), "label": drawing.verbatim(name)}
        axes.plot(places[known], values[known], style, **look)
    drawing.marked(axes.axhline, levels)
    drawing.light(axes)
    drawing.without_zoom(axes)
    if bits:
        _bits(axes.twinx(), curves["bits_up"])
    if against == "rounds":
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("round" if against == "rounds" else "bits sent by a client", fontsize=9)
    if label is not None or len(quantities) == 1:
        axes.set_ylabel(drawing.verbatim(label or quantities[0]), fontsize=9)
    if len(quantities) + len(levels or ()) > 1:
        # Place it above the axes, where it hides no curve.
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return target.returned


def _bits(axes: Any, bits: Real[np.ndarray, " rounds"]) -> None:
    """Draw the bits that a client has sent on a second axis."""
    known = np.isfinite(bits)
    style = {"linestyle": ":", "color": drawing.GREY, "linewidth": 1.2}
    axes.plot(np.arange(1, len(bits) + 1)[known], bits[known], **style)
    drawing.light(axes)
    axes.grid(visible=False)
    axes.spines["right"].set(visible=True, color=drawing.GREY)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(require("matplotlib.ticker", extra="plot").EngFormatter())
    axes.set_ylabel("bits sent by a client (dotted)", fontsize=9, color=drawing.GREY)
