#!/usr/bin/env python3
"""Print which slow tests a change concerns: folders and modules of tests, one a line, for pytest.

The change is what HEAD adds to $CI_BASE, else to the last tag of a version, else to the commit in
`.ci/passed`, else to the commit where it left `origin/main`. Where there is no such commit, or HEAD
is one, nothing tells what changed, and all tests are printed. Nothing is printed where no slow test
depends on the change.
"""

import ast
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
ALL = ["tests"]

FAMILIES = {"aggregation", "pca", "gcca", "generative", "nmf", "preprocess"}
# Tests outside of a family's own folder that run all of its algorithms.
OVER_FAMILIES = {
    *(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py")),
    "tests/accelerators",
    "tests/laws",
    "tests/aggregation/test_every_algorithm.py",
    "tests/core/backends",
    "tests/core/derivatives",
    "tests/deploy",
}
PAGES = "tests/project/test_readme.py"  # runs the code of the documentation
# No slow test reads these.
PROSE = {"notebooks", ".github", "LICENSE", "CITATION.cff", ".gitignore"}


def git(*arguments: str) -> str | None:
    """What git prints; None where it fails."""
    done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def passed() -> str | None:
    """The commit in `.ci/passed`, on which `.ci/run` passed, if it is an ancestor of HEAD."""
    recorded = (ROOT / ".ci" / "passed").read_text().strip()
    return None if git("merge-base", "--is-ancestor", recorded, "HEAD") is None else recorded


def base() -> str | None:
    """The commit that HEAD is compared with, if any other than HEAD."""
    if given := os.environ.get("CI_BASE"):
        found = git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}")
    elif tag := git("describe", "--tags", "--abbrev=0", "--match", "v*"):
        found = git("rev-parse", f"{tag}^{{commit}}")
    elif commit := passed():
        found = commit
    else:
        found = git("merge-base", "HEAD", "origin/main")
    return None if found == git("rev-parse", "HEAD") else found


def names_used(source: str) -> set[str]:
    """The modules and names directly in `jaxfed` that Python code uses."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module="jaxfed", names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module)) if module.startswith("jaxfed."):
                found.add(module.split(".")[1])
            case ast.Import(names=names):
                found |= {a.name.split(".")[1] for a in names if a.name.startswith("jaxfed.")}
            case ast.Attribute(value=ast.Name(id="jf"), attr=name):
                found.add(name)
    return found


def uses() -> dict[str, set[str]]:
    """Of each package, and of `bench`: the names in `jaxfed` that it uses."""
    units = [p for p in (ROOT / "jaxfed").iterdir() if not p.name.startswith("_")]
    return {
        unit.stem: {
            name
            for path in ([unit] if unit.is_file() else unit.rglob("*.py"))
            for name in names_used(path.read_text())
        }
        for unit in (*units, ROOT / "bench")
    }


def dependents(packages: set[str], used: dict[str, set[str]]) -> set[str]:
    """These packages and all that use them, directly or not."""
    found, before = packages, set()
    while found != before:
        before = found
        found = found | {user for user, names in used.items() if names & found}
    return found


def slow_tests(changed: Iterable[str], used: dict[str, set[str]]) -> list[str]:
    """The folders and modules with the slow tests that a change of these files concerns.

    Args:
        changed: paths in the repository.
        used: of each package, the packages that it uses.
    """
    packages, chosen = set(), set()
    for path in map(PurePosixPath, changed):
        match path.parts:
            case ("jaxfed", package, *_):
                packages.add(package.removesuffix(".py"))
            case ("bench", part, *_) if part != "formulas":  # which tests of all packages read
                packages.add("bench")
            case ("docs", *_):
                chosen.add(PAGES)
            case ("tests", "example_package", *_):
                pass  # has tests of its own
            case ("tests", name) if name.startswith("test_"):
                chosen.add(str(path))
            case ("tests", folder, _, *_) if folder != "references":
                chosen.add(str(path.parent))
            case (".ci", name) if name not in ("run", "slow.py"):
                pass
            case (top, *rest) if top in PROSE or (not rest and path.suffix == ".md"):
                pass
            case _:
                return ALL
    packages = dependents(packages, used)
    chosen |= {f"tests/{package}" for package in packages}
    if packages - {"bench"}:
        chosen.add(PAGES)
    if packages & FAMILIES:
        chosen |= OVER_FAMILIES
    # `core` is under everything, and what has no tests of its own is tested by all of them.
    untested = any(not (ROOT / "tests" / package).exists() for package in packages)
    if "core" in packages or untested:
        return ALL
    return sorted(path for path in chosen if (ROOT / path).exists())


def main() -> None:
    """Print what the change of this checkout concerns."""
    start = base()
    changed = start and git("diff", "--name-only", "--no-renames", start, "HEAD")
    print(*(ALL if changed is None else slow_tests(changed.splitlines(), uses())), sep="\n")


if __name__ == "__main__":
    main()
