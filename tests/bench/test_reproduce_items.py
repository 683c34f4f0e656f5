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
from papers import command, every, reasons
from papers.items import ITEMS
from papers.runs import Seeds

# Checks and data that no table of the papers has, and tables of other papers.
BEYOND = {"gcca/digits", "gcca/deep_digits", "perpca/steps", "faps/steps"}
NEIGHBOURS = {f"neighbours/{name}" for name in ("ajive", "hmf", "inmf", "pertucker", "tcmf")}


def test_the_items_are_those_of_the_papers():
    assert len(ITEMS) == len({(item.paper, item.name) for item in ITEMS}) == 47
    counts = Counter(item.paper.split()[0].strip("(,") for item in ITEMS)
    assert list(counts.values()) == [16, 11, 12, 8]  # the two of Ozkara's together
    named = {name for item in ITEMS for name in item.targets}
    assert named <= set(papers.names()) - NEIGHBOURS <= named | BEYOND
    assert set(papers.names()) >= NEIGHBOURS
    for item in ITEMS:
        assert bool(item.why) == (item.covered != "whole"), item


RECORD = {
    "0": {
        "perpca/figure1": {
            "reproduced": 5,
            "differs": 1,
            "not comparable": 0,
            "which": ["a, b: 2, accepted [0, 1]"],
            "seconds": 12,
            "date": "2026-11-22",
            "seeds": 1,
            "versions": "jax 1",
        },
        "perpca/figure10": {"failed": ["no"], "seconds": 1, "date": "2026-11-21", "seeds": 3},
    },
    "7": {
        "perpca/figure1": {
            "reproduced": 6,
            "differs": 0,
            "not comparable": 0,
            "which": [],
            "seconds": 40,
            "date": "2026-11-23",
            "seeds": 10,
            "versions": "jax 1",
        },
        "perpca/figure11": {
            "reproduced": 2,
            "differs": 0,
            "not comparable": 1,
            "which": [],
            "seconds": 7,
            "date": "2026-11-23",
            "seeds": 1,
            "versions": "jax 2",
        },
    },
}


def test_the_page_has_a_line_for_each_item_and_a_column_for_each_base():
    page = every.page(RECORD)
    lines = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(lines) == 1 + len(ITEMS)
    assert "| verdict (--seed 0) | verdict (--seed 7) | seconds | date |" in lines[0]

    def line(name):
        return next(line for line in lines if f"| {name} |" in line)

    assert "| 5 reproduced, 1 differs | 6 reproduced (10 seeds) | 12 | 2026-11-22 |" in lines[1]
    assert "| failed | not run | 1 |" in line("Figure 10")
    # Only the second base has it: its time.
    assert "| not run | 2 reproduced, 1 not comparable | 7 | 2026-11-23 |" in line("Figure 11")
    assert "| not run | not run |  |  |" in line("Table 7")
    assert "jax 1; jax 2" in page
    table = list(csv.DictReader(io.StringIO(every.table(RECORD))))
    assert len(table) == 47 and table[0]["verdict (--seed 0)"] == "5 reproduced, 1 differs"
    assert table[0]["verdict (--seed 7)"] == "6 reproduced (10 seeds)"


def test_the_page_says_what_differs_with_its_interval_and_why(monkeypatch):
    known = (
        reasons.Reason("perpca/figure10", "Scale", "of another target.", {"a, b": [1, 3]}),
        reasons.Reason("perpca/figure1", "Scale", "of another row.", {"c, d": [1, 3]}),
        reasons.Reason("perpca/figure1", "Scale", "of another number.", {"a, b": [2.5, 3]}),
        reasons.Reason("perpca/figure1", "Chance", "of the start.", {"a, b": [1, 3]}),
    )
    monkeypatch.setattr(reasons, "REASONS", known)
    expected = [line for line in every.page(RECORD).splitlines() if line.startswith("- ")]
    assert expected == [
        "- `perpca/figure1 --seeds 1 --seed 0`: a, b: 2, accepted [0, 1]. *Chance*: of the start.",
        "- `perpca/figure10 --seeds 3 --seed 0`: no.",
    ]


