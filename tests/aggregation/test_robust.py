"""Robust runs: the aggregate against NumPy, bad clients, other options, refusals."""

import functools
from typing import NamedTuple

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.aggregation import (
    Robust,
    biweight,
    coordinate_median,
    far_clients,
    geometric_median,
    trimmed_mean,
)
from tests import helpers
from tests.core.derivatives.test_adjoint_algorithms import clients_of, essence, samples
from tests.helpers import gaussian

CLIENTS, GROUPS, RANK = 12, 6, 2
fit = functools.partial(helpers.fit, rounds=12)


class Told(NamedTuple):
    """A message of two parts, one of them a sum."""

    mean: jax.Array
    total: jf.reduction.Sum


class Tells(jf.Algorithm):
    """Every client sends its first sample; the server keeps what it receives."""

    def server_init(self, key, first, like, warm_start):
        zeros = jnp.zeros(like.values.shape[1], like.values.dtype)
        return Told(zeros, zeros)

    def downlink(self, server):
        return server.mean

    def client_init(self, key, downlink, data, warm_start):
        return None

    def client_step(self, key, downlink, local, data):
        row = data.values[0]
        return Told(row, jf.reduction.Sum(row)), None, {"objective": row.sum()}

    def server_step(self, key, server, uplink):
        return uplink, {}

    def shared_result(self, server):
        return server


class Liars(jf.contract.Wrapper):
    """Subspace iteration in which some clients send a large message that all of them agree on."""

    algorithm: jf.Algorithm
    liars: int = eqx.field(static=True)

    def inner_data(self, data):
        return data[0]

    def prepare(self, data, client_id, rounds):
        return self.algorithm.prepare(data, client_id, rounds), client_id < self.liars

    def client_step(self, key, downlink, local, data):
        sent, local, told = self.algorithm.client_step(key, downlink, local, data[0])
        lie = 1000 * jax.random.normal(jax.random.key(7), downlink.shape, downlink.dtype)
        return jax.tree.map(lambda x: jnp.where(data[1], lie, x), sent), local, told


class Large(Tells):
    """Every client sends a matrix of ten thousand rows and columns."""

    def client_step(self, key, downlink, local, data):
        factor = jnp.zeros((10_000, 1))
        return jf.reduction.Gram(factor), None, {"objective": data.values[0].sum()}


def alike(dtype=np.float64, **options):
    """Clients of the same distribution."""
    return gaussian((40,) * CLIENTS, dtype=dtype, **options)


def space(solution):
    return np.asarray(solution.result.shared @ solution.result.shared.T)


def lying(groups=GROUPS, **options):
    return Robust(Liars(jf.pca.SubspaceIteration(RANK), 1), groups=groups, **options)


def test_each_part_has_its_own_shares(x64):
    """A sum counts groups by their clients, a mean beside it by their weights."""
    clients = alike(weights=np.arange(1, CLIENTS + 1.0) ** 4)  # the first count less than 1e-3
    rows = np.asarray(clients.data.values[:, 0])
    found = fit(Robust(Tells(), coordinate_median(), groups=CLIENTS), clients, rounds=1)
    mean, total = found.result.shared
    np.testing.assert_allclose(total, CLIENTS * np.median(rows, axis=0), rtol=1e-10)
    order = np.argsort(rows, axis=0)
    mass = np.cumsum(np.asarray(clients.weights)[order], axis=0)
    medians = np.take_along_axis(rows, order, 0)[np.argmax(mass > 0.5, axis=0), np.arange(6)]
    np.testing.assert_allclose(mean, medians, rtol=1e-10)


@pytest.mark.slow
def test_the_server_receives_the_aggregate_of_group_means(x64):
    weights = np.arange(1, CLIENTS + 1.0)
    clients = alike(weights=weights)
    rows = np.asarray(clients.data.values[:, 0])
    found = fit(Robust(Tells(), trimmed_mean(0.0), groups=GROUPS), clients, rounds=1).result.shared
    # With nothing trimmed, the weighted mean of group means is the mean, and likewise for a sum.
    chex.assert_trees_all_close(found.mean, weights @ rows / weights.sum(), rtol=1e-10)
    of = np.arange(CLIENTS) % GROUPS
    mass = np.bincount(of, weights) / weights.sum()
    by_weight = np.stack([weights[of == g] @ rows[of == g] for g in range(GROUPS)])
    by_weight /= weights.sum() * mass[:, None]
    by_count = np.stack([rows[of == g].mean(0) for g in range(GROUPS)])
    chex.assert_trees_all_close(found.total, rows.sum(0), rtol=1e-10)
    # Each part is aggregated by itself.
    found = fit(Robust(Tells(), geometric_median(), groups=GROUPS), clients, rounds=1).result
    wanted = (
        median_point(by_weight, mass),
        CLIENTS * median_point(by_count, np.full(GROUPS, 1 / GROUPS)),
    )
    chex.assert_trees_all_close(tuple(found.shared), wanted, atol=1e-4)


