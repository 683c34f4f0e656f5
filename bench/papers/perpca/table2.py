"""Test error of clients with few and with many samples, as published and well-posed."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfed import Personalized, metrics, pca
from jaxfed.linalg import Moment
from papers.perpca._synthetic import (
    AUTHORS,
    draw,
    gaussian,
    group_errors,
    one_shots,
    smallest_first,
)
from papers.report import Cell, Found, Interval, Labels, Target, ahead, around, between, near
from papers.runs import Seeds, learned

DEFAULT = "PerPCA, default start"
RIVALS = ("indivPCA", "CPCA", "distPCA")


def _published(seeds: Seeds, n: int, *, longer: bool) -> dict[Labels, Any]:
    """Train with the published law, test with another one, as the authors' script does."""
    data_keys, test_keys, keys = seeds.split(3)
    samples = (n // 10,) * 50 + (n,) * 50
    draws, clients, truth = draw("table2_published", data_keys, samples=samples)
    laws = {
        "other law": [draw._replace(shared_scale=0.5, local_scale=0.5) for draw in draws],
        "same law": draws,
    }
    tests = {
        law: jnp.stack([d.draw(key, 500) for d, key in zip(given, test_keys, strict=True)])
        for law, given in laws.items()
    }
    weights = clients.data.count / clients.data.count.sum(1, keepdims=True)
    moments = jax.vmap(jax.vmap(lambda s: Moment.from_samples(s.values, s.count).matrix()))
    pooled = jnp.einsum("sm,smij->sij", weights, moments(clients.data))
    unsorted = smallest_first(pooled)
    local = gaussian(keys, 100, 15, 10)
    once = one_shots(clients, keys, 2, 10)
    perpca = partial(pca.PerPCA, 2, 10, step_size=0.2)

    def descend(shared, rounds=100):
        return learned(perpca(), clients, keys, rounds, Personalized(shared, local))

    results = {
        "indivPCA": learned(pca.Local(12), clients, keys),
        "CPCA, unsorted": Personalized(unsorted[:, :, :12], None),
        "CPCA": learned(pca.Pooled(12), clients, keys),
        "distPCA": once["distPCA"],
        AUTHORS: descend(unsorted[:, :, :2]),
        "PerPCA, spectrum start": descend(once["spectrum"].shared),
        "local first, one exchange": once["local first"],
        "PerPCA, default start": learned(perpca(), clients, keys, 100),
        "truth": truth,
    }
    if longer:
        results[f"{AUTHORS}, 2000 rounds"] = descend(unsorted[:, :, :2], 2000)
        results["PerPCA, random start"] = learned(perpca(start="random"), clients, keys, 100)
    setting = f"published, n = {n}"
    measured = {}
    for method, result in results.items():
        for group, errors in group_errors(tests["other law"], result).items():
            measured[setting, method, group] = errors
        measured |= _shared_error(setting, method, result, truth)
    if longer:
        for method in ("indivPCA", "PerPCA, spectrum start"):
            for group, errors in group_errors(tests["same law"], results[method]).items():
                measured[f"{setting}, test as trained", method, group] = errors
    return measured


def _shared_error(
    setting: str, method: str, result: Personalized, truth: Personalized
) -> dict[Labels, Any]:
    """Of a method that has as many shared components as there are; `Local` has None."""
    shared = result.shared
    if method == "truth" or shared is None or shared.shape != truth.shared.shape:
        return {}
    error = jax.vmap(metrics.projector_distance)(shared, truth.shared)
    return {(setting, method, "shared error"): error}


def _well_posed(seeds: Seeds) -> dict[Labels, Any]:
    """The same question where the samples can answer it, and one law for training and test."""
    data_keys, test_keys, keys = seeds.split(3)
    draws, clients, truth = draw("table2", data_keys)
    test = jnp.stack([draw.draw(key, 500) for draw, key in zip(draws, test_keys, strict=True)])
    once = one_shots(clients, keys, 2, 3)
    perpca = partial(pca.PerPCA, 2, 3, step_size=0.05)
    spectrum = Personalized(once["spectrum"].shared, gaussian(keys, 100, 15, 3))
    results = {
        "indivPCA": learned(pca.Local(5), clients, keys),
        "CPCA": learned(pca.Pooled(5), clients, keys),
        "distPCA": once["distPCA"],
        "PerPCA, spectrum start": learned(perpca(), clients, keys, 300, spectrum),
        "PerPCA, random start": learned(perpca(start="random"), clients, keys, 300),
        "PerPCA, default start": learned(perpca(), clients, keys, 300),
        "truth": truth,
    }
    measured = {}
    for method, result in results.items():
        for group, errors in group_errors(test, result).items():
            measured["well-posed, n = 100", method, group] = errors
        measured |= _shared_error("well-posed, n = 100", method, result, truth)
    return measured


def _reference() -> dict[Labels, Interval]:
    published = {
        "indivPCA": ((1.88, 0.03), (1.79, 0.02)),
        "CPCA, unsorted": ((2.07, 0.03), (2.08, 0.01)),
        "CPCA": ((2.19, 0.03), (2.19, 0.02)),
        "distPCA": ((1.93, 0.02), (1.90, 0.02)),
        AUTHORS: ((1.69, 0.03), (1.50, 0.02)),
        f"{AUTHORS}, 2000 rounds": ((1.896, 0.012), (1.853, 0.018)),
        "PerPCA, spectrum start": ((1.93, 0.03), (1.875, 0.02)),
        "PerPCA, random start": ((1.93, 0.03), (1.88, 0.02)),
        "local first, one exchange": ((1.65, 0.03), (1.51, 0.02)),
        "PerPCA, default start": ((1.65, 0.03), (1.51, 0.02)),
        "truth": ((1.49, 0.02), (1.49, 0.02)),
    }
    literal = {
        "indivPCA": ((2.03, 0.04), (1.85, 0.02)),
        "CPCA, unsorted": ((2.09, 0.04), (2.07, 0.02)),
        "distPCA": ((2.05, 0.04), (1.94, 0.02)),
        AUTHORS: ((1.94, 0.04), (1.57, 0.02)),
        "local first, one exchange": ((1.935, 0.04), (1.55, 0.02)),
        "PerPCA, default start": ((1.935, 0.04), (1.55, 0.02)),
        "truth": ((1.50, 0.04), (1.50, 0.02)),
    }
    same_law = {
        "indivPCA": ((2.01, 0.03), (1.55, 0.02)),
        "PerPCA, spectrum start": ((2.01, 0.03), (1.56, 0.02)),
    }
    well_posed = {
        "indivPCA": ((10.10, 0.27), (5.283, 0.018)),
        "CPCA": ((17.65, 0.18), (17.40, 0.09)),
        "distPCA": ((7.60, 0.14), (5.173, 0.016)),
        "PerPCA, spectrum start": ((7.58, 0.17), (5.168, 0.016)),
        "PerPCA, random start": ((7.60, 0.15), (5.168, 0.016)),
        "PerPCA, default start": ((7.58, 0.17), (5.168, 0.016)),
        "truth": ((5.01, 0.02), (5.00, 0.02)),
    }
    settings = {
        "published, n = 500": published,
        "published, n = 500, test as trained": same_law,
        "published, n = 100": literal,
        "well-posed, n = 100": well_posed,
    }
    reference = {
        (setting, method, group): around(*value)
        for setting, methods in settings.items()
        for method, values in methods.items()
        for group, value in zip(("sparse", "rich"), values, strict=True)
    }
    for start in ("spectrum", "random"):
        reference["published, n = 500", f"PerPCA, {start} start", "shared error"] = near(4, 0.2)
    reference["published, n = 500", f"{AUTHORS}, 2000 rounds", "shared error"] = near(4, 0.2)
    label = "published, n = 500", "local first, one exchange", "shared error"
    reference[label] = between(0.004, 0.009)
    # Of the reference's thirty draws (`bench/reference_values.py`).
    well_posed_errors = {"distPCA": (0.0113, 0.0039)}
    for start in ("spectrum", "random", "default"):
        well_posed_errors[f"PerPCA, {start} start"] = (0.00692, 0.0016)
    for method, law in well_posed_errors.items():
        reference["well-posed, n = 100", method, "shared error"] = around(*law)
    return reference


def _paper() -> dict[Labels, Interval]:
    rows = {
        "indivPCA": ((1.87, 0.01), (1.80, 0.01)),
        "CPCA, unsorted": ((2.07, 0.01), (2.10, 0.01)),
        "distPCA": ((1.91, 0.01), (1.88, 0.01)),
        AUTHORS: ((1.68, 0.02), (1.52, 0.01)),
        "truth": ((1.50, 0.01), (1.50, 0.01)),
    }
    return {
        (f"published, n = {n}", method, group): around(*value)
        for n in (500, 100)
        for method, values in rows.items()
        for group, value in zip(("sparse", "rich"), values, strict=True)
    }


def _claims(measured: Mapping[Labels, Any]) -> dict[Labels, Cell]:
    """That PerPCA has the smallest error in both groups, with the same data for all methods.

    By half of what the reference's errors differ by, or the paper's where its start is taken.
    """
    found: dict[Labels, Cell] = {}
    for setting, ours, known in (
        ("published, n = 500", AUTHORS, _paper()),
        ("published, n = 500", DEFAULT, _reference()),
        ("well-posed, n = 100", DEFAULT, _reference()),
    ):
        for rival in RIVALS:
            for group in ("sparse", "rich"):
                labels = (setting, ours, group), (setting, rival, group)
                if not all(label in known for label in labels):
                    continue
                smaller, larger = ((known[label].low + known[label].high) / 2 for label in labels)
                found[setting, f"{rival} less {ours}", f"{group}, claim"] = ahead(
                    *(measured[label] for label in labels), least=(larger - smaller) / 2
                )
    return found


def run(seeds: Seeds) -> Found:
    """All three settings."""
    measured = _published(seeds, 500, longer=True)
    measured |= _published(seeds, 100, longer=False)
    measured |= _well_posed(seeds)
    return Found(measured | _claims(measured))


TARGET = Target(
    run,
    title="Shi & Kontar (2024), Table 2: test reconstruction error",
    columns=("setting", "method", "quantity"),
    reference=_reference(),
    paper=_paper(),
    notes=[
        "Half of the clients (rich) have n samples, half (sparse) a tenth of that. The shared "
        "error is the squared distance of the projectors, at most 4.",
        "Published: the authors' script tests on another law than it trains on (local variance "
        "0.25 and shared variance 0.25 instead of 0.98 and 0.0001), and starts PerPCA at the "
        "first two columns of an unsorted eigendecomposition of the pooled moment, which are "
        "the two smallest eigenvectors and here the true components. The printed numbers are "
        "those of n = 500, not of n = 100.",
        "So the published setting measures the start. The default start (local components "
        "first) needs no luck; from others PerPCA is no better than indivPCA. Many rounds "
        "lead away from the truth, which is not the optimum for these samples.",
        "Well-posed: shared scores of standard deviation 2, local ones of 3, the same law in "
        "training and test.",
        "Where the reference gives no spread, that of its other methods on the same test sets "
        "is taken; after 2000 rounds it is of twelve draws (`bench/reference_values.py`). A claim "
        "is that a method is ahead on the same data, by half of what it is ahead by in the "
        "reference or, from the authors' start, in the paper.",
    ],
)
