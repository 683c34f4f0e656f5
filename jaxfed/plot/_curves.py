"""Curves over rounds."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Shaped

from jaxfed._optional import require
from jaxfed.core.common.checks import check_flag, check_list, check_name, check_number, check_text
from jaxfed.plot._figure import GREY, check_place, colour, host, light, named, one_axes, verbatim


def convergence(
    history: Mapping[str, Shaped[Array | np.ndarray, " rounds"]],
    quantities: Sequence[str] = ("objective",),
    *,
    levels: Mapping[str, float] | None = None,
    against: Literal["rounds", "bits_up"] = "rounds",
    label: str | None = None,
    bits: bool = False,
    figure: Any = None,
    ax: Any = None,
) -> Any:
    """Draw entries of a history over the rounds, each curve under its own name.

    Args:
        history: `solution.history`. Rounds in which an entry was not computed are left out.
        quantities: which entries.
        levels: what to compare with: a horizontal line at each value, under its name.
        against: the horizontal axis: rounds, or bits that a client has sent.
        label: the vertical axis; by default the name of the only entry.
        bits: also draw the bits that a client has sent, against a second axis on the right.
        figure: a Matplotlib figure or subfigure to draw into; a new one by default.
        ax: Matplotlib axes to draw into instead.

    Returns:
        The figure, or the axes where these were given.

    Raises:
        ValueError: if an entry is not in the history, or bits are wanted twice.
        ImportError: if Matplotlib is not installed.
    """
    check_place(figure, ax)
    named("history", history, "arrays")
    check_list("quantities", quantities, "names of the history")
    check_name("against", against, ("rounds", "bits_up"))
    if label is not None:
        check_text("label", label)
    if levels is not None:
        named("levels", levels, "numbers")
        for name, value in levels.items():
            check_number(f"levels[{name!r}]", value, "a number")
    check_flag("bits", bits)
    if bits and against == "bits_up":
        raise ValueError("bits: wanted False with against='bits_up', got True")
    asked = [(name, "quantities") for name in quantities]
    if bits or against == "bits_up":
        asked.append(("bits_up", "bits" if bits else "against"))
    for name, argument in asked:
        if not isinstance(name, str) or name not in history:
            raise ValueError(f"{argument}: the history has {sorted(history)}, not {name!r}")
        host(f"history[{name!r}]", history[name], 1, "a number for each round", finite=False)
    axes, drawn = one_axes(figure, ax, 5.0, 3.0)
    for position, name in enumerate(quantities):
        values = np.asarray(history[name], float)
        places = np.arange(1, len(values) + 1)
        if against == "bits_up":
            places = np.asarray(history["bits_up"], float)
        known = np.isfinite(values)
        style = "." if known.sum() == 1 else "-"
        axes.plot(places[known], values[known], style, color=colour(position), label=verbatim(name))
    for position, (name, value) in enumerate((levels or {}).items()):
        style = {"linestyle": ("--", ":", "-.")[position % 3], "color": GREY, "linewidth": 1.0}
        axes.axhline(value, label=verbatim(name), **style)
    light(axes)
    if bits:
        _sent(axes.twinx(), np.asarray(history["bits_up"], float))
    axes.set_xlabel("round" if against == "rounds" else "bits sent by a client", fontsize=9)
    if label is not None or len(quantities) == 1:
        axes.set_ylabel(verbatim(label or quantities[0]), fontsize=9)
    if len(quantities) + len(levels or ()) > 1:
        axes.legend(fontsize=8, frameon=False)
    return drawn


def _sent(axes: Any, sent: np.ndarray) -> None:
    """The second axis: what a client has sent so far."""
    known = np.isfinite(sent)
    style = {"linestyle": ":", "color": GREY, "linewidth": 1.2}
    axes.plot(np.arange(1, len(sent) + 1)[known], sent[known], **style)
    light(axes)
    axes.grid(visible=False)
    axes.spines["right"].set(visible=True, color=GREY)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(require("matplotlib.ticker", extra="plot").EngFormatter())
    axes.set_ylabel("bits sent by a client (dotted)", fontsize=9, color=GREY)
