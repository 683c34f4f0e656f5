"""What holds for every file of the project; who may import whom is in pyproject.toml."""

import ast
import graphlib
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import grimp
import pytest

import jaxfed
from tests.helpers import ROOT


def imported(tree: ast.AST) -> list[str]:
    """The dotted names of everything that a module imports, at any depth of its code."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


# What runs what a file says, or may; and what is put in place of it.
RUNNING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def runs_files(tree: ast.AST) -> list[str]:
    """What in a module would run what a file says."""
    found = [name for name in imported(tree) if name.split(".")[0] in RUNNING]
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
    root = ROOT / folder
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


def private_imports(path):
    """What a module imports of the private modules of another package of `jaxfed`."""
    package = path.relative_to(ROOT / "jaxfed").with_suffix("").parts[0]
    found = []
    for name in imported(ast.parse(path.read_text())):
        first, *parts = name.split(".")
        private = any(part.startswith("_") and part[:2] != "__" for part in parts[1:])
        if private and first == "jaxfed" and parts[0] != package:
            found.append(name)
    return found


# Of these, none is compared with what has the unit of users' data: a bound of bits, a tolerance of
# a root, a threshold that is out of reach, and a guard of eigenvalues of unit trace.
TINY = {
    "core/derivatives/linear_system.py": 1,
    "privacy/_gaussian.py": 1,
    "privacy/expected.py": 1,
    "testing/_run_checks.py": 1,
}


def test_no_number_is_too_small_but_for_its_unit():
    """A constant of 1e-30 is huge beside squares of samples of size 1e-20."""
    found = {}
    for path in (ROOT / "jaxfed").rglob("*.py"):
        numbers = [
            node.value
            for node in ast.walk(ast.parse(path.read_text("utf8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, float)
        ]
        if many := sum(0 < number < 2e-15 for number in numbers):
            found[path.relative_to(ROOT / "jaxfed").as_posix()] = many
    assert found == TINY


def test_private_modules_are_imported_within_their_package_alone():
    paths = list((ROOT / "jaxfed").rglob("*.py"))
    assert len(paths) > 300
    assert {str(path): names for path in paths if (names := private_imports(path))} == {}


def test_the_package_waits_for_jax_until_it_is_needed():
    program = """
import contextlib, sys, jaxfed.cli
with contextlib.suppress(SystemExit):
    jaxfed.cli.main(["--help"])
print("jax" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.startswith("Usage: jaxfed") and run.stdout.endswith("False\n"), run.stderr
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


def test_no_import_closes_a_circle():
    """Not even one within a function or for type checkers."""
    graph = grimp.build_graph("jaxfed", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    circle = []
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]
    assert circle == []


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
    trees = {path: ast.parse(path.read_text()) for path in ROOT.joinpath("tests").rglob("*.py")}
    modules = {path: path.relative_to(ROOT).with_suffix("").parts for path in trees}
    helpers = {".".join(modules[path]): tree for path, tree in trees.items()}
    tests = {
        (modules[path], node.name)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    spoken = {(modules[path], name) for path, t in trees.items() for name in asserting(t, helpers)}
    assert len(tests) > 1000 and sorted(tests - spoken) == []


def test_what_asserts_is_seen():
    code = """
def helper(): assert 1
def through(): helper()
def test_loud(): through()
def test_quiet(): print(helper2())
"""
    assert asserting(ast.parse(code), {}) == {"helper", "through", "test_loud"}
