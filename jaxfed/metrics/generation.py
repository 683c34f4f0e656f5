"""How good generated samples are: distances of laws of features, noise, and equity over clients.

Distances are between features, not images: of a classifier trained by this library, of Inception,
or the samples themselves. Whatever maps images to features, `(n, ...)` to `(n, d)`, will do.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from jaxfed._checks import check_name, check_whole, checked_array, checked_key, refuse
from jaxfed.linalg.derivatives import constant


class KernelDistance(NamedTuple):
    """An estimate of the kernel distance and how far it may be off."""

    distance: Float[Array, ""]
    standard_error: Float[Array, ""]


class ClientDistribution(NamedTuple):
    """How a figure is spread over the clients.

    Attributes:
        mean: over the clients.
        variance: over the clients, which are all there are: divided by their number.
        standard_deviation: its root.
        worst: the figure of the worst client.
        worst_client: which one that is.
        worst_tenth: the figure that a tenth of the clients is worse than: the 10th percentile
            where large is good, the 90th where small is.
    """

    mean: Float[Array, ""]
    variance: Float[Array, ""]
    standard_deviation: Float[Array, ""]
    worst: Float[Array, ""]
    worst_client: Int[Array, ""]
    worst_tenth: Float[Array, ""]


def frechet_distance(
    features_a: Float[Array, "n d"], features_b: Float[Array, "k d"]
) -> Float[Array, ""]:
    r"""Fréchet distance of the normal laws that fit two sets of features: FID.

    \(\|\mu_a - \mu_b\|^2 + \mathrm{tr}(C_a + C_b - 2 (C_a^{1/2} C_b C_a^{1/2})^{1/2})\) with the
    unbiased covariances. Its second part is the least \(\|A - Q B\|_F^2\) over orthogonal Q for
    any roots \(A^T A = C_a\), \(B^T B = C_b\), here the centred features themselves. As a sum
    of squares it is never negative and keeps its digits near zero and where covariances are
    singular, as they are with fewer samples than features.

    The derivative is exact, and finite at singular covariances; a second one is an error.

    Args:
        features_a: of one set of samples, at least two.
        features_b: of the other, at least two. The estimate falls as either set grows, so compare
            only sets of the same sizes.

    Returns:
        The distance, a scalar.

    Raises:
        ValueError: if the two are no matrices with as many columns and two rows at least.

    Source:
        Heusel et al. (2017), GANs trained by a two time-scale update rule converge to a local Nash
        equilibrium, (6); Dowson & Landau (1982), The Fréchet distance between multivariate normal
        distributions.
    """
    a, b = _pair(features_a, features_b)
    mean_a, mean_b = jnp.mean(a, axis=0), jnp.mean(b, axis=0)
    root_a = (a - mean_a) / (len(a) - 1) ** 0.5
    root_b = (b - mean_b) / (len(b) - 1) ** 0.5
    if len(a) > a.shape[1]:
        # Any root will do: the shortest. That Q is held fixed changes no derivative, because
        # turning a root does not change the distance.
        q = jnp.linalg.qr(lax.stop_gradient(root_a))[0]
        root_a = _product(q.T, root_a)
    # The best rotation is a polar factor. Held fixed, because the distance is stationary in it.
    overlap = constant(_product(root_a, root_b.T), "frechet_distance")
    left, values, right = jnp.linalg.svd(overlap, full_matrices=False)
    rounding = jnp.finfo(values.dtype).eps * max(overlap.shape) * values[0]
    # What belongs to no singular value has no direction, and is left where it is.
    rotation = _product(left * (values > rounding), right)
    turned = _product(rotation, root_b)
    rest = root_b - _product(rotation.T, turned)
    shape = jnp.sum((root_a - turned) ** 2) + jnp.sum(rest**2)
    return jnp.sum((mean_a - mean_b) ** 2) + shape


def kernel_distance(
    features_a: Float[Array, "n d"], features_b: Float[Array, "k d"]
) -> Float[Array, ""]:
    r"""Squared maximum mean discrepancy of two sets of features with a cubic kernel: KID.

    The kernel is \((x^T y / d + 1)^3\). Unbiased at every number of samples, so that it is below
    zero about half of the time where the two laws are the same. All pairs are looked at, `n k`
    numbers at once.

    Args:
        features_a: of one set of samples, at least two.
        features_b: of the other, at least two.

    Returns:
        The estimate, a scalar.

    Raises:
        ValueError: as `frechet_distance`.

    Source:
        Bińkowski, Sutherland, Arbel & Gretton (2018), Demystifying MMD GANs, section 4; Gretton et
        al. (2012), A kernel two-sample test, (3).
    """
    sums = _kernel_sums(*_pair(features_a, features_b))
    aa, ab, ba, bb = (jnp.sum(rows) for rows in sums)
    return _unbiased(aa, ab, ba, bb, len(sums.aa), len(sums.bb))


def kernel_distance_with_error(
    features_a: Float[Array, "n d"], features_b: Float[Array, "k d"]
) -> KernelDistance:
    """`kernel_distance` and its standard error, by leaving out one sample after the other.

    The error is that of other samples of the same laws, features held fixed. Where the two laws
    are nearly the same it is too large rather than too small.

    Args:
        features_a: of one set of samples, at least three.
        features_b: of the other, at least three.

    Returns:
        The estimate and its standard error, two scalars.

    Raises:
        ValueError: as `frechet_distance`, with three rows at least.

    Source:
        Arvesen (1969), Jackknifing U-statistics; Efron & Stein (1981), The jackknife estimate of
        variance, for its direction.
    """
    a, b = _pair(features_a, features_b, least=3)
    aa, ab, ba, bb = _kernel_sums(a, b)
    n, k = len(a), len(b)
    within_a, between, within_b = jnp.sum(aa), jnp.sum(ab), jnp.sum(bb)
    # A pair is in the sum over pairs twice.
    without_a = _unbiased(within_a - 2 * aa, between - ab, between - ab, within_b, n - 1, k)
    without_b = _unbiased(within_a, between - ba, between - ba, within_b - 2 * bb, n, k - 1)
    variance = (n - 1) * jnp.var(without_a) + (k - 1) * jnp.var(without_b)
    distance = _unbiased(within_a, between, between, within_b, n, k)
    return KernelDistance(distance, jnp.sqrt(variance))


def kernel_distance_of_subsets(
    key: Key[Array, ""],
    features_a: Float[Array, "n d"],
    features_b: Float[Array, "k d"],
    *,
    subsets: int = 100,
    subset_size: int = 1000,
) -> KernelDistance:
    """Mean of `kernel_distance` over random subsets, for sets whose pairs do not fit in memory.

    How KID is usually reported. The standard error is that of the mean over draws of subsets from
    the given samples; for that over other samples see `kernel_distance_with_error`. Times
    `subsets ** 0.5` it is the standard deviation that others print.

    Args:
        key: random key of the subsets.
        features_a: of one set of samples.
        features_b: of the other.
        subsets: how many pairs of subsets.
        subset_size: samples of a subset, drawn without replacement.

    Returns:
        The mean and its standard error, two scalars.

    Raises:
        ValueError: as `frechet_distance`, for fewer than two subsets, and for subsets that are
            smaller than two or larger than the sets.

    Source:
        Bińkowski, Sutherland, Arbel & Gretton (2018), Demystifying MMD GANs, section 4.
    """
    a, b = _pair(features_a, features_b)
    key = checked_key("key", key)
    check_whole("subsets", subsets, least=2)
    # Subsets of the smaller set.
    check_whole("subset_size", subset_size, least=2, most=min(len(a), len(b)))

    def one(key):
        keys = jax.random.split(key)
        rows_a, rows_b = (
            jax.random.choice(k, len(x), (subset_size,), replace=False)
            for k, x in zip(keys, (a, b), strict=True)
        )
        return kernel_distance(a[rows_a], b[rows_b])

    # One after the other: the point of subsets is that all pairs are too many at once.
    found = lax.map(one, jax.random.split(key, subsets))
    return KernelDistance(jnp.mean(found), jnp.std(found, ddof=1) / subsets**0.5)


def noise_level(images: Float[Array, "*batch height width"]) -> Float[Array, "*batch"]:
    r"""Standard deviation of the noise in an image, blind to what the image shows.

    The difference of two Laplacians does not see what is linear along either axis. White normal
    noise of standard deviation \(\sigma\) leaves \(\mathrm E|N * I| = 6 \sigma \sqrt{2/\pi}\), of
    which the mean over the image is taken. Edges count as noise, so the figure of an image of
    strokes is for comparison with others of its kind.

    Args:
        images: gray values, `(..., height, width)`, three by three at least; of colour images
            move the channels to the front.

    Returns:
        The noise levels, in the units of the gray values.

    Raises:
        ValueError: if images are smaller than that.

    Source:
        Immerkær (1996), Fast noise variance estimation.
    """
    images = checked_array("images", images, "... height width")
    if min(images.shape[-2:]) < 3:
        raise refuse("images", "3 x 3 pixels at least", images)
    # The mask [1 -2 1; -2 4 -2; 1 -2 1] is a second difference along both axes.
    response = jnp.diff(jnp.diff(images, n=2, axis=-1), n=2, axis=-2)
    return (jnp.pi / 2) ** 0.5 / 6 * jnp.mean(jnp.abs(response), axis=(-2, -1))


def client_distribution(
    values: Float[Array, " m"], *, good: Literal["small", "large"]
) -> ClientDistribution:
    """How evenly clients are served: spread of a figure over the clients, and the worst of them.

    Args:
        values: one figure for each client, such as a `kernel_distance` or a captured energy. One
            that is NaN makes all NaN.
        good: which figures are the good ones, "small" for distances and losses.

    Returns:
        Mean, variance, standard deviation, the worst figure, whose it is, and the worst tenth.

    Raises:
        ValueError: if values are not `(m,)` with one client at least, or `good` is neither.
    """
    values = checked_array("values", values, "m")
    check_name("good", good, ("small", "large"))
    badness = values if good == "small" else -values
    worst = jnp.argmax(badness)
    tenth = jnp.percentile(values, 90 if good == "small" else 10)
    return ClientDistribution(
        jnp.mean(values), jnp.var(values), jnp.std(values), values[worst], worst, tenth
    )


class _Sums(NamedTuple):
    """Kernel values of each sample with all others: within the sets, and with the other set."""

    aa: Float[Array, " n"]
    ab: Float[Array, " n"]
    ba: Float[Array, " k"]
    bb: Float[Array, " k"]


def _kernel_sums(a, b) -> _Sums:
    between = _kernel(a, b)
    return _Sums(_others(a), jnp.sum(between, axis=1), jnp.sum(between, axis=0), _others(b))


def _others(x):
    """Sum of the kernel of each sample with all others of its set."""
    kernel = _kernel(x, x)
    # Not a difference with the diagonal, which is the largest entry of its row.
    return jnp.sum(jnp.where(jnp.eye(len(x), dtype=bool), 0, kernel), axis=1)


def _kernel(x, y):
    return (_product(x, y.T) / x.shape[1] + 1) ** 3


def _unbiased(aa, ab, ba, bb, n, k):
    """The estimate from sums over pairs; that between the sets comes twice."""
    return aa / (n * (n - 1)) + bb / (k * (k - 1)) - (ab + ba) / (n * k)


def _product(x, y):
    return jnp.matmul(x, y, precision="highest")


def _pair(features_a, features_b, *, least: int = 2) -> tuple[Array, Array]:
    a = checked_array("features_a", features_a, "n d")
    b = checked_array("features_b", features_b, f"k {a.shape[1]}")
    for name, features in (("features_a", a), ("features_b", b)):
        if len(features) < least:
            raise ValueError(f"{name}: wanted {least} rows at least, got {len(features)}")
    dtype = jnp.result_type(a, b)
    return a.astype(dtype), b.astype(dtype)
