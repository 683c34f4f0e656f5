"""The command that reproduces published tables: registry, verdicts, files, and a small run."""

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfed import metrics
from jaxfed.cli import main, reproduce
from jaxfed.cli.reproduce import Cell, Report, around, at_least, at_most, between, near, perpca
from jaxfed.core.algorithm import Personalized
from jaxfed.data.synthetic import PERPCA_SETTINGS, perpca_synthetic

SYNTHETIC = [f"perpca/{name}" for name in ("table2", "table3")]
SYNTHETIC += [f"perpca/figure{number}" for number in (3, 4, 7, 8, 9)]


# --- registry and errors ---------------------------------------------------------------------


def test_every_target_is_found_and_described(capsys):
    known = reproduce.targets()
    assert set(SYNTHETIC) <= set(known)
    assert main(["reproduce", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(known)
    for line, (name, target) in zip(lines, known.items(), strict=True):
        assert reproduce.find(name) is target
        assert len(line.split()) > 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["perpca/table1"], ["'perpca/table1'", *SYNTHETIC]),
        ([], SYNTHETIC),
        (["perpca/table2", "--seeds", "0"], ["--seeds", "got 0"]),
        (["perpca/table2", "--data", "no/such/folder"], ["--data", "no/such/folder"]),
        (["perpca/table2", "--scale", "0.5"], ["--scale", "perpca/table2"]),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, told, capsys):
    assert main(["reproduce", *arguments]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in told)


# --- verdicts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "verdict"),
    [
        (Cell([1.0, 1.2], around(1.15, 0.05)), "reproduced"),
        (Cell([1.0, 1.2], around(1.0, 0.04)), "differs by +0.02"),
        (Cell([1.0], near(1.5, 0.1)), "differs by -0.4"),
        (Cell([0.97], at_least(0.98)), "differs by -0.01"),
        (Cell([0.99], at_least(0.98)), "reproduced"),
        (Cell([1e-7], at_most(1e-6)), "reproduced"),
        (Cell([2.0], paper=1.95), "reproduced"),
        (Cell([2.0], paper=1.5), "differs by +0.43"),
        (Cell([2.0], near(2.0, 0.1), paper=1.0), "reproduced; from the paper by +0.95"),
        (Cell([2.0], near(1.0, 0.5), paper=2.0), "differs by +0.5"),
        (Cell([2.0]), "not comparable: no published value"),
        (Cell([2.0], paper=2.0, incomparable="other data"), "not comparable: other data"),
        (Cell([math.nan, 1.0], paper=1.0), "differs: measured nan"),
        # Three runs from 1 to 2: their mean may be a little outside.
        (Cell([2.4], between(1.0, 2.0)), "reproduced"),
        (Cell([2.7], between(1.0, 2.0)), "differs by +0.2"),
        # Chance: the mean of what was measured is far away, a draw is not.
        (Cell([0.0, 0.0, 1.0], near(1.0, 0.1)), "differs by -0.57"),
        (Cell([0.0, 0.0, 1.0], near(1.0, 0.1), scatter=True), "reproduced"),
        (Cell([0.0, 0.0, 0.5], near(1.0, 0.1), scatter=True), "differs by -0.4"),
        (Cell([3.0, 4.0], near(1.0, 0.1), scatter=True), "differs by +1.9"),
    ],
)
def test_verdict(cell, verdict):
    assert cell.verdict == verdict


@given(
    values=st.lists(st.floats(-10, 10), min_size=1, max_size=4),
    mean=st.floats(-10, 10),
    sd=st.floats(0.01, 5),
)
def test_reproduced_means_within_two_standard_deviations(values, mean, sd):
    distance = abs(np.mean(values) - mean)
    verdict = Cell(values, around(mean, sd)).verdict
    if distance < 1.999 * sd:
        assert verdict == "reproduced"
    if distance > 2.001 * sd:
        assert verdict.startswith("differs by " + ("+" if np.mean(values) > mean else "-"))


