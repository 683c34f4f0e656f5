"""Subspace error against the number of samples, as published and well-posed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import papers
from jaxfed import Personalized, metrics, pca
from jaxfed.plot.drawing import colour
from papers.drawing import graphs, legend
from papers.perpca._statistics import drawn_moments
from papers.perpca._synthetic import AUTHORS, Keys, gaussian, one_shots, smallest_first
from papers.report import Found, Labels, ahead
from papers.runs import Seeds, learned

_SIZES = (300, 1000, 10_000, 100_000)  # samples of a rich client
PUBLISHED, TEXT, WELL_POSED = "published", "as in the text", "well-posed"
LOCAL_FIRST = "local first, one exchange"


def _published(
    data_keys: Keys, keys: Keys, sizes: Sequence[int]
) -> tuple[dict[str, Personalized], Personalized]:
    clients, truth, pooled = drawn_moments("table2_published", data_keys, sizes)
    once = one_shots(clients, keys, 2, 10)
    local = gaussian(keys, 100, 15, 10)
    perpca = pca.PerPCA(2, 10, solver="gradient", step_size=0.2, start="local_first")
    unsorted = Personalized(smallest_first(pooled)[:, :, :2], local)
    spectrum = Personalized(once["spectrum"].shared, local)
    return {
        "distPCA": once["distPCA"],
        AUTHORS: learned(perpca, clients, keys, 100, unsorted),
        "PerPCA, spectrum start": learned(perpca, clients, keys, 100, spectrum),
        LOCAL_FIRST: once["local first"],
        "PerPCA, local-first start": learned(perpca, clients, keys, 100),
    }, truth


def _as_in_the_text(
    data_keys: Keys, keys: Keys, sizes: Sequence[int]
) -> tuple[dict[str, Personalized], Personalized]:
    """Local variance a hundred times the shared one."""
    clients, truth, _ = drawn_moments(
        "table2_published", data_keys, sizes, shared_scale=1.0, local_scale=10.0
    )
    once = one_shots(clients, keys, 2, 10)
    polar = pca.PerPCA(2, 10, solver="gradient", step_size=1.0, variant="polar", start="random")
    local_first = pca.PerPCA(2, 10, solver="gradient", start="local_first")
    return {
        "distPCA": once["distPCA"],
        "PerPCA polar, random start": learned(polar, clients, keys, 200),
        LOCAL_FIRST: once["local first"],
        "PerPCA, local-first start": learned(local_first, clients, keys, 200),
    }, truth


def _well_posed(
    data_keys: Keys, keys: Keys, sizes: Sequence[int]
) -> tuple[dict[str, Personalized], Personalized]:
    clients, truth, _ = drawn_moments("figure4", data_keys, sizes)
    once = one_shots(clients, keys, 2, 4)
    perpca = partial(pca.PerPCA, 2, 4, solver="gradient", step_size=0.15, start="local_first")
    spectrum = Personalized(once["spectrum"].shared, gaussian(keys, 100, 15, 4))
    return {
        "distPCA": once["distPCA"],
        "spectrum, one exchange": once["spectrum"],
        LOCAL_FIRST: once["local first"],
        "PerPCA, spectrum start": learned(perpca(), clients, keys, 300, spectrum),
        "PerPCA, random start": learned(perpca(start="random"), clients, keys, 300),
        "PerPCA, local-first start": learned(perpca(), clients, keys, 300),
    }, truth


_SETTINGS = {PUBLISHED: _published, TEXT: _as_in_the_text, WELL_POSED: _well_posed}


def run(
    seeds: Seeds, *, sizes: Sequence[int] = _SIZES, settings: Sequence[str] = tuple(_SETTINGS)
) -> Found:
    """All sizes and seeds of a setting and method in one compiled call."""
    data_keys, keys = seeds.split(2)
    keys = jnp.tile(keys, len(sizes))
    curves: dict[tuple[str, str], np.ndarray] = {}
    for setting in settings:
        results, truth = _SETTINGS[setting](data_keys, keys, sizes)
        for method, result in results.items():
            error = jax.vmap(metrics.subspace_error)(*result, *truth)
            curves[setting, method] = np.asarray(error).reshape(len(sizes), len(seeds))

    known = papers.known("perpca/figure4")
    measured: dict[Labels, Any] = {}
    for method, errors in curves.items():
        for n, values in zip(sizes, errors, strict=True):
            if (labels := (*method, f"n = {n:,}")) in known:
                measured[labels] = values
        if len(sizes) > 1:
            slopes = np.polyfit(np.log10(sizes), np.log10(errors), 1)[0]
            measured[*method, "slope"] = slopes

    for place, n in enumerate(sizes):
        labels = PUBLISHED, f"distPCA less {AUTHORS}", f"n = {n:,}"
        once, ours = ((PUBLISHED, name, labels[2]) for name in ("distPCA", AUTHORS))
        if PUBLISHED in settings and once in known and ours in known:
            measured[labels] = ahead(
                curves[PUBLISHED, AUTHORS][place],
                curves[PUBLISHED, "distPCA"][place],
                (known[once] - known[ours]) / 2,
            )

    def draw():
        titles = [(name, "samples n of the rich clients", "subspace error") for name in settings]
        for setting, axes in zip(settings, graphs(titles), strict=True):
            methods = [method for given, method in curves if given == setting]
            for position, method in enumerate(methods):
                # Some curves coincide.
                line = ("-", "--", ":", "-.")[position % 4]
                style = {"color": colour(position), "linestyle": line, "marker": "o"}
                axes.loglog(
                    sizes, curves[setting, method].mean(1), label=method, markersize=3, **style
                )
            legend(axes)
        return axes.figure

    return Found(
        measured,
        figures={"figure4": draw},
        arrays={"n": sizes} | {" | ".join(labels): values for labels, values in curves.items()},
    )
