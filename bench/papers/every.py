"""Run all targets one after the other and write the page of the papers' tables and figures.

What a target found is kept, with its date, so that a later run of some targets renews their lines
and leaves the others'; what another base of the seeds gave is kept beside it. Targets run in
processes of their own, which can be stopped when time is up: those that tell of one experiment in
one, where it is made once.
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
from papers.reasons import KINDS as KINDS_OF_REASONS
from papers.reasons import reason
from papers.runs import Seeds

COMMITTED = Path(__file__).parent
RECORD, PAGE, TABLE = "record.json", "items.md", "items.csv"
FILES = (RECORD, PAGE, TABLE)
QUICK = 590  # seconds of a quick run, which takes ten minutes with its start and its end
# What a verdict may be; the second is of cells whose reference and paper differ.
KINDS = ("reproduced", "as the reference alone", "differs", "not comparable")

Found = dict[str, dict[str, Any]]  # what was found last, by target
Record = dict[str, Found]  # by the base of the seeds, "0" first


def kind_of(row: Mapping[str, Any]) -> str | None:
    """The kind of a verdict in a row of a target's `result.json`; None where there is none."""
    verdict = row.get("verdict", "")
    if verdict.startswith("reproduced; from the paper"):
        return "as the reference alone"
    return next((kind for kind in KINDS if verdict.startswith(kind)), None)


def together(names: Sequence[str]) -> list[list[str]]:
    """Group the targets that report the same experiment."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(papers.find(name).experiment or name, []).append(name)
    return list(groups.values())


def order(groups: Sequence[Sequence[str]], record: Record) -> list[Sequence[str]]:
    """Sort groups by their last run time; targets that never ran come last."""
    known = {name: one["seconds"] for found in record.values() for name, one in found.items()}
    return sorted(groups, key=lambda names: min(known.get(name, math.inf) for name in names))


def run_all(
    seeds: Seeds, out: Path, *, data: Path | None, names: Sequence[str], budget: float | None
) -> Record:
    """Run targets until all are done or time is up, and update their record and the page.

    Args:
        seeds: of every target.
        out: folder of the record and of what each target writes, a folder for each.
        data: folder of the data files; targets on files are left out without.
        names: of the targets.
        budget: seconds for all of them together; None lets them take as long as they do.
    """
    out.mkdir(parents=True, exist_ok=True)
    record, here = read_record(COMMITTED), read_record(out)
    bases = sorted({*record, *here, str(seeds.base)}, key=int)
    record = {base: record.get(base, {}) | here.get(base, {}) for base in bases}
    of_base = record[str(seeds.base)]
    write_page(record, out)
    start_time = time.monotonic()
    for group in order(together(names), record):
        left = None if budget is None else budget - (time.monotonic() - start_time)
        if left is not None and left <= 0:
            break
        if data is None and wants_data(group[0]):
            continue
        print(*group, flush=True)
        # What was found before still holds where time was too short.
        if found := run_together(group, seeds, out, data, left):
            of_base |= found
            write_page(record, out)
    return record


def folder_of(name: str, out: Path) -> Path:
    """The folder of a target among those of several."""
    return out / name.replace("/", "-")


def run_together(
    names: Sequence[str], seeds: Seeds, out: Path, data: Path | None, limit: float | None
) -> Found:
    """Targets of one experiment in one process, as `jaxfed reproduce` runs them.

    Returns:
        What each found, with the seconds of all; nothing where they were not done in time.
    """
    folder = out if len(names) > 1 else folder_of(names[0], out)
    command = [sys.executable, "-m", "jaxfed", "reproduce", *names, "--out", str(folder), "--force"]
    command += ["--seeds", str(len(seeds)), "--seed", str(seeds.base)]
    if data is not None and wants_data(names[0]):
        command += ["--data", str(data)]
    start_time = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {}
    alike: dict[str, Any] = {
        "seconds": round(time.monotonic() - start_time),
        "date": date.today().isoformat(),
        "seeds": len(seeds),
    }
    if done.returncode:
        # A process that was killed says nothing.
        status = f"exit status {done.returncode}"
        alike |= {"failed": done.stderr.strip().splitlines()[-1:] or [status]}
        return dict.fromkeys(names, alike)
    return {name: alike | read_result(folder_of(name, out)) for name in names}


def read_result(out: Path) -> dict[str, Any]:
    """Read what a target wrote: the number of verdicts of each kind, and the rows that differ.

    Rows of any kind but `"reproduced"` and `"not comparable"` are listed under `"which"`.
    """
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    kinds = [kind_of(row) for row in result["rows"]]
    which = [
        ", ".join(str(row[column]) for column in result["columns"] if row[column] not in ("", None))
        + f": {row['measured']}, accepted {row['accepts']}"
        for row, kind in zip(result["rows"], kinds, strict=True)
        if kind in ("as the reference alone", "differs")
    ]
    stamp = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    return {kind: kinds.count(kind) for kind in KINDS} | {"which": which, "versions": stamp}


def wants_data(name: str) -> bool:
    """Whether a target runs on files."""
    return papers.find(name).takes("data")


# --- the page ------------------------------------------------------------------------------------


def read_record(folder: Path) -> Record:
    """Read the results so far; empty where there is no record."""
    path = folder / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def verdict_of(targets: Sequence[str], found: Found) -> str:
    """The verdicts of an item's targets together."""
    ran = [found[name] for name in targets if name in found]
    if not ran:
        return "not run"
    if any("failed" in one for one in ran):
        return "failed"
    counts = {kind: sum(one.get(kind, 0) for one in ran) for kind in KINDS}
    verdict = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    if (seeds := max(one["seeds"] for one in ran)) > 1:
        verdict += f" ({seeds} seeds)"
    return "; ".join([verdict, *(f"{name} not run" for name in targets if name not in found)])