def test_what_is_not_covered_has_no_data():
    item = ITEMS[0]._replace(covered="not", why="no files")
    line = every.line_of(item, RECORD)
    assert line["verdict (--seed 0)"] == line["verdict (--seed 7)"] == "no data"


def test_the_page_in_the_repository_is_that_of_its_record():
    record = every.read_record(every.COMMITTED)
    assert next(iter(record)) == "0"
    assert all(set(found) <= set(papers.names()) for found in record.values())
    page = (every.COMMITTED / every.PAGE).read_text(encoding="utf-8")
    assert page == every.page(record)
    table = (every.COMMITTED / every.TABLE).read_text(encoding="utf-8")
    assert table == every.table(record)


def test_every_row_that_differs_in_the_repository_has_its_reason():
    record = every.read_record(every.COMMITTED)
    rows = [
        (name, row)
        for found in record.values()
        for name, one in found.items()
        for row in one.get("failed") or one["which"]
    ]
    assert not [pair for pair in rows if not reasons.reason(*pair)]
    for one in reasons.REASONS:
        for label in one.rows:
            explained = [row for name, row in rows if one.explains(name, row)]
            assert any(row.startswith(f"{label}: ") for row in explained), (one.target, label)


@pytest.fixture
def runs(monkeypatch):
    """Processes that take no time, and the commands they were started with."""
    requests = []

    def process(arguments, *, timeout, **options):
        place = arguments.index("--out")
        names, out = arguments[4:place], every.Path(arguments[place + 1])
        requests.append((*names, timeout, arguments))
        if names == ["perpca/figure3"]:
            raise subprocess.TimeoutExpired(arguments, timeout)
        if names == ["perpca/figure4"]:
            return SimpleNamespace(returncode=1, stderr="it\nbroke\n")
        rows = [
            {
                "x": 1,
                "verdict": "reproduced; from the paper by 2",
                "measured": "1.5",
                "accepts": "[1, 2]; paper [3, 4]",
            },
            {"x": 2},
            {"x": 3, "verdict": "differs by 1", "measured": "3", "accepts": "[1, 2]"},
        ]
        result = {"columns": ["x"], "rows": rows, "versions": {"jax": "1"}}
        for name in names:
            folder = out if len(names) == 1 else every.folder_of(name, out)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "result.json").write_text(json.dumps(result))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(every.subprocess, "run", process)
    return requests


