"""Federations over Flower, within this process: all that the real engine does but its processes."""

import jax
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.core.round import client

pytest.importorskip("flwr")
from tests.deploy.federation import Federation, check_equal
from tests.examples import CLIENTS, FIRST, GOOD, draw_samples, family, parametrized


@parametrized(FIRST.values(), {"PerPCA"})
def test_every_algorithm_is_bit_equal_to_fit(name, tmp_path):
    algorithm = GOOD[name].make(CLIENTS)
    clients = family(algorithm).draw()
    federation = Federation(tmp_path, algorithm, clients, order=(3, 1, 0, 4, 2))
    check_equal(federation, federation.run(2), federation.fit(2))


@pytest.mark.slow
def test_the_next_run_reads_the_newest_data(tmp_path):
    """In one process with the same configurations, as of engines that keep theirs."""
    algorithm = jf.pca.SubspaceIteration(2)
    federation = Federation(tmp_path, algorithm, draw_samples())
    federation.run(2)
    federation.clients = draw_samples(seed=7)
    federation.grid.run_id = 2
    saved = federation.run(2, out="newer")
    np.testing.assert_array_equal(saved.result.shared, federation.fit(2).result.shared)


@pytest.mark.slow
def test_tables_keep_their_digits_in_double_precision(tmp_path):
    """A time and a column in grams, with nothing enabled outside of the app."""
    samples = np.asarray(draw_samples().data.values, float)
    samples[..., 0] *= 1e4
    samples[..., 1] += 1.7e9
    with jax.enable_x64(True):
        clients = jf.Clients.from_samples(samples)
    federation = Federation(tmp_path, jf.pca.Pooled(2), clients, precision="double")
    federation.run(2, precision="double")
    with jax.enable_x64(True):
        saved = jf.load(tmp_path / "out" / "solution.npz")
        check_equal(federation, saved, federation.fit(2))
    # Beside the time, whose direction is that of its mean.
    rest = np.delete(samples - samples.mean((0, 1)), 1, axis=-1).reshape(-1, samples.shape[-1] - 1)
    wanted = np.linalg.svd(rest, full_matrices=False)[2][0]
    shared = np.asarray(saved.result.shared)
    assert shared.dtype == np.float64
    found = np.delete(shared, 1, axis=0)
    np.testing.assert_allclose(abs(wanted @ np.linalg.svd(found)[0][:, 0]), 1, atol=1e-6)


@pytest.mark.slow
def test_machines_of_another_precision_are_refused(tmp_path, caplog):
    federation = Federation(tmp_path, jf.pca.Pooled(2), draw_samples(), precision="single")
    with pytest.raises(ValueError, match="precision"):
        federation.run(2, precision="double")
    with pytest.raises(ValueError, match="precision: wanted one of single, double, got 64"):
        federation.run(2, precision=64)


@pytest.mark.slow
def test_more_rounds_trace_nothing_more(tmp_path, monkeypatch):
    traced, send = [], client.send

    def noted(*arguments):
        traced.append(arguments)
        return send(*arguments)

    monkeypatch.setattr(client, "send", noted)
    counts = []
    for rounds in (1, 2, 4):  # the first compiles
        algorithm = jf.pca.SubspaceIteration(3)  # of another rank than in other tests
        traced.clear()
        Federation(tmp_path / str(rounds), algorithm, draw_samples()).run(rounds)
        counts.append(len(traced))
    assert counts[0] > 0 and counts[1] == counts[2]
