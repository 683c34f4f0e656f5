"""The measured tables: each says what makes it, and what is quick to make is what is printed."""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import pytest

import papers

BENCH = Path(__file__).parents[1] / "bench"
RESULTS = (BENCH / "RESULTS.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scripts():
    """The scripts by name; they import one another from their folder."""

    def load(name):
        spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


def sections():
    """The text below each heading."""
    parts = re.split(r"^## (.*)$", RESULTS, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_table_says_what_makes_it(scripts):
    known = scripts("tables").TABLES
    with_table = [name for name, text in sections().items() if "\n| --- |" in text]
    unknown = [
        name for name in with_table
        if not any(name.startswith(known_name) for known_name in (*known, "What makes each table"))
    ]  # fmt: skip
    assert not unknown
    gone = [name for name in known if not any(heading.startswith(name) for heading in sections())]
    assert not gone
    assert scripts("tables").listed() in RESULTS


def test_what_makes_the_tables_is_there(scripts):
    for made in scripts("tables").TABLES.values():
        for script in re.findall(r"bench/(\w+\.py)", made.command):
            assert (BENCH / script).is_file(), script
        for target in re.findall(r"jaxfed reproduce (\w+/\w+)", made.command):
            assert target in papers.names(), target


@pytest.mark.slow
def test_the_updates_residuals_are_those_printed(scripts):
    rows = scripts("small_tables").variants(0)
    printed = sections()["Two updates of PerPCA (`bench/small_tables.py variants`)"]
    for row in rows:
        assert f"| {row['update']} | {row['rounds']} | {row['residual, %']} |" in printed, row


@pytest.mark.slow
def test_the_eigensolvers_rounds_are_those_printed(scripts):
    double = jax.config.jax_enable_x64
    try:
        rows = scripts("small_tables").eigensolvers(0, starts=2)
    finally:
        jax.config.update("jax_enable_x64", double)
    # A start that is not among those of the table may take a round more.
    ranges = {(10, 1.1): (5, 7), (10, 1.0316): (8, 10), (10, 1.01): (13, 16), (20, 1.01): (12, 15),
              (40, 1.01): (8, 10)}  # fmt: skip
    for row in rows:
        low, high = ranges[row["p"], row["ratio"]]
        assert all(low <= int(count) <= high for count in row["BlockLanczos"].split(" to ")), row
