"""Generalized CCA: views, MAX-VAR, its one-round start, its metrics."""

import functools
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO

import jaxfed as jf
from jaxfed.gcca._chance import chance_agreement
from jaxfed.gcca.factors import factored
from jaxfed.gcca.maxvar import _largest_eigenvalue
from papers.communication import bits_per_variable, compression_ratio, rounds_to
from papers.synthetic import gcca_synthetic
from tests.helpers import fit, solve
from tests.references import gcca as reference

RANK, ROUNDS = 2, 50
FEATURES = (5, 7, 4)


def arrays(entities=30, features=FEATURES, noise=0.5, dtype: Any = np.float64):
    """Views with two strong latent dimensions, a weak one and noise: a clear gap after two."""
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(entities, 3)) * [1, 1, 0.2]
    return [
        (latent @ rng.normal(size=(3, d)) + noise * rng.normal(size=(entities, d))).astype(dtype)
        for d in features
    ]


def start(views, seed=1):
    """A feasible start for views of these shapes: G and the list of Q_j."""
    rng = np.random.default_rng(seed)
    q = [rng.normal(size=(x.shape[1], RANK)) for x in views]
    return np.linalg.qr(rng.normal(size=(len(views[0]), RANK)))[0], q


def padded(g, q):
    """The same as a warm start."""
    width = max(len(w) for w in q)
    local = np.stack([np.pad(w, ((0, width - len(w)), (0, 0))) for w in q])
    return jf.Personalized(jnp.asarray(g), jnp.asarray(local))


@functools.partial(jax.jit, static_argnames=("channel", "backend", "rounds", "steps", "batch"))
def maxvar(
    clients, warm, *, proximal=0.0, channel=None, backend=None, rounds=ROUNDS, steps=10, batch=None
):
    algorithm = jf.gcca.MaxVar(RANK, inner_steps=steps, batch_size=batch, proximal=proximal)
    return jf.rollout(
        algorithm,
        clients,
        rounds=rounds,
        key=jax.random.key(3),
        warm_start=warm,
        channel=channel or jf.channel.lossless(),
        backend=backend or jf.backend.vmap(),
        metrics=lambda result: {"cost": jf.gcca.cost(clients, *result)},
    )


THREE_BITS = jf.channel.difference(jf.channel.quantize(3))


@pytest.mark.parametrize("proximal", [0.0, 0.4])
def test_lossless_rounds_equal_the_reference(x64, proximal):
    views = arrays()
    g, q = start(views)
    expected_g, expected_q, costs = reference.maxvar(views, g, q, ROUNDS, proximal=proximal)
    solution = maxvar(jf.gcca.Views.from_arrays(views), padded(g, q), proximal=proximal)
    np.testing.assert_allclose(solution.result.shared, expected_g, atol=1e-8)
    for found, w in zip(solution.result.local, expected_q, strict=True):
        np.testing.assert_allclose(found[: len(w)], w, atol=1e-8)
        np.testing.assert_array_equal(found[len(w) :], 0)
    np.testing.assert_allclose(solution.history["cost"], costs[1:], atol=1e-8)
    # The objective is that of the iterate which enters the round: the mean over the views.
    np.testing.assert_allclose(solution.history["objective"], costs[:-1] / 3, atol=1e-8)


def test_the_one_round_start_equals_the_reference(x64):
    views = arrays()
    g, q = reference.mvlsa(views, RANK, 4)
    clients = jf.gcca.Views.from_arrays(views)
    solution = jf.fit(jf.gcca.MVLSA(RANK), clients, rounds=1, key=jax.random.key(0))
    shared, local = solution.result
    np.testing.assert_allclose(shared @ shared.T, g @ g.T, atol=1e-10)
    # Equal up to a rotation of the representation.
    for found, w in zip(local, q, strict=True):
        np.testing.assert_allclose(found[: len(w)] @ shared.T, w @ g.T, atol=1e-9)
    np.testing.assert_allclose(solution.history["bits_up"], [30 * 4 * 64])
    warm = maxvar(clients, solution.result)
    cold = maxvar(clients, padded(*start(views)))
    assert warm.history["cost"][0] < cold.history["cost"][0]