def median_point(rows, mass):
    center = mass @ rows
    for _ in range(2000):
        inverse = mass / np.linalg.norm(rows - center, axis=1)
        center = inverse @ rows / inverse.sum()
    return center


def test_a_liar_is_found_and_does_no_harm(x64):
    clients = alike()
    honest = space(fit(jf.pca.SubspaceIteration(RANK), clients))
    assert np.linalg.norm(space(fit(lying().algorithm, clients)) - honest) > 0.5
    for groups, named in ((CLIENTS, [0]), (GROUPS, [0, GROUPS])):
        solution = fit(lying(groups), clients)
        assert np.linalg.norm(space(solution) - honest) < 0.4
        assert far_clients(solution, clients.ids).tolist() == named
        assert solution.history["far_groups"][-1] == 1
        assert any("1 of" in each for each in solution.remarks())


@pytest.mark.slow
def test_equal_messages_give_the_mean(x64):
    values = np.tile(np.asarray(gaussian((40,)).data.values, float), (CLIENTS, 1, 1))
    algorithm = jf.pca.SubspaceIteration(2)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(values, algorithm):
        clients = jf.Clients.from_samples(values)
        shared = jf.rollout(algorithm, clients, rounds=4, key=jax.random.key(0)).result.shared
        return jnp.sum(jnp.arange(6.0) @ (shared @ shared.T)), shared

    (_, mean), wanted = run(jnp.asarray(values), algorithm)
    (_, robust), slopes = run(jnp.asarray(values), Robust(algorithm, groups=GROUPS))
    chex.assert_trees_all_close(robust, mean, atol=1e-10)
    chex.assert_trees_all_close(slopes, wanted, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"backend": jf.backend.chunked(5)},
        {"backend": jf.backend.shard(4)},
        {"masked": True},
        {"masked": True, "backend": jf.backend.chunked(5)},
    ],
    ids=str,
)
def test_results_do_not_depend_on_backend_or_masks(how, x64):
    clients = alike()
    masked = how.pop("masked", False)
    found, wanted = fit(lying(masked=masked), clients, **how), fit(lying(), clients)
    chex.assert_trees_all_close(space(found), space(wanted), atol=1e-9)
    chex.assert_trees_all_close(found.history["far_groups"], wanted.history["far_groups"])


@pytest.mark.slow
def test_masks_hide_the_members_of_a_group():
    clients = alike(np.float32)
    channel = jf.channel.secure_sum(CLIENTS, bits=32, bound=1e5)
    channel = jf.Wire(channel, jf.channel.lossless())
    wanted = fit(lying(), clients)
    found = fit(lying(masked=True), clients, channel=channel)
    np.testing.assert_allclose(space(found), space(wanted), atol=0.02)
    with pytest.raises(ValueError, match=r"channel: masked .*masked=True"):
        fit(lying(), clients, channel=channel)


@pytest.mark.slow
def test_differences_of_few_participants_go_to_their_groups(x64):
    clients = gaussian((40,) * 60, dtype=np.float64)
    honest = space(fit(jf.pca.SubspaceIteration(RANK), clients))
    channel = jf.channel.difference(jf.channel.quantize(3))
    solution = fit(
        lying(20), clients, rounds=80, channel=channel, participation=jf.participation.uniform(6)
    )
    assert np.linalg.norm(space(solution) - honest) < 0.4
    assert set(far_clients(solution, clients.ids)) >= {0}


