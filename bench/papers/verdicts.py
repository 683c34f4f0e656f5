"""Compare the results of two revisions, target by target.

    jaxfed reproduce perpca/figure3 --seeds 1 --out BEFORE/perpca-figure3   # in each checkout
    python bench/papers/verdicts.py BEFORE AFTER

For every target in both folders: rows that both have, how many of them hold the same number to the
last digit and to a thousandth, the largest relative difference, and both verdicts. Rows that one
of them does not have, or that have no number, are not compared. A target that a revision draws
otherwise differs by more than rounding.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bench.common import table

VERDICTS = ("reproduced", "differs")


def rows_of(folder: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """The rows of one target that have a number, by their labels."""
    rows = json.loads((folder / "result.json").read_text(encoding="utf-8"))["rows"]
    found = {}
    for row in rows:
        if row.get("mean") is None:
            continue
        names = list(row)
        found[tuple(f"{name}: {row[name]}" for name in names[: names.index("paper")])] = row
    return found


def compared(before: Path, after: Path) -> dict[str, Any]:
    """One line of the table."""
    old, new = rows_of(before), rows_of(after)
    both = [(old[labels], new[labels]) for labels in old if labels in new]
    differences = [
        abs(a["mean"] - b["mean"]) / max(abs(a["mean"]), abs(b["mean"]), 1e-300) for a, b in both
    ]
    # What follows says by how much.
    counts = [
        Counter(re.split("[ ;:]", row["verdict"])[0] for row in side)
        for side in zip(*both, strict=True)
    ]
    return {
        "target": before.name.replace("-", "/", 1),
        "rows": len(both),
        "the same": sum(x == 0 for x in differences),
        "to a thousandth": sum(x <= 1e-3 for x in differences),
        "largest difference": f"{max(differences, default=0):.1g}",
    } | {
        f"{verdict}, {name}": count[verdict]
        for verdict in VERDICTS
        for name, count in zip(("before", "after"), counts or [Counter()] * 2, strict=True)
    }


def main() -> None:
    """Print the table of two folders."""
    if len(sys.argv) != 3 or not all(Path(given).is_dir() for given in sys.argv[1:]):
        sys.exit(f"wanted two folders of results, got {sys.argv[1:]}")
    before, after = map(Path, sys.argv[1:])
    names = sorted(p.name for p in before.iterdir() if (p / "result.json").exists())
    print(table([compared(before / n, after / n) for n in names if (after / n).exists()]))


if __name__ == "__main__":
    main()
