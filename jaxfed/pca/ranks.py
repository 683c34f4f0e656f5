"""Choose the numbers of shared and local components from fits over a grid of ranks."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxfed._checks import check_callable, check_list, check_number, checked_key
from jaxfed.contract import Algorithm, Personalized, check_count, check_name
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples
from jaxfed.core.run.fit import fit
from jaxfed.linalg import Moment
from jaxfed.metrics import misalignment, reconstruction_error
from jaxfed.pca.components import check_fits, moment_behind
from jaxfed.pca.one_shot import METHODS, OneShot
from jaxfed.pca.perpca import PerPCA


class RankTable(NamedTuple):
    """One entry for each pair of ranks, and the suggested pair.

    Attributes:
        shared_rank: number of shared components.
        local_rank: number of local components.
        error: share of the energy outside all components,
            `mean_i ||Y_i - Y_i (P_U + P_Vi)||² / n_i` over `mean_i ||Y_i||² / n_i`, on held-out
            samples if there are any.
        misalignment: `θ = 1 - λ_max(mean_i P_Vi)` of the local components.
        held_out: whether errors are computed on samples that were not fitted.
        suggested: the pair `(shared_rank, local_rank)`, or None if the local components are
            aligned at all pairs that explain enough.
    """

    shared_rank: Int[np.ndarray, " pairs"]
    local_rank: Int[np.ndarray, " pairs"]
    error: Float[np.ndarray, " pairs"]
    misalignment: Float[np.ndarray, " pairs"]
    held_out: bool
    suggested: tuple[int, int] | None

    def __str__(self) -> str:
        lines = [f"{'shared':>6} {'local':>6} {'error':>9} {'misalignment':>13}"]
        for r1, r2, error, theta in zip(*self[:4], strict=True):
            mark = "  <- suggested" if (r1, r2) == self.suggested else ""
            lines.append(f"{r1:6d} {r2:6d} {error:9.4f} {theta:13.4f}{mark}")
        return "\n".join(lines)


def suggest_ranks(
    clients: Clients,
    *,
    shared_ranks: Sequence[int],
    local_ranks: Sequence[int],
    key: Key[Array, ""],
    rounds: int = 100,
    held_out: float = 0.2,
    min_gain: float = 0.01,
    min_misalignment: float = 0.1,
    algorithm: Callable[[int, int], Algorithm] = PerPCA,
    starts: Sequence[Literal["projector", "spectrum", "local_first"]] = (
        "projector",
        "local_first",
    ),
) -> RankTable:
    r"""Fit personalized PCA over a grid of ranks and suggest a pair.

    Shi & Kontar recommend small ranks with a small reconstruction error and a misalignment
    \(\theta\) that is still large. This function turns that into a rule:

    1. Each component costs a price in explained energy: the candidate is the pair with the
       smallest `error + price * (shared_rank + local_rank)`. The price is `min_gain` plus the share
       of the noise in one direction, which any component explains, held-out or not. That share is
       estimated as the error of the largest pair divided by the number of directions it leaves.
    2. The error hardly changes if a shared component is moved into all clients' local parts. So of
       all pairs whose score is within half of `min_gain` of the smallest, the one with the largest
       \(\theta\) wins.
    3. If even its \(\theta\) is below `min_misalignment`, nothing is suggested. Local components
       that agree between clients are in fact shared, so try more shared components; or all
       components are shared, and `Pooled` is the right method.

    \(\theta\) has limits. It is at most 1 - max(1/m, r2/(d - r1)), so two clients, or ranks near d,
    need a smaller threshold. It is small with too many local components, with too few shared ones,
    and after a run that ended at a bad point. With too many local components a run may *collapse*:
    local components take over shared directions, from some starts and not from others, and even at
    the right ranks. So every pair is fitted from several starts, and the fit with the smallest
    error on the fitted samples is kept, which makes a collapse rarer but cannot exclude it. A large
    \(\theta\) does not prove that clients differ either: if there are too few local components for
    what all clients share, each client may pick a different part of it.

    Each pair of ranks is compiled separately, which takes seconds; large grids take minutes.

    Args:
        clients: the clients, with samples or second moments.
        shared_ranks: numbers of shared components to try.
        local_ranks: numbers of local components to try.
        key: random key, for the choice of held-out samples and the runs.
        rounds: rounds of each fit.
        held_out: share of each client's samples to hold out and compute errors on, rounded down to
            whole samples. If it is 0, the data are second moments, or no client has that many
            samples, errors are computed on the fitted data.
        min_gain: share of the energy that a component must explain beyond noise.
        min_misalignment: least \(\theta\) of a suggested pair.
        algorithm: function that makes the algorithm from two ranks, e.g.
            `lambda r1, r2: PerPCA(r1, r2, variant="polar", step_size=1.0)`.
        starts: methods of `OneShot` to start from.

    Returns:
        The table, in the order of `shared_ranks`, then `local_ranks`.

    Raises:
        ValueError: if there are no candidates, ranks do not fit, or a share is not from 0 to 1.

    Source: Shi & Kontar (2024), Section 7.1.6.

    Example:
        >>> import jax, jaxfed as jf
        >>> data = jf.data.perpca_synthetic(
        ...     jax.random.key(0), clients=10, features=8, shared_rank=1, local_rank=1,
        ...     samples=100, shared_scale=2.0, local_scale=2.0, noise_variance=0.05,
        ... )
        >>> table = jf.pca.suggest_ranks(
        ...     jf.Clients.from_samples(data.samples), shared_ranks=[1, 2], local_ranks=[1, 2],
        ...     key=jax.random.key(1), rounds=50,
        ... )
        >>> table.suggested
        (1, 1)
    """
    for name, ranks in (("shared_ranks", shared_ranks), ("local_ranks", local_ranks)):
        check_list(name, ranks, "ranks")
        for rank in ranks:
            check_count(name, rank)
    check_list("starts", starts, "methods of OneShot")
    for method in starts:
        check_name("starts", method, METHODS)
    check_fits("shared_ranks + local_ranks", max(shared_ranks) + max(local_ranks), clients)
    check_number("held_out", held_out, "a share from 0 to below 1", lambda x: (x >= 0) & (x < 1))
    for name, share in (("min_gain", min_gain), ("min_misalignment", min_misalignment)):
        check_number(name, share, "a share from 0 to 1", lambda x: (x >= 0) & (x <= 1))
    check_count("rounds", rounds)
    check_callable("algorithm", algorithm, "a function of two ranks that makes an algorithm")
    key = checked_key("key", key)

    clients.layout.check_in_memory("suggest_ranks")
    key_split, key_fit = jax.random.split(key)
    fitted, probe = _split(clients.unbucketed(), held_out, key_split)
    moments = jax.vmap(moment_behind)(fitted.data)
    measured = moments if probe is None else jax.vmap(moment_behind)(probe.data)

    pairs = [(r1, r2) for r1 in shared_ranks for r2 in local_ranks]
    errors, thetas = [], []
    for r1, r2 in pairs:
        results = []
        for method in starts:
            start = fit(OneShot(r1, r2, method=method), fitted, rounds=1, key=key_fit)
            solution = fit(algorithm(r1, r2), fitted, rounds=rounds, key=key_fit, warm_start=start)
            results.append(solution.result)
        chosen = min(results, key=lambda result: _error(moments, result, fitted.weights))
        errors.append(_error(measured, chosen, clients.weights))
        thetas.append(float(misalignment(chosen.local)))

    sizes = np.sum(pairs, axis=1)
    largest = int(np.argmax(sizes))
    noise = errors[largest] / max(clients.features - sizes[largest], 1)
    score = np.asarray(errors) + (min_gain + noise) * sizes
    tied = score <= score.min() + min_gain / 2
    best = int(np.argmax(np.where(tied, thetas, -1)))
    return RankTable(
        *np.asarray(pairs).T,
        error=np.asarray(errors),
        misalignment=np.asarray(thetas),
        held_out=probe is not None,
        suggested=pairs[best] if thetas[best] >= min_misalignment else None,
    )


def _error(data: Moment, result: Personalized, weights: Float[Array, " m"]) -> float:
    """Return the share of the energy outside all components, over clients with samples."""
    error = reconstruction_error(data, *result, per_client=True)
    weights = weights * (data.count > 0)
    energy = weights @ data.trace
    return float(weights @ error / jnp.where(energy > 0, energy, 1))


def _split(clients: Clients, share: float, key: Key[Array, ""]) -> tuple[Clients, Clients | None]:
    """Split each client's samples at random into fitted ones and held-out ones, if any."""
    data = clients.data
    if not isinstance(data, Samples):
        return clients, None
    # Slightly more than the share, so that 0.2 of 10 samples are two in any precision.
    taken = jnp.floor(data.count * share + 1e-3)
    if not taken.any():
        return clients, None
    real = data.mask > 0
    draw = jnp.where(real, jax.random.uniform(key, real.shape), jnp.inf)
    held = jnp.argsort(jnp.argsort(draw, axis=1), axis=1) < taken[:, None]

    def only(rows: Bool[Array, "m n"]) -> Clients:
        first = jnp.argsort(~rows, axis=1, stable=True)
        values = jnp.where(rows[..., None], data.values, 0)
        values = jnp.take_along_axis(values, first[..., None], axis=1)
        chosen = Samples(values, rows.sum(axis=1).astype(data.count.dtype))
        return eqx.tree_at(lambda c: c.data, clients, chosen)

    return only(real & ~held), only(held)
