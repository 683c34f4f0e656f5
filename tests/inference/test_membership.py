"""Which clients share a local component: distributions, adjustments, and what does not matter."""

import doctest
import importlib
from itertools import combinations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.inference import membership


def frames(rng, clients, features, rank):
    """Random orthonormal columns orthogonal to the first axis."""
    found = np.zeros((clients, features, rank))
    found[:, 1:] = np.linalg.qr(rng.standard_normal((clients, features - 1, rank)))[0]
    return found


def samples(rng, local, counts, *, variance=9.0, dtype=np.float64):
    """Samples with local components, beside a shared one along the first axis, and noise."""
    tables = []
    for basis, n in zip(local, counts, strict=True):
        scores = rng.standard_normal((n, basis.shape[1])) * variance**0.5
        noise = rng.standard_normal((n, len(basis)))
        noise[:, 0] *= 5
        tables.append((scores @ basis.T + noise).astype(dtype))
    return tables


def result(local, dtype=np.float64):
    """A result whose shared component is the first axis."""
    shared = np.eye(local.shape[1])[:, :1]
    return jf.Personalized(jnp.asarray(shared, dtype), jnp.asarray(local, dtype))


@pytest.fixture(scope="module")
def fitted():
    """Six clients, of which 0, 2 and 4, and 1, 3 and 5, share their two local components."""
    key = jax.random.key(0)
    data = jf.data.perpca_synthetic(
        key=key,
        clients=6,
        features=16,
        shared_rank=1,
        local_rank=2,
        samples=100,
        shared_scale=3.0,
        local_scale=(2.0, 1.0),
        noise_variance=0.1,
        local="random",
        groups=2,
    )
    clients = jf.Clients.from_samples(data.samples)
    return jf.fit(jf.pca.PerPCA(1, 2), clients, rounds=30, key=key), clients


def test_p_value_of_a_line_in_space_is_one_minus_its_cosine(x64):
    # On a sphere in three dimensions, a coordinate of a random point is uniform (Archimedes).
    cosine = 0.3
    first = np.array([0.0, 1.0, 0.0, 0.0])
    second = np.array([0.0, cosine, np.sqrt(1 - cosine**2), 0.0])
    tables = []
    for axis in (first, second):
        basis = np.linalg.svd(np.eye(4) + np.outer(axis, axis))[0]
        tables.append(np.diag([3.0, 1.0, 1.0, 1.0]) @ basis.T)
    local = np.stack([first, second])[:, :, None]
    found = membership(result(local), jf.Clients.from_samples(tables))
    assert found.dimension == 3
    np.testing.assert_allclose(found.overlap[0, 0, 1], cosine**2, rtol=1e-12)
    np.testing.assert_allclose(found.p_values[[0, 1], 0, [1, 0]], 1 - cosine, rtol=1e-12)


def test_p_values_of_unrelated_clients_are_uniform(x64):
    rng = np.random.default_rng(0)
    small = []
    for _ in range(10):
        local = frames(rng, 20, 12, 2)
        clients = jf.Clients.from_samples(samples(rng, local, [60] * 20))
        found = membership(result(local), clients).p_values
        small.append(found[~np.isnan(found)])
    found = np.concatenate(small)
    for level in (0.05, 0.3, 0.7):
        spread = np.sqrt(level * (1 - level) / len(found))
        assert abs(np.mean(found <= level) - level) < 4 * spread


@pytest.mark.slow
def test_claims_of_a_fit(fitted):
    solution, clients = fitted
    found = membership(solution, clients)
    assert found.number_sharing.tolist() == [[3, 3]] * 6
    shared = np.nan_to_num(found.adjusted, nan=1) <= 0.05
    together = (np.arange(6)[:, None] - np.arange(6)) % 2 == 0
    together &= ~np.eye(6, dtype=bool)
    assert (shared == together[:, None, :]).all()
    assert (found.at_least(2) < 1e-3).all()
    assert (found.at_least(3) > 0.01).all()
    assert "client 0, component 1: clients (overlap) 2 (" in str(found)
    assert "shared_rank" not in str(found)
    # Shared by all: the shared rank is too small.
    common = jf.Personalized(solution.result.shared, solution.result.local[jnp.zeros(6, int)])
    assert "run more rounds, or fit with shared_rank higher by 2" in str(
        membership(common, clients)
    )


@pytest.mark.slow
def test_axes_are_principal(fitted):
    solution, clients = fitted
    found = membership(solution, clients)
    for axes, local, values in zip(
        found.axes, solution.result.local, clients.data.values, strict=True
    ):
        moment = np.asarray(axes.T @ values.T @ values @ axes)
        assert moment[0, 0] > moment[1, 1]
        assert abs(moment[0, 1]) < 1e-4 * moment[0, 0]
        np.testing.assert_allclose(axes @ axes.T, local @ local.T, atol=1e-5)


