"""The folder of a command's results: what others wrote there is neither replaced nor removed."""

import contextlib
import itertools
from pathlib import Path

import numpy as np
import pytest

from jaxfed.cli import _report
from jaxfed.cli._folder import Folder
from jaxfed.core.common.files import locked
from tests.cli.command_line import RANKS, refused, run, snapshot

WRITTEN = ("picture.png", "result.npz", "result.json")


def results(folder, *, force=False, checkpoint=True, fail=False):
    """What a command does with its folder; the names of the files that it leaves."""
    results = Folder(folder)
    results.check(force=force, resumable=checkpoint)
    if checkpoint:
        results.resume_or_begin("run", force=force)
        (folder / "checkpoint" / "rounds").mkdir(parents=True, exist_ok=True)
        (folder / "checkpoint" / "rounds" / "00000005.npz").write_text("saved")
    else:
        results.begin()
    if fail:
        return None
    for name in WRITTEN:
        with results.writing(name) as part:
            part.write_text(f"{name} of jaxfed")
    return snapshot(folder)


@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        ["fit", "perpca", "--data", "nowhere", *RANKS],
        ["fit", "pooled", "--data", "nowhere", "--rank", "2"],
        ["fit", "maxvar", "--data", "nowhere", "--rank", "2"],
        ["fit", "deepmaxvar", "--data", "nowhere", "--rank", "2"],
        ["fit", "autoencoder", "--data", "nowhere", "--latent", "2"],
        ["fit", "diffusion", "--data", "nowhere"],
        ["sweep", "hierarchicalpca", "--prior-variance", "1"],
        ["reproduce", "perpca/table2"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_no_command_takes_a_folder_of_others_for_its_own(tmp_path, capsys, command):
    names = ["components.png", "table.csv", "result.npz", "checkpoint/model.pt"]
    (tmp_path / "checkpoint").mkdir()
    for name in names:
        (tmp_path / name).write_text("mine")
    line = refused(capsys, run(*command, "--out", tmp_path))
    assert "is not empty" in line and "--force" in line
    assert snapshot(tmp_path) == dict.fromkeys(names, b"mine")


@pytest.mark.parametrize("name", ["notes.txt", "result.json", "checkpoint/model.pt", ".hidden"])
def test_a_folder_with_any_file_is_refused_and_left(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"^--out: .* is not empty"):
        results(tmp_path)
    assert snapshot(tmp_path) == before


def test_force_replaces_results_and_leaves_the_rest(tmp_path):
    others = {"notes.txt", "checkpoint/model.pt", "checkpoint/rounds/mine"}
    whole = results(tmp_path)
    for name in others:
        (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        results(tmp_path)
    (tmp_path / "picture.png").write_text("annotated")
    assert results(tmp_path, force=True) == whole | dict.fromkeys(others, b"mine")
    # A command without checkpoints leaves none, which would be resumed.
    left = results(tmp_path, force=True, checkpoint=False)
    assert left.keys() == whole.keys() - {"checkpoint/rounds/00000005.npz"} | others


@pytest.mark.parametrize("name", ["notes.txt", "checkpoint/model.pt", "checkpoint/rounds/7/x"])
def test_force_leaves_what_others_wrote(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    left = results(tmp_path, force=True)
    assert left[name] == b"mine" and {*WRITTEN} <= left.keys()


@pytest.mark.parametrize("name", ["result.npz", "result.json"])
@pytest.mark.parametrize("text", ["mine", "{}", '["versions"]', '{"versions": ["numpy"]}'])
def test_force_removes_no_result_of_another_program(tmp_path, name, text):
    """It was removed before the run began, whether or not that wrote one."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"^--force: .*{name} may be another program's"):
        results(tmp_path, force=True, checkpoint=False, fail=True)
    assert (tmp_path / name).read_text() == text


def test_force_replaces_the_result_of_a_command_without_rounds(tmp_path):
    folder = Folder(tmp_path)
    for number in range(2):
        folder.check(force=number > 0)
        folder.begin()
        _report.write(folder, {"number": number}, {})
    with np.load(tmp_path / "result.npz") as found:
        assert found["number"] == 1


def test_no_earlier_result_stands_beside_a_run_that_failed(tmp_path):
    results(tmp_path)
    results(tmp_path, force=True, fail=True)
    assert not (tmp_path / "result.json").exists() and not (tmp_path / "result.npz").exists()
    assert Folder(tmp_path).interrupted


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path):
    out = tmp_path / "out"
    results(out)
    (out / "picture.png").rename(tmp_path / "elsewhere.png")
    (out / "picture.png").symlink_to(tmp_path / "elsewhere.png")
    (tmp_path / "elsewhere.png").write_text("mine")
    results(out, force=True)
    assert (tmp_path / "elsewhere.png").read_text() == "mine"


def test_a_folder_in_which_another_process_works_is_left(tmp_path):
    results(tmp_path)
    with locked(tmp_path / "checkpoint", "folder"):
        before = snapshot(tmp_path)
        with pytest.raises(BlockingIOError, match=r"^--out: .* is in use by process"):
            results(tmp_path, force=True)
        assert snapshot(tmp_path) == before


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
            for name in ("mkdir", "replace", "write_text", "unlink", "touch"):
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
    assert step > 10
    steps = itertools.count()
    while not killed_at(step := next(steps), folder, force=True):
        assert results(folder, force=True) == wanted, step
    assert step > 10


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        Folder(tmp_path / "out").check(force=True)
