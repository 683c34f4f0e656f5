"""Suggested ranks: the truth is found, noise and chance are not, and weak signals are told."""

import doctest

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfed as jf
from jaxfed.core.run.compiling import options_for_linear_algebra
from jaxfed.core.run.runner import programs
from jaxfed.data import perpca_synthetic
from jaxfed.pca import _rank_evidence, ranks
from jaxfed.pca.ranks import suggest_ranks

# One set of shapes for most tests, which is compiled once.
LIMITS = {"most_shared": 4, "most_local": 4, "draws": 16, "subsets": 20}
M, N, D = 8, 40, 10


def _samples(key, shared_rank=1, local_rank=1, samples=N, **law):
    defaults = {"shared_scale": 2.0, "local_scale": 2.0, "noise_variance": 0.2, "local": "random"}
    data = perpca_synthetic(
        key=key,
        clients=M,
        features=D,
        shared_rank=shared_rank,
        local_rank=local_rank,
        samples=samples,
        rotate=True,
        **(defaults | law),
    )
    return data.samples


def _suggested(samples, seed=0, **change):
    clients = jf.Clients.from_samples(samples)
    return suggest_ranks(clients, key=jax.random.key(seed), **(LIMITS | change))


@pytest.mark.slow
@pytest.mark.parametrize("truth", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_finds_the_truth(key, truth):
    found = _suggested(_samples(key, *truth))
    assert found.suggested == truth
    assert (found.shared, found.local) == truth
    assert found.shared_interval == (truth[0], truth[0])
    assert found.support > 0.8
    np.testing.assert_array_equal(found.client_local, truth[1])
    np.testing.assert_allclose(found.noise_variance.mean(), 0.2, rtol=0.1)
    assert (found.shared_scores[: truth[0]] > found.threshold).all()
    assert (found.shared_scores[truth[0] :] < found.threshold).all()
    table = str(found)
    assert table.count("*") == sum(truth) + 1
    assert f"{truth[0]} shared and {truth[1]} local components" in table
    assert "weak" not in table


@pytest.mark.slow
def test_heavy_tails_and_unequal_sizes():
    rng = np.random.default_rng(3)
    u, v = rng.normal(size=(2, D)), rng.normal(size=(M, 1, D))
    sizes = [20, 25, 30, 40, 20, 35, 40, 30]
    samples = [
        rng.normal(size=(n, 2)) @ u + rng.normal(size=(n, 1)) @ v[i] + rng.standard_t(5, (n, D)) / 4
        for i, n in enumerate(sizes)
    ]
    assert _suggested([each.astype(np.float32) for each in samples]).suggested == (2, 1)


@pytest.mark.slow
def test_samples_without_noise(key):
    found = _suggested(_samples(key, 2, 2, noise_variance=0.0))
    assert (found.shared, found.local) == (2, 2)
    np.testing.assert_allclose(found.noise_variance, 0, atol=1e-6)


@pytest.mark.slow
def test_centred_samples_that_are_fewer_than_features():
    """Centred noise has one dimension less, which an eighth of the samples would show."""
    rng = np.random.default_rng(0)
    samples = rng.normal(size=(10, M, 8, 3 * D)).astype(np.float32)
    samples -= samples.mean(axis=2, keepdims=True)
    found = [_suggested(each, s, most_local=8) for s, each in enumerate(samples)]
    assert sum(each.shared + each.local for each in found) <= 1
    assert abs(np.mean([each.local_scores[0] for each in found])) < 0.8
    np.testing.assert_allclose(np.mean([each.noise_variance for each in found]), 1, rtol=0.1)


def test_noise_has_no_components():
    rng = np.random.default_rng(0)
    found = [_suggested(rng.normal(size=(M, N, D)).astype(np.float32), s) for s in range(10)]
    assert all(each.suggested is None for each in found)
    assert sum(each.shared + each.local for each in found) <= 1
    # Scores are standard normal in the first place, up to the skewness of largest eigenvalues.
    first = np.array([[each.shared_scores[0], each.local_scores[0]] for each in found])
    assert np.abs(first.mean(axis=0)).max() < 1.2
    assert first.std(axis=0).max() < 2
    assert "too weak to tell" in str(found[0])


def test_weak_signals_are_too_weak_to_tell():
    """Variances of half of the noise's largest possible excess, sqrt(d / n)."""
    scale = (0.5 * np.sqrt(D / N)) ** 0.5
    for seed in range(5):
        law = {"shared_scale": scale, "local_scale": scale, "noise_variance": 1.0}
        assert _suggested(_samples(jax.random.key(seed), 2, 2, **law), seed).suggested is None


def test_clients_that_are_alike_have_no_local_components(key):
    found = _suggested(_samples(key, 1, 2, groups=1))
    assert found.local == 0
    assert found.shared == 3
    assert found.suggested is None


@pytest.mark.slow
def test_more_components_than_were_looked_for(key):
    found = _suggested(_samples(key, 2, 4))
    assert found.local == 4
    assert found.suggested is None
    assert "there may be more" in str(found)


def test_what_few_clients_have_is_local():
    """A third of the clients has a second common direction, far above chance."""
    rng = np.random.default_rng(1)
    frame = np.linalg.qr(rng.normal(size=(D, D)))[0]
    samples = 0.2 * rng.normal(size=(M, N, D)) + rng.normal(size=(M, N, 1)) * frame[0]
    for i in range(M):
        own = frame[1] if i % 3 == 0 else frame[2 + i % 7]
        samples[i] += rng.normal(size=(N, 1)) * own
    assert _suggested(samples.astype(np.float32)).suggested == (1, 1)


def test_one_client_does_not_decide(key):
    samples = np.array(_samples(key))
    direction = np.random.default_rng(0).normal(size=D)
    samples[0] += 3 * np.random.default_rng(1).normal(size=(N, 1)) * direction
    found = _suggested(samples)
    assert found.suggested == (1, 1)
    np.testing.assert_array_equal(found.client_local, [2] + [1] * (M - 1))


def test_scale_does_not_matter(key):
    samples = _samples(key)
    once, again = _suggested(samples), _suggested(samples * 2.0**20)
    chex.assert_trees_all_close(once.shared_scores, again.shared_scores, rtol=1e-3, atol=1e-3)
    chex.assert_trees_all_close(once.client_scores, again.client_scores, rtol=1e-2, atol=1e-2)
    chex.assert_trees_all_close(
        once.noise_variance, again.noise_variance / 2.0**40, rtol=1e-3, atol=0
    )


def test_agreement_and_chance_are_those_of_the_formulas(key):
    samples = np.asarray(_samples(key, 2, 1), np.float64)
    found = _suggested(samples.astype(np.float32), draws=256)
    weighted, spectra = [], []
    for rows, variance in zip(samples, found.noise_variance, strict=True):
        values, vectors = np.linalg.eigh(rows.T @ rows / N)
        weights = np.minimum(values / (variance * (1 + np.sqrt(D / N)) ** 2), 1)
        weighted.append(vectors * weights @ vectors.T)
        spectra.append(weights)
    agreement = np.linalg.eigvalsh(np.mean(weighted, axis=0))[::-1]
    np.testing.assert_allclose(found.agreement, agreement[:4], rtol=1e-4)

    rng = np.random.default_rng(0)
    frames = np.linalg.qr(rng.normal(size=(4000, M, D, D)))[0]
    rotated = np.einsum("bmij,mj,bmkj->bik", frames, np.array(spectra), frames) / M
    largest = np.linalg.eigvalsh(rotated)[:, -1]
    np.testing.assert_allclose(found.chance[0], largest.mean(), atol=4 * largest.std() / 16)
    score = (agreement[0] - largest.mean()) / largest.std()
    np.testing.assert_allclose(found.shared_scores[0], score, rtol=0.2)


@pytest.mark.slow
def test_the_first_score_is_that_of_random_signs():
    rng = np.random.default_rng(0)
    rows = rng.standard_t(5, size=(M, N, D)) + rng.normal(size=(M, N, 1)) * 0.7
    levels = _rank_evidence._against_noise(
        jnp.asarray(rows, jnp.float32),
        jnp.full(M, float(N)),
        jnp.zeros((D, 0)),
        jax.random.key(0),
        1,
        512,
    )
    expected = []
    for each in rows:
        signed = each * rng.choice([-1, 1], size=(4000, N, D))
        squares = np.linalg.eigvalsh(signed.transpose(0, 2, 1) @ signed)
        null = np.log(squares[:, -1] / squares.sum(axis=1))
        own = np.linalg.eigvalsh(each.T @ each)
        expected.append((np.log(own[-1] / own.sum()) - null.mean()) / null.std())
    np.testing.assert_allclose(levels.scores[:, 0], expected, rtol=0.1, atol=0.2)


@pytest.mark.slow
def test_the_null_of_later_scores_is_calibrated():
    """After three strong directions, scores are those of noise."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(100, N, 3)) @ rng.normal(size=(100, 3, D)) * 2
    rows += rng.normal(size=rows.shape)
    levels = _rank_evidence._against_noise(
        jnp.asarray(rows, jnp.float32),
        jnp.full(100, float(N)),
        jnp.zeros((D, 0)),
        jax.random.key(0),
        4,
        32,
    )
    last = np.asarray(levels.scores[:, 3])
    assert -0.6 < last.mean() < 0.3
    assert 0.8 < last.std() < 1.3
    np.testing.assert_allclose(np.median(levels.variance[:, 3]), 1, rtol=0.1)


def test_everything_is_compiled_once(key):
    samples = _samples(key)
    _suggested(samples)
    # With these options: with the defaults of XLA it took two to four times as long to compile.
    program = programs(**options_for_linear_algebra(()))(_rank_evidence.evidence_of)
    before = program._cache_size()
    assert before
    _suggested(samples, 1, confidence=0.9)
    assert program._cache_size() == before


@pytest.mark.slow
def test_double_precision_and_clients_without_samples(x64):
    samples = np.array(_samples(jax.random.key(0), dtype=jnp.float64))
    found = _suggested(samples)
    assert found.suggested == (1, 1)
    assert found.shared_scores.dtype == np.float64
    counts = jnp.full(M, float(N)).at[-1].set(0)
    empty = eqx.tree_at(lambda c: c.data.count, jf.Clients.from_samples(samples), counts)
    assert suggest_ranks(empty, key=jax.random.key(0), **LIMITS).client_local.shape == (M - 1,)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_samples(value):
    found = _suggested(np.full((M, N, D), value, np.float32))
    assert found.suggested is None
    chex.assert_tree_all_finite((found.shared_scores, found.local_scores, found.noise_variance))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"most_shared": 0}, "most_shared: wanted a whole number of at least 1, got 0"),
        ({"most_local": 1.5}, "most_local: wanted a whole number of at least 1"),
        ({"draws": 7}, "draws: wanted a whole number of at least 8, got 7"),
        ({"subsets": 0}, "subsets: wanted a whole number of at least 1"),
        ({"confidence": 1.0}, "confidence: wanted a number from 0 to below 1"),
    ],
)
def test_refuses_bad_input(key, change, message):
    with pytest.raises(ValueError, match=message):
        _suggested(_samples(key), **change)


def test_refuses_other_clients(key):
    samples = _samples(key)
    moments = jf.Clients.from_moments(samples.mT @ samples / N)
    gaps = jf.Clients.from_samples(samples.at[0, 0, 0].set(jnp.nan), missing="mask")
    for clients in (moments, gaps):
        with pytest.raises(ValueError, match=r"^clients: wanted samples, as of Clients.from_samp"):
            suggest_ranks(clients, key=key)
    clipped = jf.privacy.release_moments(
        jf.Clients.from_samples(samples), epsilon=1.0, delta=1e-5, rows="clip", bound=1.0, key=key
    )
    with pytest.raises(ValueError, match=r"^clients: wanted moments of pairs or directions"):
        suggest_ranks(clipped, key=key)
    with pytest.raises(ValueError, match=r"^clients: wanted at least two with samples, got 1"):
        suggest_ranks(jf.Clients.from_samples(samples[:1]), key=key)


@pytest.mark.slow
def test_example():
    failed, attempted = doctest.testmod(ranks)
    assert attempted > 0
    assert failed == 0


@pytest.mark.parametrize("rows", [300, 30_000])
def test_ranks_do_not_depend_on_the_number_of_rows(rows):
    rng = np.random.default_rng(0)
    shared = np.linalg.qr(rng.standard_normal((10, 3)))[0].T
    tables = []
    for _ in range(4):
        own = np.linalg.qr(rng.standard_normal((10, 1)))[0].T
        signal = rng.standard_normal((rows, 3)) * [30, 3, 0.5] @ shared
        signal += 2 * rng.standard_normal((rows, 1)) * own
        tables.append((signal + 0.05 * rng.standard_normal((rows, 10))).astype(np.float32))
    options = {"most_shared": 4, "most_local": 2, "draws": 8, "subsets": 2}
    found = jf.pca.suggest_ranks(jf.Clients.from_samples(tables), key=jax.random.key(0), **options)
    assert (found.shared, found.local) == (3, 1)
    assert np.allclose(found.noise_variance, 0.05**2, rtol=0.1)
