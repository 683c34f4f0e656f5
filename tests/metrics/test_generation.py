"""Distances of generated samples and noise against plain references and closed forms."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfed import metrics
from tests.references import generation as reference

SIZES = [(40, 50), (50, 40), (5, 50), (50, 5), (6, 4), (4, 6), (9, 9)]  # of sets of 8 features
distances = pytest.mark.parametrize("distance", [metrics.frechet_distance, metrics.kernel_distance])


def draw_features(n, k, d=8, seed=0):
    """Two sets of features from different distributions."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)) @ rng.normal(size=(d, d)), rng.normal(size=(k, d)) + 0.5


# --- distance of normal laws ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_frechet_distance_equals_the_reference(n, k, x64):
    a, b = draw_features(n, k)
    # The root of a singular product is accurate to half the digits only.
    wanted = reference.frechet(a, b)
    np.testing.assert_allclose(metrics.frechet_distance(a, b), wanted, rtol=1e-7)
    np.testing.assert_allclose(metrics.frechet_distance(b, a), wanted, rtol=1e-7)
    single = metrics.frechet_distance(a.astype(np.float32), b.astype(np.float32))
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, wanted, rtol=1e-5)


def test_frechet_distance_along_axes_has_a_closed_form(x64):
    corners = np.array([[1.0, 1], [1, -1], [-1, 1], [-1, -1]]) * np.sqrt(3 / 4)  # covariance I
    a, b = corners * [3.0, 0.5] + [1.0, 2.0], corners * [1.0, 2.0]
    found = metrics.frechet_distance(a, b)
    np.testing.assert_allclose(found, 1 + 4 + (3 - 1) ** 2 + (0.5 - 2) ** 2, rtol=1e-14)


def test_frechet_distance_converges_to_that_of_the_distributions(x64):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(200_000, 3)) * [1, 2, 3], rng.normal(size=(200_000, 3)) * [2, 2, 1]
    found = metrics.frechet_distance(a, b + np.array([0.0, 1, 0]))
    np.testing.assert_allclose(found, 1 + 1 + 4, rtol=0.02)


@pytest.mark.parametrize(("n", "k"), [(30, 30), (5, 5)])
def test_frechet_distance_keeps_its_digits_near_zero(n, k):
    a, _ = draw_features(n, k)
    a = a.astype(np.float32)
    assert 0 <= metrics.frechet_distance(a, a) < 1e-10
    # A shift of 1e-3 is a distance of 8e-6, below the rounding error of the traces.
    np.testing.assert_allclose(metrics.frechet_distance(a, a + np.float32(1e-3)), 8e-6, rtol=1e-2)
    scaled = (a - a.mean(0)) * np.float32(1 + 1e-3) + a.mean(0)
    wanted = 1e-6 * np.trace(np.cov(a.T))
    np.testing.assert_allclose(metrics.frechet_distance(a, scaled), wanted, rtol=1e-2)


@pytest.mark.slow
def test_constant_features_have_the_distance_of_points():
    a, b = np.zeros((4, 3), np.float32), np.full((5, 3), 2, np.float32)
    np.testing.assert_allclose(metrics.frechet_distance(a, b), 12, rtol=1e-6)
    slope = jax.grad(metrics.frechet_distance, argnums=(0, 1))(a, b)
    chex.assert_tree_all_finite(slope)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(12, 9), (9, 12), (4, 6), (12, 4)])
@distances
def test_derivatives_are_finite_differences(distance, n, k, x64):
    a, b = draw_features(n, k, d=5)
    rng = np.random.default_rng(1)
    along = rng.normal(size=a.shape), rng.normal(size=b.shape)
    slopes = jax.grad(distance, argnums=(0, 1))(a, b)
    h = 1e-5
    ends = [distance(a + s * h * along[0], b + s * h * along[1]) for s in (1, -1)]
    wanted = (ends[0] - ends[1]) / (2 * h)
    found = sum(np.vdot(slope, u) for slope, u in zip(slopes, along, strict=True))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.slow
@distances
def test_distances_can_be_mapped_over_clients(distance, x64):
    pairs = [draw_features(12, 9, d=5, seed=seed) for seed in range(3)]
    a, b = (jnp.stack(sets) for sets in zip(*pairs, strict=True))
    found = jax.jit(jax.vmap(distance))(a, b)
    np.testing.assert_allclose(found, [distance(*pair) for pair in pairs], rtol=1e-10)


