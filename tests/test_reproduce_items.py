"""The page of the papers' tables and figures, and the run of all targets that writes it."""

import csv
import io
import json
import subprocess
from collections import Counter
from types import SimpleNamespace

import pytest

import papers
from jaxfed.cli import main
from papers import command, every
from papers.items import ITEMS
from papers.runs import Seeds

# Checks and data that no table of the papers has.
BEYOND = {"gcca/digits", "gcca/deep_digits", "perpca/steps", "faps/steps"}


def test_the_items_are_those_of_the_papers():
    assert len(ITEMS) == len({(item.paper, item.name) for item in ITEMS}) == 47
    counts = Counter(item.paper.split()[0].strip("(,") for item in ITEMS)
    assert list(counts.values()) == [16, 11, 12, 8]  # the two of Ozkara's together
    named = {name for item in ITEMS for name in item.targets}
    assert named <= set(papers.names()) <= named | BEYOND
    for item in ITEMS:
        assert bool(item.why) == (item.covered != "whole"), item


RECORD = {
    "perpca/figure1": {
        "reproduced": 5, "differs": 1, "not comparable": 0, "which": ["a | b"],
        "seconds": 12, "date": "2026-11-22", "seeds": 1, "base": 7, "versions": "jax 1",
    },
    "perpca/figure10": {
        "failed": ["no"], "seconds": 1, "date": "2026-11-21", "seeds": 3, "base": 0,
    },
}  # fmt: skip


def test_the_page_has_a_line_for_each_item():
    page = every.page(RECORD)
    lines = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(lines) == 1 + len(ITEMS)
    assert "| Figure 1 |" in lines[1] and "5 reproduced, 1 differs | 12 | 2026-11-22 |" in lines[1]
    assert "failed" in next(line for line in lines if "| Figure 10 |" in line)
    assert "not run" in next(line for line in lines if "| Table 7 |" in line)
    assert "no data" in next(line for line in lines if "| Figure 13 |" in line)
    assert "--seeds 1 --seed 7" in page and "jax 1" in page
    table = list(csv.DictReader(io.StringIO(every.table(RECORD))))
    assert len(table) == 47 and table[0]["verdict"] == "5 reproduced, 1 differs"


def test_the_page_in_the_repository_is_that_of_its_record():
    record = every.read_record(every.COMMITTED)
    assert set(record) <= set(papers.names())
    page = (every.COMMITTED / every.PAGE).read_text(encoding="utf-8")
    assert page == every.page(record)
    table = (every.COMMITTED / every.TABLE).read_text(encoding="utf-8")
    assert table == every.table(record)


@pytest.fixture
def runs(monkeypatch):
    """Processes that take no time, and what they were asked for."""
    asked = []

    def process(arguments, *, timeout, **options):
        name, out = arguments[4], arguments[arguments.index("--out") + 1]
        asked.append((name, timeout, arguments))
        if name == "perpca/figure3":
            raise subprocess.TimeoutExpired(arguments, timeout)
        if name == "perpca/figure4":
            return SimpleNamespace(returncode=1, stderr="it\nbroke\n")
        every.Path(out).mkdir(parents=True, exist_ok=True)
        rows = [{"x": 1, "verdict": "reproduced; from the paper by 2"}, {"x": 2},
                {"x": 3, "verdict": "differs by 1"}]  # fmt: skip
        result = {"columns": ["x"], "rows": rows, "versions": {"jax": "1"}}
        (every.Path(out) / "result.json").write_text(json.dumps(result))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(every.subprocess, "run", process)
    return asked


def test_all_targets_are_run_in_order_of_their_time(runs, monkeypatch, tmp_path, capsys):
    known = {"perpca/figure9": {"seconds": 5}, "perpca/figure3": {"seconds": 1}}
    for one in known.values():
        one |= {"date": "2026-11-20", "seeds": 1, "base": 0, **dict.fromkeys(every.KINDS, 1)}
    monkeypatch.setattr(every, "COMMITTED", tmp_path / "committed")
    (tmp_path / "committed").mkdir()
    (tmp_path / "committed" / every.RECORD).write_text(json.dumps(known))
    names = ["perpca/figure4", "perpca/figure9", "perpca/figure3", "perpca/mnist"]
    monkeypatch.setattr(papers, "names", lambda: names)
    out = tmp_path / "out"
    assert main(["reproduce", "all", "--quick", "--seed", "7", "--out", str(out)]) == 0
    # Files are wanted by the last, and the one that takes too long keeps what it had.
    assert [name for name, *_ in runs] == ["perpca/figure3", "perpca/figure9", "perpca/figure4"]
    assert all(0 < timeout <= every.QUICK for _, timeout, _ in runs)
    assert runs[0][2][-4:] == ["--seeds", "1", "--seed", "7"]
    record = every.read_record(out)
    assert record["perpca/figure3"] == known["perpca/figure3"]
    assert record["perpca/figure4"]["failed"] == ["broke"]
    found = record["perpca/figure9"]
    assert [found[kind] for kind in every.KINDS] == [1, 1, 0] and found["which"] == ["3"]
    assert (out / every.PAGE).read_text() == every.page(record)
    assert "items.md" in capsys.readouterr().out

    assert main(["reproduce", "all", "--full", "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["reproduce", "all", "--full", "--out", str(out), "--force"]) == 0
    _, timeout, arguments = runs[-1]
    assert timeout is None and arguments[-4:] == ["--seeds", "3", "--seed", "0"]


def test_what_time_is_left_for_is_run(runs, tmp_path):
    every.run_all(Seeds(1), tmp_path, data=None, names=["perpca/figure9"], budget=0.0)
    assert runs == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["all"], "--quick or --full"),
        (["all", "--quick"], "--out"),
        (["all", "--full", "--out", "x", "--scale", "0.5"], "--scale"),
        (["perpca/table2", "--quick"], "--quick"),
    ],
)
def test_what_all_wants(arguments, told, capsys):
    assert command.ALL == "all"
    assert main(["reproduce", *arguments]) == 2
    assert told in capsys.readouterr().err
