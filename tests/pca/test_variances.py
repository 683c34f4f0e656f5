"""What PCA under a prior estimates before its rounds, and what its default arguments find."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.linalg import Moment
from jaxfed.pca import likelihood
from tests.helpers import solve

FEATURES, RANK = 20, 3
LEARNED = {
    "HierarchicalPCA": jf.pca.HierarchicalPCA(RANK),
    "HierarchicalPCA eigenvectors": jf.pca.HierarchicalPCA(RANK, solver="eigenvectors"),
    "HierarchicalPCA quasi_newton": jf.pca.HierarchicalPCA(RANK, solver="quasi_newton"),
    "EmpiricalBayesPCA": jf.pca.EmpiricalBayesPCA(RANK),
}


def drawn(seed, clients, samples, noise, spread, features=FEATURES):
    """Samples, and the clients' true components, which scatter around common ones."""
    rng = np.random.default_rng(seed)
    around = rng.normal(size=(clients, features, RANK)) * np.sqrt(spread)
    frames = np.linalg.qr(np.linalg.qr(rng.normal(size=(features, RANK)))[0] + around)[0]
    scores = rng.normal(size=(clients, samples, RANK))
    values = np.einsum("mnr,mdr->mnd", scores, frames)
    return values + np.sqrt(noise) * rng.normal(size=values.shape), frames


def error(result, frames):
    """Mean squared distance of the projectors."""
    found = np.asarray(result.shared if result.local is None else result.local, float)
    return 2 * (RANK - np.mean(np.sum((np.swapaxes(found, -1, -2) @ frames) ** 2, axis=(-1, -2))))


def found_by(algorithm, values, **options):
    return solve(algorithm, values, rounds=100, **options)


@pytest.mark.parametrize("samples", [6, 15, 200])
def test_the_estimated_variances_are_unbiased(samples, x64):
    """With fewer samples than features, too, where each client's own residual is far too small."""
    values, _ = drawn(0, 60, samples, 0.04, 0.1, features=30)
    values = 5 * values

    def sums(y):
        return likelihood.variances_message(jf.linalg.Moment.from_samples(y), RANK)

    mean = jax.tree.map(jnp.mean, jax.vmap(sums)(jnp.asarray(values)))
    found = likelihood.estimated(mean, RANK, 30)
    np.testing.assert_allclose(found.noise, 25 * 0.04, rtol=0.05)
    np.testing.assert_allclose(found.scores, 25, rtol=0.15)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("name", [*LEARNED, "given prior"])
@pytest.mark.slow
def test_units_do_not_matter(name, scale):
    algorithm = LEARNED.get(name, jf.pca.HierarchicalPCA(RANK, prior_variance=0.01))
    values = drawn(1, 6, 20, 0.1, 0.01)[0].astype(np.float32)
    one, other = (found_by(algorithm, factor * values) for factor in (1, np.float32(scale)))
    ends = [np.asarray(run.result.local, float) for run in (one, other)]
    projectors = [x @ np.swapaxes(x, 1, 2) for x in ends]
    np.testing.assert_allclose(projectors[0], projectors[1], atol=2e-3)
    for entry, power in (("noise_variance", 2), ("score_variance", 2), ("prior_variance", 0)):
        if entry in one.history:
            wanted = scale**power * one.history[entry][-1]
            np.testing.assert_allclose(other.history[entry][-1], wanted, rtol=1e-2)


@pytest.mark.parametrize(("clients", "spread"), [(40, 0.0), (6, 0.01), (6, 1.0)])
@pytest.mark.parametrize("noise", [0.01, 0.25])
def test_the_default_loses_to_no_extreme(clients, spread, noise):
    """Alike clients, similar ones, and such that have nothing in common."""
    values, frames = drawn(2, clients, 20, noise, spread)
    pooled = error(found_by(jf.pca.Pooled(RANK), values).result, frames)
    alone = error(found_by(jf.pca.Local(RANK), values).result, frames)
    found = error(found_by(jf.pca.HierarchicalPCA(RANK), values).result, frames)
    assert found <= 1.1 * min(pooled, alone)


