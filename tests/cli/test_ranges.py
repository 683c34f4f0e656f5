"""Units with noise on the command line: public ranges, both guarantees, one budget."""

import re

import numpy as np
import pytest

import jaxfed as jf
from jaxfed import privacy
from jaxfed.cli.fit import _ranges
from tests.cli.command_line import fit, loaded, refused, run

NAMES = ("iron", "zinc", "copper", "lead")
UNITS, OFFSETS = np.array([1e9, 1e-9, 1.0, 100.0]), np.array([3.0, -2.0, 0.0, 1.0])
PERSONS = 2000  # of each client, with two rows each
RANKS = ("--rank", 2, "--held-out", 0)
PROTECTED = ("--epsilon", 1e4, "--ranges-epsilon", 1e4, "--person", "patient")


def tables(persons, clients=3):
    """Rows of clients in odd units; a person's two rows are alike."""
    rng = np.random.default_rng(0)
    mixing = np.array([[2.0, 1.0, -1.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
    found = []
    for _ in range(clients):
        rows = rng.normal(size=(persons, 2)) @ mixing + 0.5 * rng.normal(size=(persons, 4))
        found.append(np.repeat(rows + OFFSETS, 2, axis=0) * UNITS)
    return found


def written(folder, persons):
    """Tables, and a file of ranges in another order, with one more."""
    data = folder / "data"
    data.mkdir()
    for name, table in zip("xyz", tables(persons), strict=True):
        who = np.repeat(np.arange(persons), 2)
        header = {"header": ",".join(["patient", *NAMES]), "comments": "", "delimiter": ","}
        np.savetxt(data / f"{name}.csv", np.c_[who, table], fmt="%.17g", **header)
    ends = OFFSETS * UNITS - 10 * UNITS, OFFSETS * UNITS + 10 * UNITS
    lines = [f"{name},{low},{high}" for name, low, high in zip(NAMES, *ends, strict=True)]
    ranges = folder / "ranges.csv"
    ranges.write_text("\n".join(["feature,lower,upper", *lines[::-1], "gold,0,1"]))
    return data, ranges


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return written(tmp_path_factory.mktemp("small"), 6)


@pytest.mark.slow
def test_both_releases_are_kept_stated_and_paid_and_their_units_are_used(tmp_path, capsys):
    data, ranges = written(tmp_path, PERSONS)
    out, ledger = tmp_path / "out", tmp_path / "ledger"
    options = (*RANKS, *PROTECTED, "--ranges", ranges, "--report")
    options = (*options, "--ledger", ledger, "--budget", 2e4)
    assert fit("pooled", data, out, *options) == 0
    printed = capsys.readouterr().out
    arrays, summary = loaded(out)
    text = "\n".join(summary["privacy"])
    assert text in printed and text.count("Release: ") == 2
    spent = privacy.Ledger(ledger, epsilon=2e4, delta=1e-5).spent()
    assert f"Together: epsilon {spent:.4g} at delta 1e-05" in text
    assert len(ledger.read_text().splitlines()) == 3
    page = (out / "report.html").read_text()
    assert f"Together: epsilon {spent:.4g}" in page
    assert "means and deviations, before the run" in page and "of an earlier run" not in page
    saved = jf.load(out / "result.npz")
    assert [each.rows for each in saved.guarantees] == ["ranges", "pairs"]
    assert {each.unit for each in saved.guarantees} == {"person"}
    # Hardly any noise: units and components are those of all rows, whatever the units.
    rows = np.concatenate(tables(PERSONS))
    mean, scale = (arrays[f"preprocessing.{name}"] for name in ("mean", "scale"))
    assert mean.shape == scale.shape == (3, 4)
    np.testing.assert_allclose(mean[0] / UNITS, rows.mean(axis=0) / UNITS, atol=0.01)
    np.testing.assert_allclose(scale[2], rows.std(axis=0), rtol=0.01)
    wanted = np.linalg.eigh(np.corrcoef(rows.T))[1][:, 2:]
    assert np.linalg.norm(wanted.T @ arrays["shared"]) ** 2 > 2 - 0.01
    # Of all later steps, the same units.
    assert run("transform", out, "--data", data, "--drop", "patient", "--out", out / "t") == 0
    standard = (tables(PERSONS)[0] - mean[0]) / scale[0]
    scores = loaded(out / "t")[0]["scores"]
    np.testing.assert_allclose(scores[: len(standard)], standard @ arrays["shared"], atol=1e-6)
    command = ["personalize", out, "--data", data, "--drop", "patient", "--local-rank", 1]
    assert run(*command, "--out", out / "p") == 0
    new = jf.load(out / "p" / "result.npz")
    assert new.preprocessing is not None
    np.testing.assert_allclose(new.preprocessing.scale, scale, rtol=1e-6)
    assert privacy.statement(new) == privacy.statement(saved) == text
    # One more run exceeds the budget.
    capsys.readouterr()
    line = refused(capsys, fit("pooled", data, tmp_path / "other", *options))
    assert "epsilon: wanted at most 20000" in line and "with these 2" in line
    assert len(ledger.read_text().splitlines()) == 3


@pytest.mark.slow
def test_own_means_are_subtracted_at_home(tmp_path, small):
    data, ranges = small
    options = (*RANKS, "--epsilon", 50, "--person", "patient", "--center", "local")
    with pytest.warns(UserWarning, match="^delta"):
        assert fit("pooled", data, tmp_path, *options, "--delta", 0.5, "--ranges", ranges) == 0
    arrays, _ = loaded(tmp_path)
    np.testing.assert_allclose(arrays["preprocessing.mean"], [x.mean(axis=0) for x in tables(6)])
    np.testing.assert_array_equal(*arrays["preprocessing.scale"][:2])
    assert arrays["units"].tolist() == ["local", "shared"]
    first, second = jf.load(tmp_path / "result.npz").guarantees
    assert first.epsilon == pytest.approx(50 / 3) and second.epsilon == 50


def test_what_cannot_be_released_is_refused_before_units_are(small, tmp_path, capsys, monkeypatch):
    data, ranges = small
    spent = []
    for name in ("release_units", "release_moments"):
        monkeypatch.setattr(f"jaxfed.cli.fit._release.{name}", lambda *_, **__: spent.append(1))
    given = [*RANKS[2:], "--epsilon", 1, "--ranges", ranges]
    ledger = ["--ledger", tmp_path / "ledger", "--budget"]
    other = tmp_path / "other.csv"
    other.write_text("feature,lower,upper\niron,0,1\n")
    for words, message in (
        (["--rank", 6], "rank: 6 orthonormal components do not fit into 4"),
        (["--rank", 2, *ledger, 1.04], "epsilon: wanted at most 1.04 .* 1.071 with these 2"),
        (["--rank", 2, "--ranges", other], "--ranges: wanted a range of each .* none of patient, "),
        (["--rank", 2, "--scale", "shared"], "--scale: wanted none with --epsilon"),
        (["--rank", 2, "--center", "shared"], "--center: wanted none or local with --epsilon"),
        (["--rank", 2, "--ranges-epsilon", 0], "--ranges-epsilon: wanted a positive"),
        (["--rank", 2, "--ranges", tmp_path / "none"], ".*none: no such file"),
    ):
        if "patient" not in message:
            words = [*words, "--person", "patient"]
        line = refused(capsys, fit("pooled", data, tmp_path / "out", *given, *words))
        assert re.match(f"jaxfed: {message}", line), line
    for words, message in (
        (["--ranges", ranges], "--ranges: is for --epsilon"),
        (["--ranges-epsilon", 1], "--ranges-epsilon: is for --epsilon"),
        (["--epsilon", 1, "--ranges-epsilon", 1], "--ranges-epsilon: is for --ranges"),
    ):
        line = refused(capsys, fit("pooled", data, tmp_path / "out", *RANKS, *words))
        assert re.match(f"jaxfed: {message}", line), line
    common = ["--shared-rank", 1, "--local-rank", 1, "--person", "patient"]
    for words, message in (
        (["--rounds", 0], "rounds: wanted a positive whole number"),
        (["--tol", -1], "tol: wanted a non-negative number"),
        (["--participation", 9], "participation: 9 clients a round were asked for"),
    ):
        line = refused(capsys, fit("perpca", data, tmp_path / "out", *given, *common, *words))
        assert re.match(f"jaxfed: {message}", line), line
    assert not spent and not (tmp_path / "ledger").exists()


@pytest.mark.slow
def test_clients_of_too_few_persons_are_refused_before_units_are_released(small, tmp_path, capsys):
    data, ranges = small
    text = (data / "x.csv").read_text().splitlines()
    few = tmp_path / "few"
    few.mkdir()
    (few / "x.csv").write_text("\n".join(text))
    (few / "y.csv").write_text("\n".join(text[:3]))  # one person
    ledger = tmp_path / "ledger"
    options = (*RANKS, "--epsilon", 1, "--ranges", ranges, "--person", "patient")
    options = (*options, "--ledger", ledger, "--budget", 3)
    line = refused(capsys, fit("pooled", few, tmp_path / "out", *options))
    assert "clients: wanted at least 4 persons each, got 1 at position 1" in line
    assert not ledger.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,1,0", "--ranges: wanted lower below upper, two finite numbers, got 1 and 0 of a"),
        ("a,1,1", "--ranges: wanted lower below upper, two finite numbers, got 1 and 1 of a"),
        ("a,0,1\na,0,2", "--ranges: wanted one range of each feature, got 2 of a"),
        ("a,0,inf", ".*is inf"),
        ("a,0,", ".*a missing value"),
        ("a,low,1", ".*is 'low', not a number"),
        ("b,0,1", "--ranges: wanted a range of each feature of the data, got none of a, but of b"),
    ],
)
def test_ranges_that_are_none_are_refused(text, message, tmp_path):
    path = tmp_path / "ranges.csv"
    path.write_text(f"feature,lower,upper\n{text}\n")
    with pytest.raises(ValueError, match=f"^{message}"):
        _ranges.of_features(path, ["a"], 1)


def test_features_without_names_have_positions(tmp_path):
    path = tmp_path / "ranges.csv"
    path.write_text("lower;feature;upper\n-1;1;2,5\n0;0;1\n")
    found = _ranges.of_features(path, None, 2)
    np.testing.assert_array_equal(found, [[0, -1], [1, 2.5]])
    with pytest.raises(ValueError, match=r"^--ranges: .* its position from 0 on, got none of 2"):
        _ranges.of_features(path, None, 3)
