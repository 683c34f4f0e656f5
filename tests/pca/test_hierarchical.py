"""Hierarchical, adaptive and empirical-Bayes PCA against an independent NumPy implementation."""

from functools import partial

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from bench.formulas import adept as theory
from jaxfed.linalg import Moment
from jaxfed.pca import _component_updates, _prior_variance, bingham, empirical_bayes, likelihood
from papers.hierarchical.descent import GlobalProbabilisticPCA, LocalProbabilisticPCA
from tests import helpers
from tests.helpers import projector
from tests.references import empirical_bayes as reference_of_bayes
from tests.references import hierarchical as reference

FEATURES, RANK, CLIENTS, NOISE, VARIANCE, ROUNDS = 8, 3, 5, 0.5, 0.1, 100
SIZES = (12, 9, 15, 12, 4)
Hierarchical = partial(jf.pca.HierarchicalPCA, RANK, NOISE, VARIANCE)
Adaptive = partial(jf.pca.HierarchicalPCA, RANK, NOISE)
Bayes = partial(jf.pca.EmpiricalBayesPCA, RANK)
Alone = partial(LocalProbabilisticPCA, RANK, NOISE)
Global = partial(GlobalProbabilisticPCA, RANK, NOISE)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    center = rng.normal(size=(FEATURES, RANK))
    arrays = []
    for n in SIZES:
        frame = np.linalg.qr(center + 0.5 * rng.normal(size=center.shape))[0]
        signal = rng.normal(size=(n, RANK)) @ frame.T
        arrays.append(signal + np.sqrt(NOISE) * rng.normal(size=(n, FEATURES)))
    return arrays


@pytest.fixture(scope="module")
def frames():
    rng = np.random.default_rng(1)
    return np.linalg.qr(rng.normal(size=(CLIENTS + 1, FEATURES, RANK)))[0]


solve = partial(helpers.solve, rounds=ROUNDS)


def assert_same_subspaces(solution, shared, own):
    np.testing.assert_allclose(projector(solution.result.shared), projector(shared), atol=1e-8)
    np.testing.assert_allclose(projector(solution.result.local), projector(own), atol=1e-8)


# --- the terms -----------------------------------------------------------------------------------


def slope(function, point, direction, step=1e-6):
    ends = (function(point + step * direction), function(point - step * direction))
    return float(ends[0] - ends[1]) / (2 * step)


def test_terms_against_dense_inverses(samples, frames, x64):
    y, (u, v) = samples[0], map(jnp.asarray, frames[:2])
    s, n = y.T @ y / len(y), len(y)
    moment = Moment.from_samples(jnp.asarray(y))
    for given in (moment, moment.densified()):
        value = likelihood.negative_log_likelihood(given, u.T, likelihood.Variances(NOISE))
        c = likelihood.precision(given.count, NOISE)
        gradient = likelihood.likelihood_gradient(given, u.T, c).T
        np.testing.assert_allclose(value, reference.likelihood(s, n, u, NOISE), rtol=1e-12)
        wanted = reference.project(u, reference.likelihood_gradient(s, n, u, NOISE))
        np.testing.assert_allclose(gradient, wanted, atol=1e-10)
        joint = likelihood.joint_moment(given, jnp.float64(2.0), v, 0.3)
        np.testing.assert_allclose(joint.matrix(), 2 * s + v @ v.T / 0.3, atol=1e-12)
    overlap = reference.sym(v.T @ u)
    squared = float(likelihood.squared_distance(v.T, u.T))
    np.testing.assert_allclose(squared, RANK - np.sum(overlap**2), rtol=1e-12)