# --- distance by a kernel ------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(7, 5), (4, 9)])
def test_kernel_distance_equals_the_reference(n, k, x64):
    a, b = draw_features(n, k)
    np.testing.assert_allclose(metrics.kernel_distance(a, b), reference.kernel(a, b), rtol=1e-12)
    found = metrics.kernel_distance_with_error(a, b)
    np.testing.assert_allclose(found.distance, reference.kernel(a, b), rtol=1e-12)
    wanted = reference.jackknife(reference.kernel, a, b)
    np.testing.assert_allclose(found.standard_error, wanted, rtol=1e-10)


@pytest.mark.parametrize(("scale", "offset"), [(1, 1000), (1, 30), (1e-3, 0), (1e-6, 0)])
def test_kernel_distance_keeps_its_digits(scale, offset):
    """Far from zero, or of small features, the kernel is nearly constant."""
    a, b = (scale * x + offset for x in draw_features(40, 50))
    wanted = reference.kernel(a, b)
    if offset == 0:
        # To second order, three times the squared difference of means, without the bias.
        squares = sum(x.var(0, ddof=1).sum() / len(x) for x in (a, b))
        wanted = 3 * (np.sum((a.mean(0) - b.mean(0)) ** 2) - squares) / 8
    rtol = {1000: 1e-4, 30: 1e-5, 0: 20 * scale}[offset]
    np.testing.assert_allclose(metrics.kernel_distance(a, b), wanted, rtol=rtol)


@pytest.mark.parametrize("scale", [1e-12, 1e-9, 1e4])
def test_standard_errors_of_kernel_distances_have_a_unit(scale):
    """Their squares leave single precision."""
    options = {"key": jax.random.key(0), "subsets": 5, "subset_size": 20}
    for function, more in (
        (metrics.kernel_distance_with_error, {}),
        (metrics.kernel_distance_of_subsets, options),
    ):
        a, b = (np.float32(scale * x) for x in draw_features(40, 50))
        found = function(a, b, **more).standard_error
        with jax.enable_x64(True):
            wanted = function(a.astype(float), b.astype(float), **more).standard_error
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_numbers_that_single_precision_loses_are_refused():
    values = 1e8 + np.random.default_rng(0).normal(size=20)
    with pytest.raises(ValueError, match=r"^values: wanted features that single precision holds"):
        metrics.client_distribution(values, good="small")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    a, b = (jnp.asarray(x, dtype) for x in draw_features(40, 50))
    for function in (metrics.frechet_distance, metrics.kernel_distance):
        wanted = function(a.astype(jnp.float32), b.astype(jnp.float32))
        np.testing.assert_array_equal(function(a, b), wanted)


def test_kernel_distance_within_a_distribution_is_zero_on_average(key):
    a, b = jax.random.normal(key, (2, 400, 20, 6))
    found = jax.jit(jax.vmap(metrics.kernel_distance))(a, b)
    assert abs(found.mean()) < 4 * found.std() / len(found) ** 0.5
    assert (found < 0).any() and (found > 0).any()


def test_the_standard_error_is_that_of_other_samples(key):
    a, b = jax.random.normal(key, (2, 400, 40, 6))
    found = jax.jit(jax.vmap(metrics.kernel_distance_with_error))(a, 1.5 * b + 1)
    np.testing.assert_allclose(found.standard_error.mean(), found.distance.std(), rtol=0.15)
    same = jax.jit(jax.vmap(metrics.kernel_distance_with_error))(a, b)
    assert same.standard_error.mean() > same.distance.std()


@pytest.mark.slow
def test_subsets_have_the_mean_of_all_pairs(key, x64):
    a, b = draw_features(60, 40)
    run = functools.partial(metrics.kernel_distance_of_subsets, a, b, key=key)
    whole = metrics.kernel_distance(a, b)
    found = run(subsets=200, subset_size=20)
    assert found.standard_error > 0
    assert abs(found.distance - whole) < 4 * found.standard_error
    # Subsets that are the whole sets differ by the order of their samples only.
    found = metrics.kernel_distance_of_subsets(a[:40], b, key=key, subsets=3, subset_size=40)
    np.testing.assert_allclose(found.distance, metrics.kernel_distance(a[:40], b), rtol=1e-12)
    np.testing.assert_allclose(found.standard_error, 0, atol=1e-12 * found.distance)
    for options in ({"subsets": 1}, {"subsets": 2.0}):
        with pytest.raises(ValueError, match=r"^subsets: wanted .* got"):
            run(**options)
    for size in (1, 41, 3.0):
        with pytest.raises(ValueError, match=r"^subset_size: wanted a whole number .* got"):
            run(subset_size=size)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 3), (4, 2)), r"features_b: wanted .*\(k, 3\), got .*\(4, 2\)"),
        (((4, 3, 1), (4, 3)), "features_a: wanted"),
        (((4,), (4,)), "features_a: wanted"),
        (((4, 0), (4, 0)), "features_a: wanted"),
        (((1, 3), (4, 3)), "features_a: wanted at least 2 rows, got 1"),
        (((4, 3), (0, 3)), "features_b: wanted an array"),
    ],
)
@distances
def test_features_that_do_not_fit_are_refused(distance, shapes, message):
    with pytest.raises(ValueError, match=message):
        jax.jit(distance)(*map(np.ones, shapes))


