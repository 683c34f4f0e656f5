import argparse
import contextlib
import hashlib
import inspect
import io
import itertools
import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

import jaxfed
from jaxfed import backend
from jaxfed.cli import _report, main
from jaxfed.cli._folder import Folder
from jaxfed.cli.fit import _common, _pca
from jaxfed.cli.fit._signature import descriptions
from jaxfed.cli.fit.pca import COMMANDS as pca_commands
from jaxfed.core.common.files import locked

# Most of the time goes into compiling: fits share ranks, data shapes and chunks of one round
# (those of less than a hundred rounds) wherever what is tested allows it.
RANKS = ["--shared-rank", "2", "--local-rank", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return written(tmp_path_factory.mktemp("data"))


def written(folder, scale=1.0):
    """Eight clients of 20 to 27 samples and 9 features: two shared, two own directions, noise."""
    rng = np.random.default_rng(0)

    def frame():
        return np.linalg.qr(rng.normal(size=(9, 2)))[0].T

    shared = frame()
    for i in range(8):
        scores = rng.normal(size=(2, 20 + i, 2))
        noise = 0.3 * rng.normal(size=(20 + i, 9))
        samples = 3 * scores[0] @ shared + 2 * scores[1] @ frame() + noise + 1
        np.save(folder / f"client{i}.npy", (scale * samples).astype(np.float32))
    return folder


def fit(algorithm, data, out, *options):
    return main(["fit", algorithm, "--data", str(data), "--out", str(out), *map(str, options)])


def loaded(folder):
    with np.load(folder / "result.npz") as arrays:
        return dict(arrays), json.loads((folder / "result.json").read_text())


def value(summary, name):
    (found,) = [row["value"] for row in summary["table"] if row["quantity"].startswith(name)]
    return found


def refused(capsys, code):
    """The one line that was said on standard error; nothing was computed."""
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    (line,) = captured.err.splitlines()
    return line


# --- demo ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    (folder / "notes.txt").write_text("what was here before")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["demo", "--out", str(folder), "--force"]) == 0
    return folder, out.getvalue(), err.getvalue()


def test_demo_compares_the_methods_on_held_out_images(demo):
    folder, printed, _ = demo
    arrays, summary = loaded(folder)
    held_out = {row["method"]: row["residual, held out"] for row in summary["table"]}
    assert held_out["PerPCA"] < held_out["OneShot"] < min(held_out["Local"], held_out["Pooled"])
    assert all(method in printed for method in ("Local", "Pooled", "OneShot", "PerPCA"))
    assert arrays["shared"].shape == (64, 10) and arrays["local"].shape == (50, 64, 2)
    assert sorted({len(classes) for classes in summary["classes"]}) == [1, 2]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_shows_what_the_demo_prints(demo):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for row in loaded(demo[0])[1]["table"]:
        (line,) = re.findall(rf"^\| {row['method']}: .*$", readme, re.M)
        printed = [float(cell) for cell in line.split("|")[2:4]]
        computed = [row["residual, training"], row["residual, held out"]]
        # One digit is printed; processors differ by less than 1e-5.
        np.testing.assert_allclose(printed, computed, atol=0.05 + 1e-3)


def test_without_a_terminal_there_is_no_progress_bar(demo):
    assert demo[2] == ""


def test_demo_overwrites_only_its_own_and_only_when_told_to(demo, capsys):
    folder, *_ = demo
    assert (folder / "notes.txt").read_text() == "what was here before"
    before = (folder / "result.json").read_bytes()
    line = refused(capsys, main(["demo", "--out", str(folder)]))
    assert line.startswith("jaxfed: --out") and "--force" in line
    assert (folder / "result.json").read_bytes() == before


# --- fit -------------------------------------------------------------------------------------


def test_fit_writes_components_history_table_and_pictures(data, tmp_path, capsys):
    out = tmp_path / "out"
    assert fit("perpca", data, out, *RANKS, "--rounds", 30, "--center") == 0
    arrays, summary = loaded(out)
    frames = np.concatenate([np.repeat(arrays["shared"][None], 8, 0), arrays["local"]], axis=2)
    identity = np.broadcast_to(np.eye(4), (8, 4, 4))
    np.testing.assert_allclose(frames.mT @ frames, identity, atol=4e-5)
    assert arrays["names"].tolist() == [f"client{i}" for i in range(8)]
    assert arrays["history_objective"].shape == (30,)
    assert np.all(np.abs(arrays["mean"] - 1) < 3) and np.ptp(arrays["mean"], axis=0).min() > 0
    assert summary["samples"] == {f"client{i}": 20 + i - round((20 + i) / 5) for i in range(8)}
    assert summary["settings"]["center"] == "own" and "jax" in summary["versions"]
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
        (["varpro", *RANKS, "--rounds", "5"], {"shared": (9, 2), "local": (8, 9, 2)}),
        (
            ["hierarchical", "--rank", "2", "--noise-variance", "0.5", "--prior-variance", "0.1",
             "--rounds", "2", "--solver", "eigenvectors"],
            {"shared": (9, 2), "local": (8, 9, 2)},
        ),
        (["block-lanczos", "--rank", "2", "--rounds", "3"], {"shared": (9, 2)}),
    ],
)  # fmt: skip
def test_other_algorithms(data, tmp_path, command, shapes):
    assert fit(command[0], data, tmp_path / "out", *command[1:]) == 0
    arrays, summary = loaded(tmp_path / "out")
    # What a method does not learn is not in the file.
    assert {k: arrays[k].shape for k in arrays if k in ("shared", "local")} == shapes
    assert (value(summary, "error on held-out") is None) == ("0" in command)


