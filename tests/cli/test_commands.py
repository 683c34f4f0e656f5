"""Commands beside `jaxfed fit`, and what all have: help, options from files, completion, tables."""

import contextlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from typing import get_args

import numpy as np
import pytest
from cyclopts import CoercionError, Token

import jaxfed as jf
from jaxfed.cli import _app, _report, main
from jaxfed.cli._options import descriptions
from jaxfed.cli.fit import pca
from jaxfed.cli.fit._shares import ABOUT
from jaxfed.core.common.files import locked
from jaxfed.core.store import saved
from tests.cli.command_line import fit, loaded, parsed, refused, run, value, written
from tests.helpers import ROOT


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return written(tmp_path_factory.mktemp("data"))


# --- demo ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    (folder / "notes.txt").write_text("what was here before")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(["demo", "--out", str(folder), "--force"]) == 0
    return folder, out.getvalue(), err.getvalue()


@pytest.mark.slow
def test_demo_compares_the_methods_on_held_out_images(demo):
    folder, printed, _ = demo
    arrays, summary = loaded(folder)
    held_out = {row["method"]: row["residual, held out"] for row in summary["table"]}
    assert held_out["PerPCA"] < held_out["OneShot"] < min(held_out["Local"], held_out["Pooled"])
    assert all(method in printed for method in ("Local", "Pooled", "OneShot", "PerPCA"))
    assert arrays["shared"].shape == (64, 10) and arrays["local"].shape == (50, 64, 2)
    assert sorted({len(classes) for classes in summary["classes"]}) == [1, 2]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_readme_shows_what_the_demo_prints(demo):
    readme = (ROOT / "README.md").read_text()
    for row in loaded(demo[0])[1]["table"]:
        (line,) = re.findall(rf"^\| {row['method']}: .*$", readme, re.M)
        printed = [float(cell) for cell in line.split("|")[2:4]]
        computed = [row["residual, training"], row["residual, held out"]]
        # One digit is printed; processors differ by less than 1e-5.
        np.testing.assert_allclose(printed, computed, atol=0.05 + 1e-3)


@pytest.mark.slow
def test_without_a_terminal_there_is_no_progress_bar(demo):
    assert demo[2] == ""


def test_demo_overwrites_only_its_own_and_only_when_told_to(demo, capsys):
    folder, *_ = demo
    assert (folder / "notes.txt").read_text() == "what was here before"
    before = (folder / "result.json").read_bytes()
    line = refused(capsys, main(["demo", "--out", str(folder)]))
    assert line.startswith("jaxfed: --out") and "--force" in line
    assert (folder / "result.json").read_bytes() == before


# --- sweep -----------------------------------------------------------------------------------

SWEEP = ["sweep", "hierarchicalpca", "--rank", "2", "--rounds", "3"]
SMALL = [*SWEEP, "--features", "6", "--clients", "5", "--seeds", "2", "--runs-at-once", "1"]
METHODS = ("Local", "Pooled", "HierarchicalPCA")


@pytest.mark.slow
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


@pytest.mark.slow
def test_sweep_your_own_files(data, tmp_path, capsys):
    options = ["--data", str(data), "--prior-variance", "0.1", "--clients", "4", "8"]
    out = tmp_path / "out"
    assert main([*SWEEP, *options, "--seeds", "1", "--center", "local", "--out", str(out)]) == 0
    arrays, summary = loaded(out)
    assert arrays["samples"].tolist() == [22]  # 27 less a fifth
    # Four clients alone do not change when others join, and each has a fifth held out.
    fit("local", data, tmp_path / "local", "--rank", 2, "--center", "local")
    wanted = value(loaded(tmp_path / "local")[1], "error on held-out")
    np.testing.assert_allclose(arrays["error Local"][0, 0, 1, 0], wanted, rtol=1e-4)
    assert summary["table"][0]["Local, sd"] is None
    errors = [arrays[f"error {name}"] for name in METHODS]
    assert np.min(errors) > 0 and np.max(errors) < 100
    capsys.readouterr()
    assert "not empty" in refused(capsys, main([*SWEEP, *options, "--out", str(out)]))
    # Two components leave nothing of two samples to estimate the noise from.
    few = [*SWEEP, *options, "--samples", "2", "--out", str(tmp_path / "few")]
    assert "--noise-variance: wanted a number for 2" in refused(capsys, main(few))
    assert main([*few, "--seeds", "1", "--noise-variance", "0.1"]) == 0


