"""Rules that combine the means of groups, a minority of which may be arbitrary."""

import abc
from typing import ClassVar, final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed._checks import check_count, check_positive
from jaxfed.core.common.printing import as_call
from jaxfed.linalg.division import ratio
from jaxfed.linalg.geometric_median import median_weights

GroupRows = Float[Array, "groups numbers"]
Shares = Float[Array, " groups"]
# In parts of about this many numbers or fewer, groups count up to a larger multiple of the median
# distance.
FEW = 3
# A group's distance from the geometric median counts as at least this many rounding errors.
SMOOTH = 8
# Number of power iterations towards a principal direction.
POWER_STEPS = 20


class Rule(eqx.Module):
    """Combines the means of groups, as a pure function of these means and the groups' weights."""

    rotation_equivariant: ClassVar[bool] = True
    """Whether the aggregate rotates with the rows, apart from where its iterations start."""
    factory: ClassVar[str] = ""
    """Name of the function that makes it; empty for the class itself."""

    def __repr__(self) -> str:
        return as_call(self)

    @abc.abstractmethod
    def aggregate(self, rows: GroupRows, shares: Shares) -> Float[Array, " numbers"]:
        """Return the aggregate.

        Args:
            rows: the groups' means, scaled so that half of them are within distance one of the
                coordinate-wise median.
            shares: the groups' weights, summing to one; 0 for a group without participants.
        """


@final
class _GeometricMedian(Rule):
    factory = "geometric_median"

    def aggregate(self, rows, shares):
        """Return the geometric median."""
        near = shares / smoothed_distances(rows, weighted_quantile(rows, shares, 0.5))
        start = near / near.sum()
        smooth = float(SMOOTH * jnp.finfo(rows.dtype).eps) ** 2
        return median_weights(_gram, _squares, smooth, rows, shares, start) @ rows


@final
class _Biweight(Rule):
    factory = "biweight"

    cutoff: float = eqx.field(static=True)
    steps: int = eqx.field(static=True)
    directions: int = eqx.field(static=True)

    def aggregate(self, rows, shares):
        """Return reweighted means, with medians along principal directions."""
        start = _GeometricMedian().aggregate(rows, shares)
        typical = weighted_quantile(smoothed_distances(rows, start)[:, None], shares, 0.5)
        # Distances of few numbers vary more around their median.
        reach = self.cutoff * (1 + FEW / rows.shape[1]) ** 0.5 * typical

        def weights(center):
            left = jnp.maximum(0, 1 - (smoothed_distances(rows, center) / reach) ** 2)
            found = shares * left**2
            return found / found.sum()

        def step(center, _):
            return weights(center) @ rows, None

        center = jax.lax.scan(step, start, length=self.steps)[0]
        found, rest, counts = center, rows - center, weights(center)
        numbers = rows.shape[1]
        # The largest share of the variance in one direction by chance, if all have the same
        # variance: Johnstone's (1 + √(p/n))² divided by p, with n = 1 / Σ w² for weighted groups.
        edge = (numbers**-0.5 + jnp.sum(counts**2) ** 0.5) ** 2
        for _ in range(min(self.directions, numbers)):
            direction = _principal_direction(rest, counts)
            along = rest @ direction
            median = weighted_quantile(along[:, None], counts, 0.5)[0]
            share = ratio(counts @ along**2, counts @ jnp.sum(rest**2, axis=1))
            noise = jnp.sum((counts * along) ** 2)  # the mean's variance
            # Both rise smoothly from zero to one.
            by_variance = jnp.maximum(0, 1 - ratio(edge, share) ** 4)
            by_distance = jnp.maximum(0, 1 - ratio(noise, median**2))
            found += direction * median * by_variance * by_distance
            rest -= along[:, None] * direction
        return found


@final
class _CoordinateMedian(Rule):
    factory = "coordinate_median"

    rotation_equivariant: ClassVar[bool] = False

    def aggregate(self, rows, shares):
        """Return medians."""
        return weighted_quantile(rows, shares, 0.5)


@final
class _TrimmedMean(Rule):
    factory = "trimmed_mean"

    rotation_equivariant: ClassVar[bool] = False

    trimmed: float = eqx.field(static=True)

    def aggregate(self, rows, shares):
        """Return means of the remaining values."""
        values, weights, before = _sorted(rows, shares)
        low, high = self.trimmed, 1 - self.trimmed
        # The part of each value's weight between the two levels; of the values at the ends, a
        # share.
        left = jnp.clip(before + weights, low, high) - jnp.clip(before, low, high)
        return jnp.sum(left * values, axis=0) / (high - low)


@final
class _CentredClipping(Rule):
    factory = "centred_clipping"

    steps: int = eqx.field(static=True)

    def aggregate(self, rows, shares):
        """Return means of clipped deviations."""

        def step(center, _):
            lengths = smoothed_distances(rows, center)
            radius = weighted_quantile(lengths[:, None], shares, 0.5)
            factors = jnp.minimum(1, radius / lengths)
            return center + (shares * factors) @ (rows - center), None

        return jax.lax.scan(step, weighted_quantile(rows, shares, 0.5), length=self.steps)[0]


def geometric_median() -> Rule:
    """The point with the smallest sum of distances to the groups' means.

    It tolerates any share of bad groups below one half. The smoothed Weiszfeld iteration runs from
    the coordinate-wise median until the sum is near its least value: within a share of 1e-5 of it
    in single precision.

    Source: Pillutla, Kakade & Harchaoui (2022), Robust aggregation for federated learning, IEEE
    Transactions on Signal Processing, Algorithm 1.
    """
    return _GeometricMedian()


