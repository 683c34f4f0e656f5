"""Imports go down the house, never up, and no two families meet."""

import ast
import graphlib
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import jaxfed_kernels
import pytest

import jaxfed

# What each room may import of jaxfed, besides itself and the door to optional packages. A room is a
# package or a module at the top; one within another, as `core.channel`, has its own line.
DATA = {"linalg", "manifolds"}
CORE = {"core", *DATA}
FAMILIES = {"pca", "gcca", "generative"}
ALLOWED = {
    "_optional": set(),
    "_names": set(),
    "_versions": set(),
    "_checks": set(),
    "linalg": {"jaxfed_kernels"},
    "manifolds": {"linalg"},
    "data": DATA,
    "metrics": DATA,
    "models": set(),
    "core": {*DATA, "core.channel"},
    "core.channel": {"core.clients", "core.reduction", "core.checks", "linalg"},
    "pca": {*CORE, "data", "metrics"},
    "gcca": CORE,
    "generative": {*CORE, "models"},
    "privacy": CORE,
    "testing": CORE,
    "nn": CORE,
    "plot": {*CORE, "data", "metrics", "pca"},
    "deploy": {*CORE, *FAMILIES},
    "report": {*CORE, "metrics", "pca", "plot", "privacy"},
    "estimators": {*CORE, *FAMILIES, "data", "metrics", "models"},
    "cli": {*CORE, *FAMILIES, "data", "deploy", "metrics", "models", "plot", "privacy", "report"},
    "__init__": {
        *CORE, *FAMILIES, "data", "deploy", "estimators", "metrics", "models", "nn", "plot",
        "privacy", "report", "testing",
    },
    "__main__": {"cli"},
}  # fmt: skip
TOP = "jaxfed itself"  # the package, which imports nearly everything
UNKNOWN = "a module whose name is only known when it runs"


def violations(root: Path) -> list[str]:
    """What imports in a tree of jaxfed should not be there, as sentences.

    Args:
        root: the folder that holds `jaxfed` or `jaxfed_kernels`, or both.
    """
    found = []
    for path in sorted([*root.glob("jaxfed/**/*.py"), *root.glob("jaxfed_kernels/**/*.py")]):
        place = path.relative_to(root).with_suffix("").parts
        package = place[:-1]
        if place[0] == "jaxfed_kernels":
            room, allowed = "jaxfed_kernels", set()
        else:
            room = _room(place[1:])
            if room not in ALLOWED:
                found.append(f"{path.relative_to(root)} is in no room of the table")
                continue
            allowed = ALLOWED[room] | {"_optional", "_names", "_versions", "_checks"}
        for name in _imports(ast.parse(path.read_text()), package, room):
            target = name if name == UNKNOWN else _target(root, name)
            if target is not None and not _within(target, {room} | allowed, room):
                found.append(f"{path.relative_to(root)} imports {target}")
    return found


def _room(parts: tuple[str, ...]) -> str:
    """The room of a module, given by its path below jaxfed."""
    rooms = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((room for room in rooms if room in ALLOWED), parts[0])


def _within(target: str, allowed: set[str], own: str) -> bool:
    room = target if target in (TOP, UNKNOWN, "jaxfed_kernels") else _room(tuple(target.split(".")))
    if room in allowed:
        return True
    # A room within another goes with it, but for those who live in the inner one.
    outer = room.rpartition(".")[0]
    if outer in allowed and not own.startswith(f"{outer}."):
        return True
    return any(target == name or target.startswith(f"{name}.") for name in allowed)


def _target(root: Path, name: str) -> str | None:
    """What a dotted name is, as a path below jaxfed; None if it is something else."""
    first, *rest = name.split(".")
    if first == "jaxfed_kernels":
        return first
    if first != "jaxfed":
        return None
    # `from jaxfed import fit` names no module, and needs all of the package.
    real = bool(rest) and any(
        (Path(base, "jaxfed", rest[0] + ending)).exists()
        for base in (root, Path(jaxfed.__file__).parents[1])
        for ending in ("", ".py")
    )
    return ".".join(rest) if real else TOP