@pytest.mark.slow
def test_a_sweep_of_files_in_single_precision_keeps_units(tmp_path):
    errors = []
    for dtype in (np.float32, np.float64):
        (tmp_path / dtype.__name__).mkdir()
        for i in range(3):
            x = np.random.default_rng(i).normal(size=(30, 5)) * [3e5, 2, 1, 0.3, 0.2]
            np.save(tmp_path / dtype.__name__ / f"{i}.npy", x.astype(np.float32).astype(dtype))
        options = ["--data", str(tmp_path / dtype.__name__), "--prior-variance", "0.1"]
        out = tmp_path / f"{dtype.__name__} out"
        assert main([*SWEEP, *options, "--seeds", "1", "--out", str(out)]) == 0
        errors.append([loaded(out)[0][f"error {name}"] for name in METHODS])
    np.testing.assert_allclose(*errors, rtol=1e-5)


@pytest.mark.slow
def test_a_sweep_of_one_setting_warns_of_what_double_precision_loses(tmp_path):
    (tmp_path / "data").mkdir()
    for i in range(3):
        x = np.random.default_rng(i).normal(size=(30, 5)) * [5, 2, 1, 0.3, 0.2] + 1e9
        np.save(tmp_path / "data" / f"{i}.npy", x)
    command = [*SWEEP, "--data", str(tmp_path / "data"), "--prior-variance", "0.1", "--seeds", "2"]
    with pytest.warns(jf.UnitsWarning, match=r"double precision tells apart"):
        assert main([*command, "--out", str(tmp_path / "raw")]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main([*command, "--center", "shared", "--out", str(tmp_path / "centred")]) == 0
    arrays, _ = loaded(tmp_path / "centred")
    assert arrays["error Local"].shape == (1, 1, 1, 2) and arrays["error Local"].min() > 0.1


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
    assert "belongs to another grid: axes" in capsys.readouterr().err
    assert main([*options, "--rounds", "4", "--out", str(out)]) == 2
    assert "belongs to another grid: computation differs" in capsys.readouterr().err

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
        (
            ["--prior-variance", "0.1", "--runs-at-once", "0"],
            "runs_at_once: wanted a whole number of at least 1",
        ),
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


# --- plan privacy ----------------------------------------------------------------------------

PLANNED = "plan privacy --clients 12 --features 20 --shared-variances 4 4 --noise-variance .09"
WITH_LOCAL = "--local-variances 2.25 2.25 --persons 500 --error 0.05"


def test_a_plan_of_privacy_has_the_errors_and_persons_of_the_formula(capsys):
    assert main(f"{PLANNED} {WITH_LOCAL} --epsilon .3 1 --delta 1e-6".split()) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    guess = {"shared_variances": (4, 4), "local_variances": (2.25, 2.25), "noise_variance": 0.09}
    guess["delta"] = 1e-6
    for line, epsilon in zip(lines, (0.3, 1.0, None), strict=False):
        *label, error, persons = line.split()
        assert label == (["no", "noise"] if epsilon is None else [f"{epsilon:g}"])
        wanted = jf.privacy.expected_error(500, 20, 12, epsilon=epsilon, **guess)
        assert float(error) == pytest.approx(wanted, rel=1e-3)
        wanted = jf.privacy.persons_needed(0.05, 20, 12, epsilon=epsilon, **guess)
        assert int(persons.replace(",", "")) == wanted
    assert lines[-1] == "Random components have the error 1.34."
    # Without local components, and for an error alone.
    assert main(f"{PLANNED} --error 0.05 --epsilon 1".split()) == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["1", "816"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--persons: wanted a number, or an error in --error, got neither"),
        ("--persons 3", "persons: wanted a whole number of at least 4, got 3"),
        ("--persons 500 --delta 1", "delta: wanted a number between 0 and 1, got 1.0"),
        ("--error 0", "error: wanted a positive finite number, got 0.0"),
        ("--persons 9 --picture a.png", "--picture: wanted --persons and several epsilons with it"),
    ],
)
def test_mistakes_of_a_plan_of_privacy_are_told_in_one_line(options, message, capsys):
    assert main(f"{PLANNED} --epsilon 1 {options}".split()) == 2
    assert capsys.readouterr().err.strip() == f"jaxfed: {message}"