def test_gradients_against_finite_differences(samples, frames, x64):
    u, v, direction = map(jnp.asarray, frames[:3])
    y = samples[0]
    s, n = y.T @ y / len(y), len(y)
    moment = Moment.from_samples(jnp.asarray(y))
    for point, function, gradient in (
        (
            u,
            lambda w: reference.likelihood(s, n, w, NOISE),
            likelihood.likelihood_gradient(moment, u.T, likelihood.precision(moment.count, NOISE)),
        ),
        (
            u,
            lambda w: reference.distance(v, w) / 2,
            likelihood.distance_gradients(v.T, u.T)[1],
        ),
        (
            v,
            lambda w: reference.distance(w, u) / 2,
            likelihood.distance_gradients(v.T, u.T)[0],
        ),
    ):
        tangent = reference.project(point, direction)
        wanted = slope(lambda w, f=function: f(reference.polar(w)), point, tangent)
        np.testing.assert_allclose(np.vdot(gradient.T, tangent), wanted, rtol=1e-7, atol=1e-8)
        # And nothing of it is normal to the manifold.
        np.testing.assert_allclose(reference.project(point, gradient.T), gradient.T, atol=1e-12)


def test_alignment_gives_the_distance_of_subspaces(frames, x64):
    u, v = map(jnp.asarray, frames[:2])
    turned = likelihood.aligned(u.T, v.T).T
    np.testing.assert_allclose(projector(turned), projector(u), atol=1e-12)
    overlap = v.T @ turned
    np.testing.assert_allclose(overlap, overlap.T, atol=1e-12)
    assert np.linalg.eigvalsh(overlap).min() > 0
    least = RANK - np.sum((v.T @ u) ** 2)
    np.testing.assert_allclose(reference.distance(v, np.asarray(turned)), least, rtol=1e-10)
    assert reference.distance(v, u) > least


# --- runs ----------------------------------------------------------------------------------------

