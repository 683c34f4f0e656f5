"""Rules that bring the means of groups together, a minority of which may be anything."""

import abc
from typing import final

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxfed._checks import check_count, check_positive
from jaxfed.linalg.division import ratio

Rows = Float[Array, "groups numbers"]
Shares = Float[Array, " groups"]
# Parts of fewer numbers than about this count up to a larger multiple of the median distance.
FEW = 3
# Of the power iterations towards a principal direction.
POWER_STEPS = 20


class Rule(eqx.Module):
    """Brings the means of groups together, as a pure function of them and of what they weigh."""

    @abc.abstractmethod
    def aggregate(self, rows: Rows, shares: Shares) -> Float[Array, " numbers"]:
        """The aggregate.

        Args:
            rows: the groups' means, on a scale on which half of them are within one of the
                coordinate-wise median.
            shares: what groups weigh, summing to one; 0 for a group without participants.
        """


@final
class GeometricMedian(Rule):
    """The point of the smallest sum of distances to the groups' means.

    Tolerates any share of bad groups below one half. The smoothed Weiszfeld iteration, a fixed
    number of steps from the coordinate-wise median.

    Source: Pillutla, Kakade & Harchaoui (2022), Robust aggregation for federated learning, IEEE
    Transactions on Signal Processing, Algorithm 1.
    """

    steps: int = eqx.field(static=True, default=8)

    def __check_init__(self):
        check_count("steps", self.steps)

    def aggregate(self, rows, shares):
        """Reweighted means."""

        def step(center, _):
            inverse = shares / distances(rows, center)
            return (inverse / inverse.sum()) @ rows, None

        return jax.lax.scan(step, weighted_quantile(rows, shares, 0.5), length=self.steps)[0]


@final
class Biweight(Rule):
    """A mean whose weights fall with the distance, to zero at a multiple of the median distance.

    From the geometric median, a fixed number of reweighted means. Groups far from the others count
    nothing, where a median still moves by a bounded amount, and those within the usual spread
    nearly the same, so that little is lost without any bad group. Tolerates any share of bad groups
    below one half.

    Lies no longer than what honest groups differ by are not far. But if those who tell them agree,
    groups differ more in the direction of the lie than chance makes them differ in any. There the
    median takes the place of the weighted mean, if the two differ by more than that mean's standard
    error. Where honest groups differ most in few directions, that costs some of the efficiency.

    Source: Beaton & Tukey (1974) for the weights; Maronna, Martin & Yohai (2006), Robust
    statistics, Section 5.5, for a redescending estimate from a robust start and scale; Lai, Rao &
    Vempala (2016), Agnostic estimation of mean and covariance, for medians along principal
    directions and means along the others; Johnstone (2001), On the distribution of the largest
    eigenvalue in principal components analysis, for what chance makes of it.
    """

    cutoff: float = eqx.field(static=True, default=3.0)
    steps: int = eqx.field(static=True, default=8)
    directions: int = eqx.field(static=True, default=3)  # at most, in which the median is taken

    def __check_init__(self):
        check_positive("cutoff", self.cutoff, single=True)
        check_count("steps", self.steps)
        check_count("directions", self.directions, least=0)

    def aggregate(self, rows, shares):
        """Reweighted means, and medians along principal directions."""
        start = GeometricMedian().aggregate(rows, shares)
        typical = weighted_quantile(distances(rows, start)[:, None], shares, 0.5)
        # Distances of few numbers vary more around their median.
        reach = self.cutoff * (1 + FEW / rows.shape[1]) ** 0.5 * typical

        def weights(center):
            left = jnp.maximum(0, 1 - (distances(rows, center) / reach) ** 2)
            found = shares * left**2
            return found / found.sum()

        def step(center, _):
            return weights(center) @ rows, None

        center = jax.lax.scan(step, start, length=self.steps)[0]
        found, rest, counts = center, rows - center, weights(center)
        numbers = rows.shape[1]
        # The largest share of the variance that one direction has by chance, if all have the same.
        edge = (numbers**-0.5 + jnp.sum(counts**2) ** 0.5) ** 2
        for _ in range(min(self.directions, numbers)):
            direction = _principal_direction(rest, counts)
            along = rest @ direction
            median = weighted_quantile(along[:, None], counts, 0.5)[0]
            share = ratio(counts @ along**2, counts @ jnp.sum(rest**2, axis=1))
            noise = jnp.sum((counts * along) ** 2)  # the mean's variance
            # Both from none to one without a jump.
            by_variance = jnp.maximum(0, 1 - ratio(edge, share) ** 4)
            by_distance = jnp.maximum(0, 1 - ratio(noise, median**2))
            found += direction * median * by_variance * by_distance
            rest -= along[:, None] * direction
        return found


