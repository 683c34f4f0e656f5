"""An algorithm in a package of its own, as others would write it, passes its own tests."""

import importlib.util
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent / "example_package"

sys.path.insert(0, str(PACKAGE))
spec = importlib.util.spec_from_file_location(
    "test_federated_kmeans", PACKAGE / "tests" / "test_federated_kmeans.py"
)
assert spec is not None and spec.loader is not None
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
sys.path.remove(str(PACKAGE))

globals().update({name: test for name, test in vars(tests).items() if name.startswith("test_")})


def test_it_is_one_short_module():
    (module,) = (PACKAGE / "federated_kmeans").glob("*.py")
    assert len(module.read_text().splitlines()) < 120
