"""The measurements that wait for hardware run, in a small size, on a processor."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    spec = importlib.util.spec_from_file_location("bench_accelerator", BENCH / "accelerator.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_prints_all_ratios(accelerator, capsys):
    accelerator.main(["--tiny"])
    printed = capsys.readouterr().out
    for ratio in (
        "kernel / plain", "kernel / reading", "kernel / eigenvalues", "one call / one by one",
        "round / reading",
    ):  # fmt: skip
        assert ratio in printed
    assert "nan" not in printed


def test_needs_an_accelerator(accelerator):
    with pytest.raises(SystemExit, match="--tiny"):
        accelerator.main([])
