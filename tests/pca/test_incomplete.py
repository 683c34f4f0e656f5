"""Algorithms that take samples with gaps keep the contract on these, too."""

import pytest

import jaxfed as jf
from jaxfed.testing import CHECKS, check_algorithm
from tests import examples


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [jf.pca.HMF(2, 1), jf.pca.TCMF(2, 1, 1.0)], ids=["HMF", "TCMF"]
)
@pytest.mark.parametrize(
    "checks",
    [
        ("padding", "source"),
        ("structure", "order", "types", "vmap", "gradients", "newcomers", "backends"),
    ],
)
def test_the_contract_for_missing_entries(x64, algorithm, checks):
    family = examples.FAMILIES[jf.pca]
    assert set(checks) <= set(CHECKS)
    report = check_algorithm(
        algorithm,
        examples.draw_incomplete(),
        checks=checks,
        rounds=100,
        essence=family.essence,
        constraint=lambda result: family.check(algorithm, result),
        others=examples.draw_incomplete(1),
        deterministic=True,
    )
    assert not report.skipped
