"""Spectral clustering of the views and of the learned representation."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxfed import fit
from jaxfed.data import nonlinear_views_synthetic
from jaxfed.metrics import spectral_clustering_accuracy
from jaxfed.plot.drawing import colour
from papers.drawing import graphs
from papers.gcca import _deep as deep
from papers.report import Found, Labels
from papers.runs import Seeds

CLUSTERED, GAMMA = 1000, 5.0  # new entities to cluster, and the width of their affinities


def run(seeds: Seeds, *, scale: float = 1.0, rounds: int = 50) -> Found:
    """Learn with both channels, and cluster views and representations."""
    entities = deep.entities_at(scale)
    algorithm = deep.algorithm_of(entities)
    measured: dict[Labels, list[float]] = {}
    pictures: dict[str, np.ndarray] = {}
    for seed in seeds:
        train, test, key = jax.random.split(jax.random.key(seed), 3)
        views = deep.views_of(nonlinear_views_synthetic(key=train, entities=entities))
        others = nonlinear_views_synthetic(key=test, entities=CLUSTERED)
        rows: dict[str, Any] = {f"view {j + 1}": x for j, x in enumerate(others.views)}
        for name, wire in deep.CHANNELS.items():
            solution = fit(algorithm, views, rounds=rounds, key=key, channel=wire)
            rows[name] = deep.represented(algorithm, solution.result.local, deep.views_of(others))
        for name, x in rows.items():
            accuracy = spectral_clustering_accuracy(x, others.labels, gamma=GAMMA, seed=seed)
            measured.setdefault((name,), []).append(accuracy)
        pictures = pictures or {name: np.asarray(x) for name, x in rows.items()}
    labels = np.arange(CLUSTERED) % 2
    return Found(
        measured,
        notes=[
            *deep.scaled(entities, rounds),
            f"{CLUSTERED} entities that nothing was learned from; affinities exp(-{GAMMA:g} r²).",
        ],
        figures={"figure10": functools.partial(_draw_points, pictures, labels)},
        arrays={**pictures, "labels": labels},
    )


def _draw_points(points: Mapping[str, Any], labels: Int[np.ndarray, " n"]) -> Any:
    figure = None
    titles = [(name, "", "") for name in points]
    for (x, y), axes in zip((p.T for p in points.values()), graphs(titles, 2.6), strict=True):
        for k in range(2):
            axes.scatter(x[labels == k], y[labels == k], s=3, color=colour(k), linewidths=0)
        figure = axes.figure
    return figure