def test_a_plan_of_privacy_is_drawn(tmp_path, capsys):
    path = tmp_path / "cost.svg"
    command = f"{PLANNED} --persons 500 --epsilon 1 .3 3 --picture".split()
    assert main([*command, str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    words = path.read_text("utf8")
    assert words.startswith("<?xml") and words.count("<path") > 10
    assert main([*command, str(path)]) == 2
    assert "--picture: wanted a file that does not exist" in capsys.readouterr().err
    assert main([*command, str(tmp_path / "cost.doc")]) == 2
    assert "--picture: wanted a .png, .svg or .pdf" in capsys.readouterr().err


# --- personalize -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """Five clients with one shared and one own direction, a result of four, the fifth's folder."""
    folder = tmp_path_factory.mktemp("personalize")
    rng = np.random.default_rng(0)
    shared = np.linalg.qr(rng.normal(size=(6, 1)))[0].T
    for name in ("old", "new"):
        (folder / name).mkdir()
    for i in range(5):
        own = np.linalg.qr(rng.normal(size=(6, 1)))[0].T
        x = 3 * rng.normal(size=(30, 1)) @ shared + 2 * rng.normal(size=(30, 1)) @ own + 5
        x += 0.1 * rng.normal(size=x.shape)
        np.save(folder / ("new" if i == 4 else "old") / f"c{i}.npy", x.astype(np.float32))
    command = ["fit", "oneshot", "--shared-rank", "1", "--local-rank", "1", "--center", "local"]
    command += ["--held-out", "0", "--data", str(folder / "old"), "--out", str(folder / "fit")]
    assert main(command) == 0
    return folder


@pytest.mark.slow
def test_new_clients_get_components_of_their_own(learned, tmp_path, capsys):
    command = ["personalize", str(learned / "fit"), "--data", str(learned / "new"), "--out"]
    assert main([*command, str(tmp_path / "out")]) == 0
    assert "c4" in capsys.readouterr().out
    before, after = (jf.load(path / "result.npz") for path in (learned / "fit", tmp_path / "out"))
    np.testing.assert_array_equal(after.result.shared, before.result.shared)
    samples = np.load(learned / "new" / "c4.npy")
    samples = samples - samples.mean(axis=0)
    # The best direction beside the shared one, which is the top eigenvector of what it leaves.
    rest = samples - samples @ before.result.shared @ before.result.shared.T
    best = np.linalg.svd(rest)[2][0]
    assert after.result.local.shape == (1, 6, 1) and after.clients == 1
    np.testing.assert_allclose(abs(best @ after.result.local[0, :, 0]), 1, atol=1e-5)
    (row,) = json.loads((tmp_path / "out" / "result.json").read_text())["table"]
    left = np.sum((rest - np.outer(rest @ best, best)) ** 2) / np.sum(samples**2)
    np.testing.assert_allclose(row["in neither (%)"], 100 * left, rtol=1e-2)
    # What was written is a result itself.
    options = ["--data", str(learned / "new"), "--out", str(tmp_path / "scores")]
    assert main(["transform", str(tmp_path / "out"), *options]) == 0
    assert main(["info", str(tmp_path / "out")]) == 0
    assert main([*command, str(tmp_path / "two"), "--local-rank", "2"]) == 0
    assert jf.load(tmp_path / "two" / "result.npz").result.local.shape == (1, 6, 2)


@pytest.mark.slow
def test_what_cannot_be_personalized_is_said(learned, tmp_path, capsys):
    with np.load(learned / "fit" / "result.npz") as stored:
        arrays = dict(stored)

    whole = jf.load(learned / "fit" / "result.npz")

    def attempt(preprocessing=whole.preprocessing, **parts):
        changed = whole._replace(result=whole.result._replace(**parts), preprocessing=preprocessing)
        np.savez(tmp_path / "other.npz", **(arrays | saved.entries(changed)))
        command = ["personalize", str(tmp_path / "other.npz"), "--data", str(learned / "new")]
        capsys.readouterr()
        return refused(capsys, run(*command, "--out", tmp_path / "out"))

    around = np.repeat(arrays["shared"][None], 4, axis=0)
    assert "by a prior that is not in it" in attempt(local=around)
    for part, message in (("shared", "no shared components"), ("local", "--local-rank: wanted")):
        assert message in attempt(**{part: None})
    assert "wanted what jaxfed fit wrote of the PCA family" in attempt(preprocessing=None)
    # The names are beside the result, which is whole.
    content = (learned / "fit" / "result.npz").read_bytes()
    names, others = (text.encode("utf-32-le") for text in ("c0c1c2c3", "c0c1c2cx"))
    assert content.count(names) == 1
    (tmp_path / "damaged.npz").write_bytes(content.replace(names, others))
    jf.load(tmp_path / "damaged.npz")
    command = ["personalize", tmp_path / "damaged.npz", "--data", learned / "new"]
    assert "names.npy" in refused(capsys, run(*command, "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# --- --config --------------------------------------------------------------------------------


FIT = ["fit", "perpca", "--data", "d", "--out", "o"]


@pytest.fixture
def config(tmp_path):
    def write(text):
        (tmp_path / "options.toml").write_text(text)
        return ["--config", str(tmp_path / "options.toml")]

    return write


def test_options_come_from_a_file_and_the_command_line_counts_first(config, monkeypatch):
    text = 'shared-rank = 2\nlocal-rank = 1\ntol = 1e-6\nshrinkage = true\ncenter = "shared"\n'
    found = parsed(monkeypatch, [*FIT, *config(text), "--local-rank", "3", "--tol=0.5"])
    assert (found.shared_rank, found.local_rank, found.tol) == (2, 3, 0.5)
    assert found.shrinkage and found.center == "shared" and not found.report
    # What is required may be in the file as well, and the option stand anywhere.
    more = 'data = "d"\nout = "o"\nshrinkage = false\n'
    found = parsed(
        monkeypatch, ["fit", "perpca", *config(text.replace("shrinkage", "force") + more)]
    )
    assert (str(found.data), found.force, found.shrinkage) == ("d", True, False)


def test_lists_and_negative_numbers_are_taken(config, monkeypatch):
    text = 'prior-variance = [0.1, 1]\nseeds = -3\nout = "-odd"\n'
    found = parsed(monkeypatch, ["sweep", "hierarchicalpca", *config(text)])
    assert found.prior_variance == [0.1, 1.0] and found.seeds == -3 and str(found.out) == "-odd"
    found = parsed(
        monkeypatch, ["sweep", "hierarchicalpca", *config(text), "--prior-variance", "7"]
    )
    assert found.prior_variance == [7.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnds = 2", r'Unknown option: "\[rnds\]" from .*options\.toml'),
        ("config = 'other'", r"--config: .*options\.toml has 'config', wanted options"),
        ("[fit]\nrounds = 2", r"--config: .*options\.toml has 'fit', wanted options"),
        ("help = true", "Unknown option: .*help"),
        ("shrinkage = 7", r"shrinkage.* from .*options\.toml"),
        ("rounds = [1, 2]", r"rounds.* from .*options\.toml: unable to convert"),
        ("rounds = true", r"rounds.* from .*options\.toml: unable to convert"),
        ("rounds = 2020-01-01", r"rounds.* from .*options\.toml: unable to convert"),
        ('rounds = "many"', r'rounds.* from .*options\.toml: unable to convert "many" into int'),
        ("rounds = ", "TOMLDecodeError"),
    ],
)
def test_what_does_not_fit_is_told_with_the_file(config, capsys, text, message):
    options = [*FIT, "--shared-rank", 1, "--local-rank", 1]
    assert re.search(rf"^jaxfed: .*{message}", refused(capsys, run(*options, *config(text))))


def test_a_file_that_is_not_there_is_named(capsys):
    assert "nowhere.toml" in refused(capsys, run(*FIT, "--config", "nowhere.toml"))


# --- completion ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "jaxfed.bash"
    command = [sys.executable, "-m", "jaxfed", "completion", "bash"]
    path.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return path


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p jaxfed | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.slow
def test_bash_completes_commands_options_and_choices(script, tmp_path):
    def offered(*words):
        command = ["bash", "-c", COMPLETE, "bash", str(script), "jaxfed", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        return set(done.stdout.split())

    assert offered("") == set(_app.COMMANDS)
    assert offered("fit", "perp") == {"perpca"}
    assert offered("fit", "perpca", "--shared") == {"--shared-rank"}
    assert offered("fit", "hmf", "--solver", "") == {"quasi_newton", "gradient"}
    assert "--config" in offered("sweep", "hierarchicalpca", "--co")
    (tmp_path / "data.npy").touch()
    assert "data.npy" in offered("fit", "perpca", "--data", "dat")


def test_without_cyclopts_one_is_told_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    assert "jaxfed[cli]" in refused(capsys, run("info", "x"))


# --- help and tables -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def described():
    """The options of all commands that do something, by the words that ask for them."""

    def leaves(app, words=()):
        if app.default_command is not None:
            options = app.assemble_argument_collection()
            return {words: {each.name: each for each in options}}
        found = {}
        for word in app:
            if word[0] != "-":
                found |= leaves(app[word], (*words, word))
        return found

    return leaves(_app.app)


# The algorithms that each command below `jaxfed fit` can run.
ALGORITHMS = {
    **{name: (entry.algorithm,) for name, entry in pca.ALGORITHMS.items()},
    "inmf": (jf.nmf.INMF,),
    "maxvar": (jf.gcca.MaxVar, jf.gcca.MVLSA),
    "mvlsa": (jf.gcca.MVLSA,),
    "deepmaxvar": (jf.gcca.DeepMaxVar,),
    "ajive": (jf.gcca.AJIVE,),
    "autoencoder": (jf.generative.AdaptiveTraining, jf.generative.FedAvg),
    "diffusion": (jf.generative.AdaptiveTraining, jf.generative.FedAvg),
}


def test_every_exported_algorithm_has_a_command(described):
    exported = {
        found
        for family in (jf.pca, jf.nmf, jf.gcca, jf.generative)
        for found in vars(family).values()
        if isinstance(found, type) and issubclass(found, jf.Algorithm)
    }
    assert exported == {made for each in ALGORITHMS.values() for made in each}
    assert {words[1] for words in described if words[0] == "fit"} == set(ALGORITHMS)


LINEAR = [
    *pca.ALGORITHMS,
    "inmf",
    "maxvar",
    "mvlsa",
    "ajive",
]  # the others have models, which are no numbers


@pytest.mark.parametrize("name", LINEAR)
def test_the_settings_of_an_algorithm_are_those_of_its_class(described, name):
    made = ALGORITHMS[name][0]
    options = described["fit", name]
    shares = ABOUT if name in pca.ALGORITHMS and pca.ALGORITHMS[name].shares else {}
    about, parameters = descriptions(made), inspect.signature(made).parameters
    assert about.keys() == parameters.keys()
    for setting in about:
        found = options[f"--{setting.replace('_', '-')}"]
        assert found.field_info.default == parameters[setting].default
        more = f", {shares[setting]}" if setting in shares else ""
        assert setting == "start" or found.parameter.help == about[setting] + more


def test_command_words_are_the_names_of_the_classes():
    for word, entry in pca.ALGORITHMS.items():
        assert word == entry.algorithm.__name__.lower()


def test_every_command_and_every_option_says_what_it_is(described):
    silent = []
    for words, options in described.items():
        for name, option in options.items():
            # A default alone says nothing.
            if not re.sub(r"^;? ?default: .*", "", option.parameter.help or "").strip():
                silent.append(" ".join((*words, name)))
    assert not silent, "\n".join(silent)


def test_no_option_rounds_a_number_to_a_whole_one(described):
    """Since a converter of its own takes each option that has whole numbers."""

    def has_whole_numbers(kind):
        return kind is int or any(map(has_whole_numbers, get_args(kind)))

    found = 0
    for _words, options in described.items():
        for name, option in options.items():
            if has_whole_numbers(option.hint):
                found += 1
                with pytest.raises(CoercionError, match=r"wanted a whole number, got 1\.5"):
                    option.parameter.converter(option.hint, [Token(keyword=name, value="1.5")])
    assert found > 100


@pytest.mark.parametrize("words", [["--rounds", "2.5"], ["--impute", "2", "1.5"]])
def test_an_option_that_is_no_whole_number_is_named(words, tmp_path, capsys):
    ranks = ["--shared-rank", "1", "--local-rank", "1"]
    line = refused(capsys, fit("perpca", tmp_path, tmp_path / "out", *ranks, *words))
    assert line == f"jaxfed: Invalid value for {words[0]}: wanted a whole number, got {words[-1]}"


def test_a_terminal_gets_a_table_by_rich_and_a_pipe_plain_text(monkeypatch):
    pytest.importorskip("rich")
    rows = [{"client": "[red]a[/red]", "share (%)": 12.5}, {"client": "b", "share (%)": None}]

    def printed(terminal):
        file = io.StringIO()
        file.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stdout", file)
        _report.show(rows)
        return file.getvalue()

    assert printed(False) == _report.text_table(rows) + "\n"
    drawn = printed(True)
    assert "─" in drawn and "[red]a[/red]" in drawn and re.search(r"12\.5", drawn)
    monkeypatch.setattr(_report, "find_spec", lambda name: None)
    assert printed(True) == _report.text_table(rows) + "\n"


def test_help_is_there_at_once():
    """The processor's time; nothing that is heavy is imported."""
    command = "import os, sys, jaxfed.cli as c\nc.main(['--help'])\n"
    command += "print(sum(os.times()[:2]), 'jax' in sys.modules)"
    times = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", command], capture_output=True, text=True, env=dict(os.environ)
        )
        seconds, *heavy = done.stdout.split()[-2:]
        assert heavy == ["False"]
        times.append(float(seconds))
    assert min(times) < 0.5


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["fot"], 'Unknown command "fot". Did you mean "fit"?'),
        (["fit", "perpcaa", "--rank", "2"], 'Unknown command "perpcaa". Did you mean "perpca"?'),
        (["deploy", "wroker"], 'Did you mean "worker"? Available commands: new, try, worker.'),
        (["demo", "--sed", "1"], "Unknown option: --sed. Did you mean --seed?"),
        (["info", "x", "--nonsense"], "Unknown option: --nonsense."),
    ],
)
def test_the_closest_name_is_suggested(command, words, capsys):
    assert words in refused(capsys, main(command))


