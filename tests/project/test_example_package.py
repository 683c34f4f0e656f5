"""The package with an algorithm of its own is short; its tests run where it is installed."""

from tests.helpers import ROOT

PACKAGE = ROOT / "tests" / "example_package"


def test_it_is_one_short_module():
    (module,) = (PACKAGE / "federated_kmeans").glob("*.py")
    assert len(module.read_text().splitlines()) < 120
