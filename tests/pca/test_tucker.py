"""Personalized Tucker decomposition: its rounds, where they end, and what is recovered."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from bench.oracles import tucker as oracle
from tests.helpers import gap, projector, solve
from tests.references import tucker as reference

KEPT = json.loads(oracle.NUMBERS.read_text(encoding="utf-8"))
SHAPE, RANKS, LOCAL_RANKS = oracle.SHAPE, oracle.SHARED_RANKS, oracle.LOCAL_RANKS
FEATURES, CLIENTS = int(np.prod(SHAPE)), len(oracle.COUNTS)


def rows(samples):
    return [y.reshape(len(y), -1) for y in samples]


def warm(start):
    locals_ = np.stack([oracle.kron(own) for own in start.locals_])
    return jf.Personalized(jnp.asarray(oracle.kron(start.shared)), jnp.asarray(locals_))


def factors_after(algorithm, clients, passes, start):
    """Shared and local factors after some passes over all modes, and the objective there."""
    count = passes * len(algorithm.shape)
    shared = solve(algorithm, clients, rounds=count, warm_start=start).server.factors
    # A client updates its factor of the last mode at the beginning of the next round.
    after = solve(algorithm, clients, rounds=count + 1, warm_start=start)
    return shared, after.local, after.history["objective"][-1]


def draw_tensors(seed=0, noise=0.0, own=1.0, clients=CLIENTS, count=16):
    """Samples as rows, shared components and local ones, from factors of random spans."""
    rng = np.random.default_rng(seed)
    sizes = list(zip(SHAPE, RANKS, LOCAL_RANKS, strict=True))
    shared = [np.linalg.qr(rng.normal(size=(d, r)))[0] for d, r, _ in sizes]
    samples, locals_ = [], []
    for _ in range(clients):
        factors = []
        for (_, r, s), u in zip(sizes, shared, strict=True):
            joint = np.linalg.qr(np.hstack([u, rng.normal(size=(len(u), s))]))[0]
            factors.append(joint[:, r:])
        both = oracle.kron(shared), oracle.kron(factors)
        scores = [rng.normal(size=(count, w.shape[1])) for w in both]
        samples.append(scores[0] @ both[0].T + own * scores[1] @ both[1].T)
        locals_.append(both[1])
    samples = np.stack(samples) + noise * rng.normal(size=(clients, count, FEATURES))
    return samples, oracle.kron(shared), np.stack(locals_)


@pytest.mark.parametrize("rho", [0.0, 0.7])
@pytest.mark.parametrize("orthogonal", [(0, 1, 2), pytest.param((1,), marks=pytest.mark.slow)])
def test_rounds_equal_the_reference(x64, orthogonal, rho):
    case = oracle.draw(5, orthogonal)
    clients = jf.Clients.from_samples(rows(case.samples))
    algorithm = jf.pca.PerTucker(
        SHAPE, RANKS, LOCAL_RANKS, orthogonal_modes=orthogonal, proximal=rho
    )
    # As many as for the authors' numbers, so that both share compiled programs.
    passes = oracle.EARLY
    u, v, objectives = reference.passes(case.samples, *case.start, orthogonal, rho, passes)
    shared, local, objective = factors_after(algorithm, clients, passes, warm(case.start))
    np.testing.assert_allclose(objective, objectives[-1], rtol=1e-9)
    for k in range(len(SHAPE)):
        assert gap(shared[k], u[k]) < 1e-9
        for i in range(CLIENTS):
            assert gap(local[k][i], v[i][k]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("kind", oracle.KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_rounds_and_results_match_the_authors(x64, kind, seed):
    orthogonal, rho = oracle.KINDS[kind]
    case, kept, total = oracle.draw(seed, orthogonal), KEPT["draws"][seed][kind], sum(oracle.COUNTS)
    # The authors' sum over all samples.
    clients = jf.Clients.from_samples(rows(case.samples), weights="samples")
    algorithm = jf.pca.PerTucker(
        SHAPE, RANKS, LOCAL_RANKS, orthogonal_modes=orthogonal, proximal=rho / total
    )
    if kind != "proximal":
        shared, local, objective = factors_after(algorithm, clients, oracle.EARLY, warm(case.start))
        np.testing.assert_allclose(total * objective, kept["loss"], rtol=1e-10)
        for k in range(len(SHAPE)):
            assert gap(shared[k], kept["shared"][k]) < 1e-8
            for i in range(CLIENTS):
                assert gap(local[k][i], kept["locals"][i][k]) < 1e-8
    run = solve(algorithm, clients, rounds=3 * oracle.LATE, warm_start=warm(case.start))
    assert total * run.history["objective"][-1] <= kept["loss_at_the_end"] * (1 + 1e-6)
    assert gap(run.result.shared, kept["shared_at_the_end"]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("orthogonal", [None, (0,)])
@pytest.mark.parametrize("own", [0.3, 3.0])
def test_recovers_noiseless_data(x64, orthogonal, own):
    samples, shared, locals_ = draw_tensors(own=own)
    algorithm = jf.pca.PerTucker(SHAPE, RANKS, LOCAL_RANKS, orthogonal_modes=orthogonal)
    run = solve(algorithm, samples, rounds=600)
    assert run.history["objective"][-1] < 1e-14 * np.mean(np.sum(samples**2, axis=-1))
    assert gap(run.result.shared, shared) < 1e-8
    assert gap(run.result.local, locals_) < 1e-8


@pytest.mark.slow
def test_one_mode_is_personalized_pca(x64):
    samples, *_ = draw_tensors(noise=0.3)
    clients = jf.Clients.from_samples(samples[..., :10])
    run = solve(jf.pca.PerTucker((10,), (2,), (2,)), clients, rounds=2000)
    other = solve(jf.pca.PerPCA(2, 2, local_penalty=0), clients, rounds=300, warm_start=run.result)
    np.testing.assert_allclose(
        run.history["objective"][-1], other.history["objective"][-1], rtol=1e-9
    )
    assert gap(run.result.shared, other.result.shared) < 1e-6
    assert gap(run.result.local, other.result.local) < 1e-6


@pytest.mark.slow
def test_the_objective_is_the_squared_error_of_the_result(x64):
    samples, *_ = draw_tensors(noise=0.3)
    algorithm = jf.pca.PerTucker(SHAPE, RANKS, LOCAL_RANKS)
    run = solve(algorithm, samples, rounds=600)
    shared, local = run.result
    rest = samples - samples @ projector(shared) - samples @ projector(local)
    np.testing.assert_allclose(
        run.history["objective"][-1], np.mean(np.sum(rest**2, axis=-1)), rtol=1e-10
    )
    np.testing.assert_allclose(shared.T @ local, 0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("adjoint", ["implicit", "unrolled"])
@pytest.mark.parametrize(("orthogonal", "rho"), [(None, 0.0), ((1,), 0.5)])
def test_derivatives_of_whole_runs_equal_central_differences(x64, adjoint, orthogonal, rho):
    rng = np.random.default_rng(2)
    means = np.outer([3.0, 0, 0], [1.0, 0]).ravel(), np.outer([0, 1.0, 1], [0, 2.0]).ravel()
    at = sum(rng.normal(size=(CLIENTS, 12, 1)) * mean for mean in means)
    at = jnp.asarray(at + 0.3 * rng.normal(size=at.shape))
    weights, direction = rng.normal(size=(6, 6)), rng.normal(size=at.shape)
    algorithm = jf.pca.PerTucker((3, 2), (1, 1), (1, 1), orthogonal_modes=orthogonal, proximal=rho)

    @jax.jit
    @jax.value_and_grad
    def loss(values):
        run = jf.rollout(
            algorithm,
            jf.Clients.from_samples(values),
            rounds=600,
            key=jax.random.key(0),
            adjoint=getattr(jf.adjoint, adjoint)(),
        )
        shared, local = run.result
        products = jnp.einsum("mdr,mer->de", local, local)
        return jnp.sum(weights * jnp.tanh(shared @ shared.T + products))

    near, far = (
        (loss(at + h * direction)[0] - loss(at - h * direction)[0]) / (2 * h) for h in (1e-5, 2e-5)
    )
    exact = jnp.sum(loss(at)[1] * direction)
    np.testing.assert_allclose(exact, (4 * near - far) / 3, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zeros", "constant", "alike", "one sample"])
def test_degenerate_samples(kind):
    samples, *_ = draw_tensors(noise=0.3)
    if kind == "zeros":
        samples[0] = 0
    elif kind == "constant":
        samples[:] = 2.0
    elif kind == "alike":
        samples[:] = samples[:1]
    else:
        samples = samples[:, :1]
    clients = jf.Clients.from_samples(samples.astype(np.float32))
    run = solve(jf.pca.PerTucker(SHAPE, RANKS, LOCAL_RANKS), clients, rounds=60)
    assert np.isfinite(run.history["objective"]).all()
    together = np.concatenate([np.stack([run.result.shared] * CLIENTS), run.result.local], axis=-1)
    identity = np.broadcast_to(np.eye(together.shape[-1]), (CLIENTS, *[together.shape[-1]] * 2))
    products = np.swapaxes(together, -1, -2) @ together
    np.testing.assert_allclose(products, identity, atol=200 * np.finfo(np.float32).eps)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-14, 1e14])
def test_is_scale_invariant(scale):
    samples = draw_tensors(noise=0.3)[0].astype(np.float32)
    runs = [
        solve(jf.pca.PerTucker(SHAPE, RANKS, LOCAL_RANKS), x, rounds=60)
        for x in (samples, np.float32(scale) * samples)
    ]
    assert gap(runs[0].result.shared, runs[1].result.shared) < 1e-4
    ratios = np.asarray(runs[1].history["objective"]) / scale / scale
    np.testing.assert_allclose(ratios, runs[0].history["objective"], rtol=1e-4)


@pytest.mark.slow
def test_clients_that_miss_rounds_stay_orthogonal(x64):
    samples, shared, _ = draw_tensors(noise=0.01, clients=6)
    run = solve(
        jf.pca.PerTucker(SHAPE, RANKS, LOCAL_RANKS),
        jf.Clients.from_samples(samples),
        rounds=90,
        participation=jf.participation.uniform(3),
        channel=jf.channel.quantize(8),
    )
    np.testing.assert_allclose(run.result.shared.T @ run.result.local, 0, atol=1e-12)
    assert gap(run.result.shared, shared) < 0.05


@pytest.mark.slow
def test_a_tolerance_waits_for_every_mode(x64):
    samples, *_ = draw_tensors(noise=0.3)
    # Factors of the last mode span everything, so its updates change nothing.
    algorithm = jf.pca.PerTucker(SHAPE, (2, 2, 4), (1, 1, 4), orthogonal_modes=(0, 1))
    clients = jf.Clients.from_samples(samples)
    run, longer = (solve(algorithm, clients, rounds=900, tol=tol) for tol in (1e-9, None))
    assert 3 < run.rounds < longer.rounds == 900
    end = longer.history["objective"][-1]
    assert abs(run.history["objective"][run.rounds - 1] / end - 1) < 1e-9
    assert gap(run.result.shared, longer.result.shared) < 1e-4


@pytest.mark.slow
def test_new_clients_and_warm_starts(x64):
    samples, shared, locals_ = draw_tensors(clients=6)
    algorithm = jf.pca.PerTucker(SHAPE, RANKS, LOCAL_RANKS)
    # The components of other algorithms have the same factors, if they are products of some.
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    found = jf.Personalized(jnp.asarray(shared @ turn), jnp.asarray(locals_[:4] @ turn))
    run = solve(algorithm, samples[:4], rounds=1, warm_start=found)
    assert gap(run.result.shared, shared) < 1e-7
    chex.assert_trees_all_close(projector(run.result.local), projector(locals_[:4]), atol=1e-6)
    new = jf.personalize(algorithm, run, jf.Clients.from_samples(samples[4:]), rounds=30)
    assert gap(new.local, locals_[4:]) < 1e-8


def test_bad_input_is_refused():
    samples, *_ = draw_tensors(noise=0.3)
    clients = jf.Clients.from_samples(samples.astype(np.float32))
    moments = jf.Clients.from_moments(np.stack([np.eye(FEATURES, dtype=np.float32)] * CLIENTS))
    gaps = jf.Clients.from_samples(samples.astype(np.float32), missing="mask")
    algorithm = jf.pca.PerTucker(SHAPE, RANKS, LOCAL_RANKS)
    result = jf.Personalized(jnp.eye(FEATURES, 4), jnp.stack([jnp.eye(FEATURES, 4)] * CLIENTS))
    other = jf.pca.PerTucker(SHAPE, RANKS, (1, 1, 1))
    for call, message in [
        (lambda: solve(algorithm, moments, rounds=1), "^clients: wanted .*samples.*got .*Moment"),
        (lambda: solve(algorithm, gaps, rounds=1), "^clients: wanted .*IncompleteSamples"),
        (
            lambda: solve(jf.pca.PerTucker((6, 5), (1, 1), (1, 1)), clients, rounds=1),
            r"^shape: wanted 120 entries, as many as features, got \(6, 5\)",
        ),
        (
            lambda: solve(other, clients, rounds=1, warm_start=result),
            r"^warm_start: wanted local components of shape \(3, 120, 1\), got \(3, 120, 4\)",
        ),
        (lambda: jf.pca.PerTucker((), (), ()), "^shape: wanted"),
        (lambda: jf.pca.PerTucker((6, 0), (1, 1), (1, 1)), "^shape: wanted"),
        (
            lambda: jf.pca.PerTucker((6, 5), (1, 1), (1, 1), orthogonal_modes=(0, 0)),
            "^orthogonal_modes: wanted different modes from 0 to 1",
        ),
        (
            lambda: jf.pca.PerTucker((6, 5), (1, 1), (1, 1), orthogonal_modes=()),
            "^orthogonal_modes: wanted",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
