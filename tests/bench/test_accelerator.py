"""The measurements that wait for hardware run, in a small size, on a processor."""

import pytest

from bench.speed import accelerator


@pytest.mark.slow
def test_prints_all_ratios(capsys):
    accelerator.main(["--tiny"])
    printed = capsys.readouterr().out
    ratios = ("kernel / plain", "kernel / reading", "kernel / eigenvalues")
    for ratio in (*ratios, "one call / one by one", "round / reading"):
        assert ratio in printed
    assert "nan" not in printed


def test_needs_an_accelerator():
    with pytest.raises(SystemExit, match="--tiny"):
        accelerator.main([])
