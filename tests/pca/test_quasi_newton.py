"""Hierarchical, adaptive and empirical-Bayes PCA by a quasi-Newton server."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import jaxfed as jf
from jaxfed.pca._quasi_newton import Evaluation, _newton, climb, initial_memory
from tests.helpers import solve

FEATURES, RANK, CLIENTS, NOISE, TIGHT = 8, 2, 6, 0.3, 1e-3
XI = RANK * (FEATURES - RANK) * NOISE * (1 + NOISE) / (6 * 12)
Hierarchical = partial(jf.pca.HierarchicalPCA, RANK)
Adaptive = partial(jf.pca.HierarchicalPCA, RANK)
Bayes = partial(jf.pca.EmpiricalBayesPCA, RANK)


def samples(dtype=np.float64):
    rng = np.random.default_rng(0)
    center = rng.normal(size=(FEATURES, RANK))
    tables = []
    for _ in range(CLIENTS):
        frame = np.linalg.qr(center + 0.5 * rng.normal(size=center.shape))[0]
        signal = rng.normal(size=(12, RANK)) @ frame.T
        tables.append(signal + np.sqrt(NOISE) * rng.normal(size=(12, FEATURES)))
    return np.asarray(tables, dtype)


def joint(history, first):
    """The objective of `HierarchicalPCA` before each round, the hyper prior's part included."""
    dimension = RANK * (FEATURES - RANK)
    variance = np.append(first, history["prior_variance"][:-1])
    return history["objective"] + dimension / 2 * np.log(variance) + XI / variance


def falls(make, other, solver="quasi_newton", objective=lambda history: history["objective"]):
    """Objectives of many rounds of the other solver, and of fewer of this one."""
    values = samples()
    long = solve(make(solver=other), values, rounds=400).history
    quick = solve(make(solver=solver), values, rounds=40).history
    return np.asarray(objective(long)), np.asarray(objective(quick))


def rounds_to(objective, best, start, gap=1e-4):
    return int(np.flatnonzero(objective - best <= gap * (start - best))[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "other", "objective", "times"),
    [
        (partial(Hierarchical, NOISE, TIGHT), "eigenvectors", None, 4),
        (partial(Adaptive, NOISE), "eigenvectors", None, 1),
        (
            partial(Adaptive, NOISE, initial_variance=0.1, hyper_prior=XI),
            "eigenvectors",
            partial(joint, first=0.1),
            1.5,
        ),
        (partial(Bayes, NOISE), "em", None, 2),
    ],
    ids=["hierarchical", "adaptive", "hyperprior", "empirical Bayes"],
)
def test_the_optimum_equals_that_of_the_slower_solver(make, other, objective, times, x64):
    objective = objective or (lambda history: history["objective"])
    long, quick = falls(make, other, objective=objective)
    assert quick[-1] <= long[-1] + 1e-9 * abs(long[-1])
    np.testing.assert_allclose(quick[-1], long[-1], rtol=1e-6)
    best, start = min(long.min(), quick.min()), long[0]
    assert times * rounds_to(quick, best, start) <= rounds_to(long, best, start)


@pytest.mark.slow
def test_it_ends_where_a_pooled_solver_ends(x64):
    """Against SciPy's L-BFGS-B, on the objective with the local components eliminated."""
    values = samples()
    moments = np.einsum("mnd,mne->mde", values, values) / 12
    precision = 12 / (NOISE * (1 + NOISE))

    def objective(vector):
        v = np.linalg.qr(vector.reshape(FEATURES, RANK))[0]
        w = np.linalg.eigvalsh(precision * moments + v @ v.T / TIGHT)
        return -w[:, -RANK:].sum() / (2 * CLIENTS)

    found = solve(Hierarchical(NOISE, TIGHT, solver="quasi_newton"), values, rounds=40)
    shared = np.asarray(found.result.shared)
    best = minimize(objective, shared.ravel(), method="L-BFGS-B")
    assert objective(shared.ravel()) <= best.fun + 1e-8 * abs(best.fun)
    start = np.linalg.eigh(moments.mean(0))[1][:, -RANK:]
    assert best.fun < objective(start.ravel()) - 1e-4  # there was something to find


def test_a_quadratic_function_takes_as_many_rounds_as_it_has_directions(x64):
    """With the components fixed, BFGS on a quadratic terminates."""
    curvatures = np.array([1.0, 3.0, 10.0])
    frame = jnp.eye(4, 1)
    memory = initial_memory(frame, jnp.zeros(3), jnp.ones(3))
    none, step = jnp.full(3, jnp.inf), jax.jit(climb)
    for _ in range(25):
        x = memory.trial.numbers
        value = -jnp.sum(curvatures * (x - 1) ** 2) / 2
        memory, *_ = step(memory, Evaluation(10 * frame, value, -curvatures * (x - 1)), -none, none)
    np.testing.assert_allclose(memory.trial.numbers, 1, atol=1e-9)
    np.testing.assert_allclose(memory.trial.frame, frame, atol=1e-12)


