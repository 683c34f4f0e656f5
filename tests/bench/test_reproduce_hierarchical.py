"""The targets of hierarchical-Bayes PCA: masking, when a curve has settled, a small run."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import papers
from jaxfed import rollout
from jaxfed.cli import main
from jaxfed.pca import HierarchicalPCA
from papers.hierarchical import _laws, _rounds, figure1b


@pytest.mark.slow
def test_fewer_samples_and_clients_are_masked(key):
    law = {"clients": 5, "features": 6, "rank": 2, "samples": 8}
    _, some = _laws.drawn(key, jnp.float32(0.1), count=3, size=2, **law)
    np.testing.assert_allclose(some.weights, [0.5, 0.5, 0, 0, 0])
    np.testing.assert_allclose(some.data.count, 3)
    assert jnp.all(some.data.values[:, 3:] == 0) and jnp.all(some.data.values[:, :3] != 0)
    # A run with masked clients is that of the others alone.
    algorithm = HierarchicalPCA(2, 0.5, 0.1)
    run = jax.jit(partial(rollout, rounds=5, key=key))
    padded, alone = run(algorithm, some), run(algorithm, some.take(np.arange(2)))
    np.testing.assert_allclose(padded.result.local[:2], alone.result.local, atol=1e-5)


def test_settled():
    curve = np.asarray([2.0, 1.5, 1.02, 1.005, 1.0, 1.0])
    assert _rounds.settled(curve, 0.01) == 4
    assert _rounds.settled(curve, 0.1) == 3
    assert _rounds.settled(np.ones(5), 0.01) == 1


@pytest.mark.slow
def test_figure1b_small(monkeypatch, tmp_path, capsys):
    law = figure1b.LAW | {"clients": 6, "features": 8, "rank": 2}
    target = papers.find("hierarchical/figure1b")
    target = replace(target, run=partial(figure1b.run, law=law, rounds=5))
    monkeypatch.setattr(papers, "find", lambda name: target)
    out = tmp_path / "out"
    assert main(["reproduce", "hierarchical/figure1b", "--seeds", "1", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "personalized smallest" in printed and "differs" in printed  # it is another problem
    assert (out / "figure1b.png").read_bytes().startswith(b"\x89PNG")
    result = np.load(out / "result.npz")
    assert result["local"].shape == (len(figure1b.VARIANCES),)
    assert result["global"][0] < result["local"][0]
