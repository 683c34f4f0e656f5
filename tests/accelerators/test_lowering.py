"""Every algorithm is lowered for TPUs and GPUs, which needs neither them nor their compilers."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxfed as jf
from bench.tables import accelerator_matrix as matrix
from jaxfed.linalg import Moment


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    list(matrix.CASES),
)
def test_lowers_for_accelerators(kind):
    function, arguments = matrix.program(kind, "lossless", "forward", rounds=2)
    exported = jax.export.export(function, platforms=("tpu", "cuda"))(*arguments)
    assert exported.platforms == ("tpu", "cuda")
    # Neither a call back to Python nor a processor's library.
    text = exported.mlir_module()
    assert "callback" not in text and "lapack" not in text


def test_small_matrices_of_many_clients_keep_to_elementwise_work_on_a_tpu():
    # What takes a TPU's compiler up to a minute each: products, sorts, gathers and reductions of
    # pairs, as `argmax` is one, of a thousand small matrices.
    def start(samples):
        moment = Moment.from_samples(samples)
        values, vectors = moment.top(2)
        rest = moment.deflate(vectors)
        return values, rest.samples, rest.row_products(vectors.T)

    traced = jax.jit(jax.vmap(start)).trace(jnp.zeros((1000, 8, 32)))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "while" in text
    for operation in ("dot_general", "stablehlo.sort", "gather", "custom_call"):
        assert operation not in text
    # A reduction of pairs has two results.
    assert not re.search(r"%\S+:2 = stablehlo.reduce", text)
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "dot_general" in text


@pytest.mark.slow
def test_blocks_of_clients_are_laid_out_along_them_on_a_tpu():
    def solve(samples):
        clients = jf.Clients.from_samples(samples)
        return jf.rollout(
            jf.pca.SubspaceIteration(2),
            clients,
            rounds=2,
            key=jax.random.key(0),
            backend=jf.backend.chunked(64),
        ).result

    def layouts(*shape):
        traced = jax.jit(solve).trace(jax.ShapeDtypeStruct(shape, jnp.float32))
        return [
            traced.lower(lowering_platforms=(platform,)).as_text().count("LayoutConstraint")
            for platform in ("tpu", "cpu")
        ]

    tpu, cpu = layouts(256, 8, 32)
    assert tpu > 0 and cpu == 0
    # Arrays that fill their tiles stay as they are.
    assert layouts(256, 8, 128) == [0, 0]
