"""The block Lanczos iteration: against dense Krylov spaces, the exact solution, and its rivals."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.pca import BlockLanczos
from tests import helpers
from tests.references import krylov as reference

FEATURES, RANK, ROUNDS = 24, 3, 30
COUNTS = (40, 30, 35, 25)

pytestmark = pytest.mark.usefixtures("x64")
decaying = functools.partial(helpers.decaying_samples, COUNTS, FEATURES)


def random_start(seed=1, features=FEATURES, rank=RANK):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(features, rank)))[0]


def lanczos(samples, *, start=None, memory=None, rank=RANK, rounds=ROUNDS, backend=None):
    clients = jf.Clients.from_samples(samples)
    # Always given, so that tests of a shape share a program.
    start = random_start(features=clients.features, rank=rank) if start is None else start
    warm = jf.Personalized(jnp.asarray(start, clients.weights.dtype), None)
    algorithm = BlockLanczos(rank, memory=memory)
    return helpers.solve(algorithm, clients, rounds=rounds, warm_start=warm, backend=backend)


def distance(z, w):
    """Frobenius norm of the difference of two projectors, without cancellation."""
    z, w = np.asarray(z, float), np.asarray(w, float)
    return np.sqrt(np.sum((z - w @ (w.T @ z)) ** 2) + np.sum((w - z @ (z.T @ w)) ** 2))


def error(solution, samples, rank=RANK):
    return distance(solution.result.shared, reference.principal_components(samples, rank))


# --- what it computes ------------------------------------------------------------------------


def test_every_round_is_the_best_within_the_krylov_space():
    samples, start = decaying(), random_start()
    c = reference.pooled(samples)
    history = lanczos(samples, start=start).history
    for blocks in range(1, FEATURES // RANK + 1):
        best = reference.best_within(c, reference.krylov_basis(c, start, blocks), RANK)
        captured = reference.captured(c, best)
        np.testing.assert_allclose(history["captured"][blocks - 1], captured, rtol=1e-12)
        violation = reference.kkt_violation(c, best)
        np.testing.assert_allclose(
            history["kkt_violation"][blocks - 1], violation, rtol=1e-6, atol=1e-14
        )
        left = (np.trace(c) - captured) / sum(COUNTS)
        np.testing.assert_allclose(history["objective"][blocks - 1], left, rtol=1e-9)


@pytest.mark.slow
def test_the_result_is_a_product_with_the_best_within_the_space():
    samples, start = decaying(), random_start()
    c = reference.pooled(samples)
    basis = reference.krylov_basis(c, start, 4)
    better = np.linalg.qr(c @ reference.best_within(c, basis, RANK))[0]
    found = lanczos(samples, start=start, rounds=4).result.shared
    assert distance(found, better) < 1e-6  # it shifts C by the square root of rounding
    assert error(lanczos(samples, start=start, rounds=4), samples) > 1e-3


def hard():
    """Data of one shape that are hard in different ways."""
    rng = np.random.default_rng(3)
    plain = decaying()
    yield "plain", plain, RANK
    yield "zero client", [plain[0], 0 * plain[1], plain[2], plain[3]], RANK
    yield "scales", [s * a for s, a in zip((1e-6, 1.0, 1e3, 1e6), plain, strict=True)], RANK
    yield "one sample of a client", [plain[0], plain[1][:1], plain[2][:2], plain[3]], RANK
    thin = [a[:, :5] @ rng.normal(size=(5, FEATURES)) for a in plain]
    yield "five dimensions", thin, RANK
    yield "tiny", [1e-30 * a for a in plain], RANK
    thinner = [a[:, :2] @ rng.normal(size=(2, FEATURES)) for a in plain]
    yield "less than the rank", thinner, 2
    yield "nothing", [0 * a for a in plain], 0
    yield "all alike", np.split(np.tile(np.eye(FEATURES), (6, 1))[:130], np.cumsum(COUNTS)[:-1]), 0


@pytest.mark.parametrize("memory", [None, 4])
@pytest.mark.parametrize(("samples", "unique"), [pytest.param(a, r, id=n) for n, a, r in hard()])
def test_the_solution_is_that_of_the_pooled_matrix(samples, unique, memory):
    solution = lanczos(samples, memory=memory)
    z = np.asarray(solution.result.shared)
    np.testing.assert_allclose(z.T @ z, np.eye(RANK), atol=1e-13)
    for name, values in solution.history.items():
        # In the first round there is no previous value to compare with.
        assert np.isfinite(values[1:] if name == "stopping_measure" else values).all(), name
    exact = reference.principal_components(samples, unique)  # the part of it that is unique
    assert np.linalg.norm(exact - z @ (z.T @ exact)) < 1e-9
    c = reference.pooled(samples)
    captured = np.linalg.eigvalsh(c)[::-1][:RANK].sum()
    np.testing.assert_allclose(solution.history["captured"][-1], captured, rtol=1e-12)
    assert reference.captured(c, z) >= captured * (1 - 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 5, 6])
def test_any_rank(rank):
    samples = helpers.decaying_samples(COUNTS, 6)
    solution = lanczos(samples, rank=rank, rounds=8)
    assert error(solution, samples, rank) < 1e-12
    # The blocks span all six features after this many rounds.
    assert solution.history["kkt_violation"][-(-6 // rank) - 1] < 1e-14


@pytest.mark.slow
def test_single_precision():
    single = [a.astype(np.float32) for a in decaying()]
    double = [a.astype(np.float64) for a in single]
    for memory, tolerance in ((None, 2e-5), (4, 1e-4)):
        solution = lanczos(single, memory=memory)
        z = np.asarray(solution.result.shared)
        assert z.dtype == np.float32
        assert np.linalg.norm(z.T @ z - np.eye(RANK)) <= 1e-5
        assert error(solution, double) < tolerance
        assert reference.kkt_violation(reference.pooled(double), z.astype(float)) < 5e-7


def test_a_start_in_a_wrong_invariant_subspace_is_left():
    samples = decaying()
    wrong = np.linalg.svd(np.concatenate(samples))[2][-RANK:].T  # invariant, but the last
    solution = lanczos(samples, start=wrong)
    assert solution.history["kkt_violation"][0] < 1e-15
    assert error(solution, samples) < 1e-9


def test_nothing_changes_once_converged():
    samples = decaying()
    history = lanczos(samples).history
    converged = FEATURES // RANK
    for name in ("captured", "kkt_violation", "objective"):
        assert len(set(np.asarray(history[name][converged:]))) == 1, name
    assert len(set(np.asarray(history["captured"][:converged]))) == converged


# --- how fast --------------------------------------------------------------------------------


def rounds_needed(algorithm, samples, rounds, key, tol=2e-6):
    """Rounds until the models after them have a scaled KKT violation of at most `tol`."""
    c = jnp.asarray(reference.pooled(samples))
    energy = jnp.maximum(jnp.trace(c), 1e-300)

    def violation(result):
        product = c @ result.shared
        rest = product - result.shared @ (result.shared.T @ product)
        return {"violation": jnp.linalg.norm(rest) / energy}

    clients = jf.Clients.from_samples(samples)
    history = jf.fit(algorithm, clients, rounds=rounds, key=key, metrics=violation).history
    met = np.flatnonzero(history["violation"] <= tol)
    return met[0] + 1 if len(met) else np.inf


@pytest.mark.slow
def test_the_hardest_setting_of_the_paper_in_a_few_rounds(key):
    # One client with the pooled matrix in its own axes: neither a rotation nor the split over
    # clients changes a sum of products.
    samples = [np.diag(1.01 ** -np.arange(1000.0))]
    solution = jf.fit(
        BlockLanczos(10), jf.Clients.from_samples(samples), rounds=40, key=key, tol=1e-10
    )
    rounds = reference.rounds_by_change(solution.history["captured"])
    assert rounds <= 20  # subspace iteration takes 305 to 388
    assert solution.history["kkt_violation"][rounds - 1] <= 2e-6
    np.testing.assert_allclose(
        solution.history["captured"][-1], np.sum(1.01 ** (-2.0 * np.arange(10))), rtol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "features", "rank", "rivals"),
    [
        pytest.param(
            (50,) * 8, 60, 4, (jf.pca.SubspaceIteration, jf.pca.LocalPower, jf.pca.FAPS), id="plain"
        ),
        pytest.param((1,) * 128, 60, 4, (jf.pca.SubspaceIteration,), id="one sample a client"),
        pytest.param(
            (40, 3, 200, 2), 30, 29, (jf.pca.SubspaceIteration,), id="almost all components"
        ),
    ],
)
def test_a_quarter_of_the_rounds_of_the_rivals(counts, features, rank, rivals, key):
    samples = helpers.decaying_samples(counts, features, 1.05, seed=5)
    mine = rounds_needed(BlockLanczos(rank), samples, 20, key)
    for rival in rivals:
        assert mine <= rounds_needed(rival(rank), samples, 120, key) / 4


@pytest.mark.slow
def test_a_tolerance_stops_it(key):
    samples = helpers.decaying_samples((50,) * 4, 60, 1.05, seed=6)
    for stop, tol in (("kkt", 1e-8), ("objective", 1e-10)):
        clients = jf.Clients.from_samples(samples)
        solution = jf.fit(BlockLanczos(4, stop=stop), clients, rounds=60, key=key, tol=tol)
        assert 3 < solution.rounds < 14
        captured = solution.history["captured"]
        change = abs(captured[-1] - captured[-2]) / captured[-1]
        measure = (
            change if stop == "objective" else max(change, solution.history["kkt_violation"][-1])
        )
        assert measure <= tol
        # The violation that the server measures is that of the clients' data.
        z = np.asarray(solution.result.shared)
        assert reference.kkt_violation(reference.pooled(samples), z) < 1e-6


# --- derivatives -----------------------------------------------------------------------------

SMALL = (4, 8, 12)  # clients, samples, features


@functools.cache
def differentiated():
    """What two components leave of other data, with the derivative through restarts."""
    held_out = jnp.asarray(np.random.default_rng(9).normal(size=(3, SMALL[-1])))
    clients = jf.Clients.from_samples(np.ones(SMALL))

    def left(values, rounds):
        changed = eqx.tree_at(lambda c: c.data.values, clients, values)
        z = jf.rollout(
            BlockLanczos(2, memory=3), changed, rounds=rounds, key=jax.random.key(2)
        ).result.shared
        return jnp.sum((held_out - held_out @ z @ z.T) ** 2)

    return held_out, jax.jit(jax.value_and_grad(left), static_argnums=1)


def spread(rng):
    return rng.normal(size=SMALL) * 1.4 ** -np.arange(SMALL[-1])


def with_a_zero_client(rng):
    return spread(rng) * np.array([1.0, 0.0, 1.0, 1.0])[:, None, None]


def with_few_dimensions(rng):
    return np.einsum("mnk,kd->mnd", rng.normal(size=(*SMALL[:2], 4)), rng.normal(size=(4, 12)))


@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [spread, with_a_zero_client, with_few_dimensions])
def test_derivatives_are_finite_differences(make, rounds):
    held_out, both = differentiated()
    rng = np.random.default_rng(4)
    values, direction = make(rng), rng.normal(size=SMALL)
    if make is with_few_dimensions:
        direction = np.einsum("mnd,de->mne", values, rng.normal(size=(12, 12)))  # stay within
    step = 1e-5
    ahead, behind = (both(values + t * direction, rounds)[0] for t in (step, -step))
    change = (ahead - behind) / (2 * step)
    by_rule = float((both(values, rounds)[1] * direction).sum())
    np.testing.assert_allclose(by_rule, change, rtol=1e-5)
    assert abs(by_rule) > 1e-2
    if rounds == 40:  # and those of the exact components

        def exact(values):
            z = reference.principal_components(list(values), 2)
            return np.sum((held_out - held_out @ z @ z.T) ** 2)

        wanted = (exact(values + step * direction) - exact(values - step * direction)) / (2 * step)
        np.testing.assert_allclose(by_rule, wanted, rtol=1e-5)


# --- bad input -------------------------------------------------------------------------------


def test_bad_input_is_refused(key):
    clients = jf.Clients.from_samples(decaying())
    with pytest.raises(ValueError, match="25 orthonormal components do not fit into 24 features"):
        jf.fit(BlockLanczos(25), clients, rounds=1, key=key)
    start = jf.Personalized(jnp.zeros((FEATURES, 2)), None)
    with pytest.raises(ValueError, match="warm_start: wanted shared components of shape"):
        jf.fit(BlockLanczos(RANK), clients, rounds=1, key=key, warm_start=start)


def test_needs_every_client(key):
    clients = jf.Clients.from_samples(np.random.default_rng(0).normal(size=(4, 9, 6)))
    with pytest.raises(ValueError, match=r"^participation: BlockLanczos needs every client"):
        jf.fit(
            jf.pca.BlockLanczos(2),
            clients,
            rounds=2,
            key=key,
            participation=jf.participation.uniform(2),
        )
