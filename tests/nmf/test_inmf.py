"""Integrative NMF: its rounds, where they end, what is recovered, and sweeps in one program."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import nnls

import jaxfed as jf
from bench.oracles import inmf as oracle
from bench.tables.inmf import KINDS
from jaxfed.nmf._nonnegative import nonnegative_least_squares
from jaxfed.testing import check_algorithm
from tests.helpers import solve
from tests.references import inmf as reference

KEPT = json.loads(oracle.NUMBERS.read_text(encoding="utf-8"))
RANK, PENALTY = oracle.RANK, oracle.PENALTY
SLOW = pytest.mark.slow
OTHERS = [kind for kind in KINDS if kind != "alike clients"]


def warm(case):
    return jf.Personalized(jnp.asarray(case.shared), jnp.asarray(np.stack(case.locals_)))


def with_gaps(samples, share, seed=0):
    """Some entries are missing, but none of a sample's own feature."""
    rng = np.random.default_rng(seed)
    masks = []
    for x in samples:
        own = np.arange(len(x))[:, None] % x.shape[1] == np.arange(x.shape[1])
        masks.append((rng.random(x.shape) > share) | own)
    return masks, [np.where(m, x, np.nan) for m, x in zip(masks, samples, strict=True)]


def objective(samples, result, penalty=PENALTY):
    """The mean over clients at the best loadings."""
    shared, local = (np.asarray(part) for part in result)
    total = 0
    for x, v in zip(samples, local, strict=True):
        seen = ~np.isnan(x)
        h = reference.loadings(x, seen, shared.T, v.T, penalty)
        total += reference.objective(x, seen, shared.T, v.T, h, penalty)
    return total / len(samples)


