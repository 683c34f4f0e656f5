"""Why rows of the page differ, read from `reasons.toml`."""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Reason(NamedTuple):
    """Why rows of a target differ.

    Attributes:
        target: whose rows.
        row: a part of their text, as the page prints it.
        kind: what sort of reason it is, one of `KINDS`.
        why: in a sentence.
    """

    target: str
    row: str
    kind: str
    why: str


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS: dict[str, str] = _FILE["kinds"]  # and what each means
REASONS = [Reason(**reason) for reason in _FILE["reasons"]]


def reason(target: str, row: str) -> str:
    """Why a row differs, after its kind; nothing where it is not known."""
    known = (one for one in REASONS if one.target == target and one.row in row)
    first = next(known, None)
    return "" if first is None else f"*{first.kind}*: {first.why}"
