"""Every algorithm is lowered for TPUs and GPUs, which needs neither them nor their compilers."""

import jax
import pytest

import accelerator_matrix as matrix

# Networks and what has many decompositions take seconds to trace.
QUICK = {
    "Pooled", "Local", "SubspaceIteration", "BlockLanczos", "OneShot", "MVLSA", "PerPCA",
}  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, id=kind.__name__,
            marks=[] if kind.__name__ in QUICK else [pytest.mark.slow],
        )
        for kind in matrix.CASES
    ],
)  # fmt: skip
def test_lowers_for_accelerators(kind):
    function, arguments = matrix.program(kind, "lossless", "forward", rounds=2)
    exported = jax.export.export(function, platforms=("tpu", "cuda"))(*arguments)
    assert exported.platforms == ("tpu", "cuda")
    # Neither a call back to Python nor a processor's library.
    text = exported.mlir_module()
    assert "callback" not in text and "lapack" not in text