SETTINGS = {
    "automatic": ({}, {}),
    "given": ({"step_size": 4e-3, "global_step_size": 0.05},) * 2,
    "half": ({"likelihood": "half"}, {"half": True}),
    "unaligned": ({"align": False}, {"align": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_gradient_descent(name, samples, frames, x64):
    given, expected = SETTINGS[name]
    clients = jf.Clients.from_samples(samples)
    start = jf.Personalized(jnp.asarray(frames[-1]), jnp.asarray(frames[:-1]))
    solution = solve(Hierarchical(**given), clients, warm_start=start)
    shared, own, _ = reference.gradient_descent(
        samples, frames[-1], frames[:-1], NOISE, VARIANCE, ROUNDS, **expected
    )
    assert_same_subspaces(solution, shared, own)
    if name == "unaligned":
        np.testing.assert_allclose(solution.result.local, own, atol=1e-8)
        before = reference.objective(samples, frames[-1], frames[:-1], NOISE, VARIANCE)
        np.testing.assert_allclose(solution.history["objective"][0], before, rtol=1e-10)
    if name != "half":
        assert np.all(np.diff(solution.history["objective"]) <= 1e-9)


def test_pooled_start(samples, x64):
    clients = jf.Clients.from_samples(samples)
    shared = reference.pooled(samples, RANK)
    shared, own, _ = reference.gradient_descent(
        samples, shared, [shared] * CLIENTS, NOISE, VARIANCE, ROUNDS
    )
    assert_same_subspaces(solve(Hierarchical(), clients), shared, own)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["exact", "half"])
def test_block_descent(which, samples, x64):
    clients = jf.Clients.from_samples(samples)
    start = reference.pooled(samples, RANK)
    shared, own = reference.block_descent(
        samples, start, NOISE, VARIANCE, ROUNDS, half=which == "half"
    )
    block = solve(Hierarchical(solver="eigenvectors", likelihood=which), clients)
    assert_same_subspaces(block, shared, own)
    if which == "exact":
        descent = solve(Hierarchical(), clients)
        rise = np.diff(block.history["objective"])
        assert rise.max() <= 1e-9
        assert np.all(block.history["objective"] <= descent.history["objective"] + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["closed_form", "log", "gradient"])
def test_a_hyperprior(update, samples, x64):
    clients = jf.Clients.from_samples(samples)
    hyper_prior, dimension = 0.2, RANK * (FEATURES - RANK)
    solution = solve(
        Adaptive(initial_variance=0.1, hyper_prior=hyper_prior, variance_update=update), clients
    )
    shared = reference.pooled(samples, RANK)
    shared, own, variance = reference.gradient_descent(
        samples,
        shared,
        [shared] * CLIENTS,
        NOISE,
        0.1,
        ROUNDS,
        spread=update,
        hyper_prior=hyper_prior,
        dimension=dimension,
    )
    assert_same_subspaces(solution, shared, own)
    np.testing.assert_allclose(solution.history["prior_variance"][-1], variance, rtol=1e-8)
    assert solution.history["prior_variance"].min() >= theory.spread_floor(hyper_prior, dimension)


@pytest.mark.slow
def test_half_the_gradient_is_half_the_prior_variance(samples, frames, x64):
    clients = jf.Clients.from_samples(samples)
    start = jf.Personalized(jnp.asarray(frames[-1]), jnp.asarray(frames[:-1]))
    make = partial(jf.pca.HierarchicalPCA, RANK, NOISE, align=False)
    printed = make(0.1, step_size=8e-3, global_step_size=0.1, likelihood="half")
    exact = make(0.05, step_size=4e-3, global_step_size=0.05)
    found, wanted = (solve(given, clients, warm_start=start).result for given in (printed, exact))
    chex.assert_trees_all_close(found, wanted, atol=1e-12)


@pytest.mark.slow
def test_global_training(samples, frames, x64):
    clients = jf.Clients.from_samples(samples)
    start = jf.Personalized(jnp.asarray(frames[-1]), None)
    solution = solve(Global(step_size=0.01), clients, warm_start=start)
    shared = reference.global_training(samples, frames[-1], NOISE, ROUNDS, 0.01)
    np.testing.assert_allclose(projector(solution.result.shared), projector(shared), atol=1e-8)
    assert solution.result.local is None
    # Its optimum is pooled PCA, where it starts, and where it ends from elsewhere.
    best = projector(reference.pooled(samples, RANK))
    for algorithm, rounds in ((Global(), ROUNDS), (Global(start="random"), 3000)):
        found = solve(algorithm, clients, rounds=rounds).result.shared
        np.testing.assert_allclose(projector(found), best, atol=1e-8)


@pytest.mark.slow
def test_local_training(samples, frames, x64):
    clients = jf.Clients.from_samples(samples)
    solution = solve(Alone(), clients, warm_start=jf.Personalized(None, jnp.asarray(frames[:-1])))
    own = reference.local_training(samples, frames[:-1], NOISE, ROUNDS)
    np.testing.assert_allclose(projector(solution.result.local), projector(own), atol=1e-8)
    assert solution.result.shared is None
    # Its optimum is each client's PCA, from a random start too.
    best = [reference.top(s, RANK) for s in reference.moments(samples)]
    found = solve(Alone(), clients, rounds=10000).result.local
    np.testing.assert_allclose(projector(found), projector(best), atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0])
def test_orthonormal_at_every_step_size(dtype, tolerance, factor, samples):
    with jax.enable_x64(dtype is np.float64):
        clients = jf.Clients.from_samples([y.astype(dtype) for y in samples])
        largest = max(
            n / (NOISE * (1 + NOISE)) * np.linalg.eigvalsh(s)[-1]
            for n, s in zip(SIZES, reference.moments(samples), strict=True)
        )
        algorithm = Hierarchical(step_size=factor / (largest + 1 / VARIANCE), start="random")
        shared, local = solve(algorithm, clients, rounds=500).result
        for frame in (shared, *local):
            assert np.linalg.norm(frame.T @ frame - np.eye(RANK)) <= tolerance * RANK


@pytest.mark.slow
def test_a_tenth_of_the_clients_at_a_time(samples, key, x64):
    arrays = samples * 4
    clients = jf.Clients.from_samples(arrays)
    start = reference.pooled(arrays, RANK)
    best, _ = reference.block_descent(arrays, start, NOISE, VARIANCE, 200)
    solution = jf.fit(
        Hierarchical(global_step_size=0.02),
        clients,
        rounds=200,
        key=key,
        participation=jf.participation.uniform(2),
    )
    assert np.all(solution.history["participants"] == 2)
    assert np.sum((projector(solution.result.shared) - projector(best)) ** 2) < 0.2
    # Every client's own components are near to what everybody's taking part would give.
    everybody = solve(Hierarchical(), clients, rounds=200).result.local
    apart = np.sum((projector(solution.result.local) - projector(everybody)) ** 2, axis=(1, 2))
    assert apart.mean() < 0.2


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "start", "message"),
    [
        (jf.pca.HierarchicalPCA(FEATURES, NOISE, 0.1), None, "rank: wanted less than the 8"),
        (jf.pca.EmpiricalBayesPCA(FEATURES, NOISE), None, "rank: wanted less than the 8"),
        (Hierarchical(), (FEATURES, 2, RANK), "warm_start: wanted shared components of shape"),
        (Hierarchical(), (FEATURES, RANK, 1), "warm_start: wanted local components of shape"),
        (
            Adaptive(initial_variance=1e-4, hyper_prior=0.1),
            None,
            "initial_variance: wanted at least",
        ),
        (
            Adaptive(hyper_prior=0.1, variance_update="gradient", variance_step_size=0.01),
            None,
            "hyper_prior: wanted at least variance_step_size",
        ),
    ],
)
def test_what_does_not_fit_is_refused(algorithm, start, message, samples, key):
    clients = jf.Clients.from_samples(samples)
    if start is not None:
        features, shared, local = start
        start = jf.Personalized(jnp.ones((features, shared)), jnp.ones((CLIENTS, features, local)))
    with pytest.raises(ValueError, match=message):
        jf.fit(algorithm, clients, rounds=1, key=key, warm_start=start)


