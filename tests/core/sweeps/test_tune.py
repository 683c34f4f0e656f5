"""Hyperparameters by gradients of a held-out loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from bench.tables.inmf import counts

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def problem():
    """Clients around common components, and the error that is expected of other samples."""
    data = jf.data.hierarchical_synthetic(
        key=jax.random.key(0), clients=8, features=5, rank=2, samples=12, prior_variance=0.03
    )

    def held_out(result):
        return jf.metrics.expected_reconstruction_error(result.local, data.local, 0.5)

    return jf.Clients.from_samples(data.samples), held_out


@pytest.mark.slow
def test_the_unit_of_the_loss_does_not_change_the_path(problem):
    """Squares of small losses' derivatives vanish in Adam, and Adam adds 1e-8 to their roots."""
    clients, held_out = problem

    def path(unit):
        tuned = jf.tune(
            jf.pca.HierarchicalPCA(2, 0.5, 0.5, solver="eigenvectors"),
            clients,
            lambda result: unit * held_out(result),
            optax.adam(0.4),
            names=["prior_variance"],
            rounds=100,
            steps=3,
            key=jax.random.key(0),
        )
        return tuned.path["prior_variance"], tuned.loss / unit

    wanted = path(1.0)
    for unit in (1e-24, 1e24):
        np.testing.assert_allclose(path(unit), wanted, rtol=1e-4)
    assert wanted[0][-1] < 0.8 * wanted[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("start", [3e-4, 3.0])
def test_a_prior_variance_is_tuned_as_a_grid_would(problem, start):
    clients, held_out = problem
    tuned = jf.tune(
        jf.pca.HierarchicalPCA(2, 0.5, start, solver="eigenvectors"),
        clients,
        held_out,
        optax.adam(0.4),
        names=["prior_variance"],
        rounds=400,
        steps=40,
        patience=8,
        key=jax.random.key(0),
    )

    @jax.jit
    @jax.vmap
    def error(variance):
        algorithm = jf.pca.HierarchicalPCA(2, 0.5, variance, solver="eigenvectors")
        run = jf.rollout(algorithm, clients, rounds=400, key=jax.random.key(0))
        return held_out(run.result)

    least = error(jnp.geomspace(3e-4, 3.0, 41)).min()
    assert tuned.loss.min() <= least + 1e-3 * abs(least)
    steps = len(tuned.loss)
    assert tuned.path["prior_variance"].shape == (steps,)
    np.testing.assert_allclose(tuned.path["prior_variance"][0], start)
    best = tuned.path["prior_variance"][tuned.loss.argmin()]
    np.testing.assert_allclose(tuned.algorithm.prior_variance, best)
    np.testing.assert_allclose(held_out(tuned.solution.result), tuned.loss.min())
    assert (tuned.adjoint_rounds > 0).all()


@pytest.mark.slow
def test_five_hyperparameters_are_tuned_at_once(problem):
    """For few rounds, where step sizes matter: a grid of ten values each would be 10^5 runs."""
    clients, held_out = problem
    start = {
        "noise_variance": 2.0,
        "initial_variance": 0.5,
        "step_size": 0.01,
        "global_step_size": 0.01,
        "hyper_prior": 0.5,
    }
    algorithm = jf.pca.HierarchicalPCA(2, **start, variance_update="log")
    names = list(start)

    def tuned(names, steps):
        return jf.tune(
            algorithm,
            clients,
            held_out,
            optax.adam(0.2),
            names=names,
            rounds=6,
            steps=steps,
            key=jax.random.key(0),
            adjoint=jf.adjoint.unrolled(),
        )

    together = tuned(names, 15)
    assert set(together.path) == set(names)
    for name in names:  # each has a slope, and is moved by it
        assert abs(np.log(together.path[name][1] / together.path[name][0])) > 0.1, name
    alone = [tuned([name], 15).loss.min() for name in ("initial_variance", "step_size")]
    assert together.loss.min() < min(together.loss[0], *alone)


def of_hierarchical(seed, clients, features, rank, samples, **options):
    """The error that is expected of other samples, by the prior's variance."""
    data = jf.data.hierarchical_synthetic(
        key=jax.random.key(seed),
        clients=clients,
        features=features,
        rank=rank,
        samples=samples,
        prior_variance=0.1,
    )

    def held_out(result):
        return jf.metrics.expected_reconstruction_error(result.local, data.local, 0.5)

    algorithm = jf.pca.HierarchicalPCA(rank, 0.5, 2.0, **options)
    return algorithm, "prior_variance", jf.Clients.from_samples(data.samples), held_out


def of_counts(seed):
    """The error of held-out entries, by the penalty of own parts."""
    samples = np.stack(counts(np.random.default_rng(seed)))
    hidden = np.random.default_rng(seed).random(samples.shape) < 0.15
    gaps = jnp.asarray(np.where(hidden, np.nan, samples))

    def held_out(result):
        found = jf.nmf.complete(result, gaps, penalty=1.0)
        return jnp.sum(jnp.where(hidden, found - samples, 0) ** 2) / np.sum(samples[hidden] ** 2)

    clients = jf.Clients.from_samples(gaps, missing="mask")
    return jf.nmf.INMF(2, 3.0), "penalty", clients, held_out


PROBLEMS = {
    "few features": lambda: of_hierarchical(1, 20, 6, 1, 10, solver="eigenvectors"),
    "more features": lambda: of_hierarchical(2, 10, 12, 3, 15, solver="eigenvectors"),
    "few clients": lambda: of_hierarchical(3, 4, 8, 2, 60, solver="eigenvectors"),
    "gradient steps": lambda: of_hierarchical(4, 8, 10, 2, 15),
    "counts": lambda: of_counts(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROBLEMS)
def test_solves_that_tol_ends_early_go_on(kind):
    """As in the guide, but with a tolerance at which no result is a fixed point."""
    algorithm, name, clients, held_out = PROBLEMS[kind]()
    tuned = jf.tune(
        algorithm,
        clients,
        held_out,
        optax.adam(0.4),
        names=[name],
        rounds=100,
        tol=1e-2,
        steps=10,
        key=jax.random.key(0),
    )
    assert tuned.loss.min() < tuned.loss[0]
    assert tuned.rounds.max() > 100 or not tuned.truncated.any()


@pytest.mark.slow
def test_the_last_rounds_are_differentiated_where_nothing_converges(problem):
    clients, held_out = problem
    tuned = jf.tune(
        jf.pca.HierarchicalPCA(2, 0.5, 3.0, step_size=1e-3, global_step_size=1e-3),
        clients,
        held_out,
        optax.adam(0.4),
        names=["prior_variance"],
        rounds=2,
        steps=3,
        key=jax.random.key(0),
    )
    assert tuned.truncated.all()
    np.testing.assert_array_equal(tuned.rounds, 12)  # the first, four more, and the last
    assert not tuned.adjoint_rounds.any()
    assert np.isfinite(tuned.loss).all()
    assert tuned.path["prior_variance"][-1] != 3.0


class Foreign(jf.adjoint.Adjoint):
    """An adjoint from outside: the implicit one, of which nothing else here knows."""

    inner: jf.adjoint.Adjoint

    def check(self, problem):
        self.inner.check(problem)

    def solve(self, problem, start, tol, options):
        return self.inner.solve(problem, start, tol, options)

    def with_report(self, report):
        return Foreign(self.inner.with_report(report))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Foreign, None])
