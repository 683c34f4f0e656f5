"""Second derivatives, by all four ways to nest the two modes, beside differences of first ones."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed import linalg
from jaxfed.linalg import Moment, orthonormalize, polar, svd, top_eigenvectors

pytestmark = pytest.mark.usefixtures("x64")

RNG = np.random.default_rng(0)
SIZE, RANK = 6, 2
WEIGHTS = RNG.normal(size=(SIZE, SIZE))


def energy(projector):
    """A function of a subspace that is stationary nowhere."""
    return jnp.sum(WEIGHTS * jnp.tanh(projector))


def of_eigenvectors(x):
    """Eigenvalues left out coincide: they are zero."""
    values, vectors = top_eigenvectors(x @ x.T, RANK)
    return energy(vectors @ vectors.T) + values @ jnp.arange(1.0, RANK + 1)


def of_few_samples(x):
    """Beside a basis that moves, too, and zero eigenvalues, which coincide."""
    samples = jnp.concatenate([x[:, :2].T, x[:, :1].T])
    basis = orthonormalize(x[:, 2:])
    vectors = Moment.from_samples(samples).top(RANK, beside=basis)[1]
    return energy(vectors @ vectors.T)


def of_polar(x):
    return energy(polar(x[:, :RANK]) @ x[:, :RANK].T)


def of_turned_eigenvectors(x):
    """In the basis nearest to another, to which a function of the subspace is blind."""
    _, vectors = top_eigenvectors(x @ x.T, RANK)
    vectors = vectors @ polar(vectors.T @ jnp.eye(SIZE, RANK))
    return energy(vectors @ vectors.T)


def of_singular_vectors(x):
    left, singular, _ = svd(x[:, :RANK])
    return energy(left @ left.T) + singular.sum()


def of_minimum(x):
    """Of a quartic of a point on the Grassmannian, found by trust regions."""
    matrix = x @ x.T + jnp.diag(jnp.arange(SIZE))

    def function(u):
        return jnp.sum((u.T @ matrix @ u) ** 2) - 3 * jnp.trace(u.T @ matrix @ u)

    start = jax.lax.stop_gradient(top_eigenvectors(-matrix, RANK)[1])
    found = jf.manifolds.minimise(
        function, start, manifold="grassmann", solver="trust_regions", tol=1e-10
    )
    return energy(found.point @ found.point.T)


def of_fixed_point(x):
    """Of subspace iteration, implicitly."""
    clients = jf.Clients.from_moments((x @ x.T + jnp.diag(3.0 ** jnp.arange(SIZE)))[None])
    run = jf.rollout(
        jf.pca.SubspaceIteration(RANK),
        clients,
        rounds=60,
        key=jax.random.key(0),
        adjoint=jf.adjoint.implicit(throw=False),
    )
    return energy(run.result.shared @ run.result.shared.T)


FUNCTIONS = (
    of_eigenvectors,
    of_few_samples,
    of_polar,
    of_turned_eigenvectors,
    of_singular_vectors,
    of_minimum,
    of_fixed_point,
)


def in_a_loop(function):
    """JAX parts a loop in two where it is differentiated in reverse mode."""

    def rounds(x):
        def body(x, _):
            return x + 0.1 * jnp.tanh(function(x)) * jnp.sin(x), None

        moved, _ = jax.lax.scan(body, x, length=2)
        return jnp.sum(jnp.tanh(moved))

    return lambda x: jax.vmap(rounds)(jnp.stack([x, -2 * x])).sum()


def by_all_modes(function, x, first, second):
    def along(function, x, direction):
        return jax.jvp(function, (x,), (direction,))[1]

    def back(function, x, direction):
        return jnp.vdot(jax.grad(function)(x), direction)

    ways = [(a, b) for a in (along, back) for b in (along, back)]
    return [b(lambda x, a=a: a(function, x, first), x, second) for a, b in ways]


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda function: function, in_a_loop], ids=["once", "loop"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_all_modes_equal_differences_of_first_derivatives(function, around):
    function = around(function)
    # The same whatever ran before, as a minimum may be flat at others.
    x, first, second = np.random.default_rng(1).normal(size=(3, SIZE, 4))
    slope = jax.jit(lambda x: jax.jvp(function, (x,), (first,))[1])
    step = 1e-5
    expected = (slope(x + step * second) - slope(x - step * second)) / (2 * step)
    found = jax.jit(lambda x: by_all_modes(function, x, first, second))(x)
    chex.assert_trees_all_close(found, [expected] * 4, rtol=1e-6)
    chex.assert_trees_all_close(found, [found[0]] * 4, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda function: function, in_a_loop], ids=["once", "loop"])
def test_what_goes_straight_through_does_so_in_second_derivatives(around):
    """They are those of the sum of what was meant and of an error that is constant."""

    def rounded(x):
        return jax.lax.stop_gradient(jnp.round(4 * x) / 4)

    def ours(x):
        return energy(jf.channel.straight_through(rounded(x), jnp.sin(x))[:, :1] @ x[:, :1].T)

    def theirs(x):
        sent = jnp.sin(x) + jax.lax.stop_gradient(rounded(x) - jnp.sin(x))
        return energy(sent[:, :1] @ x[:, :1].T)

    given = RNG.normal(size=(3, SIZE, 4))
    found, expected = (jax.jit(partial(by_all_modes, around(f)))(*given) for f in (ours, theirs))
    chex.assert_trees_all_close(found, expected, rtol=1e-10)


@pytest.mark.slow
def test_the_second_derivative_of_a_run_through_a_channel():
    """Of what is nearly lossless, near that of the run without."""
    samples = np.random.default_rng(1).normal(size=(3, 20, SIZE)) / np.arange(1, SIZE + 1)
    clients = jf.Clients.from_samples(samples)

    def objective(step_size, channel):
        algorithm = jf.pca.PerPCA(2, 1, solver="gradient", step_size=step_size, start="random")
        run = jf.rollout(algorithm, clients, rounds=3, key=jax.random.key(0), channel=channel)
        return run.history["objective"][-1]

    second = jax.jit(jax.hessian(objective), static_argnums=1)
    exact = second(0.1, jf.channel.lossless())
    for channel in (jf.channel.quantize(8), jf.channel.top_k(0.9)):
        assert abs(second(0.1, channel) - exact) < 0.2 * abs(exact), channel


@pytest.mark.slow
def test_third_derivatives_of_eigenvectors_are_refused():
    x, direction = RNG.normal(size=(2, SIZE, 4))

    def slope(x):
        return jnp.vdot(jax.grad(in_a_loop(of_eigenvectors))(x), direction)

    with pytest.raises(NotImplementedError, match="eigenvectors: derivatives of this order"):
        jax.grad(lambda x: jax.jvp(slope, (x,), (direction,))[1])(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda x: linalg.largest_eigenvalue(lambda s, v: s.T @ (s @ v), x, jnp.ones(4)),
        lambda x: jf.metrics.misalignment(jnp.stack([orthonormalize(x[:, i::2]) for i in (0, 1)])),
        lambda x: jf.metrics.frechet_distance(x, 1 + x[::-1] ** 2),
    ],
    ids=["largest_eigenvalue", "misalignment", "frechet_distance"],
)
def test_what_holds_a_stationary_vector_fixed_is_differentiated_once(function):
    """What is left out does not matter to a first derivative, and does to a second one."""
    x, direction = jnp.asarray(RNG.normal(size=(2, SIZE, 4)))
    slope = jax.jvp(function, (x,), (direction,))[1]
    differences = (function(x + 1e-6 * direction) - function(x - 1e-6 * direction)) / 2e-6
    chex.assert_trees_all_close(slope, differences, rtol=1e-5)
    chex.assert_trees_all_close(np.vdot(jax.grad(function)(x), direction), slope, rtol=1e-8)
    for outer in (jax.jacfwd, jax.jacrev):
        with pytest.raises(NotImplementedError, match="derivatives of this order"):
            outer(jax.grad(function))(x)


def run_of(algorithm):
    """The held-out error of a run, by samples, and two directions."""
    values, first, second, held_out = RNG.normal(size=(4, 3, 8, SIZE))
    values = values / np.sqrt(1 + np.arange(SIZE))

    def error(values):
        clients = jf.Clients.from_samples(values)
        result = jf.rollout(algorithm, clients, rounds=2, key=jax.random.key(0)).result
        shared = None if isinstance(algorithm, jf.pca.HierarchicalPCA) else result.shared
        return jf.metrics.reconstruction_error(jf.Personalized(shared, result.local), held_out)

    return error, values, first, second


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        jf.pca.PerPCA(1, 2, solver="gradient"),
        jf.pca.HierarchicalPCA(2, 0.5),
        jf.pca.HierarchicalPCA(2, 0.5, 0.3, solver="eigenvectors"),
        jf.pca.BlockLanczos(2),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_the_hessian_of_a_run_times_a_vector(algorithm):
    error, values, first, second = run_of(algorithm)
    slope = jax.jit(lambda x: jax.jvp(error, (x,), (first,))[1])
    expected = (slope(values + 1e-5 * second) - slope(values - 1e-5 * second)) / 2e-5
    product = jax.jit(lambda x: jax.jvp(jax.grad(error), (x,), (second,))[1])(values)
    chex.assert_trees_all_close(np.vdot(product, first), expected, rtol=1e-5)


@pytest.mark.slow
def test_what_tells_eigenvectors_apart_has_no_second_derivative():
    error, values, first, second = run_of(jf.pca.EmpiricalBayesPCA(2, 0.5))
    with pytest.raises(NotImplementedError, match="empirical Bayes"):
        jax.jvp(lambda x: jax.jvp(error, (x,), (first,))[1], (values,), (second,))
