"""Heterogeneous matrix factorization: its rounds, where they end, and what is recovered."""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from bench.oracles import hmf as oracle
from tests.helpers import gap, projector, solve
from tests.references import hmf as reference

KEPT = json.loads(oracle.NUMBERS.read_text(encoding="utf-8"))
FEATURES, CLIENTS, SAMPLES = 10, 6, 40
gradient = functools.partial(jf.pca.HMF, solver="gradient")


def with_gaps(samples, observed):
    return [np.where(seen, y, np.nan) for y, seen in zip(samples, observed, strict=True)]


def clients_of(case, kind):
    if kind == "complete":
        return jf.Clients.from_samples(case.samples)
    return jf.Clients.from_samples(with_gaps(case.samples, case.observed), missing="mask")


def masks_of(case, kind):
    return [np.ones_like(y) if kind == "complete" else o for y, o in zip(*case[:2], strict=True)]


def warm(case):
    return jf.Personalized(jnp.asarray(case.start.shared), jnp.asarray(case.start.locals_))


def factors(run):
    """As the paper has them after a round: U_g, V_ig, U_il, V_il."""
    shared = np.asarray(run.server.components).T
    local = jax.tree.map(np.asarray, run.local)
    found = [
        (*reference.corrected(shared, v, own.T, w), w)
        for own, v, w in zip(local.components, local.shared_scores, local.scores, strict=True)
    ]
    return shared, *(list(part) for part in zip(*found, strict=True))


def draw_incomplete(noise, seed=0, scales=None, missing=0.0, count=SAMPLES):
    """Samples, `(clients, samples, features)`, shared components and local ones, and gaps."""
    rng = np.random.default_rng(seed)
    shared = np.linalg.qr(rng.normal(size=(FEATURES, 2)))[0]
    samples, locals_ = [], []
    for _ in range(CLIENTS):
        joint = np.linalg.qr(np.hstack([shared, rng.normal(size=(FEATURES, 2))]))[0]
        samples.append(rng.normal(size=(count, 4)) @ joint.T)
        locals_.append(joint[:, 2:])
    samples = np.stack(samples) + noise * rng.normal(size=(CLIENTS, count, FEATURES))
    if scales is not None:
        samples *= scales[:, None, None]
    gaps = np.where(rng.random(samples.shape) < missing, np.nan, samples)
    return samples, shared, np.stack(locals_), gaps


def size(scores):
    """The 8-mean of the eigenvalues of their products."""
    return np.mean(np.linalg.eigvalsh(scores.T @ scores) ** 8) ** (1 / 8)


@pytest.mark.parametrize("kind", ["complete", "incomplete"])
@pytest.mark.parametrize("automatic", [False, True], ids=["paper", "automatic"])
def test_rounds_equal_the_reference(x64, kind, automatic):
    case = oracle.draw(5)
    masks = masks_of(case, kind)
    filled = [y * mask for y, mask in zip(case.samples, masks, strict=True)]
    start = oracle.started(filled, case.start.shared, case.start.locals_)
    found = start.shared, start.shared_scores, start.locals_, start.scores
    problem = [y.T for y in filled], [mask.T > 0 for mask in masks]
    if automatic:
        algorithm = gradient(2, 1)
        each = zip(filled, masks, strict=True)
        first = [np.linalg.eigvalsh(y.T @ y)[-1] / np.mean(mask) for y, mask in each]
        curvature, objective = max(first), []
        for _ in range(20):
            scores = [np.hstack(pair) for pair in zip(found[1], found[3], strict=True)]
            own = [max(c, size(x)) for c, x in zip(first, scores, strict=True)]
            # One over twice the curvature and four times the penalty, a tenth of it.
            steps = reference.Steps(
                1 / (2.4 * curvature),
                [1 / (2.4 * c) for c in own],
                0.5,
                0.1 * curvature,
                [0.1 * c for c in own],
            )
            *found, last = reference.rounds(*problem, *found, steps, 1)
            curvature = max(max(first), np.mean(own))
            objective.extend(last)
    else:
        algorithm = gradient(2, 1, step_size=0.15, penalty=0.4)
        steps = reference.Steps.equal(0.15, 0.4, len(filled))
        *found, objective = reference.rounds(*problem, *found, steps, 20)
    run = solve(algorithm, clients_of(case, kind), rounds=20, warm_start=warm(case))
    np.testing.assert_allclose(run.history["objective"], objective, rtol=1e-10)
    shared, *others = factors(run)
    np.testing.assert_allclose(shared, found[0], atol=1e-10)
    for parts, wanted in zip(others, found[1:], strict=True):
        for part, like in zip(parts, wanted, strict=True):
            np.testing.assert_allclose(part[: len(like)], like, atol=1e-10)
            assert not part[len(like) :].any()  # scores of padding


