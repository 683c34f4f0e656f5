"""Recompute printed tables and compare them cell by cell.

    python bench/still_hold.py                 # all of them, a quarter of an hour
    python bench/still_hold.py privacy start   # those whose script or page has such a name

A number holds if it differs by at most one in its last printed digit. Bounds and values like 1e-9
hold if they differ by at most a factor of a hundred, because rounding limits them, and rounding
differs between processors. "5 % off", of a run that does not converge through its channel, holds if
it differs by at most a factor of ten, because rounding decides where such a run is when it ends.
The script checks neither timings nor what `jaxfed reproduce` compares.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FACTOR = 100
NUMBER = re.compile(r"(?<![\w.])-?\d*\.?\d+(?:e-?\d+)?")
OFF = re.compile(r"([\d.]+) % off")


class Printed(NamedTuple):
    """A table that a script makes.

    Attributes:
        page: where it is printed.
        head: the beginning of its first line there.
        script: the module in `bench.tables` that makes it, with its arguments.
    """

    page: str
    head: str
    script: str


TABLES = (
    Printed("docs/guides/privacy.md", "| algorithm | first message |", "privacy"),
    Printed("docs/guides/persons.md", "| data, rows, neighbours |", "release real"),
    Printed("docs/guides/sharing.md", "| start | 1 round |", "sharing start"),
    Printed("docs/guides/sharing.md", "| features, local components,", "sharing shrinkage"),
    Printed("docs/guides/sharing.md", "| clients, noise |", "priors"),
    Printed("docs/guides/bits.md", "| algorithm | bfloat16 |", "channels"),
    Printed("bench/RESULTS.md", "| components | 2 samples |", "unseen_clients"),
    Printed("bench/RESULTS.md", "| update | rounds |", "pca variants"),
)


def rows_of(text: str, head: str = "") -> dict[str, list[str]]:
    """The cells of a table by their row's name, of Markdown or of aligned text."""
    lines = text[text.index(head) :].splitlines()
    if head:
        end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
        lines = lines[2:end]
    rows = {}
    for line in lines:
        inside = line.strip().strip("|") if "|" in line else re.sub(r"\s{2,}", "|", line.strip())
        name, *cells = (cell.strip() for cell in inside.split("|"))
        if cells:
            rows[name.replace("`", "")] = cells
    return rows


def unlike(printed: str, made: str) -> bool:
    """Whether two cells differ."""
    printed, made = (re.sub(r"[*`]", "", text) for text in (printed, made))
    if NUMBER.sub("#", printed) != NUMBER.sub("#", made):
        return True
    known, now = (float(max(OFF.findall(text), default=0)) for text in (printed, made))
    if not known / 10 <= now <= known * 10:
        return True
    kept = (NUMBER.findall(OFF.sub("", text)) for text in (printed, made))
    return any(off(*pair) for pair in zip(*kept, strict=True))


def off(printed: str, made: str) -> bool:
    """Whether a number differs from the printed one."""
    known, now = float(printed), float(made)
    if "e" in printed:
        return not known / FACTOR <= now <= known * FACTOR
    digits = len(printed.partition(".")[2])
    return abs(now - known) > 1.01 * 10**-digits


def differences(printed: dict[str, list[str]], made: dict[str, list[str]]) -> list[str]:
    """Describe the cells that differ and the rows that are missing."""
    found = [f"{name}: not made" for name in printed if name not in made]
    for name in printed.keys() & made.keys():
        for before, now in zip(printed[name], made[name], strict=True):
            if unlike(before, now):
                found.append(f"{name}: {before} is printed, {now} was made")
    return sorted(found)


def main() -> int:
    """Compare the tables; return 1 if any differs."""
    wanted = sys.argv[1:] or [""]
    for name in wanted:
        if not any(name in table.page + table.script for table in TABLES):
            known = ", ".join(table.script for table in TABLES)
            raise SystemExit(f"wanted part of the name of a script or page ({known}), got {name!r}")
    failed = False
    for table in TABLES:
        if not any(name in table.page + table.script for name in wanted):
            continue
        script, *arguments = table.script.split()
        command = [sys.executable, "-m", f"bench.tables.{script}", *arguments]
        made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
        page = (ROOT / table.page).read_text(encoding="utf-8")
        found = differences(rows_of(page, table.head), rows_of(made))
        failed |= bool(found)
        print(f"{table.page}, {table.script}: {'differs' if found else 'holds'}", flush=True)
        print("".join(f"    {line}\n" for line in found), end="", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