@pytest.mark.parametrize("share", [0, 0.25])
def test_rounds_equal_the_reference(x64, share):
    case = oracle.draw(1)
    masks, samples = with_gaps(case.samples, share)
    start = case.shared.T, [v.T for v in case.locals_]
    filled = [np.nan_to_num(x) for x in samples]
    w, vs, objectives = reference.rounds(filled, masks, *start, PENALTY, 12)
    clients = jf.Clients.from_samples(samples, missing="mask" if share else "refuse")
    run = solve(jf.nmf.INMF(RANK, PENALTY), clients, rounds=12, warm_start=warm(case))
    np.testing.assert_allclose(run.history["objective"], objectives, rtol=1e-10)
    lengths = np.linalg.norm(w, axis=1)
    np.testing.assert_allclose(run.result.shared, w.T / lengths, atol=1e-10)
    for found, wanted in zip(run.result.local, vs, strict=True):
        np.testing.assert_allclose(found, wanted.T / lengths, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_rounds_and_results_match_the_authors(x64, seed):
    case, kept = oracle.draw(seed), KEPT["draws"][seed]
    shared = np.array(kept["shared"])
    lengths = np.linalg.norm(shared, axis=0)
    # Their batches are proportional to the clients' samples, each of which counts the same.
    weights = 1 / np.array([len(x) for x in case.samples])
    clients = jf.Clients.from_samples(case.samples, weights=weights)
    algorithm = jf.nmf.INMF(RANK, PENALTY, batches=oracle.BATCHES)
    rounds = oracle.BATCHES * oracle.PASSES
    run = solve(algorithm, clients, rounds=rounds, warm_start=warm(case))
    np.testing.assert_allclose(run.server.T, shared, atol=1e-8)
    np.testing.assert_allclose(run.result.local, np.array(kept["locals"]) / lengths, atol=1e-8)
    loadings = jf.nmf.transform(run, case.samples)
    for found, wanted in zip(loadings, kept["loadings"], strict=True):
        np.testing.assert_allclose(found, np.array(wanted) * lengths, atol=1e-8)

    clients = jf.Clients.from_samples(case.samples)
    run = solve(jf.nmf.INMF(RANK, PENALTY), clients, rounds=3000, warm_start=warm(case))
    total = len(case.samples) * run.history["objective"][-1]
    assert total <= kept["least_objective"] * (1 + 1e-6)


@pytest.mark.parametrize("share", [0, 0.25])
def test_the_objective_is_that_of_the_result_and_never_rises(x64, share):
    _, samples = with_gaps(oracle.draw(2).samples, share)
    clients = jf.Clients.from_samples(samples, missing="mask")
    run = solve(jf.nmf.INMF(RANK, PENALTY), clients, rounds=800)
    objectives = np.asarray(run.history["objective"])
    assert (np.diff(objectives) <= 1e-12 * objectives[0]).all()
    assert objectives[-1] < 0.02 * np.mean([np.nansum(x**2) for x in samples])
    np.testing.assert_allclose(objective(samples, run.result), objectives[-1], rtol=1e-6)


@pytest.mark.slow
def test_one_component_without_penalty_is_the_leading_singular_vector(x64):
    samples = oracle.draw(0).samples
    # Perron and Frobenius: it has no negative entry. Local parts of any size can replace W.
    run = solve(jf.nmf.INMF(1, 0.0), samples, rounds=200)
    shared, local = run.result
    for x, v in zip(samples, local, strict=True):
        found = (shared + v)[:, 0]
        wanted = np.linalg.svd(x)[2][0]
        np.testing.assert_allclose(found / np.linalg.norm(found), np.abs(wanted), atol=1e-8)


@pytest.mark.slow
def test_a_large_penalty_leaves_no_local_parts(x64):
    samples = oracle.draw(0).samples
    run = solve(jf.nmf.INMF(1, 1e9), samples, rounds=300)
    wanted = np.abs(np.linalg.svd(np.concatenate(samples))[2][:1].T)
    np.testing.assert_allclose(run.result.shared, wanted, atol=1e-6)
    np.testing.assert_allclose(run.result.local, 0, atol=1e-6)


@pytest.mark.slow
def test_ranks_and_penalties_share_one_program(x64):
    clients = jf.Clients.from_samples(oracle.draw(0).samples)
    settings = [(k, penalty) for k in (1, 4) for penalty in (0.5, 5.0)]
    algorithms = [jf.nmf.INMF(4, penalty, active_rank=k) for k, penalty in settings]
    runs = jf.sweep(algorithms, clients, keys=jax.random.key(0), rounds=30)
    for i, (k, penalty) in enumerate(settings):
        alone = solve(jf.nmf.INMF(k, penalty), clients, rounds=30)
        found = jax.tree.map(lambda x, i=i: x[i], runs.result)
        assert not found.shared[:, k:].any() and not found.local[..., k:].any()
        kept = jf.Personalized(found.shared[:, :k], found.local[..., :k])
        chex.assert_trees_all_close(kept, alone.result, atol=1e-8)


@pytest.mark.slow
def test_held_out_tiles_choose_the_rank(x64):
    rng = np.random.default_rng(4)
    shared = rng.gamma(0.3, size=(3, 24))
    samples = [
        rng.gamma(0.5, size=(40, 3)) @ (shared + 0.1 * rng.gamma(0.3, size=shared.shape))
        + 0.3 * rng.random((40, 24))
        for _ in range(3)
    ]
    rows, columns = np.arange(40)[:, None] // 10, np.arange(24) // 6
    tiles = (rows + columns) % 4 == 0
    gaps = [np.where(tiles, np.nan, x) for x in samples]
    clients, given = jf.Clients.from_samples(gaps, missing="mask"), jnp.asarray(gaps)

    def held_out(rank):
        algorithm = jf.nmf.INMF(6, 1.0, active_rank=rank)
        run = jf.rollout(algorithm, clients, rounds=200, key=jax.random.key(0))
        found = jf.nmf.complete(run, given)
        return {"error": jnp.mean(jnp.where(tiles, found - jnp.asarray(samples), 0) ** 2)}

    found = jf.grid(held_out, {"rank": [1, 2, 3, 4, 6]})
    assert found["error"].idxmin("rank") == 3


@pytest.mark.parametrize("kind", ["alike clients", *(pytest.param(k, marks=SLOW) for k in OTHERS)])
def test_the_default_start_reaches_the_best_of_random_ones(kind):
    """Of random starts, up to a fifth end further away, at up to eleven times the best."""
    rank, drawn = KINDS[kind]
    samples = [x.astype(np.float32) for x in drawn(np.random.default_rng(0))]
    clients = jf.Clients.from_samples(samples)

    def least(algorithm, rounds, starts):
        keys = jax.random.split(jax.random.key(1), starts)
        return jf.sweep(algorithm, clients, rounds=rounds, keys=keys).history["objective"][:, -1]

    rounds = 1000 if kind == "large own parts" else 100  # it converges slowly
    first, again = least(jf.nmf.INMF(rank), rounds, 2)
    assert first == again  # it does not depend on the key
    assert first <= 1.02 * least(jf.nmf.INMF(rank, start="random"), 300, 10).min()


@pytest.mark.slow
def test_batches_end_near_the_least_objective(x64):
    samples = oracle.draw(1).samples
    clients = jf.Clients.from_samples(samples)
    whole = solve(jf.nmf.INMF(RANK, PENALTY), clients, rounds=3000, warm_start=warm(oracle.draw(1)))
    batches = solve(jf.nmf.INMF(RANK, PENALTY, batches=4), clients, rounds=500)
    least = whole.history["objective"][-1]
    assert objective(samples, batches.result) < 1.02 * least


@pytest.mark.slow
@pytest.mark.parametrize(
    "checks",
    [("structure", "padding"), pytest.param(("source", "buckets", "gradients"), marks=SLOW)],
)
def test_the_contract_for_missing_entries(x64, checks):
    _, gaps = with_gaps(oracle.draw(0).samples, 0.2)
    _, others = with_gaps(oracle.draw(1).samples, 0.2)
    report = check_algorithm(
        jf.nmf.INMF(2, PENALTY, batches=3),
        jf.Clients.from_samples(gaps, missing="mask"),
        checks=checks,
        rounds=9,
        others=jf.Clients.from_samples(others, missing="mask"),
        deterministic=True,
    )
    assert not report.skipped


@SLOW
def test_derivatives_of_whole_runs_equal_central_differences(x64):
    samples = [jnp.asarray(x) for x in oracle.draw(1).samples]
    rng = np.random.default_rng(0)
    by_shared, by_local = (
        rng.normal(size=s) for s in ((oracle.FEATURES, RANK), (3, oracle.FEATURES, RANK))
    )

    @jax.jit
    @jax.value_and_grad
    def loss(at):
        values, penalty = at
        run = jf.rollout(
            jf.nmf.INMF(RANK, penalty),
            jf.Clients.from_samples(values),
            rounds=1000,
            key=jax.random.key(0),
            adjoint=jf.adjoint.implicit(),
        )
        shared, local = run.result
        return jnp.sum(by_shared * jnp.tanh(shared)) + jnp.sum(by_local * jnp.tanh(local))

    at = samples, jnp.asarray(PENALTY)
    direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), at)
    exact = sum(
        jnp.sum(a * b)
        for a, b in zip(jax.tree.leaves(loss(at)[1]), jax.tree.leaves(direction), strict=True)
    )

    def value(step):
        return loss(jax.tree.map(lambda x, u: x + step * u, at, direction))[0]

    near, far = ((value(h) - value(-h)) / (2 * h) for h in (1e-5, 2e-5))
    np.testing.assert_allclose(exact, (4 * near - far) / 3, rtol=1e-7)


