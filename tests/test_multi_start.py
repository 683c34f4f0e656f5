"""Several starts at once equal as many runs, and the result is that of the best."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from tests import helpers

STARTS = "local_first", "common"
ROUNDS = 6
fit = functools.partial(helpers.fit, rounds=ROUNDS)


@pytest.fixture
def clients(x64):
    """Clients with few samples, whose starts lead to different optima."""
    return helpers.gaussian((5,) * 6, np.linspace(2, 0.5, 8), seed=6, dtype=float)


def model(start="local_first"):
    return jf.pca.PerPCA(2, 2, start=start)


def test_each_start_equals_a_run_of_its_own(clients):
    """The history is that of the lowest objective, and so is the result."""
    runs = [fit(model(start), clients) for start in STARTS]
    found = fit(jf.MultiStart(model(), [model(start) for start in STARTS]), clients)
    objectives = np.stack([run.history["objective"] for run in runs])
    assert objectives[1, -1] < 0.99 * objectives[0, -1]
    chex.assert_trees_all_close(found.history["objective"], objectives.min(0), rtol=1e-9)
    measures = [run.history["stopping_measure"] for run in runs]
    wanted = np.where(objectives[0] < objectives[1], *measures)
    chex.assert_trees_all_close(found.history["stopping_measure"], wanted, rtol=1e-6)
    shared, local = runs[1].result
    chex.assert_trees_all_close(
        [found.result.shared @ found.result.shared.T, found.result.local @ found.result.local.mT],
        [shared @ shared.T, local @ local.mT],
        atol=1e-9,
    )
    bits = [run.history["bits_up"] for run in runs]
    # Plus the objective of each start in double precision.
    more = 2 * 64 * np.arange(1, ROUNDS + 1)
    np.testing.assert_array_equal(found.history["bits_up"], sum(bits) + more)


@pytest.mark.slow
def test_the_first_of_equal_starts_wins(x64):
    """Clients are alike, so that all splits of the same components have the same objective."""
    rows = np.random.default_rng(0).normal(size=(5, 8)) * np.linspace(2, 0.5, 8)
    clients = jf.Clients.from_samples(np.broadcast_to(rows, (6, *rows.shape)))
    runs = [fit(model(start), clients).result.shared for start in STARTS]
    one, other = (np.asarray(shared @ shared.T) for shared in runs)
    assert np.linalg.norm(one - other) > 0.1
    for order, wanted in ((STARTS, one), (STARTS[::-1], other)):
        found = fit(jf.MultiStart(model(), [model(start) for start in order]), clients)
        shared = found.result.shared
        np.testing.assert_allclose(shared @ shared.T, wanted, atol=1e-9)


def test_keys_make_starts_differ(clients):
    several = jf.MultiStart(model("random"), 5)
    one = jax.tree.map(lambda x: x[0], clients.data)
    like = jax.eval_shape(lambda: several.prepare(one, jnp.zeros((), jnp.int32), ROUNDS))
    frames = several.downlink(
        several.server_init(jax.random.key(0), ({},) * 5, like, None)
    ).downlinks
    pairs = itertools.combinations(frames, 2)
    assert min(jf.manifolds.grassmann.distance(a, b) for a, b in pairs) > 0.5


@pytest.mark.slow
def test_another_run_continues_from_the_best(clients):
    found = fit(jf.MultiStart(model(), [model(start) for start in STARTS]), clients)
    after = fit(model(), clients, warm_start=found)
    assert after.history["objective"][0] <= found.history["objective"][-1]


@pytest.mark.slow
def test_algorithms_without_first_messages_start_several_times(clients):
    """The result is the best of as many runs, whatever the algorithm sends first."""
    prior = jf.pca.HierarchicalPCA(2, 0.5, 0.1, start="random")
    several = fit(jf.MultiStart(prior, 3), clients).history["objective"]
    assert several[-1] < several[0]


def test_starts_of_a_wrapped_algorithm_are_varied():
    around = jf.MultiStart(
        jf.aggregation.Robust(jf.pca.PerPCA(2, 1, solver="gradient"), groups=3), 3
    )
    assert [one.algorithm.start for one in around.starts] == ["common", "local_first", "random"]
    assert all(one.groups == 3 for one in around.starts)


@pytest.mark.slow
def test_starts_within_a_wrapper_may_differ(clients):
    inner = [jf.pca.PerPCA(1, 1, solver="gradient", start=start, step_size=0.1) for start in STARTS]
    median = jf.aggregation.coordinate_median()
    robust = [jf.aggregation.Robust(each, median, groups=6) for each in inner]
    runs = [fit(each, clients).history["objective"] for each in robust]
    found = fit(jf.MultiStart(robust[0], robust), clients).history["objective"]
    np.testing.assert_allclose(found[-1], min(run[-1] for run in runs), rtol=1e-9)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (jf.pca.OneShot(2, 2), "wanted PerPCA"),
        (jf.pca.PerPCA(2, 2), "got solver quasi_newton"),
        (jf.pca.PerPCA(1, 2, solver="gradient"), "got shared_rank 1 beside 2"),
        (jf.pca.PerPCA(2, 2, solver="gradient", step_size=0.1), "got step_size 0.1"),
    ],
    ids=["algorithm", "solver", "rank", "step"],
)
def test_refuses_starts_that_differ_in_more(other, message):
    one = jf.pca.PerPCA(2, 2, solver="gradient")
    with pytest.raises(ValueError, match=f"^starts: .*{message}"):
        jf.MultiStart(one, [one, other])
