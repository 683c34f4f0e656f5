"""Standard errors and intervals of statistics, over resamples."""

import subprocess
import sys

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import datasets

import jaxfed as jf
from jaxfed.inference import Bootstrap, Resampled, bootstrap
from jaxfed.inference.bootstrap import _expanded
from jaxfed.inference.weights import reweighted

KEY = jax.random.key(0)
MODEL = jf.pca.PerPCA(1, 1)


def drawn(samples, clients=5):
    data = jf.data.perpca_synthetic(
        key=KEY,
        clients=clients,
        features=6,
        shared_rank=1,
        local_rank=1,
        samples=samples,
        shared_scale=2.0,
        local_scale=1.5,
        noise_variance=0.2,
    )
    return jf.Clients.from_samples(np.asarray(data.samples, float))


def fitted(clients, rounds=60):
    return jf.fit(MODEL, clients, rounds=rounds, key=KEY)


def energy(result, clients):
    """The mean energy, which no solution enters."""
    del result
    return clients.weights @ clients.data.energy


def shares(result, clients):
    scores = clients.data.values @ result.shared
    own = jnp.sum(scores**2, axis=(1, 2)) / clients.data.count / clients.data.energy
    return {"mean": clients.weights @ own, "projector": result.shared @ result.shared.T}


@pytest.mark.slow
def test_standard_errors_of_means_are_the_textbooks(x64):
    clients = drawn(40)
    solution = fitted(clients, 5)
    norms = np.sum(np.asarray(clients.data.values) ** 2, axis=2)
    found = bootstrap(
        solution, clients, energy, key=KEY, resamples=2000, runs_at_once=500, rounds=1
    )
    wanted = np.sqrt(np.sum(norms.var(axis=1, ddof=1) / 40)) / 5
    np.testing.assert_allclose(found.standard_error, wanted, rtol=0.05)
    found = bootstrap(
        solution, clients, energy, key=KEY, resamples=2000, runs_at_once=500, rounds=1, of="clients"
    )
    wanted = norms.mean(axis=1).std(ddof=1) / np.sqrt(5)
    np.testing.assert_allclose(found.standard_error, wanted, rtol=0.1)
    assert found.drawn == 5


@pytest.mark.slow
def test_one_step_agrees_with_refits_of_many_samples(x64):
    clients = drawn(400)
    solution = fitted(clients)
    both = [
        bootstrap(solution, clients, shares, key=KEY, resamples=100, runs_at_once=50, method=method)
        for method in ("refit", "one_step")
    ]
    chex.assert_trees_all_close(both[0].estimate, both[1].estimate)
    refit, one_step = (each.standard_error for each in both)
    np.testing.assert_allclose(one_step["mean"], refit["mean"], rtol=0.02)
    sizes = [np.linalg.norm(each["projector"]) for each in (refit, one_step)]
    np.testing.assert_allclose(*sizes, rtol=0.02)
    # The same weights, so that each resample agrees to second order.
    refit, one_step = (each.replicates["projector"] for each in both)
    moved = np.abs(refit - both[0].estimate["projector"]).max()
    assert np.abs(refit - one_step).max() < 0.15 * moved


@pytest.mark.slow
@pytest.mark.parametrize(
    "clients_of",
    [None, 5],
    ids=["samples", "clients"],
)
def test_one_step_is_the_derivative_of_the_solution(x64, clients_of):
    """Along weights, against differences of whole solves with many rounds."""
    clients = drawn(30)
    solution = fitted(clients)
    draws = Resampled(MODEL, 2, clients=clients_of)
    _, changes = _expanded(draws, solution.result, clients, KEY, 1)
    weights = jax.vmap(draws.weights, (0, 0, None))(clients.data, clients.ids, 1)

    def along(step):
        data = jax.vmap(reweighted)(clients.data, 1 + step * (weights - 1))
        other = eqx.tree_at(lambda x: x.data, clients, data)
        basis = jf.fit(MODEL, other, rounds=100, key=KEY, warm_start=solution).result.shared
        return basis @ basis.T

    wanted = (along(1e-4) - along(-1e-4)) / 2e-4
    moved = changes.shared[0, 1] @ solution.result.shared.T
    np.testing.assert_allclose(moved + moved.T, wanted, atol=1e-3 * np.abs(wanted).max())


def test_intervals_of_known_replicates():
    rng = np.random.default_rng(0)
    replicates = rng.normal(1.0, 2.0, size=100_000)
    found = Bootstrap(np.asarray(0.5), replicates, 0.0, "samples", "refit", 10**6)
    normal = found.interval(0.9)
    np.testing.assert_allclose([normal.lower, normal.upper], [-3.29, 3.29], atol=0.05)
    percentile = found.interval(0.9, "percentile")
    np.testing.assert_allclose([percentile.lower, percentile.upper], [-2.29, 4.29], atol=0.05)
    odds = found.map(jax.nn.sigmoid).interval(0.9, "logit")
    expected = 1 / (1 + np.exp(-np.asarray([normal.lower, normal.upper])))
    np.testing.assert_allclose([odds.lower, odds.upper], expected, atol=1e-3)


