import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.M | re.S)


def test_every_python_block_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    sources = blocks("python")
    assert sources
    printed = {}
    for source in sources:
        exec(compile(source, str(README), "exec"), namespace)
        printed[source] = capsys.readouterr().out.splitlines()

    def lines(of):
        return next(lines for source, lines in printed.items() if of in source)

    # What the text says of them.
    assert namespace["shared"].shape == (64, 10) and namespace["local"].shape == (40, 64, 2)
    assert (tmp_path / "components.png").stat().st_size > 0
    assert lines("BlockLanczos") == [f"{namespace['together'].rounds} (64, 5)"]
    assert namespace["together"].rounds < 20
    error, bits = map(float, lines("quantize"))
    assert error == pytest.approx(1, abs=0.02) and bits < 0.15
    objectives = [float(line) for line in lines("chunked")]
    assert objectives == pytest.approx([objectives[0]] * 3, rel=1e-5)
    assert namespace["swept"].history["objective"].shape == (3, 10)
    *energies, shape = lines("AdaptiveAutoencoder")
    tuned, adapted = (float(line.split()[-1]) for line in energies)
    assert tuned == pytest.approx(0.76, abs=0.01) and adapted == pytest.approx(0.79, abs=0.01)
    assert shape == "(1797, 5)"


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text())
    assert links
    for link in links:
        assert (README.parent / link).exists(), link
