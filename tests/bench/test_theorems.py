"""Convergence theorems: their formulas against NumPy, and their bounds against runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from bench.formulas import convergence, stationarity
from bench.tables import theorem_runs as runs
from bench.tables import theorems


def frame(rng, *shape):
    return np.linalg.qr(rng.normal(size=shape))[0]


def moments_of(rng, clients, features):
    samples = rng.normal(size=(clients, 2 * features, features))
    return np.einsum("mni,mnj->mij", samples, samples) / samples.shape[1]


def squared(*matrices):
    return sum(np.sum(x**2) for x in matrices)


def arrays(*given: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(x) for x in given]


def symmetric(x):
    return (x + x.T) / 2


# --- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m1", "m2"), [(0.5, 1.0), (253 / 4, 253 / 8)])
def test_the_step_limit_of_perpca(m1, m2):
    """Lemma 16's constants as polynomials, multiplied out."""
    by_shared = np.polyval([1, 32, 254, 218 + 2 * m2, 88 + 24 * m2, 12 * (m2 + 1)], m1) / 8
    by_local = np.polyval([1, 81 / 4, 13, 5 + 2 * m2, (m2 + 1) / 2], m1)
    largest, rank, smooth = 1.7, 3, 9 * np.sqrt(2) * 1.7
    order = largest * np.sqrt(rank)
    wanted = min(
        1
        / (
            2 * order * (m1 + by_shared)
            + smooth * ((1 + m2 / 2) ** 2 + 2 * (1 + by_shared / 2) ** 2)
        ),
        1 / (2 * order * by_local + 2 * smooth * (1 + by_local / 2) ** 2),
        1 / 12 / order,
        np.sqrt(1 / 6 / (6 + 12 * m1 + m1**2)) / order,
    )
    found = convergence.perpca_step_limit(largest, rank, tangent=m1, normal=m2)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_the_learning_rates_of_hierarchical_pca(x64):
    largest, n, s, prior, rank = 2.3, 20, 0.5, 0.1, 3
    gradients = 2 * n / 2 * (largest / s**2 + 1 / s) + 2 / prior, 6 / prior
    smooth = (
        2 * n / 2 * (1 / s + largest / s**2 + (1 + 2 * largest / s) * 2 / s**2) + 2 / prior,
        24 / prior,
    )
    wanted = []
    for g, lipschitz in zip(gradients, smooth, strict=True):
        whole, constant = np.sqrt(rank) * g, 0.5
        curvature = (lipschitz + g) * (constant**2 * whole**2 + 1)
        wanted.append(min(1 / (2 * constant * whole + curvature), 1))
    found = convergence.hierarchical_learning_rates(largest, n, s, prior, rank)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert convergence.hierarchical_learning_rates(1e-9, 1e-9, 1.0, 1e9, 1).local == 1


def test_polar_retraction_has_the_constant_one_half(x64):
    rng = np.random.default_rng(0)
    for length in (0.01, 1.0, 10.0):
        v, x = frame(rng, 8, 3), rng.normal(size=(8, 3)) * length
        x = x - v @ symmetric(v.T @ x)
        left, _, right = np.linalg.svd(v + x, full_matrices=False)
        assert np.linalg.norm(left @ right - v - x) <= squared(x) / 2


def consensus_problem(rng, penalty):
    samples = rng.normal(size=(4, 10, 12)) / 20
    matrices = samples @ samples.transpose(0, 2, 1)
    norms = np.linalg.norm(matrices, 2, axis=(1, 2))
    return matrices, norms, penalty * norms


