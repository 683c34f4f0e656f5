"""Whether a client's local component is shared by other clients.

Source: the test compares one direction with a subspace, whose squared cosine has a beta
distribution for a direction drawn at random (Muirhead 1982, Aspects of multivariate statistical
theory, theorem 1.5.7); Holm (1979), A simple sequentially rejective multiple test procedure;
Benjamini & Hochberg (1995), Controlling the false discovery rate; Benjamini & Heller (2008),
Screening for partial conjunction hypotheses, equation 6 with Simes' test.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxfed._checks import check_count, check_name, check_probability, refuse
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples, check_complete_samples
from jaxfed.core.run.result import clients_of_run
from jaxfed.inference.weights import check_observed
from jaxfed.linalg.blocks import map_in_blocks
from jaxfed.linalg.division import ratio
from jaxfed.linalg.sums import unit_of
from jaxfed.pca.fitted import Fitted, side_by_side

# Features at once in products of what is left; memory grows with it.
BLOCK = 16


class Membership(NamedTuple):
    """Which clients share each client's local components.

    Entries of a client with itself, and of components that a client does not have, are NaN.

    Attributes:
        axes: each client's local components as principal axes, by decreasing variance,
            `(m, d, r2)`.
        overlap: squared cosine of the angle between a client's axis and the span of another
            client's local components, `(m, r2, m)`: 1 if it lies in the span, 0 if orthogonal.
        p_values: the chance that a random direction overlaps as much, `(m, r2, m)`.
        adjusted: p-values adjusted for the number of tests, `(m, r2, m)`.
        number_sharing: number of clients that share each axis, with the client itself, `(m, r2)`;
            0 for components that a client does not have.
        dimension: number of directions in which clients vary beside their components.
        needed_overlap: the overlap that a single pair needs to count as shared.
        level: the level of confidence.
        adjustment: "holm" or "benjamini_hochberg".
    """

    axes: Float[np.ndarray, "m d r2"]
    overlap: Float[np.ndarray, "m r2 m"]
    p_values: Float[np.ndarray, "m r2 m"]
    adjusted: Float[np.ndarray, "m r2 m"]
    number_sharing: np.ndarray
    dimension: float
    needed_overlap: float
    level: float
    adjustment: str

    def at_least(self, others: int) -> Float[np.ndarray, "m r2"]:
        """Return p-values of "fewer than `others` other clients share the component".

        They take account of the choice among clients, but not of the number of components.

        Args:
            others: number of other clients, from 1 to m - 1.

        Raises:
            ValueError: if there are not so many other clients.
        """
        clients = len(self.p_values)
        check_count("others", others, most=clients - 1)
        # NaN, of the client itself, comes last.
        largest = np.sort(self.p_values, axis=-1)[..., others - 1 : -1]
        # If fewer than `others` clients share a component, at least this many null hypotheses are
        # true, and the largest p-values are no smaller than theirs. Simes' test combines them.
        ranks = np.arange(1, clients - others + 1)
        return np.min(largest * (clients - others) / ranks, axis=-1)

    def __str__(self) -> str:
        rate = {"holm": "chance of any false claim", "benjamini_hochberg": "share of false claims"}
        lines = [f"Local components that others share; {rate[self.adjustment]}: {self._alpha:.2g}"]
        for i, k in np.argwhere(self.number_sharing > 1):
            others = np.flatnonzero(self.adjusted[i, k] <= self._alpha)
            names = ", ".join(f"{j} ({self.overlap[i, k, j]:.2f})" for j in others)
            lines.append(f"client {i}, component {k + 1}: clients (overlap) {names}")
        alone = np.sum(self.number_sharing == 1)
        lines.append(
            f"{alone} of {np.sum(self.number_sharing > 0)} components: no other client that we can "
            f"tell; an overlap of {self.needed_overlap:.2f} is always enough"
        )
        common = self.number_sharing > len(self.axes) / 2
        if common.any():
            names = "; ".join(f"{k + 1} of client {i}" for i, k in np.argwhere(common))
            more = np.max(common.sum(axis=1))
            lines.append(
                f"Most clients share components {names}: run more rounds, or fit with shared_rank "
                f"higher by {more}."
            )
        return "\n".join(lines)

    @property
    def _alpha(self) -> float:
        return 1 - self.level


class _Measured(NamedTuple):
    """What the compiled program measures."""

    axes: Float[Array, "m d r2"]
    overlap: Float[Array, "m r2 m"]
    outside: Float[Array, "m r2 m"]  # 1 - overlap, without cancellation
    chance: Float[Array, ""]  # expected overlap of two directions drawn from what is left


def membership(
    fitted: Fitted,
    clients: Clients,
    *,
    level: float = 0.95,
    adjustment: Literal["holm", "benjamini_hochberg"] = "holm",
) -> Membership:
    """Test which other clients share each client's local components.

    An axis of one client is shared by another if it lies closer to the span of the other's local
    components than a direction drawn at random. The two clients' samples are independent, so the
    axis is not fitted to the samples that judge it. Under the null hypothesis, two clients' local
    components have nothing to do with each other, and p-values are exact for any number of samples
    and any distribution of the scores, if the directions of components and noise are random
    in the space outside the shared components. The alternative "the other client varies more
    along the axis than along an average direction" is not tested: with enough samples it holds for
    every third axis of unrelated clients, since none is orthogonal to all that the other has.

    The directions are counted in which clients vary beside their components, as the inverse of the
    mean overlap of their second moments. So features that are constant, or copies of others, do
    not count. Where some directions vary much more than others in all clients and the shared
    components do not contain them, local components turn towards them and are reported as shared.

    Power is limited by features, not only by samples: see `needed_overlap`. Axes of one client
    with equal variances are not determined; if another client shares only some of them, this
    test may miss it.

    Args:
        fitted: a solution, its result, an estimator, or what `jaxfed.load` returned, with shared
            components and local ones orthogonal to them.
        clients: the clients of the solution, with samples in memory.
        level: level of confidence, between 0 and 1.
        adjustment: `"holm"`, with probability `level` no claim in the whole result is false;
            `"benjamini_hochberg"`, at most a share `1 - level` of claims is false on average.

    Returns:
        P-values, and which clients share which components.

    Raises:
        ValueError: if an argument does not fit, there are fewer than two clients, all features are
            taken by components, or samples were imputed.

    Example:
        >>> import jax, jaxfed as jf
        >>> key = jax.random.key(0)
        >>> data = jf.data.perpca_synthetic(
        ...     key=key, clients=6, features=20, shared_rank=1, local_rank=1, samples=100,
        ...     noise_variance=0.1, local="random", groups=2,
        ... )
        >>> clients = jf.Clients.from_samples(data.samples)
        >>> solution = jf.fit(jf.pca.PerPCA(1, 1), clients, rounds=30, key=key)
        >>> jf.inference.membership(solution, clients).number_sharing[:, 0].tolist()
        [3, 3, 3, 3, 3, 3]
    """
    check_probability("level", level)
    check_name("adjustment", adjustment, ("holm", "benjamini_hochberg"))
    clients = clients_of_run(fitted, clients)
    shared, local = side_by_side(fitted)
    if shared is None or local is None:
        raise refuse("fitted", "shared components with local ones orthogonal to them", fitted)
    check_complete_samples(clients, "membership")
    check_observed(clients, "membership")
    m, d, r2 = local.shape
    if m < 2 or len(clients) != m or clients.features != d:
        wanted = f"{m} clients of {d} features" if m > 1 else "at least 2 clients"
        raise ValueError(f"clients: wanted {wanted}, got {len(clients)} of {clients.features}")
    if shared.shape[1] + r2 >= d:
        raise ValueError(
            f"fitted: wanted fewer components than the {d} features, got {shared.shape[1]} + {r2}"
        )
    found = jax.device_get(_measured(shared, local, clients.unbucketed().data))
    return _judged(found, d - shared.shape[1], level, adjustment)


@jax.jit
def _measured(
    shared: Float[Array, "d r1"], local: Float[Array, "m d r2"], data: Samples
) -> _Measured:
    """Measure overlaps of local components, and of what they leave of the samples."""
    values = data.values.astype(data.count.dtype)
    values = jax.vmap(lambda own: own / unit_of(own))(values)  # only ratios count
    axes, left = jax.vmap(_parts, (None, 0, 0))(shared, local, values)

    def of_pair(one, other):
        inside = other.T @ one
        return jnp.sum(inside**2, axis=0), jnp.sum((one - other @ inside) ** 2, axis=0)

    each = jax.vmap(jax.vmap(of_pair, (None, 0), -1), (0, None))
    return _Measured(axes, *each(axes, local), _chance_overlap(left, values))


def _parts(
    shared: Float[Array, "d r1"], local: Float[Array, "d r2"], values: Float[Array, "n d"]
) -> tuple[Float[Array, "d r2"], Float[Array, "n d"]]:
    """Return ONE client's local components as principal axes, and what all components leave."""
    scores = values @ local
    axes = local @ jnp.linalg.eigh(scores.T @ scores)[1][:, ::-1]
    basis = jnp.concatenate([shared, local], axis=1)
    return axes, values - (values @ basis) @ basis.T


