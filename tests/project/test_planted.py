"""Faults that the tests must notice, planted one at a time in a copy of the package."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """A fault, and the test that fails where it is planted."""

    what: str
    file: str  # below `jaxfed`
    right: str  # a part of the file that occurs there once
    wrong: str  # takes its place
    test: str


LISTED = tomllib.loads(Path(__file__).with_name("planted.toml").read_text(encoding="utf-8"))
FAULTS = [Fault(**fault) for fault in LISTED["faults"]]


def planted(fault, folder):
    """A copy of the package with the fault in it."""
    package = folder / "jaxfed"
    shutil.copytree(ROOT / "jaxfed", package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / fault.file
    source = path.read_text(encoding="utf-8")
    assert source.count(fault.right) == 1, fault
    path.write_text(source.replace(fault.right, fault.wrong), encoding="utf-8")
    return folder


def test_every_fault_can_be_planted_and_has_a_test():
    for fault in FAULTS:
        assert (ROOT / "jaxfed" / fault.file).read_text().count(fault.right) == 1, fault
        path, name = fault.test.split("::")
        assert f"def {name.split('[')[0]}(" in (ROOT / path).read_text(), fault


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_is_noticed(fault, tmp_path, environment):
    paths = f"pythonpath={planted(fault, tmp_path)} {ROOT} {ROOT / 'bench'} {ROOT / 'tests'}"
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-m", "", "-o", paths, fault.test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\n1 failed" in done.stdout, done.stdout
