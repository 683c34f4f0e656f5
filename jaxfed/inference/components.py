"""How sure the components of a personalized PCA are: angles, shares of energy, single axes."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Key

from jaxfed._checks import check_instance, check_options, check_probability, refuse
from jaxfed._numbers import checked_rows
from jaxfed.contract import Personalized
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import check_complete_samples
from jaxfed.core.clients.units import in_enough_precision
from jaxfed.core.run.result import check_run
from jaxfed.core.run.solution import Solution
from jaxfed.inference.bootstrap import Bootstrap, Interval, bootstrap
from jaxfed.inference.weights import check_observed
from jaxfed.linalg import Moment, polar
from jaxfed.linalg.division import ratio
from jaxfed.linalg.sums import unit_of
from jaxfed.manifolds import grassmann
from jaxfed.metrics.components import side_by_side

# With fewer to draw again, intervals are too short (`python -m bench.tables.confidence`).
FEW = {"samples": 20, "clients": 20}
# A bound of the angle beyond which the shared subspace counts as not determined.
UNDETERMINED = np.pi / 4
# Clients that are printed, the farthest from the shared subspace.
MOST_LINES = 10
# Runs count as unfinished if more rounds would gain more than this share of their gain.
UNFINISHED = 0.01
# The tail index from which fourth moments exist, and the share and least number of the largest
# scores that tell it.
HEAVY, TAIL, LEAST_TAIL = 4, 0.02, 10


class Components(NamedTuple):
    """What is computed of a solution and of every resample.

    Attributes:
        axes: the shared components, rotated to principal axes, `(d, r1)`.
        variances: the mean second moment along each, `(r1,)`.
        angles: principal angles between the shared components and those of the solution, in
            radians, ascending, `(r1,)`.
        shared_energy: share of each client's energy that the shared components capture, `(m,)`.
        local_energy: the same for its local components.
        weights: the clients' weights.
    """

    axes: Float[Array, "d r1"]
    variances: Float[Array, " r1"]
    angles: Float[Array, " r1"]
    shared_energy: Float[Array, " m"]
    local_energy: Float[Array, " m"]
    weights: Float[Array, " m"]


class Confidence(NamedTuple):
    """Confidence of a solution's components; angles are in radians, shares between 0 and 1.

    Attributes:
        level: the confidence level of all intervals and bounds.
        of: what was drawn again, "samples" or "clients".
        angle: upper bound of the largest principal angle between the estimated shared subspace and
            the one that infinitely many samples (or clients) would give.
        groups: positions of shared axes, in groups whose variances cannot be told apart. Only the
            span of a group is determined.
        group_angles: upper bound of the largest principal angle of each group's span.
        axes: the shared components as principal axes, by decreasing variance, `(d, r1)`.
        axes_std: standard errors of their entries, `(d, r1)`.
        variances: interval of the mean variance along each axis, `(r1,)`.
        shared_energy: interval of the share of energy in the shared components, mean over clients.
        local_energy: interval of the share in the local components, mean over clients.
        distance: intervals of each client's distance from the shared subspace, `(m,)`: the share of
            its energy outside.
        replicates: all resamples' axes, `(resamples, d, r1)`, turned towards `axes`.
        remarks: what to know before relying on the intervals.
    """

    level: float
    of: str
    angle: float
    groups: tuple[tuple[int, ...], ...]
    group_angles: Float[np.ndarray, " groups"]
    axes: Float[np.ndarray, "d r1"]
    axes_std: Float[np.ndarray, "d r1"]
    variances: Interval
    shared_energy: Interval
    local_energy: Interval
    distance: Interval
    replicates: Float[np.ndarray, "resamples d r1"]
    remarks: tuple[str, ...]

    def scores(self, samples: Float[ArrayLike, "n d"]) -> Interval:
        """Return intervals of the scores of samples on the shared axes.

        Args:
            samples: new samples, centred like those of the fit.

        Returns:
            The interval of each score, `(n, r1)`.

        Raises:
            ValueError: if the samples are not a matrix with d finite columns.
        """
        from scipy.stats import norm

        samples = np.asarray(checked_rows("samples", samples, f"n {len(self.axes)}", finite=True))
        replicates = np.einsum("nd,bdr->bnr", samples, self.replicates)
        reach = norm.ppf((1 + self.level) / 2) * replicates.std(axis=0, ddof=1)
        estimate = samples @ self.axes
        return Interval(estimate, estimate - reach, estimate + reach)

    def __str__(self) -> str:
        def row(name: str, interval: Interval) -> str:
            estimate, lower, upper = (float(x) for x in interval)
            return f"{name:<34} {estimate:7.3f}   {lower:.3f} to {upper:.3f}"

        degrees = np.degrees(self.angle)
        lines = [
            f"{self.level:.0%} intervals, over resamples of {self.of}",
            f"{'angle of the shared subspace':<34}           at most {degrees:.1f} degrees",
        ]
        for group, angle in zip(self.groups, np.degrees(self.group_angles), strict=True):
            name = "axis" if len(group) == 1 else "span of axes"
            number = ", ".join(str(i + 1) for i in group)
            lines.append(f"{f'angle of {name} {number}':<34}           at most {angle:.1f} degrees")
        lines.append(row("energy in shared components", self.shared_energy))
        lines.append(row("energy in local components", self.local_energy))
        farthest = np.argsort(-self.distance.estimate, kind="stable")
        for i in farthest[:MOST_LINES]:
            parts = Interval(*(part[i] for part in self.distance))
            lines.append(row(f"energy of client {i} outside shared", parts))
        if len(farthest) > MOST_LINES:
            lines.append(f"and {len(farthest) - MOST_LINES} more, closer to the shared subspace")
        return "\n".join([*lines, *self.remarks])


@in_enough_precision
def confidence(
    solution: Solution,
    clients: Clients,
    *,
    key: Key[Array, ""],
    level: float = 0.95,
    impute: Solution | None = None,
    **options: Any,
) -> Confidence:
    """Compute how sure the components of a personalized PCA are, by the bootstrap.

    Bounds of angles are quantiles over resamples of the angle to the solution's components. Two
    neighbouring axes are in one group unless the interval of the ratio of their variances excludes
    1. Intervals of shares are computed on the scale of log odds and corrected for bias.

    Args:
        solution: a solution with shared components and local ones orthogonal to them.
        clients: the clients of the solution, with samples in memory.
        key: random key.
        level: confidence level, between 0 and 1.
        impute: the solution of `jaxfed.preprocess.Impute` on the clients, if entries of samples are
            missing; `solution` is then that on `impute.result.local.moments(clients)`. Rows are
            drawn again with their gaps, and imputed anew.
        **options: other arguments of `bootstrap`: `resamples`, `of`, `method`, `rounds`,
            `runs_at_once` and `progress`.

    Raises:
        ValueError: if the solution is not one of personalized PCA, or as `bootstrap`.
        DivergenceError: as `bootstrap`.

    Example:
        >>> import jax, jaxfed as jf
        >>> key = jax.random.key(0)
        >>> data = jf.data.perpca_synthetic(
        ...     key=key, clients=6, features=8, shared_rank=1, local_rank=1, samples=50
        ... )
        >>> clients = jf.Clients.from_samples(data.samples)
        >>> solution = jf.fit(jf.pca.PerPCA(1, 1), clients, rounds=30, key=key)
        >>> found = jf.inference.confidence(solution, clients, key=key, resamples=50)
        >>> bool(found.angle < 0.2)
        True
    """
    without = ("solution", "clients", "statistic", "key", "impute")
    check_options(options, bootstrap, without=without)
    check_probability("level", level)
    check_run(solution)
    shared, local = side_by_side(solution, "solution")
    if shared is None or local is None:
        raise refuse("solution", "shared components with local ones orthogonal to them", solution)
    check_instance("clients", clients, Clients, "the jaxfed.Clients of the solution")
    if impute is None:
        check_observed(clients, "confidence", options.get("of", "samples"))
        check_complete_samples(clients, "confidence")
    statistic = jax.tree_util.Partial(_components, solution.result.shared)
    found = bootstrap(solution, clients, statistic, key=key, impute=impute, **options)
    if impute is not None:
        clients = impute.result.local.transform(clients)
    return _confidence(found, level, _tail_index(clients, np.asarray(shared)))


def _components(
    reference: Float[Array, "d r1"], result: Personalized, clients: Clients
) -> Components:
    """Return the statistics of a result, compared with a reference's shared components."""
    moments, unit = clients.data, 1
    if not isinstance(moments, Moment):
        values = moments.values.astype(moments.count.dtype)
        unit = unit_of(values)
        moments = jax.vmap(Moment.from_samples)(values / unit, moments.count)
    shared = jax.vmap(lambda x: result.shared.T @ x.mv(result.shared))(moments)
    variances, turn = jnp.linalg.eigh(jnp.einsum("m,mrs->rs", clients.weights, shared))
    return Components(
        axes=result.shared @ turn[:, ::-1],
        variances=variances[::-1] * unit * unit,
        angles=grassmann.principal_angles(reference, result.shared),
        shared_energy=ratio(jnp.trace(shared, axis1=1, axis2=2), moments.trace),
        local_energy=ratio(jax.vmap(Moment.quadratic)(moments, result.local), moments.trace),
        weights=clients.weights,
    )


