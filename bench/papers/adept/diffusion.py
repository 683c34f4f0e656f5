"""Report ADEPT's personal diffusion models: Table 3, Figures 3 and 4."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxfed import plot
from jaxfed.metrics import client_distribution
from jaxfed.plot.drawing import canvas, colour, light
from papers.adept import _diffusion as models
from papers.intervals import Interval, at_least
from papers.report import Cell, Found, Labels


def table3(found: models.Run) -> Found:
    """Means over clients and the variance over them; the last round's and averaged models."""
    claimed = (
        "mean KID",
        "mean FID",
        "variance of KID over clients",
        "mean KID of the last round",
        "mean KID of the moving average",
        "mean FID of the moving average",
    )
    return _reported(found, claimed, claimed, samples=samples_drawn, clients=clients_drawn)


def figure3(found: models.Run) -> Found:
    """Pictures and their noise."""
    reported = _reported(found, ("noise",), ("noise",), samples=samples_drawn)
    samples = {
        f"samples | {method}": found.outcomes[method][0].samples.astype(np.float16)
        for method in models.methods(found.size)
    }
    return replace(reported, arrays={**outcome_arrays(found), **samples})


def figure4(found: models.Run) -> Found:
    """KID of every client: variance over clients and the worst one."""
    names = (
        "mean KID",
        "variance of KID over clients",
        "worst client's KID",
        "variance of KID over clients, moving average",
        "worst client's KID, moving average",
    )
    return _reported(found, names, names[1:], clients=clients_drawn)


def _reported(
    found: models.Run,
    names: Sequence[str],
    claimed: Sequence[str],
    **pictures: Callable[[models.Run], Any],
) -> Found:
    """What every method found for every seed, claims that ratios are above 1, and pictures."""
    return Found(
        compared(found, names, dict.fromkeys(claimed, at_least(1.0))),
        found.notes,
        {name: partial(draw, found) for name, draw in pictures.items()},
        outcome_arrays(found),
    )


def _mean(values: Array | np.ndarray) -> float:
    return float(np.mean(values))


def _spread(values: np.ndarray) -> float:
    return float(client_distribution(jnp.asarray(values), good="small").variance)


def _worst(values: np.ndarray) -> float:
    return float(client_distribution(jnp.asarray(values), good="small").worst)


_FIGURES: Mapping[str, Callable[[models.Outcome], float]] = {
    "mean KID": lambda outcome: _mean(outcome.kernel),
    "mean FID": lambda outcome: _mean(outcome.frechet),
    "variance of KID over clients": lambda outcome: _spread(outcome.kernel),
    "mean KID of the last round": lambda outcome: _mean(outcome.last),
    "mean KID of the moving average": lambda outcome: _mean(outcome.averaged),
    "mean FID of the moving average": lambda outcome: _mean(outcome.averaged_frechet),
    "variance of KID over clients, moving average": lambda outcome: _spread(outcome.averaged),
    "worst client's KID": lambda outcome: _worst(outcome.kernel),
    "worst client's KID, moving average": lambda outcome: _worst(outcome.averaged),
    "noise": lambda outcome: _mean(outcome.noise),
}
_UNLIKE = "other features and a smaller run"


def compared(
    found: models.Run, names: Sequence[str], claims: Mapping[str, Interval]
) -> dict[Labels, Cell]:
    """What was measured of each method, and then the claims: its ratio to that of each ADEPT-DGM.

    A claim holds if it does with every seed, or for the confidence bound of ten or more.
    """
    values = {
        name: {m: [_FIGURES[name](o) for o in outcomes] for m, outcomes in found.outcomes.items()}
        for name in names
    }
    cells = {
        (name, method): Cell(numbers, incomparable=_UNLIKE)
        for name in names
        for method, numbers in values[name].items()
    }
    for name, claim in claims.items():
        adept = [
            method
            for method in (models.ADEPT, models.PRINTED, models.PROGRAM)
            if method in values[name]
        ]
        for own, method in product(adept, (models.LOCAL, models.AVERAGED)):
            pairs = zip(values[name][method], values[name][own], strict=True)
            ratios = [above / below for above, below in pairs]
            cells[f"{name}, {method} by {own}", ""] = Cell(ratios, paper=claim, by="claim")
    return cells


def outcome_arrays(found: models.Run) -> dict[str, np.ndarray]:
    names = {
        "kernel": "KID",
        "last": "KID of the last round",
        "averaged": "KID of the moving average",
        "averaged_frechet": "FID of the moving average",
        "frechet": "FID",
        "noise": "noise",
        "validation": "validation loss",
    }
    return {
        f"{label} | {method}": _stacked([getattr(outcome, field) for outcome in outcomes])
        for method, outcomes in found.outcomes.items()
        for field, label in names.items()
    }


def _stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """One row a seed; losses are known up to the round that was chosen, and then NaN."""
    longest = max(map(len, rows))
    return np.stack([np.pad(x, (0, longest - len(x)), constant_values=np.nan) for x in rows])


def samples_drawn(found: models.Run) -> Any:
    """Of the first client of each digit, first seed, a part of the picture for each method."""
    size, drawn = found.size, models.methods(found.size)
    figure = canvas(None, 3.5 * len(drawn), 5.6)
    for part, method in zip(figure.subfigures(1, len(drawn)), drawn, strict=True):
        outcome = found.outcomes[method][0]
        part.suptitle(f"{method}, noise {_mean(outcome.noise):.3f}", fontsize=9)
        chosen = outcome.samples[:: size.clients_per_digit, :6]
        noise = outcome.noise[:: size.clients_per_digit]
        plot.samples(
            {str(digit): images for digit, images in enumerate(chosen)},
            (size.side, size.side),
            notes={str(digit): f"{value:.3f}" for digit, value in enumerate(noise)},
            figure=part,
        )
    return figure


def clients_drawn(found: models.Run) -> Any:
    """KID of each client, a column of points for each method."""
    drawn = models.methods(found.size)
    figure = canvas(None, 1.7 * len(drawn), 3.2)
    axes = figure.subplots()
    for place, method in enumerate(drawn):
        values = np.concatenate([outcome.kernel for outcome in found.outcomes[method]])
        aside = np.linspace(-0.25, 0.25, len(values))
        axes.scatter(place + aside, np.sort(values), s=9, color=colour(place), alpha=0.7)
        axes.hlines(values.mean(), place - 0.35, place + 0.35, color=colour(place), linewidth=1.5)
    axes.set_xticks(range(len(drawn)), [name.replace(", ", ",\n") for name in drawn], fontsize=8)
    axes.set_ylabel("KID of a client", fontsize=8)
    axes.set_ylim(0)
    light(axes)
    return figure