def test_non_negative_least_squares_equal_scipys(x64):
    rng = np.random.default_rng(0)
    for condition in (1, 1e2, 1e4):
        left = rng.random((40, 12)) @ np.diag(np.geomspace(1, condition**-0.5, 12))
        right = rng.normal(size=(30, 40)) + 0.3
        gram, products = jnp.asarray(left.T @ left), jnp.asarray(right @ left)
        found = jax.vmap(nonnegative_least_squares, (None, 0))(gram, products)
        wanted = [nnls(left, one)[0] for one in right]
        np.testing.assert_allclose(found, wanted, atol=1e-10 * np.max(wanted))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["zeros", "a client of zeros", "constant", "alike", pytest.param("one sample", marks=SLOW)],
)
def test_degenerate_samples(kind):
    samples = [x.astype(np.float32) for x in oracle.draw(0).samples]
    if kind == "zeros":
        samples = [0 * x for x in samples]
    elif kind == "a client of zeros":
        samples[1] = 0 * samples[1]
    elif kind == "constant":
        samples = [np.ones_like(x) for x in samples]
    elif kind == "one sample":
        samples[0] = samples[0][:1]
    else:
        samples = [samples[0]] * 3
    run = solve(jf.nmf.INMF(RANK, PENALTY), samples, rounds=30)
    # The stopping measure is infinite in the first rounds, which do not tell it.
    history = {name: x for name, x in run.history.items() if name != "stopping_measure"}
    chex.assert_tree_all_finite((run.result, history))
    objectives = np.asarray(run.history["objective"])
    size = np.mean([np.sum(x.astype(float) ** 2) for x in samples])
    assert (np.diff(objectives) <= 1e-4 * size).all()
    if kind == "zeros":
        np.testing.assert_array_equal(objectives, 0)
    elif kind == "constant":
        assert objectives[-1] < 1e-2 * size
    assert all(np.isfinite(h).all() for h in jf.nmf.transform(run, samples))


