"""All targets, one after the other, and the page of the papers' tables and figures.

What a target found is kept, with its date, so that a later run of some targets renews their lines
and leaves the others'. Each runs in a process of its own, which can be stopped when time is up.
"""

import csv
import io
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import papers
from jaxfed.cli._folder import Folder
from papers.items import ITEMS, Item
from papers.runs import Seeds

COMMITTED = Path(__file__).parent
RECORD, PAGE, TABLE = "record.json", "items.md", "items.csv"
FILES = (RECORD, PAGE, TABLE)
QUICK = 600  # seconds, of a quick run
COLUMNS = ("paper", "item", "shows", "covered", "targets", "verdict", "seconds", "date", "missing")
KINDS = ("reproduced", "differs", "not comparable")

Record = dict[str, dict[str, Any]]  # what was found last, by target


def counts_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many verdicts of each kind the rows of a target's `result.json` have."""
    words = [row["verdict"] for row in rows if row.get("verdict")]
    found = Counter(next(kind for kind in KINDS if word.startswith(kind)) for word in words)
    return {kind: found[kind] for kind in KINDS}


def order(names: Sequence[str], record: Record) -> list[str]:
    """First what is quick, so that as many as possible are done in time; what never ran, last."""
    return sorted(names, key=lambda name: record.get(name, {}).get("seconds", math.inf))


def run_all(
    seeds: Seeds, out: Path, *, data: Path | None, names: Sequence[str], budget: float | None
) -> Record:
    """Run targets until they are done or the time is, and renew their record and the page.

    Args:
        seeds: of every target.
        out: folder of the record and of what each target writes, a folder for each.
        data: folder of the data files; targets on files are left out without.
        names: of the targets.
        budget: seconds for all of them together; None lets them take as long as they do.
    """
    out.mkdir(parents=True, exist_ok=True)
    record = read_record(COMMITTED) | read_record(out)
    write_page(record, out)
    begun = time.monotonic()
    for name in order(names, record):
        left = None if budget is None else budget - (time.monotonic() - begun)
        if left is not None and left <= 0:
            break
        if data is None and wants_data(name):
            continue
        print(name, flush=True)
        found = run_one(name, seeds, out / name.replace("/", "-"), data, left, record)
        if found is not None:
            record[name] = found
            write_page(record, out)
    return record


def run_one(
    name: str, seeds: Seeds, out: Path, data: Path | None, limit: float | None, record: Record
) -> dict[str, Any] | None:
    """One target in a process of its own, as `jaxfed reproduce` runs it.

    Returns:
        What it found; what is on record, if anything, where it was not done in time.
    """
    command = [sys.executable, "-m", "jaxfed", "reproduce", name, "--out", str(out), "--force"]
    command += ["--seeds", str(len(seeds)), "--seed", str(seeds.base)]
    if data is not None and papers.find(name).takes("data"):
        command += ["--data", str(data)]
    begun = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        # What it found before still holds.
        return record.get(name)
    found: dict[str, Any] = {
        "seconds": round(time.monotonic() - begun),
        "date": date.today().isoformat(),
        "seeds": len(seeds),
        "base": seeds.base,
    }
    if done.returncode:
        return found | {"failed": done.stderr.strip().splitlines()[-1:]}
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    differs = [
        " | ".join(str(row[column]) for column in result["columns"])
        for row in result["rows"]
        if row.get("verdict", "").startswith("differs")
    ]
    stamp = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    return found | counts_of(result["rows"]) | {"which": differs, "versions": stamp}


def wants_data(name: str) -> bool:
    """Whether a target runs on files."""
    return papers.find(name).takes("data")


# --- the page ------------------------------------------------------------------------------------


def read_record(folder: Path) -> Record:
    """What was found so far; nothing where there is no record."""
    path = folder / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def verdict_of(found: Sequence[Mapping[str, Any]]) -> str:
    """The verdicts of an item's targets together."""
    if any("failed" in one for one in found):
        return "failed"
    if not found:
        return "not run"
    counts = {kind: sum(one[kind] for one in found) for kind in KINDS}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def line_of(item: Item, record: Record) -> dict[str, str]:
    """An item as it stands on the page."""
    found = [record[name] for name in item.targets if name in record]
    rest = [name for name in item.targets if name not in record]
    verdict = "; ".join([verdict_of(found), *(f"{name} not run" for name in rest if found)])
    return dict(
        zip(
            COLUMNS,
            (
                item.paper,
                item.name,
                item.shows,
                item.covered,
                ", ".join(item.targets),
                "no data" if item.covered == "not" else verdict,
                str(sum(one.get("seconds", 0) for one in found) or ""),
                min((one["date"] for one in found), default=""),
                item.why,
            ),
            strict=True,
        )
    )


def page(record: Record) -> str:
    """The page as Markdown."""
    lines = [line_of(item, record) for item in ITEMS]
    covered = Counter(item.covered for item in ITEMS)
    seeds = sorted({f"--seeds {one['seeds']} --seed {one['base']}" for one in record.values()})
    stamps = sorted({one["versions"] for one in record.values() if "versions" in one})
    head = [
        "# The papers' tables and figures",
        "",
        f"{len(ITEMS)} tables and figures that show results: {covered['whole']} are covered whole, "
        f"{covered['part']} in part, {covered['not']} not. A verdict counts the cells of all of an "
        "item's targets that are reproduced, that differ, and that have nothing to be compared "
        "with; `jaxfed reproduce TARGET` prints them, each with the interval that it accepts. "
        "Seconds are by the clock, with compilation, on a machine that also does other things. Of "
        "a single seed one cell in twenty is outside two standard deviations by chance.",
        "",
        "Written by `jaxfed reproduce all`; " + "; ".join([*stamps, *seeds]) + ".",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + " --- |" * len(COLUMNS),
    ]  # fmt: skip
    rows = ["| " + " | ".join(line.values()) + " |" for line in lines]
    return "\n".join([*head, *rows, ""])


def table(record: Record) -> str:
    """The page as comma-separated values."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(line_of(item, record) for item in ITEMS)
    return text.getvalue()


def write_page(record: Record, out: Path) -> None:
    """The record, the page and its table."""
    folder = Folder(out)
    texts = json.dumps(record, indent=1, sort_keys=True) + "\n", page(record), table(record)
    for name, text in zip(FILES, texts, strict=True):
        with folder.writing(name) as part:
            part.write_text(text, encoding="utf-8")
