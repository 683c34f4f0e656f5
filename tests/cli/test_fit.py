"""`jaxfed fit`: what each algorithm writes, runs that are interrupted, mistakes in one line."""

import gzip
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse

import jaxfed
from jaxfed import backend
from jaxfed.cli import main, transform
from jaxfed.cli._common import TABLE, backend_of
from jaxfed.cli.fit import _image_files, pca
from jaxfed.core.common.files import locked
from jaxfed.core.store.checkpoint import Checkpoint
from tests.cli.command_line import RANKS, fit, loaded, refused, run, value, written


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return written(tmp_path_factory.mktemp("data"))


# --- the PCA family ------------------------------------------------------------------------------


def test_fit_writes_components_history_table_and_pictures(data, tmp_path, capsys):
    out = tmp_path / "out"
    assert fit("perpca", data, out, *RANKS, "--rounds", 30, "--center", "local") == 0
    arrays, summary = loaded(out)
    frames = np.concatenate([np.repeat(arrays["shared"][None], 8, 0), arrays["local"]], axis=2)
    identity = np.broadcast_to(np.eye(4), (8, 4, 4))
    np.testing.assert_allclose(frames.mT @ frames, identity, atol=4e-5)
    assert arrays["names"].tolist() == [f"client{i}" for i in range(8)]
    assert arrays["history_objective"].shape == (30,)
    mean = arrays["preprocessing.mean"]
    assert np.all(np.abs(mean - 1) < 3) and np.ptp(mean, axis=0).min() > 0
    assert summary["samples"] == {f"client{i}": 20 + i - round((20 + i) / 5) for i in range(8)}
    assert summary["settings"]["center"] == "local" and "jax" in summary["versions"]
    assert value(summary, "rounds") == 30
    assert value(summary, "objective") <= arrays["history_objective"][-1] * (1 + 1e-5)
    training, held_out = value(summary, "error on training"), value(summary, "error on held-out")
    parts = value(summary, "in shared") + value(summary, "in local")
    assert 0 < training < held_out < 100 and parts + training == pytest.approx(100, abs=1e-3)
    # A frame in single precision up in each round, and one down, and once more at the start.
    assert value(summary, "bits sent") >= 30 * 9 * 2 * 32
    for name in ("components.png", "convergence.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "error on held-out samples" in capsys.readouterr().out
    assert fit("perpca", data, out, *RANKS) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "shapes"),
    [
        (["local", "--rank", "4"], {"local": (8, 9, 4)}),
        (["pooled", "--rank", "4", "--image-shape", "3x3"], {"shared": (9, 4)}),
        (["oneshot", *RANKS, "--held-out", "0"], {"shared": (9, 2), "local": (8, 9, 2)}),
        (["hmf", *RANKS, "--rounds", "5"], {"shared": (9, 2), "local": (8, 9, 2)}),
        (
            ["tcmf", *RANKS, "--threshold", "2", "--rounds", "5"],
            {"shared": (9, 2), "local": (8, 9, 2)},
        ),
        (
            [
                *["pertucker", "--shape", "3", "3", "--shared-ranks", "1", "2"],
                *["--local-ranks", "2", "1", "--orthogonal-modes", "1", "--rounds", "5"],
            ],
            {"shared": (9, 2), "local": (8, 9, 2)},
        ),
        (
            [
                "hierarchicalpca",
                "--rank",
                "2",
                "--noise-variance",
                "0.5",
                "--prior-variance",
                "0.1",
                "--rounds",
                "2",
                "--solver",
                "eigenvectors",
            ],
            {"shared": (9, 2), "local": (8, 9, 2)},
        ),
        (["blocklanczos", "--rank", "2", "--rounds", "12"], {"shared": (9, 2)}),
    ],
)
def test_other_algorithms(data, tmp_path, command, shapes):
    assert fit(command[0], data, tmp_path / "out", *command[1:]) == 0
    arrays, summary = loaded(tmp_path / "out")
    # What a method does not learn is not in the file.
    assert {k: arrays[k].shape for k in arrays if k in ("shared", "local")} == shapes
    assert (value(summary, "error on held-out") is None) == ("0" in command)