@pytest.mark.slow
def test_new_clients_and_completed_samples(x64):
    case = oracle.draw(1)
    clients = jf.Clients.from_samples(case.samples[:2])
    algorithm = jf.nmf.INMF(RANK, PENALTY)
    run = solve(algorithm, clients, rounds=500)
    new = jf.personalize(algorithm, run, jf.Clients.from_samples(case.samples[2:]), rounds=100)
    chex.assert_trees_all_equal(new.shared, run.result.shared)
    assert objective(case.samples[2:], new) < 0.02 * np.sum(case.samples[2] ** 2)

    masks, gaps = with_gaps(case.samples[:2], 0.1)
    completed = jf.nmf.complete(run, gaps)
    loadings = jf.nmf.transform(run, gaps)
    for i, (mask, x, found) in enumerate(zip(masks, case.samples, completed, strict=False)):
        fitted = loadings[i] @ (run.result.shared + run.result.local[i]).T
        np.testing.assert_allclose(found, np.where(mask, x, fitted), atol=1e-12)
    one = jf.nmf.transform(run.result, gaps[1], client=1, penalty=PENALTY)
    np.testing.assert_allclose(one, loadings[1], atol=1e-12)


@pytest.mark.slow
def test_loadings_within_other_programs(x64):
    """The same values where `jit` closes over everything, and derivatives."""
    rng = np.random.default_rng(0)
    samples, shared, local = (jnp.asarray(rng.random(n)) for n in ((2, 9, 5), (5, 2), (2, 5, 2)))

    def loadings(samples, penalty=PENALTY):
        return jf.nmf.transform(jf.Personalized(shared, local), samples, penalty=penalty)

    wanted = loadings(samples)
    chex.assert_trees_all_close(jax.jit(lambda: loadings(samples))(), wanted, rtol=1e-12)
    chex.assert_trees_all_close(jax.jit(loadings)(samples), wanted, rtol=1e-12)
    change = jax.jacfwd(lambda penalty: loadings(samples, penalty))(PENALTY)
    step = 1e-5
    difference = loadings(samples, PENALTY + step) - loadings(samples, PENALTY - step)
    chex.assert_trees_all_close(change, difference / (2 * step), rtol=1e-6, atol=1e-9)
    gradient = jax.grad(lambda penalty: loadings(samples, penalty).sum())(PENALTY)
    chex.assert_trees_all_close(gradient, change.sum(), rtol=1e-9)


def test_bad_input_is_refused():
    samples = [x.astype(np.float32) for x in oracle.draw(0).samples]
    clients = jf.Clients.from_samples(samples)
    algorithm = jf.nmf.INMF(2)
    run = solve(algorithm, clients, rounds=1)
    below = jf.Clients.from_samples([x - 1 for x in samples])
    moments = jf.Clients.from_moments(np.stack([np.eye(4)] * 3))
    for call, message in [
        (lambda: jf.nmf.INMF(2, start="nndsvd"), "^start: wanted one of"),
        (
            lambda: jf.fit(algorithm, below, rounds=1, key=jax.random.key(0)),
            "^clients: wanted samples without negative",
        ),
        (lambda: solve(algorithm, moments, rounds=1), "^clients: wanted samples, .* Moment"),
        (lambda: solve(jf.nmf.INMF(13), clients, rounds=1), "^rank: 13 components do not fit"),
        (
            lambda: solve(jf.nmf.INMF(3), clients, rounds=1, warm_start=run.result),
            r"^warm_start: wanted shared components of shape \(12, 3\), got \(12, 2\)",
        ),
        (lambda: jf.nmf.transform(run.result, samples), "^penalty: wanted the λ"),
        (lambda: jf.nmf.transform(run, samples[:2]), "^samples: wanted 3 clients"),
        (lambda: jf.nmf.transform(run, samples[0], client=3), "^client: wanted one of the"),
        (lambda: jf.nmf.transform("run", samples), "^fitted: wanted what INMF learned"),
        (
            lambda: jf.rollout(
                jf.nmf.INMF(2, batches=2),
                clients,
                rounds=1,
                key=jax.random.key(0),
                adjoint=jf.adjoint.implicit(),
            ),
            "^adjoint: wanted INMF",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
