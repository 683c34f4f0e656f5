"""Missing entries: against NumPy, against full data, and with everything that surrounds a run."""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.preprocess import Impute, Standardize
from tests.helpers import fit, solve

FEATURES, CLIENTS, SAMPLES = 8, 12, 30


def draw_incomplete(rate, seed=0, noise=0.3, clients=CLIENTS):
    """Complete samples with two shared and one local component and means, and with gaps."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(FEATURES, 2))
    full = []
    for _ in range(clients):
        own, mean = rng.normal(size=(FEATURES, 1)), rng.normal(size=FEATURES)
        signal = rng.normal(size=(SAMPLES, 2)) @ shared.T + rng.normal(size=(SAMPLES, 1)) @ own.T
        full.append(signal + mean + noise * rng.normal(size=(SAMPLES, FEATURES)))
    full = np.stack(full).astype(np.float32)
    missing = rng.random(full.shape) < rate
    missing[..., 0] = False
    return full, np.where(missing, np.nan, full)


def fitted(gaps, rounds=60, **options):
    clients = jf.Clients.from_samples(gaps, missing="mask")
    return clients, fit(Impute(2, 1), clients, rounds=rounds, **options)


def gram(model):
    return model.loadings @ jnp.swapaxes(model.loadings, -1, -2)


def conditional(model, row):
    """Mean and covariance of a row given its observed entries, by the Gaussian's formulas.

    The model's loadings and mean are taken as known.
    """
    model = jax.tree.map(lambda x: np.asarray(x, float), model)
    covariance = model.loadings @ model.loadings.T + np.diag(model.noise)
    seen, left = ~np.isnan(row), np.isnan(row)
    gain = covariance[np.ix_(left, seen)] @ np.linalg.inv(covariance[np.ix_(seen, seen)])
    mean = row.copy()
    mean[left] = model.mean[left] + gain @ (row[seen] - model.mean[seen])
    spread = np.zeros_like(covariance)
    spread[np.ix_(left, left)] = (
        covariance[np.ix_(left, left)] - gain @ covariance[np.ix_(seen, left)]
    )
    return mean, spread


@pytest.mark.slow
def test_conditional_means_and_covariances_are_those_of_the_gaussian():
    _, gaps = draw_incomplete(0.3)
    clients, solution = fitted(gaps, rounds=10)
    known = jax.tree.map(jnp.zeros_like, solution.result.local)
    local = solution.result.local
    model = jf.preprocess.Imputation(
        local.mean, local.loadings, local.noise, known.mean_variance, known.loadings_variance
    )
    means, moments = model.transform(clients).data.values, model.moments(clients).data.dense
    for i in range(3):
        own = jax.tree.map(lambda x, i=i: x[i], model)
        found = [conditional(own, row.astype(float)) for row in gaps[i]]
        np.testing.assert_allclose(means[i], [mean for mean, _ in found], atol=2e-5)
        wanted = np.mean([np.outer(mean, mean) + spread for mean, spread in found], axis=0)
        np.testing.assert_allclose(moments[i], wanted, atol=2e-5 * np.abs(wanted).max())


def reference(rounds, gaps, start, local_rank=1):
    """The rounds in NumPy from the formulas, one client, sample and feature after the other."""
    seen, values = ~np.isnan(gaps), np.nan_to_num(gaps).astype(float)
    clients, samples, features = gaps.shape
    share = seen.mean(axis=(0, 1))
    mean, loadings, noise, means_spread, loadings_spread = start[:5]
    own_mean, own = start[5:]
    rank = loadings.shape[1]
    width = rank + local_rank
    for _ in range(rounds):
        gradient, error = np.zeros((features, rank)), np.zeros(features)
        bound, squares, mean_squares = 0.0, np.zeros(features), np.zeros(features)
        for i in range(clients):
            count = seen[i].sum(axis=0)
            variance = 1 / (count / noise + 1 / loadings_spread)
            both = np.hstack([loadings, own[i]])
            scores = []
            for n in range(samples):
                information = np.eye(width)
                projected = np.zeros(width)
                for d in np.flatnonzero(seen[i, n]):
                    information += np.outer(both[d], both[d]) / noise[d]
                    information[rank:, rank:] += variance[d] * np.eye(local_rank) / noise[d]
                    projected += both[d] * (values[i, n, d] - mean[d] - own_mean[i, d]) / noise[d]
                covariance = np.linalg.inv(information)
                scores.append((covariance @ projected, covariance))
            second = [c + np.outer(z, z) for z, c in scores]
            eigenvalues = np.linalg.eigvalsh(np.mean(second, axis=0)[:rank, :rank])
            bound += (eigenvalues**8).sum() ** (1 / 8) / clients
            for d in range(features):
                rows = np.flatnonzero(seen[i, :, d])
                known = [np.append(scores[n][0], 1) for n in rows]
                known_second = [
                    np.pad(scores[n][1], (0, 1)) + np.outer(k, k)
                    for n, k in zip(rows, known, strict=True)
                ]
                y = values[i, rows, d] - mean[d]
                total = sum(known_second)
                cross = sum(yn * k for yn, k in zip(y, known, strict=True))
                prior = np.append(np.full(local_rank, loadings_spread[d]), means_spread[d])
                precision = total[rank:, rank:] / noise[d] + np.diag(1 / prior)
                right = (cross[rank:] - total[rank:, :rank] @ loadings[d]) / noise[d]
                found = np.linalg.solve(precision, right)
                own[i, d], own_mean[i, d] = found[:-1], found[-1]
                weights = np.append(loadings[d], found)
                spread = np.append(
                    np.full(local_rank, variance[d]),
                    1 / (count[d] / noise[d] + 1 / means_spread[d]),
                )
                gradient[d] += (cross - total @ weights)[:rank] / samples / clients
                expected = (y**2).sum() - 2 * cross @ weights + weights @ total @ weights
                expected += spread @ np.diag(total)[rank:]
                error[d] += expected / samples / clients
                squares[d] += (found[:-1] ** 2 + spread[:-1]).mean() / clients
                mean_squares[d] += (found[-1] ** 2 + spread[-1]) / clients
        loadings = loadings + gradient / bound / share[:, None]
        noise = np.maximum(error / share, 0.5 * error.sum() / share.sum())
        loadings_spread, means_spread = ((5 * x + x.mean()) / 6 for x in (squares, mean_squares))
    return mean, loadings, noise, means_spread, loadings_spread


def test_rounds_equal_a_reference_from_the_formulas():
    _, gaps = draw_incomplete(0.3, clients=3)
    gaps = gaps[:, :9].astype(np.float64)
    with jax.enable_x64(True):
        clients = jf.Clients.from_samples(gaps, missing="mask")
        before = solve(Impute(2, 1), clients, rounds=1)
        after = solve(Impute(2, 1), clients, rounds=4)
    model, local = before.server.model, before.local
    start = (model.mean, model.loadings, model.noise, *model.spread, local.mean, local.loadings)
    found = after.server.model
    wanted = reference(3, gaps, [np.array(x) for x in start])
    chex.assert_trees_all_close(
        (found.mean, found.loadings, found.noise, *found.spread), wanted, rtol=1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_ranks_that_are_too_small_are_named_and_larger_ones_impute_better(rate):
    full, gaps = draw_incomplete(rate, clients=6)
    missing = np.isnan(gaps)
    clients = jf.Clients.from_samples(gaps, missing="mask")

    def tried(*ranks):
        solution = fit(Impute(*ranks), clients, rounds=50)
        found = np.asarray(solution.result.local.transform(clients).data.values)
        named = any("larger ranks impute better" in each for each in solution.remarks())
        return np.sqrt(np.mean((found - full)[missing] ** 2)), named

    (few, few_named), (right, right_named), (_, more_named) = tried(1, 1), tried(2, 1), tried(3, 2)
    assert few_named and not right_named and not more_named
    assert right < 0.9 * few


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e3, 1e15])
def test_a_client_unlike_all_others_is_scaled_as_the_remark_says(scale):
    _, gaps = draw_incomplete(0.2, clients=6)
    gaps[0] *= scale
    clients = jf.Clients.from_samples(gaps, missing="mask")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jf.EnergyWarning)
        remarks = fit(Impute(2, 1), clients, rounds=50).remarks()
    assert remarks[-1].endswith("or standardized samples.")
    units = fit(Standardize("local", "energy"), clients, rounds=1).result.local
    assert not fit(Impute(2, 1), units.transform(clients), rounds=50).remarks()


@pytest.mark.slow
def test_a_run_converges_in_as_many_rounds_as_imputed_entries_need():
    full, gaps = draw_incomplete(0.2)
    missing = np.isnan(gaps)

    def error(rounds):
        clients, solution = fitted(gaps, rounds=rounds)
        found = np.asarray(solution.result.local.transform(clients).data.values)
        return np.sqrt(np.mean((found - full)[missing] ** 2)), solution.status

    (at_fifty, status), (at_end, _) = error(50), error(1000)
    np.testing.assert_allclose(at_fifty, at_end, rtol=0.02)
    assert status == jf.Status.converged


@pytest.mark.parametrize(
    "features, ranks", [(2, (1, 1)), (5, (2, 1)), (8, (4, 2)), (40, (20, 2)), (1000, (30, 2))]
)
def test_ranks_by_default_follow_the_number_of_features(features, ranks):
    assert Impute().ranks(features) == ranks
    assert Impute(3).ranks(features).shared == 3
    assert Impute(local_rank=0).ranks(features) == (ranks[0], 0)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_ranks_by_default_impute_as_well_as_those_of_the_truth(rate):
    full, gaps = draw_incomplete(rate)
    missing = np.isnan(gaps)
    clients = jf.Clients.from_samples(gaps, missing="mask")

    def error(algorithm):
        found = fit(algorithm, clients, rounds=50).result.local.transform(clients).data.values
        return np.sqrt(np.mean((np.asarray(found) - full)[missing] ** 2))

    assert error(Impute()) < 1.05 * error(Impute(2, 1))


@pytest.mark.slow
def test_clients_without_loadings_of_their_own_differ_in_their_means():
    rng = np.random.default_rng(0)
    loadings, means = rng.normal(size=(FEATURES, 2)), rng.normal(size=(4, 1, FEATURES))
    full = means + rng.normal(size=(4, SAMPLES, 2)) @ loadings.T
    full = (full + 0.1 * rng.normal(size=full.shape)).astype(np.float32)
    gaps = np.where(rng.random(full.shape) < 0.2, np.nan, full)
    clients = jf.Clients.from_samples(gaps, missing="mask")
    model = fit(Impute(2, 0), clients, rounds=50).result.local
    assert model.loadings.shape == (4, FEATURES, 2)
    missing = np.isnan(gaps)
    found = np.asarray(model.transform(clients).data.values)
    assert np.sqrt(np.mean((found - full)[missing] ** 2)) < 0.2
    assert np.isfinite(np.asarray(model.moments(clients).data.dense)).all()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.4, 0.6])
def test_imputed_entries_are_closer_than_feature_means(rate):
    full, gaps = draw_incomplete(rate)
    clients, solution = fitted(gaps)
    missing = np.isnan(gaps)

    def error(values):
        return np.sqrt(np.mean((values - full)[missing] ** 2))

    found = np.asarray(solution.result.local.transform(clients).data.values)
    np.testing.assert_array_equal(found[~missing], full[~missing])
    means = np.broadcast_to(np.nanmean(gaps, axis=1, keepdims=True), gaps.shape)
    # Given the other entries, a model explains most of what means leave.
    assert error(found) < (0.5, 0.6, 0.75)[(0.1, 0.4, 0.6).index(rate)] * error(means)


def test_complete_samples_are_not_changed():
    full, _ = draw_incomplete(0.0)
    clients, solution = fitted(full, rounds=3)
    local = solution.result.local
    np.testing.assert_array_equal(local.transform(clients).data.values, full)
    moments = local.moments(clients)
    wanted = np.einsum("ind,ine->ide", full, full) / SAMPLES
    np.testing.assert_allclose(moments.data.dense, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(moments.ids, clients.ids)


@pytest.mark.slow
def test_the_subspace_is_close_to_that_of_complete_samples():
    full, gaps = draw_incomplete(0.3)
    clients, solution = fitted(gaps)
    centred = solution.result.local.moments(clients)
    shared = [
        fit(jf.pca.PerPCA(2, 1), c, rounds=40).result.shared
        for c in (centred, jf.Clients.from_samples(full))
    ]
    naive = jf.Clients.from_samples(np.nan_to_num(gaps))
    filled = fit(jf.pca.PerPCA(2, 1), naive, rounds=40)
    distance = jf.metrics.projector_distance
    assert distance(*shared) < 0.3 * distance(filled.result.shared, shared[1])


def test_rows_of_known_and_of_unknown_clients():
    _, gaps = draw_incomplete(0.3)
    clients, solution = fitted(gaps)
    local, shared = solution.result.local, solution.result.shared
    whole = local.transform(clients).data.values
    np.testing.assert_allclose(local.transform(gaps[2], client=2), whole[2], atol=1e-6)
    np.testing.assert_allclose(local.transform(gaps[2][0], client=2), whole[2][0], atol=1e-5)
    for found in (shared.transform(gaps[0]), shared.transform(clients).data.values[0]):
        assert np.isfinite(np.asarray(found)).all()
    assert shared.moments(clients).data.dense.shape == (CLIENTS, FEATURES, FEATURES)


@pytest.mark.slow
def test_buckets_and_sources_are_transformed_like_arrays():
    _, gaps = draw_incomplete(0.3)
    arrays = [x[: (10, 20, 30)[i % 3]] for i, x in enumerate(gaps)]
    one, several = (
        jf.Clients.from_samples(arrays, missing="mask", bucket=bucket) for bucket in (None, 1.1)
    )
    read = jf.Clients.from_source(arrays, missing="mask", block_bytes=2000)
    solutions = [fit(Impute(2, 1), c, rounds=5) for c in (one, several, read)]
    local = solutions[0].result.local
    for other in solutions[1:]:
        chex.assert_trees_all_close(gram(other.result.local), gram(local), rtol=2e-4, atol=1e-5)
    assert len(several.parts) > 1
    moments = local.moments(one).data.dense
    np.testing.assert_allclose(local.moments(several).data.dense, moments, atol=1e-5)
    wanted = local.transform(one)
    values = local.transform(several).unbucketed().data.values
    np.testing.assert_allclose(values, wanted.data.values, atol=1e-5)
    # Samples from a source are completed as they are read.
    algorithm = jf.pca.PerPCA(2, 1, solver="gradient")
    results = [fit(algorithm, c, rounds=3).result.shared for c in (wanted, local.transform(read))]
    np.testing.assert_allclose(*results, atol=1e-5)
    with pytest.raises(ValueError, match=r"^clients: wanted data in memory for second moments"):
        local.moments(read)


@pytest.mark.slow
def test_derivatives_of_whole_runs_equal_central_differences():
    _, gaps = draw_incomplete(0.3, clients=4)
    gaps = gaps[:, :10].astype(np.float64)
    with jax.enable_x64(True):
        at = jnp.asarray(gaps)

        def loss(values, adjoint):
            clients = jf.Clients.from_samples(values, missing="mask")
            found = jf.rollout(
                Impute(1, 1), clients, rounds=1500, key=jax.random.key(0), adjoint=adjoint
            ).result.local
            moments = found.moments(clients).data.dense
            return jnp.sum(jnp.tanh(moments))

        implicit = jax.jit(jax.value_and_grad(lambda x: loss(x, jf.adjoint.implicit())))
        _, gradient = implicit(at)
        np.testing.assert_array_equal(gradient[np.isnan(gaps)], 0)
        direction = np.random.default_rng(1).normal(size=gaps.shape)
        exact = jnp.nansum(gradient * direction)
        near, far = (
            (implicit(at + h * direction)[0] - implicit(at - h * direction)[0]) / (2 * h)
            for h in (1e-5, 2e-5)
        )
    np.testing.assert_allclose(exact, (4 * near - far) / 3, rtol=1e-5)


@pytest.mark.slow
def test_standardize_respects_gaps():
    _, gaps = draw_incomplete(0.4)
    clients = jf.Clients.from_samples(1000 + gaps, missing="mask")
    found = fit(Standardize(), clients, rounds=1).result.shared
    pooled = (1000 + gaps).astype(float).reshape(-1, FEATURES)
    np.testing.assert_allclose(found.mean, np.nanmean(pooled, axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.scale, np.nanstd(pooled, axis=0), rtol=2e-6)
    units = found.transform(clients)
    chex.assert_trees_all_equal(units.data.observed, clients.data.observed)
    own = fit(Standardize("local", "local"), clients, rounds=1).result.local
    np.testing.assert_allclose(own.scale, np.nanstd((1000.0 + gaps), axis=1), rtol=1e-4)


@pytest.mark.parametrize("scale", [2.0**-53, 2.0**-50, 2.0**50])
def test_the_models_unit_changes_nothing(scale):
    _, gaps = draw_incomplete(0.3, clients=1)
    rng = np.random.default_rng(0)
    loadings, sizes = rng.normal(size=(FEATURES, 2)), rng.uniform(0.1, 0.2, size=(3, FEATURES))
    powers = (scale, scale, scale**2, scale**2, scale**2)

    def completed(unit):
        parts = (sizes[0], loadings, sizes[1], sizes[2], 0.01 * loadings**2)
        model = jf.preprocess.Imputation(
            *(
                jnp.float32(x * power)
                for x, power in zip(parts, powers if unit else [1] * 5, strict=True)
            )
        )
        return np.asarray(model.transform(gaps[0] * np.float32(scale if unit else 1)))

    np.testing.assert_allclose(completed(True) / scale, completed(False), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e15])
def test_samples_of_any_size_give_finite_models(scale):
    _, gaps = draw_incomplete(0.3, clients=3)
    clients, solution = fitted(np.float32(scale) * gaps, rounds=3)
    found = solution.result.local
    values, moments = found.transform(clients).data.values, found.moments(clients).data.dense
    assert np.isfinite(np.asarray(values)).all() and np.isfinite(np.asarray(moments)).all()
    if scale == 0:
        chex.assert_trees_all_close((values, moments), (0 * values, 0 * moments), atol=1e-12)


@pytest.mark.slow
def test_closed_over_data_work_under_jit():
    _, gaps = draw_incomplete(0.3, clients=3)
    clients, solution = fitted(gaps, rounds=3)

    def completed(found):
        return found.transform(clients).data.values, found.moments(clients).data.dense

    def run():
        return jf.rollout(Impute(2, 1), clients, rounds=3, key=jax.random.key(0)).result.local

    found, wanted = jax.jit(lambda: completed(run()))(), completed(solution.result.local)
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_bad_input_is_refused():
    full, gaps = draw_incomplete(0.3)
    clients, solution = fitted(gaps, rounds=1)
    local = solution.result.local

    def without(index):
        changed = full.copy()
        changed[index] = np.nan
        return jf.Clients.from_samples(changed, missing="mask")

    for call, message in [
        (lambda: jf.Clients.from_samples(gaps), r"^arrays: NaN at index .* missing='mask'"),
        (lambda: jf.Clients.from_samples(gaps, missing="drop"), "^missing: wanted one of"),
        (lambda: jf.Clients.from_source(gaps, missing="drop"), "^missing: wanted one of"),
        (lambda: without((1, 2)), r"^arrays: wanted an observed entry .* index \(1, 2\)"),
        (
            lambda: fitted(without((slice(None), slice(None), 3)).data.values),
            "^clients: wanted every feature observed by some client, got none of feature 3",
        ),
        (
            lambda: solve(jf.pca.PerPCA(2, 1, solver="gradient"), clients, rounds=1),
            r"^clients: .*\.Impute completes",
        ),
        (lambda: solve(Impute(6, 3), clients, rounds=1), r"^shared_rank .* at most .* 8, got 9"),
        (lambda: local.transform(gaps[0]), "^client: wanted whose rows they are"),
        (lambda: local.transform(gaps[0][:, :3], client=0), "^samples: wanted"),
        (lambda: local.transform(clients.take([0])), "^samples: wanted clients and features"),
        (lambda: local.moments(gaps), "^clients: wanted jaxfed.Clients"),
        (lambda: fitted(gaps, warm_start=jf.Personalized(None, None)), "^warm_start: .* NoneType"),
        (
            lambda: solve(Impute(1, 1), clients, rounds=1, warm_start=solution),
            r"^warm_start: .* loadings \(8, 2\), got loadings \(8, 3\)",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    # A feature that one client never observed is completed from the others.
    some = without((0, slice(None), 3))
    found = fitted(np.asarray(some.data.values))[1].result.local.transform(some)
    assert np.isfinite(np.asarray(found.data.values)).all()


@pytest.mark.slow
def test_a_solution_is_saved_with_it_and_completes_new_rows(tmp_path):
    _, gaps = draw_incomplete(0.3)
    clients = jf.Clients.from_samples(1000 + 10 * gaps, missing="mask")
    units = solve(Standardize("local", "shared"), clients, rounds=1).result.local
    clients = units.transform(clients)
    models = fit(Impute(2, 1), clients, rounds=5).result.local
    solution = solve(jf.pca.OneShot(2, 1), models.moments(clients), rounds=1)
    solution.save(tmp_path / "result.npz", preprocessing=units, imputation=models)
    saved = jf.load(tmp_path / "result.npz")
    chex.assert_trees_all_equal((saved.preprocessing, saved.imputation), (units, models))
    rows = saved.preprocessing.transform(1000 + 10 * gaps[3], client=3)
    completed = saved.imputation.transform(rows, client=3)
    wanted = models.transform(clients).data.values[3]
    chex.assert_trees_all_close(completed, wanted, atol=1e-6)
    solution.save(tmp_path / "result.npz", imputation=models)
    saved = jf.load(tmp_path / "result.npz")
    assert saved.preprocessing is None and saved.imputation is not None
    with pytest.raises(ValueError, match=r"^imputation: wanted a jaxfed\.preprocess\.Imputation"):
        solution.save(tmp_path / "result.npz", imputation=units)


@pytest.mark.slow
def test_rows_may_be_incomplete_but_not_infinite():
    _, gaps = draw_incomplete(0.3)
    clients, solution = fitted(gaps, rounds=2)
    units = solve(Standardize("local"), clients, rounds=1).result.local
    row = gaps[0][np.isnan(gaps[0]).any(axis=1)][0]
    np.testing.assert_array_equal(np.isnan(units.transform(row, client=0)), np.isnan(row))
    for model in (units, solution.result.local):
        with pytest.raises(ValueError, match=r"^samples: wanted finite numbers"):
            model.transform(np.append(row[:-1], np.inf), client=0)
