"""Components to begin with, which take products alone."""

import functools
import warnings

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.linalg import Moment
from jaxfed.pca import _starts
from jaxfed.pca.components import FEW, STEPS, first_components

FEATURES = FEW + 8
RNG = np.random.default_rng(0)

from_common = functools.partial(jf.pca.PerPCA, start="common")
gradient = functools.partial(jf.pca.PerPCA, solver="gradient")


def falling(n, rng=RNG):
    """Samples whose variances fall slowly, and not along the axes."""
    turn = np.linalg.qr(rng.normal(size=(FEATURES, FEATURES)))[0]
    return rng.normal(size=(n, FEATURES)) * 0.7 ** np.arange(FEATURES) @ turn


def iterated(matrix, rank, shared, steps):
    """Subspace iteration as textbooks have it."""
    w = np.random.default_rng(0).normal(size=(rank, FEATURES)).T
    deflation = np.eye(FEATURES) - shared @ shared.T
    for _ in range(steps):
        w = np.linalg.qr(deflation @ matrix @ w)[0]
    return w.T


@pytest.mark.slow
@pytest.mark.parametrize("steps", [STEPS, _starts.STEPS])
@pytest.mark.parametrize("n", [60, 12], ids=["many", "few"])
def test_are_those_of_subspace_iteration(n, steps, x64):
    samples, shared = falling(n), np.linalg.qr(RNG.normal(size=(FEATURES, 2)))[0]
    matrix = samples.T @ samples / n
    kept = Moment.from_samples(jnp.asarray(samples))
    first = jax.jit(functools.partial(first_components, steps=steps), static_argnums=1)
    for moment in (kept, kept.densified()):
        for beside in (np.zeros((FEATURES, 0)), shared):
            wanted = iterated(matrix, 3, beside, steps)
            found = first(moment, 3, None, jnp.asarray(beside.T) if beside.size else None)
            # Directions of little energy are kept, by the root of rounding.
            chex.assert_trees_all_close(found.T @ found, wanted.T @ wanted, atol=1e-6)
            chex.assert_trees_all_close(found @ beside, np.zeros((3, beside.shape[1])), atol=1e-12)
            # Rows do not depend on those after them, so a smaller rank has the same ones.
            fewer = first(
                moment,
                3,
                jnp.asarray([1.0, 1.0, 0.0]),
                *([jnp.asarray(beside.T)] if beside.size else []),
            )
            chex.assert_trees_all_close(fewer, found * np.array([1, 1, 0])[:, None], atol=1e-12)
    energy = np.trace(found @ matrix @ found.T)
    deflation = np.eye(FEATURES) - shared @ shared.T
    best = np.linalg.eigvalsh(deflation @ matrix @ deflation)[-3:].sum()
    assert 0.98 * best < energy < best + 1e-12


@pytest.mark.slow
def test_derivatives_are_finite_differences(x64):
    samples, change = falling(40), falling(40)

    def energy(step):
        moment = Moment.from_samples(jnp.asarray(samples) + step * change)
        rows = first_components(moment, 2, jnp.asarray([1.0, 0.0]))
        return jnp.sum((rows @ samples.T) ** 2 * np.arange(40))

    step = 1e-5
    difference = (energy(step) - energy(-step)) / (2 * step)
    for derivative in (jax.jvp(energy, (0.0,), (1.0,))[1], jax.grad(energy)(0.0)):
        np.testing.assert_allclose(derivative, difference, rtol=1e-6)


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "features", "derivative"),
    [
        (gradient, FEATURES, jax.jacfwd),
        (jf.pca.PerPCA, 8, jax.grad),
        (from_common, FEATURES, jax.grad),
        pytest.param(gradient, FEATURES, jax.grad, marks=SLOW),
        pytest.param(gradient, 8, jax.grad, marks=SLOW),
        pytest.param(jf.pca.PerPCA, 8, jax.jacfwd, marks=SLOW),
        pytest.param(jf.pca.PerPCA, FEATURES, jax.grad, marks=SLOW),
        pytest.param(from_common, 8, jax.grad, marks=SLOW),
        pytest.param(from_common, FEATURES, jax.jacfwd, marks=SLOW),
    ],
)
def test_derivatives_of_a_run_go_through_its_start(make, features, derivative, x64):
    """After so few rounds a result is far from a solution, so that it depends on the start."""
    # Own draws, whatever ran before: some have third derivatives that the step does not suit.
    rng = np.random.default_rng(0)
    samples = np.stack([falling(20, rng) for _ in range(6)]).reshape(2, 3, 20, FEATURES)
    samples, change = samples[..., :features]
    weights = rng.normal(size=(features, features))

    def loss(step):
        clients = jf.Clients.from_samples(jnp.asarray(samples) + step * change)
        shared, local = jf.rollout(make(2, 2), clients, rounds=3, key=jax.random.key(0)).result
        projectors = shared @ shared.T + jnp.sum(local @ local.mT, axis=0)
        return jnp.sum(projectors * weights)

    both, step = jax.jit(lambda x: (loss(x), derivative(loss)(x))), 1e-5
    difference = (both(step)[0] - both(-step)[0]) / (2 * step)
    np.testing.assert_allclose(both(0.0)[1], difference, rtol=1e-5, atol=2e-8)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1, 1e-12, 1e12])
