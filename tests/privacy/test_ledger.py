"""The budget: what is spent adds up, is on disk first, and is never spent twice."""

import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxfed import privacy
from jaxfed.privacy import _gaussian
from tests.helpers import gaussian

CLIENTS = gaussian((20, 12))
KEY = jax.random.key(0)


def release(ledger, epsilon=1.0, **options):
    return privacy.release_moments(
        CLIENTS, epsilon=epsilon, delta=1e-5, ledger=ledger, key=KEY, **options
    )


def test_releases_compose_exactly_and_the_budget_itself_is_not_refused(tmp_path):
    import dp_accounting

    path = tmp_path / "ledger.jsonl"
    sigmas = [_gaussian.noise_of(x, 1e-5) for x in (0.5, 0.7)]
    both = float(dp_accounting.get_epsilon_gaussian(sum(s**-2 for s in sigmas) ** -0.5, 1e-5))
    ledger = privacy.Ledger(path, epsilon=both, delta=1e-5)
    assert ledger.spent() == 0
    release(ledger, 0.5)
    np.testing.assert_allclose(ledger.spent(), 0.5, rtol=1e-9)
    release(ledger, 0.7)
    np.testing.assert_allclose(ledger.spent(), both, rtol=1e-6)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"^epsilon: wanted at most .* got .* so far and .* with"):
        release(ledger, 0.01)
    assert path.read_bytes() == before
    again = privacy.Ledger(path, epsilon=both, delta=1e-5)
    assert again.spent() == ledger.spent()
    budget, *lines = map(json.loads, path.read_text().splitlines())
    assert budget == {"budget": {"epsilon": both, "delta": 1e-5, "neighbours": "replace"}}
    assert [line["epsilon"] for line in lines] == [0.5, 0.7]
    assert {line["rows"] for line in lines} == {"pairs"}
    assert len({line["data"] for line in lines}) == 1


def test_several_releases_are_refused_together_before_the_first(tmp_path):
    path = tmp_path / "ledger.jsonl"
    half, whole = (
        privacy.release_moments(CLIENTS, epsilon=x, delta=1e-5, key=KEY).guarantee
        for x in (0.5, 1.0)
    )
    sigmas = [half.noise_multiplier, whole.noise_multiplier]
    both = _gaussian.epsilon_of(sum(s**-2 for s in sigmas) ** -0.5, 1e-5)
    ledger = privacy.Ledger(path, epsilon=both, delta=1e-5)
    ledger.check(half, whole)
    with pytest.raises(ValueError, match=r"^epsilon: .*got 0 so far and .* with these 3 \(delta"):
        ledger.check(half, whole, half)
    assert not path.exists()
    release(ledger, 0.5)
    before = path.read_bytes()
    ledger.check()
    ledger.check(whole)
    with pytest.raises(ValueError, match=r"^epsilon: .*got 0.5 so far and .* with these 2 "):
        ledger.check(half, whole)
    with pytest.raises(ValueError, match=r"^ledger: wanted releases per row, .* one per person"):
        ledger.check(half._replace(unit="person"))
    with pytest.raises(ValueError, match=r"^guarantees: wanted a jaxfed.privacy.Guarantee"):
        ledger.check(1.0)
    assert path.read_bytes() == before


def test_a_compiled_function_cannot_spend_once_and_release_often(tmp_path):
    ledger = privacy.Ledger(tmp_path / "ledger", epsilon=5.0, delta=1e-5)

    def often(key):
        return privacy.release_moments(CLIENTS, epsilon=1.0, delta=1e-5, ledger=ledger, key=key)

    with pytest.raises(ValueError, match=r"^ledger: wanted None within jit and vmap"):
        jax.jit(often)(KEY)
    with pytest.raises(ValueError, match=r"^ledger: wanted None within jit and vmap"):
        jax.vmap(often)(jax.random.split(KEY, 2))
    assert ledger.spent() == 0


def test_a_compiled_function_cannot_draw_one_key_and_release_often():
    with pytest.raises(ValueError, match=r"^key: wanted a random key within jit and vmap"):
        jax.jit(lambda: privacy.release_moments(CLIENTS, epsilon=1.0, delta=1e-5))()


@pytest.mark.parametrize("kept", ["replace", "add_remove"])
def test_other_neighbours_are_converted(kept, tmp_path):
    ledger = privacy.Ledger(tmp_path / "ledger", epsilon=10.0, delta=1e-5, neighbours=kept)
    release(ledger, neighbours="replace" if kept == "add_remove" else "add_remove")
    factor = 2**-0.5 if kept == "replace" else 2**0.5
    sigma = _gaussian.noise_of(1.0, 1e-5) * factor
    np.testing.assert_allclose(ledger.spent(), _gaussian.epsilon_of(sigma, 1e-5))


