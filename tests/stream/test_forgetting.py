"""Forgotten moments against NumPy, frequent directions against their bound, ids, derivatives."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.stream import Forgetting
from tests.helpers import gaussian, solve

FEATURES, RANK, RATE = 8, 4, 0.3
SPREAD = np.linspace(3, 0.3, FEATURES)


def batch(counts=(9, 15, 4), ids=None, seed=0, dtype=np.float32, **options):
    """New samples of clients with these ids."""
    clients = gaussian(counts, SPREAD, seed=seed, dtype=dtype, **options)
    return clients if ids is None else with_ids(clients, ids)


def with_ids(clients, ids):
    return jf.Clients(clients.data, jnp.asarray(ids, jnp.int32), clients.weights)


def after(rule, batches):
    clients = None
    for newer in batches:
        clients = rule.update(clients, newer)
    return clients


def matrices(clients):
    return np.asarray(jax.vmap(lambda moment: moment.matrix())(clients.data), float)


def tables(clients):
    """Each client's samples by its id, in double precision."""
    values, counts = np.asarray(clients.data.values, float), np.asarray(clients.data.count, int)
    each = zip(np.asarray(clients.ids), values, counts, strict=True)
    return {int(number): rows[:count] for number, rows, count in each}


def forgotten(batches, rate):
    """By NumPy, in double precision: each client's moment and effective number of samples."""
    weighted = {}  # of each client: its rows, and their weights
    for newer in batches:
        for number, rows in tables(newer).items():
            old, weights = weighted.get(number, (rows[:0], np.zeros(0)))
            share = len(rows) / (len(old) + len(rows)) if rate is None else rate
            share = share if len(old) else 1.0
            weights = [(1 - share) * weights, np.full(len(rows), share / len(rows))]
            weighted[number] = np.concatenate([old, rows]), np.concatenate(weights)
    moments = {number: (rows.T * w) @ rows for number, (rows, w) in weighted.items()}
    counts = {number: 1 / np.sum(w**2) for number, (_, w) in weighted.items()}
    return moments, counts


@pytest.mark.parametrize("rate", [RATE, 1.0, None])
def test_moments_are_those_of_weighted_samples(rate):
    batches = [batch(seed=seed) for seed in range(5)]
    found = after(Forgetting(rate), batches)
    moments, counts = forgotten(batches, rate)
    wanted = np.stack(list(moments.values()))
    np.testing.assert_allclose(matrices(found), wanted, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(found.counts, list(counts.values()), rtol=1e-5)
    traces = np.trace(wanted, axis1=1, axis2=2)
    np.testing.assert_allclose(found.data.trace, traces, rtol=1e-5)


def test_nothing_forgotten_is_all_samples_at_once(x64):
    batches = [batch(seed=seed, dtype=np.float64) for seed in range(3)]
    found = after(Forgetting(None), batches)
    assert found.data.dense.dtype == np.float64
    every = [tables(newer) for newer in batches]
    pooled = [np.concatenate([each[number] for each in every]) for number in range(3)]
    whole = Forgetting(None).update(None, jf.Clients.from_samples(pooled))
    chex.assert_trees_all_close(found, whole, rtol=1e-13)


def check_bound(exact, rows):
    """0 <= S - FᵀF <= the sum of S's eigenvalues beyond k, over l + 1 - k, for each k."""
    left = np.linalg.eigvalsh(exact - rows.T @ rows)
    values = np.linalg.eigvalsh(exact)[::-1]
    bounds = [values[k:].sum() / (RANK + 1 - k) for k in range(RANK + 1)]
    assert left[0] > -1e-12 * values[0]
    assert left[-1] <= min(bounds) * (1 + 1e-12)


@pytest.mark.parametrize("rate", [RATE, None])
def test_factors_are_within_the_bound_of_frequent_directions(rate, x64):
    # Spectra that are flat, where much is dropped, and clients with fewer samples than rows.
    for scale in (np.ones(FEATURES), SPREAD):
        batches = [gaussian((9, 15, 2), scale, seed=seed, dtype=np.float64) for seed in range(20)]
        found = after(Forgetting(rate, RANK), batches)
        chex.assert_shape(found.data.samples, (3, RANK, FEATURES))
        moments, counts = forgotten(batches, rate)
        for number, exact in moments.items():
            rows = found.data.samples[number] / np.sqrt(counts[number])
            check_bound(exact, np.asarray(rows))
        np.testing.assert_allclose(found.counts, list(counts.values()))
        traces = [np.trace(exact) for exact in moments.values()]
        np.testing.assert_allclose(found.data.trace, traces)


def test_few_directions_are_kept_exactly(x64):
    rng = np.random.default_rng(0)
    basis = rng.normal(size=(RANK, FEATURES))
    batches = [jf.Clients.from_samples(rng.normal(size=(2, 6, RANK)) @ basis) for _ in range(5)]
    exact = after(Forgetting(RATE), batches)
    np.testing.assert_allclose(
        matrices(after(Forgetting(RATE, RANK), batches)), matrices(exact), atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, RANK])
