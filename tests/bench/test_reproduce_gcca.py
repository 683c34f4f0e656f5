"""The targets of federated GCCA: their runs, their goals, their registration."""

import math

import jax
import numpy as np
import pytest

import papers
from papers.gcca import _linear, figure8, figure9, table1
from papers.runs import Seeds
from papers.synthetic import gcca_synthetic
from tests.bench.targets import DIGITS, cells, classes_told_apart, write_digits
from tests.references import gcca as reference


@pytest.mark.slow
def test_runs_equal_the_reference(x64):
    keys = jax.random.split(jax.random.key(3), 2)
    views = _linear.drawn_views(keys, entities=60, features=12, latent=8)
    start = _linear.warm(views, 8)
    costs = _linear.costs_of(views, start, keys, batch=None, rounds=12)
    assert costs.shape == (2, 13)
    least = _linear.least_of(views)
    for d in range(2):
        arrays = [np.asarray(x) for x in views.data.values[d]]
        g, q = np.asarray(start.shared[d]), [np.asarray(w) for w in start.local[d]]
        np.testing.assert_allclose(costs[d], reference.maxvar(arrays, g, q, 12)[2], atol=1e-10)
        np.testing.assert_allclose(least[d], reference.optimum(arrays, 5)[0], rtol=1e-8)

    goal = float(costs.mean(0)[4] / np.mean(least)) * (1 + 1e-9)
    assert _linear.position_at(costs, least, goal) == 5
    assert _linear.position_at(costs, least, 0.5) == np.inf


@pytest.mark.slow
def test_random_start_equals_the_authors():
    keys = jax.random.split(jax.random.key(0), 2)
    shared, local = _linear.random_start(_linear.drawn_views(keys), keys)
    assert shared.shape == (2, 500, 5) and local.shape == (2, 3, 25, 5)
    np.testing.assert_allclose([np.std(shared), np.std(local)], 1, atol=0.1)
    assert not np.allclose(shared[0], shared[1])


@pytest.mark.slow
def test_real_views(tmp_path):
    labels, views = classes_told_apart(20, 0.3)
    write_digits(tmp_path, labels, views)
    report = papers.find("gcca/digits")(Seeds(2), data=tmp_path, rounds=30, ranks=(2,), bits=(3,))
    found = {(row["maps and messages"], row["quantity"]): row["cell"].mean for row in report.rows}
    standard = [(x - x.mean(0)) / x.std(0) for x in views.values()]
    np.testing.assert_allclose(
        found["pooled optimum", "cost"], reference.optimum(standard, 2)[0], rtol=1e-8
    )
    for name in ("full precision", "3 bits"):
        assert found[f"exact, {name}", "rounds to 1.01x"] <= 30
        assert 1 <= found[f"steps, {name}", "cost / least"] < 1.2
        assert found[f"exact, {name}", "accuracy"] > 0.95


def test_alignment_counts_who_is_nearest_to_itself():
    rng = np.random.default_rng(0)
    views = [rng.normal(size=(12, d)) for d in (3, 5, 4)]
    maps = rng.normal(size=(3, 5, 2))  # with rows that the narrower views do not have
    scores = [x @ q[: x.shape[1]] for x, q in zip(views, maps, strict=True)]
    hits = [
        np.argmin([np.linalg.norm(here[i] - there[k]) for k in range(12)]) == i
        for a, here in enumerate(scores)
        for b, there in enumerate(scores)
        if a != b
        for i in range(12)
    ]
    assert figure9.alignment(views, maps) == np.mean(hits) > 0
    assert figure9.alignment([views[0]] * 2, maps[[0, 0]]) == 1


def latent_views(folder):
    """Views of common latent numbers, in the format of the real file."""
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(120, 3))
    views = {
        name: latent @ rng.normal(size=(3, d)) + 0.2 * rng.normal(size=(120, d))
        for name, d in DIGITS.items()
    }
    write_digits(folder, np.arange(120) % 10, views)


@pytest.mark.slow
def test_held_out_entities_are_aligned_and_two_bits_differ(tmp_path, monkeypatch):
    latent_views(tmp_path)

    def run():
        small = {"rounds": 15, "held_out": 20, "batch": 100, "rank": 3}
        report = papers.find("gcca/figure9")(Seeds(2), data=tmp_path, **small)
        return cells(report)

    found = run()
    full, few = figure9.FULL, figure9.QUANTIZED
    assert found[full, figure9.START].mean < found[full, figure9.AC].mean
    assert found[full, figure9.AC].mean > 0.4 and found[few, figure9.AC].mean > 0.4
    for quantity in (figure9.END, figure9.BY_COST):
        assert found[few, quantity].verdict == "reproduced"
    # With a single quantizer level, errors accumulate.
    monkeypatch.setattr(figure9, "BITS", 2)
    assert run()[few, figure9.END].verdict.startswith("differs")


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_goal_that_is_never_reached_differs(monkeypatch):
    costs, bits = np.full((2, 3), 1e9), np.ones((2, 2, 2))
    monkeypatch.setattr(_linear, "costs_of", lambda *arguments, **options: costs)
    monkeypatch.setattr(_linear, "solved", lambda *arguments: (costs, bits))
    report = papers.find("gcca/table1")(Seeds(1), draws=2, rounds=2)
    found = cells(report)
    coded = found[table1.CODED_NAME, "compression ratio at 1.5x"]
    assert math.isnan(coded.mean) and coded.verdict == "differs: measured nan"
    assert found["3 bits", "rounds to 1.5x"].verdict == "differs: measured inf"
    assert math.isnan(_linear.saved(4.0, math.inf, 3)) and _linear.saved(4.0, 4.0, 8) == 0.75


@pytest.mark.slow
def test_sparse_views_are_stacked_as_lists():
    sizes = {"entities": 60, "features": 40, "latent": 30}
    keys = jax.random.split(jax.random.key(0), 3)
    views = figure8.drawn(keys, **sizes)
    for key, data in zip(keys, views.data.values, strict=True):
        drawn = gcca_synthetic(key, noise=0.1, densities=figure8.DENSITIES, **sizes).views
        for view, values in zip(drawn, data, strict=True):
            np.testing.assert_array_equal(values[values != 0], view[view != 0])
    dense = _linear.drawn_views(keys, noise=0.1, densities=figure8.DENSITIES, **sizes)
    start = _linear.warm(dense, 10)
    expected, found = (
        _linear.costs_of(x, start, keys, 3, batch=6, rounds=4) for x in (dense, views)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)
