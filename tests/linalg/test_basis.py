"""Orthonormal bases by Gram-Schmidt, and leading eigenvectors."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxfed.linalg import (
    eigen,
    orthonormalize,
    polar,
    thin_product,
    top_eigenvectors,
    transposed_product,
)
from jaxfed.linalg.basis import orthonormal_rows

SLACK = {"float32": 1e-5, "float64": 1e-12}
METHODS = ["cholesky", "qr"]


def gram_schmidt(w):
    q, r = np.linalg.qr(np.asarray(w, np.float64))
    return q * np.sign(np.diag(r))


def defect(q):
    q = np.asarray(q, np.float64)
    return np.linalg.norm(q.T @ q - np.eye(q.shape[1]))


@partial(jax.jit, static_argnames="method")
def jitted(w, method):
    return orthonormalize(w, method)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", METHODS)
@given(
    shape=st.sampled_from([(5, 1), (8, 8), (40, 7)]),
    condition=st.floats(0, 9),
    scale=st.floats(-10, 10),
    seed=st.integers(0, 2**16),
)
def test_orthonormal_with_the_same_flag(dtype, method, shape, condition, scale, seed):
    rng = np.random.default_rng(seed)
    d, r = shape
    u, v = (np.linalg.qr(rng.normal(size=(k, r)))[0] for k in (d, r))
    w = 10**scale * (u * 10.0 ** (-condition * np.linspace(0, 1, r))) @ v.T
    with jax.enable_x64(dtype == "float64"):
        w = w.astype(dtype)
        q = jitted(w, method)
        assert q.dtype == dtype
        assert defect(q) <= SLACK[dtype] * r
        # Every leading block of columns spans what those of w span.
        error = 100 * r * np.finfo(dtype).eps * np.linalg.cond(np.asarray(w, np.float64))
        assert np.abs(q - gram_schmidt(w)).max() <= error


@pytest.mark.parametrize(
    "factor",
    [orthonormalize, partial(polar, method="eigh")],
    ids=["orthonormalize", "polar, eigh"],
)
def test_orthonormal_where_squares_nearly_vanish(factor):
    """Within a hundredfold of the smallest squares they used to be wrong by up to one."""
    w = np.random.default_rng(0).normal(size=(6, 2))
    scales = 10.0 ** np.concatenate([np.arange(-20, -16, 0.2), np.arange(18, 19, 0.2)])
    q = jax.jit(jax.vmap(factor))(jnp.asarray(scales[:, None, None] * w, jnp.float32))
    products = np.swapaxes(q, 1, 2) @ q
    np.testing.assert_allclose(products, np.broadcast_to(np.eye(2), products.shape), atol=2e-5)


def test_orthonormal_matrices_are_fixed_points(x64):
    w = gram_schmidt(np.random.default_rng(0).normal(size=(40, 7)))
    chex.assert_trees_all_close(jitted(w, "cholesky"), w, atol=1e-14)


@pytest.mark.parametrize("method", METHODS)
def test_lost_rank_and_bad_numbers_stay_with_their_client(method):
    good = jnp.asarray(np.random.default_rng(0).normal(size=(6, 3)), jnp.float32)
    column = jnp.linspace(1, 2, 6)[:, None]
    w = jnp.stack(
        [
            jnp.zeros((6, 3)),
            jnp.tile(column, (1, 3)),
            good.at[:, 1].set(0),
            1e-30 * good,
            1e30 * good,
            good,
            good.at[0, 0].set(jnp.nan),
            good.at[0, 0].set(jnp.inf),
        ]
    )

    @jax.jit
    @jax.vmap
    def value_and_grad(w):
        q, pullback = jax.vjp(partial(orthonormalize, method=method), w)
        return q, pullback(jnp.arange(18.0).reshape(6, 3))[0]

    q, gradient = value_and_grad(w)
    assert max(map(defect, q[:6])) <= 3e-5
    chex.assert_trees_all_close(np.asarray(q[3:6]), np.stack([gram_schmidt(good)] * 3), atol=1e-5)
    chex.assert_tree_all_finite(gradient[:6])
    assert jnp.isnan(q[6]).any() and jnp.isnan(q[7]).any()


def test_decomposes_only_inside_a_loop():
    program = jax.jit(jax.vmap(orthonormalize)).lower(jnp.zeros((4, 12, 6))).compile().as_text()
    assert "geqrf" in program
    assert "geqrf" not in program[program.index("ENTRY") :]


@pytest.mark.parametrize("method", METHODS)
def test_derivatives_equal_finite_differences(method, x64):
    w, u, v, weights = np.random.default_rng(3).normal(size=(4, 7, 4))
    w[:, 3] *= 1e-2

    def loss(w):
        return jnp.sum(weights * orthonormalize(w, method) ** 2)

    @jax.jit
    def derivatives(w):
        _, forward = jax.jvp(loss, (w,), (u,))
        reverse, second = jax.jvp(jax.grad(loss), (w,), (v,))
        return forward, jnp.vdot(reverse, u), jnp.vdot(second, u)

    def exact(w):
        return np.sum(weights * gram_schmidt(w) ** 2)

    def difference(f, direction, step=1e-6):
        return (f(w + step * direction) - f(w - step * direction)) / (2 * step)

    forward, reverse, second = derivatives(w)
    chex.assert_trees_all_close(forward, difference(exact, u), rtol=1e-6)
    chex.assert_trees_all_close(reverse, forward, rtol=1e-10)
    slope = difference(lambda w: float(derivatives(w)[0]), v)
    chex.assert_trees_all_close(second, slope, rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_derivatives_do_not_depend_on_the_units_of_columns(method, x64):
    w, u = np.random.default_rng(3).normal(size=(2, 7, 3))

    @jax.jit
    def slope(units):
        return jax.jvp(partial(orthonormalize, method=method), (w * units,), (u * units,))[1]

    for units in ([1, 1e15, 1e-15], [1e15, 1, 1e7]):
        np.testing.assert_allclose(slope(np.asarray(units)), slope(np.ones(3)), atol=1e-12)


@pytest.mark.parametrize(
    "w", [jnp.ones(3), jnp.ones((2, 3)), jnp.ones((3, 2), jnp.int32)], ids=["1d", "wide", "integer"]
)
def test_refuses_what_has_no_basis(w):
    with pytest.raises(ValueError, match=r"^w: wanted"):
        orthonormalize(w)


def test_refuses_unknown_methods():
    with pytest.raises(ValueError, match=r"^method: wanted one of .*'svd'"):
        orthonormalize(jnp.eye(3), method="svd")


def test_rows_are_those_of_gram_schmidt_and_derivatives_are_finite(x64):
    w, u = np.random.default_rng(3).normal(size=(2, 4, 7))
    scales = np.array([1, 1e-3, 1e2, 1])[:, None]
    rows, change = jax.jvp(orthonormal_rows, (jnp.asarray(scales * w),), (jnp.asarray(u),))
    chex.assert_trees_all_close(rows, gram_schmidt(w.T).T, atol=1e-12)
    step = 1e-8
    moved, back = (gram_schmidt((scales * w + s * u).T).T for s in (step, -step))
    chex.assert_trees_all_close(change, (moved - back) / (2 * step), rtol=1e-5, atol=1e-4)
    w[2] = 0
    found, change = jax.jvp(orthonormal_rows, (jnp.asarray(w),), (jnp.asarray(u),))
    assert not found[2].any() and np.isfinite(change).all()
    wanted = gram_schmidt(np.delete(w, 2, 0).T).T
    chex.assert_trees_all_close(np.delete(found, 2, 0), wanted, atol=1e-12)


# ---- leading eigenvectors


@cache
def rotation_of(size, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


def symmetric(values, seed=0):
    rotation = rotation_of(len(values), seed)
    return (rotation * np.asarray(values)) @ rotation.T


def test_top_eigenvectors_are_descending_with_a_fixed_sign(x64):
    matrix = symmetric([0.5, 4.0, 3.0, -1.0, 2.0])
    values, vectors = jax.jit(top_eigenvectors, static_argnums=1)(matrix, 3)
    chex.assert_trees_all_close(values, np.array([4.0, 3.0, 2.0]), atol=1e-12)
    chex.assert_trees_all_close(matrix @ vectors, values * vectors, atol=1e-12)
    assert defect(vectors) < 1e-13
    largest = np.take_along_axis(np.asarray(vectors), np.abs(vectors).argmax(0)[None], 0)
    assert (largest > 0).all()


@pytest.mark.parametrize("kept", [[5.0, 4.0, 3.0], [5.0, 5.0, 3.0], [4.0, 4.0, 4.0]])
def test_derivative_of_the_subspace_at_repeated_eigenvalues(kept, x64):
    matrix = symmetric([*kept, 1.0, 1.0, 0.5])
    weights, direction = np.random.default_rng(1).normal(size=(2, 6, 6))
    direction = direction + direction.T

    def loss(matrix):
        values, vectors = top_eigenvectors(matrix, 3)
        return jnp.sum(weights * (vectors @ vectors.T)) + 2 * jnp.sum(values)

    def exact(matrix):
        values, vectors = np.linalg.eigh(matrix)
        return np.sum(weights * (vectors[:, 3:] @ vectors[:, 3:].T)) + 2 * np.sum(values[3:])

    gradient, slope = jax.jit(
        lambda matrix: (jax.grad(loss)(matrix), jax.jvp(loss, (matrix,), (direction,))[1])
    )(matrix)
    step = 1e-6 * direction
    expected = (exact(matrix + step) - exact(matrix - step)) / 2e-6
    chex.assert_trees_all_close(slope, expected, rtol=1e-6)
    chex.assert_trees_all_close(np.vdot(gradient, direction), expected, rtol=1e-6)


def test_derivative_of_distinct_eigenvalues(x64):
    matrix, direction = symmetric([5.0, 4.0, 3.0, 1.0]), symmetric([1.0, 2.0, -3.0, 0.0], seed=1)
    slope = jax.jvp(lambda s: top_eigenvectors(s, 2)[0], (matrix,), (direction,))[1]
    step = 1e-6 * direction
    ends = [np.linalg.eigvalsh(matrix + sign * step)[:1:-1] for sign in (1, -1)]
    chex.assert_trees_all_close(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-6)


def test_derivative_is_finite_where_the_subspace_is_not_differentiable():
    gradient = jax.grad(lambda s: jnp.sum(top_eigenvectors(s, 2)[1] ** 3))(jnp.eye(4))
    chex.assert_tree_all_finite(gradient)


leading = jax.jit(top_eigenvectors, static_argnums=1)


def spectrum(name, size):
    falling = 0.9 ** np.arange(size)
    return {
        "falling": falling,
        "small": 1e-25 * falling,
        "some, and noise": np.concatenate([[9.0, 8, 7, 7], np.linspace(0, 1, size - 4)]),
        "few": np.concatenate([[3.0, 2, 1, 1], np.zeros(size - 4)]),
        "signs": np.concatenate([[2.0, 1.5, 1.2, 1], np.linspace(-3, 0.5, size - 4)]),
        "flat": 1 + 1e-3 * np.linspace(0, 1, size),
        "nothing": np.zeros(size),
    }[name]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "name", ["falling", "small", "some, and noise", "few", "signs", "flat", "nothing"]
)
def test_few_eigenvectors_of_large_matrices_are_those_of_a_decomposition(name, dtype, x64):
    size, rank = eigen.LARGE, 4
    values = np.sort(spectrum(name, size))[::-1]
    turn = rotation_of(size)
    matrix = jnp.asarray((turn * values) @ turn.T, dtype)
    found, vectors = leading(matrix, rank)
    assert found.dtype == vectors.dtype == dtype
    eps = np.finfo(dtype).eps
    largest = np.abs(values).max()
    np.testing.assert_allclose(found, values[:rank], atol=100 * eps * largest)
    chex.assert_trees_all_close(vectors.T @ vectors, jnp.eye(rank, dtype=dtype), atol=100 * eps)
    if name not in ("flat", "nothing"):  # whose eigenvectors are not determined to rounding
        gap = values[rank - 1] - values[rank]
        outside = turn[:, rank:].T @ np.asarray(vectors, float)
        assert np.linalg.norm(outside) < 20 * eps * size**0.5 * largest / gap


@pytest.mark.slow
def test_the_derivative_of_few_eigenvectors_of_large_matrices(x64):
    rng = np.random.default_rng(1)
    half = rng.normal(size=(20, eigen.LARGE))
    matrix, change = half.T @ half, rng.normal(size=(eigen.LARGE, eigen.LARGE))
    change = change + change.T

    @jax.jit
    def energy(t):
        _, vectors = top_eigenvectors(jnp.asarray(matrix) + t * change, 3)
        return jnp.sum((vectors.T @ weights) ** 2)

    weights = jnp.asarray(rng.normal(size=(eigen.LARGE, 2)))
    _, slope = jax.jvp(energy, (0.0,), (1.0,))
    step = 1e-4
    difference = (energy(step) - energy(-step)) / (2 * step)
    chex.assert_trees_all_close(slope, difference, rtol=1e-6)


@pytest.mark.parametrize("rank", [0, 5])
def test_refuses_ranks_out_of_range(rank):
    with pytest.raises(ValueError, match=f"^rank: wanted a whole number .*, got {rank}"):
        top_eigenvectors(jnp.eye(4), rank)


@pytest.mark.parametrize(
    "matrix",
    [jnp.ones(3), jnp.ones((3, 2)), jnp.ones((3, 3), jnp.int32)],
    ids=["1d", "tall", "int"],
)
def test_refuses_what_has_no_eigenvectors(matrix):
    with pytest.raises(ValueError, match=r"^matrix: wanted"):
        top_eigenvectors(matrix, 1)


@pytest.mark.parametrize("shape", [(7, 1), (12, 5), (40, 10), (64, 10), (100, 12)])
def test_thin_products_are_products(shape, x64):
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(3, *shape)), rng.normal(size=(3, shape[1], 4))
    chex.assert_trees_all_close(jax.vmap(thin_product)(w, x), w @ x, rtol=1e-13)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_transposed_products_are_products_whatever_is_mapped(axes, x64):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 20, 6)), rng.normal(size=(3, 20, 2))
    x, y = (a if axis == 0 else a[0] for a, axis in zip((x, y), axes, strict=True))
    mapped = jax.vmap(transposed_product, axes)
    product = jax.jit(mapped)(x, y)
    chex.assert_trees_all_close(product, np.swapaxes(x, -1, -2) @ y, rtol=1e-12)
    chex.assert_trees_all_close(jax.vmap(mapped, (None, 0))(x, y[None])[0], product, rtol=1e-12)
    check_grads(mapped, (x, y), order=2, modes=("fwd", "rev"), rtol=1e-6)


def test_transposed_products_are_computed_without_jit_too():
    """They used to call themselves until the process ended."""
    x, y = jnp.arange(12.0).reshape(2, 3, 2), jnp.arange(6.0).reshape(2, 3, 1)
    with jax.disable_jit():
        product = jax.vmap(transposed_product)(x, y)
    chex.assert_trees_all_equal(product, np.swapaxes(x, -1, -2) @ y)


def test_transposed_products_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"^y: wanted"):
        transposed_product(jnp.ones((9, 3)), jnp.ones((4, 2)))


def test_thin_products_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match=r"^x: wanted .*\(3, s\).*\(4, 2\)"):
        thin_product(jnp.ones((9, 3)), jnp.ones((4, 2)))