def test_few_draws_widen_intervals():
    replicates = np.random.default_rng(0).normal(size=1000)
    few, many = (
        Bootstrap(np.zeros(()), replicates, 0.0, "samples", "refit", drawn).interval()
        for drawn in (3, 1000)
    )
    assert few.upper - few.lower > 2 * (many.upper - many.lower)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resamples": 1}, "resamples: wanted"),
        ({"of": "entities"}, "of: wanted"),
        ({"method": "exact"}, "method: wanted"),
        ({"runs_at_once": 1}, "runs_at_once: wanted"),
        ({"rounds": 0}, "rounds: wanted"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    clients = drawn(10)
    solution = jf.fit(jf.pca.Local(1), clients, rounds=1, key=KEY)
    with pytest.raises(ValueError, match=f"^{message}"):
        bootstrap(solution, clients, energy, key=KEY, **options)


@pytest.mark.slow
def test_data_without_spread_are_refused():
    clients = drawn(10)
    solution = fitted(clients, 2)
    two = jf.Clients.from_samples(clients.data.values[:, :2])
    with pytest.raises(ValueError, match=r"^clients: wanted at least 3 samples of each client"):
        bootstrap(solution, two, energy, key=KEY)
    # Clients that are drawn again themselves may be as small.
    alike = {"resamples": 2, "runs_at_once": 2, "of": "clients", "rounds": 1}
    assert np.isfinite(bootstrap(solution, two, energy, key=KEY, **alike).standard_error)
    with pytest.raises(ValueError, match=r"^clients: wanted those of the run, in its order"):
        bootstrap(solution, clients.take([1, 0, 2, 3, 4]), energy, key=KEY)
    with pytest.raises(ValueError, match=r"^solution: wanted the solution of one run, not traced"):
        jax.jit(lambda x: bootstrap(x, clients, energy, key=KEY).estimate)(solution)
    several = jf.MultiStart(MODEL, 2)
    with pytest.raises(ValueError, match=r"^solution: wanted that of one start"):
        bootstrap(jf.fit(several, clients, rounds=2, key=KEY), clients, energy, key=KEY)
    with pytest.raises(ValueError, match=r"^statistic: wanted finite numbers"):
        bootstrap(solution, clients, lambda result, _: result.shared * jnp.nan, key=KEY, rounds=1)
    zeros = jf.Clients.from_samples(np.zeros((5, 10, 3), np.float32))
    with pytest.raises(ValueError, match=r"^solution: wanted one that changes .* or zero, or the"):
        bootstrap(fitted(zeros, 2), zeros, energy, key=KEY)


@pytest.mark.slow
def test_only_one_step_needs_lineax(monkeypatch):
    """The command line and the estimators import the package where it is not installed."""
    program = "import sys; sys.modules['lineax'] = None; import jaxfed.inference.bootstrap"
    subprocess.run([sys.executable, "-c", program], check=True)
    clients = drawn(10)
    solution = fitted(clients, 2)
    monkeypatch.setitem(sys.modules, "lineax", None)
    with pytest.raises(ImportError, match="lineax"):
        bootstrap(solution, clients, energy, key=KEY, method="one_step")


@pytest.mark.slow
def test_shares_of_nothing_and_of_all_have_intervals():
    replicates = np.ones((50, 2), np.float32) * np.asarray([0, 1 + 1e-7], np.float32)
    found = Bootstrap(replicates[0], replicates, 0.0, "samples", "refit", 30).interval(kind="logit")
    np.testing.assert_allclose(found.lower, [0, 1], atol=1e-6)
    np.testing.assert_allclose(found.upper, [0, 1], atol=1e-6)


def angle(result, clients):
    """Of the first axis with the shared subspace, which every algorithm finds."""
    del clients
    return jnp.sum(result.shared[0] ** 2)


def replicates_of(algorithm, clients, rounds, more=10):
    solution = jf.fit(algorithm, clients, rounds=rounds, key=KEY)
    return bootstrap(solution, clients, angle, key=KEY, resamples=20, rounds=more).replicates


@pytest.mark.parametrize("rounds", [pytest.param(4, marks=pytest.mark.slow), 9])
def test_lanczos_forgets_the_data_of_the_solution(rounds, x64):
    """What its server keeps of them made intervals too narrow, and later refused to learn."""
    rng = np.random.default_rng(0)
    spread = np.linspace(3, 1, 16)
    clients = jf.Clients.from_samples([rng.normal(size=(30, 16)) * spread for _ in range(3)])
    wanted = replicates_of(jf.pca.Pooled(2), clients, 1, 1)  # exact
    found = replicates_of(jf.pca.BlockLanczos(2), clients, rounds)
    np.testing.assert_allclose(found, wanted, atol=1e-3 * np.std(wanted))


@pytest.mark.slow
def test_gradient_steps_go_on_until_intervals_are_as_wide_as_of_many_rounds(x64):
    data = jf.data.perpca_synthetic(
        key=jax.random.key(1),
        clients=6,
        features=20,
        shared_rank=2,
        local_rank=2,
        samples=100,
        noise_variance=0.7,
        local="random",
    )
    clients = jf.Clients.from_samples(np.asarray(data.samples, float))
    model = jf.pca.PerPCA(2, 2, solver="gradient")
    solution = jf.fit(model, clients, rounds=1000, key=KEY)
    few = check_default_rounds(solution, clients, 500)
    assert few < 0.8


@pytest.mark.slow
def test_the_default_solver_goes_on_from_its_memory():
    """Digits' second and third axes have nearly one variance, so ten rounds do not turn them."""
    digits = datasets.load_digits()
    images = (digits.data / 16).astype(np.float32)
    clients = jf.Clients.from_samples([images[digits.target == k] for k in range(10)])
    solution = jf.fit(jf.pca.PerPCA(3, 2), clients, rounds=100, key=KEY)
    assert check_default_rounds(solution, clients, 120) < 0.95


def check_default_rounds(solution, clients, enough):
    """Intervals are as wide as of enough rounds; returns how wide those of ten rounds are."""
    by_default, few, many = (
        jf.inference.confidence(solution, clients, key=KEY, resamples=25, rounds=rounds)
        for rounds in (None, 10, enough)
    )
    assert abs(by_default.angle / many.angle - 1) < 0.01 and not by_default.remarks
    assert "had not converged" in few.remarks[0]
    return few.angle / many.angle