@pytest.mark.slow
def test_the_constant_of_faps(x64):
    matrices, a, beta = consensus_problem(np.random.default_rng(1), 2000.0)
    energy, d, p, delta, decrease, c1 = np.trace(matrices.sum(0)), 4, 2, 0.05, 0.3, 0.5
    rho = beta.max() / beta.min()
    low = np.sqrt(1 - 1 / (2 * rho * d))
    least = energy * max(
        3 / 2,
        12 * rho * d * np.sqrt(p) / (c1 * low**2),
        4 * np.sqrt(2) * (1 + np.sqrt(2 * rho * d)) / (low - 2 * np.sqrt(rho * d) * delta),
        16 * rho * d * np.sqrt(p),
        4 * (1 + np.sqrt(2 * rho * d)) / (c1 * low**2 * rho * d),
    )
    c4 = np.min(c1 * low**2 * beta / 4 - (1 + np.sqrt(2 * rho * d)) * a / (rho * d))
    c2 = 1 / np.sum(2 * beta + a)
    c3 = (np.sum(beta + 4 * a) / np.sqrt(2 * rho * d * c4) + 1 / np.sqrt(c2)) ** -2
    found = convergence.consensus_bound(a, energy, beta, delta, decrease, p)
    np.testing.assert_allclose(found, [least, decrease * (1 / c3 + 1 / c4)], rtol=1e-12)
    np.testing.assert_allclose(
        convergence.consensus_tolerance(d, rho), low / (2 * np.sqrt(rho * d)), rtol=1e-12
    )
    small = convergence.consensus_bound(a, energy, 0.15 * a, delta, decrease, p)
    assert np.isnan(small.constant)