def test_an_absent_client_does_not_count(x64):
    weights = np.ones(CLIENTS)
    weights[3] = 0
    clients = alike(weights=weights)
    spoiled = eqx.tree_at(lambda c: c.data.values, clients, clients.data.values.at[3].mul(50))
    wanted, found = (space(fit(lying(CLIENTS), each)) for each in (clients, spoiled))
    chex.assert_trees_all_close(found, wanted, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "masked"),
    [
        (jf.pca.PerPCA(2, 1, solver="gradient"), False),
        (jf.pca.PerPCA(2, 1, solver="gradient"), True),
        (jf.pca.SubspaceIteration(2), False),
        (jf.pca.SubspaceIteration(2), True),
    ],
    ids=["PerPCA", "PerPCA-masked", "SubspaceIteration", "SubspaceIteration-masked"],
)
def test_a_client_that_sends_nan_counts_as_absent(algorithm, masked, x64):
    clients = alike()
    weights = np.ones(CLIENTS)
    weights[3] = 0
    absent = fit(Robust(algorithm, groups=GROUPS), alike(weights=weights))
    spoiled = eqx.tree_at(lambda c: c.data.values, clients, clients.data.values.at[3].set(jnp.nan))
    found = fit(Robust(algorithm, groups=GROUPS, masked=masked), spoiled)
    assert np.isfinite(found.result.shared).all()
    chex.assert_trees_all_close(space(found), space(absent), atol=1e-8)
    np.testing.assert_allclose(found.history["not_finite"], 1 / CLIENTS)
    assert any("not finite" in each for each in found.remarks())


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        jf.pca.SubspaceIteration(2),
        jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.05, start="local_first"),
    ],
    ids=["SubspaceIteration", "PerPCA"],
)
def test_solutions_have_implicit_derivatives(algorithm, x64):
    values = jnp.asarray(samples(9))
    values = jnp.concatenate([values, 1.1 * values[:, ::-1] + 0.05, 0.9 * values])[:7]
    weights = jnp.ones(7) / 7
    algorithm = Robust(algorithm, groups=7)

    @jax.jit
    @jax.value_and_grad
    def run(values):
        clients = clients_of(algorithm, values, weights)
        solution = jf.rollout(
            algorithm, clients, rounds=1500, key=jax.random.key(0), adjoint=jf.adjoint.implicit()
        )
        return essence(solution.result)

    slope = run(values)[1]
    along = values * np.random.default_rng(0).normal(size=values.shape)
    step = 1e-6  # the second derivatives of medians are large
    ahead, behind = (run(values + s * step * along)[0] for s in (1, -1))
    # After a fixed number of steps, the aggregate still depends on how the basis of the components
    # is rotated, which the derivative leaves out.
    np.testing.assert_allclose(jnp.sum(slope * along), (ahead - behind) / (2 * step), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [biweight(), coordinate_median()],
    ids=["biweight", "coordinate_median"],
)
def test_unrolled_derivatives_from_a_random_start_are_exact(rule, x64):
    values = jnp.asarray(samples(9))
    algorithm = Robust(
        jf.pca.PerPCA(2, 1, solver="gradient", step_size=0.05, start="random"),
        rule,
        groups=len(values),
    )

    @jax.jit
    @jax.value_and_grad
    def run(values):
        clients = clients_of(algorithm, values, jnp.ones(len(values)) / len(values))
        return essence(jf.rollout(algorithm, clients, rounds=20, key=jax.random.key(0)).result)

    along = values * np.random.default_rng(0).normal(size=values.shape)
    step = 1e-6
    difference = (run(values + step * along)[0] - run(values - step * along)[0]) / (2 * step)
    np.testing.assert_allclose(jnp.sum(run(values)[1] * along), difference, rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [coordinate_median(), trimmed_mean()])
