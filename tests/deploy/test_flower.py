"""Federations over Flower, within this process: all that the real engine does but its processes."""

import pytest

pytest.importorskip("flwr")
from tests.deploy.federation import Federation, check_equal
from tests.examples import CLIENTS, GOOD, family, first_example


@first_example
def test_every_algorithm_is_bit_equal_to_fit(name, tmp_path):
    algorithm = GOOD[name].make(CLIENTS)
    clients = family(algorithm).draw()
    federation = Federation(tmp_path, algorithm, clients, order=(3, 1, 0, 4, 2))
    check_equal(federation, federation.run(2), federation.fit(2))
