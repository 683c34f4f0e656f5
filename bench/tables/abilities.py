"""What neighbouring libraries can do, beside jaxfed: the table of docs/guides/neighbours.md.

    python -m bench.tables.abilities table
    python -m bench.tables.abilities check FOLDER

`abilities.toml` names, for each library and ability, what does it. The first command prints the
table. The second one looks for all these names, and those of arguments, in the libraries' sources,
which are in folders of FOLDER, as of `pip install --no-deps --target FOLDER/NAME NAME`; no library
is imported. It cannot show that something is missing: empty cells are what their public names and
documentation do not offer. Please tell us about a cell that is wrong.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LISTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LIBRARIES: dict[str, dict[str, str]] = LISTED["libraries"]
TOGETHER = ("scanpy", "pyliger")
CELL = re.compile(r"(?P<module>[\w.]+):(?P<path>[\w.]+)(?:\((?P<argument>\w+)\))?")


class Named(NamedTuple):
    """What does something in a library."""

    module: str
    path: tuple[str, ...]  # a name, or those of a class and a method
    argument: str | None

    @classmethod
    def of(cls, cell: str) -> "Named":
        """Read a cell, `module:Object.method(argument)`."""
        found = CELL.fullmatch(cell)
        assert found is not None, cell
        return cls(found["module"], tuple(found["path"].split(".")), found["argument"])

    @property
    def text(self) -> str:
        """How the table shows it."""
        name = ".".join(["jf", *self.module.split(".")[1:], *self.path])
        return f"`{name}`, `{self.argument}=`" if self.argument else f"`{name}`"


def cells() -> Iterator[tuple[str, str, Named]]:
    """Each library and ability, with what does it."""
    for row in LISTED["rows"]:
        for library in LIBRARIES:
            if library in row:
                yield library, row["what"], Named.of(row[library])


def markdown() -> str:
    """The table: names of what jaxfed does it with, and which others can."""
    found = {(library, what): named for library, what, named in cells()}

    def cell(column: tuple[str, ...], what: str) -> str:
        named = [found[library, what] for library in column if (library, what) in found]
        if not named:
            return "–"
        return named[0].text if column == ("jaxfed",) else "yes"

    # Both are used together.
    columns = [(x,) for x in LIBRARIES if x not in TOGETHER] + [TOGETHER]
    title = [", ".join(f"{x} {LIBRARIES[x]['version']}".strip() for x in own) for own in columns]
    lines = [["", *title], ["---"] * (1 + len(columns))]
    wanted = [row["what"] for row in LISTED["rows"]]
    lines += [[what, *(cell(own, what) for own in columns)] for what in wanted]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def is_in(named: Named, folder: Path) -> bool:
    """Whether a library's source, in a folder of this one, has the name and the argument."""
    parts = named.module.split(".")
    paths = [*folder.glob("/".join(["*", *parts]) + ".py")]
    paths += folder.glob("/".join(["*", *parts]) + "/__init__.py")
    return any(_has(path, named) for path in paths)


def _has(path: Path, named: Named) -> bool:
    body, node = ast.parse(path.read_text(encoding="utf-8")).body, None
    for name in named.path:
        kinds = ast.ClassDef | ast.FunctionDef
        node = next((x for x in body if isinstance(x, kinds) and x.name == name), None)
        if node is None:
            return False
        body = node.body
    if named.argument is None:
        return True
    if isinstance(node, ast.ClassDef):
        made = (x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__")
        node = next(made, None)
    if not isinstance(node, ast.FunctionDef):
        return False
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return named.argument in {each.arg for each in arguments}


def main() -> None:
    """Print the table, or the cells whose names are not in the sources."""
    match sys.argv[1:]:
        case ["table"]:
            print(markdown())
        case ["check", folder]:
            others = [x for x in cells() if x[0] not in ("jaxfed", "scikit-learn")]
            missing = [x for x in others if not is_in(x[2], Path(folder))]
            for library, what, named in missing:
                print(f"{library}: {what}: no {named}")
            print(f"{len(others) - len(missing)} of {len(others)} found")
            raise SystemExit(bool(missing))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
