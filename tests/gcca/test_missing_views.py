"""Views of clients that have seen different entities, aligned by ids."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.sparse

import jaxfed as jf
from jaxfed.gcca.shares import root_of
from jaxfed.testing import CHECKS, check_algorithm
from tests.examples import more_features
from tests.helpers import solve
from tests.references import gcca as reference

RANK, ENTITIES, FEATURES = 2, 24, (5, 7, 4)
EXACT = jf.gcca.MaxVar(RANK, solver="exact", memory=0)
STEPS = jf.gcca.MaxVar(RANK, solver="gradient")
KRYLOV = jf.gcca.MaxVar(RANK)


def drawn(seed=0):
    """Tables of different entities in different orders, and their ids."""
    rng = np.random.default_rng(seed)
    latent = rng.normal(size=(ENTITIES, 3)) * [1, 1, 0.2]
    names = np.array([f"entity {i:02}" for i in range(ENTITIES)])
    tables, ids = [], []
    for j, features in enumerate(FEATURES):
        # Every entity is seen by two clients at least, and by all if its number is not below nine.
        own = rng.permutation([i for i in range(ENTITIES) if i >= 9 or i % 3 != j])
        signal = latent @ rng.normal(size=(3, features))
        tables.append((signal + 0.5 * rng.normal(size=signal.shape))[own])
        ids.append(names[own])
    return tables, ids


def views(tables, ids, **options):
    return jf.gcca.Views.from_arrays(tables, alignment=jf.gcca.align(ids), **options)


def start(tables):
    """A start that is not feasible, and its maps."""
    rng = np.random.default_rng(1)
    maps = [rng.normal(size=(x.shape[1], RANK)) for x in tables]
    shared = np.linalg.qr(rng.normal(size=(ENTITIES, RANK)))[0]
    local = np.stack([np.pad(w, ((0, max(FEATURES) - len(w)), (0, 0))) for w in maps])
    return shared, maps, jf.Personalized(jnp.asarray(shared), jnp.asarray(local))


def shares(clients):
    return np.asarray(clients.data.observed).mean(0)[:, None]


def spanned(shared):
    return np.asarray(shared) @ np.asarray(shared).T


def by_gradients(x, target, q):
    bound = np.linalg.norm(x, 2) ** 2 / ENTITIES
    for _ in range(10):
        residual = x @ q / np.sqrt(ENTITIES) - target
        q = q - x.T @ residual / np.sqrt(ENTITIES) / bound
    return q


def by_least_squares(x, target, q):
    del q
    return np.sqrt(ENTITIES) * np.linalg.pinv(x) @ target


@pytest.mark.parametrize("proximal", [0.0, 0.4])
@pytest.mark.parametrize(
    ("solver", "step"), [("gradient", by_gradients), ("exact", by_least_squares)]
)
def test_rounds_are_those_of_the_reference(solver, step, proximal, x64):
    tables, ids = drawn()
    alignment, (shared, maps, warm) = jf.gcca.align(ids), start(tables)
    places = alignment.places
    expected = reference.run_some(tables, places, shared, maps, 20, solve=step, proximal=proximal)
    clients = jf.gcca.Views.from_arrays(tables, alignment=alignment)
    algorithm = jf.gcca.MaxVar(RANK, solver=solver, memory=0, proximal=proximal)
    found = solve(algorithm, clients, rounds=20, warm_start=warm)
    np.testing.assert_allclose(found.result.shared, expected[0], atol=1e-9)
    for own, w in zip(found.result.local, expected[1], strict=True):
        np.testing.assert_allclose(own[: len(w)], w, atol=1e-8)
        np.testing.assert_array_equal(own[len(w) :], 0)
    np.testing.assert_allclose(found.history["objective"], expected[2][:-1] / 3, rtol=1e-9)
    cost = jf.gcca.cost(clients, *found.result)
    np.testing.assert_allclose(cost, expected[2][-1], rtol=1e-9)


@pytest.mark.slow
def test_solutions_are_the_closed_form(x64):
    tables, ids = drawn()
    alignment = jf.gcca.align(ids)
    least, g = reference.optimum_of_some(tables, alignment.places, ENTITIES, RANK)
    clients = views(tables, ids)
    pooled = jf.gcca.optimum(clients, RANK)
    np.testing.assert_allclose(pooled.cost, least, rtol=1e-10)
    np.testing.assert_allclose(spanned(pooled.shared), spanned(g), atol=1e-9)
    np.testing.assert_allclose(jf.gcca.cost(clients, *pooled[1:3]), least, rtol=1e-10)
    for algorithm, rounds in ((EXACT, 400), (KRYLOV, 40), (STEPS, 800)):
        result = solve(algorithm, clients, rounds=rounds).result
        np.testing.assert_allclose(spanned(result.shared), spanned(g), atol=1e-7)
        np.testing.assert_allclose(jf.gcca.cost(clients, *result), least, rtol=1e-9)
        weighted = result.shared.T @ (shares(clients) * result.shared)
        np.testing.assert_allclose(weighted, np.eye(RANK), atol=1e-12)
    # With all of its directions, a view's one message says as much.
    once = solve(jf.gcca.MVLSA(RANK, view_rank=max(FEATURES)), clients, rounds=1)
    np.testing.assert_allclose(spanned(once.result.shared), spanned(g), atol=1e-9)
    np.testing.assert_allclose(once.history["objective"][-1] * 3, least, rtol=1e-10)


@pytest.mark.slow
def test_a_ridge_is_that_of_single_views(x64):
    tables, ids = drawn()
    clients = views(tables, ids)
    algorithm = jf.gcca.MaxVar(RANK, solver="exact", memory=0, ridge=0.1)
    result = solve(algorithm, clients, rounds=400).result
    best = jf.gcca.optimum(clients, RANK, ridge=0.1)
    cost = jf.gcca.cost(clients, *result, ridge=0.1)
    np.testing.assert_allclose(cost, best.cost, rtol=1e-9)
    np.testing.assert_allclose(spanned(result.shared), spanned(best.shared), atol=1e-7)


def test_views_are_centred_by_what_was_seen(x64):
    tables, ids = drawn()
    clients = views(tables, ids, center=True)
    for values, table, ids_of_one in zip(clients.data.values, tables, ids, strict=True):
        rows = jf.gcca.align(ids).positions(ids_of_one)
        centred = values[rows, : table.shape[1]]
        np.testing.assert_allclose(centred, table - table.mean(0), atol=1e-12)
    shared = jf.gcca.optimum(clients, RANK).shared
    np.testing.assert_allclose((shares(clients) * shared).sum(0), 0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [EXACT, jf.gcca.MVLSA(RANK)], ids=["MaxVar", "MVLSA"])
def test_orders_of_rows_change_nothing(algorithm, x64):
    tables, ids = drawn()
    rng = np.random.default_rng(3)
    turns = [rng.permutation(len(own)) for own in ids]
    other = [x[t] for x, t in zip(tables, turns, strict=True)]
    other_ids = [own[t] for own, t in zip(ids, turns, strict=True)]
    one, two = (
        solve(algorithm, views(*given), rounds=5) for given in ((tables, ids), (other, other_ids))
    )
    np.testing.assert_array_equal(one.result.shared, two.result.shared)
    # Other ids put the entities in another order, in which rows go along.
    order = rng.permutation(jf.gcca.align(ids).ids)
    alignment = jf.gcca.align(ids, order=order)
    turned = jf.gcca.Views.from_arrays(tables, alignment=alignment)
    found = solve(algorithm, turned, rounds=5).result.shared[alignment.positions(np.sort(order))]
    np.testing.assert_allclose(spanned(found), spanned(one.result.shared), atol=1e-10)


@pytest.mark.slow
def test_without_gaps_all_is_as_without_ids():
    tables, _ = drawn()
    tables = [x[:16].astype(np.float32) for x in tables]
    plain = jf.gcca.Views.from_arrays(tables, center=True)
    ids = np.arange(16)
    aligned = jf.gcca.Views.from_arrays(tables, center=True, alignment=jf.gcca.align([ids] * 3))
    assert aligned.data.observed is None
    some = jf.gcca.align([ids] * 3, order=ids)
    shared_out = jf.gcca.Views.from_arrays(tables, center=True, alignment=some)
    assert shared_out.data.observed is not None
    for algorithm in (KRYLOV, STEPS, jf.gcca.MVLSA(RANK)):
        one, two, three = (
            solve(algorithm, clients, rounds=6).result for clients in (plain, aligned, shared_out)
        )
        jax.tree.map(np.testing.assert_array_equal, one, two)
        np.testing.assert_allclose(three.shared, one.shared, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("center", [False, True])
def test_sparse_views_give_what_dense_ones_give(center, x64):
    tables, ids = drawn()
    tables = [np.where(np.abs(x) < 0.5, 0, x) for x in tables]
    alignment = jf.gcca.align(ids)
    dense = views(tables, ids, center=center)
    matrices = [scipy.sparse.csr_array(x) for x in tables]
    sparse = jf.gcca.Views.from_sparse(matrices, center=center, alignment=alignment)
    assert np.all(np.diff(sparse.data.rows) >= 0)
    warm = start(tables)[2]
    one, two = (solve(STEPS, x, rounds=10, warm_start=warm) for x in (dense, sparse))
    np.testing.assert_allclose(two.result.shared, one.result.shared, atol=1e-10)
    np.testing.assert_allclose(two.history["objective"], one.history["objective"], rtol=1e-10)
    one, two = (solve(jf.gcca.MVLSA(RANK), x, rounds=1).result.shared for x in (dense, sparse))
    np.testing.assert_allclose(spanned(two), spanned(one), atol=1e-9)


@pytest.mark.slow
def test_a_batch_of_all_entities_is_all_of_them(x64):
    tables, ids = drawn()
    clients, warm = views(tables, ids), start(tables)[2]
    batch = jf.gcca.MaxVar(RANK, batch_size=ENTITIES)
    found = solve(batch, clients, rounds=3, warm_start=warm).result.shared
    whole = solve(STEPS, clients, rounds=3, warm_start=warm).result.shared
    np.testing.assert_allclose(found, whole, atol=1e-10)


@pytest.mark.slow
def test_rounds_send_no_more_than_without_gaps():
    tables, ids = drawn()
    clients = views([x.astype(np.float32) for x in tables], ids)
    found = jf.fit(EXACT, clients, rounds=3, key=jax.random.key(0))
    sent = np.diff(np.concatenate([[0], found.history["bits_up"]])) / 32
    np.testing.assert_array_equal(sent, [ENTITIES * (2 * RANK + 1), *[ENTITIES * RANK] * 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "channel",
    [
        jf.channel.difference(jf.channel.quantize(3)),
        jf.Wire(
            jf.channel.secure_sum(3, bits=32, bound=16.0),
            jf.channel.lossless(),
            jf.channel.secure_sum(3, bits=32, bound=16.0),
        ),
    ],
    ids=["coarse differences", "masks"],
)
def test_channels_find_the_same_solution(channel, x64):
    clients = views(*drawn())
    best = jf.gcca.optimum(clients, RANK)
    shared = solve(EXACT, clients, rounds=300, channel=channel).result.shared
    np.testing.assert_allclose(spanned(shared), spanned(best.shared), atol=1e-5)


def ends(algorithm, rounds, alignment, tables, weights):
    """A number of a solve, by tables that are laid out anew."""
    clients = jf.gcca.Views.from_arrays(tables, alignment=alignment)
    key, warm = jax.random.key(0), start(tables)[2]
    warm = None if isinstance(algorithm, jf.gcca.MVLSA) else warm
    run = jf.rollout(algorithm, clients, rounds=rounds, key=key, warm_start=warm)
    shared = run.result.shared
    return jnp.sum(weights * (shared @ shared.T)) + jf.gcca.cost(clients, *run.result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "rounds"),
    [
        pytest.param(jf.gcca.MaxVar(RANK, inner_steps=3), 4, id="gradient"),
        pytest.param(EXACT, 4, id="exact"),
        pytest.param(KRYLOV, 4, id="memory"),
        pytest.param(jf.gcca.MVLSA(RANK, view_rank=3), 1, id="MVLSA"),
    ],
)
def test_derivatives_by_what_was_seen(algorithm, rounds, x64):
    tables, ids = drawn()
    rng = np.random.default_rng(4)
    directions = [rng.normal(size=x.shape) for x in tables]
    weights = rng.normal(size=(ENTITIES, ENTITIES))

    @jax.jit
    @jax.value_and_grad
    def end(step):
        moved = [x + step * way for x, way in zip(tables, directions, strict=True)]
        return ends(algorithm, rounds, jf.gcca.align(ids), moved, weights)

    h = 1e-5
    numeric = (end(h)[0] - end(-h)[0]) / (2 * h)
    np.testing.assert_allclose(end(0.0)[1], numeric, rtol=1e-6)
    assert abs(numeric) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [EXACT, STEPS, jf.gcca.MVLSA(RANK)],
    ids=["exact", "steps", "MVLSA"],
)
def test_rows_that_were_not_seen_have_no_part(algorithm, x64):
    clients = views(*drawn())
    unseen = clients.data.observed[..., None] == 0

    def end(values):
        moved = eqx.tree_at(lambda c: c.data.values, clients, values)
        result = jf.rollout(algorithm, moved, rounds=2, key=jax.random.key(0)).result
        pooled = jf.gcca.optimum(moved, RANK).cost
        scores = jnp.nansum(jf.gcca.transform(result, moved) ** 2)
        return pooled + jf.gcca.cost(moved, *result) + scores + (result.shared**4).sum()

    end = jax.jit(jax.value_and_grad(end))
    value, slope = end(clients.data.values)
    assert np.abs(slope).max() > 1e-3
    np.testing.assert_array_equal(jnp.where(unseen, slope, 0), 0)
    other, _ = end(jnp.where(unseen, 7.0, clients.data.values))
    np.testing.assert_array_equal(other, value)


@pytest.mark.slow
def test_implicit_derivatives_are_those_of_all_rounds(x64):
    tables, ids = drawn()
    algorithm = jf.gcca.MaxVar(RANK, memory=0, ridge=0.1)
    weights = np.random.default_rng(5).normal(size=(ENTITIES, ENTITIES))

    def slope(adjoint):
        def end(scale):
            moved = [jnp.asarray(tables[0]).at[:, 0].multiply(scale), *tables[1:]]
            clients = jf.gcca.Views.from_arrays(moved, alignment=jf.gcca.align(ids))
            key = jax.random.key(0)
            run = jf.rollout(algorithm, clients, rounds=400, key=key, adjoint=adjoint)
            return jnp.sum(weights * (run.result.shared @ run.result.shared.T))

        return jax.jit(jax.grad(end))(1.0)

    found, expected = slope(jf.adjoint.implicit()), slope(jf.adjoint.unrolled())
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert abs(expected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: jf.gcca.MaxVar(RANK, inner_steps=3),
        lambda: jf.gcca.MaxVar(RANK, memory=0, ridge=0.1, proximal=0.1),
        lambda: jf.gcca.MaxVar(RANK, memory=2, ridge=0.1),
        lambda: jf.gcca.MVLSA(RANK, view_rank=3),
    ],
    ids=["gradient", "exact", "memory", "MVLSA"],
)
def test_the_contract_holds(make):
    with jax.enable_x64(True):
        clients, others = views(*drawn()), views(*drawn(1))

        report = check_algorithm(
            make(),
            clients,
            rounds=40,
            essence=lambda result: jax.tree.map(lambda w: w @ w.mT, result),
            loss=lambda result: ((others.data.values @ result.local - result.shared) ** 2).sum(),
            others=others,
            pad=more_features,
            deterministic=True,
            backends={"chunks on devices": jf.backend.shard(2, inner=jf.backend.chunked(2))},
        )
    assert set(report.checked) | report.skipped.keys() >= set(CHECKS)


@pytest.mark.slow
def test_scores_of_unseen_entities_are_nan_and_new_clients_get_maps(x64):
    tables, ids = drawn()
    clients, alignment = views(tables, ids), jf.gcca.align(ids)
    solution = jf.fit(KRYLOV, clients, rounds=40, key=jax.random.key(0))
    scores = jf.gcca.transform(solution, clients)
    np.testing.assert_array_equal(np.isnan(scores[..., 0]), clients.data.observed == 0)
    seen = ids[1][:3]
    expected = tables[1][:3] @ solution.result.local[1] / ENTITIES**0.5
    np.testing.assert_allclose(scores[1][alignment.positions(seen)], expected, atol=1e-12)
    # At the solution the representation is the mean of the scores that there are, times a matrix.
    mean = jnp.nanmean(scores, axis=0)
    bases = (jnp.linalg.qr(x)[0] for x in (mean, solution.result.shared))
    assert jf.gcca.subspace_distance(*bases) < 1e-6
    # A view that comes later, of some of the entities.
    own = jf.gcca.align([ids[0]], order=alignment.ids)
    late = jf.gcca.Views.from_arrays([tables[0]], alignment=own)
    found = jf.personalize(KRYLOV, solution, late, rounds=1, key=jax.random.key(1))
    target = solution.result.shared[alignment.positions(ids[0])]
    expected = by_least_squares(tables[0], target, None)
    np.testing.assert_allclose(found.local[0][: len(expected)], expected, atol=1e-8)


def test_ids_are_numbers_or_strings_of_any_order():
    found = jf.gcca.align([[30, 10], np.array([20, 30], np.int32)])
    np.testing.assert_array_equal(found.ids, [10, 20, 30])
    np.testing.assert_array_equal(found.places[0], [2, 0])
    np.testing.assert_array_equal(found.places[1], [1, 2])
    assert not found.complete
    names = jf.gcca.align([np.array(["b", "a"], object), ["a", "b"]])
    assert names.complete and names.ids.tolist() == ["a", "b"]
    given = jf.gcca.align([[30, 10]], order=[30, 20, 10])
    np.testing.assert_array_equal(given.places[0], [0, 2])
    np.testing.assert_array_equal(given.positions([20]), [1])
    large = np.array([2**63 + 1, 2**63], np.uint64)
    np.testing.assert_array_equal(jf.gcca.align([large, large[:1]]).places[1], [1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jf.gcca.align([]), "ids: wanted a list of lists of ids"),
        (
            lambda: jf.gcca.align([[1], [0.5]]),
            r"ids\[1\]: wanted a list of ids, whole numbers, got",
        ),
        (lambda: jf.gcca.align([[1, "a"]]), r"ids\[0\]: wanted a list of ids, whole numbers or"),
        (lambda: jf.gcca.align([["a"], [1]]), r"ids\[1\]: wanted a list of ids, strings, got"),
        (lambda: jf.gcca.align([[1], []]), r"ids\[1\]: wanted a list of ids"),
        (lambda: jf.gcca.align([[1], [[1]]]), r"ids\[1\]: wanted a list of ids"),
        (lambda: jf.gcca.align(["ab"]), r"ids\[0\]: wanted a list of ids"),
        (lambda: jf.gcca.align([[1], [2, 3, 2]]), r"ids\[1\]: wanted every id once, got 2 2 times"),
        (lambda: jf.gcca.align([[1]], order=[1, 1]), "order: wanted every id once, got 1 2 times"),
        (
            lambda: jf.gcca.align([[1], [7]], order=[1, 2]),
            r"ids\[1\]: wanted ids of the 2 .* got 7",
        ),
        (
            lambda: jf.gcca.align([["p1", "p2"], ["P1", "P2"]]),
            r"ids\[0\]: wanted some entity that another client has seen, got 'p1' and others, "
            "where another client has 'P1'",
        ),
        (lambda: jf.gcca.align([[1, 2], [2], [3]]), r"ids\[2\]: .* got 3 .* has 1"),
        (lambda: jf.gcca.align([["a"]]).positions(["b"]), "ids: wanted ids of the 1 .* got 'b'"),
    ],
)
def test_unfit_ids_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


X = np.ones((4, 3), np.float32)
THREE = jf.gcca.align([[0, 1, 2, 3], [1, 2, 3, 4]])


@pytest.mark.parametrize(
    ("tables", "alignment", "message"),
    [
        ([X, X[:3]], THREE, r"arrays\[1\]: wanted shape \(4, features\), a row for each"),
        ([X, X[:, :0]], THREE, r"arrays\[1\]: wanted shape \(4, features\)"),
        ([X, X.astype(np.float64)], THREE, r"arrays\[1\]: is float64 where arrays\[0\]"),
        ([X], THREE, "arrays: wanted the alignment's 2 views, got 1"),
        ([X, X], [[0, 1, 2, 3]] * 2, r"alignment: wanted jaxfed.gcca.align\(ids\) or None"),
    ],
)
def test_tables_that_do_not_fit_their_ids_are_refused(tables, alignment, message, x64):
    with pytest.raises(ValueError, match=message):
        jf.gcca.Views.from_arrays(tables, alignment=alignment)
    if "shape" not in message or tables[-1].size:
        matrices = [scipy.sparse.csr_array(x) for x in tables]
        with pytest.raises(ValueError, match=message.replace("arrays", "matrices")):
            jf.gcca.Views.from_sparse(matrices, alignment=alignment)


def test_views_that_lack_too_much_are_refused(key):
    fit = functools.partial(jf.fit, rounds=1, key=key)
    some = jf.gcca.Views.from_arrays([X, X], alignment=THREE)
    deep = jf.gcca.DeepMaxVar(
        functools.partial(jf.models.Perceptron, outputs=2, hidden=(4,)), optax.sgd(1.0), rank=2
    )
    with pytest.raises(ValueError, match="clients: networks need views of all entities, got some"):
        fit(deep, some)
    with pytest.raises(ValueError, match="views: wanted views of all entities"):
        jf.nn.common_projection(jf.gcca.MaxVar(2), some, rounds=1, key=key)
    few = jf.gcca.align([[0, 1, 2, 3], [3]])
    for algorithm in (jf.gcca.MaxVar(2), jf.gcca.MVLSA(2)):
        with pytest.raises(ValueError, match="clients: wanted views of at least 2 entities, got 1"):
            fit(algorithm, jf.gcca.Views.from_arrays([X, X[:1]], alignment=few))
        with pytest.raises(ValueError, match=r"seen by some client, .* the entity at index 0"):
            fit(algorithm, some.take([1]))


@pytest.mark.slow
def test_an_entity_of_which_nothing_is_known_divides_by_no_zero():
    root = root_of(jnp.asarray([0.25, 0.0, -0.5]))
    np.testing.assert_array_equal(root, [[0.5], [1], [1]])
