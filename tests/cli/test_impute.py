"""`jaxfed fit ... --impute`: files with missing entries, and new ones for what was learned."""

import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.cli import main
from tests.cli.command_line import RANKS, fit, loaded, refused, run, value, written

IMPUTE = ["--impute", "2", "2"]


def with_gaps(folder):
    """The clients of `written` with every fifth entry missing, the first of a row never."""
    rng = np.random.default_rng(1)
    for path in written(folder).glob("*.npy"):
        samples = np.load(path)
        missing = rng.random(samples.shape) < 0.2
        missing[:, 0] = False
        np.save(path, np.where(missing, np.nan, samples))
    return folder


def tables(folder):
    return [np.load(folder / f"client{i}.npy") for i in range(8)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return with_gaps(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def learned(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("learned") / "out"
    options = [
        *RANKS,
        *IMPUTE,
        "--held-out",
        0,
        "--center",
        "local",
        "--scale",
        "energy",
        "--report",
    ]
    assert fit("oneshot", data, out, *options) == 0
    return out


@pytest.mark.slow
def test_ranks_that_are_too_small_are_named(data, tmp_path, capsys):
    few = ["--impute", "1", "1", "--held-out", 0]
    assert fit("oneshot", data, tmp_path / "out", *RANKS, *few) == 0
    assert "--impute: One more component would explain" in capsys.readouterr().out


@pytest.mark.slow
def test_components_are_learned_of_the_completed_moments(data, learned):
    _, summary = loaded(learned)
    given = tables(data)
    share = np.mean(np.isnan(np.concatenate(given)))
    np.testing.assert_allclose(value(summary, "missing entries"), 100 * share, rtol=1e-6)
    saved = jf.load(learned / "result.npz")
    clients = saved.preprocessing.transform(jf.Clients.from_samples(given, missing="mask"))
    moments = saved.imputation.moments(clients)
    key = jax.random.key(0)
    wanted = jf.fit(jf.pca.OneShot(2, 2), moments, rounds=1, key=key).result
    distance = jf.metrics.projector_distance(saved.result.shared, wanted.shared)
    np.testing.assert_allclose(distance, 0, atol=1e-4)
    # Fifty rounds of the imputation are sent too: a frame, a number and three rows in each.
    assert value(summary, "bits sent") > 50 * 32 * (9 * 2 + 1 + 3 * 9)
    assert "components" in (learned / "report.html").read_text()


@pytest.mark.slow
def test_new_rows_are_completed_as_those_of_the_fit(data, learned, tmp_path, capsys):
    command = ["transform", str(learned), "--data", str(data), "--out"]
    assert main([*command, str(tmp_path / "scores")]) == 0
    arrays, summary = loaded(tmp_path / "scores")
    saved = jf.load(learned / "result.npz")
    for i in (0, 5):
        rows = saved.preprocessing.transform(tables(data)[i], client=i)
        rows = saved.imputation.transform(rows, client=i)
        wanted = jf.pca.transform(saved, rows, client=i)
        np.testing.assert_allclose(arrays["scores"][arrays["client"] == i], wanted, atol=1e-5)
        assert summary["table"][i]["missing entries"] == np.isnan(tables(data)[i]).sum()
    (tmp_path / "new").mkdir()
    np.save(tmp_path / "new" / "stranger.npy", tables(data)[0])
    capsys.readouterr()
    command = ["transform", learned, "--data", tmp_path / "new", "--personalize", "--out"]
    assert "without missing entries of stranger" in refused(
        capsys, run(*command, tmp_path / "other")
    )


@pytest.mark.slow
def test_a_bootstrap_draws_samples_with_their_gaps(data, tmp_path, capsys):
    bounds, sure = {}, ["--center", "local", "--bootstrap", 20, "--held-out", 0, "--rounds", 30]
    (tmp_path / "complete").mkdir()
    whole = written(tmp_path / "complete")
    for name, folder, more in (("gaps", data, IMPUTE), ("whole", whole, [])):
        assert fit("perpca", folder, tmp_path / name, *RANKS, *sure, *more) == 0
        arrays, summary = loaded(tmp_path / name)
        axes = arrays["confidence.axes"]
        np.testing.assert_allclose(axes @ axes.T, arrays["shared"] @ arrays["shared"].T, atol=1e-4)
        rows = {row["quantity"]: row for row in summary["confidence"]["table"]}
        bounds[name] = rows["angle of the shared subspace (degrees)"]["upper"]
        assert summary["confidence"]["remarks"] == []
    assert bounds["whole"] < bounds["gaps"] < 10
    assert "Fitting 20 resamples of samples." in capsys.readouterr().out


def test_missing_entries_are_refused_unless_asked_for(data, learned, tmp_path, capsys):
    said = refused(capsys, fit("oneshot", data, tmp_path / "out", *RANKS))
    assert "client0.npy: the value in row 0, column " in said and "--impute" in said
    # What was learned of complete samples completes none.
    assert fit("oneshot", written(tmp_path), tmp_path / "full", *RANKS) == 0
    assert jf.load(tmp_path / "full" / "result.npz").imputation is None
    capsys.readouterr()
    command = ["transform", tmp_path / "full", "--data", data, "--out", tmp_path / "scores"]
    assert "--impute" in refused(capsys, run(*command))
    np.save(tmp_path / "client3.npy", np.full((4, 9), np.nan))
    said = refused(capsys, fit("oneshot", tmp_path, tmp_path / "none", *RANKS, *IMPUTE))
    assert "wanted some entry of each sample, client3 has none in row 0" in said
    options = [*RANKS, *IMPUTE, "--processes", "--backend", "shard"]
    said = refused(capsys, fit("oneshot", data, tmp_path / "out", *options))
    assert "--impute: is for one process" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["perpca", *RANKS],
        ["local", "--rank", 2],
        ["pooled", "--rank", 2],
        ["hierarchicalpca", "--rank", 2, "--noise-variance", 0.5, "--prior-variance", 0.1],
        ["empiricalbayespca", "--rank", 2],
        ["blocklanczos", "--rank", 2],
        ["subspaceiteration", "--rank", 2],
        ["localpower", "--rank", 2],
        ["faps", "--rank", 2],
    ],
    ids=lambda command: command[0],
)
def test_every_algorithm_takes_them(data, tmp_path, command):
    rounds = [] if command[0] in ("local", "pooled") else ["--rounds", 2]
    assert fit(command[0], data, tmp_path / "out", *command[1:], *IMPUTE, *rounds) in (0, 3)
    _, summary = loaded(tmp_path / "out")
    assert 0 < value(summary, "error on held-out") < 100


def test_auto_takes_the_numbers_of_components_of_impute(data, tmp_path):
    assert jf.preprocess.Impute().ranks(9) == (4, 2)
    for name, words in (("auto", ["auto"]), ("numbers", ["4", "2"])):
        assert fit("oneshot", data, tmp_path / name, *RANKS, "--impute", *words) == 0
    (found, told), (wanted, _) = loaded(tmp_path / "auto"), loaded(tmp_path / "numbers")
    assert told["settings"]["impute"] == "auto"
    assert wanted.keys() == found.keys()
    for part in ("shared", "local", "imputation.mean"):
        np.testing.assert_array_equal(found[part], wanted[part])


@pytest.mark.parametrize("words", [["2"], ["auto", "2"], ["2", "1", "1"]])
def test_other_numbers_of_components_are_refused(data, tmp_path, capsys, words):
    line = refused(capsys, fit("oneshot", data, tmp_path / "out", *RANKS, "--impute", *words))
    assert line.startswith("jaxfed: Invalid value for --impute: ")