def test_the_optimum_has_a_closed_form_and_is_reached(x64):
    views = arrays()
    clients = jf.gcca.Views.from_arrays(views)
    least, g, eigenvalues = reference.optimum(views, RANK)
    assert eigenvalues[RANK - 1] - eigenvalues[RANK] > 0.3
    found = jf.gcca.optimum(clients, RANK)
    np.testing.assert_allclose(found.cost, least, rtol=1e-10)
    np.testing.assert_allclose(found.shared @ found.shared.T, g @ g.T, atol=1e-10)
    np.testing.assert_allclose(found.eigenvalues[:16], eigenvalues[:16], atol=1e-10)

    def distance(solution):
        return jf.gcca.subspace_distance(solution.result.shared, found.shared)

    warm = padded(*start(views))
    exact = maxvar(clients, warm, rounds=600)
    quantized = maxvar(clients, warm, channel=THREE_BITS, rounds=600)
    np.testing.assert_allclose(exact.history["cost"][-1], least, rtol=1e-6)
    np.testing.assert_allclose(quantized.history["cost"][-1], least, rtol=1e-6)
    # Geometrically, and with three bits not to a floor above.
    assert distance(exact) < 1e-4 and distance(quantized) < 1e-4
    assert distance(maxvar(clients, warm)) > 3 * distance(exact)


@pytest.mark.slow
def test_convergence_is_linear_down_to_the_floor_of_the_channel(x64):
    views = arrays()
    clients, warm = jf.gcca.Views.from_arrays(views), padded(*start(views))
    best = jf.gcca.optimum(clients, RANK)

    @functools.partial(jax.jit, static_argnames="channel")
    def distances(channel):
        return jf.rollout(
            jf.gcca.MaxVar(RANK, memory=0),
            clients,
            rounds=150,
            key=jax.random.key(3),
            warm_start=warm,
            channel=channel,
            metrics=lambda r: {"off": jf.gcca.subspace_distance(r.shared, best.shared)},
        ).history["off"]

    def rate(off, first, last):
        return (off[last] / off[first]) ** (1 / (last - first))

    # With exact maps a round is one of subspace iteration.
    expected = best.eigenvalues[RANK] / best.eigenvalues[RANK - 1]
    exact = distances(jf.channel.lossless())
    np.testing.assert_allclose(rate(exact, 20, 60), expected, rtol=1e-3)
    assert exact[-1] < 1e-9
    # Quantized differences converge as fast, and to the same point as exact messages.
    quantized = distances(THREE_BITS)
    np.testing.assert_allclose(rate(quantized, 20, 60), expected, rtol=2e-2)
    assert quantized[-1] < 1e-8
    # Without memory there is a floor, even at eight bits.
    memoryless = distances(jf.channel.quantize(8))
    assert memoryless[30:].max() < 0.05 and memoryless[60:].min() > 1e-4


@pytest.mark.slow
def test_two_bits_need_a_contraction():
    clients = jf.gcca.Views.from_arrays(arrays(200, (20, 20, 20), dtype=np.float32))
    warm = jf.rollout(jf.gcca.MVLSA(RANK), clients, rounds=1, key=jax.random.key(0)).result
    least = jf.gcca.optimum(clients, RANK).cost

    def end(channel):
        return maxvar(clients, warm, channel=channel, rounds=150).history["cost"][-1] / least

    assert end(THREE_BITS) < 1.02
    plain, contracted = jf.channel.quantize(2), jf.channel.quantize(2, contraction=2.0)
    assert end(jf.channel.difference(plain)) > 5
    assert end(jf.channel.difference(contracted)) < 1.02
    # What makes three bits enough is the memory.
    assert end(jf.channel.quantize(3)) > 5


@pytest.mark.slow
def test_bits_follow_the_formula():
    views = arrays(40, (6, 6), dtype=np.float32)
    clients = jf.gcca.Views.from_arrays(views)
    solution = maxvar(clients, padded(*start(views)), channel=THREE_BITS, rounds=4, steps=1)
    entries = 40 * RANK
    # Each message has a scale besides.
    wanted = [bits_per_variable(t, 3) + 32 / entries * (t + 1) for t in (1, 2, 3, 4)]
    np.testing.assert_allclose(solution.history["bits_up"] / entries, wanted, rtol=1e-6)
    np.testing.assert_allclose(solution.history["bits_down"][-1] / entries, wanted[2], rtol=1e-6)
    assert bits_per_variable(4, 32) == 32 * 5
    assert bits_per_variable(4, 3) == 20


