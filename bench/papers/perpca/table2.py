"""Test error of clients with few and with many samples, as published and well-posed."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import papers
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
from papers.report import Cell, Found, Labels, ahead
from papers.runs import Seeds, learned

DEFAULT = "PerPCA, local-first start"
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
    perpca = partial(pca.PerPCA, 2, 10, solver="gradient", step_size=0.2, start="local_first")

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
        "PerPCA, local-first start": learned(perpca(), clients, keys, 100),
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
    perpca = partial(pca.PerPCA, 2, 3, solver="gradient", step_size=0.05, start="local_first")
    spectrum = Personalized(once["spectrum"].shared, gaussian(keys, 100, 15, 3))
    results = {
        "indivPCA": learned(pca.Local(5), clients, keys),
        "CPCA": learned(pca.Pooled(5), clients, keys),
        "distPCA": once["distPCA"],
        "PerPCA, spectrum start": learned(perpca(), clients, keys, 300, spectrum),
        "PerPCA, random start": learned(perpca(start="random"), clients, keys, 300),
        "PerPCA, local-first start": learned(perpca(), clients, keys, 300),
        "truth": truth,
    }
    measured = {}
    for method, result in results.items():
        for group, errors in group_errors(test, result).items():
            measured["well-posed, n = 100", method, group] = errors
        measured |= _shared_error("well-posed, n = 100", method, result, truth)
    return measured


def _claims(measured: Mapping[Labels, Any]) -> dict[Labels, Cell]:
    """That PerPCA has the smallest error in both groups, with the same data for all methods.

    By half of what the reference's errors differ by, or the paper's where its start is taken.
    """
    found: dict[Labels, Cell] = {}
    target = papers.find("perpca/table2")
    for setting, ours, known in (
        ("published, n = 500", AUTHORS, target.paper),
        ("published, n = 500", DEFAULT, target.reference),
        ("well-posed, n = 100", DEFAULT, target.reference),
    ):
        for rival in RIVALS:
            for group in ("sparse", "rich"):
                labels = (setting, ours, group), (setting, rival, group)
                if not all(label in known for label in labels):
                    continue
                smaller, larger = (known[label].middle for label in labels)
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