def biweight(cutoff: float = 3.0, *, steps: int = 8, directions: int = 3) -> Rule:
    """A mean whose weights fall with the distance, to zero at a multiple of the median distance.

    It repeats a reweighted mean a fixed number of times, from the geometric median. Groups far from
    the others do not count at all, whereas they still move a median by a bounded amount. Groups
    within the usual spread count almost equally, so that little is lost if no group is bad. It
    tolerates any share of bad groups below one half.

    Lies within the spread of honest groups are not far away. But if the liars agree, groups differ
    more in the direction of the lie than they would by chance in any direction. In that direction
    the median replaces the weighted mean, if the two differ by more than that mean's
    standard error. If honest groups differ most in few directions, this costs some efficiency.

    Source: Beaton & Tukey (1974) for the weights; Maronna, Martin & Yohai (2006), Robust
    statistics, Section 5.5, for a redescending estimate from a robust start and scale; Lai, Rao &
    Vempala (2016), Agnostic estimation of mean and covariance, for medians along principal
    directions and means along the others; Johnstone (2001), On the distribution of the largest
    eigenvalue in principal components analysis, for its size by chance.

    Args:
        cutoff: the multiple of the median distance at which weights are zero.
        steps: number of reweighted means.
        directions: largest number of directions in which the median may replace the mean.

    Raises:
        ValueError: if the cutoff is not positive, or a number is not a whole one in range.
    """
    check_positive("cutoff", cutoff, single=True)
    check_count("steps", steps)
    check_count("directions", directions, least=0)
    return _Biweight(cutoff, steps, directions)


def coordinate_median() -> Rule:
    """The weighted median of each number.

    It tolerates any share of bad groups below one half, with an error that grows with the number of
    coordinates.

    Source: Yin, Chen, Kannan & Bartlett (2018), Byzantine-robust distributed learning, Option I.
    """
    return _CoordinateMedian()


def trimmed_mean(trimmed: float = 0.3) -> Rule:
    """The weighted mean of each number without its largest and smallest values.

    It tolerates a share of bad groups up to the share trimmed at either end.

    Source: Yin, Chen, Kannan & Bartlett (2018), Byzantine-robust distributed learning, Option II.

    Args:
        trimmed: the share trimmed at either end, below one half.

    Raises:
        ValueError: if the share is not from 0 to below one half.
    """
    if not isinstance(trimmed, float) or not 0 <= trimmed < 0.5:
        raise ValueError(f"trimmed: wanted a share below one half, got {trimmed!r}")
    return _TrimmedMean(trimmed)


def centred_clipping(steps: int = 8) -> Rule:
    """A mean of deviations from the aggregate, each clipped to the median length.

    It tolerates a share of bad groups of about a fifth. It starts from the coordinate-wise median,
    whereas the source starts from the last round's aggregate.

    Source: Karimireddy, He & Jaggi (2021), Learning from history for Byzantine robust
    optimization, Section 4.

    Args:
        steps: number of clipped means.

    Raises:
        ValueError: if the number is not a positive whole one.
    """
    check_count("steps", steps)
    return _CentredClipping(steps)


def _gram(rows: GroupRows, weights: Shares) -> Float[Array, "groups groups"]:
    rest = rows - weights @ rows
    return rest @ rest.T


def _squares(rows: GroupRows, weights: Shares) -> Shares:
    return jnp.sum((rows - weights @ rows) ** 2, axis=1)


def smoothed_distances(rows: GroupRows, center: Float[Array, " numbers"]) -> Shares:
    """Return distances from a point, smoothed at zero, where they have no derivative."""
    # The constant is absolute, because `aggregated` scales rows to a median distance of one.
    squares = jnp.sum((rows - center) ** 2, axis=1)
    return jnp.sqrt(squares + 1e-3 * jnp.finfo(rows.dtype).eps ** 0.5)


def _principal_direction(rows: GroupRows, weights: Shares) -> Float[Array, " numbers"]:
    """Return the unit vector along which the rows are largest; zero if all of them are zero.

    It uses a fixed number of power iterations, because eigenvectors have no derivatives if
    eigenvalues are equal. If they are nearly equal, any of their vectors will do.
    """

    def unit(x):
        return x * jax.lax.rsqrt(jnp.sum(x**2) + jnp.finfo(x.dtype).tiny ** 0.5)

    def step(direction, _):
        return unit((weights * (rows @ direction)) @ rows), None

    # A random start is orthogonal to no direction, and does not depend on the groups' order.
    start = unit(jax.random.normal(jax.random.key(0), rows.shape[1:], rows.dtype))
    return jax.lax.scan(step, start, length=POWER_STEPS)[0]


def _sorted(rows: GroupRows, shares: Shares) -> tuple[GroupRows, GroupRows, GroupRows]:
    """Sort each number's values; also return their weights, and the weights before them."""
    order = jnp.argsort(rows, axis=0)
    weights = shares[order]
    return jnp.take_along_axis(rows, order, 0), weights, jnp.cumsum(weights, axis=0) - weights


def weighted_quantile(rows: GroupRows, shares: Shares, level: float) -> Float[Array, " numbers"]:
    """Return each number's weighted quantile over the groups; the mean if between two values."""
    values, weights, before = _sorted(rows, shares)
    # Equal weights reach a level only up to rounding; then both neighbours count.
    after, slack = before + weights, 4 * jnp.finfo(shares.dtype).eps
    counts = weights > 0
    low = jnp.argmax(counts & (after >= level - slack), axis=0)
    high = jnp.argmax(counts & (after > level + slack), axis=0)
    both = jnp.take_along_axis(values, jnp.stack([low, high]), 0)
    return both.mean(0)
