"""Solvers on manifolds: minima, derivatives of minima, how they end, what is refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfed import manifolds
from jaxfed.manifolds import grassmann, stiefel
from jaxfed.manifolds._line_search import search
from jaxfed.manifolds._space import Space, inner
from jaxfed.manifolds._stationary import conjugate_gradients
from jaxfed.manifolds._surface import Surface
from jaxfed.testing._compare import compilations

SOLVERS = sorted(manifolds.SOLVERS)


def covariance(seed=0, features=12, strong=3):
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(features, features)))[0]
    values = np.concatenate([np.linspace(6, 4, strong), np.linspace(2, 0.1, features - strong)])
    return jnp.asarray((turn * values) @ turn.T), values


def energy(matrix, x):
    return -jnp.sum(x * (matrix @ x))


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_principal_components_from_random_starts(solver, x64):
    matrix, values = covariance()

    @jax.jit
    @jax.vmap
    def found(key):
        start = stiefel.random(12, 3, key=key)
        return manifolds.minimise(
            lambda x: energy(matrix, x), start, manifold="grassmann", solver=solver, tol=1e-8
        )

    minima = found(jax.random.split(jax.random.key(0), 5))
    assert (minima.status == manifolds.Ended.converged).all()
    np.testing.assert_allclose(minima.value, -values[:3].sum(), rtol=1e-12)
    assert jax.vmap(stiefel.is_on)(minima.point).all()
    assert (minima.gradient_norm <= 1e-8 * values[:3].sum()).all()
    assert (minima.steps <= {"trust_regions": 15}.get(solver, 40)).all()
    assert ((minima.products > 0) == (solver == "trust_regions")).all()


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_tree_of_points_and_parameters(solver, x64):
    """Two batches of frames and a vector: each has the minimum that it has alone."""
    matrix, values = covariance()
    other, others = covariance(1)
    wanted = jnp.arange(4.0)

    def function(tree):
        frames = energy(matrix, tree["frames"][0]) + energy(other, tree["frames"][1])
        return frames + jnp.sum((tree["rest"] - wanted) ** 2) + jnp.sum(tree["rest"] ** 4) / 9

    start = {
        "frames": jax.vmap(lambda k: stiefel.random(12, 3, key=k))(
            jax.random.split(jax.random.key(1))
        ),
        "rest": 50 * jnp.ones(4),
    }
    found = jax.jit(
        lambda start: manifolds.minimise(
            function, start, manifold={"frames": "stiefel", "rest": "euclidean"}, solver=solver
        )
    )(start)
    assert found.status == manifolds.Ended.converged
    lowest = jnp.sum((found.point["rest"] - wanted) ** 2) + jnp.sum(found.point["rest"] ** 4) / 9
    assert found.value == pytest.approx(float(lowest) - values[:3].sum() - others[:3].sum())
    slope = 2 * (found.point["rest"] - wanted) + 4 / 9 * found.point["rest"] ** 3
    assert jnp.abs(slope).max() < 1e-4


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("size", [1.0, pytest.param(1e3, marks=pytest.mark.slow)])
def test_the_unit_of_parameters_beside_a_point_changes_nothing(solver, size, x64):
    """The best matrix of rank one, from starts of its size and of another."""
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(20, 8)) + np.outer(rng.normal(size=20), np.ones(8))
    left, values, right = np.linalg.svd(matrix)
    wanted = values[0] * np.outer(left[:, 0], right[0])

    def best(scale):
        def function(tree):
            return jnp.sum((scale * matrix - tree["scores"] @ tree["basis"].T) ** 2)

        start = {"basis": jnp.eye(8)[:, :1], "scores": size * 1e-3 * jnp.ones((20, 1))}
        found = manifolds.minimise(
            function,
            start,
            manifold={"basis": "stiefel", "scores": "euclidean"},
            solver=solver,
        )
        return found.point["scores"] @ found.point["basis"].T, found

    for scale in (1e-6, 1.0, 1e6):
        product, found = best(scale)
        assert found.status == manifolds.Ended.converged
        np.testing.assert_allclose(product / scale, wanted, atol=1e-4)
        slope = jax.jvp(lambda scale: best(scale)[0], (scale,), (1.0,))[1]
        np.testing.assert_allclose(slope, wanted, atol=1e-3)


def brockett(matrix, x):
    """Not invariant to turns of the basis, with a minimum that is isolated but for signs."""
    return -jnp.sum(jnp.array([3.0, 2.0, 1.0]) * x * (matrix @ x))


@pytest.mark.slow
@pytest.mark.parametrize("manifold", ["stiefel", "grassmann"])
def test_minima_are_differentiable(manifold, x64):
    """By what the function closes over, against central differences of exact minima."""
    matrix, _ = covariance()
    rng = np.random.default_rng(3)
    direction = rng.normal(size=matrix.shape)
    direction = jnp.asarray(direction + direction.T)
    weights = jnp.asarray(rng.normal(size=(12, 12)))
    function = brockett if manifold == "stiefel" else energy
    start = stiefel.random(12, 3, key=jax.random.key(2))

    def loss(size, solver, tol):
        found = manifolds.minimise(
            lambda x: function(matrix + size * direction, x),
            start,
            manifold=manifold,
            solver=solver,
            tol=tol,
        )
        frame = found.point[:, :2] if manifold == "stiefel" else found.point
        return jnp.sum(weights * (frame @ frame.T)) + found.value**2, found.status

    step = 1e-4
    sizes = step * jnp.array([1.0, -1.0, 2.0, -2.0])
    values, ended = jax.jit(jax.vmap(lambda size: loss(size, "trust_regions", 1e-12)))(sizes)
    assert (ended == manifolds.Ended.converged).all()
    wanted = (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * step)
    for solver in SOLVERS:
        slope, ended = jax.jit(lambda size: jax.grad(loss, has_aux=True)(size, solver, 1e-8))(0.0)  # noqa: B023
        assert ended == manifolds.Ended.converged
        np.testing.assert_allclose(slope, wanted, rtol=1e-6)
    _, slope = jax.jvp(lambda size: loss(size, "trust_regions", 1e-8)[0], (0.0,), (1.0,))
    np.testing.assert_allclose(slope, wanted, rtol=1e-7)


@pytest.mark.slow
def test_the_start_has_no_influence_and_unmet_tolerances_have_no_derivative(x64):
    matrix, _ = covariance()

    def projector(start, matrix, steps):
        found = manifolds.minimise(
            lambda x: energy(matrix, x), start, manifold="grassmann", max_steps=steps
        )
        return jnp.sum((found.point @ found.point.T)[0])

    start = stiefel.random(12, 3, key=jax.random.key(2))
    slope = jax.jit(jax.grad(projector), static_argnums=2)
    assert (slope(start, matrix, 200) == 0).all()
    slope = jax.jit(jax.grad(projector, argnums=1), static_argnums=2)
    assert jnp.isfinite(slope(start, matrix, 200)).all()
    assert jnp.isnan(slope(start, matrix, 2)).any()


@pytest.mark.slow
def test_unmet_tolerances_have_no_derivative_in_any_mode(x64):
    """Of two problems, the first begins at its minimum and the second ends before it."""
    start, turns = jnp.eye(4)[:, :1], jnp.array([0.0, 5.0])

    def entry(size, turn):
        matrix = jnp.diag(jnp.array([4.0, 3.0, 2.0, 1.0])) + (size + turn)
        found = manifolds.minimise(lambda x: energy(matrix, x), start, max_steps=1)
        return found.point[1, 0] + found.point[1, 0] ** 2

    def slopes(turn):
        grad, forward = jax.grad, jax.jacfwd
        modes = forward, grad, lambda f: forward(forward(f)), lambda f: forward(grad(f))
        return jnp.stack([mode(entry)(0.0, turn) for mode in (*modes, lambda f: grad(grad(f)))])

    known, unknown = jax.jit(jax.vmap(slopes))(turns)
    # The first eigenvector turns to the second by 1 / (4 - 3).
    np.testing.assert_allclose(known[:2], 1.0, rtol=1e-9)
    np.testing.assert_allclose(known[2:], known[2], rtol=1e-9)
    assert jnp.isnan(unknown).all() and jnp.isnan(jax.jit(slopes)(turns[1])).all()


def test_conjugate_gradients_tell_what_is_no_number():
    """Of the right-hand side or of the system, whatever they begin at."""
    right = {"a": jnp.ones(2), "b": jnp.ones(1)}
    for sides, factor in [(2.0, 4.0), (jnp.nan, 4.0), (2.0, jnp.nan), (2.0, jnp.inf)]:
        found = conjugate_gradients(
            lambda x: jax.tree.map(lambda y: factor * y, x),  # noqa: B023
            right | {"b": sides * right["b"]},
        )
        wanted = {"a": jnp.full(2, 0.25), "b": jnp.full(1, 0.5)}
        if not np.isfinite(sides * factor):
            wanted = jax.tree.map(lambda x: x * jnp.nan, wanted)
        chex.assert_trees_all_close(found, wanted, rtol=1e-6)


@pytest.mark.slow
def test_how_it_ends(x64):
    matrix, _ = covariance()
    start = stiefel.random(12, 3, key=jax.random.key(0))

    def ended(function, **given):
        return jax.jit(lambda x: manifolds.minimise(function, x, **given))(start).status

    assert ended(lambda x: energy(matrix, x), max_steps=2) == manifolds.Ended.step_limit
    assert ended(lambda x: energy(matrix, x) / 0) == manifolds.Ended.diverged
    # In rounding nothing is lower long before such a tolerance.
    assert ended(lambda x: energy(matrix, x), tol=1e-30) == manifolds.Ended.stalled
    # A function whose derivative has the wrong sign.
    wrong = jax.custom_jvp(lambda x: energy(matrix, x))
    wrong.defjvp(lambda p, t: (energy(matrix, *p), jnp.sum(2 * (matrix @ p[0]) * t[0])))
    assert ended(wrong) == manifolds.Ended.stalled


@pytest.mark.slow
def test_the_search_meets_the_wolfe_conditions(x64):
    """Whatever the first length: too short, right, or far too long."""
    matrix, _ = covariance()
    surface = Surface(lambda x: energy(matrix, x), Space("stiefel", "polar"))
    here = surface.at(stiefel.random(12, 3, key=jax.random.key(0)))
    down = -here.gradient
    run = jax.jit(lambda guess: search(surface, here, down, guess, 0.1))
    along = jax.jit(jax.grad(lambda t: energy(matrix, stiefel.retract_polar(here.point, t * down))))
    for guess in (1e-5, 1e-2, 1.0, 1e4):
        trial, lower, count = run(guess)
        slope = inner(here.gradient, down)
        assert lower and count < 20
        assert trial.place.value <= here.value + 1e-4 * trial.length * slope
        assert abs(trial.slope) <= 0.1 * abs(slope)
        # The slope along the curve is that of the function of the length.
        wanted = along(trial.length)
        np.testing.assert_allclose(trial.slope, wanted, rtol=1e-8, atol=1e-8 * abs(slope))


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_constant_does_not_end_it(solver):
    matrix = covariance()[0]
    frame = np.linalg.eigh(np.asarray(matrix, float))[1][:, -3:]
    matrix = matrix.astype(jnp.float32)
    start = stiefel.random(12, 3, key=jax.random.key(1))

    @jax.jit
    def found(constant):
        return manifolds.minimise(
            lambda x: constant + energy(matrix, x), start, manifold="grassmann", solver=solver
        )

    for constant in (1e3, -1e6):
        point = np.asarray(found(constant).point, float)
        sine = np.linalg.norm(point - frame @ (frame.T @ point), 2)
        # A hundred times the tolerance, of gradients a tenth of the way from the minimum.
        assert sine < 1e-2


@pytest.mark.parametrize("seed", range(3))
def test_single_precision_meets_the_tolerance_where_eigenvalues_are_close(seed):
    """The value is 64 times the gradients near by."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(500, 500)))[0]
    values = np.concatenate([np.linspace(3, 2, 10), np.linspace(1.8, 0, 490)]) / 25
    matrix = jnp.asarray((turn * values) @ turn.T, jnp.float32)
    start = jnp.asarray(np.linalg.qr(rng.normal(size=(500, 10)))[0], jnp.float32)
    found = manifolds.minimise(lambda x: energy(matrix, x), start, manifold="grassmann")
    assert found.status == manifolds.Ended.converged
    assert float(found.value) == pytest.approx(-values[:10].sum(), rel=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_single_precision(solver):
    matrix, values = covariance()
    start = stiefel.random(12, 3, key=jax.random.key(0))
    found = jax.jit(
        lambda x: manifolds.minimise(
            lambda x: energy(matrix.astype(jnp.float32), x), x, solver=solver
        )
    )(start)
    assert found.point.dtype == jnp.float32 and found.status == manifolds.Ended.converged
    assert found.value == pytest.approx(-values[:3].sum(), rel=1e-6)


@pytest.mark.parametrize("retraction", ["qr", "cayley"])
def test_other_retractions(retraction, x64):
    matrix, values = covariance()
    start = stiefel.random(12, 3, key=jax.random.key(0))
    found = jax.jit(
        lambda x: manifolds.minimise(
            lambda x: energy(matrix, x), x, retraction=retraction, manifold="grassmann"
        )
    )(start)
    assert found.value == pytest.approx(-values[:3].sum(), rel=1e-10)


def test_bad_input_is_refused_with_its_name():
    start = stiefel.random(5, 2, key=jax.random.key(0))
    for given, message in [
        ({"function": 3}, "function: wanted a function"),
        ({"function": lambda x: x}, "function: wanted one that returns a real number"),
        ({"start": {}}, "start: wanted a tree of at least one"),
        ({"start": jnp.ones((3, 2), int)}, "start: wanted floating-point arrays"),
        ({"start": start.T}, r"start is to be on the manifold 'stiefel' and must have shape"),
        ({"start": 2 * start}, "columns are not orthonormal"),
        ({"manifold": "sphere"}, "manifold: wanted one of euclidean, grassmann, stiefel"),
        ({"manifold": ["stiefel", "stiefel"]}, "manifold must be a prefix"),
        ({"solver": "newton"}, "solver: wanted one of conjugate_gradients, lbfgs"),
        ({"retraction": "svd"}, "retraction: wanted one of cayley"),
        ({"tol": 0.0}, "tol: wanted a positive"),
        ({"max_steps": 0}, "max_steps: wanted a whole number"),
    ]:
        full = {"function": lambda x: jnp.sum(x**3), "start": start} | given
        with pytest.raises(ValueError, match=message):
            manifolds.minimise(**full)
    with pytest.raises(ValueError, match="x: wanted more rows than columns"):
        grassmann.random_tangent(jnp.eye(3), key=jax.random.key(0))


def test_a_second_call_compiles_nothing_and_sees_new_numbers():
    scale, start = jnp.asarray(1.0), stiefel.random(12, 3, key=jax.random.key(0))

    def function(x):
        return scale * jnp.sum(x**4)

    first, twice = manifolds.minimise(function, start), jnp.asarray(2.0)
    with compilations() as compiled:
        again = manifolds.minimise(function, start)
        scale = twice
        other = manifolds.minimise(function, start)
        for _ in range(3):
            manifolds.minimise(lambda x: twice * jnp.sum(x**2) + jnp.sum(x), start)
    chex.assert_trees_all_equal(first, again)
    np.testing.assert_allclose(other.value, 2 * first.value, rtol=1e-5)
    assert len(compiled) == 1  # of the function that is made anew each time
