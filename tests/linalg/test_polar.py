"""The polar factor: its constraint, its value, its derivatives, its limits."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfed.linalg import orthonormalize, polar

SLACK = {"float32": 1e-5, "float64": 1e-12}


def svd_polar(w):
    u, _, vt = np.linalg.svd(np.asarray(w, np.float64), full_matrices=False)
    return u @ vt


def svd_derivative(w, dw):
    """The derivative written in the singular vectors, where no solve is needed."""
    w, dw = np.asarray(w, np.float64), np.asarray(dw, np.float64)
    u, s, vt = np.linalg.svd(w, full_matrices=False)
    inner = u.T @ dw @ vt.T
    outside = (dw - u @ (u.T @ dw)) @ (vt.T / s) @ vt
    return outside + u @ ((inner - inner.T) / (s[:, None] + s)) @ vt


def random_matrix(seed, d, r, singular_values):
    rng = np.random.default_rng(seed)
    u = np.linalg.qr(rng.normal(size=(d, r)))[0]
    v = np.linalg.qr(rng.normal(size=(r, r)))[0]
    return (u * np.asarray(singular_values)) @ v.T


def defect(q):
    q = np.asarray(q, np.float64)
    return np.linalg.norm(q.T @ q - np.eye(q.shape[1]))


# The iteration, also for one matrix.
jitted_polar = jax.jit(partial(polar, method="newton_schulz"))


# Distinct, repeated in pairs, all equal, orthonormal: the last three break derivatives that divide
# by differences of singular values.
SPECTRA = {
    "distinct": [3.0, 2.0, 1.5, 0.4],
    "repeated": [2.0, 2.0, 0.5, 0.5],
    "equal": [1.7] * 4,
    "orthonormal": [1.0] * 4,
}
MATRICES = np.stack([random_matrix(i, 7, 4, s) for i, s in enumerate(SPECTRA.values())])
DIRECTIONS = np.random.default_rng(9).normal(size=(3, *MATRICES.shape))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@given(
    shape=st.sampled_from([(5, 1), (6, 3), (8, 8), (40, 7)]),
    condition=st.floats(0, 0.5) | st.floats(0, 9),
    scale=st.floats(-10, 10),
    seed=st.integers(0, 2**16),
)
def test_orthonormal_and_closest(dtype, shape, condition, scale, seed):
    d, r = shape
    values = 10.0 ** (
        scale - condition * np.random.default_rng(seed).permutation(np.linspace(0, 1, r))
    )
    with jax.enable_x64(dtype == "float64"):
        w = random_matrix(seed, d, r, values).astype(dtype)
        q = jitted_polar(w)
        assert q.dtype == dtype
        assert defect(q) <= SLACK[dtype] * r
        # A backward stable decomposition has the same error, but for the square root of epsilon.
        eps = np.finfo(dtype).eps
        # The smallest singular value of the matrix as it was rounded.
        condition = np.linalg.cond(np.asarray(w, np.float64))
        assert np.abs(q - svd_polar(w)).max() <= eps**0.5 + 30 * r * eps * condition


@pytest.mark.parametrize("method", ["newton_schulz", "eigh", "svd"])
def test_methods_agree(method, x64):
    well = np.stack([random_matrix(i, 30, 6, np.linspace(1, 1 + i, 6)) for i in range(4)])
    bad = random_matrix(5, 30, 6, np.logspace(0, -6, 6))[None]
    w = np.concatenate([well, bad])
    q = jax.jit(jax.vmap(partial(polar, method=method)))(w)
    chex.assert_trees_all_close(q[:4], np.stack([svd_polar(x) for x in w[:4]]), atol=1e-12)
    chex.assert_trees_all_close(q[4], svd_polar(w[4]), atol=1e-8)
    assert max(map(defect, q)) <= 6e-12


def test_orthonormal_matrices_are_fixed_points(x64):
    w = random_matrix(0, 40, 7, np.ones(7))
    chex.assert_trees_all_close(jitted_polar(w), w, atol=1e-14)


def test_factor_leaves_a_positive_definite_matrix(x64):
    values = np.array([0.1, 1, 2, 3, 4, 5, 9])
    w = random_matrix(0, 40, 7, values)
    p = np.asarray(jitted_polar(w)).T @ w
    chex.assert_trees_all_close(p, p.T, atol=1e-12)
    chex.assert_trees_all_close(np.linalg.eigvalsh(p), values, atol=1e-12)


@pytest.mark.parametrize("condition", [3, 1e3, 1e4, 1e8])
@pytest.mark.parametrize("rows", [3, 7])
def test_a_wide_or_square_matrix_is_the_transpose_of_a_tall_one(rows, condition, x64):
    tall = random_matrix(0, 7, rows, np.geomspace(1, condition, rows))
    dw = np.random.default_rng(1).normal(size=tall.shape)
    q, tangent = jitted_jvp_of_wide(tall.T, dw.T)
    np.testing.assert_allclose(q @ q.T, np.eye(rows), atol=1e-12 * rows)
    np.testing.assert_allclose(q.T, svd_polar(tall), atol=1e-15 * condition + 1e-8)
    wanted = svd_derivative(tall, dw)
    np.testing.assert_allclose(tangent.T, wanted, atol=1e-7 * np.abs(wanted).max())


def test_a_wide_matrix_without_rank_has_an_orthonormal_factor():
    w = jnp.stack([jnp.zeros((3, 6)), jnp.ones((3, 6)), jnp.eye(3, 6), 1e-30 * jnp.eye(3, 6)])
    for q in jax.jit(jax.vmap(polar))(w):
        assert defect(q.T) <= 3e-5


@jax.jit
def jitted_jvp_of_wide(w, dw):
    return jax.jvp(polar, (w,), (dw,))


def test_lost_rank_gives_an_orthonormal_factor_and_finite_derivatives():
    column = jnp.linspace(1, 2, 6)[:, None]
    good = jnp.asarray(random_matrix(0, 6, 3, [1, 2, 3]), jnp.float32)
    w = jnp.stack(
        [
            jnp.zeros((6, 3)),
            jnp.tile(column, (1, 3)),
            good.at[:, 1].set(0),
            1e-30 * good,
            1e30 * good,
            good,
        ]
    )
    weights = jnp.arange(18.0).reshape(6, 3)

    @jax.jit
    @jax.vmap
    def value_and_grad(w):
        q, pullback = jax.vjp(polar, w)
        return q, pullback(weights)[0]

    q, gradient = value_and_grad(w)
    assert max(map(defect, q)) <= 3e-5
    chex.assert_tree_all_finite(gradient)
    # The matrix of full rank in the same batch is served as it is alone, at any scale.
    exact, slope = svd_polar(good), svd_derivative(good, weights)
    chex.assert_trees_all_close(np.asarray(q[3:]), np.stack([exact] * 3), atol=1e-5)
    chex.assert_trees_all_close(np.asarray(gradient[5]), slope, atol=1e-4)
    chex.assert_trees_all_close(np.asarray(gradient[4]) * 1e30, slope, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("method", ["newton_schulz", "eigh", "svd"])
def test_nan_and_infinity_give_nan_and_stay_with_their_client(columns, method):
    good = jnp.eye(5)[:, :columns] + 0.1
    w = jnp.stack([good, good.at[1, 0].set(jnp.nan), good.at[1, 0].set(jnp.inf)])
    q = jax.jit(jax.vmap(partial(polar, method=method)))(w)
    assert defect(q[0]) <= 3e-5
    assert jnp.isnan(q[1]).any()
    assert jnp.isnan(q[2]).any()


def test_nan_cotangents_end_too():
    w = jnp.eye(5)[:, :3] + 0.1
    gradient = jax.jit(lambda ct: jax.vjp(polar, w)[1](ct)[0])(jnp.full((5, 3), jnp.nan))
    assert jnp.isnan(gradient).any()


def test_decomposes_only_inside_a_loop():
    """Mapped over clients, a decomposition outside of a loop would run for all of them, always."""
    w = jnp.zeros((4, 12, 6))
    program = jax.jit(jax.vmap(polar)).lower(w).compile().as_text()
    entry = program[program.index("ENTRY") :]
    assert "gesdd" in program
    assert "gesdd" not in entry


@pytest.mark.parametrize("values", [[1.1, 0.9, 0.9, 1], [1, 1e-3, 1e-6, 1e-20], [0, 0, 0, 0]])
def test_one_small_matrix_needs_no_iteration_on_a_cpu(values, x64):
    w, change = (random_matrix(i, 9, 4, values) for i in (0, 1))
    program = jax.jit(polar).lower(w).compile().as_text()
    assert "while" not in program  # compiling them took longer than most runs' rounds

    def both(w, change):
        return jax.jvp(polar, (w,), (change,))

    # Mapped, it is an iteration with the same derivative.
    alone, mapped = both(w, change), jax.vmap(both)(w[None], change[None])
    assert defect(alone[0]) < SLACK["float64"]
    if values[-1] > 0.1:  # elsewhere all completions are equally close
        np.testing.assert_allclose(alone[0], svd_polar(w), atol=1e-12)
        chex.assert_trees_all_close(alone, jax.tree.map(lambda x: x[0], mapped), atol=1e-10)


def test_half_precision_keeps_its_type():
    w = jnp.asarray(random_matrix(0, 6, 3, [1, 2, 3]), jnp.bfloat16)
    q = jitted_polar(w)
    assert q.dtype == jnp.bfloat16
    assert np.abs(np.asarray(q, np.float64) - svd_polar(w)).max() < 1e-2


# ---- derivatives


def finite_difference(function, w, direction, step=1e-6):
    return (function(w + step * direction) - function(w - step * direction)) / (2 * step)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["newton_schulz", "eigh", "svd"])
def test_both_modes_equal_finite_differences(method, x64):
    function = partial(polar, method=method)

    @jax.jit
    @jax.vmap
    def derivatives(w, direction):
        _, tangent = jax.jvp(function, (w,), (direction,))
        # The derivative is the Hessian of the nuclear norm: its own transpose.
        (cotangent,) = jax.vjp(function, w)[1](direction)
        return tangent, cotangent

    tangent, cotangent = derivatives(MATRICES, DIRECTIONS[0])
    expected = np.stack(
        [finite_difference(svd_polar, *pair) for pair in zip(MATRICES, DIRECTIONS[0], strict=True)]
    )
    chex.assert_trees_all_close(tangent, expected, atol=1e-8)
    chex.assert_trees_all_close(cotangent, expected, atol=1e-8)


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_derivative_of_the_badly_conditioned(condition, x64):
    w = random_matrix(0, 9, 4, [1, 1, 1, 1 / condition])
    dw = DIRECTIONS[0, 0, :4].T @ np.eye(4, 4)
    dw = np.concatenate([dw, dw, dw])[:9]
    expected = svd_derivative(w, dw)
    tangent = jitted_jvp(w, dw)
    assert np.abs(tangent - expected).max() <= 1e-7 * np.abs(expected).max()


@jax.jit
def jitted_jvp(w, dw):
    return jax.jvp(polar, (w,), (dw,))[1]


@pytest.mark.parametrize("shape", [(6, 1), (9, 9), (30, 15)])
def test_derivative_at_other_shapes(shape, x64):
    w = random_matrix(1, *shape, np.linspace(1, 3, shape[1]))
    dw = np.random.default_rng(2).normal(size=shape)
    chex.assert_trees_all_close(jitted_jvp(w, dw), svd_derivative(w, dw), atol=1e-11)


def test_single_precision_derivative_is_accurate():
    w = np.stack([random_matrix(i, 40, 12, np.linspace(1, 1 + i, 12)) for i in range(6)])
    dw = np.random.default_rng(0).normal(size=w.shape)
    tangent = jax.jit(jax.vmap(lambda w, dw: jax.jvp(polar, (w,), (dw,))[1]))(
        w.astype(np.float32), dw.astype(np.float32)
    )
    expected = np.stack([svd_derivative(*pair) for pair in zip(w, dw, strict=True)])
    chex.assert_trees_all_close(np.asarray(tangent, np.float64), expected, atol=1e-4)


@pytest.mark.slow
def test_second_derivatives_equal_differences_of_first(x64):
    """In every combination of modes, at distinct and at repeated singular values."""
    first, second, weights = DIRECTIONS

    def loss(w, weights):
        return jnp.sum(weights * polar(w) ** 2)

    @jax.jit
    @jax.vmap
    def second_derivatives(w, u, v, weights):
        gradient = jax.grad(loss)
        forward = lambda w: jax.jvp(lambda w: loss(w, weights), (w,), (u,))[1]  # noqa: E731
        return (
            jnp.vdot(jax.jvp(lambda w: gradient(w, weights), (w,), (v,))[1], u),
            jnp.vdot(jax.grad(lambda w: jnp.vdot(gradient(w, weights), u))(w), v),
            jax.jvp(forward, (w,), (v,))[1],
            jnp.vdot(jax.grad(forward)(w), v),
        )

    slope = jax.jit(jax.vmap(lambda w, u, weights: jnp.vdot(jax.grad(loss)(w, weights), u)))
    expected = finite_difference(lambda w: slope(w, first, weights), MATRICES, second)
    for result in second_derivatives(MATRICES, first, second, weights):
        chex.assert_trees_all_close(result, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_derivative_through_a_loop_of_retractions(remat, x64):
    """As the rounds use it: under scan, jit and vmap, with and without rematerialization."""
    symmetric = np.diag(np.arange(7.0))

    def rounds(step_size, w):
        def body(w, _):
            return polar(w + step_size * symmetric @ w), None

        body = jax.checkpoint(body) if remat else body
        return jnp.sum(jax.lax.scan(body, polar(w), length=4)[0][:3] ** 3)

    def total(step_size):
        return jnp.sum(jax.vmap(rounds, in_axes=(None, 0))(step_size, jnp.asarray(MATRICES)))

    value, slope = jax.jit(jax.value_and_grad(total))(0.05)
    assert np.isfinite(value)
    difference = finite_difference(jax.jit(total), 0.05, 1.0, step=1e-5)
    chex.assert_trees_all_close(slope, difference, rtol=1e-6)


@pytest.mark.slow
def test_jacobians_of_both_modes_agree_and_are_symmetric(x64):
    """By pulling and pushing many tangents through one point, mapped over matrices."""
    forward, reverse = (
        jax.jit(jax.vmap(mode(polar)))(MATRICES) for mode in (jax.jacfwd, jax.jacrev)
    )
    chex.assert_trees_all_close(forward, reverse, atol=1e-12)
    flat = forward.reshape(len(MATRICES), 28, 28)
    chex.assert_trees_all_close(flat, flat.mT, atol=1e-12)


@pytest.mark.slow
def test_gradient_on_devices_is_that_of_one():
    mesh = jax.make_mesh((1,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("clients")
    w = jnp.asarray(MATRICES, jnp.float32)

    def total(w):
        mapped = jax.shard_map(
            jax.vmap(polar), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return jnp.sum(mapped(w)[:, :3] ** 3)

    wanted = jax.jit(jax.grad(lambda w: jnp.sum(jax.vmap(polar)(w)[:, :3] ** 3)))(w)
    chex.assert_trees_all_close(jax.jit(jax.grad(total))(w), wanted, atol=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_cotangents_of_any_size_have_their_derivative(size):
    """Also where the equation is solved by iteration: squares of the cotangent would underflow."""
    w = jnp.asarray(random_matrix(0, 7, 4, [1, 2, 4, 8]), jnp.float32)
    ct = jnp.asarray(DIRECTIONS[0, 0], jnp.float32)
    slope = jax.jit(lambda w, ct: jax.vjp(polar, w)[1](ct)[0])(w, size * ct)
    np.testing.assert_allclose(slope / size, svd_derivative(w, ct), atol=1e-5)


def test_derivative_is_zero_in_lost_directions():
    w = jnp.asarray(random_matrix(0, 7, 4, [1, 2, 0, 0]), jnp.float32)
    left, _, right = np.linalg.svd(np.asarray(w, np.float64))
    lost = left[:, 2:] @ np.random.default_rng(0).normal(size=(5, 2)) @ right[2:]
    assert jnp.abs(jitted_jvp(w, jnp.asarray(lost, jnp.float32))).max() <= 1e-5
    chex.assert_trees_all_equal(jitted_jvp(jnp.zeros((7, 4)), jnp.ones((7, 4))), jnp.zeros((7, 4)))


# ---- bad input


@pytest.mark.parametrize(
    "w",
    [
        jnp.ones(3),
        jnp.ones((2, 3, 2)),
        jnp.ones((3, 0)),
        jnp.ones((3, 2), jnp.int32),
        jnp.ones((3, 2), jnp.complex64),
    ],
    ids=["vector", "batch", "empty", "integer", "complex"],
)
def test_refuses_what_has_no_factor(w):
    with pytest.raises(ValueError, match=r"^w: wanted"):
        polar(w)
    with pytest.raises(ValueError, match=r"^w: wanted"):
        jax.jit(polar)(w)


def test_refuses_unknown_methods():
    with pytest.raises(ValueError, match=r"^method: wanted one of .*'cholesky'"):
        polar(jnp.eye(3), method="cholesky")


@pytest.mark.parametrize("function", [polar, orthonormalize])
def test_derivatives_of_matrices_near_the_smallest_numbers(function):
    """They are what they should be, or zero where their multiples would overflow."""
    w = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    weights = 1e4 * np.random.default_rng(1).normal(size=(6, 2)).astype(np.float32)

    def slope(scale):
        return jax.grad(lambda w: jnp.sum(weights * function(w)))(np.float32(scale) * w)

    np.testing.assert_allclose(1e-25 * slope(1e-25), slope(1.0), rtol=1e-3, atol=1.0)
    assert not slope(1e-36).any()


@pytest.mark.parametrize(
    "each",
    [polar, pytest.param(jax.grad(lambda w: jnp.sum(polar(w) ** 3)), marks=pytest.mark.slow)],
    ids=["factors", "derivatives"],
)
def test_three_maps_give_what_one_gives(each):
    w = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 4, 5, 2)))
    several = jax.jit(jax.vmap(jax.vmap(jax.vmap(each)), 1, 1))(w)
    one = jax.jit(jax.vmap(each))(w.reshape(24, 5, 2))
    chex.assert_trees_all_close(several, one.reshape(w.shape), rtol=1e-5, atol=1e-6)
