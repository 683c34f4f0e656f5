"""Rules against NumPy and SciPy, what a minority can do to them, and derivatives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from jaxfed.aggregation import (
    biweight,
    centred_clipping,
    coordinate_median,
    geometric_median,
    trimmed_mean,
)
from jaxfed.aggregation.rules import weighted_quantile

pytestmark = pytest.mark.usefixtures("x64")

RULES = {
    "biweight": biweight(),
    "geometric median": geometric_median(),
    "coordinate median": coordinate_median(),
    "trimmed mean": trimmed_mean(),
    "clipping": centred_clipping(),
}
every_rule = pytest.mark.parametrize("name", RULES)
aggregate = jax.jit(lambda rule, rows, shares: rule.aggregate(rows, shares))


def draw_rows(seed=0, groups=11, numbers=4):
    rng = np.random.default_rng(seed)
    shares = rng.uniform(0.5, 1.5, size=groups)
    return rng.normal(size=(groups, numbers)), shares / shares.sum()


def median(values, counts):
    """The median of values that are repeated by their counts."""
    return np.median(np.repeat(values, counts, axis=0), axis=0)


@pytest.mark.parametrize("counts", [[1] * 7, [1] * 8, [3, 1, 0, 2, 5, 1, 2, 4], [4, 1, 1, 2, 0]])
def test_the_coordinate_median_equals_numpys(counts):
    rows, _ = draw_rows(groups=len(counts))
    rows, shares = jnp.asarray(rows), jnp.asarray(counts) / np.sum(counts)
    chex.assert_trees_all_close(
        aggregate(coordinate_median(), rows, shares), median(rows, counts), rtol=1e-12
    )
    first = weighted_quantile(rows, shares, 1e-6)
    chex.assert_trees_all_equal(first, rows[np.array(counts) > 0].min(0))


def test_the_trimmed_mean_is_the_mean_of_what_is_left():
    counts = [3, 1, 0, 2, 5, 1, 2, 6]
    rows, _ = draw_rows(groups=len(counts))
    every = np.sort(np.repeat(rows, counts, axis=0), axis=0)
    found = aggregate(trimmed_mean(0.25), rows, np.array(counts) / 20)
    chex.assert_trees_all_close(found, every[5:15].mean(0), rtol=1e-12)
    mean = aggregate(trimmed_mean(0.0), rows, np.array(counts) / 20)
    chex.assert_trees_all_close(mean, every.mean(0), rtol=1e-12)


@pytest.mark.parametrize("kind", ["apart", "at a lie", "coincident", "few"])
def test_the_geometric_median_has_the_smallest_sum_of_distances(kind):
    """Also where it is near one of the points, where fixed numbers of steps do not arrive."""
    rng = np.random.default_rng(0)
    rows, shares = draw_rows(groups=4 if kind == "few" else 20, numbers=2 if kind == "few" else 4)
    if kind == "at a lie":
        rows[:9] = rng.normal(size=4) * 3
    if kind == "coincident":
        rows[:] = np.repeat(rows[:4], 5, axis=0)
    center = shares @ rows
    for _ in range(20000):
        inverse = shares / (np.linalg.norm(rows - center, axis=1) + 1e-14)
        center = inverse @ rows / inverse.sum()
    found = aggregate(geometric_median(), rows, shares)
    sums = [shares @ np.linalg.norm(rows - np.asarray(x), axis=1) for x in (found, center)]
    assert sums[0] <= sums[1] * (1 + 1e-9)


def test_the_biweight_has_the_smallest_bounded_loss():
    rows, shares = draw_rows(1)
    rows[:3] += 8
    start = np.asarray(aggregate(geometric_median(), rows, shares))
    lengths = np.linalg.norm(rows - start, axis=1)
    order = np.argsort(lengths)
    typical = lengths[order][np.searchsorted(np.cumsum(shares[order]), 0.5)]
    reach = 3 * (1 + 3 / 4) ** 0.5 * typical  # of four numbers

    def loss(x):
        left = np.maximum(0, 1 - (np.linalg.norm(rows - x, axis=1) / reach) ** 2)
        return shares @ (1 - left**3)

    wanted = minimize(loss, start, tol=1e-12).x
    chex.assert_trees_all_close(
        aggregate(biweight(steps=300, directions=0), rows, shares), wanted, atol=1e-5
    )


def test_lies_as_short_as_honest_differences_do_not_add_up():
    rng = np.random.default_rng(3)
    rows, shares = rng.normal(size=(100, 30)), np.full(100, 0.01)
    lie = rng.normal(size=30)
    rows[:30] = lie * 30**0.5 / np.linalg.norm(lie)  # as long as the others
    honest = rows[30:].mean(0)
    mean, plain, found = (
        np.linalg.norm(aggregate(rule, rows, shares) - honest)
        for rule in (trimmed_mean(0.0), biweight(directions=0), biweight())
    )
    assert plain > 0.9 * mean
    # The bias is that of a median of which three tenths of the mass lie on one side.
    assert found < 0.9 < 1.6 < mean


def test_medians_along_directions_cost_little_without_lies():
    shares = np.full(100, 0.01)
    draws = np.random.default_rng(4).normal(size=(200, 100, 30))
    found, mean = (
        np.mean([np.sum(aggregate(rule, rows, shares) ** 2) for rows in draws])
        for rule in (biweight(), trimmed_mean(0.0))
    )
    assert found < 1.05 * mean


def test_clipped_deviations_sum_to_zero():
    rows, shares = draw_rows(2)
    found = np.asarray(aggregate(centred_clipping(2000), rows, shares))
    deviations = rows - found
    lengths = np.linalg.norm(deviations, axis=1)
    order = np.argsort(lengths)
    radius = lengths[order][np.searchsorted(np.cumsum(shares[order]), 0.5)]
    clipped = deviations * np.minimum(1, radius / lengths)[:, None]
    np.testing.assert_allclose(shares @ clipped, 0, atol=1e-5)


TOLERATED = {name: 0.19 if name == "clipping" else 0.3 for name in RULES}


@pytest.mark.slow
@every_rule
@given(
    seed=st.integers(0, 1000),
    size=st.floats(-2, 6),
    together=st.booleans(),
    bad=st.floats(0, 1),
)
def test_a_minority_cannot_move_it_far(name, seed, size, together, bad):
    rows, shares = draw_rows(seed, groups=20)
    rows /= np.linalg.norm(rows, axis=1).max()
    share = np.floor(bad * TOLERATED[name] * 20).astype(int)
    with jax.enable_x64(True):
        shares = np.full(20, 1 / 20)
        lies = np.random.default_rng(seed).normal(size=(1 if together else share, 4))
        rows[:share] = 10.0**size * lies
        found = aggregate(RULES[name], rows, shares)
    # Honest rows lie within distance one of zero; rules by coordinate have a weaker bound.
    assert np.linalg.norm(found) < 4


@every_rule
def test_values_of_any_size_stay_finite(name):
    rows, shares = draw_rows(groups=10)
    rows[0] = 1e30
    found = aggregate(RULES[name], np.float32(rows), np.float32(shares))
    assert found.dtype == jnp.float32 and np.linalg.norm(found) < 3


@every_rule
def test_shifts_with_the_rows_and_ignores_their_order(name):
    rows, shares = draw_rows(3)
    wanted = aggregate(RULES[name], rows, shares)
    order = np.random.default_rng(0).permutation(len(rows))
    chex.assert_trees_all_close(
        aggregate(RULES[name], rows[order] + 2.0, shares[order]), wanted + 2.0, atol=1e-9
    )
    absent = np.concatenate([rows, np.full((1, 4), 1e6)])
    found = aggregate(RULES[name], absent, np.append(shares, 0.0))
    chex.assert_trees_all_close(found, wanted, atol=1e-9)


@every_rule
def test_equal_rows_aggregate_to_themselves_and_have_derivatives(name):
    row, shares = np.arange(3.0), np.full(6, 1 / 6)
    rows = np.tile(row, (6, 1))
    both = jax.value_and_grad(lambda *at: RULES[name].aggregate(*at).sum(), (0, 1))
    value, slopes = jax.jit(both)(rows, shares)
    np.testing.assert_allclose(value, row.sum(), rtol=1e-12)
    assert all(np.isfinite(x).all() for x in slopes)
    # Shifting all rows shifts the aggregate by as much.
    np.testing.assert_allclose(slopes[0].sum(0), 1, rtol=1e-6)


@pytest.mark.slow
@every_rule
def test_derivatives_are_central_differences(name):
    rows, shares = draw_rows(4)
    rng = np.random.default_rng(5)
    along = rng.normal(size=rows.shape), rng.normal(size=shares.shape)
    along = along[0], along[1] * shares - (along[1] * shares).sum() * shares
    at = jnp.asarray(rows), jnp.asarray(shares)

    def value(rows, shares):
        return jnp.sum(jnp.sin(RULES[name].aggregate(rows, shares)))

    slopes = jax.grad(value, (0, 1))(*at)
    step = 1e-6
    for i in range(2):
        moved = [
            value(*(x + s * step * along[j] * (j == i) for j, x in enumerate(at))) for s in (1, -1)
        ]
        wanted = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose(np.sum(slopes[i] * along[i]), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: biweight(cutoff=-1.0), "cutoff"),
        (lambda: trimmed_mean(0.5), "trimmed"),
        (lambda: trimmed_mean(1), "trimmed"),
        (lambda: centred_clipping(-1), "steps"),
    ],
)
def test_bad_settings_are_refused(make, argument):
    with pytest.raises(ValueError, match=rf"^{argument}: .*got"):
        make()
