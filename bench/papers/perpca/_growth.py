"""Measure subspace errors as the dimension or the number of clients grows: Figures 5 and 6.

In two settings of Figure 4: the published one, from the authors' start, and the well-posed one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

import papers
from jaxfed import Personalized, metrics, pca
from papers.drawing import curves
from papers.perpca._statistics import drawn_moments
from papers.perpca._synthetic import AUTHORS, gaussian, smallest_first
from papers.report import Cell, Found, Labels, ahead
from papers.runs import Seeds, learned

SAMPLES = 10_000  # of a rich client
PUBLISHED, WELL_POSED = "published", "well-posed"
OURS, ONCE = "PerPCA, local-first start", "distPCA"
BOTH, SHARED = "subspace error", "shared components' error"
SLOPE = "slope"
# Of each setting the method that is like PerPCA's, then the one-shot method.
METHODS = {PUBLISHED: (AUTHORS, ONCE), WELL_POSED: (OURS, ONCE)}
DIMENSIONS = {PUBLISHED: (15, 20, 30, 60), WELL_POSED: (15, 30, 60, 120)}
CLIENTS = {PUBLISHED: (10, 30, 100, 300), WELL_POSED: (10, 30, 100, 300, 1000)}


def _errors(result: Personalized, truth: Personalized) -> dict[str, np.ndarray]:
    both = jax.vmap(metrics.subspace_error)(*result, *truth)
    shared = jax.vmap(metrics.projector_distance)(result.shared, truth.shared)
    return {BOTH: np.asarray(both), SHARED: np.asarray(shared)}


def _learned(
    setting: str, seeds: Seeds, changes: Mapping[str, Any]
) -> tuple[dict[str, Personalized], Personalized]:
    """What both methods learn in a setting, and the truth."""
    data_keys, keys = seeds.split(2)
    if setting == WELL_POSED:
        clients, truth, _ = drawn_moments("figure4", data_keys, (SAMPLES,), **changes)
        perpca = pca.PerPCA(2, 4, solver="gradient", step_size=0.15, start="local_first")
        ours = learned(perpca, clients, keys, 300)
        once = learned(pca.OneShot(2, 4, method="projector"), clients, keys)
        return {ONCE: once, OURS: ours}, truth
    clients, truth, pooled = drawn_moments("table2_published", data_keys, (SAMPLES,), **changes)
    local = gaussian(keys, *truth.local.shape[1:])
    start = Personalized(smallest_first(pooled)[:, :, :2], local)
    ours = learned(pca.PerPCA(2, 10, solver="gradient", step_size=0.2), clients, keys, 100, start)
    once = learned(pca.OneShot(2, 10, method="projector"), clients, keys)
    return {ONCE: once, AUTHORS: ours}, truth


def dimensions(seeds: Seeds, *, features: Mapping[str, Sequence[int]] = DIMENSIONS) -> Found:
    """Figure 5: all seeds of a dimension and method in one compiled call."""
    return _growing(seeds, "features", features, papers.known("perpca/figure5"))


def clients(seeds: Seeds, *, numbers: Mapping[str, Sequence[int]] = CLIENTS) -> Found:
    """Figure 6: all seeds of a number of clients and method in one compiled call."""
    return _growing(seeds, "clients", numbers, papers.known("perpca/figure6"))


def _growing(
    seeds: Seeds, name: str, values: Mapping[str, Sequence[int]], known: Mapping[Labels, float]
) -> Found:
    """Both settings at each of their values of `name`, an argument of the law."""
    measured: dict[Labels, Any] = {}
    panels: dict[tuple[str, str, str], dict[str, Any]] = {}
    for setting, of_setting in values.items():
        found: dict[tuple[str, str], list[np.ndarray]] = {}
        for value in of_setting:
            results, truth = _learned(setting, seeds, {name: value})
            for method, result in results.items():
                for quantity, errors in _errors(result, truth).items():
                    found.setdefault((method, quantity), []).append(errors)
        for (method, quantity), errors in found.items():
            for value, of_seeds in zip(of_setting, errors, strict=True):
                measured[setting, method, quantity, value] = of_seeds
            logarithms = np.log10(np.stack(errors))
            slope = np.polyfit(np.log10(of_setting), logarithms, 1)[0]
            measured[setting, method, quantity, SLOPE] = slope
            panel = panels.setdefault((f"{quantity}, {setting}", name, "error"), {})
            panel[method] = of_setting, np.stack(errors).mean(1)
    measured |= _smaller(measured, values[PUBLISHED], known)
    return Found(measured, figures={"errors": curves(panels, marker="o", markersize=3)})


def _smaller(
    measured: Mapping[Labels, Any], values: Sequence[int], known: Mapping[Labels, float]
) -> dict[Labels, Cell]:
    """The paper's claim that its method has the smaller errors, by half of what it has there."""
    ours, once = ((PUBLISHED, method, BOTH) for method in METHODS[PUBLISHED])
    return {
        ("claim", f"{AUTHORS}, smaller than {ONCE}", BOTH, value): ahead(
            measured[*ours, value],
            measured[*once, value],
            (known[*once, value] - known[*ours, value]) / 2,
        )
        for value in values
    }
