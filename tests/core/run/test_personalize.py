"""Models of new clients, against closed forms in NumPy, and clients found again by their ids."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfed as jf
from tests.helpers import projector

M, N, D = 6, 20, 7


def draw_population(seed=0, clients=M, samples=N):
    rng = np.random.default_rng(seed)
    common = np.random.default_rng(99).normal(size=(3, D)) * [[4], [3], [2]]
    own = rng.normal(size=(clients, 1, D))
    scores, private = rng.normal(size=(clients, samples, 3)), rng.normal(size=(clients, samples, 1))
    noise = 0.3 * rng.normal(size=(clients, samples, D))
    return scores @ common + 2 * private * own + noise


def best_beside(shared, samples, rank):
    """Top eigenvectors of each client's moment within the complement of the shared components."""
    outside = np.eye(D) - shared @ shared.T
    found = []
    for x in samples:
        found.append(np.linalg.eigh(outside @ x.T @ x @ outside)[1][:, ::-1][:, :rank])
    return np.stack(found)


def solved(algorithm, clients, key, rounds=200):
    return jf.fit(algorithm, clients, rounds=rounds, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [jf.backend.vmap(), jf.backend.shard(2)], ids=["vmap", "shard"])
def test_perpca_gives_the_best_local_components_given_the_shared_ones(key, x64, backend):
    algorithm = jf.pca.PerPCA(2, 1, solver="gradient")
    solution = solved(algorithm, jf.Clients.from_samples(draw_population()), key)
    new = draw_population(1, clients=3, samples=4)
    shared, local = jf.personalize(
        algorithm, solution, jf.Clients.from_samples(new), backend=backend
    )
    np.testing.assert_array_equal(shared, solution.result.shared)
    wanted = projector(best_beside(np.asarray(shared), new, 1))
    np.testing.assert_allclose(projector(local), wanted, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["gradient", "eigenvectors"])
def test_hierarchical_pca_gives_the_posterior_mode(key, x64, solver):
    """Where the gradient of the log density on the Stiefel manifold is zero, however it got there.

    The prior's part is that of 1/2 |U - V sym(V'U)|² / variance, by finite differences.
    """
    noise, variance = 0.1, 0.05
    algorithm = jf.pca.HierarchicalPCA(2, noise, variance, solver=solver)
    solution = solved(algorithm, jf.Clients.from_samples(draw_population()), key, 30)
    new = draw_population(1, clients=2, samples=5)
    shared, local = map(
        np.asarray,
        jf.personalize(algorithm, solution, jf.Clients.from_samples(new), rounds=3000),
    )

    def density(u, x):
        w = u @ u.T + noise * np.eye(D)
        inside = shared.T @ u
        distance = np.sum((u - shared @ (inside + inside.T) / 2) ** 2)
        fit = len(x) * np.linalg.slogdet(w)[1] + np.trace(np.linalg.solve(w, x.T @ x))
        return fit / 2 + distance / (2 * variance)

    for u, x in zip(local, new, strict=True):
        gradient = np.zeros_like(u)
        for place in np.ndindex(u.shape):
            step = np.zeros_like(u)
            step[place] = 1e-6
            gradient[place] = (density(u + step, x) - density(u - step, x)) / 2e-6
        inside = u.T @ gradient
        tangent = gradient - u @ (inside + inside.T) / 2
        assert np.abs(tangent).max() < 1e-5 * np.abs(gradient).max()


@pytest.mark.slow
def test_the_learned_spread_shrinks_clients_with_few_samples_most(key, x64):
    algorithm = jf.pca.HierarchicalPCA(2, 0.1, solver="eigenvectors")
    solution = solved(algorithm, jf.Clients.from_samples(draw_population()), key, 60)
    # The same second moment, from more and more samples.
    few, far = draw_population(1, clients=4, samples=4), []
    for times in (1, 8, 64):
        new = jf.Clients.from_samples(np.tile(few, (1, times, 1)))
        shared, local = map(np.asarray, jf.personalize(algorithm, solution, new))
        far.append([2 - np.sum((shared.T @ u) ** 2) for u in local])
    assert (np.diff(far, axis=0) > 0).all() and np.min(far) > 0
    # The learned variance counts, not the initial one: with a tiny initial one nothing changes.
    stiff = jf.pca.HierarchicalPCA(
        2, 0.1, initial_variance=1e-9, hyper_prior=1e-9, solver="eigenvectors"
    )
    again = jf.personalize(stiff, solution, new)
    np.testing.assert_allclose(projector(again.local), projector(local), atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["exact", "gradient"])
def test_maxvar_gives_a_new_view_its_least_squares_map(key, x64, solver):
    rng = np.random.default_rng(0)
    common = rng.normal(size=(30, 3))
    views = [common @ rng.normal(size=(3, d)) + 0.1 * rng.normal(size=(30, d)) for d in (4, 5, 6)]
    algorithm = jf.gcca.MaxVar(2, solver=solver, ridge=0.01)
    solution = solved(algorithm, jf.gcca.Views.from_arrays(views[:2]), key)
    clients = jf.gcca.Views.from_arrays(views[2:])
    scores, maps = jf.personalize(algorithm, solution, clients, rounds=5000)
    x = views[2] / 30**0.5
    wanted = np.linalg.solve(x.T @ x + 0.01 * np.eye(6), x.T @ np.asarray(scores))
    np.testing.assert_allclose(maps[0], wanted, atol=1e-8)