@pytest.mark.slow
def test_batches_average_to_the_gradient(x64):
    views = arrays()
    clients, warm = jf.gcca.Views.from_arrays(views), padded(*start(views))
    whole = maxvar(clients, warm, rounds=3)
    # All rows in another order give the same steps.
    np.testing.assert_allclose(
        maxvar(clients, warm, rounds=3, batch=30).result.shared, whole.result.shared, atol=1e-10
    )

    def stepped(key):
        algorithm = jf.gcca.MaxVar(RANK, inner_steps=1, batch_size=10)
        return jf.rollout(algorithm, clients, rounds=1, key=key, warm_start=warm).result.local

    many = jax.jit(jax.vmap(stepped))(jax.random.split(jax.random.key(0), 2000))
    exact = maxvar(clients, warm, rounds=1, steps=1).result.local
    error = many.std(0) / np.sqrt(len(many))
    assert error.max() > 1e-4
    assert jnp.all(jnp.abs(many.mean(0) - exact) <= 5 * error + 1e-12)


@pytest.mark.parametrize("batch", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_identical_entities_make_every_batch_exact(batch, key):
    rows = [np.array([2.0, -1.0, 0.5]), np.array([1.0, 3.0])]
    clients = jf.gcca.Views.from_arrays([np.tile(row, (8, 1)).astype(np.float32) for row in rows])
    warm = jf.Personalized(jnp.full((8, 1), 8**-0.5), None)
    run = functools.partial(jf.fit, clients=clients, rounds=1, key=key, warm_start=warm)
    whole = run(jf.gcca.MaxVar(1, inner_steps=2)).result.local
    found = run(jf.gcca.MaxVar(1, inner_steps=2, batch_size=batch)).result.local
    np.testing.assert_allclose(found, whole, atol=1e-5)


@pytest.mark.slow
def test_padding_changes_nothing(x64):
    views = arrays(features=(5, 5, 5))
    g, q = start(views)
    plain = maxvar(jf.gcca.Views.from_arrays(views), padded(g, q), rounds=10)
    wider = [*views, np.ones((30, 9))]
    clients = jf.gcca.Views.from_arrays(wider).take(np.arange(3))
    assert clients.features == 9
    warm = padded(g, q)
    # Not even the start's values in the padding matter.
    local = jnp.pad(warm.local, ((0, 0), (0, 4), (0, 0)), constant_values=7.0)
    result = maxvar(clients, jf.Personalized(warm.shared, local), rounds=10).result
    np.testing.assert_allclose(result.shared, plain.result.shared, atol=1e-12)
    np.testing.assert_allclose(result.local[:, :5], plain.result.local, atol=1e-12)
    np.testing.assert_array_equal(result.local[:, 5:], 0)
    np.testing.assert_allclose(
        jf.gcca.optimum(clients, RANK).cost,
        jf.gcca.optimum(jf.gcca.Views.from_arrays(views), RANK).cost,
        rtol=1e-10,
    )


@pytest.mark.slow
def test_derivatives(x64):
    views = arrays()
    clients, warm = jf.gcca.Views.from_arrays(views), padded(*start(views))

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def end(proximal, scale):
        scaled = jf.Personalized(warm.shared, warm.local * scale)
        return maxvar(clients, scaled, proximal=proximal, rounds=4, steps=3).history["cost"][-1]

    found = end(0.3, 1.0)[1]
    h = 1e-5
    by_proximal = (end(0.3 + h, 1.0)[0] - end(0.3 - h, 1.0)[0]) / (2 * h)
    by_scale = (end(0.3, 1.0 + h)[0] - end(0.3, 1.0 - h)[0]) / (2 * h)
    np.testing.assert_allclose(found, (by_proximal, by_scale), rtol=1e-5)
    assert all(abs(x) > 1e-4 for x in found)


@pytest.mark.slow
def test_derivatives_by_the_views_ignore_padding(x64):
    views = arrays()
    clients, warm = jf.gcca.Views.from_arrays(views), padded(*start(views))
    rng = np.random.default_rng(2)
    direction = jnp.asarray(rng.normal(size=clients.data.values.shape)) * clients.data.mask[:, None]

    @jax.jit
    @jax.value_and_grad
    def ends(step):
        moved = eqx.tree_at(
            lambda c: c.data.values, clients, clients.data.values + step * direction
        )
        exact = jf.gcca.MaxVar(RANK, solver="exact", ridge=0.1)
        pooled = jf.gcca.optimum(moved, RANK).cost
        one, two = (
            jf.rollout(a, moved, rounds=n, key=jax.random.key(0), warm_start=w).result
            for a, n, w in ((exact, 3, warm), (jf.gcca.MVLSA(RANK, view_rank=2), 1, None))
        )
        return pooled + jf.gcca.cost(clients, *one) + 2 * jf.gcca.cost(clients, *two)

    h = 1e-5
    numeric = (ends(h)[0] - ends(-h)[0]) / (2 * h)
    np.testing.assert_allclose(ends(0.0)[1], numeric, rtol=1e-6)
    assert abs(numeric) > 1e-3


@pytest.mark.slow
def test_random_start_is_feasible_and_ignores_padding(key):
    clients = jf.gcca.Views.from_arrays(arrays(dtype=np.float32), center=True)
    np.testing.assert_allclose(clients.data.values.mean(1), 0, atol=1e-6)
    solution = jf.fit(jf.gcca.MaxVar(RANK, solver="gradient"), clients, rounds=5, key=key)
    shared, local = solution.result
    chex.assert_shape(local, (3, 7, RANK))
    np.testing.assert_allclose(shared.T @ shared, np.eye(RANK), atol=1e-5)
    np.testing.assert_array_equal(local[0, 5:], 0)
    assert np.all(np.diff(solution.history["objective"]) < 0)


def thinned(dtype: Any = np.float64):
    """The views with half of their entries zero, dense and in the formats of sparse matrices."""
    rng = np.random.default_rng(1)
    views = [np.where(rng.random(x.shape) < 0.5, 0, x).astype(dtype) for x in arrays()]
    formats = (scipy.sparse.csr_array, BCOO.fromdense, scipy.sparse.csc_matrix)
    return views, [make(x) for make, x in zip(formats, views, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("center", [False, True])
def test_sparse_views_give_what_dense_ones_give(x64, center):
    views, matrices = thinned()
    dense = jf.gcca.Views.from_arrays(views, center=center)
    sparse = jf.gcca.Views.from_sparse(matrices, center=center)
    assert sparse.features == dense.features == 7 and len(sparse) == 3
    np.testing.assert_array_equal(sparse.data.mask, dense.data.mask)
    assert sparse.data.values.shape == (3, max(np.count_nonzero(x) for x in views))
    assert np.all(np.diff(sparse.data.rows) >= 0)
    warm = padded(*start(views))
    for channel, batch in ((jf.channel.lossless(), None), (THREE_BITS, None), (THREE_BITS, 7)):
        expected = maxvar(dense, warm, channel=channel, batch=batch, rounds=20)
        found = maxvar(sparse, warm, channel=channel, batch=batch, rounds=20)
        chex.assert_trees_all_close(found.result, expected.result, atol=1e-10)
        chex.assert_trees_all_close(found.history, expected.history, atol=1e-10)
    # The one-round start is exact where it may keep as many triples as there are.
    one, other = (
        jf.rollout(jf.gcca.MVLSA(RANK), x, rounds=1, key=jax.random.key(0)).result
        for x in (dense, sparse)
    )
    assert jf.gcca.subspace_distance(other.shared, one.shared) < 1e-10
    chosen = sparse.take(np.array([2, 0])).data
    np.testing.assert_allclose(
        jax.vmap(lambda view: view.rmv(view.mv(jnp.eye(7))))(chosen),
        [dense.data.values[j].T @ dense.data.values[j] for j in (2, 0)],
        atol=1e-12,
    )


@pytest.mark.slow
def test_sparse_views_are_never_made_dense():
    shape = (10**6, 10**6)
    matrix = scipy.sparse.random_array(shape, density=1e-9, dtype=np.float32, rng=0)
    views = jf.gcca.Views.from_sparse([matrix, matrix], center=True)
    traced = jax.jit(
        lambda views: jf.rollout(jf.gcca.MaxVar(RANK), views, rounds=2, key=jax.random.key(0))
    ).lower(views)
    memory = traced.compile().memory_analysis()
    # Scores and maps, and what Lanczos keeps: less than a thousandth of one view, filled.
    assert memory.temp_size_in_bytes < 4 * shape[0] * shape[1] / 1000


def test_largest_eigenvalue_of_a_sparse_view(x64):
    rng = np.random.default_rng(0)
    x = scipy.sparse.random_array((80, 60), density=0.1, rng=rng)
    (view,) = [jax.tree.map(lambda leaf: leaf[0], jf.gcca.Views.from_sparse([x]).data)]
    largest = jax.value_and_grad(
        lambda values: _largest_eigenvalue(eqx.tree_at(lambda v: v.values, view, values))
    )
    found, slope = jax.jit(largest)(view.values)
    exact = np.linalg.norm(x.toarray(), 2) ** 2 / 80
    np.testing.assert_allclose(found, exact, rtol=1e-6)
    # It is of degree two in the values.
    np.testing.assert_allclose(slope @ view.values, 2 * exact, rtol=1e-6)


@pytest.mark.slow
def test_exact_maps_are_least_squares_maps(x64):
    views = arrays()
    clients = jf.gcca.Views.from_arrays(views)
    warm = padded(*start(views))
    for ridge in (0.0, 0.3):
        exact = jf.gcca.MaxVar(RANK, memory=0, ridge=ridge)
        solve = jax.jit(
            functools.partial(jf.rollout, exact, clients, key=jax.random.key(0)),
            static_argnames="rounds",
        )
        once = solve(rounds=1, warm_start=warm)
        for found, x in zip(once.result.local, views, strict=True):
            d = x.shape[1]
            wanted = np.linalg.solve(
                x.T @ x / 30 + ridge * np.eye(d), x.T @ warm.shared / np.sqrt(30)
            )
            np.testing.assert_allclose(found[:d], wanted, atol=1e-10)
            np.testing.assert_array_equal(found[d:], 0)
        best = jf.gcca.optimum(clients, RANK, ridge=ridge)
        end = solve(rounds=60, warm_start=warm)
        np.testing.assert_allclose(end.history["objective"][-1] * 3, best.cost, rtol=1e-10)
        for result in (end.result, best):
            cost = jf.gcca.cost(clients, result.shared, result.local, ridge=ridge)
            np.testing.assert_allclose(cost, best.cost, rtol=1e-10)
        # The limit of many gradient steps.
        steps = jf.gcca.MaxVar(RANK, inner_steps=100, ridge=ridge)
        slow = jf.rollout(steps, clients, rounds=60, key=jax.random.key(0), warm_start=warm)
        np.testing.assert_allclose(slow.history["objective"][-1] * 3, best.cost, rtol=1e-8)
        assert jf.gcca.subspace_distance(slow.result.shared, end.result.shared) < 1e-5


def krylov(views, shared, blocks):
    """G, PG, ... side by side with the mean projector P, orthonormal, and P."""
    projector = np.mean([x @ np.linalg.pinv(x) for x in views], axis=0)
    together = [shared]
    for _ in range(blocks - 1):
        together.append(np.linalg.qr(projector @ together[-1])[0])
    return np.linalg.qr(np.concatenate(together, axis=1))[0], projector


@pytest.mark.slow
def test_rounds_with_a_memory_are_a_block_krylov_method(x64):
    """While the memory is not full, the best of the span, and the operator's product with it."""
    views = arrays()
    shared, maps = start(views)
    clients, warm = jf.gcca.Views.from_arrays(views), padded(shared, maps)
    for rounds in (2, 4):
        algorithm = jf.gcca.MaxVar(RANK)
        found = solve(algorithm, clients, rounds=rounds, warm_start=warm)
        span, projector = krylov(views, shared, rounds)
        best = span @ np.linalg.eigh(span.T @ projector @ span)[1][:, -RANK:]
        expected = np.linalg.qr(projector @ best)[0]
        got = np.asarray(found.result.shared)
        np.testing.assert_allclose(got @ got.T, expected @ expected.T, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "dtype"),
    [
        (1, np.float32),
        (4, np.float64),
        (1, np.float64),
        (4, np.float32),
        (20, np.float32),
        (20, np.float64),
    ],
)
def test_a_memory_saves_rounds(memory, dtype, x64):
    views = arrays(noise=2.0, dtype=dtype)
    clients = jf.gcca.Views.from_arrays(views)
    best = float(jf.gcca.optimum(clients, RANK).cost) / len(views)

    def above(memory, rounds):
        algorithm = jf.gcca.MaxVar(RANK, memory=memory)
        found = solve(algorithm, clients, rounds=rounds)
        shared = np.asarray(found.result.shared)
        np.testing.assert_allclose(shared.T @ shared, np.eye(RANK), atol=1e-5)
        return np.asarray(found.history["objective"]) / best - 1

    exact = np.finfo(dtype).eps * 100
    plain, quick = above(0, 200), above(memory, 40)
    reached = [int(np.flatnonzero(x <= 1e-4)[0]) for x in (plain, quick)]
    assert reached[1] * (1.5 if memory == 1 else 2) <= reached[0]
    assert abs(quick[-1]) <= max(exact, 1e-10 if memory > 1 else 1e-4)


@pytest.mark.slow
def test_a_memory_is_mapped_over_ridges(x64):
    """Under `vmap`, as in a sweep, which changes the layout of the server's matrices."""
    clients, ridges = jf.gcca.Views.from_arrays(arrays()), jnp.array([0.1, 1.0])

    @jax.jit
    def end(ridge):
        algorithm = jf.gcca.MaxVar(RANK, memory=2, ridge=ridge)
        shared = jf.rollout(algorithm, clients, rounds=4, key=jax.random.key(0)).result.shared
        return shared @ shared.T

    one_by_one = np.stack([end(ridge) for ridge in ridges])
    chex.assert_trees_all_close(jax.jit(jax.vmap(end))(ridges), one_by_one, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds",
    [3, 25],
    ids=["on the way", "at the end"],
)
def test_derivatives_through_a_memory(rounds, x64):
    views = [jnp.asarray(x) for x in arrays()]
    weights = np.random.default_rng(1).normal(size=(30, 30))

    @jax.jit
    @jax.value_and_grad
    def end(change):
        algorithm = jf.gcca.MaxVar(RANK, memory=2, ridge=0.1)
        first = views[0].at[:, 0].multiply(1 + change)
        clients = jf.gcca.Views.from_arrays([first, *views[1:]])
        shared = jf.rollout(algorithm, clients, rounds=rounds, key=jax.random.key(0)).result.shared
        return jnp.sum(weights * (shared @ shared.T))

    step = 1e-5
    expected = (end(step)[0] - end(-step)[0]) / (2 * step)
    np.testing.assert_allclose(end(0.0)[1], expected, rtol=1e-5, atol=1e-7)


def test_a_ridge_makes_wide_views_informative(x64):
    wide = [np.random.default_rng(j).normal(size=(10, 15)) for j in range(3)]
    clients = jf.gcca.Views.from_arrays(wide)
    assert jf.gcca.optimum(clients, RANK).cost < 1e-20
    best = jf.gcca.optimum(clients, RANK, ridge=0.1)
    # The same by the definition.
    smoothers = [x @ np.linalg.solve(x.T @ x + 1.0 * np.eye(15), x.T) for x in wide]
    values = np.linalg.eigvalsh(sum(smoothers))[::-1]
    np.testing.assert_allclose(best.eigenvalues[:10], values, atol=1e-12)
    np.testing.assert_allclose(best.cost, (3 * RANK - values[:RANK].sum()) / 2, rtol=1e-12)


@pytest.mark.parametrize(
    ("features", "entities"), [((60, 60, 60), 200), ((300, 20), 1000), ((10, 40, 70), 400)]
)
def test_chance_agreement_is_that_of_random_projections(features, entities):
    rng = np.random.default_rng(0)
    bases = [np.linalg.qr(rng.normal(size=(entities, d)))[0] for d in features]
    top = np.linalg.svd(np.concatenate(bases, axis=1), compute_uv=False)[0] ** 2 / len(features)
    assert top == pytest.approx(chance_agreement(features, entities), rel=0.02)
    share = features[0] / entities
    if len(set(features)) == 1:
        closed = ((2 * share) ** 0.5 + (1 - share) ** 0.5) ** 2 / 3
        assert chance_agreement(features, entities) == pytest.approx(closed, rel=1e-9)


def test_views_that_fit_anything_agree_by_chance():
    assert chance_agreement([50, 60], 100) == 1 == chance_agreement([200], 100)


@pytest.mark.parametrize(
    ("strength", "width", "ridge", "chance"),
    [(0, 40, 0, True), (0, 100, 0, True), (0, 40, 1, False), (1, 40, 0, False)],
)
def test_a_remark_says_that_noise_agrees_as_much(strength, width, ridge, chance):
    rng = np.random.default_rng(0)
    common = strength * rng.normal(size=(100, 2))
    tables = [common @ rng.normal(size=(2, width)) + rng.normal(size=(100, width)) for _ in "abc"]
    views = jf.gcca.Views.from_arrays(tables)
    found = fit(jf.gcca.MaxVar(2, ridge=ridge), views, rounds=30)
    said = [each for each in found.remarks() if "3 views of noise" in each]
    assert len(said) == chance
    if chance:
        assert f"of {width} features on average for 100 entities" in said[0]


def test_plotting_the_agreement_of_views():
    figure = jf.plot.agreement(np.eye(3, 5), ["a", "b", "c"])
    axes, _ = figure.axes
    np.testing.assert_array_equal(axes.images[0].get_array(), np.eye(3, 5))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="names: wanted 3, got 2"):
        jf.plot.agreement(np.eye(3), ["a", "b"])
    with pytest.raises(ValueError, match="shares: wanted"):
        jf.plot.agreement(np.ones(3), ["a"])


def test_alignment_accuracy(key):
    scores = jax.random.normal(key, (20, 3))
    assert jf.gcca.alignment_accuracy(jnp.stack([scores, scores + 1e-4, scores])) == 1
    # In two of three pairs, half of the entities have changed places.
    swapped = jnp.concatenate([scores[:10], scores[10:][::-1]])
    accuracy = jf.gcca.alignment_accuracy(jnp.stack([scores, scores, swapped]))
    np.testing.assert_allclose(accuracy, (1 + 0.5 + 0.5) / 3, rtol=1e-6)


@pytest.mark.slow
def test_compression_ratio():
    # The paper's, which counts the start as a round.
    np.testing.assert_allclose(compression_ratio(18, 18, 3), 0.90625)
    np.testing.assert_allclose(compression_ratio(19, 18, 4), 0.8681, atol=1e-4)
    # The bits that were sent, by the history of a run.
    clients = jf.gcca.Views.from_arrays(arrays(40, (6, 6), dtype=np.float32))
    warm = padded(*start(arrays(40, (6, 6))))
    warm = jax.tree.map(lambda x: x.astype(np.float32), warm)
    full, coarse = (
        maxvar(clients, warm, channel=c, rounds=4, steps=1).history for c in (None, THREE_BITS)
    )
    scales = 5 * 32 / (5 * 32 * 40 * RANK)
    saved = 1 - coarse["bits_up"][-1] / full["bits_up"][-1]
    wanted = 1 - bits_per_variable(4, 3) / bits_per_variable(4, 32)
    np.testing.assert_allclose(saved, wanted - scales, rtol=1e-6)


def test_rounds_to_a_goal():
    curves = np.array([[np.nan, 0.5, 0.2, 0.3, 0.1], [1.0, 0.9, 0.8, 0.7, 0.6]])
    np.testing.assert_array_equal(rounds_to(curves, 0.2), [3, -1])
    np.testing.assert_array_equal(rounds_to(curves, 1.0), [2, 1])
    assert rounds_to(curves[1], 0.6) == 5


X = np.ones((6, 3), np.float32)


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([], "at least one"),
        (X, "a list of"),
        ([X, X[:5]], r"arrays\[1\]: has 5 entities where arrays\[0\] has 6"),
        ([X, X[:, :0]], r"arrays\[1\]: a view needs at least one feature"),
        ([X[:0], X[:0]], r"arrays\[0\]: at least one entity"),
        ([X, X[0]], r"arrays\[1\]: wanted shape"),
        ([X, np.where(X > 0, np.nan, 0)], r"arrays\[1\]: NaN or infinite"),
        ([X, X.astype(complex)], r"arrays\[1\]: wanted real floating"),
    ],
)
def test_unfit_views_are_refused(views, message):
    with pytest.raises(ValueError, match=message):
        jf.gcca.Views.from_arrays(views)


