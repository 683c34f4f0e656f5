"""The table of algorithms and channels has a row for everything that is exported."""

import re

import pytest

import jaxfed as jf
from bench.tables import channels as table


def test_every_exported_algorithm_has_a_row():
    exported = {
        value
        for package in (jf.pca, jf.gcca, jf.generative)
        for value in vars(package).values()
        if isinstance(value, type) and issubclass(value, jf.Algorithm)
    }

    def named(kind):
        return any(re.split(r"[,.]", name)[0] == kind.__name__ for name in table.CASES)

    missing = sorted(kind.__name__ for kind in exported if not named(kind))
    assert not missing, (
        f"add an entry for {', '.join(missing)} to CASES in bench/tables/channels.py"
    )
    made = {name: type(case.make()).__name__ for name, case in table.CASES.items()}
    assert all(name.startswith(kind) for name, kind in made.items())


def test_cells_say_what_it_costs_and_whether_it_converges():
    exact = table.Outcome(2.0, 1000.0)
    cell = table._cell
    assert cell(table.Outcome(2.01, 100.0), exact) == "0.10"
    assert cell(table.Outcome(1.9, 100.0), exact) == "(0.10: 5 % off)"
    assert cell(table.Outcome(float("nan"), 100.0), exact) == "(0.10: diverges)"
    assert cell(table.Outcome(0.0, 0.0, refusal="channel: no"), exact) == "refused"
    assert cell(exact, table.Outcome(2.0, 0.0)) == "nothing sent"


def _share(rounds: int, scale: float) -> str:
    """Of messages of four bits an entry, all but the first downlink, which has eight."""
    return f"{(2 * rounds * (4 + scale) + 4) / (2 * rounds * 32):.2f}"


@pytest.mark.slow
def test_rows_are_runs():
    kinds = ("SubspaceIteration", "MVLSA")
    names = ("diff. 4 bits", "masks, 20 bits")
    power, one_shot = table.rows(kinds, names, rounds=60)
    assert power["algorithm"] == "SubspaceIteration" and one_shot["algorithm"] == "MVLSA"
    assert power["diff. 4 bits"] == _share(60, 32 / 90)
    assert float(power["masks, 20 bits"]) == pytest.approx((20 / 32 + 1) / 2, abs=5e-3)
    assert "0.25" in one_shot["diff. 4 bits"] and one_shot["masks, 20 bits"] == "refused"


@pytest.mark.slow
def test_networks_are_sent_array_by_array():
    (row,) = table.rows(("FedAvg",), ("diff. 4 bits",), rounds=20)
    numbers = 2 * 30 * 3 + 30 + 3  # in four arrays, with a scale each
    assert row["diff. 4 bits"] == _share(20, 4 * 32 / numbers)
