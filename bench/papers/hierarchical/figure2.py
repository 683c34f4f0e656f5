"""Training and test error against rounds for three prior variances."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from xarray import Dataset

import papers
from jaxfed import Algorithm
from jaxfed.data import HierarchicalData
from jaxfed.pca import HierarchicalPCA
from papers.hierarchical import _laws as laws
from papers.hierarchical._rounds import KINDS, over_rounds, settled
from papers.intervals import at_least
from papers.report import Found, Labels
from papers.runs import Seeds

VARIANCES, AT = (0.01, 0.1, 1.0), (10, 50, 400)  # and the rounds that are compared


def _one_assumed(data: HierarchicalData, variance) -> dict[str, Algorithm]:
    del data
    step = jnp.where(variance < 0.05, 0.005, 0.01)
    make = partial(HierarchicalPCA, 10, laws.NOISE, start="random", align=False)
    return {laws.OURS: make(variance, step_size=step, global_step_size=step)}


def _two_assumed(data: HierarchicalData, variance) -> dict[str, Algorithm]:
    """Two assumed variances on the same data."""
    del data, variance
    make = partial(HierarchicalPCA, 10, laws.NOISE, solver="eigenvectors")
    return {"0.01": make(0.01, likelihood="half"), "1": make(1.0, likelihood="half")}


def run(seeds: Seeds) -> Found:
    """All variances, and two assumed ones on data of the same law."""
    variances, known = list(VARIANCES), papers.known("hierarchical/figure2")
    more = seeds.first(3 * len(seeds))  # small problems: more data sets
    found = over_rounds(variances, more, clients=50, samples=20, rounds=400, make=_one_assumed)
    measured: dict[Labels, Any] = {}
    panels = {}
    for kind in reversed(KINDS):
        ours = found[laws.OURS].sel(kind=kind)
        lines = {f"{v:g}": ours.sel(prior_variance=v, drop=True) for v in variances}
        panels[kind] = Dataset(lines)
    ends: dict[str, list[Any]] = {"train": [], "test": [], "rounds": []}
    for variance in variances:
        curves = {kind: panel[f"{variance:g}"].values for kind, panel in panels.items()}
        for kind in ("train", "test"):
            for at in AT:
                measured[variance, at, kind] = curves[kind][:, at - 1]
            ends[kind].append(curves[kind][:, -1])
        lengths = [settled(curve, 0.02) for curve in curves["train"]]
        measured[variance, "to 2 %", "train"] = lengths
        ends["rounds"].append(lengths)
    same = over_rounds([0.2], seeds, clients=50, samples=20, rounds=30, make=_two_assumed).sel(
        prior_variance=0.2, kind="test", round=30
    )
    other = {name: values.values for name, values in same.items()}
    rises = {name: np.diff(np.asarray(values, float), axis=0) for name, values in ends.items()}
    train, test = (np.diff([known[v, 400, kind] for v in variances]) for kind in ("train", "test"))
    statements = {
        "a larger variance trains to a smaller error: least fall": (
            laws.least(-rises["train"]),
            laws.at_least_half(*-train),
        ),
        "a larger variance tests worse: least rise": (
            laws.least(rises["test"]),
            laws.at_least_half(*test),
        ),
        # From 0.1 to 1 the reference's rounds are the same.
        "a larger variance is faster, 0.1 against 0.01: fall of rounds": (
            -rises["rounds"][0],
            at_least(30),
        ),
        "on one law of variance 0.2 the order of test errors is the other: 0.01 less 1": (
            other["0.01"] - other["1"],
            laws.at_least_half(
                known["0.2, assumed 0.01", 400, "test"] - known["0.2, assumed 1", 400, "test"]
            ),
        ),
    }
    measured["0.2, assumed 0.01", 400, "test"] = other["0.01"]
    measured["0.2, assumed 1", 400, "test"] = other["1"]
    return Found(
        measured,
        claims=statements,
        figures={"figure2": laws.picture(panels, "round", "linear")},
        arrays=laws.curves_of(panels),
    )