@pytest.mark.parametrize("kind", ["complete", "incomplete"])
@pytest.mark.parametrize("seed", range(3))
def test_rounds_and_results_match_the_authors(x64, kind, seed):
    case, kept = oracle.draw(seed), KEPT["draws"][seed][kind]
    clients = clients_of(case, kind)
    penalty = oracle.PENALTY if kind == "complete" else 0.0
    algorithm = gradient(2, 1, step_size=oracle.STEP_SIZE, penalty=penalty)
    run = solve(algorithm, clients, rounds=oracle.EARLY, warm_start=warm(case))
    shared, _, locals_, _ = factors(run)
    np.testing.assert_allclose(shared, kept["shared"], atol=1e-8)
    np.testing.assert_allclose(locals_, kept["locals"], atol=1e-8)

    run = solve(jf.pca.HMF(2, 1), clients, rounds=300, warm_start=warm(case))
    error = 2 * run.history["objective"][-1]
    assert error <= kept["error_at_the_end"] * (1 + 1e-6)
    assert gap(run.result.shared, np.array(kept["shared_at_the_end"])) < 1e-4


@pytest.mark.parametrize("solver", ["quasi_newton", "gradient"])
def test_complete_samples_need_no_mask(x64, solver):
    x = np.random.default_rng(0).normal(size=(3, 20, 6)) * [4, 3, 2, 1, 1, 1]
    found, wanted = (
        jf.fit(
            jf.pca.HMF(2, 1, solver=solver),
            jf.Clients.from_samples([*x[:2], x[2, :15]], missing=missing),
            rounds=5,
            key=jax.random.key(0),
        )
        for missing in ("refuse", "mask")
    )
    chex.assert_trees_all_close(found.result, wanted.result, atol=1e-7)
    np.testing.assert_allclose(found.history["objective"], wanted.history["objective"], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0.0, 0.1])
def test_recovers_noiseless_data(x64, missing):
    samples, shared, locals_, gaps = draw_incomplete(0.0, missing=missing)
    clients = jf.Clients.from_samples(gaps, missing="mask")
    run = solve(jf.pca.HMF(2, 2), clients, rounds=300)
    assert run.history["objective"][-1] < 1e-18
    assert gap(run.result.shared, shared) < 1e-8
    assert gap(run.result.local, locals_) < 1e-8
    completed = jf.pca.complete(run, gaps)
    np.testing.assert_allclose(completed, samples, atol=1e-7)


@pytest.mark.slow
def test_ends_at_personalized_pca_of_clients_weighted_by_their_samples(x64):
    samples, *_ = draw_incomplete(0.4)
    samples = [y[:n] for y, n in zip(samples, (40, 28, 36, 40, 24, 32), strict=True)]
    counts = np.array([len(y) for y in samples])
    run = solve(gradient(2, 2), samples, rounds=2000)
    weighted = jf.Clients.from_samples(samples, weights=counts)
    other = solve(jf.pca.PerPCA(2, 2, local_penalty=0.0), weighted, rounds=200)
    wanted = other.history["objective"][-1] * counts.mean() / 2
    np.testing.assert_allclose(run.history["objective"][-1], wanted, rtol=1e-9)
    assert gap(run.result.shared, other.result.shared) < 1e-5
    assert gap(run.result.local, other.result.local) < 1e-5
    # Components become orthonormal by themselves, and scores are products with them.
    np.testing.assert_allclose(projector(run.server.components), np.eye(2), atol=1e-6)
    scores = jnp.einsum(
        "mnd,dr->mnr", jf.Clients.from_samples(samples).data.values, run.server.components.T
    )
    np.testing.assert_allclose(run.local.shared_scores, scores, atol=1e-5)


@pytest.mark.slow
def test_the_penalty_does_not_change_the_solution(x64):
    *_, gaps = draw_incomplete(0.3, missing=0.1)
    clients = jf.Clients.from_samples(gaps, missing="mask")
    ends = [
        solve(gradient(2, 2, penalty=penalty), clients, rounds=2000).result
        for penalty in (None, 3.0)
    ]
    assert gap(ends[0].shared, ends[1].shared) < 1e-6
    assert gap(ends[0].local, ends[1].local) < 1e-6


