"""Subspace errors of clients with 10,000 samples as one number of their law grows."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxfed import Personalized, metrics, pca
from papers.drawing import curves
from papers.perpca._statistics import drawn_moments
from papers.report import Found, Interval, Labels, around
from papers.runs import Seeds, learned

SAMPLES = 10_000  # of a rich client
OURS, ONCE = "PerPCA, default start", "distPCA"
BOTH, SHARED = "subspace error", "shared components' error"
SLOPE = "slope"


def _errors(result: Personalized, truth: Personalized) -> dict[str, np.ndarray]:
    both = jax.vmap(metrics.subspace_error)(*result, *truth)
    shared = jax.vmap(metrics.projector_distance)(result.shared, truth.shared)
    return {BOTH: np.asarray(both), SHARED: np.asarray(shared)}


def growing(seeds: Seeds, name: str, values: Sequence[int]) -> Found:
    """Every method at every value of `name`, an argument of the law.

    The well-posed setting of Figure 4: shared variance 1, local variance 4, four local components.
    """
    data_keys, keys = seeds.split(2)
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for value in values:
        clients, truth, _ = drawn_moments("figure4", data_keys, (SAMPLES,), **{name: value})
        for method, algorithm, rounds in (
            (ONCE, pca.OneShot(2, 4, method="projector"), 1),
            (OURS, pca.PerPCA(2, 4, step_size=0.15), 300),
        ):
            result = learned(algorithm, clients, keys, rounds)
            for quantity, errors in _errors(result, truth).items():
                found.setdefault((method, quantity), []).append(errors)
    measured: dict[Labels, Any] = {}
    panels: dict[tuple[str, str, str], dict[str, Any]] = {}
    for (method, quantity), errors in found.items():
        for value, of_seeds in zip(values, errors, strict=True):
            measured[method, quantity, value] = of_seeds
        logarithms = np.log10(np.stack(errors))
        measured[method, quantity, SLOPE] = np.polyfit(np.log10(values), logarithms, 1)[0]
        panel = panels.setdefault((quantity, name, "error"), {})
        panel[method] = values, np.stack(errors).mean(1)
    return Found(measured, figures={"errors": curves(panels, marker="o", markersize=3)})


def known(
    law: Mapping[str, Sequence[tuple[float, float]]], values: Sequence[int]
) -> dict[Labels, Interval]:
    """Mean and standard deviation of the reference as intervals, and those of the slopes.

    They are those of distPCA, to which PerPCA comes within a few per cent here.
    """
    reference: dict[Labels, Interval] = {}
    places = np.log10(values) - np.log10(values).mean()
    for quantity, pairs in law.items():
        mean, sd = np.asarray(pairs).T
        slope = places @ np.log10(mean) / (places @ places)
        slope_sd = np.linalg.norm(places * sd / mean / np.log(10)) / (places @ places)
        for method in (ONCE, OURS):
            for value, pair in zip(values, pairs, strict=True):
                reference[method, quantity, value] = around(*pair)
            reference[method, quantity, SLOPE] = around(float(slope), float(slope_sd))
    return reference