@pytest.mark.slow
def test_networks_are_trained_further_under_their_prior(key):
    model = jf.models.Autoencoder(D, 2, key=key)
    algorithm = jf.generative.AdaptiveTraining.autoencoder(
        model, local_steps=5, step_size=0.01, hyper_prior=0.01, initial_spread=0.5
    )
    solution = jf.fit(algorithm, jf.Clients.from_samples(draw_population()), rounds=20, key=key)
    new = jf.Clients.from_samples(draw_population(1, clients=2))
    few, many = (
        jf.personalize(algorithm, solution, new, rounds=rounds, key=key).local for rounds in (1, 40)
    )

    def lost(models):
        return jax.vmap(lambda own, x: jnp.mean((jax.vmap(own)(x) - x) ** 2))(
            models, new.data.values
        )

    assert (lost(many) < lost(few)).all()
    # Federated averaging has local models if it is to fine-tune them.
    tuned = jf.generative.FedAvg(
        model,
        jf.models.reconstruction_loss,
        optax.sgd(1.0),
        local_steps=2,
        step_size=0.01,
        fine_tuning_steps=20,
    )
    solution = jf.fit(tuned, jf.Clients.from_samples(0.1 * draw_population()), rounds=5, key=key)
    shared, local = jf.personalize(tuned, solution, new, rounds=0, key=key)
    assert jax.tree.leaves(local)[0].shape[0] == 2
    assert not np.allclose(jax.tree.leaves(local)[0], jax.tree.leaves(shared)[0])


@pytest.mark.slow
def test_derivatives_with_respect_to_the_new_clients_samples(key, x64):
    algorithm = jf.pca.PerPCA(2, 1, solver="gradient")
    solution = solved(algorithm, jf.Clients.from_samples(draw_population()), key)
    new, direction, other = (jnp.asarray(draw_population(seed, clients=2)) for seed in (1, 2, 3))

    @jax.jit
    def held_out(samples):
        _, local = jf.personalize(algorithm, solution, jf.Clients.from_samples(samples), rounds=3)
        return jnp.sum((other @ local) ** 2)

    slope = jnp.sum(jax.grad(held_out)(new) * direction)
    step = 1e-5
    wanted = (held_out(new + step * direction) - held_out(new - step * direction)) / (2 * step)
    np.testing.assert_allclose(slope, wanted, rtol=1e-6)


@pytest.mark.slow
def test_a_warm_start_finds_clients_by_their_ids(key, x64):
    everybody = jf.Clients.from_samples(draw_population(clients=M + 2))
    known = everybody.take(range(M))
    algorithm = jf.pca.PerPCA(2, 1, solver="gradient")
    solution = solved(algorithm, known, key)
    assert list(solution.ids) == list(range(M))

    def start(clients, first=solution, run=jf.fit):
        return run(algorithm, clients, rounds=1, key=key, warm_start=first)

    def before(clients, local):
        return start(clients, jf.Personalized(solution.result.shared, local))

    def same(given, wanted):
        np.testing.assert_allclose(given.result.local, wanted.result.local, atol=1e-12)
        np.testing.assert_allclose(given.history["objective"], wanted.history["objective"])

    local = solution.result.local
    fewer = everybody.take([4, 1])
    same(start(fewer), before(fewer, local[jnp.asarray([4, 1])]))
    # Clients 7 and 6 are new: theirs are what `personalize` gives them.
    more = everybody.take([7, 2, 6, 0, 1])
    fresh = jf.personalize(algorithm, solution, everybody.take([7, 6]), key=key).local
    wanted = jnp.stack([fresh[0], local[2], fresh[1], local[0], local[1]])
    same(start(more), before(more, wanted))
    # Traced ids are unknown, so clients are matched by position.
    traced = jax.jit(functools.partial(start, run=jf.rollout))
    same(traced(known, solution), before(known, local))


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(jf.pca.PerPCA(2, 1, solver="gradient"), marks=pytest.mark.slow),
        jf.pca.HierarchicalPCA(3, 0.1),
    ],
)
def test_a_file_continues_as_its_solution_with_other_clients(algorithm, key, tmp_path):
    """Clients 1 to 5 after clients 0 to 4: four known ones, and a new one."""
    everybody = jf.Clients.from_samples(draw_population())
    solution = solved(algorithm, everybody.take(range(M - 1)), key, rounds=10)
    solution.save(tmp_path / "result.npz")
    saved = jf.load(tmp_path / "result.npz")
    others = everybody.take(range(1, M))
    runs = [jf.fit(algorithm, others, rounds=1, key=key, warm_start=x) for x in (solution, saved)]
    chex.assert_trees_all_equal(runs[0].history, runs[1].history)
    chex.assert_trees_all_equal(runs[0].result, runs[1].result)
    # By position, the first objective would be that of the wrong local components.
    by_position = jf.fit(algorithm, others, rounds=1, key=key, warm_start=saved.result)
    first = [run.history["objective"][0] for run in (*runs, by_position)]
    assert first[1] < 0.9 * first[2]
    found = [jf.personalize(algorithm, x, others, key=key) for x in (solution, saved)]
    chex.assert_trees_all_equal(*found)


