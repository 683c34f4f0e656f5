"""Projections, retractions, distances and geodesics of the Stiefel and Grassmann manifolds."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfed.manifolds import grassmann, stiefel

SHAPES = [(5, 1), (4, 4), (7, 3)]
GENERALIZED = ["polar", "qr"]
ALL = [*GENERALIZED, "cayley"]

# Compiled once for all tests: run eagerly, the loops inside compile at every call.
RETRACT = {name: jax.jit(retract) for name, retract in stiefel.RETRACTIONS.items()}
EXP, LOG = jax.jit(grassmann.exp), jax.jit(grassmann.log)
DISTANCE = jax.jit(grassmann.distance, static_argnames="kind")
ANGLES = jax.jit(grassmann.principal_angles)
FRAME = jax.jit(stiefel.random, static_argnames=("dim", "rank", "dtype"))


@partial(jax.jit, static_argnames="shape")
def draw_pair(seed, shape=(7, 3)):
    """A point and a Gaussian matrix of its shape."""
    first, second = jax.random.split(jax.random.key(seed))
    return stiefel.random(*shape, key=first), jax.random.normal(second, shape)


@jax.jit
def deviation(x):
    return jnp.linalg.norm(x.T @ x - jnp.eye(x.shape[1]))


@jax.jit
def outside(basis, w):
    """Norm of the part of ``w`` outside the span of an orthonormal basis."""
    return jnp.linalg.norm(w - basis @ (basis.T @ w))


HALF = {
    "cayley": lambda x, v, y: stiefel.retract_cayley(x, v),
    "transport": lambda x, v, y: stiefel.transport_cayley(x, v, v),
    "grassmann log": lambda x, v, y: grassmann.log(x, y),
    "angles": lambda x, v, y: grassmann.principal_angles(x, y),
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", HALF)
def test_half_precision_computes_what_single_precision_does(name, dtype):
    x, v = draw_pair(0, (4, 2))
    y = stiefel.retract_polar(x, 0.3 * v)
    given = [a.astype(dtype) for a in (x, stiefel.project(x, v), y)]
    found = jax.jit(HALF[name])(*given)
    assert found.dtype == dtype
    wanted = jax.jit(HALF[name])(*(a.astype(jnp.float32) for a in given))
    error = jnp.abs(found.astype(jnp.float32) - wanted).max()
    assert error <= 4 * float(jnp.finfo(dtype).eps) * jnp.abs(wanted).max()


# Stiefel


@partial(jax.jit, static_argnames="shape")
def projection_residuals(seed, shape):
    x, g = draw_pair(seed, shape)
    p = stiefel.project(x, g)
    # Every tangent vector is x times a skew matrix plus a horizontal matrix.
    skew, horizontal = (draw_pair(seed + i, shape)[1] for i in (1, 2))
    tangent = x @ (skew[: shape[1]] - skew[: shape[1]].T) + horizontal - x @ (x.T @ horizontal)
    return {
        "tangent": jnp.linalg.norm(x.T @ p + p.T @ x),
        "keeps tangent vectors": jnp.linalg.norm(stiefel.transport(x, tangent) - tangent),
        "orthogonal": abs(jnp.vdot(g - p, tangent)),
        "horizontal": jnp.linalg.norm(grassmann.project(x, g) - (g - x @ x.T @ g)),
        "horizontal transport": jnp.linalg.norm(x.T @ grassmann.transport(x, g)),
    }


@given(seed=st.integers(0, 2**20), shape=st.sampled_from(SHAPES[1:]))
def test_projections_are_the_orthogonal_ones_onto_the_tangent_spaces(seed, shape):
    with jax.enable_x64(True):
        for name, residual in projection_residuals(seed, shape).items():
            assert residual < 1e-11, name


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "shape, dtype, tolerance",
    [
        ((5, 1), jnp.float32, 1e-5),
        ((4, 4), jnp.float32, 1e-5),
        ((7, 3), jnp.float32, 1e-5),
        ((7, 3), jnp.float64, 1e-12),
    ],
)
def test_retractions_land_on_the_manifold_and_fix_the_point(name, shape, dtype, tolerance, x64):
    x, v = draw_pair(3, shape)
    x, v = x.astype(dtype), v.astype(dtype)
    for scale in (0.1, 1.0, 5.0):
        y = RETRACT[name](x, scale * v)
        assert y.dtype == dtype
        assert deviation(y) <= tolerance * shape[1]
    chex.assert_trees_all_close(RETRACT[name](x, 0 * v), x, atol=tolerance)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", SHAPES[::2])
def test_retractions_agree_with_the_step_to_first_order(name, shape, x64):
    x, g = draw_pair(1, shape)
    v = stiefel.project(x, g)
    v = v / jnp.linalg.norm(v)
    sizes = 2.0 ** -np.arange(4, 12)
    gaps = [jnp.linalg.norm(RETRACT[name](x, t * v) - (x + t * v)) for t in sizes]
    slope = np.polyfit(np.log(sizes), np.log(np.array(gaps)), 1)[0]
    assert abs(slope - 2) < 0.03


@given(seed=st.integers(0, 2**20), shape=st.sampled_from(SHAPES[::2]), scale=st.floats(0.01, 2))
def test_generalized_retractions_keep_the_column_space(seed, shape, scale):
    """Definition 5 of Shi & Kontar (2024), property 1, for steps that are not tangent."""
    with jax.enable_x64(True):
        x, xi = draw_pair(seed, shape)
        w = x + scale * xi
        # The span of an ill-conditioned matrix is itself known only to its conditioning.
        tolerance = 1e-11 * jnp.linalg.cond(w) ** 2
        for name in GENERALIZED:
            y = RETRACT[name](x, scale * xi)
            assert outside(y, w) < tolerance


def test_cayley_is_not_a_generalized_retraction(x64):
    x, xi = draw_pair(0)
    tangent = stiefel.project(x, xi)
    # It leaves the column space even of a tangent step,
    assert outside(RETRACT["cayley"](x, tangent), x + tangent) > 0.1
    # and does not see the normal part of a step.
    chex.assert_trees_all_close(RETRACT["cayley"](x, xi), RETRACT["cayley"](x, tangent), atol=1e-12)


# Shi & Kontar (2024), Appendix F: M1, M2 and M3. Their bound for QR is on the distance to x + xi;
# the distance to x plus the tangent part is larger by at most the normal part, hence M2 + 1.
PAPER_CONSTANTS = {"polar": (253 / 4, 253 / 8, 1 / 6), "qr": (40 / 7, 80 / 7 + 1, 1 / 4)}
# What we measure over random steps stays below these, far smaller, constants.
MEASURED_CONSTANTS = {"polar": (0.5, 0.2), "qr": (0.75, 1.1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERALIZED)
def test_bound_of_the_generalized_retraction(name, x64):
    """Definition 5 of Shi & Kontar (2024), property 2."""
    shape, m3 = (6, 3), PAPER_CONSTANTS[name][2]

    @jax.jit
    @jax.vmap
    def sides(key):
        keys = jax.random.split(key, 4)
        x = FRAME(*shape, key=keys[0])
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
        gap = jnp.linalg.norm(RETRACT[name](x, xi) - (x + tangent))
        return gap, jnp.linalg.norm(tangent) ** 2, jnp.linalg.norm(xi - tangent)

    gap, tangent_squared, normal = sides(jax.random.split(jax.random.key(5), 5000))
    for m1, m2, *_ in (PAPER_CONSTANTS[name], MEASURED_CONSTANTS[name]):
        assert (gap <= m1 * tangent_squared + m2 * normal).all()
    # The measured constants are sharp within a factor of two.
    m1, m2 = MEASURED_CONSTANTS[name]
    assert (gap > (m1 * tangent_squared + m2 * normal) / 2).any()


def test_polar_is_the_nearest_point(x64):
    """Equation 20 of Shi & Kontar (2024)."""
    x, xi = draw_pair(0)
    nearest = stiefel.distance(RETRACT["polar"](x, xi), x + xi)
    others = [RETRACT["qr"](x, xi), RETRACT["cayley"](x, xi), x]
    near = [RETRACT["qr"](RETRACT["polar"](x, xi), 1e-2 * draw_pair(s)[1]) for s in range(20)]
    assert all(stiefel.distance(y, x + xi) > nearest for y in [*others, *near])


@pytest.mark.parametrize("shape", SHAPES)
def test_cayley_equals_the_dense_transform(shape, x64):
    x, v = draw_pair(2, shape)
    p = v - x @ (x.T @ v) / 2
    w, eye = p @ x.T - x @ p.T, jnp.eye(shape[0])
    dense = jnp.linalg.solve(eye - w / 2, (eye + w / 2) @ x)
    chex.assert_trees_all_close(RETRACT["cayley"](x, v), dense, atol=1e-12)


def test_cayley_repairs_the_orthonormality_of_its_point(x64):
    x, v = draw_pair(0)
    drifted = x * (1 + 1e-4)
    assert deviation(drifted) > 1e-4
    assert deviation(RETRACT["cayley"](drifted, 0.1 * v)) < 1e-6


def assert_gradient(function, points):
    """Reverse mode against central differences along a random direction."""
    weights = jnp.arange(15.0).reshape(5, 3)

    def loss(x, v):
        return jnp.sum(weights * jnp.sin(function(x, v)))

    gradient, loss = jax.jit(jax.grad(loss, (0, 1))), jax.jit(loss)
    directions = draw_pair(11, (5, 3))[1], draw_pair(12, (5, 3))[1]
    for x, v in points:
        ahead, behind = (loss(x + t * directions[0], v + t * directions[1]) for t in (1e-5, -1e-5))
        slope = sum(jnp.vdot(g, d) for g, d in zip(gradient(x, v), directions, strict=True))
        assert abs(slope - (ahead - behind) / 2e-5) < 1e-7 * (1 + abs(slope))


@pytest.mark.parametrize("name", ALL)
def test_retractions_are_differentiable(name, x64):
    x, v = draw_pair(4, (5, 3))
    # At a step of zero all singular values are equal.
    assert_gradient(RETRACT[name], [(x, v), (x, 0.1 * v), (x, 0 * v)])


@pytest.mark.parametrize("name", ALL)
def test_retractions_batch_and_compile(name):
    retract = RETRACT[name]
    points = [draw_pair(s) for s in range(4)]
    x, v = (jnp.stack(a) for a in zip(*points, strict=True))
    batched = jax.jit(jax.vmap(retract))(x, v)
    chex.assert_trees_all_close(batched, jnp.stack([retract(*p) for p in points]), atol=1e-5)


def test_random_is_uniform(key):
    x = jax.vmap(lambda k: stiefel.random(4, 2, key=k))(jax.random.split(key, 8000))
    assert x.shape == (8000, 4, 2)
    # Of a uniform frame: E x = 0, E x_ij x_kl = δ_ik δ_jl / d, and the same for every rotation.
    chex.assert_trees_all_close(x.mean(0), jnp.zeros((4, 2)), atol=0.02)
    flat = x.reshape(-1, 8)
    chex.assert_trees_all_close(flat.T @ flat / 8000, jnp.eye(8) / 4, atol=0.02)
    # E x_ij⁴ = 3 / (d (d + 2)); without the sign fix the first row would be biased.
    chex.assert_trees_all_close((x**4).mean(0), jnp.full((4, 2), 3 / 24), atol=0.01)
    assert abs((x[:, 0, 0] > 0).mean() - 0.5) < 0.02


def test_random_dtype(key, x64):
    assert stiefel.random(3, 2, key=key).dtype == jnp.float64
    assert stiefel.random(3, 2, key=key, dtype=jnp.float32).dtype == jnp.float32
    with jax.enable_x64(False):
        assert stiefel.random(3, 2, key=key).dtype == jnp.float32


def test_distance_and_is_on(x64):
    x, v = draw_pair(0)
    y = RETRACT["polar"](x, v)
    chex.assert_trees_all_close(stiefel.distance(x, y), jnp.linalg.norm(x - y), rtol=1e-12)
    assert stiefel.distance(x, -x) == pytest.approx(2 * 3**0.5)
    assert (jax.grad(stiefel.distance)(x, x) == 0).all()
    assert stiefel.is_on(x) and stiefel.is_on(x.astype(jnp.float32))
    assert not stiefel.is_on(x + 1e-6) and stiefel.is_on(x + 1e-6, tolerance=1e-4)
    assert not stiefel.is_on(x.astype(jnp.float32) + 1e-3)


# Grassmann


@pytest.mark.parametrize("name", ALL)
def test_retractions_of_subspaces_do_not_depend_on_the_basis(name, x64):
    x, g = draw_pair(0)
    v, rotation = grassmann.project(x, g), stiefel.random(3, 3, key=jax.random.key(9))
    first = RETRACT[name](x, v)
    second = RETRACT[name](x @ rotation, v @ rotation)
    assert DISTANCE(first, second) < 1e-12


@pytest.mark.parametrize("dtype, eps", [(jnp.float32, 3e-7), (jnp.float64, 1e-15)])
def test_principal_angles_are_accurate_at_every_size(dtype, eps, x64):
    """Angles from 1e-12 to π/2 to an absolute error of a few roundings."""
    basis = np.asarray(stiefel.random(9, 8, key=jax.random.key(0)))
    angles = np.array([1e-12, 1e-5, 0.7, np.pi / 2])
    x = basis[:, :4]
    y = x * np.cos(angles) + basis[:, 4:] * np.sin(angles)
    rotation = np.asarray(stiefel.random(4, 4, key=jax.random.key(1)))
    measured = ANGLES(jnp.asarray(x, dtype), jnp.asarray(y @ rotation, dtype))
    assert measured.dtype == dtype
    np.testing.assert_allclose(measured, angles, atol=4 * eps)


@pytest.mark.slow
def test_principal_angles_of_unequal_dimensions(x64):
    x = FRAME(7, 4, key=jax.random.key(0))
    inside = x @ FRAME(4, 2, key=jax.random.key(1))
    chex.assert_trees_all_close(ANGLES(x, inside), jnp.zeros(2), atol=1e-12)
    y = FRAME(7, 2, key=jax.random.key(2))
    angles = ANGLES(x, y)
    chex.assert_trees_all_close(angles, ANGLES(y, x), atol=1e-12)
    chex.assert_trees_all_close(
        jnp.linalg.norm(x @ x.T - y @ y.T) ** 2, 2 * jnp.sum(jnp.sin(angles) ** 2) + 2, atol=1e-12
    )


@partial(jax.jit, static_argnames="shape")
def distances(seed, shape):
    """Between two random subspaces: by kind, with other bases and swapped, and densely."""
    x, y = draw_pair(seed, shape)[0], draw_pair(seed + 1, shape)[0]
    rotated = y @ stiefel.random(shape[1], shape[1], key=jax.random.key(seed))
    kinds = ("chordal", "geodesic", "procrustes")
    first = jnp.stack([grassmann.distance(x, y, kind) for kind in kinds])
    second = jnp.stack([grassmann.distance(rotated, x, kind) for kind in kinds])
    u, _, vt = jnp.linalg.svd(y.T @ x)
    dense = jnp.linalg.norm(x @ x.T - y @ y.T) / jnp.sqrt(2), jnp.linalg.norm(x - y @ u @ vt)
    return first, second, dense


@pytest.mark.slow
@given(seed=st.integers(0, 2**20), shape=st.sampled_from(SHAPES[1:]))
def test_distances_of_subspaces(seed, shape):
    with jax.enable_x64(True):
        first, second, (projectors, aligned) = distances(seed, shape)
        np.testing.assert_allclose(first, second, atol=1e-12)
        chordal, geodesic, procrustes = first
        assert abs(chordal - projectors) < 1e-12 and abs(procrustes - aligned) < 1e-12
        assert chordal <= procrustes + 1e-12 and procrustes <= geodesic + 1e-12


@pytest.mark.parametrize("kind", ["chordal", "geodesic", "procrustes"])
def test_distances_of_near_subspaces_do_not_cancel(kind, x64):
    x, g = draw_pair(0)
    v = grassmann.project(x, g)
    v = v / jnp.linalg.norm(v)
    for size in (1e-3, 1e-6, 1e-9, 1e-12):
        y = EXP(x, size * v)
        assert abs(DISTANCE(x, y, kind) - size) < 1e-6 * size + 2e-15
    assert jnp.isfinite(jax.grad(lambda y: DISTANCE(x, y, kind))(x)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, dtype, tolerance", [((7, 3), jnp.float32, 3e-6), ((5, 3), jnp.float64, 1e-13)]
)
def test_exponential_and_logarithm(shape, dtype, tolerance, x64):
    x, g = (a.astype(dtype) for a in draw_pair(2, shape))
    v = grassmann.project(x, g)
    u, s, wt = np.linalg.svd(np.asarray(v), full_matrices=False)
    for size in (0.0, 0.3, 1.5):
        scaled, angles = size * v / s[0], size * s / s[0]
        y = EXP(x, scaled)
        dense = x @ wt.T * np.cos(angles) @ wt + u * np.sin(angles) @ wt
        chex.assert_trees_all_close(y, dense.astype(dtype), atol=tolerance)
        chex.assert_trees_all_close(
            DISTANCE(x, y, "geodesic"), jnp.linalg.norm(scaled), atol=tolerance
        )
        rotation = FRAME(shape[1], shape[1], key=jax.random.key(1), dtype=dtype)
        chex.assert_trees_all_close(
            LOG(x, y @ rotation), scaled, atol=(40 if size > 1 else 1) * tolerance
        )
    # Beyond the nearest half turn the geodesic continues on the manifold.
    assert deviation(EXP(x, 10 * v / s[0])) < 10 * tolerance


@pytest.mark.slow
def test_exponential_and_logarithm_are_differentiable(x64):
    x, g = draw_pair(4, (5, 3))
    v = 0.4 * grassmann.project(x, g)
    # Two repeated angles and a zero one.
    basis = FRAME(5, 5, key=jax.random.key(8))
    x_repeated, v_repeated = basis[:, :3], 0.5 * basis[:, 3:] @ jnp.eye(2, 3)
    steps = [(x, v), (x, 0 * v), (x_repeated, v_repeated)]
    assert_gradient(EXP, steps)
    assert_gradient(LOG, [(x, EXP(x, v)) for x, v in steps])


# Bad input


def test_bad_input_is_refused_by_name(key):
    x = stiefel.random(5, 2, key=key)
    for call, message in [
        (lambda: stiefel.retraction("svd"), "retraction: wanted one of .*cayley.*'svd'"),
        (lambda: grassmann.retraction("svd"), "retraction: wanted one of .*polar.*'svd'"),
        (lambda: stiefel.random(2, 3, key=key), "rank: wanted a whole number from 1 to 2, got 3"),
        (lambda: stiefel.random(2, 0, key=key), "rank: wanted a whole number .*, got 0"),
        (lambda: stiefel.project(x.T, x.T), r"x: wanted one matrix \(d, r\)"),
        (lambda: stiefel.is_on(x[None]), r"x: wanted .* of shape \(d, r\), got .*\(1, 5, 2\)"),
        (lambda: stiefel.distance(x, x[:4]), r"y: wanted .*\(5, 2\), got .*\(4, 2\)"),
        (lambda: grassmann.exp(x, x[:, 0]), r"v: wanted .*\(5, 2\), got .*\(5,\)"),
        (lambda: grassmann.principal_angles(x, x[:4]), "y: wanted the 5 rows of x"),
        (
            lambda: grassmann.distance(x, x, "euclidean"),
            "kind: wanted one of chordal, .*'euclidean'",
        ),
        *[
            (lambda f=f: f(x, x[:, :1]), r"v: wanted .*\(5, 2\), got .*\(5, 1\)")
            for f in stiefel.RETRACTIONS.values()
        ],
    ]:
        with pytest.raises(ValueError, match=message):
            call()
