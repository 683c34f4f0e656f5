"""Convergence theorems of the papers beside what is measured.

    python -m bench.tables.theorems [FIGURE]

A row of the first table is a setting, with five draws. "bound / measured" is the least of all
rounds and draws, and the median over draws at the end: below 1, the bound is broken. Slopes are
fitted to logarithms, with the standard error of their mean over draws: to the last half of the
rounds above rounding errors, or for geometric rates while the distance is between 1e-3 and 1e-10,
as multiples of the claimed one. The second table holds what proofs assume, beside what the runs
have. FIGURE is the file that the curves are drawn into.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float

import jaxfed as jf
from bench.common import machine, table
from bench.formulas import convergence
from bench.tables import theorem_runs as runs
from bench.tables.theorem_runs import Curves
from jaxfed.plot.drawing import canvas, colour, light
from papers.drawing import legend

PERPCA, HIERARCHICAL, FAPS = "PerPCA, Theorem 8", "hierarchical PCA, Theorem 1", "FAPS, Theorem 8"
CRITICAL, SUBSPACE, ADEPT = "CuteMaxVar, Theorem 1", "CuteMaxVar, Theorem 3", "ADEPT, Theorem 4.5"
SINCE = 20  # rounds before the bound under compression starts


class Panel(NamedTuple):
    """One theorem's curves, as they are tabulated and drawn."""

    theorem: str
    curves: Curves
    settings: Sequence[str]
    slopes: Float[np.ndarray, "settings draws"] | None
    claimed: str
    across: str = "rounds"
    down: str = ""
    places: Float[np.ndarray, " places"] | None = None  # by default 1, 2, ...
    scales: tuple[str, str] = ("log", "log")


def fitted(
    x: Float[np.ndarray, "settings draws places"],
    y: Float[np.ndarray, "settings draws places"],
    within: Any = True,
) -> Float[np.ndarray, "settings draws"]:
    """Slopes of least-squares lines through the points within; NaN where there are fewer than 3."""
    count = np.sum(within & np.isfinite(y), axis=-1, keepdims=True)
    weights = np.where(within & np.isfinite(y), 1 / np.maximum(count, 1), 0)
    y = np.where(weights > 0, y, 0)
    x = x - np.sum(weights * x, axis=-1, keepdims=True)
    square = np.sum(weights * x**2, axis=-1)
    slopes = np.sum(weights * x * y, axis=-1) / np.where(square > 0, square, 1)
    return np.where(count[..., 0] < 3, np.nan, slopes)


def power(
    measured: Float[ArrayLike, "settings draws places"], floor: float = 1e-20
) -> Float[np.ndarray, "settings draws"]:
    """Exponents of powers of the round, of the last half of the rounds above rounding errors."""
    values = np.asarray(measured)
    rounds = np.arange(1, values.shape[-1] + 1)
    last = np.sum(values > floor, axis=-1, keepdims=True)
    within = (rounds > last / 2) & (rounds <= last)
    return fitted(np.log(rounds), np.log(np.maximum(values, floor)), within)


def geometric(
    measured: Float[ArrayLike, "settings draws places"],
    ratios: Float[ArrayLike, "settings draws"],
) -> Float[np.ndarray, "settings draws"]:
    """Fitted rates per round, as multiples of the logarithms of ratios."""
    distances = np.asarray(measured)
    rounds = np.arange(distances.shape[-1])
    between = (distances < 1e-3) & (distances > 1e-10)
    return fitted(rounds, np.log(distances), between) / np.log(ratios)


def panels() -> Iterator[Panel]:
    """Run everything, a theorem at a time."""
    found = runs.personalized()
    steps = [f"step {x:g}/λ" for x in runs.STEPS]
    down = "mean squared gradient"
    yield Panel(PERPCA, found, steps, power(found.measured), "-1", down=down)
    found = runs.hierarchical()
    priors = [f"prior variance {x:g}" for x in runs.PRIORS]
    yield Panel(HIERARCHICAL, found, priors, power(found.measured), "-1", down=down)
    found = runs.consensus()
    penalties = [f"penalty {x:g} |A_i|²" for x in runs.PENALTIES[:-1]] + ["least penalty allowed"]
    down = "least squared violation"
    yield Panel(FAPS, found, penalties, power(found.measured), "-1", down=down)
    found = runs.critical_points()
    decays = ["constant steps", *(f"steps ~ 1/r^{x:g}".removesuffix("^1") for x in runs.DECAYS[1:])]
    down = "squared gradient"
    yield Panel(CRITICAL, found, decays, power(found.measured), "to zero, no rate", down=down)
    yield distances()
    found = runs.gains()
    sampling = [f"sampling variance {x:g} σ*²" for x in runs.SAMPLING]
    yield Panel(
        *(ADEPT, found, sampling, None, "none", "assumed / true prior variance", "gain"),
        places=runs.ASSUMED,
        scales=("log", "linear"),
    )


