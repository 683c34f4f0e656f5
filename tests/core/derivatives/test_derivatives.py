"""Derivatives through whole runs, against finite differences in double precision."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.linalg import polar
from tests.helpers import planted_samples

FEATURES, CLIENTS, SAMPLES, ROUNDS = 5, 3, 8, 50

pytestmark = pytest.mark.usefixtures("x64")


def train_and_held_out(seed):
    """Samples of clients, and others of the same clients that are held out."""
    counts, options = (2 * SAMPLES,) * CLIENTS, {"noise": 0.5, "seed": seed}
    values = planted_samples(counts, FEATURES, [3.0, 2.0], [2.0, 1.5], **options)
    return jnp.split(jnp.asarray(np.stack(values)), 2, axis=1)


def held_out_error(algorithm, values, held_out, rounds=ROUNDS, **arguments):
    """Mean squared reconstruction error of other samples, after some rounds."""
    shared, local = jf.rollout(
        algorithm,
        jf.Clients.from_samples(values),
        rounds=rounds,
        key=jax.random.key(0),
        **arguments,
    ).result
    rest = held_out if shared is None else held_out - held_out @ shared @ shared.T
    if local is not None:
        rest = rest - held_out @ local @ jnp.swapaxes(local, 1, 2)
    return (rest**2).mean()


def along(function, at, direction, step):
    """Central difference of fourth order."""

    def value(t):
        return float(function(at + t * direction))

    near, far = value(step) - value(-step), value(2 * step) - value(-2 * step)
    return (8 * near - far) / (12 * step)


ALGORITHMS = {
    "tangent": lambda step: jf.pca.PerPCA(1, 2, solver="gradient", step_size=step),
    "polar, QR, random start": lambda step: jf.pca.PerPCA(
        1,
        1,
        solver="gradient",
        step_size=10 * step,
        variant="polar",
        retraction="qr",
        start="random",
    ),
    "ranks": lambda step: jf.pca.PerPCA(1, (2, 0, 1), solver="gradient", step_size=step),
}
ONE_SHOT = {
    "Local": lambda: jf.pca.Local(2),
    "Pooled": lambda: jf.pca.Pooled(2),
    "OneShot projector": lambda: jf.pca.OneShot(1, 2),
    "OneShot spectrum": lambda: jf.pca.OneShot(1, 2, method="spectrum"),
    "OneShot local_first": lambda: jf.pca.OneShot(1, 2, method="local_first"),
    "PerPCA": lambda: jf.pca.PerPCA(1, 1),
}
STEP = 0.01  # fifty rounds do not converge: the step size matters


# One compilation for all tests that need it.
@functools.cache
def compiled(name):
    """The error as a function of the step size and the samples, and its gradient."""
    held_out = train_and_held_out(0)[1]

    def error(step, values):
        if name in ALGORITHMS:
            return held_out_error(ALGORITHMS[name](step), values, held_out)
        rounds = 3 if name == "PerPCA" else 1
        return held_out_error(ONE_SHOT[name](), values, held_out, rounds=rounds)

    return jax.jit(error), jax.jit(jax.grad(error, argnums=(0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALGORITHMS, *ONE_SHOT])
def test_with_respect_to_the_data(name):
    values, (error, gradient) = train_and_held_out(0)[0], compiled(name)
    by_values = gradient(STEP, values)[1]
    for seed in range(3):
        direction = np.random.default_rng(seed).normal(size=values.shape)
        wanted = along(lambda v: error(STEP, v), values, direction, 1e-4)
        assert abs(wanted) > 1e-5
        np.testing.assert_allclose((by_values * direction).sum(), wanted, rtol=1e-5)


def mostly(names):
    """Gradients of all iterative algorithms but one take seconds to compile."""
    long = ALGORITHMS.keys() - {"tangent"}
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in long)) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly(ALGORITHMS))
def test_with_respect_to_the_step_size(name):
    values, (error, gradient) = train_and_held_out(0)[0], compiled(name)
    wanted = along(lambda s: error(s, values), STEP, 1.0, 2e-5)
    assert abs(wanted) > 1e-3
    np.testing.assert_allclose(gradient(STEP, values)[0], wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly([*ALGORITHMS, *ONE_SHOT]))
def test_repeated_eigenvalues_of_the_data_make_no_nan(name):
    for part in compiled(name)[1](STEP, repeated()):
        assert jnp.isfinite(part).all()


@pytest.mark.slow
def test_through_an_automatic_step_size_and_participation():
    values, held_out = train_and_held_out(1)

    @jax.jit
    def error(values):
        return held_out_error(
            jf.pca.PerPCA(1, 1, solver="gradient", start="random"),
            values,
            held_out,
            participation=jf.participation.uniform(2),
            rounds=8,
        )

    gradient = jax.jit(jax.grad(error))(values)
    for seed in range(3):
        direction = np.random.default_rng(seed).normal(size=values.shape)
        wanted = along(error, values, direction, 1e-4)
        np.testing.assert_allclose((gradient * direction).sum(), wanted, rtol=1e-5)


@pytest.mark.slow
def test_rematerialization_saves_memory_and_changes_nothing():
    values, held_out = train_and_held_out(0)
    at = jnp.asarray(STEP), values

    def compiled(remat):
        def error(at):
            algorithm = ALGORITHMS["tangent"](at[0])
            adjoint = jf.adjoint.unrolled(remat=remat)
            return held_out_error(algorithm, at[1], held_out, adjoint=adjoint)

        return jax.jit(jax.grad(error)).lower(at).compile()

    plain, again = compiled(False), compiled(True)
    chex.assert_trees_all_close(again(at), plain(at), rtol=1e-10, atol=1e-14)
    memory, less = (c.memory_analysis().temp_size_in_bytes for c in (plain, again))
    assert less < 0.7 * memory


# --- repeated singular values and eigenvalues ---------------------------------------------------


def repeated():
    """Samples whose second moments have eigenvalues 4, 4, 4, 1, 1, the same for all clients."""
    one = np.zeros((SAMPLES, FEATURES))
    np.fill_diagonal(one, np.sqrt(SAMPLES) * np.array([2.0, 2.0, 2.0, 1.0, 1.0]))
    return jnp.asarray(np.stack(CLIENTS * [one]))


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "retraction"), [("tangent", "polar"), ("polar", "qr")])
def test_orthonormal_iterates(variant, retraction):
    """A feasible start is retracted as it is: all its singular values are one.

    Here the second moments are multiples of the identity on two subspaces, which repeats most
    singular values of the steps as well.
    """
    values, held_out = repeated(), train_and_held_out(0)[1]
    frame = jnp.linalg.qr(jnp.asarray(np.random.default_rng(3).normal(size=(FEATURES, 4))))[0]
    start = jf.Personalized(frame[:, :2], jnp.stack(CLIENTS * [frame[:, 2:]]))

    @jax.jit
    def error(step, values):
        algorithm = jf.pca.PerPCA(
            2, 2, solver="gradient", step_size=step, variant=variant, retraction=retraction
        )
        return held_out_error(algorithm, values, held_out, rounds=5, warm_start=start)

    by_step, by_values = jax.jit(jax.grad(error, argnums=(0, 1)))(0.05, values)
    wanted = along(lambda s: error(s, values), 0.05, 1.0, 1e-4)
    np.testing.assert_allclose(by_step, wanted, rtol=1e-5)
    direction = np.random.default_rng(4).normal(size=values.shape)
    wanted = along(lambda v: error(0.05, v), values, direction, 1e-4)
    np.testing.assert_allclose((by_values * direction).sum(), wanted, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [4, 300])
def test_steps_of_varpro_that_are_rounding_have_no_derivative(rounds):
    """Few rounds are differentiated as they ran; of many rounds, most are mere rounding."""
    samples = np.stack([train_and_held_out(seed)[0] for seed in range(4)])
    weights = jnp.array([[1.0, 1.3, 2.0], [1.0, 0.0, 0.5]])
    rng = np.random.default_rng(0)
    by_samples, weighed = rng.normal(size=samples.shape[1:]), rng.normal(size=(FEATURES, FEATURES))

    def value(moved, adjoint):
        def one(values, weights):
            clients = jf.Clients.from_samples(
                values + moved[0] * by_samples, weights=weights * (1 + moved[1] * weights)
            )
            shared, local = jf.rollout(
                jf.pca.PerPCA(2, 1),
                clients,
                rounds=rounds,
                key=jax.random.key(0),
                adjoint=adjoint,
            ).result
            return (weighed * (shared @ shared.T + (local @ jnp.swapaxes(local, 1, 2))[2])).sum()

        return jax.vmap(lambda w: jax.vmap(lambda v: one(v, w))(samples))(weights)

    found = jax.jit(jax.jacrev(lambda m: value(m, jf.adjoint.checkpointed())))(jnp.zeros(2))
    solve = jax.jit(lambda m: value(m, jf.adjoint.unrolled()))
    for i, direction in enumerate(jnp.eye(2)):
        near, far = (solve(t * direction) - solve(-t * direction) for t in (1e-4, 2e-4))
        wanted = (8 * near - far) / 12e-4
        assert (jnp.abs(wanted) > 1e-4).all()
        np.testing.assert_allclose(found[..., i], wanted, rtol=1e-6)


# --- second order -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (2.0, 2.0, 0.5), (3.0, 2.0, 1.0)])
def test_second_derivatives_of_the_polar_factor(scales):
    rng = np.random.default_rng(0)
    w = np.linalg.qr(rng.normal(size=(FEATURES, 3)))[0] * np.asarray(scales)
    w = jnp.asarray(w @ np.linalg.qr(rng.normal(size=(3, 3)))[0])
    cost = jnp.asarray(rng.normal(size=w.shape))

    def loss(w):
        return (cost * polar(w) ** 3).sum()

    gradient, direction = jax.jit(jax.grad(loss)), jnp.asarray(rng.normal(size=w.shape))
    _, product = jax.jit(lambda w, v: jax.jvp(jax.grad(loss), (w,), (v,)))(w, direction)
    step = 1e-4
    near = gradient(w + step * direction) - gradient(w - step * direction)
    far = gradient(w + 2 * step * direction) - gradient(w - 2 * step * direction)
    np.testing.assert_allclose(product, (8 * near - far) / (12 * step), rtol=1e-7, atol=1e-8)


@pytest.mark.slow
def test_second_derivative_of_a_run_with_respect_to_the_step_size():
    values, held_out = train_and_held_out(0)

    def error(step):
        algorithm = jf.pca.PerPCA(
            1, 1, solver="gradient", step_size=step, start="random", variant="polar"
        )
        return held_out_error(algorithm, values, held_out, rounds=10)

    second = jax.jit(jax.jacfwd(jax.grad(error)))(0.05)
    wanted = along(jax.jit(jax.grad(error)), 0.05, 1.0, 1e-4)
    np.testing.assert_allclose(second, wanted, rtol=1e-6)