def _chance_overlap(left: Float[Array, "m n d"], values: Float[Array, "m n d"]) -> Float[Array, ""]:
    """Return the mean over pairs of clients of `tr(C_i C_j)`, with second moments of trace 1.

    Different clients' samples are independent, so that no sampling error is counted.
    """
    energy, total = (jnp.sum(x**2, axis=(1, 2)) for x in (left, values))
    rounding = (100 * jnp.finfo(left.dtype).eps) ** 2
    energy = jnp.where(energy > rounding * total, energy, 0)
    scaled = ratio(left, jnp.sqrt(energy)[:, None, None])

    def of_feature(column: Float[Array, "m n"]) -> Float[Array, ""]:
        products = jnp.einsum("mnd,mn->md", scaled, column)
        return jnp.sum(products.sum(axis=0) ** 2) - jnp.sum(products**2)

    # The sum over pairs of tr(C_i C_j) is ‖Σ C_i‖² - Σ ‖C_i‖², here column by column, so that the
    # clients' d x d matrices are never held together.
    of_pairs = map_in_blocks(of_feature, jnp.moveaxis(scaled, 2, 0), BLOCK)
    several = jnp.sum(energy > 0).astype(left.dtype)
    return ratio(of_pairs.sum(), several * (several - 1))


def _judged(found: _Measured, free: int, level: float, adjustment: str) -> Membership:
    """Turn what was measured into p-values, in double precision."""
    from scipy import stats

    axes, overlap, outside = (np.asarray(x) for x in (found.axes, found.overlap, found.outside))
    real = np.sum(axes.astype(float) ** 2, axis=1) > 0.5  # (m, r2), not columns of zeros
    ranks = real.sum(axis=1)
    tested = real[:, :, None] & ~np.eye(len(real), dtype=bool)[:, None, :]
    dimension = float(min(free, 1 / found.chance)) if found.chance > 0 else float(free)
    p_values = np.where(tested, _tails(outside.astype(float), ranks, dimension), np.nan)
    adjusted = p_values.copy()
    adjust = _holm if adjustment == "holm" else stats.false_discovery_control
    adjusted[tested] = adjust(p_values[tested])
    shared = adjusted <= 1 - level  # False where NaN
    most = ranks.max()
    needed = 1.0
    if 0 < most < dimension:
        # Bonferroni's level, the strictest step of either adjustment.
        tail = (1 - level) / tested.sum()
        needed = float(stats.beta.isf(tail, most / 2, (dimension - most) / 2))
    return Membership(
        axes=axes,
        overlap=np.where(tested, overlap, np.nan),
        p_values=p_values,
        adjusted=adjusted,
        number_sharing=real + shared.sum(axis=-1),
        dimension=dimension,
        needed_overlap=needed,
        level=level,
        adjustment=adjustment,
    )


def _tails(
    outside: Float[np.ndarray, "m r2 m"], ranks: np.ndarray, dimension: float
) -> Float[np.ndarray, "m r2 m"]:
    """Return the chance that a random direction overlaps more with spans of these dimensions."""
    from scipy.special import betainc

    possible = (ranks > 0) & (ranks < dimension)
    inside, beyond = np.where(possible, ranks, 1), np.where(possible, dimension - ranks, 1)
    return np.where(possible, betainc(beyond / 2, inside / 2, np.clip(outside, 0, 1)), 1)


def _holm(p_values: Float[np.ndarray, " tests"]) -> Float[np.ndarray, " tests"]:
    order = np.argsort(p_values)
    steps = np.arange(len(p_values), 0, -1) * p_values[order]
    adjusted = np.empty_like(steps)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return adjusted
