"""Hyperparameters by gradients of a held-out loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture
def problem():
    """Clients around common components, and the error that is expected of other samples."""
    data = jf.data.hierarchical_synthetic(
        jax.random.key(0), clients=8, features=5, rank=2, samples=12, prior_variance=0.03
    )

    def held_out(result):
        return jf.metrics.expected_reconstruction_error(result.local, data.local, 0.5)

    return jf.Clients.from_samples(data.samples), held_out


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
        "prior_variance": 0.5,
        "step_size": 0.01,
        "global_step_size": 0.01,
        "hyper_prior": 0.5,
    }
    variances = {name: start.pop(name) for name in ("noise_variance", "prior_variance")}
    algorithm = jf.pca.AdaptivePCA(2, *variances.values(), **start, spread="log")
    names = [*variances, *start]

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
    alone = [tuned([name], 15).loss.min() for name in ("prior_variance", "step_size")]
    assert together.loss.min() < min(together.loss[0], *alone)


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
