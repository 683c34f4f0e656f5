"""Error against rounds, from random starts."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import papers
from jaxfed import Algorithm
from jaxfed.data import HierarchicalData
from jaxfed.pca import HierarchicalPCA
from papers.hierarchical import _laws as laws
from papers.hierarchical._rounds import over_rounds, settled
from papers.hierarchical.descent import GlobalProbabilisticPCA, LocalProbabilisticPCA
from papers.report import Cell, Found, Labels
from papers.runs import Seeds

VARIANCES = (0.04, 0.2)


def _precision(samples: int) -> float:
    return samples / (laws.NOISE * (1 + laws.NOISE))


def _printed_methods(data: HierarchicalData, variance) -> dict[str, Algorithm]:
    """The printed algorithms, from random frames, unaligned, with one step size for everybody."""
    _, n, _ = data.samples.shape
    c = _precision(n)
    largest = jnp.linalg.eigvalsh(data.samples @ jnp.swapaxes(data.samples, 1, 2)).max() / n
    pooled = jnp.einsum("mnd,mne->de", data.samples, data.samples) / (n * len(data.samples))
    make = partial(HierarchicalPCA, 10, laws.NOISE, variance, start="random", align=False)
    shared = partial(GlobalProbabilisticPCA, 10, laws.NOISE, start="random")
    step = 1 / (c * largest + 1 / variance)
    own = 1 / (c * largest)
    everybody = 1 / (c * jnp.linalg.eigvalsh(pooled)[-1])
    return {
        laws.LOCAL: LocalProbabilisticPCA(10, laws.NOISE, step_size=own),
        laws.GLOBAL: shared(step_size=everybody),
        f"{laws.GLOBAL}, local's step": shared(step_size=own),
        laws.OURS: make(step_size=step),
        laws.PRINTED: make(step_size=step, likelihood="half"),
    }


def run(seeds: Seeds) -> Found:
    """Both readings, all methods and seeds."""
    variances, known = list(VARIANCES), papers.known("hierarchical/figure1a")
    found = over_rounds(
        variances, seeds, clients=200, samples=10, rounds=600, make=_printed_methods
    )
    measured: dict[Labels, Any] = {}
    statements, panels = {}, {}
    for variance in variances:
        panel = panels[f"prior variance {variance}"] = found.sel(
            prior_variance=variance, kind="test"
        )
        curves = {name: values.values for name, values in panel.items()}
        for name in curves:
            measured[variance, name, "error"] = curves[name][:, -1]
            rounds = [settled(curve, 0.01) for curve in curves[name]]
            measured[variance, name, "rounds"] = Cell(rounds, by="median")
        ends = {name: c[:, -1] for name, c in curves.items()}
        lengths = {name: np.asarray(measured[variance, name, "rounds"].measured) for name in curves}
        local, everybody, ours = (
            known[variance, n, "error"] for n in (laws.LOCAL, laws.GLOBAL, laws.OURS)
        )
        slower = known[variance, laws.OURS, "rounds"] - known[variance, laws.LOCAL, "rounds"]
        statements |= {
            f"{variance}: personalized best by": (
                laws.margins({name: end[None] for name, end in ends.items()}),
                laws.at_least_half(min(local, everybody) - ours),
            ),
            f"{variance}: local worst by": (
                ends[laws.LOCAL] - ends[laws.GLOBAL],
                laws.at_least_half(local - everybody),
            ),
            f"{variance}: personalized slower than local by": (
                lengths[laws.OURS] - lengths[laws.LOCAL],
                laws.at_least_half(slower),
            ),
        }
    return Found(
        measured,
        claims=statements,
        figures={"figure1a": laws.picture(panels, "round")},
        arrays=laws.curves_of(panels),
    )
