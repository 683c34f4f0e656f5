"""The folder of a command's results: what belongs to others is neither overwritten nor removed."""

import contextlib
import hashlib
import itertools
import json
from pathlib import Path

import pytest

from jaxfed.cli._folder import Folder
from jaxfed.core.common.files import locked
from tests.cli.command_line import RANKS, refused, run, snapshot


def results(folder, *, force=False, checkpoint=True, fail=False):
    """What a command does with its folder; the names of the files that it leaves."""
    results = Folder(folder)
    names = ["picture.png", *(["checkpoint"] if checkpoint else [])]
    results.check(names, force=force, resumable=checkpoint)
    results.begin(resume=results.interrupted)
    if checkpoint:
        results.begin_checkpoint()
        (folder / "checkpoint" / "rounds").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint" / "rounds" / "00000005.npz").write_text("saved")
    if fail:
        return None
    for name in ("picture.png", "result.npz", "result.json"):
        with results.writing(name) as part:
            part.write_text(f"{name} of jaxfed")
    return snapshot(folder)


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
    line = refused(capsys, run(*command, "--out", tmp_path, *force))
    assert ("was not written by jaxfed" if force else "is not empty") in line
    assert snapshot(tmp_path) == dict.fromkeys(names, b"mine")


def test_the_manifest_lists_what_was_written(tmp_path):
    out = tmp_path / "out"
    left = results(out)
    listed = json.loads(left.pop("manifest.json"))["files"]
    del left["checkpoint/rounds/00000005.npz"]
    assert set(listed) == set(left) and len(left) == 4
    for name, content in left.items():
        digest = hashlib.sha256(content).hexdigest()
        assert listed[name] == {"bytes": len(content), "sha256": digest}


FOREIGN = [
    "picture.png",
    "result.npz",
    "result.json",
    "manifest.json",
    "checkpoint/model.pt",
    "checkpoint/rounds/7/weights",
]


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
    stale = tmp_path / "checkpoint" / "rounds" / ".part-00000003.npz"
    stale.write_text("killed while it was written")
    with pytest.raises(ValueError, match="is not empty"):
        results(tmp_path)
    assert results(tmp_path, force=True) == whole | dict.fromkeys(others, b"mine")
    assert not stale.exists()
    # Another command: pictures and rounds of the one before are gone.
    with Folder(tmp_path).writing("other.png") as part:
        part.write_text("other")
    left = results(tmp_path, force=True, checkpoint=False)
    assert left.keys() == whole.keys() - {"checkpoint/rounds/00000005.npz"} | others


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


@pytest.mark.slow
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
