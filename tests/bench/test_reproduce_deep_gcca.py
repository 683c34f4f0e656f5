"""The targets of federated deep GCCA: their runs, their goals, their registration."""

import jax
import numpy as np
import pytest

import papers
from papers.gcca import _deep, _digits, deep_digits, figure10, figure11
from papers.runs import Seeds
from tests.bench.targets import DIGITS, cells, classes_told_apart, write_digits


@pytest.mark.slow
def test_figure_11_measures_both_methods_on_both_scales(monkeypatch):
    monkeypatch.setattr(figure11, "CLASSIFIED", 400)
    report = papers.find("gcca/figure11")(Seeds(1), scale=0.02, rounds=3)
    found = cells(report)
    for scaling in (_deep.TEXT, _deep.PROGRAMS):
        curves = [report.arrays[f"{name}, {scaling}"][0] for name in _deep.CHANNELS]
        assert all(curve.shape == (4,) and (curve >= 0).all() for curve in curves)
        assert curves[0][0] == curves[1][0]  # one start for both
        at = [found[scaling, name, "rounds to 90%"].mean for name in _deep.CHANNELS]
        for curve, position in zip(curves, at, strict=True):
            reached = np.flatnonzero(curve >= 0.9)
            assert position == (reached[0] + 1 if len(reached) else np.inf)
    text = found[_deep.TEXT, _deep.QUANTIZED, "accuracy after 3 rounds"]
    assert text.mean > 0.9
    saved = found[_deep.TEXT, _deep.QUANTIZED, "compression ratio"].mean
    full, coarse = (
        found[_deep.TEXT, n, "rounds to 90%"].mean for n in (_deep.FULL, _deep.QUANTIZED)
    )
    np.testing.assert_allclose(saved, 1 - coarse * 3 / (full * 32))
    share = found[_deep.TEXT, _deep.QUANTIZED, "share of the bits sent"].mean
    # A message of eight bits a number and three of three, all with a scale; 200 entities of two.
    np.testing.assert_allclose(share, (8 + 3 * 3 + 4 * 32 / 400) / (4 * 32), rtol=1e-6)
    assert any("Scaled: 200 entities" in note for note in report.notes)
    (draw,) = report.figures.values()
    assert len(draw().axes) == 2


@pytest.mark.slow
def test_figure_10_clusters_views_and_representations(monkeypatch):
    monkeypatch.setattr(figure10, "CLUSTERED", 200)
    report = papers.find("gcca/figure10")(Seeds(1), scale=0.02, rounds=3)
    found = {name: cell.mean for (name,), cell in cells(report).items()}
    assert [f"view {j}" for j in (1, 2, 3)] == list(found)[:3]
    for name in _deep.CHANNELS:
        assert report.arrays[name].shape == (200, 2)
        assert found[name] > max(found[f"view {j}"] for j in (1, 2, 3))
    (draw,) = report.figures.values()
    assert len(draw().axes) == 5


@pytest.mark.slow
def test_networks_of_the_programs_are_larger_by_a_factor(key):
    batch = jax.random.normal(key, (6, 2))
    text, programs = (
        _deep.algorithm_of(400, scaling).network(2, key=key)
        for scaling in (_deep.TEXT, _deep.PROGRAMS)
    )
    np.testing.assert_allclose(programs(batch), 20 * text(batch), rtol=1e-6)
    outputs, statistics = programs.in_training(batch)
    np.testing.assert_allclose(outputs, 20 * text.in_training(batch)[0], rtol=1e-6)
    np.testing.assert_array_equal(statistics[0].mean, text.in_training(batch)[1][0].mean)


@pytest.mark.parametrize(
    ("scale", "entities", "batch"), [(1.0, 10_000, 1000), (0.2, 2000, 200), (1e-4, 20, 2)]
)
def test_scale_is_of_the_entities(scale, entities, batch):
    assert _deep.entities_at(scale) == entities
    assert _deep.algorithm_of(entities).batch_size == batch
    first = _deep.scaled(entities, 50)[0]
    assert first.startswith("Full size" if scale == 1 else "Scaled") and str(entities) in first


@pytest.mark.slow
def test_real_views(tmp_path):
    labels, views = classes_told_apart(30, 0.2)
    write_digits(tmp_path, labels, views)
    report = papers.find("gcca/deep_digits")(
        Seeds(1),
        data=tmp_path,
        rounds=8,
        rank=2,
        hidden=(8,),
        batch_size=30,
        inner_epochs=20,
    )
    found = {labels: cell.mean for labels, cell in cells(report).items()}
    assert {name for name, quantity in found if quantity == "accuracy"} == {
        *DIGITS,
        deep_digits.TOGETHER,
        deep_digits.LINEAR,
        deep_digits.ONE_ROUND,
        *_deep.CHANNELS,
    }
    for name in (deep_digits.TOGETHER, deep_digits.ONE_ROUND, *_deep.CHANNELS):
        assert found[name, "accuracy"] > 0.9
    rounds = [found[name, deep_digits.AT] for name in _deep.CHANNELS]
    assert all(2 <= position <= 9 for position in rounds)
    ratio = 1 - rounds[1] * 3 / (rounds[0] * 32)
    np.testing.assert_allclose(found[_deep.QUANTIZED, deep_digits.RATIO], ratio)
    share = found[_deep.QUANTIZED, "share of the bits"]
    a_round = (68 * 8 + 32) / (180 * 32)  # 540 bits fill up 68 bytes
    # Nine messages up, eight down, of which one each is from before the rounds.
    start = (180 * 8 + 32) / (180 * 32)
    np.testing.assert_allclose(share, (2 * start + 15 * a_round) / 17, rtol=1e-6)
    # The classifier's rows are of one scale for any number of entities.
    rows = np.sqrt(90) * np.eye(90)[:, :2]
    assert deep_digits._accuracies(rows, labels, 0).shape == (_digits.SPLITS,)
