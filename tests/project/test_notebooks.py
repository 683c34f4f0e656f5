"""Notebooks open in Colab, install in one cell, and say where they run."""

import importlib.util
import json

import pytest

from tests.helpers import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def badges():
    spec = importlib.util.spec_from_file_location("badges", FOLDER / "badges.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(path, kind):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_opens_by_a_badge_and_begins_in_one_cell(path, badges):
    text = path.read_text(encoding="utf-8")
    assert sources(path, "markdown")[0].startswith(badges.badge(path.name) + "\n\n# ")
    assert json.loads(text) == badges.with_badge(json.loads(text), path.name)  # as it is written
    assert text.count("colab.research.google.com/github/") == 1
    first, *others = sources(path, "code")
    assert "%pip install" in first and "device_kind" in first
    assert not any("pip install" in source for source in others)


def test_the_address_is_in_one_place(badges):
    assert badges.badge("x.ipynb").endswith(f"/{badges.REPOSITORY}/blob/main/notebooks/x.ipynb)")


@pytest.mark.slow
def test_a_million_clients_in_a_small_size(capsys):
    """On a processor, with fewer clients still."""
    names = {}
    for source in sources(FOLDER / "million_clients.ipynb", "code"):
        exec(source.replace("%pip", "pass  #").replace("else 4_000", "else 64"), names)
    assert names["CLIENTS"] == 64
    assert "64 clients" in capsys.readouterr().out
    assert names["objective"][-1] < names["objective"][0]
