"""The singular value decomposition: its value, its derivatives, where they do not exist."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.linalg import polar, svd
from jaxfed.linalg.svd import leading_triples, not_rounding


def matrix(seed, shape, singular):
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(n, len(singular))))[0] for n in shape)
    return jnp.asarray((u * np.asarray(singular)) @ v.T)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (3, 1)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_factors_at_any_scale(shape, scale):
    w = jnp.asarray(np.random.default_rng(0).normal(size=shape) * scale, jnp.float32)
    left, singular, right = jax.jit(svd)(w)
    np.testing.assert_allclose(left * singular @ right, w, atol=1e-5 * scale)
    wanted = np.linalg.svd(np.asarray(w, float), compute_uv=False)
    np.testing.assert_allclose(singular, wanted, rtol=1e-5)


def of_subspace(w):
    left, singular, right = svd(w)
    weights = jnp.arange(w.size, dtype=w.dtype).reshape(w.shape)
    image = left[:, :2] @ (left[:, :2].T @ weights) + (weights @ right[:2].T) @ right[:2]
    return jnp.sum(image**2) + jnp.sum(singular[:2] ** 3)


@pytest.mark.parametrize("shape", [(7, 4), (4, 7)])
@pytest.mark.parametrize("singular", [(3.0, 2.0, 1.0, 0.5), (2.0, 2.0, 0.7, 0.7), (2, 1, 0, 0)])
def test_derivative_in_both_modes_equals_differences(singular, shape, x64):
    """Of the subspace of the first two, which may have one singular value."""
    w, step = matrix(0, shape, singular), 1e-6
    dw = np.random.default_rng(1).normal(size=shape)
    function = jax.jit(of_subspace)
    wanted = (function(w + step * dw) - function(w - step * dw)) / (2 * step)
    tangent = jax.jit(lambda w, dw: jax.jvp(of_subspace, (w,), (dw,))[1])(w, dw)
    np.testing.assert_allclose(tangent, wanted, rtol=1e-6)
    np.testing.assert_allclose(jnp.vdot(jax.jit(jax.grad(of_subspace))(w), dw), wanted, rtol=1e-6)


TALL = {  # what to do to independent columns
    "independent": np.eye(6),
    "of unlike sizes": np.diag([1e6, 1, 1e-6, 1, 1, 1]),
    "alike": np.eye(6) + 1e4,  # which takes two passes
    "nearly equal": np.eye(6) * 1e-8 + 1,  # which takes a library
    "of lower rank": np.outer(np.arange(1.0, 7), np.ones(6)) + np.eye(6, k=-3),
    "zero": np.diag([0, 1, 1, 0, 1, 1.0]),
    "all zero": np.zeros((6, 6)),
}


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("name", TALL)
def test_leading_triples_of_a_tall_matrix_are_those_of_all(name, scale, x64):
    w = np.random.default_rng(4).normal(size=(90, 6)) @ TALL[name] * scale
    left, singular, right = jax.jit(leading_triples, static_argnums=1)(w, 4)
    assert left.shape == (90, 4) and singular.shape == (6,) and right.shape == (4, 6)
    wanted = np.linalg.svd(w, compute_uv=False)
    np.testing.assert_allclose(singular, wanted, rtol=0, atol=1e-14 * wanted[0])
    kept = np.asarray(singular[:4]) > 1e-14 * wanted[0]
    left, right = left[:, kept], right[kept]
    for basis in (left, right.T):
        np.testing.assert_allclose(basis.T @ basis, np.eye(kept.sum()), atol=1e-13)
    # What a triple misses of the matrix is rounding of its largest value.
    error = w @ right.T - left * singular[:4][kept]
    np.testing.assert_allclose(error, 0, atol=1e-14 * wanted[0])


@pytest.mark.parametrize("name", ["of unlike sizes", "alike", "of lower rank"])
def test_leading_triples_have_the_derivatives_of_all(name, x64):
    rng = np.random.default_rng(5)
    w, change, weights = jnp.asarray(rng.normal(size=(3, 90, 6)))

    def image(triples):
        left, singular, right = triples
        turned = (left[:, :2] * singular[:2]) @ (right[:2] @ weights.T)
        return jnp.sum(turned**2) + jnp.sum(singular[:2] ** 3)

    def slope(of):
        def along(t):
            return image(of((w + t * change) @ TALL[name]))

        return along(0.0), *(f(along)(0.0) for f in (jax.grad, lambda f: jax.grad(jax.grad(f))))

    chex.assert_trees_all_close(slope(lambda w: leading_triples(w, 2)), slope(svd), rtol=1e-8)


def test_polar_factor_through_it_has_its_derivative_at_equal_singular_values(x64):
    w, dw = matrix(2, (6, 3), (2, 2, 2)), np.random.default_rng(3).normal(size=(6, 3))

    def by_svd(w):
        left, _, right = svd(w)
        return left @ right

    tangents = [jax.jvp(function, (w,), (dw,))[1] for function in (by_svd, polar)]
    chex.assert_trees_all_close(*tangents, atol=1e-10)


def test_second_derivative_equals_differences_of_the_first(x64):
    w, step = matrix(0, (5, 4), (3.0, 2.0, 1.0, 0.5)), 1e-5
    dw = np.random.default_rng(1).normal(size=w.shape)
    gradient = jax.jit(jax.grad(of_subspace))
    wanted = (gradient(w + step * dw) - gradient(w - step * dw)) / (2 * step)
    result = jax.jit(lambda w, dw: jax.jvp(jax.grad(of_subspace), (w,), (dw,))[1])(w, dw)
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)


DEGENERATE = {
    "zero": jnp.zeros((6, 4)),
    "constant": jnp.ones((6, 4)),
    "rank one": jnp.outer(jnp.arange(1.0, 7), jnp.arange(1.0, 5)),
    "equal": jnp.eye(6, 4),
    "tiny": 1e-30 * jnp.eye(6, 4),
    "huge": 1e30 * jnp.ones((6, 4)),
}


def test_derivative_is_finite_where_there_is_none():
    def loss(w):
        left, singular, right = svd(w)
        return jnp.sum(left[0]) + jnp.sum(singular) + jnp.sum(right[:, 0])

    batch = jnp.stack(list(DEGENERATE.values()))
    chex.assert_tree_all_finite(jax.jit(jax.vmap(jax.grad(loss)))(batch))
    # Of the zero matrix nothing but the singular values' own part is left.
    left, _, right = svd(batch[0])
    chex.assert_trees_all_close(jax.grad(loss)(batch[0]), left @ right, atol=1e-6)


def test_rounding_errors_do_not_grow_with_the_rows():
    rows = np.random.default_rng(0).normal(size=(20_000, 3)).astype(np.float32)
    for table, kept in ((rows * np.float32([1, 0.1, 1e-3]), 3), (0 * rows + rows[0], 1)):
        assert not_rounding(svd(table)[1], table.shape).sum() == kept


ALGORITHMS = {
    "MVLSA": jf.gcca.MVLSA(2),
    "exact": jf.gcca.MaxVar(2),
    "exact, ridge": jf.gcca.MaxVar(2, ridge=1e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gcca_of_degenerate_views_has_finite_derivatives(name):
    views = {key: x for key, x in DEGENERATE.items() if key not in ("tiny", "huge")}
    rng = np.random.default_rng(0)
    ordinary = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
    views = {**views, "ordinary": ordinary, "small": 1e-10 * ordinary}

    @jax.jit
    @jax.vmap
    def gradient(x):
        def loss(x):
            clients = jf.gcca.Views(
                jf.gcca.views.View(jnp.stack([x, x[::-1]]), jnp.full(2, 4.0)),
                jnp.arange(2, dtype=jnp.int32),
                jnp.full(2, 0.5),
            )
            solution = jf.rollout(ALGORITHMS[name], clients, rounds=2, key=jax.random.key(0))
            fit = jnp.stack([x, x[::-1]]) @ solution.result.local
            return jnp.sum(fit[:, 0]) + jnp.sum(solution.result.shared[0])

        return jax.grad(loss)(x)

    for key, slope in zip(views, gradient(jnp.stack(list(views.values()))), strict=True):
        assert jnp.isfinite(slope).all(), key
        if key == "ordinary":
            assert jnp.abs(slope).max() > 1e-3


@pytest.mark.slow
def test_maps_of_tiny_views_are_huge_and_finite(key):
    """Squares of 1e20 overflow, those of 1e-20 vanish; a ridge of 0 made NaN of either."""
    rows = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    algorithm = jf.gcca.MaxVar(2)

    @jax.jit
    @jax.vmap
    def last(size):
        clients = jf.gcca.Views.from_arrays(list(size * rows))
        run = jf.rollout(algorithm, clients, rounds=3, key=key)
        return run.history["objective"][-1], run.result.shared

    objective, shared = last(jnp.float32([1, 1e-18, 1e-20, 1e-25]))
    np.testing.assert_allclose(objective, objective[0], rtol=0.01)
    chex.assert_tree_all_finite(shared)
    local = jnp.full((2, 4, 2), 1e25)
    views = jf.gcca.Views.from_arrays(list(1e-25 * rows))
    assert np.isfinite(jf.gcca.cost(views, shared[0], local))


def test_under_vmap_a_processor_takes_one_matrix_at_a_time():
    """jaxlib's batched kernels can wait for each other for ever (see `one_by_one`)."""
    program = jax.jit(jax.vmap(svd)).lower(jnp.zeros((5, 6, 4))).compile().as_text()
    assert "gesdd" in program
    assert "[5,6,4]" not in "".join(line for line in program.splitlines() if "gesdd" in line)


@pytest.mark.parametrize("w", [jnp.ones(3), jnp.ones((2, 3, 2)), jnp.ones((3, 2), jnp.int32)])
def test_refuses_what_is_no_matrix(w):
    with pytest.raises(ValueError, match=r"^w: wanted"):
        svd(w)