def test_adjustments_are_those_of_their_papers(x64):
    rng = np.random.default_rng(1)
    local = frames(rng, 5, 9, 2)
    local[1] = local[0]
    local[2, :, 0] = local[0, :, 0]
    local[2] = np.linalg.qr(local[2])[0]
    clients = jf.Clients.from_samples(samples(rng, local, [40] * 5))
    holm = membership(result(local), clients)
    rates = membership(result(local), clients, adjustment="benjamini_hochberg")
    tested = ~np.isnan(holm.p_values)
    p_values = np.sort(holm.p_values[tested])
    count = len(p_values)
    assert count == 5 * 2 * 4
    # Holm (1979): reject in order while p_(k) <= alpha / (n - k + 1).
    # Benjamini & Hochberg (1995): reject the first k, the largest with p_(k) <= k alpha / n.
    for alpha in (0.001, 0.05, 0.4, 0.9):
        step = np.arange(1, count + 1)
        passed = p_values <= alpha / (count - step + 1)
        wanted = count if passed.all() else int(np.argmin(passed))
        assert np.sum(holm.adjusted[tested] <= alpha) == wanted
        below = np.flatnonzero(p_values <= step * alpha / count)
        wanted = 0 if len(below) == 0 else below[-1] + 1
        assert np.sum(rates.adjusted[tested] <= alpha) == wanted

    def simes(values):
        return min(len(values) * p / k for k, p in enumerate(sorted(values), start=1))

    # Benjamini & Heller (2008): the largest p-value of an intersection of n - u + 1 hypotheses.
    for others in (1, 2, 4):
        for i in range(5):
            own = holm.p_values[i, 1, np.arange(5) != i]
            wanted = max(simes(part) for part in combinations(own, 4 - others + 1))
            np.testing.assert_allclose(holm.at_least(others)[i, 1], wanted, rtol=1e-12)


def test_dimension_is_the_inverse_mean_overlap_of_what_is_left(x64):
    rng = np.random.default_rng(2)
    local = frames(rng, 4, 7, 2)
    tables = samples(rng, local, [30, 50, 20, 40])
    scales = np.array([1, 1, 2, 1, 0.5, 1, 0.1])
    tables = [x * scales for x in tables]
    found = membership(result(local), jf.Clients.from_samples(tables))
    moments = []
    for x, basis in zip(tables, local, strict=True):
        both = np.concatenate([np.eye(7)[:, :1], basis], axis=1)
        left = x - x @ both @ both.T
        moments.append(left.T @ left / np.sum(left**2))
    overlaps = [np.trace(a @ b) for a, b in combinations(moments, 2)]
    np.testing.assert_allclose(found.dimension, min(6, 1 / np.mean(overlaps)), rtol=1e-10)


