"""Why rows of the page differ, read from `reasons.toml`."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

NUMBER = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?|inf|nan)")


class Reason(NamedTuple):
    """Why rows of a target differ.

    Attributes:
        target: whose rows.
        kind: what sort of reason it is, one of `KINDS`.
        why: in a sentence.
        rows: from the label of each row to the range of measured values that the reason explains.
    """

    target: str
    kind: str
    why: str
    rows: Mapping[str, Sequence[float]]

    def explains(self, target: str, row: str) -> bool:
        """Whether this is why a row, as the page prints it, differs."""
        label, _, measured = row.partition(", accepted ")[0].rpartition(": ")
        if target != self.target or label not in self.rows:
            return False
        low, high = self.rows[label]
        number = NUMBER.match(measured)
        return number is not None and low <= float(number[0]) <= high


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS: dict[str, str] = _FILE["kinds"]  # and what each means
REASONS = [Reason(**reason) for reason in _FILE["reasons"]]


def reason(target: str, row: str) -> str:
    """Why a row differs, after its kind; nothing where it is not known."""
    first = next((one for one in REASONS if one.explains(target, row)), None)
    return "" if first is None else f"*{first.kind}*: {first.why}"