def test_help_lists_algorithms_in_groups(capsys):
    assert main(["fit", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "\n╭─ One subspace for all clients ─" in shown
    assert shown.index("One subspace") < shown.index("│ blocklanczos") < shown.index("Views of")
    assert max(map(len, shown.splitlines())) <= 80


def test_help_shows_neither_python_nor_mathematics(described):
    texts = [each.parameter.help for options in described.values() for each in options.values()]
    assert len(texts) > 100
    assert not [text for text in texts if re.search(r"\bNone\b|\\|`", text)]


COMMANDS = [[], *([name] for name in _app.COMMANDS), ["fit", "perpca"], ["deploy", "worker"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help(command, capsys):
    assert main([*command, "--help"]) == 0
    assert " ".join(["Usage: jaxfed", *command]) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["fit", "perpca"], "--data requires an argument"),
        (["demo", "-x"], "Unknown option: -x"),
        (["demo", "--rounds", "many"], 'unable to convert "many" into int'),
        (["completion", "tcsh"], 'Choose from: "bash", "zsh", "fish"'),
    ],
)
def test_wrong_usage(command, message, capsys):
    assert message in refused(capsys, main(command))


def test_reproduce_is_a_command(capsys):
    assert "no-such-target" in refused(capsys, main(["reproduce", "no-such-target"]))


def test_tables_are_aligned():
    rows = [{"method": "Local", "error": 1234.5678}, {"method": "Pooled", "error": None}]
    assert _report.text_table(rows).splitlines() == [
        "method  error",
        "------  -----",
        "Local    1235",
        "Pooled",
    ]


def test_tables_move_no_cursor():
    rows = [{"client\x1b[2J": "a\nb", "error": 1.0}]
    assert _report.text_table(rows).splitlines()[::2] == [
        r"client\x1b[2J  error",
        "a\\nb               1",
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_that_garbage_swallows_is_heeded(monkeypatch, capsys, number, code):
    class Garbage:
        def __del__(self):
            signal.raise_signal(number)

    def run(_):
        Garbage()
        time.sleep(5)
        return 0

    monkeypatch.setattr("jaxfed.cli.info.load", run)
    # A shell has what it starts in the background ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["info", "result"]) == code
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_source_tree_runs_without_being_installed():
    code = """
from importlib import metadata
found = metadata.version
def version(name):
    if name == "jaxfed":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
from jaxfed.cli import main
main(["--version"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "0+unknown\n"), done.stderr