def test_all_targets_are_run_in_order_of_their_time(runs, monkeypatch, tmp_path, capsys):
    known = {"perpca/figure9": {"seconds": 5}, "perpca/figure3": {"seconds": 1}}
    for one in known.values():
        one |= {"date": "2026-11-20", "seeds": 1, "which": [], **dict.fromkeys(every.KINDS, 1)}
    monkeypatch.setattr(every, "COMMITTED", tmp_path / "committed")
    (tmp_path / "committed").mkdir()
    (tmp_path / "committed" / every.RECORD).write_text(json.dumps({"0": known}))
    names = ["perpca/figure4", "perpca/figure9", "perpca/figure3", "perpca/mnist"]
    monkeypatch.setattr(papers, "names", lambda: names)
    out = tmp_path / "out"
    assert main(["reproduce", "all", "--quick", "--out", str(out)]) == 0
    # Files are wanted by the last, and the one that takes too long keeps what it had.
    assert [name for name, *_ in runs] == ["perpca/figure3", "perpca/figure9", "perpca/figure4"]
    assert all(0 < timeout <= every.QUICK for _, timeout, _ in runs)
    assert runs[0][2][-4:] == ["--seeds", "1", "--seed", "0"]
    record = every.read_record(out)["0"]
    assert record["perpca/figure3"] == known["perpca/figure3"]
    assert record["perpca/figure4"]["failed"] == ["broke"]
    found = record["perpca/figure9"]
    assert [found[kind] for kind in every.KINDS] == [0, 1, 1, 0]
    assert found["which"] == ["1: 1.5, accepted [1, 2]; paper [3, 4]", "3: 3, accepted [1, 2]"]
    assert (out / every.PAGE).read_text() == every.page({"0": record})
    assert "items.md" in capsys.readouterr().out

    assert main(["reproduce", "all", "--full", "--out", str(out)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["reproduce", "all", "--full", "--out", str(out), "--force"]) == 0
    _, timeout, arguments = runs[-1]
    assert timeout is None and arguments[-4:] == ["--seeds", "3", "--seed", "0"]


def test_another_base_is_kept_beside_the_first(runs, monkeypatch, tmp_path):
    known = {"seconds": 5, "date": "2026-11-20", "seeds": 1, "which": []}
    known |= dict.fromkeys(every.KINDS, 1)
    monkeypatch.setattr(every, "COMMITTED", tmp_path / "committed")
    (tmp_path / "committed").mkdir()
    first = {"0": {"perpca/figure9": known}, "12": {"perpca/figure1": known}}
    (tmp_path / "committed" / every.RECORD).write_text(json.dumps(first))
    monkeypatch.setattr(papers, "names", lambda: ["perpca/figure1", "perpca/figure9"])
    out = tmp_path / "out"
    assert main(["reproduce", "all", "--quick", "--seed", "7", "--out", str(out)]) == 0
    assert all(arguments[-4:] == ["--seeds", "1", "--seed", "7"] for *_, arguments in runs)
    record = every.read_record(out)
    assert list(record) == ["0", "7", "12"]
    assert {base: record[base] for base in first} == first
    assert sorted(record["7"]) == ["perpca/figure1", "perpca/figure9"]
    line = next(x for x in (out / every.PAGE).read_text().splitlines() if "| Figure 9 |" in x)
    assert (
        "| 1 reproduced, 1 as the reference alone, 1 differs, 1 not comparable "
        "| 1 as the reference alone, 1 differs | not run |"
    ) in line


def test_targets_of_one_experiment_are_known():
    groups = [group for group in every.together(papers.names()) if len(group) > 1]
    assert groups == [
        ["adept/figure3", "adept/figure4", "adept/table3"],
        ["faps/figure2", "faps/table2"],
        ["faps/figure3", "faps/table3"],
    ]


def test_targets_of_one_experiment_run_in_one_process(runs, tmp_path):
    names = ["faps/table2", "perpca/figure9", "faps/figure2"]
    record = every.run_all(Seeds(1), tmp_path, data=None, names=names, budget=None)
    requests = [process[:-2] for process in runs]
    assert sorted(requests) == [("faps/table2", "faps/figure2"), ("perpca/figure9",)]
    for name in names:
        assert record["0"][name]["which"][-1] == "3: 3, accepted [1, 2]"


def test_a_process_that_is_killed_has_failed(monkeypatch, tmp_path):
    killed = SimpleNamespace(returncode=-9, stderr="")
    monkeypatch.setattr(every.subprocess, "run", lambda *_, **__: killed)
    record = every.run_all(Seeds(1), tmp_path, data=None, names=["perpca/figure9"], budget=None)
    assert record["0"]["perpca/figure9"]["failed"] == ["exit status -9"]


def test_what_time_is_left_for_is_run(runs, tmp_path):
    every.run_all(Seeds(1), tmp_path, data=None, names=["perpca/figure9"], budget=0.0)
    assert runs == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["all"], "--quick or --full"),
        (["all", "--quick"], "--out"),
        (["all", "--full", "--out", "x", "--scale", "0.5"], "--scale"),
        (["perpca/table2", "--quick"], "--quick"),
    ],
)
def test_what_all_wants(arguments, expected, capsys):
    assert command.ALL == "all"
    assert main(["reproduce", *arguments]) == 2
    assert expected in capsys.readouterr().err