@pytest.mark.slow
def test_a_client_of_small_scale_converges_as_fast(x64):
    samples, *_, locals_, _ = draw_incomplete(0.0, scales=np.array([1.0, 1, 1, 1, 1, 0.05]))
    clients = jf.Clients.from_samples(samples)
    largest = max(np.linalg.eigvalsh(y.T @ y)[-1] for y in samples)
    rng = np.random.default_rng(1)
    start = jf.Personalized(
        jnp.linalg.qr(rng.normal(size=(FEATURES, 2)))[0],
        jnp.linalg.qr(rng.normal(size=(CLIENTS, FEATURES, 2)))[0],
    )
    own, one = (
        solve(algorithm, clients, rounds=600, warm_start=start).result.local[-1]
        for algorithm in (gradient(2, 2), gradient(2, 2, step_size=1 / (2.4 * largest)))
    )
    assert gap(own, locals_[-1]) < 1e-3 and gap(one, locals_[-1]) > 0.1


@pytest.mark.slow
def test_large_scores_of_samples_with_few_observed_entries_do_not_diverge(x64):
    *_, gaps = draw_incomplete(0.0, missing=0.2, count=20)
    clients = jf.Clients.from_samples(gaps, missing="mask")
    run = solve(gradient(2, 2, start="local_first"), clients, rounds=1500)
    objective = np.asarray(run.history["objective"])
    assert (np.diff(objective) <= 0).all()
    assert run.server.curvature > 1.5 * run.server.first  # which the step sizes take into account


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-15, 1e-8, 1e8, 1e14])
def test_is_scale_invariant(scale):
    *_, gaps = draw_incomplete(0.3, missing=0.1)
    gaps = gaps.astype(np.float32)
    runs = [
        solve(jf.pca.HMF(2, 2), jf.Clients.from_samples(x, missing="mask"), rounds=30)
        for x in (gaps, np.float32(scale) * gaps)
    ]
    assert gap(runs[0].result.shared, runs[1].result.shared) < 1e-3
    ratios = np.asarray(runs[1].history["objective"]) / scale / scale
    np.testing.assert_allclose(ratios, runs[0].history["objective"], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "rounds"), [("quasi_newton", 200), ("gradient", 2000)])
