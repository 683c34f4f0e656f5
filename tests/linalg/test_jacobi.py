"""The decompositions of TPUs and GPUs, on this processor, against those of its libraries."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.linalg import _jacobi
from jaxfed.linalg.eigen import with_sign
from jaxfed.linalg.platforms import per_platform

SHAPES = [(1, 1), (5, 5), (32, 5), (5, 32), (3, 2), (40, 33)]
QUICK = [
    (np.float32, (1, 1)),
    (np.float32, (5, 32)),
    (np.float32, (40, 33)),
    (np.float64, (32, 5)),
]


def batch(shape, dtype):
    """Matrices of one shape: at random, badly conditioned, of low rank, constant and zero."""
    rng = np.random.default_rng(0)
    small = min(shape)
    left, right = (np.linalg.qr(rng.normal(size=(n, small)))[0] for n in shape)
    spread = np.logspace(0, -12, small)
    corner = np.zeros(shape)
    corner[0, 0] = 1
    kinds = [
        rng.normal(size=shape),
        left * spread @ right.T,
        left @ right.T,
        np.outer(left[:, 0], right[:, 0]),
        np.ones(shape),
        corner,
        np.zeros(shape),
    ]
    return np.asarray(kinds, dtype)


def excess(rows):
    """How far from orthonormal rows are."""
    return np.abs(rows @ rows.swapaxes(-1, -2) - np.eye(rows.shape[-2])).max()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        pytest.param(dtype, shape, marks=() if (dtype, shape) in QUICK else pytest.mark.slow)
        for dtype in (np.float32, np.float64)
        for shape in SHAPES
    ],
)
def test_decompositions(shape, dtype, x64):
    matrices = batch(shape, dtype)
    slack = 30 * min(shape) * np.finfo(dtype).eps
    for svd in (_jacobi.svd, _jacobi.svd_of_projected):
        left, values, right = map(np.asarray, jax.jit(jax.vmap(svd))(matrices))
        np.testing.assert_allclose(
            values,
            np.linalg.svd(matrices.astype(float), compute_uv=False),
            atol=slack * max(1, values.max()),
        )
        assert excess(right) <= slack and excess(left.swapaxes(1, 2)) <= slack
        scale = values.max(axis=1)[:, None, None] + (values.max(axis=1) == 0)[:, None, None]
        assert np.abs((left * values[:, None]) @ right - matrices).max() <= slack * scale.max()

    tall = matrices if shape[0] >= shape[1] else matrices.swapaxes(1, 2)
    q, inverse = map(np.asarray, jax.jit(jax.vmap(_jacobi.orthonormalized))(tall))
    assert excess(q.swapaxes(1, 2)) <= slack
    triangle = q.swapaxes(1, 2) @ tall
    assert np.abs(np.tril(triangle, -1)).max() <= slack * scale.max()
    kept = np.diagonal(inverse, axis1=1, axis2=2) != 0
    product = np.where(kept[:, None], tall.astype(float) @ inverse, q)
    worst = np.abs(inverse).max(axis=(1, 2), keepdims=True) * scale + 1
    assert (np.abs(product - q) <= slack * worst).all()
    assert (inverse == np.triu(inverse)).all()

    symmetric = tall[:, : tall.shape[2]] + tall[:, : tall.shape[2]].swapaxes(1, 2)
    values, vectors = map(np.asarray, jax.jit(jax.vmap(_jacobi.eigh))(symmetric))
    expected = np.linalg.eigvalsh(symmetric.astype(float))
    np.testing.assert_allclose(values, expected, atol=slack * max(1, np.abs(expected).max()))
    assert excess(vectors.swapaxes(1, 2)) <= slack
    again = (vectors * values[:, None]) @ vectors.swapaxes(1, 2)
    assert np.abs(again - symmetric).max() <= slack * max(1, np.abs(expected).max())


def test_nan_gives_nan():
    matrix = jnp.ones((4, 3)).at[1, 1].set(jnp.nan)
    whole = jax.jit(lambda x: (*_jacobi.svd(x), *_jacobi.eigh(x[:3])))
    for part in whole(matrix):
        assert np.isnan(part).all()
    for part in jax.jit(_jacobi.svd_of_projected)(matrix):
        assert np.isnan(part).any()


def test_a_platform_gets_its_own_function():
    both = per_platform(lambda x, y: {"sum": x + y}, tpu=lambda x, y: {"sum": jnp.sin(x) + y})
    x, y = jnp.arange(6.0).reshape(2, 3), jnp.ones(3)
    assert np.array_equal(both(x[0], y)["sum"], x[0] + y)
    mapped = jax.jit(jax.vmap(jax.vmap(both, in_axes=(0, None)), in_axes=(0, None)))
    found = mapped(x, y)["sum"]
    assert found.shape == (2, 3, 3) and np.array_equal(found[1, 2], x[1, 2] + y)
    texts = {
        platform: jax.export.export(mapped, platforms=[platform])(x, y).mlir_module()
        for platform in ("cpu", "tpu", "cuda")
    }
    assert ["sine" in text for text in texts.values()] == [False, True, False]


def test_no_library_is_called_on_a_tpu():
    def factors(w):
        return jf.linalg.polar(w), jf.linalg.orthonormalize(w), jf.linalg.svd(w)

    mapped = jax.jit(jax.vmap(factors))
    w = jax.ShapeDtypeStruct((4, 9, 3), jnp.float32)
    text = jax.export.export(mapped, platforms=["tpu"])(w).mlir_module()
    assert set(re.findall(r"custom_call @(\w+)", text)) <= {"tpu_custom_call"}  # own kernels


def test_many_are_made_orthonormal_as_one_is():
    w = np.random.default_rng(0).normal(size=(2, 3, 4, 9)).astype(np.float32)
    w[0, 1, 2], w[1, 0, 1] = w[0, 1, 0], 0  # dependent, and zero
    one, many = jax.jit(_jacobi.gram_schmidt), jax.jit(jax.vmap(jax.vmap(_jacobi.gram_schmidt)))(w)
    for index in np.ndindex(2, 3):
        for of_many, of_one in zip(many, one(w[index]), strict=True):
            np.testing.assert_allclose(of_many[index], of_one, atol=1e-6)


def test_order_and_first_among_equals():
    keys, rows = jnp.asarray([2.0, 1, 2, 0, 1]), jnp.arange(10.0).reshape(5, 2)
    found = _jacobi._sorted(keys, rows)
    order = np.argsort(keys, kind="stable")
    assert (found[0] == keys[order]).all() and (found[1] == rows[order]).all()
    vectors = jnp.asarray([[0.5, -2, 0], [-2, 1, 0], [2, 2, 0], [0, 0, 0]])
    signs = with_sign(vectors) * vectors
    assert (signs[:, :2] <= 0).all() and (with_sign(vectors)[:, 2] == 0).all()
    assert (_jacobi.first_true(vectors == 2).sum(0) == jnp.asarray([1, 1, 0])).all()