@pytest.mark.slow
def test_a_bootstrap_tells_how_sure_the_components_are(data, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--held-out", "0", "--center", "local", "--bootstrap", "50", "--report"]
    assert fit("perpca", data, out, *RANKS, "--rounds", "30", *words) == 0
    arrays, summary = loaded(out)
    axes, errors = arrays["confidence.axes"], arrays["confidence.axes_std"]
    np.testing.assert_allclose(axes @ axes.T, arrays["shared"] @ arrays["shared"].T, atol=1e-4)
    assert errors.shape == (9, 2) and 0 < errors.min() <= errors.max() < 0.1
    found = summary["confidence"]
    assert (found["resamples"], found["of"], found["level"]) == (50, "samples", 0.95)
    rows = {row.pop("quantity"): row for row in found["table"]}
    assert 0 < rows["angle of the shared subspace (degrees)"]["upper"] < 10
    shares = [row for name, row in rows.items() if name.startswith("energy of client")]
    assert len(shares) == 8
    assert all(0 < row["lower"] < row["estimate"] < row["upper"] < 100 for row in shares)
    for name in ("bands.png", "angles.png", "distances.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert "angle of the shared subspace (degrees)" in capsys.readouterr().out
    assert '<section id="confidence">' in (out / "report.html").read_text()


@pytest.mark.slow
def test_what_cannot_be_resampled_is_refused_before_the_run(data, tmp_path, capsys):
    out = tmp_path / "out"
    for options, message in (
        (["--bootstrap", "1"], "--bootstrap: wanted at least 2, got 1"),
        (["--bootstrap", "25", "--held-out", "0.9"], "--bootstrap: wanted 3 samples of each .* 2"),
        (["--bootstrap", "25", "--processes", "--backend", "shard"], "--bootstrap: is for one pro"),
    ):
        line = refused(capsys, fit("perpca", data, out, *RANKS, *options))
        assert re.match(f"jaxfed: {message}", line)
    (tmp_path / "few").mkdir()
    for i in range(2):
        shutil.copy(data / f"client{i}.npy", tmp_path / "few")
    words = ["--bootstrap", "25", "--resample", "clients"]
    line = refused(capsys, fit("perpca", tmp_path / "few", out, *RANKS, *words))
    assert line == "jaxfed: --resample: wanted 3 clients or more, got 2"
    assert fit("pooled", data, out, "--rank", "2", "--bootstrap", "25") == 2
    assert "Unknown option: --bootstrap" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_noise_protects_persons_and_local_components_are_made_at_home(data, tmp_path, capsys):
    out = tmp_path / "out"
    privacy = ["--epsilon", "1e4", "--delta", "1e-5", "--center", "local", "--held-out", "0"]
    assert fit("perpca", data, out, *RANKS, *privacy, "--rounds", 30, "--report") in (0, 3)
    assert "Who: each person behind the data" in capsys.readouterr().out
    arrays, summary = loaded(out)
    assert summary["privacy"][1].startswith("Unit: one row")
    assert "Not covered: " in (out / "report.html").read_text()
    (guarantee,) = jaxfed.load(out / "result.npz").guarantees
    assert str(guarantee).startswith("epsilon 10000, delta 1e-05 per row")
    tables = [np.load(data / f"client{i}.npy") for i in range(8)]
    tables = [x - x.mean(axis=0) for x in tables]
    at_home = jaxfed.pca.fit_local(jaxfed.Personalized(arrays["shared"], None), tables, 2)
    np.testing.assert_allclose(arrays["local"], at_home.local, atol=1e-4)
    # Another release, whatever the seed.
    assert fit("pooled", data, tmp_path / "a", "--rank", 2, "--epsilon", 1) == 0
    assert fit("pooled", data, tmp_path / "b", "--rank", 2, "--epsilon", 1) == 0
    one, other = (loaded(tmp_path / name)[0]["shared"] for name in "ab")
    assert not np.allclose(one, other)
    counted = ["--epsilon", 1, "--ledger", tmp_path / "ledger", "--budget", 1.2]
    exact = [*counted, "--noise", "opendp"]
    assert fit("pooled", data, tmp_path / "c", "--rank", 2, *exact) == 0
    (guarantee,) = jaxfed.load(tmp_path / "c" / "result.npz").guarantees
    assert guarantee.mechanism == "discrete Gaussian"
    assert fit("pooled", data, tmp_path / "d", "--rank", 2, *counted) == 2
    assert "epsilon: wanted at most 1.2 for all releases" in capsys.readouterr().err
    assert not (tmp_path / "d" / "result.npz").exists()


def test_a_column_tells_whose_row_each_is(tmp_path, key, capsys):
    rng = np.random.default_rng(0)
    for name in "xy":
        rows = [f"{k // 2},{a},{b},{c}" for k, (a, b, c) in enumerate(rng.normal(size=(12, 3)))]
        (tmp_path / f"{name}.csv").write_text("\n".join(["patient,a,b,c", *rows]))
    options = {each.name: each.default for each in TABLE}
    options |= {"data": tmp_path, "held_out": 0, "max_bytes": 10**6}
    options |= {"center": "none", "scale": "none", "person": "patient"}
    with ExitStack() as precision:
        split = pca.read(SimpleNamespace(**options), key, precision)
    assert split.features == ["a", "b", "c"] and split.train[0].shape == (12, 3)
    np.testing.assert_array_equal(split.persons[1], np.arange(12) // 2)
    options["columns"] = ("c", "a")  # of features, beside which the column is read
    with ExitStack() as precision:
        chosen = pca.read(SimpleNamespace(**options), key, precision)
    assert chosen.features == ["c", "a"]
    np.testing.assert_array_equal(chosen.persons[1], split.persons[1])
    for words, message in (
        (["--person", "patient"], "--person: is for --epsilon"),
        (["--epsilon", 1, "--person", "who"], r"--person: wanted a column .*\(patient, a, b, c\)"),
        (["--epsilon", 1, "--center", "shared"], "--center: wanted none or local with --epsilon"),
        (["--epsilon", 1, "--scale", "local"], "--scale: wanted none with --epsilon"),
        (["--epsilon", 1, "--impute", 1, 1], "--impute: is not for --epsilon"),
        (["--epsilon", 1, "--bootstrap", 9], "--bootstrap: is not for --epsilon"),
        (["--ledger", "l"], "--ledger: is for --epsilon"),
        (["--noise", "jax"], "--noise: is for --epsilon"),
        (["--epsilon", 1, "--ledger", "l"], "--ledger: wanted both --ledger and --budget"),
        (["--epsilon", 0], "--epsilon: wanted a positive finite number, got 0.0"),
        (["--epsilon", 1, "--delta", 1], "--delta: wanted a number between 0 and 1, got 1.0"),
    ):
        words = ["--shared-rank", 1, "--local-rank", 1, "--held-out", 0, *words]
        line = refused(capsys, fit("perpca", tmp_path, tmp_path / "out", *words))
        assert re.match(f"jaxfed: {message}", line), line


@pytest.mark.slow
def test_non_negative_components_and_loadings(data, tmp_path, capsys):
    rng, folder = np.random.default_rng(0), tmp_path / "counts"
    folder.mkdir()
    programs, tables = rng.gamma(0.5, size=(2, 9)), []
    for i in range(3):
        tables.append(rng.gamma(0.5, size=(20 + i, 2)) @ programs + 0.01)
        np.save(folder / f"client{i}.npy", tables[-1])
    words = ["--rank", "2", "--rounds", "60", "--held-out", "0.1"]
    assert fit("inmf", folder, tmp_path / "out", *words, "--scale", "rms") == 0
    arrays, summary = loaded(tmp_path / "out")
    assert arrays["shared"].shape == (9, 2) and arrays["local"].shape == (3, 9, 2)
    np.testing.assert_array_equal(np.bincount(arrays["client"]), [20, 21, 22])
    scaled = [x / np.sqrt(np.mean(x**2, axis=0)) for x in tables]
    own = arrays["shared"] + arrays["local"][arrays["client"]]
    fitted = np.einsum("nk,ndk->nd", arrays["loadings"], own)
    assert np.linalg.norm(fitted - np.concatenate(scaled)) < 0.2 * np.linalg.norm(fitted)
    assert 0 < value(summary, "error on training") < value(summary, "error on held-out") < 10
    # It refuses negative numbers, with which the samples of other tests abound.
    capsys.readouterr()
    assert fit("inmf", data, tmp_path / "other", "--rank", "2") == 2
    assert "samples without negative numbers" in capsys.readouterr().err


@pytest.mark.slow
def test_new_samples_far_from_zero_are_those_near_zero(data, tmp_path):
    found = {}
    for offset in (0.0, 1e8):
        place = tmp_path / str(offset)
        (place / "data").mkdir(parents=True)
        for path in data.glob("*.npy"):
            np.save(place / "data" / path.name, np.load(path).astype(float) + offset)
        units = ["--center", "shared", "--held-out", "0"]
        assert fit("oneshot", place / "data", place / "fit", *RANKS, *units) == 0
        command = [str(place / "fit"), "--data", str(place / "data"), "--out"]
        assert main(["transform", *command, str(place / "scores")]) == 0
        assert main(["personalize", *command, str(place / "own")]) == 0
        with np.load(place / "scores" / "result.npz") as scores:
            found[offset] = [scores["scores"], scores["anomaly"]]
        local = jaxfed.load(place / "own" / "result.npz").result.local
        found[offset].append(local @ np.swapaxes(local, 1, 2))
    for near, far in zip(*found.values(), strict=True):
        np.testing.assert_allclose(far, near, atol=1e-5 * np.abs(near).max())


@pytest.mark.slow
def test_what_was_learned_is_shown_and_used(data, tmp_path, capsys):
    units = ["--center", "local", "--scale", "energy"]
    assert fit("oneshot", data, tmp_path / "fit", *RANKS, "--held-out", "0", *units) == 0
    saved = jaxfed.load(tmp_path / "fit" / "result.npz")
    assert saved.result.local.shape == (8, 9, 2) and saved.algorithm.startswith("OneShot(")
    capsys.readouterr()
    assert main(["info", str(tmp_path / "fit")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("verdict") and "error on training samples" in shown

    command = ["transform", str(tmp_path / "fit"), "--data", str(data), "--out"]
    assert main([*command, str(tmp_path / "scores")]) == 0
    with np.load(tmp_path / "scores" / "result.npz") as found:
        assert found["names"].tolist() == [f"client{i}" for i in range(8)]
        own = found["scores"][found["client"] == 3]
        anomaly = found["anomaly"][found["client"] == 3]
    samples = np.load(data / "client3.npy")
    samples = samples - samples.mean(axis=0)
    samples = samples / np.sqrt(np.mean(samples**2))
    basis = np.concatenate([saved.result.shared, saved.result.local[3]], axis=1)
    np.testing.assert_allclose(own, samples @ basis, atol=1e-4)
    left = np.sum(samples**2, axis=1) - np.sum(own**2, axis=1)
    np.testing.assert_allclose(anomaly, left, atol=1e-3)
    assert not (tmp_path / "scores" / "scores.csv").exists()

    new = tmp_path / "new"
    new.mkdir()
    np.save(new / "stranger.npy", np.load(data / "client3.npy"))
    command = ["transform", str(tmp_path / "fit"), "--data", str(new), "--out"]
    capsys.readouterr()
    assert "--personalize" in refused(capsys, main([*command, str(tmp_path / "other")]))
    assert main([*command, str(tmp_path / "other"), "--personalize"]) == 0
    assert "stranger" in capsys.readouterr().out
    # Its units are its own, and its scores in the shared components those of the same samples.
    with np.load(tmp_path / "other" / "result.npz") as found:
        np.testing.assert_allclose(found["scores"][:, :2], own[:, :2], atol=1e-4)
    assert "not a zip file" in refused(capsys, main(["info", str(data / "client0.npy")]))


def test_names_of_clients_are_no_formulas_of_spreadsheets():
    names = np.array(["@SUM(1)", "=1+1", "Oslo"])
    arrays = {"names": names, "client": np.arange(3), "scores": -np.ones((3, 1))}
    lines = transform._csv(arrays | {"anomaly": np.zeros(3)}).splitlines()[1:]
    assert lines == ["'@SUM(1),-1.0,0.0", "'=1+1,-1.0,0.0", "Oslo,-1.0,0.0"]


@pytest.mark.slow
def test_tables_have_names_of_features_and_tables_of_scores(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "table.csv"
    cells = [f"{'ab'[i % 2]},{','.join(map(str, rng.normal(size=4)))}" for i in range(20)]
    path.write_text("\n".join(["site,age,weight,height,sugar", *cells]))
    column = ["--client-column", "site"]
    words = [*RANKS, "--shared-rank", 1, "--local-rank", 1, "--rounds", 2, "--report", *column]
    assert fit("perpca", path, tmp_path / "out", *words) == 0
    arrays, _ = loaded(tmp_path / "out")
    assert arrays["features"].tolist() == ["age", "weight", "height", "sugar"]
    command = ["transform", tmp_path / "out", "--data", path, "--out", tmp_path / "scores"]
    assert main([*map(str, command), *column]) == 0
    header, *rows = (tmp_path / "scores" / "scores.csv").read_text().splitlines()
    assert header == "client,score_1,score_2,anomaly"
    assert [row[0] for row in rows] == ["a"] * 10 + ["b"] * 10
    with np.load(tmp_path / "scores" / "result.npz") as found:
        written = np.array([row.split(",")[1:] for row in rows], float)
        np.testing.assert_allclose(written[:, :2], found["scores"])
        np.testing.assert_allclose(written[:, 2], found["anomaly"])
    saved = jaxfed.load(tmp_path / "out" / "result.npz")
    assert saved.names.clients == ("a", "b")
    assert saved.names.features == ("age", "weight", "height", "sugar")


def test_commands_read_tables_as_people_write_them(tmp_path, capsys):
    rng, path = np.random.default_rng(0), tmp_path / "table.csv"
    rows = rng.normal(size=(20, 4)).round(6)
    cells = [
        f"{i + 1};{'ab'[i % 2]};{';'.join(map(str, row)).replace('.', ',')}"
        for i, row in enumerate(rows)
    ]
    path.write_text("\n".join(["nr;site;age;weight;height;sugar", *cells]))
    words = ["--client-column", "site"]
    run_words = ["--shared-rank", 1, "--local-rank", 1, "--rounds", 2, "--held-out", 0]
    assert "column 'nr' counts the rows" in refused(
        capsys, fit("perpca", path, tmp_path / "no", *run_words, *words)
    )
    words += ["--id-column", "nr", "--drop", "sugar"]
    assert fit("perpca", path, tmp_path / "out", *run_words, *words) == 0
    saved = jaxfed.load(tmp_path / "out" / "result.npz")
    assert saved.names.features == ("age", "weight", "height")
    tables = [rows[i::2, :3] for i in range(2)]
    alone = jaxfed.pca.anomaly_score(saved, tables)
    command = ["transform", tmp_path / "out", "--data", path, "--out", tmp_path / "scores"]
    assert run(*command, *words) == 0
    with np.load(tmp_path / "scores" / "result.npz") as found:
        np.testing.assert_allclose(found["anomaly"], np.concatenate(alone), rtol=1e-4, atol=1e-6)


def test_commands_read_tables_in_other_encodings(tmp_path, capsys):
    rng, path = np.random.default_rng(0), tmp_path / "table.csv"
    cells = [f"{'ab'[i % 2]},{','.join(map(str, rng.normal(size=3)))}" for i in range(20)]
    path.write_text("\n".join(["hôpital,âge,b,c", *cells]), encoding="cp1252")
    words = ["--client-column", "hôpital", "--shared-rank", 1, "--local-rank", 1, "--rounds", 2]
    words += ["--held-out", 0]
    said = refused(capsys, fit("perpca", path, tmp_path / "no", *words))
    assert "line 1 has the byte 0xf4; pass encoding= (--encoding), such as cp1252" in said
    assert fit("perpca", path, tmp_path / "out", *words, "--encoding", "cp1252") == 0
    assert jaxfed.load(tmp_path / "out" / "result.npz").names.features == ("âge", "b", "c")


def test_columns_are_known_by_their_names(tmp_path, capsys):
    """In another order, they used to be taken for each other."""
    rng, table, moved, other = np.random.default_rng(0), [], [], []
    column = ["--client-column", "site"]
    for i in range(20):
        site, cells = "ab"[i % 2], list(map(str, rng.normal(size=4)))
        table.append([site, *cells])
        moved.append([*cells[::-1], site])
        other.append([site, *cells[:3], "7"])
    heads = {"table": "site,age,weight,height,sugar", "moved": "sugar,height,weight,age,site"}
    heads["other"] = "site,age,weight,height,pulse"
    for name, rows in (("table", table), ("moved", moved), ("other", other)):
        text = "\n".join([heads[name], *map(",".join, rows)])
        (tmp_path / f"{name}.csv").write_text(text)
    words = [*RANKS, "--shared-rank", 1, "--local-rank", 1, "--rounds", 2, *column]
    assert fit("perpca", tmp_path / "table.csv", tmp_path / "out", *words) == 0
    for name in ("table", "moved"):
        command = ["transform", tmp_path / "out", "--data", tmp_path / f"{name}.csv", *column]
        assert run(*command, "--out", tmp_path / name) == 0
    scores = [(tmp_path / name / "scores.csv").read_text() for name in ("table", "moved")]
    assert scores[0] == scores[1]
    capsys.readouterr()
    for words in (["transform"], ["personalize"]):
        command = [*words, tmp_path / "out", "--data", tmp_path / "other.csv", *column]
        text = refused(capsys, run(*command, "--out", tmp_path / "no"))
        assert "without sugar, with pulse besides" in text


def test_the_closest_option_is_suggested(data, tmp_path, capsys):
    assert fit("perpca", data, tmp_path / "out", *RANKS, "--runds", "3") == 2
    error = capsys.readouterr().err
    assert "Unknown option: --runds. Did you mean --rounds?" in error
    # A required option that is misspelt, rather than missing.
    assert fit("perpca", data, tmp_path / "out", "--shared-ranc", "2") == 2
    assert "Did you mean --shared-rank instead of --shared-ranc?" in capsys.readouterr().err
    # `local` has no rounds.
    assert fit("local", data, tmp_path / "out", "--rank", "2", "--runds", "3") == 2
    assert "--rounds" not in capsys.readouterr().err


@pytest.mark.slow
def test_clients_that_stand_out_are_named(data, tmp_path):
    spoiled = tmp_path / "spoiled"
    shutil.copytree(data, spoiled)
    rows = np.load(spoiled / "client5.npy")
    np.save(spoiled / "client5.npy", 100 * rows[:, ::-1])
    options = "--rank", "2", "--rounds", "10", "--groups", "8", "--report"
    assert fit("subspaceiteration", spoiled, tmp_path / "out", *options) == 0
    _, summary = loaded(tmp_path / "out")
    assert value(summary, "groups far from the aggregate") == 1
    assert value(summary, "clients in them") == "client5"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Clients that stand out" in page and "masks hide a client among 1 " in page
    assert jaxfed.load(tmp_path / "out" / "result.npz").algorithm.startswith("Robust(")
    command = ["transform", str(tmp_path / "out"), "--data", str(data)]
    assert main([*command, "--out", str(tmp_path / "scores")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("perpca", ["--center", "shared", "--start", "projector", "--report"]),
        ("perpca", ["--scale", "shared", "--start", "several"]),
        ("perpca", ["--center", "local"]),
        ("hmf", ["--start", "spectrum"]),
        ("maxvar", ["--scale", "none"]),
        ("perpca", ["--bootstrap", "5"]),
        ("perpca", ["--impute", "2", "1"]),
    ],
)
def test_one_client_that_overflows_does_not_end_a_robust_fit(name, options, data, tmp_path, capsys):
    """Neither what precedes the rounds nor what follows them depends on it."""
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    for path in data.iterdir():
        rows = np.load(path)[:20]
        if "--impute" in options:
            rows[3, 1] = np.nan
        np.save(spoiled / path.name, 1e30 * rows if path.stem == "client2" else rows)
    ranks = ["--rank", "2"] if name == "maxvar" else RANKS
    options = [*ranks, "--rounds", "3", "--groups", "8", *options]
    assert fit(name, spoiled, tmp_path / "out", *options) == 0
    arrays, summary = loaded(tmp_path / "out")
    assert np.isfinite(arrays["shared"]).all()
    if name != "maxvar":
        assert value(summary, "clients left out of these measures") == 1
        assert 0 < value(summary, "error on training") < 100
        said = "No resamples were fitted" in capsys.readouterr().out
        assert said == ("--bootstrap" in options)
        return
    given = [row for row in summary["table"] if "representation" in row["quantity"]]
    assert len(given) == 8 and all(0 < float(row["value"]) <= 100 for row in given)
    assert fit(name, spoiled, tmp_path / "out", *options, "--start", "mvlsa", "--force") == 2


@pytest.mark.slow
def test_a_warm_start_is_another_algorithms_solution(data, tmp_path):
    assert fit("oneshot", data, tmp_path / "one", *RANKS) == 0
    options = [*RANKS, "--rounds", 1, "--start", "projector"]
    assert fit("perpca", data, tmp_path / "per", *options) == 0
    (_, one), (arrays, per) = loaded(tmp_path / "one"), loaded(tmp_path / "per")
    np.testing.assert_allclose(arrays["history_objective"][0], value(one, "objective"), rtol=1e-4)
    # Four components for the start, then two, the value, a curvature and two fingerprints.
    assert value(per, "bits sent") == 32 * (9 * 4 + 9 * 2 + 4)


@pytest.mark.slow
def test_the_best_of_several_starts_is_a_warm_start(data, tmp_path):
    options = [*RANKS, "--rounds", 3, "--held-out", 0]
    found = []
    for start in ("several", "random"):
        assert fit("perpca", data, tmp_path / start, *options, "--start", start) == 0
        arrays, _ = loaded(tmp_path / start)
        found.append(arrays["history_objective"])
    assert found[0][0] < found[1][-1]


@pytest.mark.parametrize(
    ("name", "size", "wanted"),
    [
        ("vmap", None, backend.vmap()),
        ("chunked", None, backend.chunked(256)),
        ("chunked", 3, backend.chunked(3)),
        ("pmap", None, backend.pmap()),
        ("shard", 2, backend.shard(inner=backend.chunked(2))),
    ],
)
def test_backends(name, size, wanted):
    assert repr(backend_of(SimpleNamespace(backend=name, clients_per_block=size))) == repr(wanted)


def test_one_table_holds_all_clients(tmp_path, key):
    rng = np.random.default_rng(0)
    rows = [f"{place},{a},{b},{c}" for place in "xyx" for a, b, c in rng.normal(size=(5, 3))]
    (tmp_path / "all.csv").write_text("\n".join(["place,a,b,c", *rows]))
    options = {each.name: each.default for each in TABLE}
    options |= {"data": tmp_path / "all.csv", "client_column": "place", "held_out": 0.2}
    options["max_bytes"] = 1
    with ExitStack() as precision:
        arguments = SimpleNamespace(**options, center="shared", scale="none")
        split = pca.read(arguments, key, precision)
    assert split.names == ["x", "y"]
    assert [len(samples) for samples in (*split.train, *split.held_out)] == [8, 4, 2, 1]
    mean = np.asarray(split.units.mean)
    np.testing.assert_array_equal(mean[0], mean[1])
    np.testing.assert_allclose(np.concatenate(split.train).mean(axis=0), 0, atol=1e-7)
    values = np.sort(np.concatenate([*split.train, *split.held_out]) + mean[0], axis=0)
    everything = np.sort([[float(cell) for cell in row.split(",")[1:]] for row in rows], axis=0)
    np.testing.assert_allclose(values, everything, rtol=1e-12)


# --- views ---------------------------------------------------------------------------------------


def seen(folder, sparse=False):
    """Three views of 40 entities with two strong latent dimensions; a third of it zeros."""
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(40, 2))
    for name, width in (("a", 5), ("b", 7), ("c", 4)):
        x = latent @ rng.normal(size=(2, width)) + 0.5 * rng.normal(size=(40, width))
        x = np.where(rng.random(x.shape) < 0.3, 0, x).astype(np.float32)
        if sparse:
            scipy.sparse.save_npz(folder / f"{name}.npz", scipy.sparse.csr_array(x))
        else:
            np.save(folder / f"{name}.npy", x)
    return folder


@pytest.mark.slow
def test_fit_gcca_writes_what_is_common_and_resumes(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    views, out = seen(tmp_path / "data"), tmp_path / "out"
    options = ["--rank", 2, "--rounds", 6, "--bits", 3, "--held-out", 0.25, "--checkpoint-every", 3]
    assert fit("maxvar", views, out, *options) == 0
    assert "features: a 5, b 7, c 4." in capsys.readouterr().out
    arrays, summary = loaded(out)
    np.testing.assert_allclose(arrays["shared"].T @ arrays["shared"], np.eye(2), atol=1e-5)
    assert arrays["shared"].shape == (30, 2) and arrays["local"].shape == (3, 7, 2)
    assert arrays["names"].tolist() == ["a", "b", "c"]
    assert arrays["features"].tolist() == [5, 7, 4] and np.all(np.diff(arrays["entities"]) > 0)
    first = np.load(views / "a.npy")[arrays["entities"]]
    np.testing.assert_allclose(arrays["mean"][0, :5], first.mean(0), atol=1e-6)
    np.testing.assert_allclose(arrays["scale"][0, :5], first.std(0), atol=1e-6)
    least, cost = value(summary, "least cost"), value(summary, "cost")
    assert least <= cost < 1.5 * least
    given = [value(summary, f"representation that {name}") for name in "abc"]
    # Half the squared distances to an orthonormal representation, view by view.
    np.testing.assert_allclose(sum(1 - np.array(given) / 100), cost, rtol=1e-4)
    assert value(summary, "held-out entities") > 100 / 9
    # Vectors of four for the start, a message of eight bits and a scale, and rounds of three bits.
    first = 30 * 4 * 32 + (30 * 2 * 8 + 32)
    assert value(summary, "bits sent") == first + 6 * (30 * 2 * 3 + 32) + 4 * 6
    for name in ("agreement.png", "convergence.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")

    before = (out / "result.npz").read_bytes()
    (out / "result.json").unlink()  # as if it had been interrupted at the end
    assert fit("maxvar", views, out, *options) == 0
    assert "Taking up" in capsys.readouterr().out
    assert (out / "result.npz").read_bytes() == before


@pytest.mark.slow
def test_fit_mvlsa_is_one_round(tmp_path):
    assert fit("mvlsa", seen(tmp_path), tmp_path / "out", "--rank", 2) == 0
    arrays, summary = loaded(tmp_path / "out")
    assert value(summary, "rounds") == 1 and arrays["shared"].shape[1] == 2
    assert jaxfed.load(tmp_path / "out" / "result.npz").algorithm.startswith("MVLSA(")


@pytest.mark.slow
def test_fit_ajive_says_what_is_joint_and_what_individual(tmp_path):
    options = ["--rank", 2, "--signal-rank", 3, "--held-out", 0.25]
    assert fit("ajive", seen(tmp_path), tmp_path / "out", *options) == 0
    arrays, summary = loaded(tmp_path / "out")
    assert value(summary, "rounds") == 1 and value(summary, "joint directions") <= 2
    assert arrays["features"].tolist() == [5, 7, 4]
    for name in "abc":
        shares = [value(summary, f"variation of {name} that is {x}") for x in ("joint", "indiv")]
        assert min(shares) >= 0 and sum(shares) <= 100.01
    assert jaxfed.load(tmp_path / "out" / "result.npz").algorithm.startswith("AJIVE(")


@pytest.mark.slow
def test_fit_gcca_reads_tables_as_people_write_them(tmp_path):
    views = seen(tmp_path)
    for name in "abc":
        table = np.load(views / f"{name}.npy")
        # In each view, the rows are in another order.
        rows = [f"p{i};{';'.join(map(str, x))}".replace(".", ",") for i, x in enumerate(table)]
        head = ";".join(["id", *(f"{name}{k}" for k in range(table.shape[1]))])
        text = "\n".join([head, *(rows[::-1] if name == "b" else rows)])
        (tmp_path / "tables").mkdir(exist_ok=True)
        (tmp_path / "tables" / f"{name}.csv").write_text(text, encoding="utf-16")
    options = ["--rank", 2, "--rounds", 3, "--held-out", 0]
    assert fit("maxvar", views, tmp_path / "arrays", *options) == 0
    options += ["--id-column", "id"]
    assert fit("maxvar", tmp_path / "tables", tmp_path / "out", *options) == 0
    wanted, found = (loaded(tmp_path / name)[0]["shared"] for name in ("arrays", "out"))
    np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=1e-4)


def test_fit_gcca_takes_sparse_views_for_what_they_are(tmp_path):
    for name in ("dense", "sparse"):
        (tmp_path / name).mkdir()
        views = seen(tmp_path / name, sparse=name == "sparse")
        options = ["--rank", 2, "--rounds", 3, "--view-rank", 4, "--solver", "gradient"]
        assert fit("maxvar", views, tmp_path / f"{name} out", *options) == 0
    dense, sparse = loaded(tmp_path / "dense out"), loaded(tmp_path / "sparse out")
    for name in ("shared", "mean", "scale", "history_objective"):
        np.testing.assert_allclose(sparse[0][name], dense[0][name], atol=2e-4)
    assert value(sparse[1], "least cost") is None and value(dense[1], "least cost") > 0


# --- images --------------------------------------------------------------------------------------

SIDE, LATENT = 4, 2


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE), np.uint8)


def idx(folder, prefix="t10k", classes=3, each=8):
    pixels = images(classes * each)
    labels = np.repeat(np.arange(classes, dtype=np.uint8), each)
    for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        path = folder / f"{prefix}-{name}-ubyte.gz"
        path.write_bytes(gzip.compress(header + array.tobytes()))
    return pixels.reshape(-1, SIDE**2) / np.float32(255)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Random images of three clients, as numbers from 0 to 1."""
    folder = tmp_path_factory.mktemp("images")
    for i in range(3):
        np.save(folder / f"client{i}.npy", images(5 + i, i).reshape(-1, SIDE**2) / np.float32(255))
    return folder


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """Images of three clients that two numbers describe."""
    folder = tmp_path_factory.mktemp("coded")
    rng = np.random.default_rng(0)
    for i, count in enumerate((9, 10, 12)):
        codes = rng.uniform(size=(count, LATENT)).astype(np.float32)
        pixels = 0.3 + 0.6 * codes @ rng.dirichlet(np.ones(LATENT), SIDE**2).T.astype(np.float32)
        np.save(folder / f"client{i}.npy", pixels)
    return folder


QUICK = {
    "autoencoder": (
        "--latent",
        LATENT,
        "--rounds",
        20,
        "--local-steps",
        10,
        "--batch-size",
        5,
        "--held-out",
        0.25,
    ),
    "diffusion": (
        "--widths",
        2,
        2,
        2,
        "--rounds",
        3,
        "--local-steps",
        2,
        "--samples",
        3,
        "--sampling-steps",
        2,
        "--held-out",
        0.25,
    ),
}


def train(algorithm, folder, out, *options):
    return fit(algorithm, folder, out, *QUICK[algorithm], *options)


def measured(folder):
    """The arrays that were written, and the table by its lines."""
    arrays, summary = loaded(folder)
    return arrays, {row["quantity"]: row["value"] for row in summary["table"]}


def read(path, **options):
    defaults = {
        "image_shape": None,
        "held_out": 0.25,
        "clients": 3,
        "classes_per_client": 1,
        "images": None,
        "seed": 0,
        "max_bytes": 2**30,
    }
    return _image_files.read(SimpleNamespace(data=path, **defaults | options))


def whole(found):
    return [np.concatenate(parts) for parts in zip(found.train, found.held_out, strict=True)]


def sorted_rows(array):
    return array[np.lexsort(array.T)]


@pytest.mark.parametrize("prefix", ["t10k", "train"])
def test_files_of_mnist_are_dealt_out_by_class(prefix, tmp_path):
    rows = idx(tmp_path, prefix)
    found = read(tmp_path)
    assert found.shape == (SIDE, SIDE, 1)
    assert [(len(a), len(b)) for a, b in zip(found.train, found.held_out, strict=True)] == [
        (6, 2)
    ] * 3
    digits = [int(name.split("(")[1][:-1]) for name in found.names]
    assert sorted(digits) == [0, 1, 2]
    for digit, array in zip(digits, whole(found), strict=True):
        wanted = rows[8 * digit : 8 * digit + 8]
        np.testing.assert_allclose(sorted_rows(array), sorted_rows(wanted), rtol=1e-6)
    few = read(tmp_path, images=4, clients=6, held_out=0.0)
    assert [len(array) for array in few.train] == [4] * 6
    assert [len(array) for array in few.held_out] == [0] * 6


def test_arrays_may_be_bytes_or_from_0_to_1(tmp_path):
    for name, scale in (("small", 1), ("large", 255)):
        folder = tmp_path / name
        folder.mkdir()
        for i in range(2):
            rows = images(4, i).reshape(4, -1)
            np.save(folder / f"c{i}.npy", rows if scale == 255 else rows / np.float32(255))
    small, large = (read(tmp_path / name, image_shape=(2, 8, 1)) for name in ("small", "large"))
    assert small.shape == (2, 8, 1)
    assert small.names == ["c0", "c1"]
    for a, b in zip(whole(small), whole(large), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert a.dtype == np.float32 and a.max() <= 1


def test_colours_of_cifar(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), np.uint8)
    for i in range(1, 6):
        labels = np.arange(10, dtype=np.uint8)[:, None]
        rows = np.concatenate([labels, pixels.reshape(10, -1)], axis=1)
        (tmp_path / f"data_batch_{i}.bin").write_bytes(rows.tobytes())
    found = read(tmp_path, clients=10, held_out=0.0)
    assert found.shape == (32, 32, 3)
    own = found.train[[name.split("(")[1] for name in found.names].index("4)")]
    wanted = pixels[4].transpose(1, 2, 0).reshape(-1) / np.float32(255)
    np.testing.assert_allclose(own, np.tile(wanted, (5, 1)), rtol=1e-6)


def test_writers_of_femnist_are_clients(tmp_path):
    pixels = np.round(np.random.default_rng(0).uniform(size=(2, 3, 784)), 3)
    users = ["f1", "f2"]
    own = [{"x": rows.tolist(), "y": [0, 1, 2]} for rows in pixels]
    content = {
        "users": users,
        "num_samples": [3, 3],
        "user_data": dict(zip(users, own, strict=True)),
    }
    (tmp_path / "all.json").write_text(json.dumps(content))
    found = read(tmp_path, held_out=0.0)
    assert found.names == users and found.shape == (28, 28, 1)
    np.testing.assert_allclose(found.train, 1 - pixels, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (np.full((3, 4), -0.5, np.float32), {}, "--data: wanted values .* c0 has values from -0.5"),
        (np.full((3, 4), 1.5, np.float32), {}, "--data: wanted values from 0 to 1"),
        (np.full((3, 4), 300, np.int32), {}, "--data: wanted values from 0 to 1"),
        (np.full((3, 4), 1e-6, np.float32), {}, "--data: wanted .* none above 1e-06, which is bl"),
        (np.zeros((3, 5), np.float32), {}, "--image-shape: wanted that of .* 5 values"),
        (np.zeros((3, 4), np.float32), {"image_shape": (3, 2, 1)}, "--image-shape: 3x2x1 has 6"),
        (np.zeros((3, 4), np.float32), {"held_out": 1.0}, "--held-out: .* got 1.0"),
        (np.zeros((1, 4), np.float32), {}, "--held-out: c0 has one image"),
    ],
)
def test_other_images_are_refused(rows, options, message, tmp_path):
    np.save(tmp_path / "c0.npy", rows)
    with pytest.raises(ValueError, match=f"^{message}"):
        read(tmp_path, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--report",),
        ("--published", "--hyper-prior", 1e-4, "--hidden", "linear", "--output", "linear"),
        ("--training", "local", "--participation", 2, "--momentum", 0),
        ("--training", "fedavg", "--held-out", 0),
    ],
    ids=["personalized", "published", "local", "fedavg"],
)
def test_autoencoders_are_trained_and_reconstruct(options, coded, tmp_path, capsys):
    out = tmp_path / "out"
    assert train("autoencoder", coded, out, *options) in (0, 3)
    arrays, table = measured(out)
    weights = 2 * SIDE**2 * LATENT + SIDE**2 + LATENT
    assert f"autoencoders of {weights:,} weights" in capsys.readouterr().out
    personal = "fedavg" not in options
    assert ("local.encoder.weight" in arrays) == personal
    if personal:
        assert arrays["local.encoder.weight"].shape == (3, LATENT, SIDE**2)
    assert arrays["shared.decoder.bias"].shape == (SIDE**2,)
    prior = options[0] in ("--report", "--published")
    assert ("spread.encoder.weight" in arrays) == ("mean spread" in table) == prior
    assert arrays["energies"].shape == (3,)
    which = "images" if 0 in options[2:4] and "fedavg" in options else "held-out images"
    np.testing.assert_allclose(table[f"captured energy of {which}"], arrays["energies"].mean())
    # In twenty rounds the error falls, and most of the energy is in the mean image.
    losses = arrays["history_loss" if personal else "history_objective"]
    # Which clients a round is of is drawn.
    assert losses[-5:].mean() < losses[:5].mean()
    assert arrays["energies"].min() > 0.8
    for picture in ("reconstructions.png", "convergence.png"):
        assert (out / picture).stat().st_size > 1000
    capsys.readouterr()
    assert run("info", out) == 0
    kind = "AdaptiveTraining" if personal else "FedAvg"
    assert kind in capsys.readouterr().out
    if options[0] == "--report":
        assert kind in (out / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "models"),
    [
        ((), 3),
        (("--published", "--hyper-prior", 1e-4), 3),
        (("--training", "local", "--participation", 2), 3),
        (("--training", "fedavg"), 1),
        (("--training", "fedavg", "--fine-tuning", 1, "--held-out", 0), 3),
    ],
    ids=["personalized", "published", "local", "fedavg", "fine-tuned"],
)
def test_diffusion_models_are_trained_and_drawn_from(options, models, pictures, tmp_path, capsys):
    out = tmp_path / "out"
    assert train("diffusion", pictures, out, *options) == 0
    arrays, table = measured(out)
    weights = 50 * (2 + 4 + 4) + 11
    assert f"a U-Net of {weights:,} weights" in capsys.readouterr().out
    assert arrays["samples"].shape == (models, 3, SIDE**2)
    assert (arrays["samples"] >= 0).all() and (arrays["samples"] <= 1).all()
    local = [name for name in arrays if name.startswith("local")]
    assert len(local) == (12 if models == 3 else 0)
    assert arrays["shared.down[0].kernel"].shape == (5, 5, 1, 2)
    assert table["rounds"] == 3 and np.isfinite(table["objective"])
    assert ("loss of held-out images" in table) == (0 not in options)
    assert ("mean spread" in table) == (not options or options[0] == "--published")
    assert np.isfinite(arrays["history_objective"]).all()
    for picture in ("samples.png", "convergence.png"):
        assert (out / picture).stat().st_size > 1000


# --- interruptions -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_ends_where_the_uninterrupted_one_does(data, tmp_path, capsys):
    out, whole = tmp_path / "killed", tmp_path / "whole"
    options = [*RANKS, "--rounds", "90", "--checkpoint-every", "3"]
    command = [sys.executable, "-m", "jaxfed", "fit", "perpca", "--data", data, *options]
    process = subprocess.Popen([*map(str, command), "--out", str(out)], stdout=subprocess.DEVNULL)
    rounds = out / "checkpoint" / "rounds"
    deadline = time.monotonic() + 200
    while not (rounds.is_dir() and any(entry.stem.isdigit() for entry in rounds.iterdir())):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "result.json").exists()
    capsys.readouterr()

    # Not with another algorithm, other settings or other data.
    assert fit("hmf", data, out, *RANKS) == 2
    assert "algorithm was PerPCA(" in capsys.readouterr().err
    assert fit("perpca", data, out, *options, "--tol", "1e-3") == 2
    assert "belongs to another run: tol was None" in capsys.readouterr().err
    assert fit("perpca", data, out, *options, "--center", "local") == 2
    assert "belongs to another run: clients has other" in capsys.readouterr().err

    assert fit("perpca", data, out, *options) == 0
    assert "Taking up the run" in capsys.readouterr().out
    assert fit("perpca", data, whole, *options) == 0
    assert (out / "result.npz").read_bytes() == (whole / "result.npz").read_bytes()
    assert json.loads((out / "result.json").read_text())["table"] == loaded(whole)[1]["table"]
    assert fit("perpca", data, out, *options) == 2  # complete


SIGNALS = """
import os, signal, sys, threading, time
from pathlib import Path
from jaxfed.cli import main

# A shell has what it starts in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
rounds = Path(sys.argv[-1], "checkpoint", "rounds")

def send(number, after):
    while not (rounds / after).exists():
        time.sleep(0.001)
    os.kill(os.getpid(), number)

def interrupted(number, after):
    threading.Thread(target=send, args=(number, after)).start()
    return main(sys.argv[1:])

assert interrupted(signal.SIGTERM, "00000001.npz") == 143
sys.exit(interrupted(signal.SIGINT, "00000003.npz"))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_ends_in_one_line_at_a_signal_and_goes_on(data, tmp_path, capsys):
    options = [*RANKS, "--rounds", "15", "--checkpoint-every", "1"]
    out = tmp_path / "out"
    command = ["fit", "perpca", *options, "--data", str(data), "--out", str(out)]
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALS, *command], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr == "jaxfed: terminated\njaxfed: interrupted\n"
    rounds = out / "checkpoint" / "rounds"
    assert all(entry.stem.isdigit() for entry in rounds.iterdir())  # whole
    assert fit("perpca", data, out, *options) in (0, 3)  # whether or not 15 rounds converge
    assert "Taking up the run" in capsys.readouterr().out
    assert fit("perpca", data, tmp_path / "whole", *options) in (0, 3)
    assert (out / "result.npz").read_bytes() == (tmp_path / "whole" / "result.npz").read_bytes()


@pytest.mark.slow
def test_force_resumes_its_own_run_and_discards_another(data, tmp_path, capsys):
    options = [*RANKS, "--rounds", 6, "--checkpoint-every", 3, "--force"]
    assert fit("perpca", data, tmp_path, *options) == 0
    result = (tmp_path / "result.npz").read_bytes()
    (tmp_path / "result.json").unlink()  # as if it had been interrupted at the end
    with locked(tmp_path / "checkpoint", "folder"):
        assert fit("perpca", data, tmp_path, *options) == 2
    assert "--out: " in (told := capsys.readouterr().err) and "is in use by process" in told
    # A mistake costs nothing that was computed.
    assert fit("perpca", data, tmp_path, *options, "--tol", "-1") == 2
    assert (tmp_path / "checkpoint" / "rounds" / "00000006.npz").exists()
    capsys.readouterr()
    assert fit("perpca", data, tmp_path, *options) == 0
    assert "Taking up" in capsys.readouterr().out
    assert (tmp_path / "result.npz").read_bytes() == result
    (tmp_path / "result.json").unlink()
    assert fit("perpca", data, tmp_path, *options, "--center", "local") == 0
    assert (tmp_path / "result.npz").read_bytes() != result


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "options"), [("autoencoder", ("--rounds", 4)), ("diffusion", ())]
)
def test_an_interrupted_training_is_taken_up_again(
    algorithm, options, pictures, coded, tmp_path, monkeypatch, capsys
):
    """What is learned, drawn and measured is, bit for bit, that of the uninterrupted run."""
    folder = coded if algorithm == "autoencoder" else pictures
    options = ("--checkpoint-every", 1, *options)
    save, done = Checkpoint.save, []

    def interrupting(self, *arguments):
        save(self, *arguments)
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", interrupting)
        assert train(algorithm, folder, tmp_path / "stopped", *options) != 0
    assert len(done) == 2
    assert not (tmp_path / "stopped" / "result.json").exists()
    capsys.readouterr()
    assert train(algorithm, folder, tmp_path / "stopped", *options) == 0
    assert "Taking up the run that was interrupted" in capsys.readouterr().out
    assert train(algorithm, folder, tmp_path / "whole", *options) == 0
    stopped, whole = (loaded(tmp_path / name)[0] for name in ("stopped", "whole"))
    assert stopped.keys() == whole.keys()
    for name in whole:
        np.testing.assert_array_equal(stopped[name], whole[name])


