"""Which slow tests continuous integration runs for a change."""

import importlib.util

import pytest

from tests.drawing import drawn_cases, listed_as_slow
from tests.helpers import ROOT

spec = importlib.util.spec_from_file_location("ci_slow", ROOT / ".ci" / "slow.py")
ci_slow = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ci_slow)


def test_what_is_listed_as_slow_exists():
    for name in listed_as_slow():
        path, test = name.partition("[")[0].split("::")
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), name


@pytest.fixture(scope="module")
def used():
    return ci_slow.uses()


@pytest.mark.parametrize(
    "path",
    [
        "jaxfed/core/run/fit.py",
        "jaxfed/linalg/polar.py",
        "jaxfed/_checks.py",
        "jaxfed/channel.py",  # a door to `core`
        "jaxfed/a_package_that_is_gone/module.py",
        "kernels/jaxfed_kernels/polar.py",
        "bench/formulas/noise.py",
        "tests/conftest.py",
        "tests/examples.py",
        "tests/references/perpca.py",
        "pyproject.toml",
        ".ci/run",
        "something/new.py",
    ],
)
def test_what_everything_depends_on_runs_all(path, used):
    assert ci_slow.slow_tests(["jaxfed/pca/perpca.py", path, "README.md"], used) == ["tests"]


@pytest.mark.parametrize("family", ["aggregation", "pca", "gcca", "generative", "preprocess"])
def test_a_family_runs_its_own_and_those_over_all_families(family, used):
    found = set(ci_slow.slow_tests([f"jaxfed/{family}/new.py"], used))
    assert found >= {
        f"tests/{family}",
        "tests/bench",
        "tests/cli",
        "tests/deploy",
        "tests/test_contract.py",
        "tests/core/backends",
        "tests/core/derivatives",
        "tests/project/test_readme.py",
    }
    others = ci_slow.FAMILIES - {family}
    assert not found & {"tests", "tests/core/wire", *(f"tests/{other}" for other in others)}


def test_a_package_runs_its_own_and_those_of_its_users(used):
    report = ci_slow.slow_tests(["jaxfed/report/page.py"], used)
    assert report == ["tests/bench", "tests/cli", ci_slow.PAGES, "tests/report"]
    models = set(ci_slow.slow_tests(["jaxfed/models/diffusion.py"], used))
    assert {"tests/models", "tests/generative", "tests/bench"} <= models
    assert not models & {"tests", "tests/pca", "tests/linalg"}


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ([], []),
        (["README.md", "CHANGELOG.md", "notebooks/one.ipynb", ".github/workflows/a.yml"], []),
        ([".ci/passed"], []),
        (["tests/example_package/tests/test_it.py"], []),
        (["docs/guides/sweeps.md"], ["tests/project/test_readme.py"]),
        (["bench/papers/items.md"], ["tests/bench"]),
        (["tests/test_contract.py"], ["tests/test_contract.py"]),
        (["tests/core/wire/test_channel.py", "README.md"], ["tests/core/wire"]),
        (["tests/test_that_is_gone.py", "tests/gone/test_it.py"], []),
    ],
)
def test_prose_runs_none_and_tests_run_those_beside_them(changed, wanted, used):
    assert ci_slow.slow_tests(changed, used) == wanted


def test_without_a_base_all_tests_run(monkeypatch, capsys):
    monkeypatch.setenv("CI_BASE", "no-such-commit")
    ci_slow.main()
    assert capsys.readouterr().out == "tests\n"


def test_the_recorded_commit_is_the_base_if_it_is_an_ancestor(monkeypatch):
    monkeypatch.delenv("CI_BASE", raising=False)
    recorded = (ROOT / ".ci" / "passed").read_text().strip()
    known = {"describe": None, "merge-base": "", "rev-parse": "head"}
    monkeypatch.setattr(ci_slow, "git", lambda command, *rest: known[command])
    assert ci_slow.base() == recorded
    # A shallow clone does not have it.
    monkeypatch.setattr(
        ci_slow, "git", lambda command, *rest: (known | {"merge-base": None})[command]
    )
    assert ci_slow.base() is None


def test_a_release_itself_runs_all_tests(monkeypatch, capsys):
    """HEAD is its own base."""
    monkeypatch.setattr(ci_slow, "git", lambda *arguments: "a1b2c3")
    ci_slow.main()
    assert capsys.readouterr().out == "tests\n"


def test_a_draw_keeps_cases_of_each_folder_and_many_draws_keep_all():
    names = [f"a/one.py::one[{i}]" for i in range(10)] + ["a/two.py::two", "b/one.py::one[x-[0]]"]
    drawn = [drawn_cases(names, 4, str(draw)) for draw in range(40)]
    for kept in drawn:
        assert len(kept) == 4 and "b/one.py::one[x-[0]]" in kept
    assert set.union(*drawn) == set(names) and len(set(map(frozenset, drawn))) > 20
    assert drawn_cases(names, 1, "") == set(names)
    assert drawn_cases(reversed(names), 4, "7") == drawn[7]