def test_clients_come_and_go_by_id(rank):
    rule = Forgetting(RATE, rank)
    batches = [
        batch((9, 15, 4), [5, 2, 7], 0),
        batch((6, 6), [9, 2], 1),
        batch((8, 3, 5), [7, 11, 5], 2),
    ]
    found = after(rule, batches)
    assert found.ids.tolist() == [5, 2, 7, 9, 11]
    first = rule.update(None, batches[1])
    # Client 9 was there once: its moment is as it came.
    mine = found.take([3]), first.take([0])
    chex.assert_trees_all_equal(mine[0].data, mine[1].data)
    if rank is None:
        moments, counts = forgotten(batches, RATE)
        wanted = np.stack([moments[number] for number in found.ids.tolist()])
        np.testing.assert_allclose(matrices(found), wanted, rtol=1e-5, atol=2e-6)
        wanted = [counts[number] for number in found.ids.tolist()]
        np.testing.assert_allclose(found.counts, wanted, rtol=1e-5)
    np.testing.assert_allclose(found.weights, np.full(5, 0.2), rtol=1e-6)


def test_weights_are_the_newest():
    old = batch((4, 4, 8), [0, 1, 2], weights=[1, 1, 2])
    new = batch((4, 4), [2, 3], 1, weights=[3, 1])
    found = Forgetting(RATE).update(Forgetting(RATE).update(None, old), new)
    # Relative to their means: 3/4 each of the old ones, 3/2 and 1/2 of the new ones.
    wanted = np.array([0.75, 0.75, 1.5, 0.5]) / 3.5
    np.testing.assert_allclose(found.weights, wanted, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, RANK])
def test_layouts_and_padding_change_nothing(rank):
    rule, counts = Forgetting(RATE, rank), (3, 40, 5, 21)
    padded = after(rule, [batch(counts, seed=seed) for seed in range(3)])
    buckets = after(rule, [batch(counts, seed=seed, bucket=1.1) for seed in range(3)])
    chex.assert_trees_all_close(matrices(padded), matrices(buckets), rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(padded.counts, buckets.counts)
    for place in range(4):
        alone = after(rule, [batch(counts, seed=seed).take([place]) for seed in range(3)])
        wanted = matrices(padded)[[place]]
        np.testing.assert_allclose(matrices(alone), wanted, rtol=1e-4, atol=1e-5)


def test_moments_are_taken_in_too():
    batches = [batch(seed=seed) for seed in range(2)]
    moments = [list(forgotten([newer], 1.0)[0].values()) for newer in batches]
    given = [jf.Clients.from_moments(np.stack(each), counts=[9, 15, 4]) for each in moments]
    wanted = after(Forgetting(RATE), batches)
    chex.assert_trees_all_close(after(Forgetting(RATE), given), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, RANK])
def test_derivatives_are_central_differences(rank, x64):
    """Of the shared components, by new samples and by the rate, through whole solves."""
    before = after(Forgetting(RATE, rank), [batch(dtype=np.float64)])
    newer = batch(seed=1, dtype=np.float64)
    algorithm = jf.pca.PerPCA(2, 1, solver="gradient", start="random", step_size=0.05)
    target = jnp.asarray(np.random.default_rng(2).normal(size=(FEATURES, FEATURES)))
    way = jax.random.normal(jax.random.key(1), newer.data.values.shape) * newer.data.mask[..., None]

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def objective(size, rate):
        moved = jf.Samples(newer.data.values + size * way, newer.data.count)
        today = jf.Clients(moved, newer.ids, newer.weights)
        clients = Forgetting(rate, rank).update(before, today)
        shared = solve(algorithm, clients, rounds=400).result.shared
        return jnp.sum(target * (shared @ shared.T))

    at, step = (jnp.zeros(()), jnp.asarray(RATE)), 1e-5
    _, slopes = objective(*at)
    for place, slope in enumerate(slopes):
        ends = [
            objective(*(x + sign * step * (place == i) for i, x in enumerate(at)))[0]
            for sign in (1, -1)
        ]
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize(
    ("rank", "unit", "warns"), [(3, 1e3, True), (3, 1, False), (None, 1e3, False)]
)
def test_rows_of_features_in_unlike_units_warn(rank, unit, warns, recwarn):
    x = np.random.default_rng(0).normal(size=(2, 30, 5)) * [1, unit, 1, 1, 1]
    rule = Forgetting(0.2, rank)
    clients = rule.update(None, jf.Clients.from_samples(x))
    rule.update(clients, jf.Clients.from_samples(x))
    found = [str(each.message) for each in recwarn if each.category is jf.UnitsWarning]
    assert bool(found) == warns
    assert all("keep matrices, with rank=None" in words for words in found)