def test_degenerate_clients_have_orthonormal_components_and_finite_derivatives(scale):
    clients = np.zeros((5, 6, FEATURES), np.float32)
    clients[1, 0, 3] = 1  # one sample
    clients[2, :, :2] = falling(6)[:, :2]  # fewer dimensions than the rank
    clients[3] = np.eye(6, FEATURES)  # equal eigenvalues
    clients[4] = falling(6)
    clients *= scale

    def rows(samples):
        moment = Moment.from_samples(samples).densified()
        return first_components(moment, 3, None, jnp.eye(2, FEATURES))

    found = jax.jit(jax.vmap(rows))(clients)
    products = found @ found.mT
    chex.assert_trees_all_close(products, np.broadcast_to(np.eye(3), products.shape), atol=1e-4)
    weights = RNG.normal(size=found.shape)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(rows)(x) * weights)))(clients)
    assert np.isfinite(gradient).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "engine"),
    [
        (gradient, "moments"),
        (from_common, "chunks"),
        pytest.param(gradient, "chunks", marks=SLOW),
        pytest.param(from_common, "moments", marks=SLOW),
    ],
)
def test_clients_of_no_weight_and_other_engines_change_nothing(make, engine):
    samples = [falling(n).astype(np.float32) for n in (50, 9, 30, 30)]
    samples.append(np.zeros((4, FEATURES), np.float32))
    clients, backend = jf.Clients.from_samples(samples), jf.backend.vmap()
    fit = functools.partial(jf.fit, make(2, (3, 0, 1, 2, 3)), rounds=2, key=jax.random.key(0))
    wanted = fit(clients).result
    if engine == "moments":
        clients = jf.Clients.from_moments([x.T @ x / len(x) for x in samples])
    else:
        backend = jf.backend.chunked(2)
    found = fit(clients, backend=backend).result
    spans = [
        (shared @ shared.T, (local @ local.mT)[:4])
        for shared, local in jax.tree.map(np.asarray, (found, wanted))
    ]
    chex.assert_trees_all_close(*spans, atol=1e-3)


@pytest.mark.slow
def test_identical_clients_of_many_features_share_the_largest_components():
    # Draws of its own: what is shared follows from the preference for sharing alone, which single
    # precision resolves to 2e-3 where the second and third variances are near.
    samples = falling(200, np.random.default_rng(0)).astype(np.float32)
    clients = jf.Clients.from_samples([samples] * 3)
    matrix = samples.T @ samples / len(samples)
    solution = jf.fit(jf.pca.PerPCA(2, 2), clients, rounds=30, key=jax.random.key(0))
    values, vectors = np.linalg.eigh(matrix)
    np.testing.assert_allclose(solution.history["objective"][-1], values[:-4].sum(), rtol=1e-4)
    top, found = vectors[:, -2:], solution.result.shared
    np.testing.assert_allclose(found @ found.T, top @ top.T, atol=1e-4)


PERSONALIZED = (
    *(kind(1, 2) for kind in (jf.pca.PerPCA, gradient, jf.pca.OneShot, jf.pca.HMF)),
    jf.pca.TCMF(1, 2, 0.5),
)


@pytest.mark.parametrize("algorithm", PERSONALIZED, ids=lambda algorithm: type(algorithm).__name__)
def test_clients_that_local_components_reproduce_are_warned_of(algorithm):
    few = jf.Clients.from_samples([falling(n).astype(np.float32) for n in (2, 9)])
    with pytest.warns(UserWarning, match=r"^clients: .* 2 local components, got a client with 2"):
        algorithm.check(few, None)
    enough = jf.Clients.from_samples([falling(n).astype(np.float32) for n in (3, 9)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        algorithm.check(enough, None)
        jax.jit(lambda clients: algorithm.check(clients, None))(few)  # no values
        jax.jit(lambda: algorithm.check(enough, None))()
        jf.pca.HierarchicalPCA(2, 0.5, 0.1).check(few, None)
        algorithm.check(eqx.tree_at(lambda x: x.data.count, few, jnp.asarray([0.0, 9.0])), None)
        jf.pca.PerPCA(1, (1, 2), solver="gradient").check(
            few, None
        )  # the first has two samples and one component


def test_the_warning_points_to_the_users_line():
    few = jf.Clients.from_samples(np.ones((2, 1, 3), np.float32))
    with pytest.warns(UserWarning, match="got a client with 1") as caught:
        jf.fit(jf.pca.OneShot(1, 1), few, rounds=1, key=jax.random.key(0))
    assert caught[0].filename == __file__