# --- mistakes ------------------------------------------------------------------------------------


MISTAKES = {
    "perpca": [
        (["--shared-rank", "0", "--local-rank", "1"], "shared_rank: wanted"),
        (["--shared-rank", "8", "--local-rank", "8"], "do not fit into 9 features"),
        ([*RANKS, "--rounds", "0"], "rounds: wanted"),
        ([*RANKS, "--participation", "99"], "participation: 99 clients"),
        ([*RANKS, "--held-out", "1"], "--held-out: wanted"),
        ([*RANKS, "--clients-per-block", "4"], "--clients-per-block: is for"),
        (
            [*RANKS, "--backend", "chunked", "--clients-per-block", "0"],
            "--clients-per-block: wanted",
        ),
        ([*RANKS, "--image-shape", "2x3"], "--image-shape: 2x3 is 6 pixels"),
        ([*RANKS, "--memory", "-1"], "memory: wanted"),
        ([*RANKS, "--checkpoint-every", "0"], "every: wanted"),
        ([*RANKS, "--client-column", "place"], "client_column"),
        ([*RANKS, "--data", "nowhere"], "nowhere"),
    ],
    "maxvar": [
        (["--rank", "0"], "rank: wanted"),
        (["--rank", "99"], "rank: 99 orthonormal components"),
        (["--rank", "2", "--bits", "9"], "bits: wanted"),
        (["--rank", "2", "--views", "a", "d"], "holds a, b, c, not d"),
        (["--rank", "2", "--held-out", "1"], "--held-out: wanted"),
        (["--rank", "2", "--view-rank", "8"], "view_rank: wanted at most 7, got 8"),
        (["--rank", "2", "--batch-size", "4", "--solver", "exact"], "batch_size: wanted None"),
    ],
    "autoencoder": [
        (("--training", "local", "--initial-spread", 0.1), "--initial-spread: is for"),
        (("--training", "fedavg", "--published"), "--published: is for --training personalized"),
        (("--rounds", 0), "--rounds: wanted at least 1"),
        (("--momentum", 1), "--momentum: wanted from 0 to below 1"),
        (("--latent", 0), "latent: wanted a whole number of at least 1, got 0"),
        (("--local-steps", 0), "local_steps: wanted a whole number of at least 1"),
        (("--batch-size", 8), "batch_size: wanted at most the smallest client's"),
        (("--hyper-prior", 0), "hyper_prior: wanted a positive finite number"),
        (("--image-shape", "3x4"), "--image-shape: 3x4x1 has 12 values"),
        (("--clients-per-block", 2), "--clients-per-block: is for"),
    ],
    "diffusion": [
        (("--training", "local", "--initial-spread", 0.1), "--initial-spread: is for"),
        (("--training", "fedavg", "--published"), "--published: is for --training personalized"),
        (("--fine-tuning", 2), "--fine-tuning: is for --training fedavg, got personalized"),
        (("--training", "fedavg", "--decay-after", 2), "--decay-after: is not for --training"),
        (("--training", "fedavg", "--fine-tuning", -1), "--fine-tuning: wanted at least 0"),
        (("--rounds", 0), "--rounds: wanted at least 1"),
        (("--samples", 0), "--samples: wanted at least 1"),
        (("--local-steps", 0), "local_steps: wanted a whole number of at least 1"),
        (("--batch-size", 9), "batch_size: wanted at most the smallest client's"),
        (("--initial-spread", 0), "initial_spread: wanted a positive finite number"),
        (("--widths", 2, 0, 2), "widths: wanted a whole number of at least 1, got 0"),
        (("--image-shape", "2x8"), "image_shape: .* halved twice"),
        (("--clients-per-block", 2), "--clients-per-block: is for"),
    ],
}


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [(name, *mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_mistakes_are_told_in_one_line(
    data, pictures, coded, tmp_path, capsys, algorithm, options, message
):
    folders = {"perpca": data, "autoencoder": coded, "diffusion": pictures}
    if algorithm == "maxvar":
        (tmp_path / "views").mkdir()
        folders["maxvar"] = seen(tmp_path / "views")
    out = tmp_path / "out"
    assert fit(algorithm, folders[algorithm], out, *QUICK.get(algorithm, ()), *options) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert re.match(f"jaxfed: .*{message}", line)
    assert not (out / "result.npz").exists()
    # A run of the PCA family begins before its algorithm sees the rounds and who takes part.
    assert algorithm == "perpca" or (captured.out == "" and not out.exists())


def test_a_folder_that_cannot_be_made_is_told_in_one_line(data, tmp_path, capsys):
    (tmp_path / "file").touch()
    line = refused(capsys, fit("perpca", data, tmp_path / "file" / "out", *RANKS))
    assert line == f"jaxfed: {tmp_path}/file/out: Not a directory"


def test_numbers_that_overflow_are_told_in_one_line(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    huge = written(tmp_path / "data", scale=1e20)
    assert fit("perpca", huge, tmp_path / "out", *RANKS) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a message is not finite in round 1" in line


@pytest.mark.slow
def test_a_missing_package_is_told_in_one_line(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = refused(capsys, fit("perpca", data, tmp_path / "out", *RANKS))
    assert "pip install 'jaxfed[plot]'" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [[], ["--center", "shared"], ["--scale", "shared"]])
def test_a_feature_with_most_of_the_energy_is_named(options, tmp_path, recwarn):
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for name in "ab":
        rows = rng.normal(size=(30, 3)) * [1, 100, 1]
        text = "\n".join(["iron,proline,zinc", *(",".join(map(str, row)) for row in rows)])
        (tmp_path / "data" / f"{name}.csv").write_text(text)
    ranks = ["--shared-rank", "1", "--local-rank", "1", "--rounds", "2"]
    assert fit("perpca", tmp_path / "data", tmp_path / "out", *ranks, *options) in (0, 3)
    said = " ".join(str(each.message) for each in recwarn)
    assert ("proline has 100 % of the energy" in said) == ("--scale" not in options)
    assert ("--center shared or local" in said) == (options == [])


@pytest.mark.parametrize(
    ("mean", "center", "warned"), [(9, (), True), (9, ("--center", "local"), False), (1, (), False)]
)
def test_means_with_most_of_the_energy_are_named(mean, center, warned, tmp_path, recwarn):
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for name in "ab":
        np.save(tmp_path / "data" / f"{name}.npy", rng.normal(mean, 1, size=(30, 3)))
    ranks = ["--shared-rank", "1", "--local-rank", "1", "--rounds", "2"]
    assert fit("perpca", tmp_path / "data", tmp_path / "out", *ranks, *center) in (0, 3)
    said = " ".join(str(each.message) for each in recwarn)
    assert ("the features' means have" in said) == warned