def distances() -> Panel:
    """Distances to the optimal subspace: exact messages, compressed ones, and SGD as well."""
    exact = jf.gcca.MaxVar(runs.RANK, memory=0)
    inexact = jf.gcca.MaxVar(runs.RANK, inner_steps=10, batch_size=30)
    some = runs.NOISES[1:2]
    found = [
        runs.subspaces(exact, None),
        runs.subspaces(exact, runs.BITS, some, since=SINCE),
        runs.subspaces(inexact, runs.BITS, some, since=SINCE),
    ]

    def after(x, since):
        return np.pad(x, ((0, 0), (0, 0), (since, 0)), constant_values=np.nan)

    curves = jax.tree.map(
        lambda *x: np.concatenate([after(y, x[0].shape[-1] - y.shape[-1]) for y in x]),
        *(x.curves for x in found),
    )
    ratios = np.concatenate([x.ratio for x in found])
    names = [f"ratio {x:.2f}, exact" for x in np.median(found[0].ratio, axis=1)]
    names += [f"{names[1][:10]}, {rest}" for rest in ("3 bits", "3 bits and SGD")]
    slopes = geometric(curves.measured, ratios)
    down, scales = "sine of the largest angle", ("linear", "log")
    return Panel(SUBSPACE, curves, names, slopes, "1", down=down, scales=scales)


def rows(panel: Panel) -> Iterator[dict[str, object]]:
    """One row a setting."""
    measured, bound = panel.curves
    for i, setting in enumerate(panel.settings):
        ratio = bound[i] / measured[i]
        if panel.slopes is None:
            apart = measured[i] - bound[i]
            error = apart.std(0, ddof=1) / len(apart) ** 0.5
            away = np.max(np.abs(apart.mean(0)) / error)
            least, last = f"formula within {np.abs(apart).max():.3f}", f"{away:.1f} s.e."
        elif np.isnan(ratio[:, -1]).all():
            least, last = "none", "none"
        else:
            least, last = f"{np.nanmin(ratio):.3g}", f"{np.median(ratio[:, -1]):.3g}"
        yield {
            "theorem": panel.theorem,
            "setting": setting,
            "bound / measured, least": least,
            "at the end": last,
            "slope": "none" if panel.slopes is None else spread(panel.slopes[i]),
            "claimed": panel.claimed,
        }


def spread(values: Float[np.ndarray, " draws"]) -> str:
    """The mean and its standard error."""
    if np.isnan(values).any():
        return "none"
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():.2f} ± {error:.2f}"


def assumptions(faps: Curves) -> Iterator[dict[str, object]]:
    """What proofs assume, for the problems of the runs, in units that do not depend on them."""
    limit = float(convergence.perpca_step_limit(1.0, runs.RANK))
    yield {"proof": PERPCA, "assumes": f"step at most {limit:.1g}/λ", "runs": "0.1/λ to 3/λ"}
    samples = runs.hierarchical_samples(1)[0]
    moments = samples.mT @ samples / runs.SAMPLES
    largest = jnp.linalg.eigvalsh(moments).max()
    for prior in runs.PRIORS:
        given = largest, runs.SAMPLES, runs.NOISE, prior, runs.RANK
        rates = convergence.hierarchical_learning_rates(*given)
        used = runs.hierarchical_step(moments, prior)
        yield {
            "proof": f"{HIERARCHICAL}, prior variance {prior:g}",
            "assumes": f"steps at most {float(rates.local):.1g} and {float(rates.shared):.1g}",
            "runs": f"{float(used):.1g} and {prior:g}",
        }
    samples = runs.consensus_samples(1)[0]
    least = float(runs.assumed(samples.mT @ samples).penalty)
    yield {"proof": FAPS, "assumes": f"penalty at least {least:.3g} |A_i|²", "runs": "0.15 |A_i|²"}
    needed = np.median(faps.bound[-1, :, 0] / faps.measured[-1, :, 0])
    yield {
        "proof": FAPS,
        "assumes": f"{needed:.2g} rounds until the bound is below the start's violation",
        "runs": f"{faps.bound.shape[-1]} rounds",
    }


def draw(shown: Sequence[Panel], file: Path) -> None:
    """Medians over draws in solid lines, their bounds dashed."""
    figure = canvas(None, 12, 7.2)
    for axes, panel in zip(figure.subplots(2, 3).flat, shown, strict=True):
        measured, bound = (np.median(x, axis=1) for x in panel.curves)
        x = np.arange(1, measured.shape[-1] + 1) if panel.places is None else panel.places
        for i, setting in enumerate(panel.settings):
            axes.plot(x, smooth(measured[i], panel), color=colour(i), label=setting, linewidth=1.3)
            axes.plot(x, bound[i], color=colour(i), linestyle="--", linewidth=1)
        axes.set_xscale(panel.scales[0])
        axes.set_yscale(panel.scales[1])
        if panel.scales[1] == "log":
            axes.set_ylim(bottom=max(1e-16, 0.5 * np.nanmin(measured)))
        axes.set_title(panel.theorem, fontsize=10)
        axes.set_xlabel(panel.across, fontsize=9)
        axes.set_ylabel(panel.down, fontsize=9)
        light(axes)
        legend(axes, fontsize=7.5)
    figure.savefig(file, dpi=100)


def smooth(values: Float[np.ndarray, " places"], panel: Panel) -> Float[np.ndarray, " places"]:
    """With SGD, the mean of the last tenth of the rounds so far."""
    if panel.theorem != CRITICAL:
        return values
    sums = np.concatenate([[0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    begin = end - np.maximum(end // 10, 1)
    return (sums[end] - sums[begin]) / (end - begin)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    shown = list(panels())
    print(machine())
    print(table([row for panel in shown for row in rows(panel)]))
    print()
    print(table(list(assumptions(shown[2].curves))))
    if len(sys.argv) > 1:
        draw(shown, Path(sys.argv[1]))