def test_a_file_of_another_algorithm_lacks_what_new_clients_need(key, tmp_path):
    everybody = jf.Clients.from_samples(draw_population())
    solution = solved(
        jf.pca.PerPCA(2, 1, solver="gradient"), everybody.take(range(M - 1)), key, rounds=2
    )
    solution.save(tmp_path / "result.npz")
    saved = jf.load(tmp_path / "result.npz")
    with pytest.raises(ValueError, match=r"^warm_start: wanted a file of HMF, since clients \[5\]"):
        jf.fit(jf.pca.HMF(2, 1), everybody, rounds=1, key=key, warm_start=saved)


def test_clients_are_named_by_their_ids_wherever_they_are_known(key, tmp_path):
    samples = draw_population()
    chosen = jf.Clients.from_samples(samples).take([3, 1, 5])
    solution = jf.fit(jf.pca.PerPCA(2, 1, solver="gradient"), chosen, rounds=2, key=key)
    solution.save(tmp_path / "result.npz")
    for fitted in (solution, jf.load(tmp_path / "result.npz")):
        found = jf.pca.transform(fitted, samples[1], client=1)
        wanted = samples[1] @ solution.result.local[1]
        np.testing.assert_allclose(found[:, 2:], wanted, rtol=1e-4, atol=1e-5)
        with pytest.raises(
            ValueError, match=r"^client: wanted one of the clients' ids, \[3, 1, 5\]"
        ):
            jf.pca.transform(fitted, samples[0], client=0)
        with pytest.raises(ValueError, match=r"^clients: wanted those of the run"):
            jf.report.html(fitted, jf.Clients.from_samples(samples[:3]))
    with pytest.raises(ValueError, match=r"^warm_start: wanted one of the clients"):
        others = jf.Clients.from_samples(samples[:3])
        jf.sweep(
            jf.pca.PerPCA(2, 1, solver="gradient"), others, rounds=1, keys=key, warm_start=solution
        )

    positive = jf.Clients.from_samples(np.abs(samples)).take([5, 1, 3])
    nmf = jf.fit(jf.nmf.INMF(2), positive, rounds=1, key=key)
    one = jf.nmf.transform(nmf, np.abs(samples[3]), client=3)
    same = jf.nmf.transform(nmf.result, np.abs(samples[3]), penalty=nmf.algorithm.penalty, client=2)
    np.testing.assert_allclose(one, same, rtol=1e-4, atol=1e-5)

    views = jf.gcca.Views.from_arrays(list(samples))
    gcca = jf.fit(jf.gcca.MVLSA(2), views, rounds=1, key=key)
    scores = jf.gcca.transform(gcca, views)
    np.testing.assert_allclose(
        jf.gcca.transform(gcca, views.take([4, 0])), scores[jnp.asarray([4, 0])]
    )


def test_bad_input_is_refused(key):
    algorithm = jf.pca.PerPCA(2, 1, solver="gradient")
    clients = jf.Clients.from_samples(draw_population())
    solution = jf.fit(algorithm, clients, rounds=2, key=key)
    narrow = jf.Clients.from_samples(draw_population()[..., :3])
    for message, given in {
        "solution: wanted what fit, rollout or jaxfed.load": (algorithm, solution.result, clients),
        "algorithm: wanted a PerPCA": (jf.pca.OneShot(2, 1), solution, clients),
        "solution: wanted shared components of shape": (
            jf.pca.PerPCA(1, 1, solver="gradient"),
            solution,
            clients,
        ),
        "solution: wanted shared components of shape (3": (algorithm, solution, narrow),
        "clients: wanted jaxfed.Clients": (algorithm, solution, draw_population()),
    }.items():
        with pytest.raises(ValueError, match=f"^{message}".replace("(", r"\(")):
            jf.personalize(*given)
    with pytest.raises(ValueError, match=r"^rounds: wanted a whole number from 0"):
        jf.personalize(algorithm, solution, clients, rounds=-1)


@pytest.mark.slow
def test_digits_of_unseen_clients():
    """As measured by `bench.tables.unseen_clients`, on three of its draws."""
    from bench.tables import unseen_clients

    draws = [unseen_clients.once(seed) for seed in range(3)]
    mean = {name: np.mean([draw[name] for draw in draws], axis=0) for name in draws[0]}
    _, settled, around, shared, alone = mean.values()
    assert (settled <= [25.5, 23.0, 20.5, 19.0]).all()
    assert (around <= np.minimum(shared, alone) + 1).all()
