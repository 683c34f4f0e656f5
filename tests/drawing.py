"""Says which cases of tests are slow, and draws some of each folder's."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def listed_as_slow() -> set[str]:
    """pytest's names of the tests and cases in `slow.txt`."""
    lines = Path(__file__).with_name("slow.txt").read_text(encoding="utf-8").splitlines()
    return {f"tests/{line}" for line in lines if line and not line.startswith("#")}


def drawn_cases(names: Iterable[str], one_in: int, draw: str) -> set[str]:
    """Of each folder's cases, one in so many, at least one; with other draws, sooner or later all.

    Args:
        names: pytest's names of the cases, `path::test[case]`.
        one_in: one in how many.
        draw: any text.
    """
    folders: dict[str, list[str]] = {}
    for name in names:
        path = name.partition("::")[0]
        folders.setdefault(path.rpartition("/")[0], []).append(name)

    def place(name: str) -> bytes:
        return hashlib.sha256(f"{draw} {name}".encode()).digest()

    return {
        name
        for cases in folders.values()
        for name in sorted(cases, key=place)[: -(-len(cases) // one_in)]
    }
