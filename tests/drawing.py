"""Draws some of the cases of each module of tests."""

import hashlib
from collections.abc import Iterable


def drawn_cases(names: Iterable[str], one_in: int, draw: str) -> set[str]:
    """Of each module's cases, one in so many, at least one; with other draws, sooner or later all.

    Args:
        names: pytest's names of the cases, `path::test[case]`.
        one_in: one in how many.
        draw: any text.
    """
    modules: dict[str, list[str]] = {}
    for name in names:
        modules.setdefault(name.partition("::")[0], []).append(name)

    def place(name: str) -> bytes:
        return hashlib.sha256(f"{draw} {name}".encode()).digest()

    return {
        name
        for cases in modules.values()
        for name in sorted(cases, key=place)[: -(-len(cases) // one_in)]
    }