def test_an_adjoint_from_outside_reports_its_rounds(problem, kind):
    clients, held_out = problem
    implicit = jf.adjoint.implicit()
    tuned = jf.tune(
        jf.pca.HierarchicalPCA(2, 0.5, 0.1, solver="eigenvectors"),
        clients,
        held_out,
        optax.sgd(0.1),
        names=["prior_variance"],
        rounds=200,
        steps=1,
        key=jax.random.key(0),
        adjoint=jf.adjoint.unrolled() if kind is None else kind(implicit),
    )
    assert (tuned.adjoint_rounds > 0).all() == (kind is not None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("names", {"names": ["rank"]}),
        ("names", {"names": ["step_size"]}),  # automatic
        ("names", {"names": []}),
        ("names", {"names": "prior_variance"}),
        ("steps", {"steps": 0}),
        ("patience", {"patience": 0}),
        ("adjoint", {"adjoint": "implicit"}),
        ("progress", {"progress": 1}),
    ],
)
def test_what_cannot_be_tuned_is_refused(problem, name, options):
    clients, held_out = problem
    given = {"names": ["prior_variance"], "rounds": 10, "steps": 2, "key": jax.random.key(0)}
    algorithm = jf.pca.HierarchicalPCA(2, 0.5, 0.1)
    with pytest.raises(ValueError, match=f"^{name}: wanted"):
        jf.tune(algorithm, clients, held_out, optax.sgd(0.1), **given | options)
