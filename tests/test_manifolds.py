"""Projections, retractions, distances and geodesics of the Stiefel and Grassmann manifolds."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from jaxfed.manifolds import grassmann, stiefel

SHAPES = [(5, 1), (7, 3), (6, 4), (4, 4)]
GENERALIZED = ["polar", "qr"]
ALL = [*GENERALIZED, "cayley"]


def draw(seed, shape=(7, 3)):
    """A point and a Gaussian matrix of its shape."""
    first, second = jax.random.split(jax.random.key(seed))
    return stiefel.random(first, *shape), jax.random.normal(second, shape)


def deviation(x):
    return jnp.linalg.norm(x.T @ x - jnp.eye(x.shape[1]))


def outside(basis, w):
    """Norm of the part of ``w`` outside the span of an orthonormal basis."""
    return jnp.linalg.norm(w - basis @ (basis.T @ w))


# Stiefel


@given(seed=st.integers(0, 2**20), shape=st.sampled_from(SHAPES))
def test_projection_is_the_orthogonal_one_onto_the_tangent_space(seed, shape):
    with jax.enable_x64(True):
        x, g = draw(seed, shape)
        p = stiefel.project(x, g)
        chex.assert_trees_all_close(x.T @ p, -(p.T @ x), atol=1e-12)
        chex.assert_trees_all_close(stiefel.project(x, p), p, atol=1e-12)
        other = stiefel.transport(x, draw(seed + 1, shape)[1])
        assert abs(jnp.vdot(g - p, other)) < 1e-11
        # Its dimension, the rank of the projection, is d r - r (r + 1) / 2.
        matrix = jax.jacobian(lambda g: stiefel.project(x, g))(g).reshape(g.size, g.size)
        d, r = shape
        assert round(float(jnp.trace(matrix))) == d * r - r * (r + 1) // 2


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", SHAPES)
def test_retractions_land_on_the_manifold_and_fix_the_point(name, shape, x64):
    retract = jax.jit(stiefel.retraction(name))
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.float64, 1e-12)):
        x, v = (a.astype(dtype) for a in draw(3, shape))
        x = stiefel.retract_polar(x, 0 * x)
        for scale in (0.1, 1.0, 5.0):
            y = retract(x, scale * v)
            assert y.dtype == dtype
            assert deviation(y) <= tolerance * shape[1]
        chex.assert_trees_all_close(retract(x, 0 * v), x, atol=tolerance)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_retractions_agree_with_the_step_to_first_order(name, shape, x64):
    x, g = draw(1, shape)
    v = stiefel.project(x, g)
    v = v / jnp.linalg.norm(v)
    sizes = 2.0 ** -np.arange(4, 12)
    gaps = [jnp.linalg.norm(stiefel.retraction(name)(x, t * v) - (x + t * v)) for t in sizes]
    slope = np.polyfit(np.log(sizes), np.log(np.array(gaps)), 1)[0]
    assert abs(slope - 2) < 0.03


@given(seed=st.integers(0, 2**20), shape=st.sampled_from(SHAPES[:3]), scale=st.floats(0.01, 2))
def test_generalized_retractions_keep_the_column_space(seed, shape, scale):
    """Definition 5 of Shi & Kontar (2024), property 1, for steps that are not tangent."""
    with jax.enable_x64(True):
        x, xi = draw(seed, shape)
        w = x + scale * xi
        # The span of an ill-conditioned matrix is itself known only to its conditioning.
        tolerance = 1e-11 * jnp.linalg.cond(w) ** 2
        for name in GENERALIZED:
            y = stiefel.retraction(name)(x, scale * xi)
            assert outside(y, w) < tolerance


def test_cayley_is_not_a_generalized_retraction(x64):
    x, xi = draw(0)
    tangent = stiefel.project(x, xi)
    # It leaves the column space even of a tangent step,
    assert outside(stiefel.retract_cayley(x, tangent), x + tangent) > 0.1
    # and does not see the normal part of a step.
    chex.assert_trees_all_close(
        stiefel.retract_cayley(x, xi), stiefel.retract_cayley(x, tangent), atol=1e-12
    )


# Shi & Kontar (2024), Appendix F: M1, M2 and M3. Their bound for QR is on the distance to x + xi;
# the distance to x plus the tangent part is larger by at most the normal part, hence M2 + 1.
PAPER_CONSTANTS = {"polar": (253 / 4, 253 / 8, 1 / 6), "qr": (40 / 7, 80 / 7 + 1, 1 / 4)}
# What we measure over random steps stays below these, far smaller, constants.
MEASURED_CONSTANTS = {"polar": (0.55, 0.15), "qr": (1.0, 1.0)}


@pytest.mark.parametrize("name", GENERALIZED)
@pytest.mark.parametrize("constants", [PAPER_CONSTANTS, MEASURED_CONSTANTS])
def test_bound_of_the_generalized_retraction(name, constants, x64):
    """Definition 5 of Shi & Kontar (2024), property 2."""
    m1, m2 = constants[name][:2]
    m3 = PAPER_CONSTANTS[name][2]

    def sides(key, shape):
        keys = jax.random.split(key, 4)
        x = stiefel.random(keys[0], *shape)
        g = jax.random.normal(keys[1], shape)
        tangent = stiefel.project(x, g)
        # Every mixture of tangent and normal parts, every size up to M3.
        share, size = jax.random.uniform(keys[2]), m3 * jax.random.uniform(keys[3])
        normal = g - tangent
        xi = share * tangent / jnp.linalg.norm(tangent) + (1 - share) * normal / jnp.linalg.norm(
            normal
        )
        xi = size * xi / jnp.linalg.norm(xi)
        tangent = stiefel.project(x, xi)
        gap = jnp.linalg.norm(stiefel.retraction(name)(x, xi) - (x + tangent))
        return gap, jnp.linalg.norm(tangent) ** 2, jnp.linalg.norm(xi - tangent)

    for shape in SHAPES[:3]:
        keys = jax.random.split(jax.random.key(5), 2000)
        gap, tangent_squared, normal = jax.vmap(lambda key, s=shape: sides(key, s))(keys)
        assert (gap <= m1 * tangent_squared + m2 * normal).all()


def test_polar_is_the_nearest_point(x64):
    """Equation 20 of Shi & Kontar (2024)."""
    x, xi = draw(0)
    nearest = stiefel.distance(stiefel.retract_polar(x, xi), x + xi)
    others = [stiefel.retract_qr(x, xi), stiefel.retract_cayley(x, xi), x]
    near = [stiefel.retract_qr(stiefel.retract_polar(x, xi), 1e-2 * draw(s)[1]) for s in range(20)]
    assert all(stiefel.distance(y, x + xi) > nearest for y in [*others, *near])


@pytest.mark.parametrize("shape", SHAPES)
def test_cayley_is_the_dense_transform(shape, x64):
    x, v = draw(2, shape)
    p = v - x @ (x.T @ v) / 2
    w, eye = p @ x.T - x @ p.T, jnp.eye(shape[0])
    dense = jnp.linalg.solve(eye - w / 2, (eye + w / 2) @ x)
    chex.assert_trees_all_close(stiefel.retract_cayley(x, v), dense, atol=1e-12)


def test_cayley_repairs_the_orthonormality_of_its_point(x64):
    x, v = draw(0)
    drifted = x * (1 + 1e-4)
    assert deviation(drifted) > 1e-4
    assert deviation(stiefel.retract_cayley(drifted, 0.1 * v)) < 1e-6


@pytest.mark.parametrize("name", ALL)
def test_retractions_are_differentiable(name, x64):
    retract = stiefel.retraction(name)
    x, v = draw(4, (5, 3))
    weights = jnp.arange(15.0).reshape(5, 3)

    def loss(x, v):
        return jnp.sum(weights * jnp.sin(retract(x, v)))

    # At the point itself all singular values are equal.
    for step in (v, 0.1 * v, 0 * v):
        check_grads(loss, (x, step), order=1, modes=["rev"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_retractions_batch_and_compile(name):
    retract = stiefel.retraction(name)
    points = [draw(s) for s in range(4)]
    x, v = (jnp.stack(a) for a in zip(*points, strict=True))
    batched = jax.jit(jax.vmap(retract))(x, v)
    chex.assert_trees_all_close(batched, jnp.stack([retract(*p) for p in points]), atol=1e-5)


def test_random_is_uniform(key):
    x = jax.vmap(lambda k: stiefel.random(k, 4, 2))(jax.random.split(key, 20000))
    assert x.shape == (20000, 4, 2)
    # Of a uniform frame: E x = 0, E x_ij x_kl = δ_ik δ_jl / d, and the same for every rotation.
    chex.assert_trees_all_close(x.mean(0), jnp.zeros((4, 2)), atol=0.02)
    flat = x.reshape(-1, 8)
    chex.assert_trees_all_close(flat.T @ flat / 20000, jnp.eye(8) / 4, atol=0.02)
    # E x_ij⁴ = 3 / (d (d + 2)); without the sign fix the first row would be biased.
    chex.assert_trees_all_close((x**4).mean(0), jnp.full((4, 2), 3 / 24), atol=0.01)
    assert abs((x[:, 0, 0] > 0).mean() - 0.5) < 0.02


def test_random_dtype(key, x64):
    assert stiefel.random(key, 3, 2).dtype == jnp.float64
    assert stiefel.random(key, 3, 2, dtype=jnp.float32).dtype == jnp.float32
    with jax.enable_x64(False):
        assert stiefel.random(key, 3, 2).dtype == jnp.float32


def test_distance_and_is_on(x64):
    x, v = draw(0)
    y = stiefel.retract_polar(x, v)
    chex.assert_trees_all_close(stiefel.distance(x, y), jnp.linalg.norm(x - y), rtol=1e-12)
    assert stiefel.distance(x, -x) == pytest.approx(2 * 3**0.5)
    assert (jax.grad(stiefel.distance)(x, x) == 0).all()
    assert stiefel.is_on(x) and stiefel.is_on(x.astype(jnp.float32))
    assert not stiefel.is_on(x + 1e-6) and stiefel.is_on(x + 1e-6, tolerance=1e-4)
    assert not stiefel.is_on(x.astype(jnp.float32) + 1e-3)


# Grassmann


@given(seed=st.integers(0, 2**20), shape=st.sampled_from(SHAPES))
def test_horizontal_projection(seed, shape):
    with jax.enable_x64(True):
        x, g = draw(seed, shape)
        chex.assert_trees_all_close(
            grassmann.project(x, g), (jnp.eye(shape[0]) - x @ x.T) @ g, atol=1e-12
        )
        chex.assert_trees_all_close(
            x.T @ grassmann.transport(x, g), jnp.zeros((shape[1],) * 2), atol=1e-12
        )


@pytest.mark.parametrize("name", ALL)
def test_retractions_of_subspaces_do_not_depend_on_the_basis(name, x64):
    x, g = draw(0)
    v, rotation = grassmann.project(x, g), stiefel.random(jax.random.key(9), 3, 3)
    first = grassmann.retraction(name)(x, v)
    second = grassmann.retraction(name)(x @ rotation, v @ rotation)
    assert grassmann.distance(first, second) < 1e-12


@pytest.mark.parametrize("dtype, eps", [(jnp.float32, 3e-7), (jnp.float64, 1e-15)])
def test_principal_angles_are_accurate_at_every_size(dtype, eps, x64):
    """Angles from 1e-12 to π/2 to an absolute error of a few roundings."""
    basis = np.asarray(stiefel.random(jax.random.key(0), 9, 8))
    angles = np.array([1e-12, 1e-5, 0.7, np.pi / 2])
    x = basis[:, :4]
    y = x * np.cos(angles) + basis[:, 4:] * np.sin(angles)
    rotation = np.asarray(stiefel.random(jax.random.key(1), 4, 4))
    measured = grassmann.principal_angles(jnp.asarray(x, dtype), jnp.asarray(y @ rotation, dtype))
    assert measured.dtype == dtype
    np.testing.assert_allclose(measured, angles, atol=4 * eps)


def test_principal_angles_of_unequal_dimensions(x64):
    x = stiefel.random(jax.random.key(0), 7, 4)
    inside = x @ stiefel.random(jax.random.key(1), 4, 2)
    chex.assert_trees_all_close(grassmann.principal_angles(x, inside), jnp.zeros(2), atol=1e-12)
    y = stiefel.random(jax.random.key(2), 7, 2)
    angles = grassmann.principal_angles(x, y)
    chex.assert_trees_all_close(angles, grassmann.principal_angles(y, x), atol=1e-12)
    chex.assert_trees_all_close(
        jnp.linalg.norm(x @ x.T - y @ y.T) ** 2, 2 * jnp.sum(jnp.sin(angles) ** 2) + 2, atol=1e-12
    )


@given(seed=st.integers(0, 2**20), shape=st.sampled_from(SHAPES))
def test_distances_of_subspaces(seed, shape):
    with jax.enable_x64(True):
        x, y = draw(seed, shape)[0], draw(seed + 1, shape)[0]
        rotation = stiefel.random(jax.random.key(seed), shape[1], shape[1])
        distances = {k: grassmann.distance(x, y, k) for k in ("chordal", "geodesic", "procrustes")}
        for kind, value in distances.items():
            # The same for any bases and in either order.
            chex.assert_trees_all_close(
                grassmann.distance(y @ rotation, x, kind), value, atol=1e-12
            )
        projectors = jnp.linalg.norm(x @ x.T - y @ y.T) / jnp.sqrt(2.0)
        chex.assert_trees_all_close(distances["chordal"], projectors, atol=1e-12)
        aligned = stiefel.retract_polar(jnp.eye(shape[1]), y.T @ x - jnp.eye(shape[1]))
        chex.assert_trees_all_close(
            distances["procrustes"], jnp.linalg.norm(x - y @ aligned), atol=1e-9
        )
        assert distances["chordal"] <= distances["procrustes"] + 1e-12
        assert distances["procrustes"] <= distances["geodesic"] + 1e-12


@pytest.mark.parametrize("kind", ["chordal", "geodesic", "procrustes"])
def test_distances_of_near_subspaces_do_not_cancel(kind, x64):
    x, g = draw(0)
    v = grassmann.project(x, g)
    v = v / jnp.linalg.norm(v)
    for size in (1e-3, 1e-6, 1e-9, 1e-12):
        y = grassmann.exp(x, size * v)
        assert abs(grassmann.distance(x, y, kind) - size) < 1e-6 * size + 2e-15
    assert jnp.isfinite(jax.grad(lambda y: grassmann.distance(x, y, kind))(x)).all()


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 3e-6), (jnp.float64, 1e-13)])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_exponential_and_logarithm(shape, dtype, tolerance, x64):
    x, g = (a.astype(dtype) for a in draw(2, shape))
    v = grassmann.project(x, g)
    u, s, wt = np.linalg.svd(np.asarray(v), full_matrices=False)
    for size in (0.0, 0.3, 1.5):
        scaled, angles = size * v / s[0], size * s / s[0]
        y = grassmann.exp(x, scaled)
        dense = x @ wt.T * np.cos(angles) @ wt + u * np.sin(angles) @ wt
        chex.assert_trees_all_close(y, dense.astype(dtype), atol=tolerance)
        chex.assert_trees_all_close(
            grassmann.distance(x, y, "geodesic"), jnp.linalg.norm(scaled), atol=tolerance
        )
        rotation = stiefel.random(jax.random.key(1), shape[1], shape[1], dtype)
        chex.assert_trees_all_close(
            grassmann.log(x, y @ rotation), scaled, atol=(40 if size > 1 else 1) * tolerance
        )
    # Past the closest half turn the geodesic goes on, still on the manifold.
    assert deviation(grassmann.exp(x, 10 * v / s[0])) < 10 * tolerance


def test_exponential_and_logarithm_are_differentiable(x64):
    x, g = draw(4, (5, 2))
    v = grassmann.project(x, g)
    repeated = stiefel.random(jax.random.key(8), 5, 5)[:, :4]
    x_repeated, v_repeated = repeated[:, :2], 0.5 * repeated[:, 2:]
    weights = jnp.arange(10.0).reshape(5, 2)
    for point, step in ((x, 0.4 * v), (x, 0 * v), (x_repeated, v_repeated)):
        check_grads(
            lambda v, x=point: jnp.sum(weights * grassmann.exp(x, v)),
            (step,),
            order=2,
            modes=["fwd", "rev"],
            atol=1e-4,
            rtol=1e-4,
        )
        check_grads(
            lambda y, x=point: jnp.sum(weights * grassmann.log(x, y)),
            (grassmann.exp(point, step),),
            order=1,
            modes=["rev"],
            atol=1e-5,
            rtol=1e-5,
        )


# Bad input


def test_bad_input_is_refused_with_its_name(key):
    x = stiefel.random(key, 5, 2)
    for call, message in [
        (lambda: stiefel.retraction("svd"), r"retraction must be one of .*cayley.*'svd'"),
        (lambda: grassmann.retraction("svd"), r"retraction must be one of .*polar.*'svd'"),
        (lambda: stiefel.random(key, 2, 3), "rank must be between 1 and dim = 2, got 3"),
        (lambda: stiefel.random(key, 2, 0), "rank must be between 1 and dim = 2, got 0"),
        (lambda: stiefel.project(x.T, x.T), r"x must be one \(d, r\) matrix"),
        (lambda: stiefel.is_on(x[None]), r"x must be one \(d, r\) matrix .*jax.vmap"),
        (lambda: stiefel.distance(x, x[:4]), r"y must have the shape of x"),
        (lambda: grassmann.exp(x, x[:, 0]), r"v must have the shape of x"),
        (lambda: grassmann.principal_angles(x, x[:4]), "y must have the 5 rows of x"),
        (lambda: grassmann.distance(x, x, "euclidean"), "kind must be 'chordal', .*'euclidean'"),
        *[
            (lambda f=f: f(x, x[:, :1]), r"v must have the shape of x, \(5, 2\), got \(5, 1\)")
            for f in stiefel.RETRACTIONS.values()
        ],
    ]:
        with pytest.raises(ValueError, match=message):
            call()
