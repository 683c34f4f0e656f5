"""Subspace error against the number of samples, as published and well-posed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import Personalized, metrics, pca
from jaxfed.plot._figure import colour
from papers.drawing import graphs, legend
from papers.perpca._statistics import drawn_moments
from papers.perpca._synthetic import AUTHORS, Keys, gaussian, one_shots, smallest_first
from papers.report import Found, Interval, Labels, Target, ahead, between, few_draws, near, within
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
    perpca = pca.PerPCA(2, 10, step_size=0.2)
    unsorted = Personalized(smallest_first(pooled)[:, :, :2], local)
    spectrum = Personalized(once["spectrum"].shared, local)
    return {
        "distPCA": once["distPCA"],
        AUTHORS: learned(perpca, clients, keys, 100, unsorted),
        "PerPCA, spectrum start": learned(perpca, clients, keys, 100, spectrum),
        LOCAL_FIRST: once["local first"],
        "PerPCA, default start": learned(perpca, clients, keys, 100),
    }, truth


def _as_in_the_text(
    data_keys: Keys, keys: Keys, sizes: Sequence[int]
) -> tuple[dict[str, Personalized], Personalized]:
    """Local variance a hundred times the shared one."""
    clients, truth, _ = drawn_moments(
        "table2_published", data_keys, sizes, shared_scale=1.0, local_scale=10.0
    )
    once = one_shots(clients, keys, 2, 10)
    polar = pca.PerPCA(2, 10, step_size=1.0, variant="polar", start="random")
    return {
        "distPCA": once["distPCA"],
        "PerPCA polar, random start": learned(polar, clients, keys, 200),
        LOCAL_FIRST: once["local first"],
        "PerPCA, default start": learned(pca.PerPCA(2, 10), clients, keys, 200),
    }, truth


def _well_posed(
    data_keys: Keys, keys: Keys, sizes: Sequence[int]
) -> tuple[dict[str, Personalized], Personalized]:
    clients, truth, _ = drawn_moments("figure4", data_keys, sizes)
    once = one_shots(clients, keys, 2, 4)
    perpca = partial(pca.PerPCA, 2, 4, step_size=0.15)
    spectrum = Personalized(once["spectrum"].shared, gaussian(keys, 100, 15, 4))
    return {
        "distPCA": once["distPCA"],
        "spectrum, one exchange": once["spectrum"],
        LOCAL_FIRST: once["local first"],
        "PerPCA, spectrum start": learned(perpca(), clients, keys, 300, spectrum),
        "PerPCA, random start": learned(perpca(start="random"), clients, keys, 300),
        "PerPCA, default start": learned(perpca(), clients, keys, 300),
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

    measured: dict[Labels, Any] = {}
    for method, errors in curves.items():
        for n, values in zip(sizes, errors, strict=True):
            if (labels := (*method, f"n = {n:,}")) in REFERENCE:
                measured[labels] = values
        if len(sizes) > 1:
            slopes = np.polyfit(np.log10(sizes), np.log10(errors), 1)[0]
            measured[*method, "slope"] = slopes

    for place, n in enumerate(sizes):
        labels = PUBLISHED, f"distPCA less {AUTHORS}", f"n = {n:,}"
        known = [REFERENCE.get((PUBLISHED, name, labels[2])) for name in ("distPCA", AUTHORS)]
        if PUBLISHED in settings and None not in known:
            middles = [(v.low + v.high) / 2 for v in known if v is not None]
            measured[labels] = ahead(
                curves[PUBLISHED, AUTHORS][place], curves[PUBLISHED, "distPCA"][place],
                (middles[0] - middles[1]) / 2,
            )  # fmt: skip

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


# Least and largest of the reference's five draws, for each of the sizes.
_DRAWS = {
    (WELL_POSED, "distPCA"): (
        (0.223, 0.257),
        (0.0587, 0.0665),
        (0.00579, 0.00628),
        (0.000577, 0.000623),
    ),
    (WELL_POSED, LOCAL_FIRST): (
        (0.222, 0.245),
        (0.0581, 0.0627),
        (0.00572, 0.00597),
        (0.000569, 0.000596),
    ),
    (WELL_POSED, "PerPCA, spectrum start"): (
        (0.222, 0.253),
        (0.0585, 0.0656),
        (0.00579, 0.00626),
        (0.000577, 0.000623),
    ),
    (WELL_POSED, "PerPCA, random start"): (
        (0.222, 0.253),
        (0.0585, 0.0656),
        (0.00579, 0.00626),
        (0.000577, 0.000623),
    ),
    (WELL_POSED, "PerPCA, default start"): (
        (0.222, 0.253),
        (0.0585, 0.0656),
        (0.00579, 0.00626),
        (0.000577, 0.000623),
    ),
    (TEXT, "distPCA"): ((0.124, 0.252), (0.0157, 0.0281), (0.00112, 0.00265), (0.000101, 0.000263)),
    (TEXT, LOCAL_FIRST): (
        (0.00926, 0.0116),
        (0.00206, 0.00282),
        (0.000184, 0.000262),
        (1.81e-05, 2.61e-05),
    ),
    (TEXT, "PerPCA polar, random start"): (
        (0.0709, 0.104),
        (0.015, 0.0272),
        (0.00108, 0.00262),
        (0.0001, 0.000262),
    ),
}


def _reference() -> dict[Labels, Interval]:
    reference: dict[Labels, Interval] = {}
    # Of one draw for each size; it scatters as the other settings' errors do.
    for n, value in zip(_SIZES, (1.41, 0.391, 0.0340, 0.00344), strict=True):
        reference[PUBLISHED, AUTHORS, f"n = {n:,}"] = within(value, 0.25)
        reference[PUBLISHED, "distPCA", f"n = {n:,}"] = between(7.05, 8.1)
        reference[PUBLISHED, "PerPCA, spectrum start", f"n = {n:,}"] = between(7.1, 8.1)
    reference[PUBLISHED, AUTHORS, "slope"] = near(-0.997, 0.05)
    reference[PUBLISHED, "PerPCA, spectrum start", "slope"] = near(0, 0.05)
    for labels, values in _DRAWS.items():
        for n, ends in zip(_SIZES, values, strict=True):
            reference[*labels, f"n = {n:,}"] = few_draws(*ends)
        # The law of large numbers: beyond the first size errors fall as 1/n.
        reference[*labels, "slope"] = near(_slope(values), 0.1)
    return reference


def _slope(values: Sequence[tuple[float, float]]) -> float:
    middles = np.log10(values).mean(1)
    return float(np.polyfit(np.log10(_SIZES), middles, 1)[0])


REFERENCE = _reference()
TARGET = Target(
    run,
    title="Shi & Kontar (2024), Figure 4: subspace error and number of samples",
    columns=("setting", "method", "quantity"),
    reference=REFERENCE,
    paper={
        (PUBLISHED, AUTHORS, "slope"): Interval(-1.1, -0.9, "-1"),
        (PUBLISHED, "distPCA", "slope"): near(0, 0.05),
        (TEXT, "distPCA", "slope"): near(0, 0.05),
        (WELL_POSED, "distPCA", "slope"): near(0, 0.05),
    },
    notes=[
        "Half of the clients have n samples, half a tenth of that; their second moments are "
        "drawn from the Wishart law, which is that of the samples.",
        "Published: as in Table 2, the authors' start is at the true shared components; from "
        "the spectrum start the error does not fall. As in the text: standard deviations 1 "
        "and 10. Well-posed: 1 and 2, four local components.",
        "Of the published setting the reference has one draw, which is allowed 25 %; of the "
        "others five (`bench/reference_values.py`). With the variances of the text, and in the "
        "well-posed setting, distPCA is consistent, too: that its error does not fall is so in "
        "the published setting alone.",
    ],
)
