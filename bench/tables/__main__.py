"""Print the list of commands that make the measured tables, as `bench/RESULTS.md` contains it.

python -m bench.tables
"""

import tomllib
from pathlib import Path

MADE_BY = tomllib.loads(Path(__file__).with_name("made_by.toml").read_text(encoding="utf-8"))


def listed() -> str:
    """The list as a table in Markdown."""
    lines = ["| table | command | minutes | not of it |", "| --- | --- | --- | --- |"]
    pages = {f"`{page}`": made for page, made in MADE_BY["pages"].items()}
    for name, made in (MADE_BY["results"] | pages).items():
        note = made.get("note", "")
        lines.append(f"| {name} | `{made['command']}` | {made['minutes']} | {note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(listed())