def test_texts_hold_mean_spread_and_what_is_compared_with():
    texts = Cell([1.0, 2.0], around(1.5, 0.2), paper=1.4).texts()
    assert texts["measured"] == "1.5 ± 0.71"
    assert (texts["reference"], texts["paper"]) == ("1.5 ± 0.2", "1.4")
    assert Cell([1.0], paper=1.0).texts()["measured"] == "1"
    assert Cell([0.97] * 3, paper=1.0).texts()["measured"] == "0.97 ± 0"
    assert Cell([1.0, 5.0, 2.0], scatter=True).texts()["measured"] == "2 [1, 5]"


# --- text and files --------------------------------------------------------------------------


class Drawing:
    """Stands for a Matplotlib figure."""

    def savefig(self, path, dpi):
        path.write_text(f"{dpi}")


def small_report(*, data, seeds, out):
    """A report without any computation."""
    rows = [
        {"method": "one", "cell": Cell([1.0] * seeds, near(1.0, 0.1), paper=2.0)},
        {"method": "another", "cell": Cell([3.0] * seeds, near(1.0, 0.1))},
        {"method": "neither"},
    ]
    return Report("A title", ("method",), rows, ["A note."], {"shape": Drawing}, {"a": [1, 2]})


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(perpca.TARGETS, "perpca/small", small_report)
    return ["reproduce", "perpca/small", "--seeds", "2"]


def test_the_table_is_printed_and_counted(small, capsys):
    assert main(small) == 0
    text = capsys.readouterr().out
    assert text.startswith("A title\n")
    assert "1 reproduced (1 of them unlike the paper), 1 differ, 0 not comparable" in text
    assert "* A note." in text
    header, rule, *lines = text.splitlines()[2:7]
    assert header.split() == ["method", "paper", "reference", "measured", "verdict"]
    starts = [0] + [i + 2 for i in range(len(rule)) if rule[i : i + 2] == "  "]
    for line in [header, *lines[:2]]:
        assert all(i == 0 or line[i - 2 : i] == "  " for i in starts)


