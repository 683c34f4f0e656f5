"""Notebooks install in one cell, say where they run, and show what came out."""

import json

import pytest

from tests.helpers import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def sources(path, kind):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_installs_in_one_cell_and_shows_what_came_out(path):
    first, *others = sources(path, "code")
    assert "%pip install" in first and "device_kind" in first
    assert not any("pip install" in source for source in others)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert outputs and all(output["output_type"] != "error" for output in outputs)


@pytest.mark.slow
def test_a_million_clients_in_a_small_size(capsys):
    """On a processor, with fewer clients still."""
    names = {}
    for source in sources(FOLDER / "million_clients.ipynb", "code"):
        exec(source.replace("%pip", "pass  #").replace("else 4_000", "else 64"), names)
    assert names["CLIENTS"] == 64
    assert "64 clients" in capsys.readouterr().out
    assert names["objective"][-1] < names["objective"][0]