def test_numbers_stay_within_their_limits(x64):
    frame = jnp.eye(4, 1)
    memory = initial_memory(frame, jnp.zeros(2), jnp.ones(2))
    least, most = jnp.array([-0.5, -5.0]), jnp.array([0.5, 5.0])
    step = jax.jit(climb)
    for _ in range(20):
        x = memory.trial.numbers
        assert (x >= least).all() and (x <= most).all()
        value = -jnp.sum((x - 2) ** 2) / 2 - 0.4 * x[0] * x[1]
        slopes = -(x - 2) - 0.4 * x[::-1]
        memory, *_ = step(memory, Evaluation(frame, value, slopes), least, most)
    # The first number is at its limit, and the second is the best given that.
    np.testing.assert_allclose(memory.trial.numbers, [0.5, 1.8], atol=1e-8)


@pytest.mark.slow
def test_components_stay_orthonormal_in_single_precision():
    found = solve(
        Hierarchical(NOISE, TIGHT, solver="quasi_newton"), samples(np.float32), rounds=100
    )
    shared = found.result.shared
    np.testing.assert_allclose(shared.T @ shared, np.eye(RANK), atol=1e-5 * RANK)
    assert np.isfinite(found.history["objective"]).all()
    assert found.history["stopping_measure"][-1] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda s: Hierarchical(s, 0.01, solver="quasi_newton"),
        lambda s: Adaptive(s, solver="quasi_newton"),
        lambda s: Bayes(s, solver="quasi_newton"),  # with components and numbers
    ],
    ids=["hierarchical", "adaptive", "empirical Bayes"],
)
@pytest.mark.parametrize(
    "rounds",
    [4, 60],
    ids=["on the way", "at the end"],
)
def test_unrolled_derivatives_equal_finite_differences(make, rounds, x64):
    values = jnp.asarray(samples())
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(FEATURES, FEATURES)))

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1))
    def end(noise, scale):
        shared = solve(make(noise), scale * values, rounds=rounds).result.shared
        return jnp.sum(weights * (shared @ shared.T))

    at = jnp.asarray(NOISE), jnp.asarray(1.0)
    _, slopes = end(*at)
    for i, got in enumerate(slopes):
        step = 1e-5 * jnp.eye(2)[i]
        ends = [end(*(x + sign * d for x, d in zip(at, step, strict=True)))[0] for sign in (1, -1)]
        np.testing.assert_allclose(got, (ends[0] - ends[1]) / 2e-5, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hierarchical(0.2, 0.1, solver="quasi_newton", likelihood="half"), "^likelihood: "),
        (lambda: Adaptive(0.2, solver="quasi_newton", variance_update="log"), "^variance_update: "),
        (
            lambda: Adaptive(variance_update="gradient"),
            "^hyper_prior: variance_update='gradient' wants a number",
        ),
        (lambda: Bayes(0.2, solver="newton"), "^solver: "),
    ],
)
def test_incompatible_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [Adaptive, Bayes])
def test_implicit_derivatives_are_refused_where_no_other_round_has_the_solution(make):
    with pytest.raises(ValueError, match=r"^adjoint: wanted .* with another solver"):
        solve(make(0.2, solver="quasi_newton"), samples(), rounds=5, adjoint=jf.adjoint.implicit())


def test_every_client_must_take_part():
    with pytest.raises(ValueError, match=r"^participation: HierarchicalPCA needs every client"):
        algorithm, some = Hierarchical(0.2, 0.1, solver="quasi_newton"), jf.participation.uniform(3)
        solve(algorithm, samples(), rounds=5, participation=some)


@pytest.mark.slow
def test_direction_solves_the_secant_equation(x64):
    """With all of a quadratic's curvature in the memory, the direction is Newton's."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(6, 6))
    hessian = root @ root.T + np.eye(6)
    # Conjugate moves: the recursion then is exact.
    moves = np.linalg.inv(np.linalg.cholesky(hessian))
    changes, gradient, one = jnp.asarray(moves @ hessian), rng.normal(size=6), jnp.ones(())
    found = _newton(jnp.asarray(moves), changes, jnp.asarray(gradient), one)
    np.testing.assert_allclose(found, np.linalg.solve(hessian, gradient), rtol=1e-9)
    # Entries without curvature are ignored, wherever they are.
    padded = [jnp.concatenate([x, jnp.zeros((3, 6))]) for x in (moves, changes)]
    np.testing.assert_allclose(_newton(*padded, jnp.asarray(gradient), one), found, rtol=1e-12)
    none = jnp.zeros((3, 6))
    np.testing.assert_allclose(_newton(none, none, jnp.asarray(gradient), 4 * one), gradient / 4)