S = scipy.sparse.csr_array(X)


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        ([], "at least one"),
        (S, "a list of"),
        ([S, X], r"matrices\[1\]: wanted a matrix of scipy.sparse or a BCOO, got ndarray"),
        ([S, S[:5]], r"matrices\[1\]: has 5 entities where matrices\[0\] has 6"),
        ([S, scipy.sparse.csr_array((6, 0), dtype=np.float32)], "at least one feature"),
        ([S, S * np.inf], r"matrices\[1\], its non-zero values: NaN or infinite"),
        ([S, S.astype(complex)], r"matrices\[1\], its non-zero values: wanted real floating"),
    ],
)
def test_unfit_sparse_views_are_refused(matrices, message):
    with pytest.raises(ValueError, match=message):
        jf.gcca.Views.from_sparse(matrices)


def sparse_with(**changes):
    """A sparse matrix whose parts were replaced after it was made."""
    matrix = getattr(scipy.sparse, f"{changes.pop('kind')}_array")(X)
    for name, value in changes.items():
        setattr(matrix, name, value)
    return matrix


def overlong():
    """A row with more values than columns."""
    matrix = scipy.sparse.lil_array(X)
    matrix.data[0] = [1.0] * 10**5
    return matrix


@pytest.mark.parametrize(
    "matrix",
    [
        sparse_with(kind="csr", indices=S.indices + 10**8),
        sparse_with(kind="csr", indptr=np.where(S.indptr > 0, 10**8, 0)),
        sparse_with(kind="csr", indptr=S.indptr * np.array([1] * 6 + [0]) * 10**7),
        sparse_with(kind="csc", indices=S.tocsc().indices - 10**8),
        sparse_with(kind="bsr", indices=S.tobsr().indices + 10**8),
        sparse_with(kind="coo", coords=(S.tocoo().row, S.tocoo().col + 10**8)),
        overlong(),
        BCOO((np.ones(1, "f"), np.array([[0, 9]])), shape=(6, 3)),
        BCOO((np.ones(1, "f"), np.array([[-9, 0]])), shape=(6, 3)),
    ],
    ids=lambda matrix: getattr(matrix, "format", "bcoo"),
)
def test_sparse_indices_outside_are_refused(matrix):
    with pytest.raises(ValueError, match=r"^matrices\[1\]: "):
        jf.gcca.Views.from_sparse([S, matrix])


