"""The papers' tables and figures, read from `items.toml`."""

import tomllib
from pathlib import Path
from typing import Literal, NamedTuple


class Item(NamedTuple):
    """A table or figure.

    Attributes:
        paper: whose.
        name: as it is called there.
        shows: what it is about.
        covered: `"whole"`, `"part"`, or `"not"` at all.
        targets: what is run for it.
        why: what is missing, or stands in for the paper's data.
    """

    paper: str
    name: str
    shows: str
    covered: Literal["whole", "part", "not"]
    targets: list[str]
    why: str = ""


_PAPERS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ITEMS = [
    Item(paper, name, **item) for paper, items in _PAPERS.items() for name, item in items.items()
]