def test_rates_are_swept_by_vmap():
    batches = [batch(seed=seed) for seed in range(2)]
    rates = jnp.asarray([0.1, 0.5])
    before = Forgetting(None).update(None, batches[0])
    found = jax.vmap(lambda rate: Forgetting(rate, None).update(before, batches[1]).data)(rates)
    for place, rate in enumerate(rates):
        each = after(Forgetting(float(rate)), batches).data
        mine = jax.tree.map(lambda x, place=place: x[place], found)
        chex.assert_trees_all_close(mine, each, rtol=1e-6, atol=1e-6)


ALGORITHMS = {
    "PerPCA, gradient": jf.pca.PerPCA(2, 1, solver="gradient"),
    "PerPCA": jf.pca.PerPCA(2, 1),
    "SubspaceIteration": jf.pca.SubspaceIteration(2),
    "BlockLanczos": jf.pca.BlockLanczos(2),
    "HierarchicalPCA learned": jf.pca.HierarchicalPCA(2, 0.5),
    "OneShot": jf.pca.OneShot(2, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_take_factors_as_they_take_matrices(name, x64):
    rows = after(Forgetting(RATE, RANK), [batch(seed=s, dtype=np.float64) for s in range(3)])
    # The energy that the rows have lost is in the trace alone.
    moment = jax.vmap(lambda dense, *rest: jf.linalg.Moment(dense, None, *rest))
    exact = moment(jnp.asarray(matrices(rows)), rows.counts, rows.data.trace)
    dense = jf.Clients(exact, rows.ids, rows.weights)
    results = [solve(ALGORITHMS[name], each, rounds=4) for each in (rows, dense)]
    projectors = [each.result.shared @ each.result.shared.T for each in results]
    chex.assert_trees_all_close(*projectors, atol=1e-8)
    chex.assert_trees_all_close(*(each.history["objective"] for each in results), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mapped", "rank"),
    [
        (jf.backend.chunked(2), None),
        (jf.backend.shard(), RANK),
        (jf.backend.chunked(2), RANK),
        (jf.backend.shard(), None),
    ],
)
def test_backends_give_the_same(mapped, rank):
    clients = after(Forgetting(RATE, rank), [batch((9, 15, 4, 7), seed=seed) for seed in range(2)])
    key, algorithm = jax.random.key(0), jf.pca.PerPCA(2, 1, solver="gradient")
    wanted = jf.fit(algorithm, clients, rounds=5, key=key)
    found = jf.fit(algorithm, clients, rounds=5, key=key, backend=mapped)
    chex.assert_trees_all_close(found.result, wanted.result, atol=1e-5)
    wanted = jf.update(wanted, clients, rounds=3, key=key)
    found = jf.update(found, clients, rounds=3, key=key, backend=mapped)
    chex.assert_trees_all_close(found.result, wanted.result, atol=1e-5)


UNIT = jf.Clients.from_moments(np.eye(3, dtype=np.float32)[None])
VIEWS = jf.gcca.Views.from_arrays([np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)])


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (r"^rate: wanted a positive", lambda: Forgetting(0.0)),
        (r"^rate: wanted a number in \(0, 1\]", lambda: Forgetting(1.5)),
        (r"^rate: wanted a number in \(0, 1\]", lambda: Forgetting(jnp.asarray([0.5, 2.0]))),
        (r"^rank: wanted", lambda: Forgetting(0.5, 0)),
        (r"^rank: wanted at most the 8 features", lambda: Forgetting(0.5, 9).update(None, batch())),
        (r"^newer: wanted jaxfed.Clients", lambda: Forgetting(0.5).update(None, np.ones(3))),
        (
            r"^newer: wanted Clients.from_samples or .* got data of type View",
            lambda: Forgetting(0.5).update(None, VIEWS),
        ),
        (
            r"^rank: wanted None where newer holds matrices",
            lambda: Forgetting(0.5, 2).update(None, UNIT),
        ),
        (
            r"^clients: wanted moments of shape .* got Samples",
            lambda: Forgetting(0.5).update(batch(), batch()),
        ),
        (
            r"^clients: wanted moments of shape .* got \(\(3, 3\), 'float32'\)",
            lambda: Forgetting(0.5).update(UNIT, batch()),
        ),
        (
            r"^clients: wanted moments of shape",
            lambda: Forgetting(0.5, 3).update(Forgetting(0.5, 4).update(None, batch()), batch()),
        ),
        (
            r"^clients: wanted moments of shape",
            lambda: Forgetting(0.5).update(Forgetting(0.5, 4).update(None, batch()), batch()),
        ),
    ],
)
def test_bad_input_is_refused(error, call):
    with pytest.raises(ValueError, match=error):
        call()


def test_sources_are_refused():
    source = jf.Clients.from_source([np.ones((4, 3), np.float32)])
    with pytest.raises(ValueError, match=r"Forgetting\.update"):
        Forgetting(0.5).update(None, source)


def test_traced_clients_must_be_as_many():
    before = Forgetting(0.5).update(None, batch())
    with pytest.raises(ValueError, match=r"^newer: wanted the 3 clients of before"):
        jax.jit(lambda *clients: Forgetting(0.5).update(*clients))(before, batch((3, 4)))