# --- empirical Bayes -----------------------------------------------------------------------------


@pytest.mark.slow
def test_normalizer_against_monte_carlo(x64):
    d, r, draws = 6, 2, 200_000
    rng = np.random.default_rng(0)
    frames = np.linalg.qr(rng.normal(size=(draws, d, r)))[0]
    squares = np.einsum("nij,nij->ni", frames, frames)
    distance = r - squares[:, :r].sum(axis=1)
    for concentration in (0.5, 3.0, 10.0):
        density = np.exp(-concentration / 2 * distance)
        value = bingham.log_normalizer(concentration, d, r)
        np.testing.assert_allclose(value, np.log(density.mean()), atol=0.1)
        expected = density @ distance / density.sum()
        value = bingham.prior_distance(concentration, d, r)
        np.testing.assert_allclose(value, expected, rtol=0.12)
    # Several eigenvalues: an approximation.
    values = np.asarray([9.0, 6.0, 4.0, 2.0, 1.0, 0.0])
    density = np.exp(squares @ values / 2)
    expected = density @ squares / density.sum()
    weights = bingham.mean_projector_weights(jnp.asarray(values), r)
    np.testing.assert_allclose(weights, expected, atol=0.04)
    np.testing.assert_allclose(weights.sum(), r, rtol=1e-12)


def test_normalizer_at_its_ends(x64):
    d, r = 30, 10
    np.testing.assert_allclose(bingham.log_normalizer(0.0, d, r), 0, atol=1e-12)
    np.testing.assert_allclose(bingham.prior_distance(0.0, d, r), r * (d - r) / d)
    np.testing.assert_allclose(bingham.prior_distance(1e6, d, r), r * (d - r) / 1e6, rtol=1e-4)