def _imports(tree: ast.AST, package: tuple[str, ...], room: str) -> list[str]:
    """The dotted names of everything that a module imports, at any depth of its code."""
    names, loaders = [], {"__import__", "import_module", "require"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            loaders |= {
                alias.asname
                for alias in node.names
                if alias.name in loaders and alias.asname is not None
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node.func) in loaders and node.args:
            names.append(_named(node, package))
    # The door itself is handed names, which are looked at where that is done.
    return [name for name in names if (name, room) != (UNKNOWN, "_optional")]


def _called(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _named(call: ast.Call, package: tuple[str, ...]) -> str:
    """The name of a module that is loaded by a function."""
    name, own = call.args[0], ".".join(package)
    if isinstance(name, ast.JoinedStr):
        first = name.values[0]
        if isinstance(first, ast.FormattedValue) and _called(first.value) == "__name__":
            return own
        # What is known of `f"jaxfed.cli.{name}"` will do, of `f"jaxfed.{name}"` it will not.
        start = str(first.value) if isinstance(first, ast.Constant) else ""
        return start.rpartition(".")[0] if start.count(".") > 1 else UNKNOWN
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return UNKNOWN
    if not name.value.startswith("."):
        return name.value
    level = len(name.value) - len(name.value.lstrip("."))
    return ".".join([*package[: len(package) - level + 1], name.value.lstrip(".")])


@pytest.mark.parametrize("module", [jaxfed, jaxfed_kernels], ids=lambda module: module.__name__)
def test_imports_go_down(module):
    assert violations(Path(module.__file__).parents[1]) == []


# What runs what a file says, or may; and what is put in place of it.
RUNNING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def runs_files(tree: ast.AST) -> list[str]:
    """What in a module would run what a file says."""
    found = [name for name in _imports(tree, (), "core") if name.split(".")[0] in RUNNING]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        never = "allow_pickle=False" in map(ast.unparse, node.keywords)
        opens = name.endswith(("np.load", "numpy.load", "read_array")) and not never
        if opens or name in ("eval", "exec", "torch.load", "pandas.read_pickle", "pd.read_pickle"):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("folder", ["jaxfed", "kernels", "bench"])
def test_no_file_is_read_that_could_run(folder):
    root = Path(__file__).parents[1] / folder
    found = {path: runs_files(ast.parse(path.read_text())) for path in root.rglob("*.py")}
    assert found and {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\n",
        "def f(x):\n    from joblib import load\n    return load(x)\n",
        "import numpy as np\nnp.load('x')\n",
        "import numpy as np\nnp.load('x', allow_pickle=True)\n",
        "torch.load('x')\n",
    ],
)
def test_every_form_of_running_a_file_is_seen(code):
    assert len(runs_files(ast.parse(code))) == 1


def test_every_room_is_in_the_table():
    house = Path(jaxfed.__file__).parent
    rooms = {path.parent.name for path in house.glob("*/__init__.py")}
    rooms |= {path.stem for path in house.glob("*.py")}
    assert rooms <= set(ALLOWED)


def test_the_table_has_no_circle():
    floors = {
        room: {name for name in below if not name.startswith(f"{room}.")} - {"jaxfed_kernels"}
        for room, below in ALLOWED.items()
        if "." not in room
    }
    order = list(graphlib.TopologicalSorter(floors).static_order())
    assert order.index("linalg") < order.index("manifolds") < order.index("core")
    for family in FAMILIES:
        assert order.index("core") < order.index(family)
        assert not ALLOWED[family] & FAMILIES


PLANTED = {
    "the package under another name": ("jaxfed/core/new.py", "import jaxfed as jf\n"),
    "an upward import": ("jaxfed/metrics/new.py", "import os, jaxfed.core.run\n"),
    "a relative import": ("jaxfed/linalg/new.py", "from ..core import run\n"),
    "a relative import of the package": ("jaxfed/privacy/new.py", "from .. import cli\n"),
    "from the package": ("jaxfed/core/channel/new.py", "from jaxfed import pca as p\n"),
    "a name of the package": ("jaxfed/core/new.py", "from jaxfed import fit\n"),
    "within a function": (
        "jaxfed/pca/new.py", "def f():\n    from jaxfed.gcca import MaxVar\n    return MaxVar\n"
    ),
    "by name": (
        "jaxfed/manifolds/new.py",
        "import importlib\nimportlib.import_module('jaxfed.generative')\n",
    ),
    "by name, under another name": (
        "jaxfed/models/new.py",
        "from importlib import import_module as load\nload('jaxfed.core.run')\n",
    ),
    "by a relative name": (
        "jaxfed/gcca/new.py", "import importlib\nimportlib.import_module('..pca', __package__)\n"
    ),
    "by a name that is put together": (
        "jaxfed/core/new.py", "import importlib\nimportlib.import_module(f'jaxfed.{__doc__}')\n"
    ),
    "through the door": (
        "jaxfed/core/new.py",
        "from jaxfed._optional import require\nrequire('jaxfed.plot', extra='plot')\n",
    ),
    "from a kernel": ("jaxfed_kernels/new.py", "def f():\n    import jaxfed.linalg\n"),
    "from a kernel, the package": ("jaxfed_kernels/new.py", "import jaxfed as jf\n"),
    "a kernel from above": ("jaxfed/core/new.py", "import jaxfed_kernels\n"),
    "channels of the run": ("jaxfed/core/channel/new.py", "from jaxfed.core import run\n"),
    "a module at the top": ("jaxfed/nn.py", "from jaxfed.pca import PerPCA\n"),
    "a module without a room": ("jaxfed/helpers.py", "import os\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_every_form_of_import_is_seen(name, tmp_path):
    place, code = PLANTED[name]
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert len(violations(tmp_path)) == 1
    assert place in violations(tmp_path)[0]


def test_what_may_be_imported_is_not_refused(tmp_path):
    path = tmp_path / "jaxfed/pca/new.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import importlib, jax\n"
        "from jaxfed._optional import require\n"
        "from jaxfed.core import channel\n"
        "from jaxfed.core.channel.base import Channel\n"
        "from . import perpca\n"
        "from ..linalg import polar\n"
        "importlib.import_module(f'{__name__}.other')\n"
        "require('matplotlib.pyplot', extra='plot')\n"
    )
    assert violations(tmp_path) == []


def test_the_package_waits_for_jax_until_it_is_needed():
    program = """
import contextlib, sys, jaxfed.cli
with contextlib.suppress(SystemExit):
    jaxfed.cli.main(["--help"])
print("jax" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.startswith("usage: jaxfed") and run.stdout.endswith("False\n"), run.stderr
    program = "import jaxfed, sys; print('jax' in sys.modules, callable(jaxfed.fit))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "False True\n", run.stderr


def test_the_sources_need_not_be_installed(monkeypatch):
    """Of a tree that is on the path alone, nothing says the version."""
    installed = metadata.version

    def version(name):
        if name == "jaxfed":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "version", version)
    names = runpy.run_path(str(Path(jaxfed.__file__).with_name("_versions.py")))
    assert names["VERSION"] == names["versions"]()["jaxfed"] == "0+unknown"
    assert names["versions"]()["jax"] == installed("jax")


def test_type_checkers_and_python_know_the_same_public_names():
    tree = ast.parse(Path(jaxfed.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)][:1]
    imported = {alias.asname for node in block.body for alias in node.names}
    assert imported == jaxfed._PLACES.keys() <= set(dir(jaxfed))
    assert all(getattr(jaxfed, name) is not None for name in imported)


ASSERTS = re.compile("assert_.*|raises|warns|check_algorithm")


def asserting(tree: ast.AST, helpers: dict[str, ast.AST]) -> set[str]:
    """The functions of a module that assert, or name one that does.

    Args:
        tree: the module.
        helpers: others, by the names of their modules.
    """
    found, names = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in helpers:
            found |= asserting(helpers[node.module], {}) & {alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            within = list(ast.walk(node))
            named = {n.attr for n in within if isinstance(n, ast.Attribute)}
            names[node.name] = {n.id for n in within if isinstance(n, ast.Name)}
            plain = any(isinstance(n, ast.Assert) for n in within)
            if plain or any(map(ASSERTS.fullmatch, named | names[node.name])):
                found.add(node.name)
    while more := {name for name, used in names.items() if used & found} - found:
        found |= more
    return found


def test_every_test_asserts_something():
    trees = {path: ast.parse(path.read_text()) for path in Path(__file__).parent.rglob("*.py")}
    helpers = {path.stem: tree for path, tree in trees.items()}
    tests = {
        (path.name, node.name)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    spoken = {(path.name, name) for path, t in trees.items() for name in asserting(t, helpers)}
    assert len(tests) > 1000 and sorted(tests - spoken) == []


def test_what_asserts_is_seen():
    code = """
def helper(): assert 1
def through(): helper()
def test_loud(): through()
def test_quiet(): print(helper2())
"""
    assert asserting(ast.parse(code), {}) == {"helper", "through", "test_loud"}
