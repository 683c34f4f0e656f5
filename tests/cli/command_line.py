"""Runs the command line for its tests, and reads what it writes and says."""

import contextlib
import json
from types import SimpleNamespace

import numpy as np

from jaxfed.cli import _options, main

# Most of the time goes into compiling: fits share ranks, data shapes and chunks of one round
# (those of less than a hundred rounds) wherever what is tested allows it.
RANKS = ["--shared-rank", "2", "--local-rank", "2"]


def run(*words):
    """Run a command; return its exit status."""
    return main([str(word) for word in words])


def parsed(monkeypatch, words):
    """The values of a command's options, which is not run."""
    found = []
    monkeypatch.setattr(_options, "SimpleNamespace", lambda **values: found.append(values))
    with contextlib.suppress(AttributeError):  # there are no values
        run(*words)
    return SimpleNamespace(**found[0])


def fit(algorithm, data, out, *options):
    return run("fit", algorithm, "--data", data, "--out", out, *options)


def loaded(folder):
    """The arrays and the summary that a command wrote."""
    with np.load(folder / "result.npz") as arrays:
        return dict(arrays), json.loads((folder / "result.json").read_text())


def value(summary, name):
    """The value in the table row whose name begins like this."""
    (found,) = [row["value"] for row in summary["table"] if row["quantity"].startswith(name)]
    return found


def refused(capsys, code):
    """The one line on standard error; nothing was printed before."""
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("jaxfed: ")
    return line


def snapshot(folder):
    """The files of a folder with their bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"  # which is meaningless once it is released
    }


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