def test_the_prior_variance_is_stationary(x64):
    """It equals the clients' distances plus the variances of their components and of the centre."""
    clients, samples, noise = 5, 20, 0.25
    values, _ = drawn(3, clients, samples, noise, 0.02)
    run = solve(jf.pca.HierarchicalPCA(RANK, noise, solver="eigenvectors"), values, rounds=300)
    variance, free = run.history["prior_variance"][-1], RANK * (FEATURES - RANK)
    sampling = noise * (1 + noise) / samples
    shrunk = variance * sampling / (variance + sampling)
    centre = variance**2 / (variance + sampling) / clients
    wanted = run.history["distance"][-1] / free + shrunk + centre
    np.testing.assert_allclose(variance, wanted, rtol=1e-6)
    # The quasi-Newton solver ends there, too: its values and slopes belong together.
    quick = found_by(jf.pca.HierarchicalPCA(RANK, noise, solver="quasi_newton"), values)
    np.testing.assert_allclose(quick.history["prior_variance"][-1], variance, rtol=1e-5)
    same = solve(jf.pca.HierarchicalPCA(RANK, noise, solver="eigenvectors"), values, rounds=300)
    assert same.history["prior_variance"][-1] == variance


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_a_given_noise_variance_is_differentiable(name, x64):
    values = jnp.asarray(drawn(4, 4, 12, 0.2, 0.02)[0])
    kind, solver = type(LEARNED[name]), LEARNED[name].solver

    def learned(noise):
        run = jf.rollout(
            kind(RANK, noise, solver=solver),
            jf.Clients.from_samples(values),
            rounds=20,
            key=jax.random.key(0),
        )
        return run.history["prior_variance"][-1]

    at, step = jnp.asarray(0.2), 1e-5
    slope = (learned(at + step) - learned(at - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(learned)(at), slope, rtol=1e-4)
    several = jax.vmap(learned)(jnp.stack([at, 2 * at]))
    np.testing.assert_allclose(several[0], learned(at), rtol=1e-8)


@pytest.mark.parametrize("unit", [1e-24, 1.0, 1e24])
def test_derivatives_by_the_noise_have_its_unit(unit):
    """Those of a plain quotient square it: they are NaN or zero in single precision."""
    noise, scores = (jnp.float32(x * unit) for x in (2.0, 3.0))
    slope = jax.grad(lambda noise: jnp.log(likelihood.precision(jnp.float32(12), noise, scores)))
    np.testing.assert_allclose(slope(noise) * unit, -1 / 2 - 1 / 5, rtol=1e-5)

    @jax.grad
    def of_likelihood(noise):
        moment = Moment.from_dense(jnp.float32(unit) * jnp.eye(4))
        variances = likelihood.Variances(noise, scores)
        return likelihood.negative_log_likelihood(moment, jnp.eye(2, 4), variances)

    # 1/2 of 2 log s + 2 log(3 + s) + 2/s + 2/(3 + s), for a moment of 1 along four features.
    wanted = 1 / 2 + 1 / 5 - 1 / 2**2 - 1 / 5**2
    np.testing.assert_allclose(of_likelihood(noise) * unit, wanted, rtol=1e-5)


def test_near_its_end_the_derivative_of_a_step_is_that_of_ems_own():
    """There, the factor between them is a ratio of rounding errors."""
    place, previous = jnp.float32(3.2), jnp.float32([3.2 - 1e-6, 1.5e-6])

    def step(move, previous):
        return likelihood.extrapolated(place, move, previous)

    for move, accelerated in (1e-6, False), (0.1, True):
        given = jnp.float32(move), previous if move < 1e-3 else jnp.float32([3.0, 0.2])
        by_move, by_previous = jax.grad(step, argnums=(0, 1))(*given)
        assert (by_move > 1.5) == accelerated and (abs(by_previous).max() > 0) == accelerated
        assert step(*given) > place + 1.5 * given[0]  # the step itself is longer than EM's


@pytest.mark.parametrize("algorithm", [jf.pca.HierarchicalPCA(4), jf.pca.EmpiricalBayesPCA(4)])
def test_too_few_samples_for_an_estimate_are_refused(algorithm):
    values = drawn(5, 3, 4, 0.1, 0.1)[0]
    with pytest.raises(ValueError, match=r"^noise_variance: wanted a number for clients with at"):
        jf.fit(algorithm, jf.Clients.from_samples(values), rounds=1, key=jax.random.key(0))


@pytest.mark.parametrize("kind", [jf.pca.HierarchicalPCA, jf.pca.EmpiricalBayesPCA])
def test_new_clients_may_have_fewer_samples_than_components(kind):
    """The solution has the estimates, and few samples move a client little from the centre."""
    values, _ = drawn(6, 6, 20, 0.1, 0.02)
    run = found_by(kind(RANK), values)
    few = jf.Clients.from_samples(values[:, :2].astype(np.float32))
    found = jf.personalize(run.algorithm, run, few, rounds=50).local
    assert np.isfinite(found).all()
    overlaps = np.sum((np.swapaxes(found, 1, 2) @ np.asarray(run.result.shared)) ** 2, (1, 2))
    assert np.all((overlaps > 0.9 * RANK) & (overlaps < RANK))


@pytest.mark.parametrize("values", [np.zeros((3, 8, 5)), np.ones((3, 8, 5))])
@pytest.mark.parametrize("kind", [jf.pca.HierarchicalPCA, jf.pca.EmpiricalBayesPCA])
def test_data_without_noise_give_finite_numbers(kind, values):
    run = solve(kind(2), values.astype(np.float32), rounds=10)
    del run.history["stopping_measure"]  # infinite until there are enough rounds
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((run.result, run.history)))


def test_closed_over_clients_can_be_traced():
    """Their numbers of samples, which are checked before tracing, are known there."""
    clients = jf.Clients.from_samples(drawn(7, 3, 12, 0.1, 0.1)[0].astype(np.float32))

    def left(prior):
        algorithm = jf.pca.HierarchicalPCA(RANK, prior_variance=prior)
        return jf.rollout(algorithm, clients, rounds=2, key=jax.random.key(0)).result.shared

    assert np.isfinite(jax.jit(left)(0.1)).all()
