"""The references agree with each other and with closed forms, so that they can be relied on."""

import numpy as np
import pytest

from bench.speed.authors_perpca import authors_round
from tests.references import perpca as reference


def problem(seed=0, clients=8, d=8, r1=2, r2=2, noise=0.3, counts=(30, 60)):
    """Samples with shared and local components, and a random start."""
    rng = np.random.default_rng(seed)
    truth = reference.polar(rng.standard_normal((d, r1)))
    samples, true_locals = [], []
    for i in range(clients):
        v = rng.standard_normal((d, r2))
        v = reference.polar(v - truth @ (truth.T @ v))
        n = counts[i % len(counts)]
        y = 2 * rng.standard_normal((n, r1)) @ truth.T + 2 * rng.standard_normal((n, r2)) @ v.T
        samples.append(y + noise * rng.standard_normal((n, d)))
        true_locals.append(v)
    shared = reference.polar(rng.standard_normal((d, r1)))
    return samples, shared, [rng.standard_normal((d, r2)) for _ in samples], truth, true_locals


def gap(x, y):
    return np.sum((reference.projector(x) - reference.projector(y)) ** 2)


def test_algorithm_1_is_the_polar_variant_of_algorithm_2():
    samples, shared, locals_, *_ = problem()
    one = reference.algorithm1(samples, shared, locals_, step_size=0.3, rounds=20)
    two = reference.perpca(samples, shared, locals_, step_size=0.3, rounds=20, variant="polar")
    np.testing.assert_allclose(two.shared, one[0], atol=1e-12)
    np.testing.assert_allclose(two.locals_, one[1], atol=1e-12)


@pytest.mark.parametrize("variant", ["tangent", "polar"])
def test_the_benchmarks_rival_runs_the_same_rounds(variant):
    samples, start, start_locals, *_ = problem()
    shared, locals_, loss = start, start_locals, None
    for _ in range(5):
        shared, locals_, loss = authors_round(samples, shared, locals_, 0.1, True, variant)
    found = reference.perpca(samples, start, start_locals, step_size=0.1, rounds=5, variant=variant)
    assert gap(shared, found.shared) < 1e-24
    errors = reference.reconstruction_errors(samples, found.shared, found.locals_)
    counts = np.array([len(y) for y in samples])
    np.testing.assert_allclose(loss, np.sum(counts * errors) / counts.sum(), rtol=1e-12)


def test_tangent_variant_meets_the_optimality_conditions_and_the_exact_solver():
    samples, shared, locals_, truth, true_locals = problem()
    step = 1 / max(np.linalg.eigvalsh(reference.moment(y))[-1] for y in samples)
    found = reference.perpca(samples, shared, locals_, step_size=step, rounds=600)
    assert max(reference.kkt_violation(samples, found.shared, found.locals_)) < 1e-9
    assert np.all(np.diff(found.objective) > -1e-9)
    oracle = reference.exact_local(samples, shared, 2, 100)
    assert gap(found.shared, oracle[0]) < 1e-16
    assert max(reference.kkt_violation(samples, *oracle)) < 1e-10
    best = reference.objective(samples, *oracle)
    np.testing.assert_allclose(found.objective[-1], best, rtol=1e-12)
    assert sum(reference.subspace_errors(*oracle, truth, true_locals)) < 0.05


@pytest.mark.slow
def test_retractions_share_the_optimum_of_the_tangent_variant():
    samples, shared, locals_, *_ = problem()
    polar, qr = (
        reference.perpca(samples, shared, locals_, step_size=0.1, rounds=600, retraction=r)
        for r in ("polar", "qr")
    )
    assert gap(polar.shared, qr.shared) < 1e-12


def test_every_result_is_feasible_with_unequal_ranks_and_absent_clients():
    samples, shared, locals_, *_ = problem()
    locals_ = [v[:, : 1 + i % 2] for i, v in enumerate(locals_)]
    turns = [[0, 1, 2], [3, 4], [0, 5, 6]]
    for variant in ("tangent", "polar"):
        found = reference.perpca(
            samples, shared, locals_, step_size=0.1, rounds=3, variant=variant, participants=turns
        )
        for v, start in zip(found.locals_, locals_, strict=True):
            w = np.concatenate([found.shared, v], axis=1)
            np.testing.assert_allclose(w.T @ w, np.eye(w.shape[1]), atol=1e-12)
            assert v.shape == start.shape
        # Client 7 never took part: its start, made feasible once.
        u = found.shared
        expected = reference.polar(locals_[7] - u @ (u.T @ locals_[7]))
        np.testing.assert_allclose(found.locals_[7], expected, atol=1e-14)


def test_the_step_decreases_when_the_loss_rises_and_only_then():
    samples, shared, locals_, *_ = problem(noise=0.5)
    largest = max(np.linalg.eigvalsh(reference.moment(y))[-1] for y in samples)
    kwargs = {"step_size": 6 / largest, "rounds": 40}
    found = reference.perpca(samples, shared, locals_, decrease_on_rise=True, **kwargs)
    counts = np.array([len(y) for y in samples])
    losses = []
    for rounds in range(1, 12):
        kwargs["rounds"] = rounds
        so_far = reference.perpca(samples, shared, locals_, decrease_on_rise=True, **kwargs)
        errors = reference.reconstruction_errors(samples, so_far.shared, so_far.locals_)
        losses.append(np.sum(counts * errors) / counts.sum())
    rose = np.diff(losses) > 0
    assert rose.any() and not rose.all()
    ratios = found.step_sizes[2:12] / found.step_sizes[1:11]
    np.testing.assert_allclose(ratios[:-1], np.where(rose, np.exp(-1.0), 1.0)[:-1])
    assert found.step_sizes[1] == found.step_sizes[0]


