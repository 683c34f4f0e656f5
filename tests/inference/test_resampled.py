"""Each resample is a run on clients with random weights, or whose rows have random weights."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.inference import Resampled
from jaxfed.inference.weights import row_weights
from tests.examples import fedavg
from tests.helpers import gaussian_samples

KEY = jax.random.key(0)
COUNTS = 9, 12, 7, 10


@pytest.fixture
def tables(x64):
    return gaussian_samples(COUNTS, np.linspace(2, 0.5, 6), dtype=float)


def fitted(algorithm, clients, rounds=8):
    return jf.fit(algorithm, clients, rounds=rounds, key=KEY).result


def spans(basis):
    return basis @ np.swapaxes(basis, -1, -2)


@pytest.mark.parametrize(
    ("model", "rounds"),
    [
        pytest.param(jf.pca.PerPCA(1, 2), 8, marks=pytest.mark.slow),
        (jf.pca.OneShot(1, 2), 1),
        pytest.param(jf.pca.LocalPower(2), 3, marks=pytest.mark.slow),
    ],
    ids=["means", "factors", "sums"],
)
def test_a_resample_is_a_run_on_weighted_rows(tables, model, rounds):
    clients = jf.Clients.from_samples(tables)
    draws = Resampled(model, 3, seed=5)
    found = fitted(draws, clients, rounds)
    for number in range(3):
        weights = jax.vmap(draws.weights, (0, 0, None))(clients.data, clients.ids, number)
        weighted = [x * np.sqrt(w[: len(x)])[:, None] for x, w in zip(tables, weights, strict=True)]
        wanted = fitted(model, jf.Clients.from_samples(weighted), rounds)
        chex.assert_trees_all_close(spans(found.shared[number]), spans(wanted.shared), atol=1e-9)
        if wanted.local is not None:
            chex.assert_trees_all_close(
                spans(found.local[:, number]), spans(wanted.local), atol=1e-9
            )


@pytest.mark.slow
def test_a_resample_of_clients_is_a_run_with_their_weights(tables):
    clients = jf.Clients.from_samples(tables)
    model = jf.pca.PerPCA(1, 2)
    draws = Resampled(model, 3, seed=5, clients=len(tables))
    # Starts do not depend on the scale of a client's data, only on its weight.
    found = fitted(draws, clients, 100)
    for number in range(3):
        weights = jax.vmap(draws.weights, (0, 0, None))(clients.data, clients.ids, number)
        wanted = fitted(model, jf.Clients.from_samples(tables, weights=weights), 100)
        chex.assert_trees_all_close(spans(found.shared[number]), spans(wanted.shared), atol=1e-9)
        chex.assert_trees_all_close(spans(found.local[:, number]), spans(wanted.local), atol=1e-9)


@pytest.mark.slow
def test_views_have_the_same_weights(x64):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(15, width)) for width in (4, 6, 3)]
    model = jf.gcca.MaxVar(2)
    draws = Resampled(model, 2, seed=3)
    views = jf.gcca.Views.from_arrays(arrays)
    found = fitted(draws, views, 40)
    weights = jax.vmap(draws.weights, (0, 0, None))(views.data, views.ids, 1)
    chex.assert_trees_all_close(weights, jnp.broadcast_to(weights[0], weights.shape))
    weighted = [x * np.sqrt(weights[0])[:, None] for x in arrays]
    wanted = fitted(model, jf.gcca.Views.from_arrays(weighted), 40)
    chex.assert_trees_all_close(spans(found.shared[1]), spans(wanted.shared), atol=1e-6)


def test_weights_have_the_moments_of_a_poisson_count(x64):
    """Their mean is one; variance and third moment are those of a Poisson count."""
    count = 400.0
    draw = jax.vmap(lambda i: row_weights(KEY, i, jnp.asarray(count), 400))
    weights = np.asarray(draw(jnp.arange(500)))
    np.testing.assert_allclose(weights.mean(1), 1, rtol=1e-12)
    assert weights.min() > 0
    for power, error in ((2, 0.01), (3, 0.03)):
        assert abs(np.mean((weights - 1) ** power) - 1) < error


@pytest.mark.slow
def test_weights_depend_neither_on_padding_nor_on_blocks(tables):
    count = jnp.asarray(9.0)
    short, long = (row_weights(KEY, jnp.asarray(2), count, rows) for rows in (9, 14))
    chex.assert_trees_all_equal(short, long[:9])
    clients, model = jf.Clients.from_samples(tables), jf.pca.PerPCA(1, 2)
    whole = fitted(Resampled(model, 3, seed=5), clients)
    last = fitted(Resampled(model, 2, seed=5, first=1), clients)
    chex.assert_trees_all_close(spans(whole.shared[1:]), spans(last.shared), atol=1e-12)


@pytest.mark.slow
def test_all_resamples_start_from_the_state_of_one_run(tables):
    clients, model = jf.Clients.from_samples(tables), jf.pca.PerPCA(1, 1)
    solution = jf.fit(model, clients, rounds=60, key=KEY)
    draws = Resampled(model, 2, state=solution.server)
    few = jf.fit(draws, clients, rounds=12, key=KEY, warm_start=solution)
    many = fitted(Resampled(model, 2), clients, 60)
    chex.assert_trees_all_close(spans(few.result.shared), spans(many.shared), atol=1e-4)
    assert few.history["stopping_measure"][-1] < 1e-7


@pytest.mark.slow
def test_a_run_goes_on_from_the_states_of_its_resamples(tables):
    clients, model = jf.Clients.from_samples(tables), jf.pca.PerPCA(1, 1)
    start = jf.fit(Resampled(model, 2), clients, rounds=8, key=KEY)
    draws = Resampled(model, 2, states=start.server)
    with pytest.raises(ValueError, match="states: wanted None beside state"):
        Resampled(model, 2, state=start.server, states=start.server)
    found = jf.fit(draws, clients, rounds=4, key=KEY, warm_start=start)
    wanted = jf.fit(Resampled(model, 2), clients, rounds=12, key=KEY)
    chex.assert_trees_all_close(spans(found.result.shared), spans(wanted.result.shared), atol=1e-4)
    np.testing.assert_allclose(found.history["objective"], wanted.history["objective"][-4:], 1e-5)


def test_a_warm_start_continues_every_resample(tables):
    clients = jf.Clients.from_samples(tables)
    draws = Resampled(jf.pca.PerPCA(1, 1, solver="gradient", step_size=0.05), 2)
    whole, half = fitted(draws, clients, 4), fitted(draws, clients, 2)
    again = jf.fit(draws, clients, rounds=2, key=KEY, warm_start=half).result
    chex.assert_trees_all_close(spans(again.shared), spans(whole.shared), atol=1e-9)


def test_what_cannot_be_resampled_is_refused(tables):
    model = jf.pca.PerPCA(1, 1)
    moments = jf.Clients.from_moments(np.stack([x.T @ x for x in tables]))
    with pytest.raises(ValueError, match=r"^clients: wanted samples or dense views"):
        fitted(Resampled(model, 2), moments)
    with pytest.raises(ValueError, match=r"^clients: wanted 4, all clients, got 5"):
        fitted(Resampled(model, 2, clients=5), jf.Clients.from_samples(tables))
    views = jf.gcca.Views.from_arrays(tables[:1] * 4)
    with pytest.raises(ValueError, match=r"^clients: wanted None for an algorithm whose"):
        fitted(Resampled(jf.gcca.MaxVar(2), 2, clients=4), views)


@pytest.mark.parametrize(
    "model",
    [
        jf.pca.TCMF(1, 1, threshold=1.0),
        jf.preprocess.Standardize(),
        jf.aggregation.Robust(fedavg(), groups=3),
    ],
    ids=["thresholds", "means", "networks"],
)
def test_algorithms_that_see_samples_in_other_ways_are_refused(model):
    with pytest.raises(ValueError, match=r"^algorithm: wanted one that sees samples through"):
        Resampled(model, 2)