def columns_of(record: Record) -> list[str]:
    """The columns of the page, with one of verdicts for each base."""
    verdicts = [verdict_column(base) for base in record]
    return ["paper", "item", "shows", "covered", "targets", *verdicts, "seconds", "date", "missing"]


def verdict_column(base: str) -> str:
    """The heading of the verdicts of a base."""
    return f"verdict (--seed {base})"


def line_of(item: Item, record: Record) -> dict[str, str]:
    """An item as it stands on the page; time and date are of the first base that it ran with."""
    ran = ([found[name] for name in item.targets if name in found] for found in record.values())
    first = next(filter(None, ran), [])
    covered = item.covered != "not"
    verdicts = {
        verdict_column(base): verdict_of(item.targets, found) if covered else "no data"
        for base, found in record.items()
    }
    return {
        "paper": item.paper,
        "item": item.name,
        "shows": item.shows,
        "covered": item.covered,
        "targets": ", ".join(item.targets),
        **verdicts,
        "seconds": str(sum(one["seconds"] for one in first) or ""),
        "date": min((one["date"] for one in first), default=""),
        "missing": item.why,
    }


def page(record: Record) -> str:
    """The page as Markdown."""
    lines = [line_of(item, record) for item in ITEMS]
    columns = columns_of(record)
    covered = Counter(item.covered for item in ITEMS)
    every = [one for found in record.values() for one in found.values()]
    stamps = sorted({one["versions"] for one in every if "versions" in one})
    head = [
        "# The papers' tables and figures",
        "",
        f"{len(ITEMS)} tables and figures that show results: {covered['whole']} are covered whole, "
        f"{covered['part']} in part, {covered['not']} not. A verdict counts the cells of all of an "
        "item's targets, for each base of the seeds and for one seed where nothing else is said. "
        "*Reproduced* cells agree with everything that they are compared with. Cells *as the "
        "reference alone* agree with an independent implementation and not with what the paper "
        "prints. The others *differ*, or have nothing to be compared with. `jaxfed reproduce "
        "TARGET --seed BASE` prints them, each with the interval that it accepts. Seconds are by "
        "the clock, with compilation, on a machine that also does other things; targets of one "
        "experiment ran together, each with the seconds of all. With a single seed, one cell in "
        "twenty is outside two standard deviations by chance.",
        "",
        "Written by `jaxfed reproduce all`; " + "; ".join(stamps) + ".",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + " --- |" * len(columns),
    ]
    rows = ["| " + " | ".join(line[column] for column in columns) + " |" for line in lines]
    return "\n".join([*head, *rows, "", *what_differs(record)])


def what_differs(record: Record) -> list[str]:
    """The rows that differ, with what was measured, the interval that is accepted, and why."""
    kinds = "; ".join(f"*{kind}*: {meaning}" for kind, meaning in KINDS_OF_REASONS.items())
    lines = [
        "## What differs",
        "",
        "From the reference or from the paper, with the interval that is accepted, and why, where "
        f"it is known. {kinds}. The "
        'measurements behind it: `bench/RESULTS.md`, "Reproductions".',
        "",
    ]
    for base, found in record.items():
        for name, one in sorted(found.items()):
            command = f"`{name} --seeds {one['seeds']} --seed {base}`"
            for row in one.get("failed") or one["which"]:
                lines.append(" ".join(filter(None, [f"- {command}: {row}.", reason(name, row)])))
    return [*lines, ""]


def table(record: Record) -> str:
    """The page as comma-separated values."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(record), lineterminator="\n")
    writer.writeheader()
    writer.writerows(line_of(item, record) for item in ITEMS)
    return text.getvalue()


def write_page(record: Record, out: Path) -> None:
    """The record, the page and its table."""
    folder = Folder(out)
    ordered = {base: dict(sorted(found.items())) for base, found in record.items()}
    texts = json.dumps(ordered, indent=1) + "\n", page(record), table(record)
    for name, text in zip(FILES, texts, strict=True):
        with folder.writing(name) as part:
            part.write_text(text, encoding="utf-8")
