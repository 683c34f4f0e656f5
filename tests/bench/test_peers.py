"""The sides of the comparisons with neighbouring libraries solve the same problems."""

import importlib
import importlib.util
import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from bench.peers import __main__ as peers
from bench.peers import ajive, confidence, fedavg, gcca, grassmann, impute, inmf, pca
from tests.helpers import ROOT

SMALL_VIEWS = partial(gcca.views, entities=100, features=(40, 30, 20))
# By pair: a small draw, the most that answers may be off one another, and where they are.
DRAWS = {
    pca: (partial(pca.planted, samples=60, features=12), 1e-3, (0.9, 1)),
    grassmann: (partial(grassmann.quadratic, features=12, rank=2), 1e-4, (-1e-6, 1e-4)),
    inmf: (partial(inmf.counts, clients=2, samples=30, features=12), 0.01, (0, 0.03)),
    gcca: (SMALL_VIEWS, 1e-3, (0.9, 1)),
    ajive: (SMALL_VIEWS, 1e-3, (0.9, 1)),
    impute: (partial(impute.tumours, samples=60, features=8), 0.1, (0.3, 0.7)),
    confidence: (partial(confidence.clients, count=3, samples=40, features=6), 2, (3, 15)),
    fedavg: (partial(fedavg.clients, count=4, samples=200, features=6), 0.02, (0.3, 0.9)),
}
MODULES: dict[str, str] = {"plain JAX": "jax", "scikit-learn": "sklearn", "cca-zoo": "cca_zoo"}
COMPILES_LONG = (ajive, confidence, fedavg, gcca, grassmann, inmf)


def installed(side):
    peer = side.partition(",")[0]
    return importlib.util.find_spec(MODULES.get(peer) or peer.lower()) is not None


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            pair,
            marks=[pytest.mark.slow] if pair in COMPILES_LONG else [],
            id=pair.__name__.rpartition(".")[2],
        )
        for pair in DRAWS
    ],
)
def test_the_answers_agree(pair, monkeypatch):
    monkeypatch.setattr(confidence, "RESAMPLES", 60)
    draw, tolerance, (low, high) = DRAWS[pair]
    data = draw(0)
    answers = {
        side: float(pair.answer(data, start()(data)))
        for side, start in pair.SIDES.items()
        if installed(side)
    }
    assert "jaxfed" in answers
    assert low <= min(answers.values()), answers
    assert max(answers.values()) <= high, answers
    assert max(answers.values()) - min(answers.values()) <= tolerance, answers
    if len(answers) == 1:
        pytest.skip(f"none of {', '.join(list(pair.SIDES)[1:])} is installed beside jaxfed")


def test_every_module_is_a_pair_and_every_peer_has_an_environment():
    assert [importlib.import_module(f"bench.peers.{name}") for name in peers.PAIRS] == list(DRAWS)
    known = {*peers.LISTED, *peers.HERE}
    assert {side.partition(",")[0] for pair in DRAWS for side in pair.SIDES} == known


def test_a_side_in_a_process_of_its_own(tmp_path):
    draws = [tmp_path / f"{seed}.npz" for seed in range(2)]
    for seed, path in enumerate(draws):
        np.savez(path, x=pca.planted(seed, 60, 12)["x"])
    command = [sys.executable, "-m", "bench.peers.side", "pca", "scikit-learn", *draws]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0.9 < found["answer"] < 1
    assert min(found["first"], found["again"]) > 0
    assert found["peak"] > 20


def test_a_side_that_does_not_run_has_dashes_and_says_why(tmp_path, monkeypatch, capsys):
    def python_of(peer, folder):
        return peers.run([sys.executable, "-c", f"raise ValueError('no {peer}')"], {})

    monkeypatch.setattr(peers, "python_of", python_of)
    monkeypatch.setattr(peers, "DRAWS", 1)
    monkeypatch.setattr(pca, "CASES", {"60 x 12": partial(pca.planted, samples=60, features=12)})
    monkeypatch.setattr(pca, "SIDES", {"scikit-learn": pca.scikit_learn})
    (row,) = peers.rows_of("pca", tmp_path, tmp_path)
    assert list(row.values()) == ["", "scikit-learn", "–", "–", "–", "–"]
    assert "did not run: ValueError: no scikit-learn" in capsys.readouterr().err