@pytest.mark.slow
def test_concentrations_of_any_size():
    """In single precision the denominators of the printed saddle point vanish from 10^7 on."""
    for d, r in ((5, 2), (100, 1), (30, 29)):
        for concentration in (0.0, 1e-6, 0.3, float(d), 1e3, 1e9, 1e30):
            value, derivative = jax.value_and_grad(bingham.log_normalizer)(
                jnp.float32(concentration), d, r
            )
            distance = bingham.prior_distance(jnp.float32(concentration), d, r)
            assert jnp.isfinite(value) and distance > 0
            np.testing.assert_allclose(-2 * derivative, distance, atol=2e-6 * r)
            if concentration >= 1e9:
                np.testing.assert_allclose(distance * concentration, r * (d - r), rtol=1e-5)


@pytest.mark.slow
def test_distances_that_no_concentration_has():
    """None at all, by rounding even less, and more than the uniform law's."""
    fit = partial(bingham.fitted_concentration, features=30, rank=10)
    least, most = bingham.concentrations(30, 10, jnp.float32)
    for distance, wanted in ((-1e-6, most), (0.0, most), (200 / 30 + 1e-3, least)):
        value, derivative = jax.value_and_grad(fit)(jnp.float32(distance))
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
        assert derivative == 0


def test_concentration_is_the_inverse_of_the_distance(x64):
    fit = jax.jit(partial(bingham.fitted_concentration, features=30, rank=10))
    for concentration in (0.1, 5.0, 60.0, 4000.0):
        distance = bingham.prior_distance(concentration, 30, 10)
        np.testing.assert_allclose(fit(distance), concentration, rtol=1e-6)
        wanted = slope(fit, distance, 1e-3 * distance, 1e-2) / (1e-3 * distance)
        np.testing.assert_allclose(jax.grad(fit)(distance), wanted, rtol=1e-3)


def test_thin_and_dense_posteriors_agree(samples, frames, x64):
    thin = Moment.from_samples(jnp.asarray(samples[-1]))  # four samples of eight features
    algorithm = jf.pca.EmpiricalBayesPCA(RANK, NOISE)
    downlink = empirical_bayes.Downlink(jnp.asarray(frames[0]), jnp.asarray(7.0), None)
    step = jax.jit(lambda moment: algorithm.client_step(jax.random.key(0), downlink, None, moment))
    chex.assert_trees_all_close(step(thin), step(thin.densified()), rtol=1e-9)


@pytest.mark.slow
def test_expectation_maximization_round_by_round(samples, x64):
    rounds = 30
    solution = solve(
        jf.pca.EmpiricalBayesPCA(RANK, NOISE), jf.Clients.from_samples(samples), rounds=rounds
    )
    shared, own, objectives, variances = reference_of_bayes.expectation_maximization(
        samples, RANK, NOISE, rounds
    )
    np.testing.assert_allclose(solution.history["prior_variance"], variances, rtol=1e-8)
    np.testing.assert_allclose(solution.history["objective"], objectives, rtol=1e-10)
    assert_same_subspaces(solution, shared, own)
    assert abs(variances[-1] / variances[0] - 1) > 0.1


@pytest.mark.slow
def test_rounded_messages_leave_the_spread_alone(key):
    """The distance used to be what was left of r after two numbers rounded to eight bits."""
    drawn = jf.data.perpca_synthetic(
        key=key,
        clients=CLIENTS,
        features=FEATURES,
        shared_rank=RANK,
        local_rank=1,
        samples=60,
        shared_scale=3.0,
        local_scale=1.5,
        noise_variance=0.25,
    )
    clients = jf.Clients.from_samples(drawn.samples)
    exact, rounded = (
        jf.fit(Bayes(NOISE), clients, rounds=20, key=key, channel=channel).history
        for channel in (jf.channel.lossless(), jf.channel.cast("bfloat16"))
    )
    np.testing.assert_allclose(rounded["prior_variance"], exact["prior_variance"], rtol=0.1)
    np.testing.assert_allclose(rounded["objective"], exact["objective"], rtol=1e-3)
    assert exact["at_lower_limit"][-1]