def _confidence(found: Bootstrap, level: float, tail: float) -> Confidence:
    angle = float(np.quantile(found.replicates.angles.max(axis=1), level))
    groups = _groups(found, level)
    axes, turned = _turned(found, groups)
    shares = found.map(_shares).interval(level, "logit")
    distance = Interval(*(part["distance"] for part in shares))
    return Confidence(
        level=level,
        of=found.of,
        angle=angle,
        groups=groups,
        group_angles=np.asarray(
            [
                np.quantile(_largest_angles(axes[:, list(g)], turned[:, :, list(g)]), level)
                for g in groups
            ]
        ),
        axes=axes,
        axes_std=turned.std(axis=0, ddof=1),
        variances=found.map(lambda x: x.variances).interval(level),
        shared_energy=Interval(*(part["shared"] for part in shares)),
        local_energy=Interval(*(part["local"] for part in shares)),
        distance=distance,
        replicates=turned,
        remarks=_remarks(found, angle, tail),
    )


@jax.jit
def _shares(found: Components) -> dict[str, Float[Array, "..."]]:
    return {
        "shared": found.weights @ found.shared_energy,
        "local": found.weights @ found.local_energy,
        "distance": 1 - found.shared_energy,
    }


def _groups(found: Bootstrap, level: float) -> tuple[tuple[int, ...], ...]:
    """Return positions of axes in groups of neighbours whose variances cannot be told apart."""
    # On the logarithmic scale the ratio of neighbouring variances is a difference.
    drops = found.map(_drops).interval(level).lower
    groups = [[0]]
    for i, drop in enumerate(drops, start=1):
        if drop > 0:
            groups.append([i])
        else:
            groups[-1].append(i)
    return tuple(map(tuple, groups))


