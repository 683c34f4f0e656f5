"""Federations over Flower, within this process: all that the real engine does but its processes."""

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