@pytest.mark.slow
def test_a_spread_at_its_limit_is_told_and_a_wrong_noise_is_found(key):
    """Twice the noise explains all of the scatter; what the components leave tells the noise."""
    data = jf.data.hierarchical_synthetic(
        key=key, clients=60, features=20, rank=4, samples=20, prior_variance=0.05
    )
    clients, fits = jf.Clients.from_samples(data.samples), []
    for _ in range(4):
        noise = fits[-1]["residual_variance"][-1] if fits else 2 * data.noise_variance
        run = solve(jf.pca.EmpiricalBayesPCA(4, noise), clients, rounds=30)
        fits.append(jax.tree.map(np.asarray, run.history))
        remarks = [remark for remark in run.remarks() if "lower limit" in remark]
        assert len(remarks) == (len(fits) == 1)
    right = solve(jf.pca.EmpiricalBayesPCA(4, data.noise_variance), clients, rounds=30).history
    found, wanted = fits[-1]["prior_variance"][-1], right["prior_variance"][-1]
    np.testing.assert_array_equal([fit["at_lower_limit"][-1] for fit in fits], [1, 0, 0, 0])
    sampling = 2 * data.noise_variance * (1 + 2 * data.noise_variance) / 20
    np.testing.assert_allclose(fits[0]["prior_variance"][-1], sampling / 100, rtol=1e-5)
    np.testing.assert_allclose(found, wanted, rtol=0.03)
    np.testing.assert_allclose(right["residual_variance"][-1], data.noise_variance, rtol=0.02)


@jax.jit
def estimated(key, prior_variance):
    """Estimated and true spread, and errors of this and of the best fixed prior variance."""
    data = jf.data.hierarchical_synthetic(
        key=key, clients=60, features=20, rank=4, samples=20, prior_variance=prior_variance
    )
    clients = jf.Clients.from_samples(data.samples)
    run = partial(jf.rollout, clients=clients, key=key)

    def error(solution):
        return jf.metrics.expected_reconstruction_error(
            solution.result.local, data.local, NOISE, relative=True
        )

    found = run(jf.pca.EmpiricalBayesPCA(4, NOISE), rounds=60)
    grid = jnp.asarray([0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.3])
    fixed = jax.vmap(
        lambda v: error(run(jf.pca.HierarchicalPCA(4, NOISE, v, solver="eigenvectors"), rounds=30))
    )(grid)
    apart = data.local - data.shared @ (data.shared.T @ data.local)
    true = 1 / bingham.fitted_concentration(jnp.sum(apart**2) / 60, 20, 4)
    return found.history["prior_variance"][-1], true, error(found), fixed.min()


@pytest.mark.slow
def test_the_spread_is_recovered_over_an_order_of_magnitude(key):
    for simulated in (0.003, 0.01, 0.03):
        spread, true, error, best = estimated(key, simulated)
        np.testing.assert_allclose(spread, true, rtol=0.25)
        # The law of the simulation saturates, that of the prior does not.
        assert 0.6 * simulated < true < 1.1 * simulated
        assert error < 1.01 * best


# --- theory --------------------------------------------------------------------------------------


def test_personalized_means_are_the_minimizer(x64):
    rng = np.random.default_rng(2)
    means, v, variance = jnp.asarray(rng.normal(size=(7, 3))), 0.3, 0.2

    def objective(parameters):
        shared, local = parameters
        fit = jnp.sum((means - local) ** 2) / (2 * v)
        return fit + jnp.sum((local - shared) ** 2) / (2 * variance)

    found = theory.personalized_means(means, v, variance)
    gradients = jax.grad(objective)(found)
    chex.assert_trees_all_close(gradients, jax.tree.map(jnp.zeros_like, gradients), atol=1e-12)


