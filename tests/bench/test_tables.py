"""The measured tables: each says what makes it, and what is quick to make is what is printed."""

import importlib.util
import json
import re

import jax
import pytest

import papers
from bench import still_hold
from bench.tables import __main__ as tables
from bench.tables import pca
from papers import verdicts
from tests.helpers import ROOT

BENCH = ROOT / "bench"
RESULTS = (BENCH / "RESULTS.md").read_text(encoding="utf-8")


def sections():
    """The text below each heading."""
    parts = re.split(r"^## (.*)$", RESULTS, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_table_says_what_makes_it():
    known = tables.MADE_BY["results"]
    with_table = [name for name, text in sections().items() if "\n| --- |" in text]
    unknown = [
        name
        for name in with_table
        if not any(name.startswith(known_name) for known_name in (*known, "What makes each table"))
    ]
    assert not unknown
    gone = [name for name in known if not any(heading.startswith(name) for heading in sections())]
    assert not gone
    assert tables.listed() in RESULTS


def test_every_measured_table_of_the_documentation_says_what_makes_it():
    root, found = BENCH.parent, set()
    for page in [root / "README.md", *(root / "docs").rglob("*.md")]:
        if {"_build", "_generated"} & set(page.parts):
            continue
        for table in re.findall(r"(?:^\|.*\n){3,}", page.read_text(encoding="utf-8"), re.MULTILINE):
            rows = (line.strip("|").split("|")[1:] for line in table.splitlines()[2:])
            cells = [cell for row in rows for cell in row]
            if 2 * sum(bool(re.search(r"\d", cell)) for cell in cells) > len(cells) > 2:
                found.add(page.relative_to(root).as_posix())
    assert found - {"docs/reference/by_algorithm.md"} == set(tables.MADE_BY["pages"])


def test_what_makes_the_tables_is_there():
    commands = [made["command"] for part in tables.MADE_BY.values() for made in part.values()]
    assert not re.findall(r"python bench/(?!papers/verdicts)", " ".join(commands))
    for command in commands:
        for script in re.findall(r"python -m (bench[.\w]*)", command):
            assert importlib.util.find_spec(script), script
        for target in re.findall(r"jaxfed reproduce (\w+/\w+)", command):
            assert target in papers.names(), target


def test_what_holds_and_what_does_not(monkeypatch):
    check = still_hold
    head = "| name | a | b |\n| --- | --- | --- |\n"
    page = f"{head}| `x` | 0.3 | **<1e-9** |\n| y | 4 | refused |\n\nText"
    printed = check.rows_of(page, "| name | a")
    assert printed == {"x": ["0.3", "**<1e-9**"], "y": ["4", "refused"]}

    def made(x="0.35  <1e-8", y="4.02  refused"):
        return check.differences(printed, check.rows_of(f"jax 1\nname  a  b\n`x`  {x}\ny  {y}\n"))

    assert made() == []
    assert made(x="0.41  <1e-9") == ["x: 0.3 is printed, 0.41 was made"]
    assert made(x="0.3  <1e-6") == ["x: **<1e-9** is printed, <1e-6 was made"]
    assert made(y="4  3.1") == ["y: refused is printed, 3.1 was made"]
    assert check.differences(printed, {"x": printed["x"]}) == ["y: not made"]
    assert not check.unlike("(0.14: 2 % off)", "(0.14: 20 % off)")
    for other in ("(0.14: 30 % off)", "(0.16: 2 % off)", "0.14"):
        assert check.unlike("(0.14: 2 % off)", other)
    with pytest.raises(SystemExit, match=r"wanted part of the name .* got 'privcy'"):
        monkeypatch.setattr("sys.argv", ["still_hold.py", "privcy"])
        check.main()
    for table in check.TABLES:
        text = (BENCH.parent / table.page).read_text(encoding="utf-8")
        assert len(check.rows_of(text, table.head)) > 2
        assert importlib.util.find_spec(f"bench.tables.{table.script.split()[0]}")


@pytest.mark.slow
def test_the_updates_residuals_are_those_printed():
    rows = pca.variants(0)
    printed = sections()["Two updates of PerPCA (`bench/tables/pca.py variants`)"]
    for row in rows:
        assert f"| {row['update']} | {row['rounds']} | {row['residual, %']} |" in printed, row


@pytest.mark.slow
def test_the_eigensolvers_rounds_are_those_printed():
    double = jax.config.jax_enable_x64
    try:
        rows = pca.eigensolvers(0, starts=2)
    finally:
        jax.config.update("jax_enable_x64", double)
    # A start that is not among those of the table may take a round more.
    ranges = {
        (10, 1.1): (5, 7),
        (10, 1.0316): (8, 10),
        (10, 1.01): (13, 16),
        (20, 1.01): (12, 15),
        (40, 1.01): (8, 10),
    }
    for row in rows:
        low, high = ranges[row["p"], row["ratio"]]
        assert all(low <= int(count) <= high for count in row["BlockLanczos"].split(" to ")), row


def test_verdicts_of_two_revisions_are_compared_row_by_row(tmp_path, monkeypatch):
    def write(name, *rows):
        folder = tmp_path / name / "perpca-figure3"
        folder.mkdir(parents=True)
        rows = [
            {"angle": angle, "paper": "", "verdict": verdict, "mean": mean}
            for angle, mean, verdict in rows
        ]
        (folder / "result.json").write_text(json.dumps({"rows": rows}))

    write("before", ("1", 2.0, "reproduced"), ("2", 1.0, "differs by +1"), ("3", None, None))
    write("after", ("1", 2.0, "reproduced"), ("2", 1.5, "reproduced; from the paper by 1"))
    line = verdicts.compared(*(tmp_path / x / "perpca-figure3" for x in ("before", "after")))
    assert list(line.values()) == ["perpca/figure3", 2, 1, 1, "0.3", 1, 2, 1, 0]
    monkeypatch.setattr("sys.argv", ["verdicts.py", str(tmp_path / "before"), "nowhere"])
    with pytest.raises(SystemExit, match=r"wanted two folders of results, got .*nowhere"):
        verdicts.main()
