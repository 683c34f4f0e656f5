"""Hand-written kernels against their plain versions, interpreted on the processor."""

import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jaxfed_kernels import inverse_sqrt, inverse_sqrt_reference

from jaxfed.linalg import polar


def tall(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 9, 3), (5, 40, 16), (19, 60, 20)])
def test_inverse_sqrt(shape):
    """Batches and ranks that fill the kernel's blocks and tiles, and that do not."""
    w = tall(shape) * np.logspace(-3, 3, shape[0], dtype=np.float32)[:, None, None]
    gram = w.mT @ w
    inverse, error = inverse_sqrt(gram, interpret=True)
    reference, reference_error = inverse_sqrt_reference(gram)
    chex.assert_trees_all_close(inverse, reference, rtol=1e-4)
    chex.assert_trees_all_close(error, reference_error, atol=1e-5)
    assert error.max() < 1e-5
    values, vectors = np.linalg.eigh(gram.astype(np.float64))
    exact = (vectors / np.sqrt(values)[:, None]) @ vectors.mT
    size = np.abs(exact).max(axis=(1, 2), keepdims=True)
    chex.assert_trees_all_close(np.asarray(inverse / size, np.float64), exact / size, atol=1e-4)


def test_inverse_sqrt_tells_where_it_failed():
    singular = np.diag([1.0, 1.0, 0.0]).astype(np.float32)
    _, error = inverse_sqrt(np.stack([np.eye(3, dtype=np.float32), singular]), interpret=True)
    assert error[0] < 1e-5
    assert error[1] > 0.5


def test_can_be_lowered_for_the_accelerator():
    gram = jax.ShapeDtypeStruct((100, 12, 12), jnp.float32)
    target = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=AxisType.Auto, abstract_device=target)
    with use_abstract_mesh(mesh):
        program = inverse_sqrt.trace(gram).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in program


def test_polar_factor_by_the_kernel():
    """Mapped twice it is one call on one batch; it is differentiated by the rule of the others."""
    w = tall((2, 3, 20, 5))
    w[0, 1, :, 1] = w[0, 1, :, 0]  # lost rank: not the kernel's result, but a decomposition's

    def value_and_grad(method):
        def one(w):
            q, pullback = jax.vjp(lambda w: polar(w, method), w)
            return q, pullback(jnp.ones_like(w))[0]

        return jax.vmap(jax.vmap(one))

    program = str(jax.make_jaxpr(value_and_grad("pallas"))(w))
    assert program.count("pallas_call") == 1
    assert "f32[8,16,16]" in program

    q, gradient = jax.jit(value_and_grad("pallas"))(w)
    expected, slope = jax.jit(value_and_grad(None))(w)
    full = np.ones((2, 3), bool)
    full[0, 1] = False
    chex.assert_trees_all_close(q[full], expected[full], atol=1e-5)
    chex.assert_trees_all_close(gradient[full], slope[full], atol=1e-4)
    chex.assert_trees_all_close(q.mT @ q, np.broadcast_to(np.eye(5), (2, 3, 5, 5)), atol=1e-5)


def test_imports_nothing_of_the_library():
    package = Path(sys.modules["jaxfed_kernels"].__file__).parents[1]
    code = "import sys, jaxfed_kernels; sys.exit('jaxfed' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(package)})
