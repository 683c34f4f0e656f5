"""Influence against runs without each client, and clients that stand out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.aggregation import Robust, client_influence
from tests import helpers
from tests.helpers import gaussian

CLIENTS, RANK, FEATURES = 20, 2, 6
fit = functools.partial(helpers.fit, rounds=400)
POWER = jf.pca.PerPCA(RANK, 1, solver="gradient", variant="power")


def clients_of(weights=None):
    """Clients with common directions, except the last, whose directions differ."""
    rng = np.random.default_rng(0)
    values = []
    for i in range(CLIENTS):
        frame = np.linalg.qr(rng.normal(size=(FEATURES, 4)))[0]
        shared = frame[:, 2:] if i == CLIENTS - 1 else np.eye(FEATURES)[:, :RANK]
        own = frame[:, :1] - shared @ (shared.T @ frame[:, :1])
        frame = np.hstack([shared, own / np.linalg.norm(own)])
        scores = rng.normal(size=(100, 3)) * [3, 2.5, 2]
        values.append(scores @ frame.T + 0.3 * rng.normal(size=(100, FEATURES)))
    weights = np.ones(CLIENTS) if weights is None else weights
    return jf.Clients.from_samples(np.array(values), weights=weights)


def projector(solution):
    return np.asarray(solution.result.shared @ solution.result.shared.T)


@pytest.mark.slow
def test_equals_the_change_without_a_client(x64):
    def numbers(result):
        return jnp.stack([result.shared[0] @ result.shared[i] for i in (3, 4)])

    clients = clients_of()
    solution = fit(POWER, clients)
    options = {"key": jax.random.key(1), "of": numbers}
    found = client_influence(solution, clients, rounds=None, **options)
    exact = client_influence(solution, clients, rounds=300, **options)
    for i in (0, 7, CLIENTS - 1):
        weights = np.ones(CLIENTS)
        weights[i] = 0
        change = numbers(fit(POWER, clients_of(weights)).result) - numbers(solution.result)
        np.testing.assert_allclose(found[i], np.sqrt(np.mean(change**2)), rtol=0.3)
        np.testing.assert_allclose(exact[i], np.sqrt(np.mean(change**2)), rtol=1e-4)
    assert np.argmax(found) == CLIENTS - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [POWER, Robust(POWER, groups=CLIENTS)],
    ids=["PerPCA", "Robust"],
)
def test_estimates_the_change_of_the_projector(algorithm, x64):
    clients = clients_of()
    solution = fit(algorithm, clients)
    found = client_influence(solution, clients, key=jax.random.key(1), rounds=None)
    exact = client_influence(solution, clients, key=jax.random.key(1), rounds=300)
    weights = np.ones(CLIENTS)
    weights[4] = 0
    change = np.linalg.norm(projector(fit(algorithm, clients_of(weights))) - projector(solution))
    assert 0.4 * change < found[4] < 2.5 * change
    np.testing.assert_allclose(exact[4], change, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        jf.pca.PerPCA(RANK, 1, solver="gradient"),
        jf.pca.PerPCA(RANK, 1),
    ],
    ids=["PerPCA", "PerPCA"],
)
@pytest.mark.parametrize("scale", [1, 1000])
def test_names_a_client_that_dominates_the_result(algorithm, scale):
    clients = clients_of()
    values = clients.data.values.astype(jnp.float32).at[CLIENTS - 1].multiply(scale)
    clients = jf.Clients.from_samples(values)
    solution = fit(algorithm, clients, rounds=200)
    found = client_influence(solution, clients, key=jax.random.key(1))
    assert np.argmax(found) == CLIENTS - 1
    assert found.max() > 1.5 * np.sort(found)[-2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"solution": "a run"}, r"solution: wanted .*got"),
        ({"clients": None}, r"clients: wanted .*got"),
        ({"rounds": 0}, r"rounds: .*got 0"),
        ({"adjoint": jf.adjoint.implicit()}, r"adjoint: wanted None .*got"),
        ({"key": 3}, r"key: .*"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options, said):
    clients = gaussian((9, 9, 9))
    solution = fit(jf.pca.SubspaceIteration(2), clients, rounds=1)
    arguments = {"solution": solution, "clients": clients, "key": jax.random.key(0)} | options
    with pytest.raises(ValueError, match=said):
        client_influence(arguments.pop("solution"), arguments.pop("clients"), **arguments)


def test_other_clients_and_results_without_components_are_refused():
    clients = gaussian((9, 9, 9))
    key = jax.random.key(0)
    local = jf.fit(jf.pca.Local(2), clients, rounds=1, key=key)
    with pytest.raises(ValueError, match="of: wanted"):
        client_influence(local, clients, key=key)
    solution = jf.fit(jf.pca.SubspaceIteration(2), clients, rounds=1, key=key)
    with pytest.raises(ValueError, match=r"clients: wanted .* got"):
        client_influence(solution, gaussian((9, 9)), key=key)


@pytest.mark.slow
def test_no_derivative_by_weights_that_do_not_matter(x64):
    clients = clients_of()
    solution = helpers.solve(jf.pca.SubspaceIteration(2), clients, rounds=300)
    with pytest.raises(
        ValueError, match=r"^rounds: wanted a number of rounds, since weights do not change"
    ):
        client_influence(solution, clients, key=jax.random.key(1), rounds=None)
