"""Clients of sparse samples, beside dense ones."""

import jax
import numpy as np
import pytest
import scipy.sparse
from jax.experimental.sparse import BCOO

import jaxfed as jf
from jaxfed.linalg import Moment

COUNTS = (40, 30, 50)
FEATURES = 12


def draw(counts=COUNTS, features=FEATURES, offset=0.0, scale=1.0):
    """Sparse matrices, of which one feature has no zeros."""
    rng = np.random.default_rng(0)
    tables = [rng.normal(size=(n, features)) * (rng.random((n, features)) < 0.3) for n in counts]
    for table in tables:
        table[:, 1] = offset + rng.normal(size=len(table))
    return [scale * table for table in tables]


def centred(tables, center):
    mean = np.concatenate(tables).mean(axis=0)
    own = {"none": lambda x: 0, "local": lambda x: x.mean(axis=0), "shared": lambda x: mean}[center]
    return [table - own(table) for table in tables]


def moments_of(clients):
    data = clients.data
    if isinstance(data, Moment):
        return np.asarray(data.dense)
    values = np.asarray(data.values, float)
    return np.einsum("mnd,mne->mde", values, values) / np.asarray(data.count)[:, None, None]


@pytest.mark.parametrize("center", ["none", "shared", "local"])
@pytest.mark.parametrize("counts", [COUNTS, (8, 6, 7)])
@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "lil"])
def test_moments_are_those_of_dense_samples(center, counts, kind, x64):
    tables = draw(counts)
    sparse = [scipy.sparse.csr_array(x).asformat(kind) for x in tables]
    clients = jf.Clients.from_sparse_samples(sparse, center=center, weights="samples")
    assert isinstance(clients.data, Moment) == (max(counts) >= FEATURES)
    wanted = [x.T @ x / len(x) for x in centred(tables, center)]
    np.testing.assert_allclose(moments_of(clients), wanted, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(clients.counts, counts)
    np.testing.assert_allclose(clients.weights, np.asarray(counts) / sum(counts))


@pytest.mark.parametrize("center", ["shared", "local"])
@pytest.mark.parametrize("offset", [0, 1e6, 1e9])
def test_an_offset_costs_no_digits(center, offset):
    tables = draw(offset=offset)
    clients = jf.Clients.from_sparse_samples(
        list(map(scipy.sparse.csr_array, tables)), center=center
    )
    wanted = [x.T @ x / len(x) for x in centred(tables, center)]
    np.testing.assert_allclose(moments_of(clients), wanted, rtol=1e-6, atol=3e-7)


def test_blocks_of_columns_are_put_together(x64):
    rng = np.random.default_rng(1)
    table = rng.normal(size=(1100, 1040)) * (rng.random((1100, 1040)) < 0.02)
    clients = jf.Clients.from_sparse_samples([scipy.sparse.csr_array(table)], center="local")
    rows = table - table.mean(axis=0)
    found = moments_of(clients)[0]
    np.testing.assert_allclose(found, rows.T @ rows / len(rows), atol=1e-15)
    np.testing.assert_array_equal(found, found.T)


@pytest.mark.parametrize("scale", [1e-25, 1e15])
def test_units_do_not_count(scale, key):
    """Where squares would not fit, clients hold samples."""
    fits = [
        jf.fit(
            jf.pca.PerPCA(2, 1),
            jf.Clients.from_sparse_samples(
                [scipy.sparse.csr_array(x) for x in draw(scale=x)], center="shared"
            ),
            rounds=60,
            key=key,
        ).result
        for x in (1.0, scale)
    ]
    error = jf.metrics.projector_distance(fits[0].shared, fits[1].shared)
    np.testing.assert_allclose(error, 0, atol=1e-6)


def test_a_fit_is_that_of_dense_samples(key):
    tables = draw()
    sparse = [BCOO.fromdense(x.astype(np.float32)) for x in tables]
    names = {"names": ["a", "b", "c"], "features": [f"word{i}" for i in range(FEATURES)]}
    clients = jf.Clients.from_sparse_samples(sparse, center="local", **names)
    dense = jf.Clients.from_samples(
        [x.astype(np.float32) for x in centred(tables, "local")], **names
    )
    one, other = (jf.fit(jf.pca.PerPCA(2, 1), x, rounds=60, key=key) for x in (clients, dense))
    assert one.names == other.names and one.names.clients == ("a", "b", "c")
    error = jf.metrics.projector_distance(one.result.shared, other.result.shared)
    np.testing.assert_allclose(error, 0, atol=1e-6)


def test_empty_rows_and_matrices_are_zeros(key):
    clients = jf.Clients.from_sparse_samples([scipy.sparse.csr_array((5, 3))] * 2, center="shared")
    np.testing.assert_array_equal(clients.data.dense, np.zeros((2, 3, 3)))


@pytest.mark.parametrize(
    "matrices, options, said",
    [
        (
            [np.eye(3)],
            {},
            r"^matrices\[0\]: wanted a matrix of scipy.sparse or a BCOO, got ndarray",
        ),
        ([], {}, r"^matrices: "),
        ([scipy.sparse.eye_array(3), scipy.sparse.eye_array(4)], {}, r"features"),
        ([scipy.sparse.eye_array(3) * np.nan], {}, r"^matrices\[0\], its non-zero values: NaN"),
        ([scipy.sparse.eye_array(3)], {"center": "both"}, r"^center: wanted"),
        ([scipy.sparse.eye_array(3)], {"features": ["a"]}, r"^features: "),
        ([scipy.sparse.eye_array(3) * 1j], {}, r"^matrices\[0\], its non-zero values: wanted real"),
        (scipy.sparse.eye_array(3), {}, r"^matrices: "),
    ],
)
def test_bad_input_is_refused(matrices, options, said):
    with pytest.raises(ValueError, match=said):
        jf.Clients.from_sparse_samples(matrices, **options)


def test_dense_ways_name_the_sparse_one():
    with pytest.raises(ValueError, match=r"^arrays\[0\]: .*Clients\.from_sparse_samples"):
        jf.Clients.from_samples([scipy.sparse.eye_array(3)])
    assert jax.tree.leaves(jf.Clients.from_samples([np.eye(3)]))