@final
class CoordinateMedian(Rule):
    """The weighted median of each number.

    Tolerates any share of bad groups below one half, at an error that grows with the number of
    coordinates.

    Source: Yin, Chen, Kannan & Bartlett (2018), Byzantine-robust distributed learning, Option I.
    """

    def aggregate(self, rows, shares):
        """Medians."""
        return weighted_quantile(rows, shares, 0.5)


@final
class TrimmedMean(Rule):
    """The weighted mean of each number without its largest and smallest values.

    Tolerates a share of bad groups up to the share trimmed at either end.

    Source: Yin, Chen, Kannan & Bartlett (2018), Byzantine-robust distributed learning, Option II.
    """

    trimmed: float = eqx.field(static=True, default=0.3)

    def __check_init__(self):
        if not isinstance(self.trimmed, float) or not 0 <= self.trimmed < 0.5:
            raise ValueError(f"trimmed: wanted a share below one half, got {self.trimmed!r}")

    def aggregate(self, rows, shares):
        """Means of what is left."""
        values, weights, before = _sorted(rows, shares)
        low, high = self.trimmed, 1 - self.trimmed
        left = jnp.clip(before + weights, low, high) - jnp.clip(before, low, high)
        return jnp.sum(left * values, axis=0) / (high - low)


@final
class CentredClipping(Rule):
    """A mean of deviations from the aggregate, each clipped to the median length.

    Tolerates a share of bad groups of about a fifth. Starts from the coordinate-wise median, where
    the source starts from the last round's aggregate.

    Source: Karimireddy, He & Jaggi (2021), Learning from history for Byzantine robust
    optimization, Section 4.
    """

    steps: int = eqx.field(static=True, default=8)

    def __check_init__(self):
        check_count("steps", self.steps)

    def aggregate(self, rows, shares):
        """Means of clipped deviations."""

        def step(center, _):
            lengths = distances(rows, center)
            radius = weighted_quantile(lengths[:, None], shares, 0.5)
            factors = jnp.minimum(1, radius / lengths)
            return center + (shares * factors) @ (rows - center), None

        return jax.lax.scan(step, weighted_quantile(rows, shares, 0.5), length=self.steps)[0]


def distances(rows: Rows, center: Float[Array, " numbers"]) -> Shares:
    """Distances from a point, smoothed at zero, where they have no derivative."""
    squares = jnp.sum((rows - center) ** 2, axis=1)
    return jnp.sqrt(squares + 1e-3 * jnp.finfo(rows.dtype).eps ** 0.5)


def _principal_direction(rows: Rows, weights: Shares) -> Float[Array, " numbers"]:
    """The unit vector along which the rows are largest; zero if all of them are.

    Power iterations, a fixed number, because derivatives of eigenvectors do not exist where
    eigenvalues are equal. Where they are nearly, any of their vectors does.
    """

    def unit(x):
        return x * jax.lax.rsqrt(jnp.sum(x**2) + jnp.finfo(x.dtype).tiny ** 0.5)

    def step(direction, _):
        return unit((weights * (rows @ direction)) @ rows), None

    # A random start is at right angles to no direction, and does not depend on the groups' order.
    start = unit(jax.random.normal(jax.random.key(0), rows.shape[1:], rows.dtype))
    return jax.lax.scan(step, start, length=POWER_STEPS)[0]


def _sorted(rows: Rows, shares: Shares) -> tuple[Rows, Rows, Rows]:
    """Each number's values in ascending order, their weights, and the weights before them."""
    order = jnp.argsort(rows, axis=0)
    weights = shares[order]
    return jnp.take_along_axis(rows, order, 0), weights, jnp.cumsum(weights, axis=0) - weights


def weighted_quantile(rows: Rows, shares: Shares, level: float) -> Float[Array, " numbers"]:
    """Each number's weighted quantile over the groups; between two values, their mean."""
    values, weights, before = _sorted(rows, shares)
    after, slack = before + weights, 4 * jnp.finfo(shares.dtype).eps
    counts = weights > 0
    low = jnp.argmax(counts & (after >= level - slack), axis=0)
    high = jnp.argmax(counts & (after > level + slack), axis=0)
    both = jnp.take_along_axis(values, jnp.stack([low, high]), 0)
    return both.mean(0)
