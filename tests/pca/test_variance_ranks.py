"""Numbers of components by the variance that they explain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

import jaxfed as jf

DIGITS = load_digits()


def tables(rows=None):
    x = DIGITS.data - DIGITS.data.mean(axis=0)
    return [x[DIGITS.target == digit][:rows] for digit in range(10)]


def by_hand(given, shared, total):
    """The same numbers from dense second moments."""
    moments = [x.T @ x for x in given]
    values, vectors = np.linalg.eigh(sum(moments))
    energy, order = values.sum(), np.argsort(values)[::-1]
    rank = 1 + int(np.argmax(np.cumsum(values[order]) >= shared * energy))
    outside = np.eye(len(values)) - (u := vectors[:, order[:rank]]) @ u.T
    left = sum(np.linalg.eigvalsh(outside @ x @ outside)[::-1] for x in moments)
    along = values[order[:rank]].sum()
    sums = along + np.concatenate([[0], np.cumsum(left)])
    return rank, int(np.argmax(sums >= total * energy))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_shared_components_are_as_many_as_those_of_all_samples(share):
    found = jf.pca.ranks_for_variance(jf.Clients.from_samples(tables()), share, None)
    wanted = PCA(share).fit(DIGITS.data)
    assert (found.shared, found.local) == (wanted.n_components_, 0)
    np.testing.assert_allclose(found.share, wanted.explained_variance_ratio_.sum(), rtol=1e-5)
    assert found.shared_share == found.share


@pytest.mark.parametrize("rows", [None, 5])  # more and fewer samples than features
@pytest.mark.parametrize("bucket", [None, 1.2])
@pytest.mark.parametrize(("shared", "total"), [(0.2, 0.8), (0.5, 0.9), (0.9, 0.9)])
def test_samples_and_moments_have_the_numbers_of_dense_moments(rows, bucket, shared, total):
    given = tables(rows)
    wanted = by_hand(given, shared, total)
    of_samples = jf.Clients.from_samples(given, bucket=bucket)
    dense = [x.T @ x / len(x) for x in given]
    of_moments = jf.Clients.from_moments(dense, counts=[len(x) for x in given])
    for clients in (of_samples, of_moments):
        found = jf.pca.ranks_for_variance(clients, shared, total)
        assert (found.shared, found.local) == wanted
        assert found.shared_share >= shared
        assert found.share >= max(found.shared_share, total) - 1e-9


def test_the_fit_explains_what_was_asked():
    clients = jf.Clients.from_samples(tables(150))
    found = jf.pca.ranks_for_variance(clients, 0.4, 0.8)
    solution = jf.fit(
        jf.pca.PerPCA(found.shared, found.local), clients, rounds=60, key=jax.random.key(0)
    )
    assert float(jf.pca.explained_variance(solution, tables(150)).total.mean()) >= 0.79


def test_numbers_are_kept():
    found = jf.pca.ranks_for_variance(jf.Clients.from_samples(tables()), 3, 2)
    assert (found.shared, found.local) == (3, 2)
    assert 0 < found.shared_share < found.share < 1
    assert jf.pca.ranks_for_variance(jf.Clients.from_samples(tables()), 0, 0.5).shared == 0


@pytest.mark.parametrize("rank", [1, 3])
def test_rounding_adds_no_component(rank):
    low = np.random.default_rng(0).normal(size=(2, 50, rank)) @ np.eye(rank, 8)
    found = jf.pca.ranks_for_variance(jf.Clients.from_samples(low), 1 - 1e-6, None)
    assert found.shared == rank


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shared": 0.0}, r"shared: wanted a number of components or a share in \(0, 1\)"),
        ({"shared": 1.0}, "shared: wanted"),
        ({"shared": None}, "shared: wanted"),
        ({"shared": 65}, "shared: wanted a whole number from 0 to 64"),
        ({"total": 1.5}, "total: wanted"),
        ({"total": -1}, "total: wanted"),
        ({"shared": 0.9, "total": 0.5}, r"total: wanted at least the share .*, 0\.9, got 0\.5"),
    ],
)
def test_wrong_arguments(given, words):
    with pytest.raises(ValueError, match=words):
        jf.pca.ranks_for_variance(jf.Clients.from_samples(tables()), **given)


def test_wrong_data():
    zeros = jf.Clients.from_samples([np.zeros((4, 3))])
    with pytest.raises(ValueError, match="positive variance"):
        jf.pca.ranks_for_variance(zeros)
    gaps = jf.Clients.from_samples([np.array([[1.0, np.nan], [0.0, 1.0]])], missing="mask")
    with pytest.raises(ValueError, match="clients: wanted samples or second moments"):
        jf.pca.ranks_for_variance(gaps)

    def traced(x):
        return jnp.asarray(jf.pca.ranks_for_variance(jf.Clients.from_samples(x)).shared)

    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(traced)(jnp.ones((2, 4, 3)))