def test_a_sparse_matrix_is_left_as_it_is():
    parts = np.ones(3, "f"), np.array([2, 0, 0]), np.array([0, 3, 3])
    matrix = scipy.sparse.csr_array(parts, shape=(2, 3))
    views = jf.gcca.Views.from_sparse([matrix])
    np.testing.assert_array_equal(views.data.values, [[2, 1]])
    np.testing.assert_array_equal(matrix.indices, [2, 0, 0])
    assert matrix.nnz == 3


def test_unsupported_uses_of_sparse_views_are_refused(key):
    views = jf.gcca.Views.from_sparse([S, S])
    with pytest.raises(ValueError, match="solver: sparse views"):
        jf.fit(jf.gcca.MaxVar(2, solver="exact"), views, rounds=1, key=key)
    with pytest.raises(ValueError, match="the optimum needs dense views"):
        jf.gcca.optimum(views, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jf.gcca.MaxVar(2, batch_size=0), "batch_size"),
        (lambda: jf.gcca.alignment_accuracy(jnp.ones((1, 4, 2))), "scores"),
        (lambda: jf.gcca.subspace_distance(jnp.eye(3), jnp.eye(4)), "other: wanted"),
    ],
)
def test_unfit_numbers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (jf.gcca.MaxVar(7), "rank: 7"),
        (jf.gcca.MaxVar(2, batch_size=7), "batch_size: 7 of 6"),
        (jf.gcca.MVLSA(2, view_rank=4), "view_rank: wanted at most 3, got 4"),
        (jf.gcca.MVLSA(5, view_rank=2), "rank: wanted at most the views' 4 together, got 5"),
    ],
)
def test_algorithms_refuse_views_that_do_not_fit(algorithm, message):
    views = jf.gcca.Views.from_arrays([X, X])
    with pytest.raises(ValueError, match=message):
        jf.fit(algorithm, views, rounds=1, key=jax.random.key(0))