def test_collaboration_gain_against_simulation(x64):
    rng = np.random.default_rng(3)
    clients, dimension, v = 2000, 50, 0.5
    for true_variance, variance in ((0.2, 0.2), (1.0, 0.1), (0.3, 1.0)):
        truth = np.sqrt(true_variance) * rng.normal(size=(clients, dimension))
        means = truth + np.sqrt(v) * rng.normal(size=truth.shape)
        found = theory.personalized_means(jnp.asarray(means), v, variance).local
        saved = 1 - np.mean((found - truth) ** 2) / np.mean((means - truth) ** 2)
        gain = theory.collaboration_gain(true_variance, variance, v)
        np.testing.assert_allclose(gain, saved, atol=0.01)
        assert theory.collaboration_helps(true_variance, variance, v) == (gain > 0)
    assert not theory.collaboration_helps(1.0, 0.1, v)
    best = theory.collaboration_gain(0.2, 0.2, v)
    np.testing.assert_allclose(best, v / (0.2 + v), rtol=1e-6)
    assert theory.collaboration_gain(0.2, jnp.asarray([0.1, 0.19, 0.21, 0.4]), v).max() < best


def test_safe_hyper_prior_is_the_threshold(x64):
    v, dimension = 0.5, 10
    true_variance = jnp.logspace(-3, 2, 400)
    for factor, safe in ((1.01, True), (0.85, False)):
        hyper_prior = factor * theory.safe_hyper_prior(v, dimension)
        ends = [
            theory.stationary_spread(true_variance, v, hyper_prior, dimension, start=start)
            for start in (1e-4, 200.0)
        ]
        np.testing.assert_allclose(ends[0], ends[1], rtol=1e-4)  # the only one
        gain = theory.collaboration_gain(true_variance, ends[0], v)
        assert (gain.min() > 0) == safe


def test_spread_without_a_hyper_prior_collapses(x64):
    small = theory.stationary_spread(10.0, 0.5, 1e-6, 10, start=1e-3)
    large = theory.stationary_spread(10.0, 0.5, 1e-6, 10, start=20.0)
    assert small < 1e-5 and large > 8


def test_spread_minimizer_and_gradient(x64):
    distance, hyper_prior, dimension = 1.3, 0.4, 12

    def regularizer(sigma):
        return dimension * jnp.log(sigma) + (2 * hyper_prior + distance) / (2 * sigma**2)

    for sigma in (0.1, 0.4, 2.0):
        np.testing.assert_allclose(
            theory.spread_gradient(sigma, distance, hyper_prior, dimension),
            jax.grad(regularizer)(sigma),
            rtol=1e-10,
        )
    best = jnp.sqrt(theory.spread_minimizer(distance, hyper_prior, dimension))
    np.testing.assert_allclose(jax.grad(regularizer)(best), 0, atol=1e-10)


@pytest.mark.parametrize("variance", [0.02, 0.5])  # below the minimum and above it
@pytest.mark.parametrize("update", ["closed_form", "log", "gradient"])
def test_a_step_of_the_variance_is_down_its_gradient(update, variance, key, x64):
    """By log σ², by σ, or to where there is none, on either side of the minimum."""
    hyper_prior, distance, dimension, step = 0.4, 1.3, 1 * 5, 0.01
    coordinate, inverse = {"log": (jnp.log, jnp.exp), "gradient": (jnp.sqrt, jnp.square)}.get(
        update, (lambda x: x, lambda x: x)
    )

    def regularizer(x):
        deviation = jnp.sqrt(inverse(x))
        bound = 2 * hyper_prior + distance
        return dimension * jnp.log(deviation) + bound / (2 * deviation**2)

    algorithm = jf.pca.HierarchicalPCA(
        1,
        NOISE,
        initial_variance=variance,
        hyper_prior=hyper_prior,
        variance_update=update,
        variance_step_size=step,
    )
    shared = jnp.eye(1, 6)
    server = _component_updates.HierarchicalServer(shared, jnp.asarray(variance))
    moved, record = algorithm.server_step(
        key, server, _component_updates.Message(shared, jnp.asarray(distance), None)
    )
    assert record["prior_variance"] == moved.prior_variance
    slope = jax.grad(regularizer)
    if update == "closed_form":
        np.testing.assert_allclose(slope(moved.prior_variance), 0, atol=1e-10)
        return
    before = coordinate(jnp.asarray(variance))
    np.testing.assert_allclose(
        coordinate(moved.prior_variance), before - step * slope(before), rtol=1e-10
    )
    assert (moved.prior_variance - variance) * slope(before) < 0