def test_constant_features_and_copies_do_not_count(x64):
    rng = np.random.default_rng(3)
    local = frames(rng, 5, 9, 1)
    tables = samples(rng, local, [200] * 5)
    plain = membership(result(local), jf.Clients.from_samples(tables))
    assert abs(plain.dimension - 8) < 0.1
    padded = [np.pad(x, ((0, 0), (0, 15))) for x in tables]
    wide = membership(
        result(np.pad(local, ((0, 0), (0, 15), (0, 0)))), jf.Clients.from_samples(padded)
    )
    assert wide.dimension < 8.2
    np.testing.assert_allclose(wide.overlap, plain.overlap, rtol=1e-10)
    # Each of the features but the first, twice: the same data in an isometric embedding.
    twice = [np.concatenate([x[:, :1], x[:, 1:] / 2**0.5, x[:, 1:] / 2**0.5], 1) for x in tables]
    doubled = np.concatenate([local[:, :1], local[:, 1:] / 2**0.5, local[:, 1:] / 2**0.5], 1)
    copies = membership(result(doubled), jf.Clients.from_samples(twice))
    np.testing.assert_allclose(copies.dimension, wide.dimension, rtol=1e-10)
    np.testing.assert_allclose(copies.p_values, wide.p_values, rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_padding_and_buckets_do_not_matter(x64, dtype):
    rng = np.random.default_rng(4)
    local = frames(rng, 4, 8, 2)
    tables = samples(rng, local, [12, 90, 30, 31], dtype=dtype)
    model = result(local, dtype)
    plain = membership(model, jf.Clients.from_samples(tables))
    bucketed = membership(model, jf.Clients.from_samples(tables, bucket=2.0))
    padded = jf.Clients.from_samples([*tables, np.zeros((300, 8), dtype)]).take([0, 1, 2, 3])
    longer = membership(model, padded)
    rtol = 1e-10 if dtype == np.float64 else 1e-4
    for other in (bucketed, longer):
        np.testing.assert_allclose(other.overlap, plain.overlap, rtol=rtol)
        np.testing.assert_allclose(other.p_values, plain.p_values, rtol=rtol)
        np.testing.assert_allclose(other.dimension, plain.dimension, rtol=rtol)
    chex.assert_type(plain.axes, dtype)
    chex.assert_type(plain.p_values, np.float64)


def test_precisions_agree(x64):
    rng = np.random.default_rng(5)
    local = frames(rng, 4, 8, 2)
    local[1] = local[0] + 1e-3 * local[1]
    local[1] = np.linalg.qr(local[1])[0]
    tables = samples(rng, local, [40] * 4)
    double = membership(result(local), jf.Clients.from_samples(tables))
    single = membership(
        result(local, np.float32), jf.Clients.from_samples([x.astype(np.float32) for x in tables])
    )
    # Also where the overlap is 1 - 1e-6, and 1 minus the overlap would be lost.
    np.testing.assert_allclose(single.p_values, double.p_values, rtol=1e-2)
    assert double.p_values[0, 0, 1] < 1e-12


def test_clients_with_fewer_components(x64):
    rng = np.random.default_rng(6)
    local = frames(rng, 3, 10, 2)
    clients = jf.Clients.from_samples(samples(rng, local, [50] * 3))
    whole = membership(result(local), clients)
    local[1, :, 0] = 0
    local[2] = 0
    found = membership(result(local), clients)
    assert found.number_sharing.tolist() == [[1, 1], [1, 0], [0, 0]]
    assert np.isnan(found.p_values[1, 1]).all() and np.isnan(found.p_values[2]).all()
    # Nothing is shared by a client without components.
    np.testing.assert_array_equal(found.p_values[[0, 0, 1], [0, 1, 0], 2], 1)
    # A client with one component is judged by one: its squared cosine is less likely to be large.
    assert (found.overlap[0, :, 1] <= whole.overlap[0, :, 1]).all()


def test_data_without_noise(x64):
    rng = np.random.default_rng(7)
    local = frames(rng, 3, 10, 2)
    local[1] = local[0]
    tables = [rng.standard_normal((30, 2)) @ basis.T for basis in local]
    found = membership(result(local), jf.Clients.from_samples(tables))
    assert found.dimension == 9
    assert found.number_sharing.tolist() == [[2, 2], [2, 2], [1, 1]]
    assert (found.p_values[0, :, 1] < 1e-50).all()


def test_too_few_features_tell_nothing(x64):
    rng = np.random.default_rng(8)
    local = frames(rng, 3, 5, 3)
    local[1] = local[0]
    found = membership(result(local), jf.Clients.from_samples(samples(rng, local, [200] * 3)))
    assert found.dimension <= 4
    assert found.needed_overlap > 0.999


def test_wrong_arguments_are_named(fitted):
    solution, clients = fitted
    few = clients.take([0, 1, 2])
    with pytest.raises(ValueError, match=r"^level: wanted a number between 0 and 1, got 95"):
        membership(solution, clients, level=95)
    with pytest.raises(ValueError, match=r"^adjustment: "):
        membership(solution, clients, adjustment="bonferroni")
    with pytest.raises(ValueError, match=r"^clients: wanted those of the run, in its order"):
        membership(solution, few)
    with pytest.raises(ValueError, match=r"^clients: "):
        membership(solution, np.zeros((6, 4, 16)))
    with pytest.raises(ValueError, match=r"^clients: wanted samples"):
        moments = jf.Clients.from_moments(np.stack([np.eye(16)] * 6))
        membership(solution, moments)
    single = jf.Personalized(solution.result.shared, solution.result.local[:1])
    with pytest.raises(ValueError, match=r"^clients: wanted at least 2 clients"):
        membership(single, clients.take([0]))
    with pytest.raises(ValueError, match=r"^fitted: wanted shared components with local ones"):
        membership(jf.Personalized(None, solution.result.local), clients)
    full = np.linalg.qr(np.random.default_rng(0).standard_normal((16, 16)))[0]
    full = jf.Personalized(jnp.asarray(full[:, :1]), jnp.asarray([full[:, 1:]] * 6))
    with pytest.raises(ValueError, match=r"^fitted: wanted fewer components .* got 1 \+ 15"):
        membership(full, clients)
    with pytest.raises(ValueError, match=r"^others: "):
        membership(solution, clients).at_least(6)


@pytest.mark.slow
def test_example():
    module = importlib.import_module("jaxfed.inference.membership")
    failed, attempted = doctest.testmod(module)
    assert failed == 0 < attempted
