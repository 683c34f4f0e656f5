"""Hand-written kernels against their plain versions, interpreted on the processor."""

import ast
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu
from jaxfed_kernels import LARGEST_RANK, inverse_sqrt, inverse_sqrt_reference
from jaxfed_kernels.inverse_sqrt_cuda import inverse_sqrt_cuda

from jaxfed.linalg import _dispatch, polar
from jaxfed.linalg._newton_schulz import newton_schulz
from jaxfed.linalg.platforms import per_platform

polar_module = sys.modules["jaxfed.linalg.polar"]


def tall(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def exact(gram):
    values, vectors = np.linalg.eigh(gram.astype(np.float64))
    return (vectors / np.sqrt(values)[:, None]) @ vectors.mT


KERNELS = {
    "tpu": partial(inverse_sqrt, interpret=True),
    "cuda": partial(inverse_sqrt_cuda, interpret=True),
    "plain": inverse_sqrt_reference,
}


def check_nearly_orthonormal(kernel, batch, r, seed=0):
    """As Gram matrices are in rounds, of any scale: exact to rounding."""
    rng = np.random.default_rng(seed)
    q = np.linalg.qr(rng.normal(size=(batch, 2 * r, r)))[0]
    w = (q + 0.2 / r * rng.normal(size=q.shape)) * 10.0 ** rng.integers(-3, 4, (batch, 1, 1))
    gram = (w.mT @ w).astype(np.float32)
    inverse, error = KERNELS[kernel](gram)
    assert inverse.dtype == error.dtype == jnp.float32
    assert np.all(error < 1e-5)
    difference = np.linalg.norm(inverse - exact(gram), axis=(1, 2))
    assert np.all(difference <= 1e-6 * np.linalg.norm(exact(gram), axis=(1, 2)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_inverse_sqrt(kernel):
    """More matrices than fit into a block of either, and none that fill the last."""
    check_nearly_orthonormal(kernel, 131, 3)
    assert [x.shape for x in KERNELS[kernel](np.zeros((0, 3, 3), np.float32))] == [(0, 3, 3), (0,)]


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.sampled_from(list(KERNELS)),
    st.integers(1, 300),
    st.integers(1, LARGEST_RANK),
    st.integers(0, 99),
)
def test_inverse_sqrt_of_any_size(kernel, batch, r, seed):
    check_nearly_orthonormal(kernel, batch, r, seed)


@pytest.mark.parametrize("kernel", KERNELS)
def test_inverse_sqrt_of_badly_conditioned(kernel):
    w = tall((5, 18, 3)) * np.logspace(-1, 0, 3, dtype=np.float32)
    gram = w.mT @ w
    inverse, error = KERNELS[kernel](gram)
    assert error.max() < 1e-4
    size = np.abs(exact(gram)).max(axis=(1, 2), keepdims=True)
    chex.assert_trees_all_close(
        np.asarray(inverse, np.float64) / size, exact(gram) / size, atol=1e-4
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_inverse_sqrt_tells_where_it_failed(kernel):
    """And its neighbours are none the worse."""
    singular, nan = np.diag([1.0, 1.0, 0.0]), np.full((3, 3), np.nan)
    grams = np.stack([np.eye(3), singular, nan, np.diag([1.0, 2.0, 3.0])]).astype(np.float32)
    inverse, error = KERNELS[kernel](grams)
    assert error[0] < 1e-5
    assert error[1] > 0.5
    assert not error[2] <= 1
    assert error[3] < 1e-5
    chex.assert_trees_all_close(inverse[3], np.diag([1, 2**-0.5, 3**-0.5]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [inverse_sqrt, inverse_sqrt_cuda])
def test_refuses_what_does_not_fit(kernel):
    with pytest.raises(ValueError, match="gram: wanted at most 32 rows, got 33"):
        kernel(jnp.zeros((2, 33, 33)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rank", "calls"),
    [
        (None, 5, {"tpu": 1, "cuda": 0, "cpu": 0}),
        ("pallas", 5, {"tpu": 1, "cuda": 1, "cpu": 0}),
        ("pallas", 40, {"tpu": 0, "cuda": 0, "cpu": 0}),
    ],
)
def test_is_chosen_where_a_program_is_lowered(method, rank, calls):
    """Mapped twice it is one call on one batch; what is too large has another way."""
    for platform, count in calls.items():
        program = program_of_polars(method, rank, platform)
        assert len(kernels_in(program)) == count, platform
        assert "callback" not in program, "interpreted by the machine that lowered it"


def program_of_polars(method, rank, platform):
    w = jax.ShapeDtypeStruct((2, 3, 50, rank), jnp.float32)
    traced = jax.jit(jax.vmap(jax.vmap(lambda w: polar(w, method)))).trace(w)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def kernels_in(program):
    return re.findall(r"custom_call @(tpu_custom_call|mosaic_gpu_v2)\b", program)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("kernel", None),
        ("kernel", lambda body, out_shape: body),
        ("LoweringSemantics", object),
        ("CompilerParams", object),
    ],
)
def test_does_without_where_pallas_has_changed(name, instead, monkeypatch):
    """A name is gone, or what it has or takes."""
    monkeypatch.delitem(sys.modules, "jaxfed_kernels.inverse_sqrt_cuda")
    if instead is None:
        monkeypatch.delattr(mosaic_gpu, name)
    else:
        monkeypatch.setattr(mosaic_gpu, name, instead)
    assert not kernels_in(program_of_polars("pallas", 5, "cuda"))


@pytest.mark.parametrize(
    ("capability", "count"), [("8.0", 0), ("9.0", 1), ("10.3", 1), ("12.0", 0)]
)
def test_does_without_on_gpus_that_pallas_does_not_compile_for(capability, count):
    here = mock.Mock(compute_capability=capability)
    with mock.patch.object(jax, "devices", return_value=[here]):
        assert len(kernels_in(program_of_polars("pallas", 5, "cuda"))) == count


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["tpu", "cuda"])
def test_polar_factor_by_the_kernel(kernel):
    """It is differentiated by the rule of the others, and what it cannot do is decomposed."""
    w = tall((2, 3, 20, 5))
    w[0, 1, :, 1] = w[0, 1, :, 0]  # lost rank: not the kernel's result, but a decomposition's

    def value_and_grad(w):
        q, pullback = jax.vjp(lambda w: polar(w, "pallas"), w)
        return q, pullback(jnp.ones_like(w))[0]

    by_kernel = partial(_dispatch._inverse_sqrts, KERNELS[kernel])
    here = per_platform(newton_schulz, kernels={"cpu": by_kernel})
    with mock.patch.dict(polar_module._INVERSE_SQRT, pallas=here):
        q, gradient = jax.jit(jax.vmap(jax.vmap(value_and_grad)))(w)
    jax.clear_caches()
    expected, slope = jax.jit(jax.vmap(jax.vmap(value_and_grad)))(w)
    full = np.ones((2, 3), bool)
    full[0, 1] = False
    chex.assert_trees_all_close(q[full], expected[full], atol=1e-5)
    chex.assert_trees_all_close(gradient[full], slope[full], atol=1e-4)
    chex.assert_trees_all_close(q.mT @ q, np.broadcast_to(np.eye(5), (2, 3, 5, 5)), atol=1e-5)


def test_imports_nothing_of_the_library():
    package = Path(sys.modules["jaxfed_kernels"].__file__).parents[1]
    code = "import sys, jaxfed_kernels; print({name.partition('.')[0] for name in sys.modules})"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
    )
    loaded = ast.literal_eval(ended.stdout)
    assert "jaxfed_kernels" in loaded and "jaxfed" not in loaded