def test_other_clients_and_starts_are_refused(key):
    fit = functools.partial(jf.fit, rounds=1, key=key)
    with pytest.raises(ValueError, match=r"Views\.from_arrays"):
        fit(jf.gcca.MaxVar(2), jf.Clients.from_samples([X, X]))
    views = jf.gcca.Views.from_arrays([X, X])
    with pytest.raises(ValueError, match=r"^clients: wanted Clients"):
        fit(jf.pca.Local(2), views)
    for shapes in (((6, 3), (2, 3, 2)), ((6, 2), (2, 2, 2))):
        warm = jf.Personalized(*map(jnp.ones, shapes))
        with pytest.raises(ValueError, match="warm_start"):
            fit(jf.gcca.MaxVar(2), views, warm_start=warm)
    with pytest.raises(ValueError, match="local: wanted"):
        jf.gcca.cost(views, jnp.ones((6, 2)), jnp.ones((2, 3, 3)))


@pytest.mark.slow
def test_synthetic_views(key):
    data = gcca_synthetic(key, features=6, noise=0.0)
    assert [view.shape for view in data.views] == [(500, 6)] * 3
    np.testing.assert_allclose(data.views[1], data.latent @ data.mixing[1], atol=1e-4)
    noisy = gcca_synthetic(key, features=6)
    np.testing.assert_allclose(np.std(noisy.views[1] - data.views[1]), 0.1, rtol=0.1)
    sparse = gcca_synthetic(key, densities=(0.01, 0.1, 1.0))
    np.testing.assert_allclose(np.mean(sparse.latent != 0), 0.01, rtol=0.3)
    np.testing.assert_allclose(np.mean(np.stack(sparse.mixing) != 0), 0.1, rtol=0.3)


@pytest.mark.parametrize(
    "algorithm",
    [
        jf.gcca.MVLSA(2),
        pytest.param(jf.gcca.MaxVar(2, solver="exact"), marks=pytest.mark.slow),
    ],
)
def test_a_factorization_serves_several_runs(algorithm, key):
    """Of views of unlike widths, one of which lacks a direction."""
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=(40, width)).astype(np.float32) for width in (5, 3, 4)]
    tables[0][:, 4] = tables[0][:, 0]
    views = jf.gcca.Views.from_arrays(tables)
    plain, again = (
        jf.fit(algorithm, clients, rounds=4, key=key).result for clients in (views, factored(views))
    )
    chex.assert_trees_all_close(plain, again, atol=1e-5)