def test_what_the_constants_of_sufficient_decrease_stand_for():
    """A step of subspace iteration with H_i and with sum Q_i, where FAPS has multipliers."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        matrices, a, beta = consensus_problem(rng, 1000.0)
        z, q = frame(rng, 10, 2), np.zeros((10, 10))
        for matrix, norm, penalty in zip(matrices, a, beta, strict=True):
            x = frame(rng, 10, 2) * 0.3 + z
            x = np.linalg.qr(x)[0]
            w = -(matrix @ x - x @ (x.T @ matrix @ x))
            multiplier = x @ w.T + w @ x.T
            assert np.linalg.norm(multiplier, 2) <= norm / 2 + 1e-12
            h = matrix + multiplier + penalty * z @ z.T
            risen, violation = step_of_subspace_iteration(h, x)
            assert risen >= violation / 2 / (1.5 * norm + penalty)
            q += penalty * x @ x.T - multiplier
        risen, violation = step_of_subspace_iteration(q, z)
        assert risen >= violation / np.sum(2 * beta + a)


def step_of_subspace_iteration(matrix, x):
    """The rise of half the trace, and the squared violation before."""
    new = np.linalg.qr(matrix @ x)[0]
    risen = np.trace(new.T @ matrix @ new - x.T @ matrix @ x) / 2
    return risen, squared(matrix @ x - x @ (x.T @ matrix @ x))


def test_no_orthogonal_iteration_is_farther_than_the_bound(x64):
    rng, rounds = np.random.default_rng(3), 40
    values = np.sort(rng.uniform(0, 1.5, 12))[::-1]
    values[:3] = 3.0, 2.5, 2.0
    start = frame(rng, 12, 3)
    start = np.linalg.qr(start + 2 * np.eye(12, 3))[0]
    for scale in (0.0, 0.02):
        g, noise, distances = start, np.zeros(rounds), []
        tangent = np.linalg.norm(g[3:] @ np.linalg.inv(g[:3]), 2)
        for k in range(rounds):
            w = rng.normal(size=g.shape) * scale
            noise[k] = np.linalg.norm(w, 2)
            g = np.linalg.qr(values[:, None] * g + w)[0]
            distances.append(np.linalg.norm(g[3:], 2))
        bound = convergence.subspace_distance_bound(tangent, values[2], values[3], noise)
        assert np.all(np.asarray(distances) <= np.asarray(bound) + 1e-13)
        wanted, t = [], tangent
        for epsilon in noise:
            lost = epsilon / np.cos(np.arctan(t))
            t = (values[3] * t + lost) / (values[2] - lost)
            wanted.append(t / np.sqrt(1 + t**2))
        np.testing.assert_allclose(bound, wanted, rtol=1e-10)
    vacuous = convergence.subspace_distance_bound(1.0, 2.0, 1.0, np.asarray([0.1, 3.0, 0.0]))
    np.testing.assert_allclose(vacuous[1:], 1.0)


# --- violations ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_violations_of_personalized_pca(x64):
    rng = np.random.default_rng(4)
    moments, u, v = moments_of(rng, 3, 6), frame(rng, 6, 2), rng.normal(size=(3, 6, 1))
    by_shared, by_local, objective = np.zeros((6, 2)), [], 0
    for s, columns in zip(moments, v, strict=True):
        own = np.linalg.qr(columns - u @ (u.T @ columns))[0]
        outside = np.eye(6) - u @ u.T - own @ own.T
        by_shared += outside @ s @ u / 3
        by_local.append(outside @ s @ own)
        objective -= np.trace(u.T @ s @ u + 0) / 2 + np.trace(own.T @ s @ own) / 2
    found = stationarity.perpca_violation(*arrays(moments, u, v))
    np.testing.assert_allclose(found.squared, 3 * squared(by_shared) + squared(*by_local))
    np.testing.assert_allclose(found.objective, objective)


@pytest.mark.slow
def test_violations_of_hierarchical_pca(x64):
    """With the gradient through the inverse of W, which Fact 1 prints half of."""
    rng, n, s, prior = np.random.default_rng(5), 20, 0.5, 0.3
    moments, shared = moments_of(rng, 3, 6), frame(rng, 6, 2)
    local, moved = frame(rng, 3, 6, 2), frame(rng, 3, 6, 2)

    def tangent(u, x):
        return x - u @ symmetric(u.T @ x)

    def inverse(u):
        return np.linalg.inv(u @ u.T + s * np.eye(6))

    by_local, by_shared, objectives = [], np.zeros((6, 2)), []
    for moment, u, new in zip(moments, local, moved, strict=True):
        w = inverse(u)
        gradient = n * (w @ u - w @ moment @ w @ u) + tangent(shared, u) / prior
        by_local.append(tangent(u, gradient))
        by_shared -= tangent(shared, new) @ symmetric(shared.T @ new) / prior / 3
        likelihood = n / 2 * (-np.linalg.slogdet(w)[1] + np.trace(w @ moment))
        objectives.append(likelihood + squared(tangent(shared, u)) / (2 * prior))
    by_shared = tangent(shared, by_shared)
    at, law = arrays(moments, shared, local, moved), (n, s, jnp.asarray(prior))
    found = stationarity.hierarchical_violation(at[0], at[1], at[2], at[3], *law)
    np.testing.assert_allclose(found.squared, squared(by_shared) + squared(*by_local) / 3)
    # Objectives differ by a constant.
    other = stationarity.hierarchical_objective(at[0], at[1], at[3], *law)
    wanted = []
    for moment, u in zip(moments, moved, strict=True):
        w = inverse(u)
        likelihood = n / 2 * (-np.linalg.slogdet(w)[1] + np.trace(w @ moment))
        wanted.append(likelihood + squared(tangent(shared, u)) / (2 * prior))
    np.testing.assert_allclose(other - found.objective, np.mean(wanted) - np.mean(objectives))


def test_violations_of_a_consensus(x64):
    rng = np.random.default_rng(6)
    matrices, z, x = moments_of(rng, 3, 6), frame(rng, 6, 2), frame(rng, 3, 6, 2)
    product = matrices.sum(0) @ z
    residual = (np.eye(6) - z @ z.T) @ product
    apart = [squared(y @ y.T - z @ z.T) for y in x]
    found = stationarity.consensus_violation(*arrays(matrices, z, x))
    np.testing.assert_allclose(found.squared, squared(residual) + np.mean(apart))
    np.testing.assert_allclose(found.objective, -np.trace(z.T @ product) / 2)


@pytest.mark.slow
def test_violations_of_generalized_cca(x64):
    rng = np.random.default_rng(7)
    views, maps, g = rng.normal(size=(3, 9, 4)), rng.normal(size=(3, 4, 2)), frame(rng, 9, 2)
    scores = [x @ q / 3 for x, q in zip(views, maps, strict=True)]
    by_maps = [x.T @ (m - g) / 3 for x, m in zip(views, scores, strict=True)]
    total = sum(scores)
    found = stationarity.correlation_violation(*arrays(views, maps, g))
    wanted = squared(total - g @ symmetric(g.T @ total), *by_maps)
    np.testing.assert_allclose(found.squared, wanted)
    np.testing.assert_allclose(found.objective, squared(*(m - g for m in scores)) / 2)


# --- runs ----------------------------------------------------------------------------------------


def least(curves):
    return np.min(curves.bound / curves.measured, axis=(1, 2))


def test_slopes_are_those_of_lines():
    rounds = np.arange(1, 201)
    values = np.stack([3 / rounds, 2 / rounds**0.5])[:, None]
    np.testing.assert_allclose(theorems.power(values), [[-1], [-0.5]])
    np.testing.assert_allclose(theorems.power(np.full((1, 1, 9), 1e-30)), [[np.nan]])
    values = 0.7 ** rounds[None, None] + 0.0
    np.testing.assert_allclose(theorems.geometric(values, np.asarray([[0.7]])), [[1]])


@pytest.mark.slow
def test_mean_gradients_are_within_their_bounds(x64):
    found = runs.personalized(draws=2, rounds=300)
    assert np.all(least(found)[:2] > 1) and least(found)[-1] < 1  # three times the curvature's
    assert np.max(found.bound[:2] / found.measured[:2]) < 2.1
    np.testing.assert_allclose(theorems.power(found.measured)[1], -1, atol=0.02)
    found = runs.hierarchical(draws=2, rounds=300)
    assert np.all(least(found) > 1) and np.max(found.bound / found.measured) < 2.5
    np.testing.assert_allclose(theorems.power(found.measured), -1, atol=0.02)


@pytest.mark.slow
def test_faps_is_within_its_bound_and_far_below_with_small_penalties(x64):
    found = runs.consensus(draws=2, rounds=300)
    assert least(found)[-1] > 1 and np.all(np.isnan(found.bound[:-1]))
    assert np.all(found.measured[0, :, -1] < 1e-18)
    assert np.all(found.measured[-1, :, -1] > 1e-3)


@pytest.mark.slow
def test_only_steps_that_get_short_end_at_a_critical_point(x64):
    measured = np.mean(runs.critical_points(draws=4, rounds=1200).measured[..., -600:], axis=(1, 2))
    assert measured[0] > 20 * measured[1] > 20 * measured[2]
    assert measured[0] > 0.03


@pytest.mark.slow
def test_distances_fall_at_the_ratio_beside_the_gap(x64):
    exact = jf.gcca.MaxVar(runs.RANK, memory=0)
    found = runs.subspaces(exact, None, (0.3, 1.0), draws=2, rounds=60)
    assert np.all(least(found.curves) > 1 - 1e-9)
    np.testing.assert_allclose(theorems.geometric(found.curves.measured, found.ratio), 1, atol=0.05)
    found = runs.subspaces(exact, runs.BITS, (0.3,), draws=2, rounds=60, since=20)
    assert np.all(least(found.curves) > 1)
    assert np.max(found.curves.measured[..., -1] / found.curves.bound[..., -1]) < 1e-6


def test_gains_of_many_clients_are_the_formula(x64):
    found = runs.gains(draws=10, clients=300)
    error = found.measured.std(1, ddof=1) / 10**0.5
    apart = np.abs(found.measured.mean(1) - found.bound[:, 0])
    assert np.max(apart / error) < 3.5 and np.max(apart[1:]) < 0.02
