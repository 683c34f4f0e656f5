"""The table of what neighbouring libraries can do names what exists."""

import importlib
import inspect
from functools import reduce
from pathlib import Path

import pytest

from bench.tables import abilities

PAGE = Path(__file__).parents[2] / "docs/guides/neighbours.md"
INSTALLED = [x for x in abilities.cells() if x[0] in ("jaxfed", "scikit-learn")]


def test_the_page_has_the_table():
    assert abilities.markdown() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("library, what, named", INSTALLED, ids=lambda x: str(x)[:60])
def test_what_is_installed_has_the_names(library, what, named):
    if library == "scikit-learn":
        importlib.import_module("sklearn.experimental.enable_iterative_imputer")
    found = reduce(getattr, named.path, importlib.import_module(named.module))
    assert callable(found)
    assert named.argument is None or named.argument in inspect.signature(found).parameters


def test_names_are_looked_for_in_sources(tmp_path):
    package = tmp_path / "peer/peer"
    package.mkdir(parents=True)
    (package / "models.py").write_text(
        "class Model:\n    def __init__(self, rank): pass\n    def fit(self, data): pass\n"
    )
    there = ["peer.models:Model", "peer.models:Model(rank)", "peer.models:Model.fit(data)"]
    absent = ["peer.other:Model", "peer.models:Other", "peer.models:Model(data)"]
    for cells, found in ((there, True), (absent, False)):
        assert [abilities.is_in(abilities.Named.of(x), tmp_path) for x in cells] == [found] * 3


def test_every_cell_is_of_a_known_library():
    for row in abilities.LISTED["rows"]:
        assert row["what"] and set(row) - {"what"} <= set(abilities.LIBRARIES)