def test_a_standard_error_needs_three_samples():
    with pytest.raises(ValueError, match="features_b: wanted at least 3 rows, got 2"):
        metrics.kernel_distance_with_error(np.ones((3, 2)), np.ones((2, 2)))


# --- noise ---------------------------------------------------------------------------------------


def test_noise_level_equals_the_reference(x64):
    images = np.random.default_rng(0).normal(size=(2, 3, 9, 7)).cumsum(axis=-1)
    found = jax.jit(metrics.noise_level)(images)
    wanted = [[reference.noise(image) for image in row] for row in images]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("jit", [False, True])
def test_noise_beside_a_bright_stripe_and_far_from_zero_keeps_its_digits(jit):
    images = 0.1 * np.random.default_rng(0).normal(size=(3, 20, 24))
    images[0, :, 7], images[0, 5], images[1] = 1e9, -3e9, images[1] + 1e9 * (np.arange(24) == 7)
    if jit:  # where numbers are in single precision already
        images = images.astype(np.float32)
    images[2] += 0 if jit else 1e9
    found = (jax.jit if jit else lambda x: x)(metrics.noise_level)(images)
    wanted = [reference.noise(image.astype(float)) for image in images]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("level", [0.01, 0.2])
def test_noise_level_finds_the_noise_of_smooth_images(level, key):
    y, x = np.mgrid[:128, :128] / 128
    smooth = np.stack([3 * x - 2 * y + 1, np.sin(3 * x) * np.cos(2 * y), 0.1 * x * y])
    images = smooth + level * jax.random.normal(key, smooth.shape)
    np.testing.assert_allclose(metrics.noise_level(images), level, rtol=0.03)
    assert metrics.noise_level(smooth).max() < 1e-3 * 0.2


def test_pixels_may_be_integers():
    image = np.random.default_rng(0).integers(0, 256, (9, 7)).astype(np.uint8)
    found = metrics.noise_level(image)
    np.testing.assert_allclose(found, reference.noise(image.astype(float)), rtol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (2, 9), (4, 9, 2)])
def test_images_without_pixels_are_refused(shape):
    with pytest.raises(ValueError, match=r"^images: wanted "):
        metrics.noise_level(np.ones(shape))


# --- clients -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_worst_client_is_found(x64):
    values = np.random.default_rng(0).permutation(np.arange(41.0))
    for good, worst, tenth in (("small", 40, 36), ("large", 0, 4)):
        run = jax.jit(functools.partial(metrics.client_distribution, good=good))
        found = run(values)
        assert (found.worst, found.worst_tenth, found.mean) == (worst, tenth, 20)
        assert values[found.worst_client] == worst
        np.testing.assert_allclose(found.variance, (41**2 - 1) / 12, rtol=1e-12)
        np.testing.assert_allclose(found.standard_deviation**2, found.variance, rtol=1e-12)
    batched = jax.vmap(functools.partial(metrics.client_distribution, good="small"))
    np.testing.assert_array_equal(batched(np.stack([values, 2 * values])).worst, [40, 80])
    with pytest.raises(ValueError, match=r"^good: wanted one of small, large, got 'high'"):
        metrics.client_distribution(values, good="high")
    for shape in ((), (0,), (3, 2)):
        with pytest.raises(ValueError, match=r"^values: wanted .* shape \(m\)"):
            metrics.client_distribution(np.ones(shape), good="small")


@pytest.mark.parametrize("rows", [2_000, 100_000])
def test_the_frechet_distance_of_many_rows(rows):
    scales = np.logspace(0, -2.5, 64)
    rng = np.random.default_rng(0)
    a = (rng.standard_normal((rows, 64)) * scales).astype(np.float32)
    b = (rng.standard_normal((rows, 64)) * scales * 1.1 + 0.01).astype(np.float32)
    with jax.enable_x64(True):
        wanted = float(metrics.frechet_distance(a.astype(float), b.astype(float)))
    assert np.isclose(float(metrics.frechet_distance(a, b)), wanted, rtol=1e-4)