def test_units_are_not_mixed(tmp_path):
    ledger = privacy.Ledger(tmp_path / "ledger", epsilon=10.0, delta=1e-5)
    release(ledger)
    with pytest.raises(ValueError, match=r"ledger: wanted releases per row, .* got one per person"):
        release(ledger, person=[np.arange(20) // 2, np.arange(12) // 2])


def test_an_incomplete_line_counts(tmp_path):
    """A line that is cut anywhere is spent; where it does not tell its cost, all is."""
    path = tmp_path / "ledger"
    ledger = privacy.Ledger(path, epsilon=1.2, delta=1e-5)
    release(ledger)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in (start + 1, start + 10, start + 30, start + 90, len(whole) - 10, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert ledger.spent() >= 1 - 1e-9
        with pytest.raises(ValueError, match=r"^epsilon: wanted at most 1.2"):
            release(ledger)
    with pytest.raises(ValueError, match=r"a line there cannot be read"):
        path.write_bytes(whole[: start + 10])
        release(ledger, 0.1)
    path.write_bytes(whole[: start + 90])  # tells its cost
    release(ledger, 0.1)  # on a line of its own
    assert 1 < ledger.spent() < 1.2
    assert json.loads(path.read_text().splitlines()[-1])["epsilon"] == 0.1


def test_files_that_are_no_ledger_of_this_budget_are_refused(tmp_path):
    path = tmp_path / "ledger"
    release(privacy.Ledger(path, epsilon=1.0, delta=1e-5))
    for options in ({"epsilon": 2.0}, {"delta": 1e-6}, {"neighbours": "add_remove"}):
        with pytest.raises(ValueError, match=r"^path: wanted a ledger with the budget"):
            privacy.Ledger(path, **({"epsilon": 1.0, "delta": 1e-5} | options))
    for text in ("{", "[1]\n", "name,age\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"^path: wanted a ledger, whose first line"):
            privacy.Ledger(path, epsilon=1.0, delta=1e-5)
    for options in ({"epsilon": 0.0}, {"delta": 1.0}, {"neighbours": "x"}, {"path": 3}):
        (name,) = options
        with pytest.raises(ValueError, match=f"^{name}: wanted"):
            privacy.Ledger(**({"path": path, "epsilon": 1.0, "delta": 1e-5} | options))


def test_a_full_disk_spends_nothing_and_releases_nothing(tmp_path, monkeypatch):
    ledger = privacy.Ledger(tmp_path / "ledger", epsilon=1.0, delta=1e-5)
    assert not ledger.path.exists()
    release(ledger, 0.1)
    before = ledger.path.read_bytes()
    monkeypatch.setattr("os.write", lambda file, content: len(content) - 3)
    with pytest.raises(OSError, match=r"the disk is full"):
        release(ledger, 0.1)
    monkeypatch.undo()
    assert ledger.path.read_bytes() == before


def spend(path):
    """Try a tenth of the budget's squares, as one of several processes."""
    guarantee = privacy.Guarantee(
        "row", "replace", 1.0, 1e-5, _gaussian.noise_of(1.0, 1e-5), "pairs"
    )
    ledger = privacy.Ledger(path, epsilon=_budget(10), delta=1e-5)
    done = 0
    for _ in range(8):
        try:
            ledger.spend(guarantee, CLIENTS)
            done += 1
        except ValueError:
            pass
    return done


def _budget(times):
    return _gaussian.epsilon_of(_gaussian.composed([_gaussian.noise_of(1.0, 1e-5)] * times), 1e-5)


@pytest.mark.slow
def test_processes_share_one_budget(tmp_path):
    path = tmp_path / "ledger"
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        done = pool.map(spend, [path] * 3)
    assert sum(done) == 10
    assert len(path.read_text().splitlines()) == 11


@pytest.mark.slow
def test_what_a_killed_process_released_is_spent(tmp_path, environment):
    """It is killed after the line and before the noise."""
    path = tmp_path / "ledger"
    program = f"""
import os, signal, jax
from jaxfed import privacy
from jaxfed.privacy import moments
from tests.privacy.test_ledger import release
moments.released = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
release(privacy.Ledger({str(path)!r}, epsilon=1.2, delta=1e-5))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=root)
    assert done.returncode == -9
    ledger = privacy.Ledger(path, epsilon=1.2, delta=1e-5)
    np.testing.assert_allclose(ledger.spent(), 1.0)
    with pytest.raises(ValueError, match=r"^epsilon: wanted at most 1.2"):
        release(ledger)


# --- in words ---------------------------------------------------------------------------------


def test_a_statement_says_who_is_protected_and_how_far():
    text = privacy.statement(release(None))
    assert [line.partition(":")[0] for line in text.splitlines()] == [
        "Who",
        "Unit",
        "Release",
        "In odds",
        "Not covered",
    ]
    for words in (
        "Each row counts as another person",
        "1 for epsilon and 1e-05 for delta, if the data of one person are replaced",
        "by a factor of at most 2.72",
        "become at most 2.72 : 1, or 73 %",
        "local components of jaxfed.pca.fit_local",
        "they are public",
    ):
        assert words in text, words
    found = int(re.search(r"finds at most (\d+) %", text)[1])
    assert found == 8  # at 5 % false alarms, as noise of 3.73 times the distance allows
    several = privacy.statement(release(None, person=[np.arange(20) // 2, np.arange(12) // 2]))
    assert "with all rows that the person has" in several
    clipped = privacy.statement(release(None, rows="clip", bound=2.5, neighbours="add_remove"))
    assert "shortened to length 2.5" in clipped and "there or missing" in clipped
    for wrong in (CLIENTS, None, 3):
        with pytest.raises(ValueError, match=r"^released: wanted clients of release_moments"):
            privacy.statement(wrong)
