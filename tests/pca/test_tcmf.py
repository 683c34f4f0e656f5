"""Triple component matrix factorization: its rounds, where they end, and what is recovered."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from bench.oracles import tcmf as oracle
from tests.helpers import gap, projector, solve
from tests.references import tcmf as reference

KEPT = json.loads(oracle.NUMBERS.read_text(encoding="utf-8"))
FEATURES, CLIENTS, SAMPLES, RANK = 40, 6, 50, 2


class Truth(NamedTuple):
    """Samples, `(clients, samples, features)`, what they are the sum of, and the components."""

    samples: np.ndarray
    shared_part: np.ndarray
    local_part: np.ndarray
    errors: np.ndarray
    shared: np.ndarray
    locals_: np.ndarray
    gaps: np.ndarray  # samples with NaN for missing entries


def draw_corrupted(noise=0.0, seed=0, share=0.05, size=5.0, missing=0.0):
    rng = np.random.default_rng(seed)
    shared = np.linalg.qr(rng.normal(size=(FEATURES, RANK)))[0]
    joint = [np.hstack([shared, rng.normal(size=(FEATURES, RANK))]) for _ in range(CLIENTS)]
    locals_ = np.stack([np.linalg.qr(w)[0][:, RANK:] for w in joint])
    scores = rng.normal(size=(2, CLIENTS, SAMPLES, RANK))
    parts = scores[0] @ shared.T, scores[1] @ np.swapaxes(locals_, 1, 2)
    # Errors as large as the rest or larger, of either sign.
    magnitudes = rng.uniform(0.2, 1, size=parts[0].shape) * size
    signs = rng.choice([-1, 1], size=magnitudes.shape)
    errors = np.where(rng.random(magnitudes.shape) < share, signs * magnitudes, 0)
    samples = parts[0] + parts[1] + errors + noise * rng.normal(size=errors.shape)
    gaps = np.where(rng.random(samples.shape) < missing, np.nan, samples)
    return Truth(samples, *parts, errors, shared, locals_, gaps)


def clients_of(gaps):
    return jf.Clients.from_samples(gaps, missing="mask")


def mistakes(run, truth):
    """The largest errors of the shared, the local and the sparse part."""
    cleaned = np.asarray(run.local.cleaned)
    return [
        np.max(np.abs(cleaned @ projector(run.result.shared) - truth.shared_part)),
        np.max(np.abs(cleaned @ projector(run.result.local) - truth.local_part)),
        np.max(np.abs(truth.samples - cleaned - truth.errors)),
    ]


@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("kind", ["complete", "incomplete"])
def test_rounds_equal_the_reference(x64, kind, inner):
    truth = draw_corrupted(0.1, missing=0.1)
    gaps = truth.samples if kind == "complete" else truth.gaps
    counts = 50, 28, 36, 40, 24, 32
    tables = [y[:n] for y, n in zip(gaps, counts, strict=True)]
    rng = np.random.default_rng(1)
    start = np.linalg.qr(rng.normal(size=(FEATURES, RANK)))[0]
    if inner == 1:
        algorithm = jf.pca.TCMF(RANK, RANK, 0.3)
        first = [3 * np.nanquantile(np.abs(y), 0.75) for y in tables]
    else:
        algorithm = jf.pca.TCMF(RANK, RANK, 0.3, first_threshold=1.5, decay=0.7, inner_rounds=inner)
        first = [1.5] * CLIENTS
    shared, sparse, objective = reference.rounds(
        [np.nan_to_num(y).T for y in tables],
        [~np.isnan(y).T for y in tables],
        start,
        RANK,
        (0.3, first),
        float(algorithm.decay),
        20,
        inner,
    )
    clients = jf.Clients.from_samples(tables) if kind == "complete" else clients_of(tables)
    warm = jf.Personalized(jnp.asarray(start), None)
    run = solve(algorithm, clients, rounds=20, warm_start=warm)
    np.testing.assert_allclose(run.history["objective"], objective, rtol=1e-9)
    np.testing.assert_allclose(run.result.shared, shared, atol=1e-9)
    for cleaned, y, s in zip(np.asarray(run.local.cleaned), tables, sparse, strict=True):
        np.testing.assert_allclose(cleaned[: len(y)], np.nan_to_num(y) - s.T, atol=1e-9)
        assert not cleaned[len(y) :].any()  # padding


@pytest.mark.slow
def test_many_inner_rounds_equal_the_papers_epochs(x64):
    samples = draw_corrupted(0.1).samples
    first, decay, final = 1.5, 0.6, 0.4
    algorithm = jf.pca.TCMF(RANK, RANK, final, first_threshold=first, decay=decay, inner_rounds=300)
    run = solve(algorithm, samples, rounds=900)
    # Another solver of the factorization, run to convergence.
    low_rank, threshold = np.zeros_like(samples), first
    for _ in range(4):
        sparse = reference.hard(samples - low_rank, threshold)
        threshold = decay * threshold + (1 - decay) * final
        factors = solve(
            jf.pca.PerPCA(RANK, RANK, local_penalty=0.0),
            jf.Clients.from_samples(samples - sparse),
            rounds=150,
        ).result
        both = projector(factors.shared) + projector(factors.local)
        low_rank = (samples - sparse) @ both
    np.testing.assert_allclose(samples - run.local.cleaned, sparse, atol=1e-5)
    assert gap(run.result.shared, factors.shared) < 0.02  # one round after the last epoch


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["together", "alone"])
def test_epochs_equal_the_authors(x64, kind, seed):
    case, kept = oracle.draw(seed), KEPT["draws"][seed][kind]
    samples = case.samples if kind == "together" else case.samples[:1]
    inner = 300
    algorithm = jf.pca.TCMF(
        oracle.SHARED_RANK,
        oracle.LOCAL_RANK,
        0.0,
        first_threshold=oracle.FIRST,
        decay=oracle.DECAY,
        inner_rounds=inner,
    )
    # Up to the last factorization.
    run = solve(
        algorithm,
        jf.Clients.from_samples(samples),
        rounds=oracle.EPOCHS * inner - 1,
        warm_start=jf.Personalized(jnp.asarray(case.shared), None),
    )
    sparse = np.stack(samples) - run.local.cleaned
    wanted = kept["sparse"] if kind == "together" else [kept]
    np.testing.assert_allclose(sparse, wanted, atol=1e-8)
    if kind == "together":
        assert gap(run.result.shared, np.array(kept["shared"])) < 1e-8
        assert gap(run.result.local, np.array(kept["locals"])) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0.0, 0.1])
def test_recovers_noiseless_data_at_a_linear_rate(x64, missing):
    truth = draw_corrupted(missing=missing)
    observed = ~np.isnan(truth.gaps)
    ends = []
    for rounds in (40, 120, 280):
        run = solve(jf.pca.TCMF(RANK, RANK, 0.0), clients_of(truth.gaps), rounds=rounds)
        cleaned = np.asarray(run.local.cleaned)
        ends.append(np.max(np.abs(truth.samples - cleaned - truth.errors)[observed]))
    assert gap(run.result.shared, truth.shared) < 1e-9
    assert gap(run.result.local, truth.locals_) < 1e-9
    assert ends[-1] < 1e-9
    # The paper's bound on errors is the threshold.
    assert (np.array(ends[:2]) < 5 * 0.9 ** np.array([40, 120])).all()
    # Missing entries are completed by the low-rank parts.
    np.testing.assert_allclose(cleaned, truth.samples - truth.errors, atol=1e-9)


@pytest.mark.slow
def test_is_better_than_either_model_alone(x64):
    truth = draw_corrupted(share=0.15, size=20.0)
    clients = jf.Clients.from_samples(truth.samples)
    ours = mistakes(solve(jf.pca.TCMF(RANK, RANK, 0.0), clients, rounds=250), truth)
    factors = solve(jf.pca.HMF(RANK, RANK), clients, rounds=250).result
    alone = jax.vmap(lambda y: jf.pca.robust_pca(y)[1])(jnp.asarray(truth.samples))
    assert max(ours) < 1e-8
    assert gap(factors.shared, truth.shared) > 0.1
    assert np.max(np.abs(alone - truth.errors)) > 1e-2


@pytest.mark.slow
def test_ends_where_factors_ignore_the_sparse_part(x64):
    truth = draw_corrupted(0.05, missing=0.05)
    run = solve(jf.pca.TCMF(RANK, RANK, 0.3), clients_of(truth.gaps), rounds=800)
    observed = ~np.isnan(truth.gaps)
    sparse = observed & (np.asarray(run.local.cleaned) != np.nan_to_num(truth.gaps))
    assert 100 < sparse.sum() < 0.08 * sparse.size
    others = np.where(sparse, np.nan, truth.gaps)
    wanted = solve(jf.pca.HMF(RANK, RANK), clients_of(others), rounds=3000)
    assert gap(run.result.shared, wanted.result.shared) < 1e-6
    assert gap(run.result.local, wanted.result.local) < 1e-6
    errors = run.history["objective"][-1] - 0.3**2 * sparse.sum() / CLIENTS / 2
    np.testing.assert_allclose(errors, wanted.history["objective"][-1], rtol=1e-8)


@pytest.mark.slow
def test_without_errors_it_is_personalized_pca(x64):
    samples = draw_corrupted(0.3, share=0.0).samples
    counts = np.array((50, 28, 36, 40, 24, 32))
    tables = [y[:n] for y, n in zip(samples, counts, strict=True)]
    run = solve(jf.pca.TCMF(RANK, RANK, 100.0), tables, rounds=500)
    weighted = jf.Clients.from_samples(tables, weights=counts)
    other = solve(jf.pca.PerPCA(RANK, RANK, local_penalty=0.0), weighted, rounds=200)
    wanted = other.history["objective"][-1] * counts.mean() / 2
    np.testing.assert_allclose(run.history["objective"][-1], wanted, rtol=1e-9)
    assert gap(run.result.shared, other.result.shared) < 1e-5
    assert gap(run.result.local, other.result.local) < 1e-5


@pytest.mark.slow
def test_the_objective_falls_once_the_threshold_has_fallen(x64):
    run = solve(jf.pca.TCMF(RANK, RANK, 0.3), draw_corrupted(0.1).samples, rounds=250)
    objective = np.asarray(run.history["objective"])[120:]
    assert (np.diff(objective) <= 1e-12 * objective[0]).all()


@pytest.mark.slow
def test_derivatives_of_whole_runs_equal_central_differences(x64):
    truth = draw_corrupted(0.1, missing=0.05)
    weights = np.random.default_rng(3).normal(size=(FEATURES, FEATURES))

    def loss_of(adjoint):
        @jax.jit
        def loss(values):
            run = jf.rollout(
                jf.pca.TCMF(RANK, RANK, 0.5),
                clients_of(values),
                rounds=400,
                key=jax.random.key(0),
                adjoint=adjoint,
            )
            products = jnp.einsum("mdr,mer->de", run.result.local, run.result.local)
            shared = run.result.shared @ run.result.shared.T
            return jnp.sum(weights * jnp.tanh(shared + products)), run.local.cleaned

        return loss

    implicit, unrolled = jf.adjoint.implicit(), jf.adjoint.unrolled()
    at = jnp.asarray(truth.gaps)
    (_, cleaned), gradient = jax.value_and_grad(loss_of(implicit), has_aux=True)(at)
    ignored = np.isnan(truth.gaps) | (np.asarray(cleaned) != np.nan_to_num(truth.gaps))
    assert ignored.sum() > np.isnan(truth.gaps).sum() + 100
    np.testing.assert_array_equal(gradient[ignored], 0)
    loss = loss_of(implicit)
    direction = np.random.default_rng(1).normal(size=at.shape)
    near, far = (
        (loss(at + h * direction)[0] - loss(at - h * direction)[0]) / (2 * h) for h in (1e-5, 2e-5)
    )
    exact = jnp.sum(gradient * direction)
    np.testing.assert_allclose(exact, (4 * near - far) / 3, rtol=1e-5)
    other = jax.grad(loss_of(unrolled), has_aux=True)(at)[0]
    np.testing.assert_allclose(other, gradient, atol=1e-8)


def test_an_implicit_derivative_requires_one_inner_round():
    clients = jf.Clients.from_samples(draw_corrupted().samples.astype(np.float32))
    with pytest.raises(ValueError, match=r"^adjoint: wanted TCMF\(inner_rounds=1\).*, got 2"):
        jf.rollout(
            jf.pca.TCMF(RANK, RANK, 0.5, inner_rounds=2),
            clients,
            rounds=2,
            key=jax.random.key(0),
            adjoint=jf.adjoint.implicit(),
        )


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-15, 1e-8, 1e8, 1e14])
def test_is_scale_invariant_up_to_the_thresholds(scale):
    gaps = draw_corrupted(0.1, missing=0.1).gaps.astype(np.float32)
    runs = [
        solve(jf.pca.TCMF(RANK, RANK, 0.5 * s), clients_of(np.float32(s) * gaps), rounds=60)
        for s in (1.0, scale)
    ]
    assert gap(runs[0].result.shared, runs[1].result.shared) < 1e-3
    ratios = np.asarray(runs[1].history["objective"]) / scale / scale
    np.testing.assert_allclose(ratios, runs[0].history["objective"], rtol=1e-3)


@pytest.mark.slow
def test_a_client_of_another_scale_has_its_own_first_threshold(x64):
    truth = draw_corrupted()
    scales = np.array([1.0, 1, 1, 1, 1, 0.05])[:, None, None]
    run = solve(
        jf.pca.TCMF(RANK, RANK, 0.0), jf.Clients.from_samples(scales * truth.samples), rounds=280
    )
    assert gap(run.result.local, truth.locals_) < 1e-8
    np.testing.assert_allclose(
        np.asarray(run.local.cleaned) / scales, truth.samples - truth.errors, atol=1e-8
    )


def test_features_of_zeros_change_no_first_threshold():
    samples = draw_corrupted(0.1).samples
    wide = np.concatenate([samples, np.zeros((CLIENTS, SAMPLES, 4 * FEATURES))], axis=2)
    narrow, wide = (
        solve(jf.pca.TCMF(RANK, RANK, 0.5), clients_of(x), rounds=3).history["objective"]
        for x in (samples, wide)
    )
    np.testing.assert_allclose(wide, narrow, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zeros", "one direction", "alike", "one sample", "never seen"])
def test_degenerate_samples(kind):
    gaps = draw_corrupted(0.1, missing=0.1).gaps.astype(np.float32)
    if kind == "zeros":
        gaps[:] = 0
    elif kind == "one direction":
        gaps[:] = np.nan_to_num(gaps)[:, :, :1] * np.ones(FEATURES, np.float32)
    elif kind == "alike":
        gaps[:] = gaps[:1]
    elif kind == "one sample":
        gaps = gaps[:, :1]
    else:
        gaps[0, :, 3] = np.nan
    run = solve(jf.pca.TCMF(RANK, RANK, 0.5), clients_of(gaps), rounds=60)
    shared = np.stack([run.result.shared] * CLIENTS)
    together = np.concatenate([shared, run.result.local], axis=-1)
    grams = np.swapaxes(together, -1, -2) @ together
    np.testing.assert_allclose(grams, np.stack([np.eye(2 * RANK)] * CLIENTS), atol=4e-5)
    assert np.isfinite(run.history["objective"]).all() and np.isfinite(run.local.cleaned).all()
    if kind == "zeros":
        assert not np.asarray(run.local.cleaned).any()


@pytest.mark.slow
def test_new_clients_and_warm_starts(x64):
    truth = draw_corrupted()
    algorithm = jf.pca.TCMF(RANK, RANK, 0.0)
    run = solve(algorithm, truth.samples[:4], rounds=280)
    others = jf.Clients.from_samples(truth.samples[4:])
    new = jf.personalize(algorithm, run, others, rounds=280)
    assert gap(new.local, truth.locals_[4:]) < 1e-8
    again = solve(
        algorithm,
        jf.Clients.from_samples(truth.samples[:4]),
        rounds=280,
        warm_start=run.result,
    )
    assert gap(again.result.shared, truth.shared) < 1e-8


@pytest.mark.slow
def test_thresholds_can_be_swept(x64):
    clients = jf.Clients.from_samples(draw_corrupted(0.1).samples)
    sweep = jax.vmap(lambda x: jf.pca.TCMF(RANK, RANK, x))(jnp.array([0.3, 2.0]))
    runs = jax.vmap(lambda algorithm: solve(algorithm, clients, rounds=60))(sweep)
    for i, threshold in enumerate((0.3, 2.0)):
        one = solve(jf.pca.TCMF(RANK, RANK, threshold), clients, rounds=60)
        np.testing.assert_allclose(
            runs.history["objective"][i], one.history["objective"], rtol=1e-9
        )


def test_bad_input_is_refused():
    gaps = draw_corrupted(missing=0.1).gaps.astype(np.float32)
    clients = clients_of(gaps)
    moments = jf.Clients.from_moments(np.stack([np.eye(FEATURES)] * CLIENTS))
    buckets = jf.Clients.from_samples(
        [y[: 5 + 7 * i] for i, y in enumerate(gaps)], missing="mask", bucket=1.1
    )
    start = jf.Personalized(jnp.eye(FEATURES)[:, :3], None)
    algorithm = jf.pca.TCMF(RANK, RANK, 0.5)
    for call, message in [
        (lambda: solve(algorithm, buckets, rounds=1), "^clients: .* without buckets"),
        (lambda: solve(algorithm, moments, rounds=1), "^clients: wanted samples, .* Moment"),
        (
            lambda: solve(jf.pca.TCMF(38, 3, 0.5), clients, rounds=1),
            r"^shared_rank \+ local_rank: 41 ",
        ),
        (
            lambda: solve(algorithm, clients, rounds=1, warm_start=start),
            r"^warm_start: wanted shared components of shape \(40, 2\), got \(40, 3\)",
        ),
        (lambda: jf.pca.TCMF(2, 2, np.nan), "^threshold: wanted a finite number"),
        (lambda: jf.pca.TCMF(2, 2, 0.1, decay=0.0), "^decay: wanted a number above 0 and below 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
