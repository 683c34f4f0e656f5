"""AJIVE: its parts, the number of joint directions, and views with fewer directions than wanted."""

import json

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import jaxfed as jf
from bench.oracles import ajive as oracle
from tests import helpers
from tests.helpers import projector
from tests.references import ajive as reference

SIGNAL_RANKS = oracle.SIGNAL_RANKS
FOUND = json.loads((helpers.ROOT / "tests/references/ajive.json").read_text())["draws"]
AJIVE = jf.gcca.AJIVE


def decompose(algorithm, clients, **options):
    return helpers.solve(algorithm, clients, rounds=1, **options).result


def views_of(arrays):
    return jf.gcca.Views.from_arrays(arrays)


def parts_of(result, arrays):
    """The joint and the individual parts of all views, without their padding."""
    joint, individual = result.local.joint(result.shared), result.local.individual()
    return tuple(
        [np.asarray(part)[:, : x.shape[1]] for part, x in zip(parts, arrays, strict=True)]
        for parts in (joint, individual)
    )


def orthogonal(seed=0, joint=2, own=(1, 2, 1), features=(4, 6, 3), entities=15):
    """Views without noise whose parts are orthogonal, and their common scores and parts."""
    rng = np.random.default_rng(seed)
    scores = np.linalg.qr(rng.normal(size=(entities, joint + sum(own))))[0]
    common, *each = np.split(scores, np.cumsum([joint, *own])[:-1], axis=1)
    parts = [
        (
            common @ rng.normal(size=(joint, d)) * 3,
            u @ rng.normal(size=(u.shape[1], d)),
        )
        for u, d in zip(each, features, strict=True)
    ]
    return common, parts


# --- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("individual_rank", [None, (1, 0, 2)])
def test_parts_equal_the_reference(seed, individual_rank, x64):
    arrays = oracle.draw(seed, noise=0.6)
    for rank in (1, 2, 4):
        wanted = reference.ajive(arrays, rank, SIGNAL_RANKS, individual_rank)
        algorithm = AJIVE(rank, SIGNAL_RANKS, individual_rank=individual_rank)
        found = decompose(algorithm, views_of(arrays))
        np.testing.assert_allclose(
            projector(found.shared.scores), projector(wanted.scores), atol=1e-10
        )
        joint, individual = parts_of(found, arrays)
        chex.assert_trees_all_close(joint, wanted.joint, atol=1e-9)
        chex.assert_trees_all_close(individual, wanted.individual, atol=1e-9)
        lengths = np.linalg.norm(found.local.individual_loadings, axis=1)
        assert (lengths > 0).sum(1).tolist() == wanted.individual_ranks


@pytest.mark.parametrize("found", FOUND, ids=lambda found: str(found["seed"]))
def test_parts_equal_mvlearns(found, x64):
    arrays = oracle.draw(found["seed"])
    result = decompose(AJIVE(found["rank"], SIGNAL_RANKS), views_of(arrays))
    wanted = projector(found["joint_scores"])
    np.testing.assert_allclose(projector(result.shared.scores), wanted, atol=1e-8)
    joint, individual = parts_of(result, arrays)
    for j, i, x, own in zip(joint, individual, arrays, found["individual"], strict=True):
        np.testing.assert_allclose(j, wanted @ x, atol=1e-8)
        values = np.asarray(own["scores"]) * own["singular_values"]
        np.testing.assert_allclose(i, values @ np.asarray(own["loadings"]).T, atol=1e-8)


def test_one_draw_has_a_direction_that_is_dropped():
    (found,) = [x for x in FOUND if x["rank"] == 3]
    assert np.shape(found["joint_scores"])[1] == 2
    views = views_of([x.astype(np.float32) for x in oracle.draw(found["seed"])])
    solution = helpers.fit(AJIVE(3, SIGNAL_RANKS), views, rounds=1)
    assert (solution.result.shared.singular_values == 0).sum() == 1
    assert solution.remarks()[0].startswith("Some view lacks 1 of the 3 joint directions")


def test_orthogonal_parts_are_found_exactly(x64):
    common, parts = orthogonal()
    arrays = [joint + own for joint, own in parts]
    result = decompose(AJIVE(2, (3, 4, 3)), views_of(arrays))
    np.testing.assert_allclose(result.shared.singular_values, 3**0.5, atol=1e-12)
    np.testing.assert_allclose(projector(result.shared.scores), projector(common), atol=1e-12)
    joint, individual = parts_of(result, arrays)
    chex.assert_trees_all_close(joint, [joint for joint, _ in parts], atol=1e-12)
    chex.assert_trees_all_close(individual, [own for _, own in parts], atol=1e-12)


