"""How many components views have in common, against NumPy and by repeated draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csr_matrix

import jaxfed as jf
from jaxfed.gcca import Views, permutation_test


def draw(seed, entities=60, features=(5, 4, 6), common=1, noise=1.0):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(entities, common))
    return [
        scores @ rng.normal(size=(common, d)) + noise * rng.normal(size=(entities, d))
        for d in features
    ]


def views_of(arrays, dtype=np.float64):
    return Views.from_arrays([x.astype(dtype) for x in arrays], center=True)


def by_numpy(arrays, most, draws, ridge=0.0):
    """Agreement of views, and of views in the orders of these draws, `(permutations, views, n)`."""

    def smoother(centred):
        left, singular, _ = np.linalg.svd(centred, full_matrices=False)
        return left * np.sqrt(singular**2 / (singular**2 + len(centred) * ridge))

    def agreement(bases):
        return np.linalg.eigvalsh(sum(b @ b.T for b in bases))[-1] / len(bases)

    bases = [smoother(x - x.mean(axis=0)) for x in arrays]
    scores = np.linalg.eigh(sum(b @ b.T for b in bases))[1][:, ::-1]
    found, permuted = [], []
    for k in range(most):
        nuisance = np.concatenate([np.ones((len(scores), 1)), scores[:, :k]], axis=1)
        complete = np.linalg.qr(nuisance, mode="complete")[0]
        rest = []
        for b in bases:
            fits = np.linalg.qr(b.T @ scores[:, :k])[0]
            rest.append(complete[:, k + 1 :].T @ (b - (b @ fits) @ fits.T))
        found.append(agreement(rest))
        orders = np.argsort(draws[..., k + 1 :], axis=-1)
        permuted.append([agreement([b[o] for b, o in zip(rest, x, strict=True)]) for x in orders])
    return np.asarray(found), np.asarray(permuted).T


@pytest.mark.parametrize("ridge", [0.0, 0.3])
def test_numbers_are_those_of_numpy(ridge, key, x64):
    arrays = draw(0, entities=30, features=(4, 3, 5), common=2)
    found = permutation_test(views_of(arrays), 3, key=key, permutations=19, ridge=ridge)
    draws = [
        [
            jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, j), n), 30, np.float32)
            for j in (0, 1, 2)
        ]
        for n in range(19)
    ]
    agreement, permuted = by_numpy(arrays, 3, np.asarray(draws), ridge)
    np.testing.assert_allclose(found.agreement, agreement, rtol=1e-12)
    p_values = np.maximum.accumulate((1 + (permuted >= agreement).sum(0)) / 20)
    np.testing.assert_allclose(found.p_values, p_values)
    np.testing.assert_allclose(found.chance, np.quantile(permuted, 0.95, axis=0), rtol=1e-12)


def test_agreement_of_two_views_is_that_of_canonical_correlations(key):
    arrays = draw(1, features=(5, 3))
    left, right = (np.linalg.qr(x - x.mean(0))[0] for x in arrays)
    correlations = np.linalg.svd(left.T @ right, compute_uv=False)
    single = views_of(arrays, np.float32)
    found = permutation_test(single, 3, key=key, permutations=19)
    np.testing.assert_allclose(found.agreement, (1 + correlations) / 2, rtol=1e-5)


def test_common_components_are_counted(key):
    arrays = draw(2, entities=200, common=2)
    found = permutation_test(views_of(arrays), 4, key=key, permutations=99)
    assert found.rank == 2
    assert (np.diff(found.p_values) >= 0).all()
    assert (found.agreement[:2] > found.chance[:2]).all()


def test_views_that_fit_anything_have_nothing_in_common(key):
    """Whatever is in them, since noise would agree as much, unless a ridge limits it."""
    arrays = draw(3, entities=25, features=(30, 40), common=1, noise=0.3)
    found = permutation_test(views_of(arrays, np.float32), 2, key=key, permutations=49)
    np.testing.assert_array_equal(found.p_values, 1)
    assert permutation_test(views_of(arrays), 2, key=key, permutations=49, ridge=1.0).rank == 1


def test_more_components_than_directions_are_not_in_common(key):
    arrays = draw(4, features=(2, 1))
    found = permutation_test(views_of(arrays), 5, key=key, permutations=19)
    assert found.rank <= 1
    np.testing.assert_array_equal(found.p_values[3:], 1)


def test_neither_padding_nor_the_order_of_views_counts(key, x64):
    arrays = draw(5)
    views = views_of(arrays)
    found = permutation_test(views, 2, key=key, permutations=19)
    turned = permutation_test(views.take([2, 0, 1]), 2, key=key, permutations=19)
    for x, y in zip(found, turned, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9)


def test_units_do_not_count(key):
    arrays = draw(6, common=2)
    scaled = [1e-9 * arrays[0], 1e6 * arrays[1], arrays[2] * np.asarray([1, 1e4, 1, 1, 1, 1])]
    one, other = (
        permutation_test(views_of(x, np.float32), 3, key=key, permutations=19, ridge=0.0)
        for x in (arrays, scaled)
    )
    np.testing.assert_allclose(one.agreement, other.agreement, rtol=1e-4)
    np.testing.assert_array_equal(one.p_values, other.p_values)


@pytest.mark.slow
@pytest.mark.parametrize("common", [0, 1])
def test_errors_are_as_rare_as_the_level_says(common):
    """In two hundred draws, of which 5 % are ten, with a standard deviation of three."""
    ranks = [
        permutation_test(
            views_of(draw(seed, common=common), np.float32),
            common + 1,
            key=jax.random.key(seed),
            permutations=99,
        ).rank
        for seed in range(200)
    ]
    assert 1 <= np.sum(np.asarray(ranks) > common) <= 20
    assert np.sum(np.asarray(ranks) < common) == 0


@pytest.mark.parametrize(
    "change, said",
    [
        ({"most": 0}, r"^most: wanted a whole number of at least 1, got 0"),
        ({"most": 100}, r"100 orthonormal components do not fit 20 entities"),
        ({"permutations": 0}, r"^permutations: wanted a whole number of at least 1"),
        ({"level": 1.0}, r"^level: wanted a number in \(0, 1\)"),
        ({"ridge": -1.0}, r"^ridge: "),
        ({"views": views_of(draw(0, 20)).take([0])}, r"^views: wanted at least two, got 1"),
        (
            {"views": Views.from_sparse([csr_matrix(x) for x in draw(0, 20)])},
            r"^views: the test needs dense views",
        ),
        (
            {"views": jf.Clients.from_samples([jnp.ones((20, 2))] * 2)},
            r"GCCA needs Views.from_arrays",
        ),
    ],
)
def test_bad_input_is_refused(change, said, key):
    given = {"views": views_of(draw(0, 20)), "most": 2} | change
    with pytest.raises(ValueError, match=said):
        permutation_test(key=key, **given)