def test_spread_never_falls_below_its_floor(x64):
    hyper_prior, dimension = 0.4, 12
    floor = theory.spread_floor(hyper_prior, dimension)
    variance = jnp.linspace(1.0, 40.0, 50) * floor
    for _ in range(300):
        variance = _prior_variance.UPDATES["gradient"](variance, 0.0, hyper_prior, dimension, None)
        assert jnp.all(variance >= floor * (1 - 1e-12))


# --- data and metric -----------------------------------------------------------------------------


@pytest.mark.slow
def test_synthetic_data(key, x64):
    data = jf.data.hierarchical_synthetic(
        key=key,
        clients=40,
        features=10,
        rank=3,
        samples=[5] * 39 + [7],
        prior_variance=0.002,
        dtype=jnp.float64,
    )
    assert [len(y) for y in data.samples] == [5] * 39 + [7]
    for frame in (data.shared, *data.local):
        np.testing.assert_allclose(frame.T @ frame, np.eye(3), atol=1e-12)
    distances = [reference.distance(np.asarray(data.shared), np.asarray(u)) for u in data.local]
    # Of 30 directions 3 * 7 move the subspace and 3 rotate it.
    np.testing.assert_allclose(np.mean(distances) / 24, 0.002, rtol=0.2)
    with pytest.raises(ValueError, match="rank: wanted less than the features"):
        jf.data.hierarchical_synthetic(
            key=key, clients=2, features=3, rank=3, samples=5, prior_variance=0.1
        )
    with pytest.raises(ValueError, match="prior_variance"):
        jf.data.hierarchical_synthetic(
            key=key, clients=2, features=3, rank=1, samples=5, prior_variance=-0.1
        )


@pytest.mark.slow
def test_expected_error_is_that_of_many_samples(key, frames):
    data = jf.data.hierarchical_synthetic(
        key=key, clients=CLIENTS, features=FEATURES, rank=RANK, samples=3, prior_variance=0.1
    )
    local = jnp.asarray(frames[:-1], jnp.float32)
    fresh = data.draw(jax.random.key(1), 65536)  # a standard error of about 0.2 %
    sampled = jf.metrics.reconstruction_error(jf.Personalized(None, local), fresh)
    exact = jf.metrics.expected_reconstruction_error(local, data.local, NOISE)
    np.testing.assert_allclose(exact, sampled, rtol=0.01)
    truth = jf.metrics.expected_reconstruction_error(data.local, data.local, NOISE, relative=True)
    np.testing.assert_allclose(truth, 1, rtol=1e-6)
    with pytest.raises(ValueError, match="truth: wanted an array"):
        jf.metrics.expected_reconstruction_error(local, data.shared, NOISE)


@pytest.mark.slow
def test_the_prior_variance_is_a_traced_leaf(samples):
    leaves = jax.tree.leaves(eqx.filter(Hierarchical(), eqx.is_array))
    assert sorted(map(float, leaves)) == pytest.approx([VARIANCE, NOISE])
    clients, traced = jf.Clients.from_samples([x.astype(np.float32) for x in samples]), []

    @jax.jit
    def spread(algorithm):
        traced.append(algorithm.prior_variance)
        solution = jf.rollout(algorithm, clients, rounds=3, key=jax.random.key(0))
        return solution.history["distance"][-1]

    near, far = (spread(jf.pca.HierarchicalPCA(RANK, NOISE, x)) for x in (VARIANCE, 9 * VARIANCE))
    assert len(traced) == 1 and isinstance(traced[0], jax.core.Tracer)
    assert 0 < near < far  # a wide prior lets components go their own ways
