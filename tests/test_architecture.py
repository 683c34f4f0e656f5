"""Imports go down the house, never up, and no two families meet."""

import ast
from pathlib import Path

import pytest

import jaxfed

ROOT = Path(jaxfed.__file__).parent

# Each package and what it may import of jaxfed, besides itself.
ALLOWED = {
    "linalg": set(),
    "manifolds": {"linalg"},
    "data": {"linalg", "manifolds"},
    "metrics": {"linalg", "manifolds"},
    "core": {"linalg", "manifolds"},
    "pca": {"linalg", "manifolds", "data", "metrics", "core"},
    "gcca": {"linalg", "manifolds", "core"},
    "models": set(),
    "generative": {"linalg", "manifolds", "core", "models"},
    "plot": {"linalg", "manifolds", "data", "metrics", "core", "pca"},
    "cli": {
        "linalg",
        "manifolds",
        "data",
        "metrics",
        "core",
        "models",
        "pca",
        "gcca",
        "generative",
        "plot",
    },
}


def imported(path: Path) -> set[str]:
    """The packages of jaxfed that a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "jaxfed" and len(parts) > 1 and (ROOT / parts[1]).is_dir():
                found.add(parts[1])
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_down(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} is gone; take it out of the table"
    for path in files:
        up = imported(path) - ALLOWED[package] - {package}
        assert not up, f"{path.relative_to(ROOT)} imports {sorted(up)}"


def test_every_package_has_its_floor():
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert packages == set(ALLOWED)


def test_kernels_know_nothing_of_jaxfed():
    kernels = Path(__import__("jaxfed_kernels").__file__).parent
    for path in kernels.rglob("*.py"):
        assert "import jaxfed" not in path.read_text().replace("jaxfed_kernels", "")