def test_derivatives_of_whole_runs_equal_central_differences(x64, solver, rounds):
    *_, gaps = draw_incomplete(0.3, missing=0.1)
    weights = np.random.default_rng(3).normal(size=(FEATURES, FEATURES))

    @jax.jit
    @jax.value_and_grad
    def loss(values):
        clients = jf.Clients.from_samples(values, missing="mask")
        run = jf.rollout(
            jf.pca.HMF(2, 2, solver=solver),
            clients,
            rounds=rounds,
            key=jax.random.key(0),
            adjoint=jf.adjoint.implicit(),
        )
        shared, local = run.result
        products = jnp.einsum("mdr,mer->de", local, local)
        return jnp.sum(weights * jnp.tanh(shared @ shared.T + products))

    at = jnp.asarray(gaps)
    _, gradient = loss(at)
    np.testing.assert_array_equal(gradient[np.isnan(gaps)], 0)
    direction = np.random.default_rng(1).normal(size=gaps.shape)
    near, far = (
        (loss(at + h * direction)[0] - loss(at - h * direction)[0]) / (2 * h) for h in (1e-5, 2e-5)
    )
    exact = jnp.nansum(gradient * direction)
    np.testing.assert_allclose(exact, (4 * near - far) / 3, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zeros", "one direction", "alike", "few samples", "never seen"])
def test_degenerate_samples(kind):
    samples, *_, gaps = draw_incomplete(0.3, missing=0.1)
    gaps = gaps.astype(np.float32)
    if kind == "zeros":
        gaps[:] = 0 * gaps
    elif kind == "one direction":
        gaps[:] = samples[:, :1, :1] * np.ones(FEATURES)
    elif kind == "alike":
        gaps[:] = gaps[:1]
    elif kind == "few samples":
        gaps = gaps[:, :2]
    else:
        gaps[0, :, 3] = np.nan
    clients = jf.Clients.from_samples(gaps, missing="mask")
    run = solve(jf.pca.HMF(2, 2), clients, rounds=30)
    together = np.concatenate([np.stack([run.result.shared] * CLIENTS), run.result.local], axis=-1)
    np.testing.assert_allclose(
        np.swapaxes(together, -1, -2) @ together, np.stack([np.eye(4)] * CLIENTS), atol=4e-5
    )
    objective = np.asarray(run.history["objective"])
    assert np.isfinite(objective).all() and objective[-1] <= 1.00001 * objective[0] + 1e-9
    completed = np.asarray(jf.pca.complete(run, gaps))
    assert np.isfinite(completed).all()
    if kind == "zeros":
        np.testing.assert_array_equal(completed, 0)


@pytest.mark.slow
def test_entries_are_completed_by_least_squares(x64):
    *_, gaps = draw_incomplete(0.3, missing=0.3)
    clients = jf.Clients.from_samples(gaps, missing="mask")
    run = solve(jf.pca.HMF(2, 2), clients, rounds=5)
    found = np.asarray(jf.pca.complete(run, gaps))
    for i, own in enumerate(gaps):
        basis = np.hstack([run.result.shared, run.result.local[i]])
        for row, completed in zip(own, found[i], strict=True):
            seen = ~np.isnan(row)
            scores = np.linalg.lstsq(basis[seen], row[seen], rcond=1e-7)[0]
            np.testing.assert_allclose(completed, np.where(seen, row, basis @ scores), atol=1e-8)
    one = jf.pca.complete(run, gaps[2], client=2)
    several = jf.pca.complete(run, list(gaps))
    np.testing.assert_allclose(one, found[2], atol=1e-12)
    np.testing.assert_allclose(several, found, atol=1e-12)


@pytest.mark.slow
def test_new_clients_and_warm_starts(x64):
    samples, shared, locals_, _ = draw_incomplete(0.0)
    run = solve(jf.pca.HMF(2, 2), samples[:4], rounds=100)
    new = jf.personalize(jf.pca.HMF(2, 2), run, jf.Clients.from_samples(samples[4:]), rounds=300)
    assert gap(new.local, locals_[4:]) < 1e-6
    again = solve(
        jf.pca.HMF(2, 2), jf.Clients.from_samples(samples[:4]), rounds=1, warm_start=run.result
    )
    chex.assert_trees_all_close(
        again.result.shared @ again.result.shared.T, projector(shared), atol=1e-7
    )


def test_bad_input_is_refused():
    *_, gaps = draw_incomplete(0.3, missing=0.1)
    clients = jf.Clients.from_samples(gaps, missing="mask")
    moments = jf.Clients.from_moments(np.stack([np.eye(FEATURES)] * CLIENTS))
    uneven = [y[: 5 + 7 * i] for i, y in enumerate(gaps)]
    buckets = jf.Clients.from_samples(uneven, missing="mask", bucket=1.1)
    run = solve(jf.pca.HMF(2, 2), clients, rounds=1)
    for call, message in [
        (lambda: solve(gradient(2, 2), buckets, rounds=1), "^clients: .* without buckets"),
        (lambda: solve(jf.pca.HMF(2, 2), moments, rounds=1), "^clients: wanted samples, .* Moment"),
        (lambda: solve(jf.pca.HMF(7, 4), clients, rounds=1), r"^shared_rank \+ local_rank: 11 "),
        (
            lambda: solve(jf.pca.HMF(2, 1), clients, rounds=1, warm_start=run.result),
            r"^warm_start: wanted local components of shape \(6, 10, 1\), got \(6, 10, 2\)",
        ),
        (lambda: jf.pca.complete(run, gaps[:, :, :3]), "^samples: wanted"),
        (lambda: jf.pca.complete(run, gaps[0]), "^client: wanted"),
        (lambda: jf.pca.complete(run, np.where(gaps > 1, np.inf, gaps)), "^samples: .* infinity"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("weights", "repeats", "options", "is_lost"),
    [
        ((2000, 1, 1), 1, {}, True),
        ((30, 1, 1), 60, {}, True),
        ((600, 1, 1), 1, {}, False),
        ((1, 1, 0), 1, {}, False),
        ((2000, 1, 1), 1, {"solver": "gradient"}, False),
        ((2000, 1, 1), 1, {"dtype": np.float64}, False),
    ],
)
def test_a_warning_says_that_one_client_outweighs_another(
    weights, repeats, options, is_lost, recwarn
):
    dtype = options.get("dtype", np.float32)
    first, *others = np.random.default_rng(0).uniform(-1, 1, (3, 20, 6)).astype(dtype)
    with jax.enable_x64(dtype == np.float64):
        samples, weights = [np.tile(first, (repeats, 1)), *others], np.array(weights, dtype)
        clients = jf.Clients.from_samples(samples, weights=weights)
        jf.fit(
            jf.pca.HMF(1, 1, solver=options.get("solver", "quasi_newton")),
            clients,
            rounds=1,
            key=jax.random.key(0),
        )
    said = [str(each.message) for each in recwarn if each.category is jf.UnitsWarning]
    assert len(said) == is_lost
    assert all("wanted weights times sums of squares" in message for message in said)