@jax.jit
def _drops(found: Components) -> Float[Array, " pairs"]:
    return -jnp.diff(jnp.log(found.variances))


def _turned(
    found: Bootstrap, groups: tuple[tuple[int, ...], ...]
) -> tuple[Float[np.ndarray, "d r1"], Float[np.ndarray, "resamples d r1"]]:
    """Return the solution's axes, and those of resamples, turned towards them in every group."""
    axes = found.estimate.axes
    largest = np.take_along_axis(axes, np.argmax(np.abs(axes), axis=0)[None], axis=0)
    axes = axes * np.sign(largest)
    turned = [
        _towards(axes[:, list(group)], found.replicates.axes[:, :, list(group)]) for group in groups
    ]
    return axes, np.concatenate(turned, axis=2)


@jax.jit
@partial(jax.vmap, in_axes=(None, 0))
def _towards(axes: Float[Array, "d g"], others: Float[Array, "d g"]) -> Float[Array, "d g"]:
    return others @ polar(others.T @ axes)


@jax.jit
@partial(jax.vmap, in_axes=(None, 0))
def _largest_angles(axes: Float[Array, "d g"], others: Float[Array, "d g"]) -> Float[Array, ""]:
    return jnp.max(grassmann.principal_angles(axes, others))


def _tail_index(clients: Clients, axes: Float[np.ndarray, "d r1"]) -> float:
    """How fast large scores become rare, plus a standard error: P(score > x) falls as 1 / x^index.

    Scores are pooled over clients and axes, each in units of its median. Variances of squares, on
    which intervals of variances rest, exist from an index of 4 on.

    Source: Hill (1975), A simple general approach to inference about the tail of a distribution,
    Annals of Statistics.
    """
    pooled = []
    for part in clients.parts:
        scores = np.abs(np.asarray(part.values, np.float64) @ axes)
        for own, count in zip(scores, np.asarray(part.count, int), strict=True):
            unit = np.median(own[:count], axis=0)
            pooled.append((own[:count] / np.where(unit > 0, unit, np.inf)).ravel())
    sizes = np.sort(np.concatenate(pooled))[::-1]
    number = max(LEAST_TAIL, int(TAIL * len(sizes)))
    if number >= len(sizes) or sizes[number] == 0:
        return np.inf
    excess = np.mean(np.log(sizes[:number] / sizes[number]))
    return float((1 + 1 / number**0.5) / excess) if excess > 0 else np.inf


def _remarks(found: Bootstrap, angle: float, tail: float) -> tuple[str, ...]:
    remarks = ()
    few = FEW[found.of]
    if found.drawn < few:
        remarks += (
            f"With fewer than {few} {found.of}, intervals contain the truth less often than they "
            f"should; there are {found.drawn}.",
        )
    if tail < HEAVY:
        remarks += (
            "Some samples are so much larger than others that intervals of variances and shares "
            f"contain the truth less often than they should: scores have a tail index of {tail:.2g}"
            f", wanted {HEAVY} or more. Transform the features.",
        )
    if found.unfinished > UNFINISHED:
        remarks += (
            "The resamples' runs had not converged, so intervals may be too short: pass more "
            f"rounds. They would gain {found.unfinished:.0%} of what the runs gained.",
        )
    if angle > UNDETERMINED:
        remarks += (
            f"The data do not determine the shared subspace: it may be {np.degrees(angle):.0f} "
            "degrees away.",
        )
    return remarks