def test_a_target_that_has_a_scale_is_given_it(monkeypatch, capsys):
    def scaled(*, data, seeds, out, scale=0.1):
        return Report(f"At {scale}", ("method",), [{"method": "one"}])

    monkeypatch.setitem(perpca.TARGETS, "perpca/small", scaled)
    assert main(["reproduce", "perpca/small"]) == 0
    assert main(["reproduce", "perpca/small", "--scale", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("At")] == ["At 0.1", "At 0.5"]
    assert main(["reproduce", "perpca/small", "--scale", "1.5"]) == 2
    assert "got 1.5" in capsys.readouterr().err


def test_files_are_written_and_not_overwritten(small, tmp_path, capsys):
    out = tmp_path / "results"
    assert main([*small, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"result.json", "result.npz", "shape.png"}
    result = json.loads((out / "result.json").read_text())
    assert result["title"] == "A title"
    assert result["rows"][1]["verdict"] == "differs by +1.9"
    assert result["rows"][1]["values"] == [3.0, 3.0]
    assert result["rows"][2] == {"method": "neither"}
    np.testing.assert_array_equal(np.load(out / "result.npz")["a"], [1, 2])

    (out / "shape.png").write_text("precious")
    assert main([*small, "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert (out / "shape.png").read_text() == "precious"
    assert main([*small, "--out", str(out), "--force"]) == 0
    assert (out / "shape.png").read_text() == "150"


# --- the experiments' parts ------------------------------------------------------------------


def test_figure3_small(monkeypatch, tmp_path, capsys):
    target = partial(perpca.figure3, starts=10, rounds=120)
    monkeypatch.setitem(perpca.TARGETS, "perpca/figure3", target)
    arguments = ["reproduce", "perpca/figure3", "--seeds", "1", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert "Figure 3" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "result.json").read_text())["rows"]
    # The error falls by exp(-2 eta theta g) per round, with g the shared variance, which 1,000
    # samples know to 4.5 %.
    slope = next(row["mean"] for row in rows if row["quantity"].endswith("/ theta"))
    assert slope == pytest.approx(-0.2 / np.log(10), rel=0.15)
    large = [r for r in rows if r["step size"] == 0.4 and r["quantity"].startswith("log10")]
    means = [row["mean"] for row in large if float(row["theta"]) > 0.05]
    assert np.all(np.diff(means) < -1)
    curves = np.load(tmp_path / "out" / "result.npz")["log10_error_step_0.1"]
    assert curves.shape == (8, 1, 10, 120)
    assert (tmp_path / "out" / "figure3.png").read_bytes().startswith(b"\x89PNG")
    assert jnp.ones(1).dtype == jnp.float32


def test_wishart_moments_have_the_law_of_the_samples(key):
    arguments = dict(PERPCA_SETTINGS["figure4"]) | {"clients": 2, "samples": 1}
    law = perpca_synthetic(key, **arguments)
    covariance = perpca._covariance(law)
    counts = jnp.asarray([20.0, 200.0])
    keys = jax.random.split(key, 1500)
    draws = jax.vmap(lambda key: perpca._wishart_moments(key, covariance, counts))(keys)
    np.testing.assert_allclose(draws.mean(0), covariance, atol=0.2)
    # Var(S_ij) = (C_ij^2 + C_ii C_jj) / n.
    diagonal = jnp.diagonal(covariance, axis1=1, axis2=2)
    variance = (covariance**2 + diagonal[:, :, None] * diagonal[:, None]) / counts[:, None, None]
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.25)


def test_the_authors_start_is_the_truth():
    keys = jax.random.split(jax.random.key(5), 2)
    _, truth, pooled = perpca._figure4_setting("table2_published", keys, (500,))
    start = perpca._smallest_first(pooled)[:, :, :2]
    distances = jax.vmap(metrics.projector_distance)(start, truth.shared)
    assert np.all(np.asarray(distances) < 0.01)
    variances = jnp.einsum("sda,sde,sea->sa", start, pooled, start)
    smallest = jnp.linalg.eigvalsh(pooled)[:, :2]
    np.testing.assert_allclose(jnp.sort(variances), smallest, rtol=1e-4)


def test_noiseless_errors_keep_their_digits(x64):
    keys = jax.random.split(jax.random.key(0), 1)
    problem = perpca._noiseless(keys, clients=4, features=8, samples=50, window=3)
    shared = perpca._aligned(problem, keys, 0.6)
    cosine = jnp.sum(shared * problem.shared)
    np.testing.assert_allclose(cosine, 0.6, rtol=1e-12)
    solution = perpca._descend(problem, shared, keys, 1, rounds=700, every=10)
    curves = perpca._decades(solution, 10)
    assert curves["global"].shape == (1, 70)
    assert all(curve[0, -1] < -28 for curve in curves.values())
    # A straight line, until it ends at the rounding error.
    falling = curves["reconstruction"][0]
    falling = falling[(falling < -4) & (falling > -28)]
    line = np.polyfit(np.arange(len(falling)), falling, 1)
    assert len(falling) > 5 and line[0] < -0.1
    np.testing.assert_allclose(np.polyval(line, np.arange(len(falling))), falling, atol=0.5)


def test_groups_of_clients_are_averaged_apart():
    test = jnp.stack([jnp.eye(3)] * 4)[None]
    local = jnp.stack([jnp.eye(3)[:, 1:2]] * 2 + [jnp.zeros((3, 1))] * 2)[None]
    errors = perpca._group_errors(test, Personalized(jnp.eye(3)[None, :, :1], local))
    np.testing.assert_allclose(errors["sparse"], [1 / 3])
    np.testing.assert_allclose(errors["rich"], [2 / 3])


def test_clients_of_the_same_subspace_are_clustered():
    labels = np.repeat(np.arange(3), 4)
    rng = np.random.default_rng(0)
    noisy = np.eye(6)[labels, :, None] + 0.1 * rng.normal(size=(12, 6, 1))
    local = jnp.asarray(noisy / np.linalg.norm(noisy, axis=1, keepdims=True))
    found = perpca._cluster(local, 3, seed=0)
    assert metrics.clustering_accuracy(jnp.asarray(labels), found) == 1