def test_every_exported_algorithm_has_a_command_with_all_its_settings(capsys):
    commands = {command.made: name for name, command in pca_commands.items()}
    exported = {
        found
        for found in vars(jaxfed.pca).values()
        if isinstance(found, type) and issubclass(found, jaxfed.Algorithm)
    }
    assert exported == set(commands)
    for made, name in commands.items():
        with pytest.raises(SystemExit):
            main(["fit", name, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        about = descriptions(made)
        assert about.keys() == inspect.signature(made).parameters.keys()
        for setting in about.keys() - {"training"}:  # which is deprecated
            assert f"--{setting.replace('_', '-')}" in shown
            words = about[setting].replace("`", "").split()[:2]
            assert setting == "start" or " ".join(words) in shown, setting


def test_what_was_learned_is_shown_and_used(data, tmp_path, capsys):
    assert fit("oneshot", data, tmp_path / "fit", *RANKS, "--held-out", "0", "--center") == 0
    saved = jaxfed.load(tmp_path / "fit" / "result.npz")
    assert saved.result.local.shape == (8, 9, 2) and saved.algorithm.startswith("OneShot(")
    capsys.readouterr()
    assert main(["info", str(tmp_path / "fit")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("algorithm") and "error on training samples" in shown

    command = ["transform", str(tmp_path / "fit"), "--data", str(data), "--out"]
    assert main([*command, str(tmp_path / "scores")]) == 0
    with np.load(tmp_path / "scores" / "result.npz") as found:
        assert found["names"].tolist() == [f"client{i}" for i in range(8)]
        own = found["scores"][found["client"] == 3]
        anomaly = found["anomaly"][found["client"] == 3]
    samples = np.load(data / "client3.npy")
    samples = samples - samples.mean(axis=0)
    basis = np.concatenate([saved.result.shared, saved.result.local[3]], axis=1)
    np.testing.assert_allclose(own, samples @ basis, atol=1e-4)
    left = np.sum(samples**2, axis=1) - np.sum(own**2, axis=1)
    np.testing.assert_allclose(anomaly, left, atol=1e-3)

    new = tmp_path / "new"
    new.mkdir()
    np.save(new / "stranger.npy", np.load(data / "client3.npy"))
    command = ["transform", str(tmp_path / "fit"), "--data", str(new), "--out"]
    capsys.readouterr()
    assert "--personalize" in refused(capsys, main([*command, str(tmp_path / "other")]))
    assert main([*command, str(tmp_path / "other"), "--personalize"]) == 0
    assert "stranger" in capsys.readouterr().out
    assert "not a file" in refused(capsys, main(["info", str(data / "client0.npy")]))


def test_a_warm_start_is_another_algorithms_solution(data, tmp_path):
    assert fit("oneshot", data, tmp_path / "one", *RANKS) == 0
    options = [*RANKS, "--rounds", 1, "--start", "projector"]
    assert fit("perpca", data, tmp_path / "per", *options) == 0
    (_, one), (arrays, per) = loaded(tmp_path / "one"), loaded(tmp_path / "per")
    np.testing.assert_allclose(arrays["history_objective"][0], value(one, "objective"), rtol=1e-4)
    # Four components for the start, then the largest eigenvalue and two components.
    assert value(per, "bits sent") == 32 * (9 * 4 + 1 + 9 * 2)


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
    assert repr(_common.chosen_backend(argparse.Namespace(backend=name, chunk_size=size))) == repr(
        wanted
    )


def test_one_table_holds_all_clients(tmp_path, key):
    rng = np.random.default_rng(0)
    rows = [f"{place},{a},{b},{c}" for place in "xyx" for a, b, c in rng.normal(size=(5, 3))]
    (tmp_path / "all.csv").write_text("\n".join(["place,a,b,c", *rows]))
    options = {"data": tmp_path / "all.csv", "client_column": "place", "held_out": 0.2}
    options["max_bytes"] = 1
    split = _pca._read(argparse.Namespace(**options, center="common"), key)
    assert split.names == ["x", "y"]
    assert [len(samples) for samples in (*split.train, *split.held_out)] == [8, 4, 2, 1]
    np.testing.assert_array_equal(split.mean[0], split.mean[1])
    np.testing.assert_allclose(np.concatenate(split.train).mean(axis=0), 0, atol=1e-15)
    values = np.sort(np.concatenate([*split.train, *split.held_out]) + split.mean[0], axis=0)
    everything = np.sort([[float(cell) for cell in row.split(",")[1:]] for row in rows], axis=0)
    np.testing.assert_allclose(values, everything, rtol=1e-12)


@pytest.mark.slow
def test_a_killed_run_ends_where_the_uninterrupted_one_does(data, tmp_path, capsys):
    out, whole = tmp_path / "killed", tmp_path / "whole"
    options = [*RANKS, "--rounds", "90", "--checkpoint-every", "3"]
    command = [sys.executable, "-m", "jaxfed", "fit", "perpca", "--data", data, *options]
    process = subprocess.Popen([*map(str, command), "--out", str(out)], stdout=subprocess.DEVNULL)
    rounds = out / "checkpoint" / "rounds"
    deadline = time.monotonic() + 200
    while not (rounds.is_dir() and any(entry.name.isdigit() for entry in rounds.iterdir())):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "result.json").exists()
    capsys.readouterr()

    # Not with another algorithm, other settings or other data.
    assert fit("varpro", data, out, *RANKS) == 2
    assert "algorithm was PerPCA(" in capsys.readouterr().err
    assert fit("perpca", data, out, *options, "--tol", "1e-3") == 2
    assert "belongs to another run: tol was None" in capsys.readouterr().err
    assert fit("perpca", data, out, *options, "--center") == 2
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

assert interrupted(signal.SIGTERM, "1") == 143
sys.exit(interrupted(signal.SIGINT, "3"))
"""


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
    assert all(entry.name.isdigit() for entry in rounds.iterdir())  # whole
    assert fit("perpca", data, out, *options) == 0
    assert "Taking up the run" in capsys.readouterr().out
    options[-1] = "15"
    assert fit("perpca", data, tmp_path / "whole", *options) == 0
    assert (out / "result.npz").read_bytes() == (tmp_path / "whole" / "result.npz").read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_garbage_swallows_is_heeded(monkeypatch, capsys, number, code):
    class Garbage:
        def __del__(self):
            signal.raise_signal(number)

    def run(_):
        Garbage()
        time.sleep(5)
        return 0

    monkeypatch.setattr("jaxfed.cli.info.run", run)
    # A shell has what it starts in the background ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["info", "result"]) == code
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


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
    assert (tmp_path / "checkpoint" / "rounds" / "6").exists()
    capsys.readouterr()
    assert fit("perpca", data, tmp_path, *options) == 0
    assert "Taking up" in capsys.readouterr().out
    assert (tmp_path / "result.npz").read_bytes() == result
    (tmp_path / "result.json").unlink()
    assert fit("perpca", data, tmp_path, *options, "--center") == 0
    assert (tmp_path / "result.npz").read_bytes() != result


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shared-rank", "0", "--local-rank", "1"], "shared_rank: wanted"),
        (["--shared-rank", "8", "--local-rank", "8"], "do not fit into 9 features"),
        ([*RANKS, "--rounds", "0"], "rounds: wanted"),
        ([*RANKS, "--participation", "99"], "participation: 99 clients"),
        ([*RANKS, "--held-out", "1"], "--held-out: wanted"),
        ([*RANKS, "--chunk-size", "4"], "--chunk-size: is for"),
        ([*RANKS, "--backend", "chunked", "--chunk-size", "0"], "chunked size: wanted"),
        ([*RANKS, "--image-shape", "2x3"], "--image-shape: 2x3 is 6 pixels"),
        ([*RANKS, "--step-size", "-1"], "step_size: wanted"),
        ([*RANKS, "--checkpoint-every", "0"], "every: wanted"),
        ([*RANKS, "--client-column", "place"], "client_column"),
        ([*RANKS, "--data", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_told_in_one_line(data, tmp_path, capsys, options, message):
    code = fit("perpca", data, tmp_path / "out", *options)
    captured = capsys.readouterr()
    assert code == 2
    (line,) = captured.err.splitlines()
    assert line.startswith("jaxfed: ") and message in line
    assert not (tmp_path / "out" / "result.npz").exists()


def test_a_folder_that_cannot_be_made_is_told_in_one_line(data, tmp_path, capsys):
    (tmp_path / "file").touch()
    line = refused(capsys, fit("perpca", data, tmp_path / "file" / "out", *RANKS))
    assert line == f"jaxfed: {tmp_path}/file/out: Not a directory"


def test_numbers_that_overflow_are_told_in_one_line(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    huge = written(tmp_path / "data", scale=1e20)
    assert fit("perpca", huge, tmp_path / "out", *RANKS) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the objective is" in line and "in round 1" in line


def test_a_missing_package_is_told_in_one_line(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = refused(capsys, fit("perpca", data, tmp_path / "out", *RANKS))
    assert "pip install 'jaxfed[plot]'" in line
    assert not (tmp_path / "out").exists()


# --- sweep -----------------------------------------------------------------------------------

SWEEP = ["sweep", "hierarchical", "--rank", "2", "--rounds", "3"]
SMALL = [*SWEEP, "--features", "6", "--clients", "5", "--seeds", "2", "--block", "1"]
METHODS = ("Local", "Pooled", "HierarchicalPCA")


def test_sweep_simulated_clients(tmp_path, capsys):
    options = ["--prior-variance", "0.01", "1", "--samples", "4", "9"]
    assert main([*SMALL, *options, "--out", str(tmp_path / "out")]) == 0
    arrays, summary = loaded(tmp_path / "out")
    np.testing.assert_allclose(arrays["prior_variance"], [0.01, 1])
    assert [arrays[name].tolist() for name in ("samples", "clients", "seed")] == [
        [4, 9],
        [5],
        [0, 1],
    ]
    errors = {name: arrays[f"error {name}"] for name in METHODS}
    assert all(values.shape == (2, 2, 1, 2) for values in errors.values())
    assert all(values.min() >= 1 - 1e-6 for values in errors.values())
    # Sharing helps where clients are alike; more samples help each client alone.
    assert np.all(errors["Pooled"][0] < errors["Local"][0])
    local = errors["Local"].mean(axis=(0, 3))
    assert local[1] < local[0]
    assert len(summary["table"]) == 4
    row = summary["table"][1]
    assert (row["prior variance"], row["samples"], row["clients"]) == (0.01, 9, 5)
    found = errors["HierarchicalPCA"][0, 1, 0]
    np.testing.assert_allclose(row["HierarchicalPCA"], found.mean(), rtol=1e-6)
    np.testing.assert_allclose(row["HierarchicalPCA, sd"], found.std(ddof=1), rtol=1e-4)
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert f"{row['HierarchicalPCA']:.4g} ± " in capsys.readouterr().out


def test_sweep_your_own_files(data, tmp_path, capsys):
    options = ["--data", str(data), "--prior-variance", "0.1", "--clients", "4", "8"]
    out = tmp_path / "out"
    assert main([*SWEEP, *options, "--seeds", "1", "--center", "--out", str(out)]) == 0
    arrays, summary = loaded(out)
    assert arrays["samples"].tolist() == [22]  # 27 less a fifth
    # Four clients alone do not change when others join, and each has a fifth held out.
    fit("local", data, tmp_path / "local", "--rank", 2, "--center")
    wanted = value(loaded(tmp_path / "local")[1], "error on held-out")
    np.testing.assert_allclose(arrays["error Local"][0, 0, 1, 0], wanted, rtol=1e-4)
    assert summary["table"][0]["Local, sd"] is None
    errors = [arrays[f"error {name}"] for name in METHODS]
    assert np.min(errors) > 0 and np.max(errors) < 100
    capsys.readouterr()
    assert "not empty" in refused(capsys, main([*SWEEP, *options, "--out", str(out)]))


@pytest.mark.slow
def test_a_killed_sweep_ends_where_the_uninterrupted_one_does(tmp_path, capsys):
    out, whole = tmp_path / "killed", tmp_path / "whole"
    variances = [str(0.01 * (i + 1)) for i in range(100)]
    options = [*SMALL, "--samples", "4", "9", "--prior-variance", *variances]
    command = [sys.executable, "-m", "jaxfed", *options, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (out / "checkpoint" / "00000003.npz").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "result.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in (out / "checkpoint").glob("[0-9]*.npz")}
    assert 4 <= len(kept) < 400
    capsys.readouterr()

    # Not with other points, another model or other data.
    assert main([*options, "3.0", "--out", str(out)]) == 2
    assert "holds another grid; its axes" in capsys.readouterr().err
    assert main([*options, "--rounds", "4", "--out", str(out)]) == 2
    assert "holds a grid of another computation" in capsys.readouterr().err

    # Not while another process is at it, whatever is said.
    with locked(out / "checkpoint", "folder"):
        assert main([*options, "--force", "--out", str(out)]) == 2
        assert "is in use by process" in capsys.readouterr().err

    assert main([*options, "--out", str(out)]) == 0
    assert "Taking up the sweep" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert main([*options, "--out", str(whole)]) == 0
    assert (out / "result.npz").read_bytes() == (whole / "result.npz").read_bytes()
    assert main([*options, "--out", str(out)]) == 2  # complete
    (out / "result.json").unlink()
    assert main([*options, "3.0", "--force", "--out", str(out)]) == 0  # another one's
    assert len(loaded(out)[0]["prior_variance"]) == 101


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prior-variance", "0.1", "-1"], "prior_variance: wanted"),
        (["--prior-variance", "0.1", "--seeds", "0"], "--seeds: wanted a positive"),
        (["--prior-variance", "0.1", "--samples", "0", "4"], "--samples: wanted numbers from 1"),
        (["--prior-variance", "0.1", "--rank", "6"], "rank: wanted less than the features"),
        (["--prior-variance", "0.1", "--block", "0"], "block: wanted a whole number of at least 1"),
        (["--prior-variance", "0.1", "--noise-variance", "0"], "noise_variance: wanted"),
        (["--prior-variance", "0.1", "--data", "nowhere"], "nowhere"),
        (["--prior-variance", "0.1", "--data", "nowhere", "--held-out", "0"], "--held-out: wanted"),
    ],
)
def test_mistakes_of_a_sweep_are_told_in_one_line(tmp_path, capsys, options, message):
    assert main([*SMALL, *options, "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxfed: ") and message in line
    assert not (tmp_path / "out" / "result.npz").exists()


# --- fit gcca --------------------------------------------------------------------------------


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
    assert fit("gcca", views, out, *options) == 0
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
    assert fit("gcca", views, out, *options) == 0
    assert "Taking up" in capsys.readouterr().out
    assert (out / "result.npz").read_bytes() == before


def test_fit_mvlsa_is_one_round(tmp_path):
    assert fit("mvlsa", seen(tmp_path), tmp_path / "out", "--rank", 2) == 0
    arrays, summary = loaded(tmp_path / "out")
    assert value(summary, "rounds") == 1 and arrays["shared"].shape[1] == 2
    assert jaxfed.load(tmp_path / "out" / "result.npz").algorithm.startswith("MVLSA(")


def test_fit_gcca_takes_sparse_views_for_what_they_are(tmp_path):
    for name in ("dense", "sparse"):
        (tmp_path / name).mkdir()
        views = seen(tmp_path / name, sparse=name == "sparse")
        options = ["--rank", 2, "--rounds", 3, "--view-rank", 4]
        assert fit("gcca", views, tmp_path / f"{name} out", *options) == 0
    dense, sparse = loaded(tmp_path / "dense out"), loaded(tmp_path / "sparse out")
    for name in ("shared", "mean", "scale", "history_objective"):
        np.testing.assert_allclose(sparse[0][name], dense[0][name], atol=2e-4)
    assert value(sparse[1], "least cost") is None and value(dense[1], "least cost") > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "0"], "rank: wanted"),
        (["--rank", "99"], "rank: 99 orthonormal components"),
        (["--rank", "2", "--bits", "9"], "bits: wanted"),
        (["--rank", "2", "--views", "a", "d"], "holds a, b, c, not d"),
        (["--rank", "2", "--held-out", "1"], "--held-out: wanted"),
        (["--rank", "2", "--view-rank", "8"], "view_rank: wanted at most 7, got 8"),
        (["--rank", "2", "--batch-size", "4", "--solver", "exact"], "batch_size: solver"),
    ],
)
def test_mistakes_about_views_are_told_in_one_line(tmp_path, capsys, options, message):
    line = refused(capsys, fit("gcca", seen(tmp_path), tmp_path / "out", *options))
    assert line.startswith("jaxfed: ") and message in line
    assert not (tmp_path / "out").exists()


# --- the rest --------------------------------------------------------------------------------


COMMANDS = [
    ["fit"], ["fit", "perpca"], ["fit", "mvlsa"], ["demo"], ["reproduce"],
    ["sweep", "hierarchical"], ["info"], ["transform"],
]  # fmt: skip


@pytest.mark.parametrize("command", [[], *COMMANDS])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    assert " ".join(["usage: jaxfed", *command]) in capsys.readouterr().out


@pytest.mark.parametrize("command", [[], ["unknown"], ["fit"], ["fit", "perpca"], ["demo", "-x"]])
def test_wrong_usage(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2
    assert "usage: jaxfed" in capsys.readouterr().err


def test_reproduce_is_a_command(capsys):
    assert "no-such-target" in refused(capsys, main(["reproduce", "no-such-target"]))


def test_tables_are_aligned():
    rows = [{"method": "Local", "error": 1234.5678}, {"method": "Pooled", "error": None}]
    assert _report.table(rows).splitlines() == [
        "method  error",
        "------  -----",
        "Local    1235",
        "Pooled",
    ]


def test_tables_move_no_cursor():
    rows = [{"client\x1b[2J": "a\nb", "error": 1.0}]
    assert _report.table(rows).splitlines()[::2] == [
        r"client\x1b[2J  error",
        "a\\nb               1",
    ]


# --- the folder of results -------------------------------------------------------------------


def results(folder, *, force=False, checkpoint=True, fail=False):
    """What a command does with its folder; the names of the files that it leaves."""
    results = Folder(folder)
    names = ["picture.png", *(["checkpoint"] if checkpoint else [])]
    results.check(names, force=force, resumable=checkpoint)
    results.begin(resume=results.interrupted)
    if checkpoint:
        results.begin_checkpoint()
        (folder / "checkpoint" / "rounds" / "5").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint" / "rounds" / "5" / "part").write_text("saved")
    if fail:
        return None
    for name in ("picture.png", "result.npz", "result.json"):
        with results.writing(name) as part:
            part.write_text(f"{name} of jaxfed")
    return snapshot(folder)


def snapshot(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"  # which means nothing once it is released
    }


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        ["fit", "perpca", "--data", "nowhere", *RANKS],
        ["fit", "pooled", "--data", "nowhere", "--rank", "2"],
        ["fit", "gcca", "--data", "nowhere", "--rank", "2"],
        ["fit", "deep-gcca", "--data", "nowhere", "--rank", "2"],
        ["fit", "autoencoder", "--data", "nowhere", "--latent", "2"],
        ["fit", "diffusion", "--data", "nowhere"],
        ["sweep", "hierarchical", "--prior-variance", "1"],
        ["reproduce", "perpca/table2"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_no_command_takes_a_folder_of_others_for_its_own(tmp_path, capsys, command, force):
    names = ["components.png", "convergence.png", "agreement.png", "demo.png", "sweep.png"]
    names += [
        "reconstructions.png",
        "samples.png",
        "table.csv",
        "result.npz",
        "checkpoint/model.pt",
    ]
    (tmp_path / "checkpoint").mkdir()
    for name in names:
        (tmp_path / name).write_text("mine")
    line = refused(capsys, main([*command, "--out", str(tmp_path), *force]))
    assert ("was not written by jaxfed" if force else "is not empty") in line
    assert snapshot(tmp_path) == dict.fromkeys(names, b"mine")


def test_the_manifest_lists_what_was_written(tmp_path):
    out = tmp_path / "out"
    left = results(out)
    listed = json.loads(left.pop("manifest.json"))["files"]
    del left["checkpoint/rounds/5/part"]
    assert set(listed) == set(left) and len(left) == 4
    for name, content in left.items():
        digest = hashlib.sha256(content).hexdigest()
        assert listed[name] == {"bytes": len(content), "sha256": digest}


FOREIGN = [
    "picture.png", "result.npz", "result.json", "manifest.json", "checkpoint/model.pt",
    "checkpoint/rounds/7/weights",
]  # fmt: skip


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_others_are_refused_and_left(tmp_path, name, force):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"^--out: .* (is not empty|was not written by jaxfed)"):
        results(tmp_path, force=force)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", FOREIGN[:4])
def test_what_was_changed_since_is_no_result_any_more(tmp_path, name):
    results(tmp_path)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-9] + b"annotated")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=rf"{name} was not written by jaxfed, or has changed"):
        results(tmp_path, force=True)
    assert snapshot(tmp_path) == before


def test_force_replaces_results_and_leaves_the_rest(tmp_path):
    others = {"notes.txt", "checkpoint/model.pt", "checkpoint/rounds/mine"}
    whole = results(tmp_path)
    for name in others:
        (tmp_path / name).write_text("mine")
    stale = tmp_path / "checkpoint" / "rounds" / "3"
    stale.mkdir()
    with pytest.raises(ValueError, match="is not empty"):
        results(tmp_path)
    assert results(tmp_path, force=True) == whole | dict.fromkeys(others, b"mine")
    assert not stale.exists()
    # Another command: pictures and rounds of the one before are gone.
    with Folder(tmp_path).writing("other.png") as part:
        part.write_text("other")
    left = results(tmp_path, force=True, checkpoint=False)
    assert left.keys() == whole.keys() - {"checkpoint/rounds/5/part"} | others


def test_files_of_others_in_an_interrupted_run_are_refused_and_left(tmp_path):
    results(tmp_path, fail=True)
    (tmp_path / "picture.png").write_text("mine")
    for force in (False, True):
        with pytest.raises(ValueError, match=r"picture\.png was not written by jaxfed"):
            results(tmp_path, force=force)
    assert (tmp_path / "picture.png").read_text() == "mine"


def test_a_file_that_comes_while_a_run_goes_on_is_left(tmp_path):
    folder = Folder(tmp_path)
    folder.begin()
    (tmp_path / "result.npz").write_text("mine")
    with pytest.raises(ValueError, match="was not written by jaxfed"), folder.writing("result.npz"):
        pass
    assert (tmp_path / "result.npz").read_text() == "mine"


def test_a_link_is_no_result(tmp_path):
    out = tmp_path / "out"
    results(out)
    (out / "picture.png").rename(tmp_path / "elsewhere.png")
    (out / "picture.png").symlink_to(tmp_path / "elsewhere.png")
    with pytest.raises(ValueError, match=r"picture\.png was not written by jaxfed"):
        results(out, force=True)


def test_a_folder_in_which_another_process_works_is_left(tmp_path):
    results(tmp_path)
    with locked(tmp_path / "checkpoint", "folder"):
        before = snapshot(tmp_path)
        with pytest.raises(BlockingIOError, match=r"^--out: .* is in use by process"):
            results(tmp_path, force=True)
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["../mine", "/mine", "checkpoint/../../mine"])
def test_a_manifest_reaches_nothing_outside(tmp_path, name):
    out = tmp_path / "out"
    results(out)
    (tmp_path / "mine").write_text("mine")
    described = json.loads((out / "manifest.json").read_text())
    entry = {"bytes": 4, "sha256": hashlib.sha256(b"mine").hexdigest()}
    described["files"][str(tmp_path / "mine") if name == "/mine" else name] = entry
    (out / "manifest.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"manifest\.json was not written by jaxfed"):
        results(out, force=True)
    assert (tmp_path / "mine").exists()


class Kill(BaseException):
    """What ends a process in these tests."""


def test_a_process_that_is_killed_at_any_step_can_be_run_again(tmp_path, monkeypatch):
    # Before and after everything that changes the folder; a killed process cleans up nothing.
    def killed_at(step, folder, **options):
        count = 0

        def dying(function):
            def call(*arguments, **keywords):
                nonlocal count
                count += 1
                if count > step:
                    raise Kill
                return function(*arguments, **keywords)

            return call

        with monkeypatch.context() as patched:
            for name in ("mkdir", "replace", "write_text", "unlink"):
                patched.setattr(Path, name, dying(getattr(Path, name)))
            with contextlib.suppress(Kill):
                results(folder, **options)
                return True
        return False

    wanted = results(tmp_path / "whole")
    steps = itertools.count()
    while not killed_at(step := next(steps), folder := tmp_path / f"killed{step}"):
        complete = (folder / "result.json").exists()
        assert (snapshot(folder) if complete else results(folder)) == wanted, step
    assert step > 15
    steps = itertools.count()
    while not killed_at(step := next(steps), folder, force=True):
        assert results(folder, force=True) == wanted, step
    assert step > 15


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        Folder(tmp_path / "out").check([], force=True)


def test_deploy_writes_an_app_that_flower_takes(tmp_path, capsys):
    flwr = pytest.importorskip("flwr.supercore.object_ref")
    app = tmp_path / "app"
    settings = ["--set", "shared_rank=2", "local_rank=1", "variant=polar"]
    command = ["deploy", "new", str(app), "--algorithm", "PerPCA"]
    assert main([*command, *settings, "--rounds", "7"]) == 0
    assert "federation/app.py" in capsys.readouterr().out
    for component in ("server", "client"):
        assert flwr.validate(f"federation.app:{component}", project_dir=app)[0]
    names = {}
    exec((app / "federation" / "app.py").read_text(), names)
    made = names["make_algorithm"]({})
    assert made.shared_rank == 2 and made.variant == "polar"
    np.save(tmp_path / "own.npy", np.ones((4, 6), np.float32))
    assert len(names["make_data"]({"data": str(tmp_path / "own.npy")})) == 1
    assert "empty" in refused(capsys, main([*command, *settings]))
    command[2] = str(tmp_path / "other")
    assert "local_rank=VALUE" in refused(capsys, main([*command, "--set", "shared_rank=2"]))
    assert "one of" in refused(capsys, main([*command, "--set", "rank=2"]))
    command[-1] = "kmeans"
    assert "algorithm: wanted one of" in refused(capsys, main(command))
    trial = ["deploy", "try", "--app", str(app), "--data", str(tmp_path)]
    assert "file for each of 3 nodes, got 1" in refused(capsys, main(trial))


@pytest.fixture
def app(tmp_path, capsys, monkeypatch):
    """An app folder, data for one node, and the command that tries it as far as Flower."""
    local = pytest.importorskip("jaxfed.deploy.local")

    def start(*arguments):
        raise ValueError("Flower starts")

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "federation"]:
            del sys.modules[name]

    monkeypatch.setattr(local, "Local", start)
    folder = tmp_path / "app"
    main(["deploy", "new", str(folder), "--algorithm", "pooled", "--set", "rank=2"])
    np.save(tmp_path / "own.npy", np.ones((4, 6), np.float32))
    capsys.readouterr()
    path = list(sys.path)

    def trial():
        code = main(
            ["deploy", "try", "--app", str(folder), "--data", str(tmp_path), "--nodes", "1"]
        )
        forget()
        assert sys.path == path
        return code, capsys.readouterr().err

    forget()
    return folder, trial


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("federation/app.py", "make_data)", "make_data, channel=jf.channel.secure_sum())",
         "TypeError: secure_sum() missing 1 required positional argument: 'clients'"),
        ("federation/app.py", "import numpy", "import nowhere", "No module named 'nowhere'"),
        ("federation/app.py", "server =", "service =", "no attribute 'server'"),
        ("federation/app.py", "def ", "deaf ", "SyntaxError: invalid syntax"),
        ("pyproject.toml", "serverapp =", "serverap =", "KeyError: 'serverapp'"),
        ("pyproject.toml", "[tool.flwr.app.components]", "[components]", "KeyError: 'components'"),
    ],
    ids=("argument", "module", "name", "syntax", "component", "table"),
)  # fmt: skip
def test_deploy_imports_an_app_before_it_starts_flower(app, file, old, new, words):
    folder, trial = app
    path = folder / file
    path.write_text(path.read_text().replace(old, new))
    code, said = trial()
    assert code == 2 and f"app: wanted one that can be imported, got {folder}" in said
    assert words in said and "Flower starts" not in said


def test_deploy_starts_flower_for_an_app_that_can_be_imported(app):
    code, said = app[1]()
    assert code == 2 and "Flower starts" in said


def test_an_app_holds_no_path_of_the_machine_that_wrote_it(tmp_path, app, monkeypatch):
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    assert main(["deploy", "new", ".", "--algorithm", "pooled", "--set", "rank=2"]) == 0
    for folder in (app[0], tmp_path / "new"):
        for path in (folder / "pyproject.toml", folder / "federation" / "app.py"):
            assert str(tmp_path) not in path.read_text()
        with (folder / "pyproject.toml").open("rb") as file:
            out = tomllib.load(file)["tool"]["flwr"]["app"]["config"]["out"]
        assert out == f"{folder.name}/out"