def test_a_rule_that_does_not_rotate_has_no_implicit_derivative(rule):
    algorithm = Robust(jf.pca.PerPCA(2, 1, solver="gradient"), rule, groups=CLIENTS)

    def value(weights):
        clients = eqx.tree_at(lambda c: c.weights, alike(), weights)
        solution = jf.rollout(
            algorithm, clients, rounds=2, key=jax.random.key(0), adjoint=jf.adjoint.implicit()
        )
        return essence(solution.result)

    with pytest.raises(ValueError, match=f"adjoint: .* got {type(rule).__name__}"):
        jax.eval_shape(jax.grad(value), alike().weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "groups"),
    [
        (jf.pca.Pooled(RANK), GROUPS),
        (jf.pca.Pooled(RANK), CLIENTS),
        (jf.pca.PerPCA(RANK, 1), GROUPS),
        (jf.pca.PerPCA(RANK, 1), CLIENTS),
    ],
    ids=["Pooled-6", "Pooled-12", "PerPCA-6", "PerPCA-12"],
)
def test_second_moments_of_a_bad_client_do_no_harm(algorithm, groups, x64):
    drawn = jf.data.perpca_synthetic(
        key=jax.random.key(0),
        clients=CLIENTS,
        features=10,
        shared_rank=RANK,
        local_rank=1,
        samples=60,
        shared_scale=4.0,
        local_scale=2.0,
        noise_variance=0.25,
        dtype=jnp.float64,
    )
    clients = jf.Clients.from_samples(drawn.samples)
    honest = space(fit(algorithm, clients))
    # In more directions than local components take up.
    values = clients.data.values.at[0, :, -3:].multiply(50.0)
    spoiled = eqx.tree_at(lambda c: c.data.values, clients, values)
    assert np.linalg.norm(space(fit(algorithm, spoiled)) - honest) > 1.9
    solution = fit(Robust(algorithm, groups=groups), spoiled)
    assert np.linalg.norm(space(solution) - honest) < 0.1
    assert far_clients(solution, clients.ids).tolist() == [0, GROUPS][: CLIENTS // groups]


def test_algorithms_with_memory_are_not_differentiated():
    def value(weights):
        clients = eqx.tree_at(lambda c: c.weights, alike(), weights)
        algorithm = Robust(jf.pca.PerPCA(2, 1), groups=3)
        implicit, key = jf.adjoint.implicit(), jax.random.key(0)
        return essence(jf.rollout(algorithm, clients, rounds=1, key=key, adjoint=implicit).result)

    with pytest.raises(ValueError, match=r"adjoint: wanted .* got PerPCA"):
        jax.eval_shape(jax.grad(value), alike().weights)


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (
            Robust(jf.pca.PerPCA(2, 1, solver="gradient"), groups=CLIENTS + 1),
            r"groups: .*, 12, got 13",
        ),
        (Robust(Large(), groups=CLIENTS), r"groups: wanted at most 10, .* got 12"),
    ],
    ids=["groups", "matrices"],
)
def test_groups_that_do_not_fit_are_refused(algorithm, said):
    with pytest.raises(ValueError, match=said):
        fit(algorithm, alike(np.float32))


def test_groups_without_clients_are_refused():
    clients = alike(np.float32)
    multiples = jf.Clients(clients.data, 3 * jnp.arange(CLIENTS), clients.weights)
    with pytest.raises(ValueError, match=r"groups: .* got 2 of 3 groups without any"):
        fit(Robust(jf.pca.SubspaceIteration(RANK), groups=3), multiples)


@pytest.mark.slow
def test_a_client_with_enormous_values_does_no_harm():
    clients = alike(np.float32)
    algorithm = Robust(jf.pca.SubspaceIteration(RANK), groups=CLIENTS)
    values = clients.data.values.at[0].multiply(1e16)
    spoiled = eqx.tree_at(lambda each: each.data.values, clients, values)
    solution = fit(algorithm, spoiled)
    assert np.linalg.norm(space(solution) - space(fit(algorithm, clients))) < 0.4
    assert far_clients(solution, clients.ids).tolist() == [0]


@pytest.mark.slow
def test_fewer_new_clients_than_groups_get_models():
    clients = alike(np.float32)
    algorithm = Robust(jf.pca.PerPCA(2, 1, solver="gradient"), groups=CLIENTS)
    solution = fit(algorithm, clients)
    ids = jnp.arange(100, 102)
    new = jf.Clients(clients.take([0, 1]).data, ids, jnp.full(2, 0.5))
    found = jf.personalize(algorithm, solution, new, rounds=2)
    chex.assert_tree_all_finite(found)
    assert found.local.shape[0] == 2


@pytest.mark.slow
def test_far_clients_needs_a_robust_solution():
    clients = alike(np.float32)
    with pytest.raises(ValueError, match=r"solution: wanted .*Robust, got one of Local"):
        far_clients(fit(jf.pca.Local(2), clients, rounds=1), clients.ids)


@pytest.mark.slow
def test_memories_have_no_implicit_derivative(key):
    around = jf.aggregation.Robust(jf.pca.HMF(1, 1), groups=4)

    def shared(samples):
        clients = jf.Clients.from_samples(samples)
        run = jf.rollout(around, clients, rounds=3, key=key, adjoint=jf.adjoint.implicit())
        return run.result.shared.sum()

    with pytest.raises(ValueError, match=r"^adjoint: wanted for Robust .*got HMF; take"):
        jax.grad(shared)(jax.random.normal(key, (4, 8, 5)))
