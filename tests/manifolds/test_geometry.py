"""Vectors on the manifolds: metrics, gradients and Hessians, geodesics and transports."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxfed.manifolds import grassmann, stiefel

SHAPES = [(5, 1), (4, 4), (7, 3)]
METRICS = stiefel.METRICS
EXP = jax.jit(stiefel.exp, static_argnames="metric")
LOG = jax.jit(stiefel.log, static_argnames="metric")


def point_and_tangent(seed, shape=(7, 3)):
    first, second = jax.random.split(jax.random.key(seed))
    x = stiefel.random(*shape, key=first)
    return x, stiefel.random_tangent(x, key=second)


def function(x):
    return jnp.sum(jnp.sin(jnp.arange(x.size).reshape(x.shape) * x)) + jnp.sum(x**3)


def of_subspaces(x):
    return jnp.sum(jnp.sin(jnp.arange(x.shape[0] ** 2).reshape(2 * x.shape[:1]) * (x @ x.T)))


@pytest.mark.parametrize("shape", SHAPES)
def test_random_tangents(shape, x64):
    x, v = point_and_tangent(0, shape)
    np.testing.assert_allclose(x.T @ v + v.T @ x, 0, atol=1e-14)
    assert stiefel.norm(x, v) == pytest.approx(1)
    assert jnp.linalg.norm(v - point_and_tangent(1, shape)[1]) > 0.1
    if shape != (4, 4):
        v = grassmann.random_tangent(x, key=jax.random.key(3))
        np.testing.assert_allclose(x.T @ v, 0, atol=1e-14)
        assert grassmann.norm(x, v) == pytest.approx(1)


@pytest.mark.parametrize("metric", METRICS)
def test_metrics_and_gradients(metric, x64):
    x, u = point_and_tangent(0)
    v = stiefel.random_tangent(x, key=jax.random.key(7))
    turn = 0.5 if metric == "canonical" else 0.0
    dense = jnp.trace(u.T @ (jnp.eye(7) - turn * x @ x.T) @ v)
    np.testing.assert_allclose(stiefel.inner(x, u, v, metric), dense, rtol=1e-12)
    length = stiefel.norm(x, u, metric)
    np.testing.assert_allclose(length**2, stiefel.inner(x, u, u, metric), rtol=1e-12)
    # A gradient's inner products are derivatives.
    gradient = stiefel.egrad2rgrad(x, jax.grad(function)(x), metric)
    np.testing.assert_allclose(gradient, stiefel.project(x, gradient), atol=1e-12)
    slope = jax.jvp(function, (x,), (u,))[1]
    np.testing.assert_allclose(stiefel.inner(x, gradient, u, metric), slope, rtol=1e-10)
    assert (jax.grad(partial(stiefel.norm, x, metric=metric))(0 * u) == 0).all()


@pytest.mark.parametrize(
    "manifold, f, exp",
    [(stiefel, function, EXP), (grassmann, of_subspaces, jax.jit(grassmann.exp))],
    ids=["stiefel", "grassmann"],
)
def test_hessians_are_second_differences_along_geodesics(manifold, f, exp, x64):
    x, _ = point_and_tangent(0)
    v = manifold.random_tangent(x, key=jax.random.key(4))
    g, h = jax.jvp(jax.grad(f), (x,), (v,))
    hessian = manifold.ehess2rhess(x, g, h, v)
    np.testing.assert_allclose(manifold.project(x, hessian), hessian, atol=1e-12)
    t = 1e-3
    ahead, behind = f(exp(x, t * v)), f(exp(x, -t * v))
    wanted = (ahead - 2 * f(x) + behind) / t**2
    np.testing.assert_allclose(manifold.inner(x, hessian, v), wanted, rtol=1e-3)
    # It is symmetric.
    u = manifold.random_tangent(x, key=jax.random.key(5))
    other = manifold.ehess2rhess(x, *jax.jvp(jax.grad(f), (x,), (u,)), u)
    np.testing.assert_allclose(
        manifold.inner(x, hessian, u), manifold.inner(x, other, v), rtol=1e-9
    )
    np.testing.assert_allclose(
        manifold.inner(x, manifold.egrad2rgrad(x, g), v), (ahead - behind) / (2 * t), rtol=1e-3
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("metric", METRICS)
def test_the_exponential_equals_that_of_dense_matrices(metric, shape, x64):
    x, v = map(np.asarray, point_and_tangent(1, shape))
    for size in (0.0, 0.4, 3.0):
        step = size * v
        turn = x.T @ step
        whole = step @ x.T - x @ step.T
        if metric == "euclidean":
            dense = scipy.linalg.expm(whole) @ x @ scipy.linalg.expm(-turn)
        else:
            dense = scipy.linalg.expm(whole - x @ turn @ x.T) @ x
        np.testing.assert_allclose(EXP(x, step, metric), dense, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
def test_logarithm_inverts_the_exponential(metric, x64):
    for dtype, tolerance in ((jnp.float64, 1e-13), (jnp.float32, 3e-6)):
        x, v = (a.astype(dtype) for a in point_and_tangent(1))
        for size in (0.0, 0.3, 1.5, 2.7):
            found = LOG(x, EXP(x, size * v, metric), metric)
            assert found.dtype == dtype
            np.testing.assert_allclose(found, size * v, atol=tolerance)
    x, v = point_and_tangent(1)
    distance = stiefel.distance(x, EXP(x, 1.5 * v, metric), metric)
    np.testing.assert_allclose(distance, 1.5 * stiefel.norm(x, v, metric), rtol=1e-12)


@pytest.mark.slow
def test_points_without_a_geodesic_between_them_have_no_logarithm(x64):
    x, _ = point_and_tangent(0, (3, 3))
    assert jnp.isnan(LOG(x, x.at[:, 0].multiply(-1), "euclidean")).all()


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
def test_logarithm_is_differentiable(metric, x64):
    """With respect to both ends, as they move along the manifold."""
    x, v = point_and_tangent(1, (5, 2))
    y, weights = EXP(x, 0.8 * v, metric), jax.random.normal(jax.random.key(5), (5, 2))

    @jax.jit
    def loss(x, y):
        return jnp.sum(weights * jnp.sin(stiefel.log(x, y, metric)))

    slopes = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, y)
    for number, (point, slope) in enumerate(zip((x, y), slopes, strict=True)):
        u = stiefel.random_tangent(point, key=jax.random.key(9))
        moved = [EXP(point, t * u, metric) for t in (1e-5, -1e-5)]
        ends = [loss(m, y) if number == 0 else loss(x, m) for m in moved]
        np.testing.assert_allclose(jnp.vdot(slope, u), (ends[0] - ends[1]) / 2e-5, rtol=1e-7)
        tangents = (u, 0 * y) if number == 0 else (0 * x, u)
        np.testing.assert_allclose(
            jax.jvp(loss, (x, y), tangents)[1], jnp.vdot(slope, u), rtol=1e-9
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(stiefel.RETRACTIONS))
def test_transport_by_the_differential(name, x64):
    x, v = point_and_tangent(0)
    u = stiefel.random_tangent(x, key=jax.random.key(3))
    retract = jax.jit(stiefel.RETRACTIONS[name])
    moved = stiefel.transport_differential(x, v, u, name)
    wanted = (retract(x, v + 1e-5 * u) - retract(x, v - 1e-5 * u)) / 2e-5
    np.testing.assert_allclose(moved, wanted, atol=1e-9)
    y = retract(x, v)
    np.testing.assert_allclose(stiefel.project(y, moved), moved, atol=1e-12)
    # For subspaces the choice of a basis does not matter.
    turn = stiefel.random(3, 3, key=jax.random.key(8))
    v, u = grassmann.project(x, v), grassmann.project(x, u)
    moved = grassmann.transport_differential(x, v, u, name)
    np.testing.assert_allclose(retract(x, v).T @ moved, 0, atol=1e-12)
    turned = grassmann.transport_differential(x @ turn, v @ turn, u @ turn, name)
    # The turn between the bases of the end is that of the retraction.
    turn = retract(x, v).T @ retract(x @ turn, v @ turn)
    np.testing.assert_allclose(turned, moved @ turn, atol=1e-12)


def test_cayley_transport_keeps_lengths_and_leads_back(x64):
    x, v = point_and_tangent(0)
    u = stiefel.random_tangent(x, key=jax.random.key(3))
    y, moved = stiefel.retract_cayley(x, v), stiefel.transport_cayley(x, v, u)
    np.testing.assert_allclose(stiefel.project(y, moved), moved, atol=1e-13)
    for metric in METRICS:
        kept = stiefel.inner(y, moved, stiefel.transport_cayley(x, v, v), metric)
        np.testing.assert_allclose(kept, stiefel.inner(x, u, v, metric), rtol=1e-12)
    back = -stiefel.transport_cayley(x, v, v)
    np.testing.assert_allclose(stiefel.retract_cayley(y, back), x, atol=1e-13)
    np.testing.assert_allclose(stiefel.transport_cayley(y, back, moved), u, atol=1e-13)


@pytest.mark.slow
def test_parallel_transport(x64):
    x, _ = point_and_tangent(0)
    v, u = (2 * grassmann.random_tangent(x, key=jax.random.key(n)) for n in (1, 2))
    moved = jax.jit(grassmann.transport_parallel)(x, v, u)
    left, values, right = np.linalg.svd(np.asarray(v), full_matrices=False)
    dense = (
        -x @ right.T @ np.diag(np.sin(values)) @ left.T
        + left @ np.diag(np.cos(values)) @ left.T
        + np.eye(7)
        - left @ left.T
    ) @ u
    np.testing.assert_allclose(moved, dense, atol=1e-13)
    y = grassmann.exp(x, v)
    np.testing.assert_allclose(y.T @ moved, 0, atol=1e-13)
    # The velocity is carried to the velocity.
    velocity = jax.jvp(lambda t: grassmann.exp(x, t * v), (1.0,), (1.0,))[1]
    np.testing.assert_allclose(grassmann.transport_parallel(x, v, v), velocity, atol=1e-12)
    slope = jax.grad(lambda u: jnp.sum(grassmann.transport_parallel(x, 0 * v, u) * v))(u)
    np.testing.assert_allclose(slope, v, atol=1e-13)


def test_bad_input_is_refused_by_name():
    x = stiefel.random(5, 2, key=jax.random.key(0))
    for call, message in [
        (lambda: stiefel.inner(x, x, x, "flat"), "metric: wanted one of euclidean, canonical"),
        (lambda: stiefel.norm(x, x.T), r"v: wanted .*\(5, 2\), got .*\(2, 5\)"),
        (lambda: stiefel.exp(x, x, "flat"), "metric: wanted one of"),
        (lambda: stiefel.log(x, x[:4]), "y: wanted"),
        (lambda: stiefel.distance(x, x, "flat"), "kind: wanted one of chordal, euclidean"),
        (lambda: stiefel.ehess2rhess(x, x, x, x[:, :1]), "v: wanted"),
        (lambda: stiefel.transport_differential(x, x, x, "svd"), "retraction: wanted one of"),
        (
            lambda: stiefel.random_tangent(jnp.eye(1), key=jax.random.key(0)),
            "x: wanted more than one",
        ),
        (lambda: grassmann.inner(x, x, x.T), "v: wanted"),
        (lambda: grassmann.transport_parallel(x, x.T, x), "v: wanted"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
