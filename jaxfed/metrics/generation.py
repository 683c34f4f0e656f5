"""Quality of generated samples: distances between distributions, noise, and equity over clients.

Distances compare features, `(n, d)`, which may come from any map of images: a classifier trained by
this library, Inception, or the identity.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int, Key, Real

from jaxfed._checks import check_name, check_whole, checked_array, refuse
from jaxfed._numbers import MANY, check_spread, checked_rows
from jaxfed.linalg.derivatives import constant
from jaxfed.linalg.sums import few_rows, mean_of_rows, scaled_norm, unit_of


class KernelDistance(NamedTuple):
    """An estimate of the kernel distance and its standard error."""

    distance: Float[Array, ""]
    standard_error: Float[Array, ""]


class ClientDistribution(NamedTuple):
    """How a metric varies over the clients.

    Attributes:
        mean: mean over the clients.
        variance: variance over the clients, divided by their number since they are not a sample.
        standard_deviation: the root of the variance.
        worst: the worst client's value.
        worst_client: that client's position.
        worst_tenth: a tenth of the clients do worse than this value: the 10th percentile if large
            values are good, the 90th if small ones are.
    """

    mean: Float[Array, ""]
    variance: Float[Array, ""]
    standard_deviation: Float[Array, ""]
    worst: Float[Array, ""]
    worst_client: Int[Array, ""]
    worst_tenth: Float[Array, ""]


def frechet_distance(
    features_a: Real[ArrayLike, "n d"], features_b: Real[ArrayLike, "k d"]
) -> Float[Array, ""]:
    r"""Fréchet distance of the normal distributions fitted to two sets of features: FID.

    \(\|\mu_a - \mu_b\|^2 + \mathrm{tr}(C_a + C_b - 2 (C_a^{1/2} C_b C_a^{1/2})^{1/2})\) with the
    unbiased covariances. The second part is the minimum of \(\|A - Q B\|_F^2\) over orthogonal Q
    for any roots \(A^T A = C_a\), \(B^T B = C_b\); here these are the centred features. This sum
    of squares is never negative and stays accurate near zero and for singular covariances, which
    occur with fewer samples than features.

    The first derivative is exact, and finite for singular covariances; a second derivative raises
    an error.

    Args:
        features_a: features of one set of at least two samples.
        features_b: features of the other. The estimate decreases as either set grows, so compare
            only sets of equal sizes.

    Returns:
        The distance, a scalar.

    Raises:
        ValueError: if the two are not matrices with equal numbers of columns and at least two rows.

    Source:
        Heusel et al. (2017), GANs trained by a two time-scale update rule converge to a local Nash
        equilibrium, (6); Dowson & Landau (1982), The Fréchet distance between multivariate normal
        distributions.
    """
    a, b = _pair(features_a, features_b)
    mean_a, mean_b = mean_of_rows(a), mean_of_rows(b)
    # Any root will do, so take those with fewest rows.
    root_a = few_rows((a - mean_a) / (len(a) - 1) ** 0.5)
    root_b = few_rows((b - mean_b) / (len(b) - 1) ** 0.5)
    # The best rotation is a polar factor. Hold it fixed, since the distance is stationary in it.
    overlap = constant(_product(root_a, root_b.T), "frechet_distance")
    left, values, right = jnp.linalg.svd(overlap, full_matrices=False)
    # Singular vectors of zero singular values are arbitrary; those directions are not rotated. What
    # is left out by mistake is missing from the distance's last term, so leave out little.
    rounding = 8 * jnp.finfo(values.dtype).eps * values[0]
    rotation = _product(left * (values > rounding), right)
    turned = _product(rotation, root_b)
    rest = root_b - _product(rotation.T, turned)
    shape = jnp.sum((root_a - turned) ** 2) + jnp.sum(rest**2)
    return jnp.sum((mean_a - mean_b) ** 2) + shape


def kernel_distance(
    features_a: Real[ArrayLike, "n d"], features_b: Real[ArrayLike, "k d"]
) -> Float[Array, ""]:
    r"""Squared maximum mean discrepancy of two sets of features with a cubic kernel: KID.

    The kernel is \((x^T y / d + 1)^3\). The estimate is unbiased for any number of samples, and
    thus negative about half of the time if the two distributions are the same. It holds the kernel
    of all pairs, `n k` numbers, in memory.

    Args:
        features_a: features of one set of at least two samples.
        features_b: features of the other.

    Returns:
        The estimate, a scalar.

    Raises:
        ValueError: as in `frechet_distance`.

    Source:
        Bińkowski, Sutherland, Arbel & Gretton (2018), Demystifying MMD GANs, section 4; Gretton et
        al. (2012), A kernel two-sample test, (3).
    """
    sums = _kernel_sums(*_pair(features_a, features_b))
    aa, ab, ba, bb = (jnp.sum(rows) for rows in sums)
    return _unbiased(aa, ab, ba, bb, len(sums.aa), len(sums.bb))


def kernel_distance_with_error(
    features_a: Real[ArrayLike, "n d"], features_b: Real[ArrayLike, "k d"]
) -> KernelDistance:
    """`kernel_distance` and its standard error by the jackknife.

    The error is with respect to new samples from the same distributions. If these are nearly the
    same, it is rather too large than too small.

    Args:
        features_a: features of one set of at least three samples.
        features_b: features of the other.

    Returns:
        The estimate and its standard error, two scalars.

    Raises:
        ValueError: as in `frechet_distance`, with at least three rows.

    Source:
        Arvesen (1969), Jackknifing U-statistics; Efron & Stein (1981), The jackknife estimate of
        variance, for the direction of its bias.
    """
    a, b = _pair(features_a, features_b, least=3)
    aa, ab, ba, bb = _kernel_sums(a, b)
    n, k = len(a), len(b)
    within_a, between, within_b = jnp.sum(aa), jnp.sum(ab), jnp.sum(bb)
    # The sum over pairs within a set counts each pair twice.
    without_a = _unbiased(within_a - 2 * aa, between - ab, between - ab, within_b, n - 1, k)
    without_b = _unbiased(within_a, between - ba, between - ba, within_b - 2 * bb, n, k - 1)
    # The jackknife's (n - 1)/n Σ (θ_i - mean)² of either set; the deviation has the division by n.
    of_sets = (n - 1) ** 0.5 * _deviation(without_a), (k - 1) ** 0.5 * _deviation(without_b)
    distance = _unbiased(within_a, between, between, within_b, n, k)
    return KernelDistance(distance, scaled_norm(jnp.stack(of_sets)))


def kernel_distance_of_subsets(
    features_a: Real[ArrayLike, "n d"],
    features_b: Real[ArrayLike, "k d"],
    *,
    key: Key[Array, ""],
    subsets: int = 100,
    subset_size: int = 1000,
) -> KernelDistance:
    """Mean of `kernel_distance` over random subsets, for sets whose pairs do not fit in memory.

    This is how KID is usually reported. The standard error is with respect to the draw of subsets
    from the given samples; for new samples see `kernel_distance_with_error`. Multiplied by
    `subsets ** 0.5` it is the standard deviation that others print.

    Args:
        key: random key of the subsets.
        features_a: features of one set of samples.
        features_b: features of the other.
        subsets: number of pairs of subsets, at least two.
        subset_size: samples per subset, drawn without replacement.

    Returns:
        The mean and its standard error, two scalars.

    Raises:
        ValueError: as in `frechet_distance`, and if there are fewer than two subsets, or these
            are smaller than two or larger than the sets.

    Source:
        Bińkowski, Sutherland, Arbel & Gretton (2018), Demystifying MMD GANs, section 4.
    """
    a, b = _pair(features_a, features_b)
    check_whole("subsets", subsets, least=2)
    check_whole("subset_size", subset_size, least=2, most=min(len(a), len(b)))
    found = _of_subsets(a, b, jax.random.split(key, subsets), int(subset_size))
    return KernelDistance(jnp.mean(found), _deviation(found) / (subsets - 1) ** 0.5)


# A loop outside of `jit` would be compiled at every call.
@partial(jax.jit, static_argnums=3)
def _of_subsets(
    a: Float[Array, "n d"], b: Float[Array, "k d"], keys: Key[Array, " subsets"], subset_size: int
) -> Float[Array, " subsets"]:
    def one(key):
        keys = jax.random.split(key)
        rows_a, rows_b = (
            jax.random.choice(k, len(x), (subset_size,), replace=False)
            for k, x in zip(keys, (a, b), strict=True)
        )
        return kernel_distance(a[rows_a], b[rows_b])

    # Sequentially, because all pairs at once may not fit in memory.
    return lax.map(one, keys)


def noise_level(images: Real[ArrayLike, "*batch height width"]) -> Float[Array, "*batch"]:
    r"""Standard deviation of the noise in an image, estimated without a reference.

    A difference of two Laplacians removes everything that is linear along either axis. White
    normal noise of standard deviation \(\sigma\) leaves
    \(\mathrm E|N * I| = 6 \sigma \sqrt{2/\pi}\), estimated by the mean over the image. Edges count
    as noise, so compare images with strokes only to similar images.

    Args:
        images: gray values, `(..., height, width)`, at least 3 x 3; for colour images, move the
            channels to the front.

    Returns:
        The noise levels, in the units of the gray values.

    Raises:
        ValueError: if the images are smaller than 3 x 3.

    Source:
        Immerkær (1996), Fast noise variance estimation.
    """
    high = checked_array("images", images, "... height width")
    if min(high.shape[-2:]) < 3:
        raise refuse("images", "at least 3 x 3 pixels", images)
    low = jnp.zeros_like(high)
    if not isinstance(images, jax.Array):
        with np.errstate(invalid="ignore"):  # which becomes NaN, as it should
            low = jnp.asarray(np.subtract(images, high).astype(high.dtype))  # lost by rounding
    # The mask [1 -2 1; -2 4 -2; 1 -2 1] is a second difference along both axes.
    parts = high, low
    for axis in (-1, -1, -2, -2):
        parts = _differences(*parts, axis)
    return (jnp.pi / 2) ** 0.5 / 6 * jnp.mean(jnp.abs(sum(parts)), axis=(-2, -1))


def _differences(high: Array, low: Array, axis: int) -> tuple[Array, Array]:
    """Differences of neighbours, each in two parts: next to a stripe of 1e9, one loses digits.

    The second part of a difference of two numbers is its rounding error: Knuth (1997), The art of
    computer programming, volume 2, section 4.2.2.
    """
    length = high.shape[axis]
    before = lax.slice_in_dim(high, 0, length - 1, axis=axis)
    after = lax.slice_in_dim(high, 1, length, axis=axis)
    difference = after - before
    taken = after - difference
    error = (after - (difference + taken)) + (taken - before)
    return difference, error + jnp.diff(low, axis=axis)


def client_distribution(
    values: Real[ArrayLike, " m"], *, good: Literal["small", "large"]
) -> ClientDistribution:
    """How evenly clients are served: the mean of a metric, its spread, and the worst clients.

    Args:
        values: one value per client, such as a `kernel_distance` or a captured energy. A NaN makes
            the whole result NaN.
        good: which values are good: "small" for distances and losses.

    Returns:
        Mean, variance, standard deviation, the worst value and its client, and the worst tenth.

    Raises:
        ValueError: if values are not `(m,)` with at least one client, or `good` is unknown.
    """
    given, values = values, checked_array("values", values, "m")
    _check_digits("values", given)
    check_name("good", good, ("small", "large"))
    badness = values if good == "small" else -values
    worst = jnp.argmax(badness)
    tenth = jnp.percentile(values, 90 if good == "small" else 10)
    unit, deviation = unit_of(values), _deviation(values)
    mean = jnp.mean(values / unit) * unit  # whose sum does not overflow
    return ClientDistribution(mean, deviation * deviation, deviation, values[worst], worst, tenth)


def _deviation(values: Float[Array, " n"]) -> Float[Array, ""]:
    """The standard deviation, divided by n, of numbers whose squares may overflow or vanish."""
    unit = unit_of(values)
    return jnp.std(values / unit) * unit


def _check_digits(name: str, given: ArrayLike) -> None:
    """Refuse numbers that are all so far from zero that single precision loses how they differ."""
    if not isinstance(given, jax.Array) and np.size(given) >= MANY:
        check_spread(name, [np.asarray(given).reshape(-1, 1)])


class _Sums(NamedTuple):
    """For each sample, the sum of its kernel with the others of its set or with the other set."""

    aa: Float[Array, " n"]
    ab: Float[Array, " n"]
    ba: Float[Array, " k"]
    bb: Float[Array, " k"]


def _kernel_sums(a, b) -> _Sums:
    # Any centre gives the same estimates; this one leaves the smallest numbers.
    centre = jax.lax.stop_gradient((a.mean(axis=0) + b.mean(axis=0)) / 2)
    a, b = a - centre, b - centre
    between = _kernel(a, b, centre)
    each = jnp.sum(between, axis=1), jnp.sum(between, axis=0)
    return _Sums(_others(a, centre), *each, _others(b, centre))


def _others(x, centre):
    """For each sample, the sum of its kernel with all others of its set."""
    kernel = _kernel(x, x, centre)
    # Subtracting the diagonal, the largest entry of a row, would lose digits.
    return jnp.sum(jnp.where(jnp.eye(len(x), dtype=bool), 0, kernel), axis=1)


def _kernel(x, y, centre):
    """The kernel of samples about a centre, but for terms that depend on one sample alone.

    Those cancel in unbiased estimates, and are nearly all of the kernel if means are large.
    """
    features = len(centre)
    inner = _product(x, y.T) / features
    constant = jnp.sum(centre * centre) / features + 1
    of_x, of_y = (_product(z, centre) / features for z in (x, y))
    total = of_x[:, None] + of_y
    # (c + p + q + s)³, without the terms in c, p and q that lack the product pq or s.
    high = constant + total
    crossed = 3 * of_x[:, None] * of_y * (constant + high)
    return inner * (3 * high**2 + 3 * high * inner + inner**2) + crossed


def _unbiased(aa, ab, ba, bb, n, k):
    """The estimate from sums over pairs; the sum between the sets is given twice."""
    return aa / (n * (n - 1)) + bb / (k * (k - 1)) - (ab + ba) / (n * k)


def _product(x, y):
    return jnp.matmul(x, y, precision="highest")


def _pair(features_a, features_b, *, least: int = 2) -> tuple[Array, Array]:
    a = checked_rows("features_a", features_a, "n d")
    b = checked_rows("features_b", features_b, f"k {a.shape[1]}")
    for name, features in (("features_a", a), ("features_b", b)):
        if len(features) < least:
            raise ValueError(f"{name}: wanted at least {least} rows, got {len(features)}")
    dtype = jnp.result_type(a, b)
    return a.astype(dtype), b.astype(dtype)