def test_the_order_of_the_views_does_not_matter(x64):
    arrays, order = oracle.draw(0), [2, 0, 1]
    one = decompose(AJIVE(2, SIGNAL_RANKS), views_of(arrays))
    ranks = tuple(SIGNAL_RANKS[i] for i in order)
    other = decompose(AJIVE(2, ranks), views_of([arrays[i] for i in order]))
    np.testing.assert_allclose(other.shared.singular_values, one.shared.singular_values, rtol=1e-12)
    wanted = [[part[i] for i in order] for part in parts_of(one, arrays)]
    found = parts_of(other, [arrays[i] for i in order])
    chex.assert_trees_all_close(list(found), wanted, atol=1e-10)
    # Ranks go with the clients' ids.
    taken = decompose(AJIVE(2, SIGNAL_RANKS), views_of(arrays).take(np.array(order)))
    chex.assert_trees_all_close(
        list(parts_of(taken, [arrays[i] for i in order])), wanted, atol=1e-10
    )


def test_a_new_view_gets_its_parts(key, x64):
    arrays = oracle.draw(0)
    solution = jf.fit(AJIVE(2, 3), views_of(arrays), rounds=1, key=key)
    again = jf.personalize(AJIVE(2, 3), solution, views_of(arrays))
    chex.assert_trees_all_close(again.local, solution.result.local, atol=1e-12)