@pytest.mark.parametrize(
    "method", [reference.one_shot_projector, reference.one_shot_spectrum, reference.local_first]
)
def test_one_shot_methods_find_the_truth_without_noise(method):
    rng = np.random.default_rng(0)
    truth = np.eye(6)[:, :1]
    true_locals = [np.eye(6)[:, [1 + i]] for i in range(5)]
    # Scores that are exactly uncorrelated: every S_i has the true components as eigenvectors.
    scores = [np.sqrt(20) * np.linalg.qr(rng.standard_normal((20, 2)))[0] for _ in true_locals]
    samples = [
        x @ np.concatenate([truth, 2 * v], axis=1).T
        for x, v in zip(scores, true_locals, strict=True)
    ]
    shared, locals_ = method(samples, 1, 1)
    assert sum(reference.subspace_errors(shared, locals_, truth, true_locals)) < 1e-28


def test_one_shot_methods_differ_by_the_weight_of_the_spectrum():
    # The two strong clients' own direction wins by its variance, the common one by its frequency.
    samples = [np.diag([1.0, 9, 0, 0]), np.diag([1.0, 9, 0, 0]), np.diag([1.0, 0, 1, 0])]
    projector, spectrum = (
        method(samples, 1, 1)[0][:, 0] ** 2
        for method in (reference.one_shot_projector, reference.one_shot_spectrum)
    )
    np.testing.assert_allclose(projector, [1, 0, 0, 0], atol=1e-14)
    np.testing.assert_allclose(spectrum, [0, 1, 0, 0], atol=1e-14)


def test_pooled_pca_weighs_rows_or_clients():
    samples = [np.ones((1, 2)) * [3, 0], np.ones((100, 2)) * [0, 2]]
    np.testing.assert_allclose(np.abs(reference.pooled_pca(samples, 1)), [[0], [1]])
    np.testing.assert_allclose(np.abs(reference.pooled_pca(samples, 1, "clients")), [[1], [0]])


def test_misalignment_of_two_lines_is_the_squared_sine_of_half_their_angle():
    angle = 0.7
    lines = [np.array([[1.0], [0.0]]), np.array([[np.cos(angle)], [np.sin(angle)]])]
    np.testing.assert_allclose(reference.misalignment(lines), np.sin(angle / 2) ** 2)
    rho = reference.client_distances(lines)
    np.testing.assert_allclose(rho, 2 * np.sin(angle) ** 2 * np.array([[0, 1], [1, 0]]))


def test_robust_pca_separates_a_low_rank_and_a_sparse_part():
    rng = np.random.default_rng(0)
    low = rng.standard_normal((60, 3)) @ rng.standard_normal((3, 40))
    sparse = np.where(rng.random(low.shape) < 0.05, 10 * rng.standard_normal(low.shape), 0)
    found = reference.robust_pca(low + sparse)
    np.testing.assert_allclose(found[0], low, atol=1e-4)
    np.testing.assert_allclose(found[1], sparse, atol=1e-4)


def test_the_ordering_of_the_methods_with_few_samples():
    """Well-posed variant of Table 2: clients with few samples gain from the others."""
    rng = np.random.default_rng(0)
    d, r1, r2, m = 15, 2, 3, 100
    truth = np.eye(d)[:, :r1]
    own = [np.eye(d)[:, [(q + i) % 6 + r1 for q in range(r2)]] for i in range(m)]

    def draw(n, i):
        y = 2 * rng.standard_normal((n, r1)) @ truth.T + 3 * rng.standard_normal((n, r2)) @ own[i].T
        return y + np.sqrt(0.5) * rng.standard_normal((n, d))

    train = [draw(10 if i < m // 2 else 100, i) for i in range(m)]
    test = [draw(1000, i) for i in range(m)]

    def errors(shared, locals_):
        each = reference.reconstruction_errors(test, shared, locals_)
        return each[: m // 2].mean(), each[m // 2 :].mean()

    nothing = np.zeros((d, 0))
    individual = errors(nothing, reference.local_pca(train, r1 + r2))
    pooled = errors(nothing, [reference.pooled_pca(train, r1 + r2)] * m)
    one_shot = errors(*reference.one_shot_projector(train, r1, r2))
    start = reference.one_shot_spectrum(train, r1, r2)[0]
    optimum = errors(*reference.exact_local(train, start, r2, 60))
    np.testing.assert_allclose(individual, (10.1, 5.28), rtol=0.06)
    np.testing.assert_allclose(pooled, (17.6, 17.4), rtol=0.03)
    np.testing.assert_allclose(one_shot, (7.60, 5.173), rtol=0.06)
    np.testing.assert_allclose(optimum, (7.60, 5.168), rtol=0.06)
    np.testing.assert_allclose(errors(truth, own), (5.0, 5.0), rtol=0.02)
    assert optimum[0] < individual[0] < pooled[0]
    assert optimum[1] < individual[1] < pooled[1]