def test_scores_of_other_entities(x64):
    """Without noise they are exact, from any single view."""
    rng = np.random.default_rng(1)
    _, parts = orthogonal()
    result = decompose(AJIVE(2, (3, 4, 3)), views_of([joint + own for joint, own in parts]))
    local = result.local
    joint = rng.normal(size=(5, 2))
    own = (
        rng.normal(size=(3, 5, 4))
        * (np.linalg.norm(local.individual_loadings, axis=1) > 0)[:, None]
    )
    values = joint @ local.joint_loadings.mT + own @ local.individual_loadings.mT
    found = jax.vmap(lambda view, x: view.transform(x))(local, values)
    np.testing.assert_allclose(found.joint, np.stack([joint] * 3), atol=1e-11)
    np.testing.assert_allclose(found.individual, own, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_derivatives_equal_finite_differences(seed, x64):
    """In one of the draws a direction is dropped; thresholds apply to all ranks."""
    arrays = [jnp.asarray(x) for x in oracle.draw(seed)]
    rng = np.random.default_rng(0)
    moves = [jnp.asarray(rng.normal(size=x.shape)) for x in arrays]
    weights = jnp.asarray(rng.normal(size=(2, 3, 20, 11)))

    @jax.jit
    @jax.value_and_grad
    def value(step):
        clients = views_of([x + step * move for x, move in zip(arrays, moves, strict=True)])
        run = jf.rollout(AJIVE(3, SIGNAL_RANKS), clients, rounds=1, key=jax.random.key(0))
        shared, local = run.result
        return jnp.sum(weights * jnp.stack([local.joint(shared), local.individual()]))

    h = 1e-4
    near, far = ((value(x)[0] - value(-x)[0]) / (2 * x) for x in (h, 2 * h))
    np.testing.assert_allclose(value(0.0)[1], (4 * near - far) / 3, rtol=1e-7)


# --- fewer directions than wanted ----------------------------------------------------------------


def test_views_without_a_common_direction_have_individual_parts_alone(key, x64):
    _, parts = orthogonal()
    arrays = [own for _, own in parts]
    solution = jf.fit(AJIVE(2, (1, 2, 1)), views_of(arrays), rounds=1, key=key)
    assert not np.any(solution.result.shared.scores)
    joint, individual = parts_of(solution.result, arrays)
    assert not any(np.any(part) for part in joint)
    chex.assert_trees_all_close(individual, arrays, atol=1e-12)
    assert "lacks 2 of the 2" in solution.remarks()[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_views_with_fewer_directions_than_their_rank(dtype, key, x64):
    common, parts = orthogonal()
    arrays = [(joint + own).astype(dtype) for joint, own in parts]
    found = decompose(AJIVE(4, 4), views_of(arrays))  # the second has four, the others three
    scores = np.asarray(found.shared.scores)
    assert (np.linalg.norm(scores, axis=0) > 0.5).sum() == 2
    tolerance = 1e-4 if dtype is np.float32 else 1e-11
    np.testing.assert_allclose(projector(scores), projector(common), atol=tolerance)
    more = decompose(AJIVE(4, 4, individual_rank=3), views_of(arrays))
    ranks = (np.linalg.norm(more.local.individual_loadings, axis=1) > 0).sum(1)
    np.testing.assert_array_equal(ranks, [1, 2, 1])
    for individual, (_, own) in zip(parts_of(more, arrays)[1], parts, strict=True):
        np.testing.assert_allclose(individual, own, atol=10 * tolerance)


def test_directions_of_single_views_are_not_joint_however_the_decomposition_mixes_them(key):
    bases = jnp.split(jnp.eye(8)[:, [0, 1, 2, 0, 3, 4]], 2, axis=1)  # the first one is common
    shared = AJIVE(3, 3).server_init(key, jnp.stack(bases), None, None)
    np.testing.assert_allclose(shared.singular_values, [2**0.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(jnp.abs(shared.scores), np.eye(8)[:, :1] * [1, 0, 0], atol=1e-6)


def test_the_directions_of_one_view_are_joint(key):
    shared = AJIVE(2, 2).server_init(key, jnp.eye(5)[None, :, :2], None, None)
    np.testing.assert_allclose(shared.singular_values, [1, 1], rtol=1e-6)


def test_a_view_of_zeros_shares_nothing(key):
    arrays = [x.astype(np.float32) for x in oracle.draw(0)]
    result = decompose(AJIVE(2, 3), views_of([*arrays, np.zeros((20, 4), np.float32)]))
    assert not np.any(result.shared.scores) and np.isfinite(result.local.individual()).all()
    found = jf.gcca.joint_rank(
        views_of([*arrays, np.zeros((20, 4), np.float32)]), 3, key=key, samples=50
    )
    assert np.isfinite(found.wedin_bound)


# --- the number of joint directions --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "found",
    [FOUND[0], *(found for found in FOUND[1:])],
    ids=lambda found: str(found["seed"]),
)
def test_bounds_agree_with_mvlearns(found, key, x64):
    """Its quantiles of a thousand draws lie within five standard errors of ours."""
    clients = views_of(oracle.draw(found["seed"]))

    def bounds(wedin, random):
        return jf.gcca.joint_rank(
            clients,
            SIGNAL_RANKS,
            key=key,
            samples=4000,
            wedin_percentile=wedin,
            random_percentile=random,
        )

    low, high = bounds(1.5, 91.5), bounds(8.5, 98.5)
    assert low.wedin_bound < found["wedin_bound"] < high.wedin_bound
    assert low.random_bound < found["random_bound"] < high.random_bound
    assert bounds(5.0, 95.0).rank == found["rank_by_rule"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_without_noise_the_rank_is_exact(dtype, key, x64):
    _, parts = orthogonal(entities=40, features=(8, 8, 6))
    ranks = (3, 4, 3)
    both = views_of([(joint + own).astype(dtype) for joint, own in parts])
    found = jf.gcca.joint_rank(both, ranks, key=key, samples=200)
    assert found.rank == 2
    np.testing.assert_allclose(found.wedin_bound, 3, rtol=1e-5)
    apart = views_of([own.astype(dtype) for _, own in parts])
    assert jf.gcca.joint_rank(apart, (1, 2, 1), key=key, samples=200).rank == 0


@pytest.mark.slow
def test_padding_does_not_change_the_bounds(key, x64):
    clients = views_of(oracle.draw(0))
    values = jnp.pad(clients.data.values, [(0, 0), (0, 0), (0, 4)])
    wider = eqx.tree_at(lambda v: v.data.values, clients, values)
    one, other = (
        jf.gcca.joint_rank(x, SIGNAL_RANKS, key=key, samples=100) for x in (clients, wider)
    )
    chex.assert_trees_all_close(tuple(other), tuple(one), atol=1e-10)


# --- what is refused -----------------------------------------------------------------------------


X = np.ones((6, 3), np.float32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AJIVE(4, (1, 2)), "rank: wanted at most the views' 3 together, got 4"),
        (lambda: AJIVE(1, 4), "signal_rank: wanted at most 3, got 4"),
        (lambda: AJIVE(1, (1, 1, 1)), r"signal_rank: wanted one .* ids 0 to 1, got 3 for the ids"),
        (lambda: AJIVE(1, 2, individual_rank=4), "individual_rank: wanted at most 3, got 4"),
        (lambda: AJIVE(1, 2, individual_rank=(1,)), "individual_rank: wanted one for all"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(make, message, key):
    with pytest.raises(ValueError, match=message):
        jf.fit(make(), views_of([X, X]), rounds=1, key=key)


def test_sparse_views_are_refused(key):
    sparse = jf.gcca.Views.from_sparse([scipy.sparse.csr_array(X)] * 2)
    with pytest.raises(ValueError, match="clients: AJIVE needs dense views"):
        jf.fit(AJIVE(1, 2), sparse, rounds=1, key=key)
    with pytest.raises(ValueError, match="views: the joint rank needs dense views"):
        jf.gcca.joint_rank(sparse, 2, key=key)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"signal_rank": 4}, "signal_rank: wanted at most 3, got 4"),
        ({"signal_rank": 0}, "signal_rank: wanted a whole number"),
        ({"samples": 0}, "samples: wanted a whole number"),
        ({"wedin_percentile": 101.0}, "wedin_percentile: wanted a number from 0 to 100"),
        ({"random_percentile": -1.0}, "random_percentile: wanted a number from 0 to 100"),
    ],
)
def test_unfit_arguments_of_the_rule_are_refused(options, message, key):
    with pytest.raises(ValueError, match=message):
        jf.gcca.joint_rank(views_of([X, X]), **{"signal_rank": 1, "key": key} | options)
