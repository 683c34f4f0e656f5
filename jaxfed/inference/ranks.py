r"""Choose the numbers of shared and local components by tests against the noise and between clients.

Each client's samples are ``Y_i = S_i + E_i``, with a signal of few directions and noise. Two
questions are answered one after the other, each for all clients together:

* how many directions do all clients' signals share? Directions that agree between clients, whose
  samples are independent, against the same signals rotated at random;
* how many local directions exceed the noise? Singular values of what the shared directions leave,
  against those of the same samples whose noise has random signs.
"""

from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from jaxfed._checks import check_number, check_whole, checked_key
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.samples import Samples, other_data
from jaxfed.linalg import matmul, svd

# A client's evidence counts up to this many standard deviations, so that no client decides alone.
MOST = 4.0
# Steps in which the null's spikes and noise are adjusted to the observed singular values.
STEPS, STEP_DRAWS = 3, 8
# Draws that are in memory at once.
BLOCK = 4
# Each draw of the support leaves out this share of the clients.
LEFT_OUT = 0.25


class Ranks(NamedTuple):
    """Numbers of components, how sure they are, and the numbers that decided.

    The scores of a rank are in standard deviations of the null in which there is no such
    component; those above `threshold` are significant.

    Attributes:
        shared: number of shared components found.
        local: number of local components found in many clients.
        support: share of random subsets of clients in which both numbers are the same.
        suggested: `(shared, local)`; None if it is too weak to tell, that is, one of them is 0, or
            the support is too small.
        shared_interval: smallest and largest number of shared components in the subsets, without
            the 5 % most extreme ones.
        local_interval: the same for local components.
        agreement: mean share of clients' signals in the shared directions, in descending order:
            1 if every client has the direction far above its noise.
        chance_agreement: its mean in signals that are rotated at random.
        shared_scores: how far the agreement exceeds chance.
        local_scores: how far clients' singular values exceed noise.
        client_scores: the same for each client alone, not limited.
        threshold: score of a significant component.
        noise_variance: each client's variance of the noise in a feature.
    """

    shared: int
    local: int
    support: float
    suggested: tuple[int, int] | None
    shared_interval: tuple[int, int]
    local_interval: tuple[int, int]
    agreement: Float[np.ndarray, " shared_ranks"]
    chance_agreement: Float[np.ndarray, " shared_ranks"]
    shared_scores: Float[np.ndarray, " shared_ranks"]
    local_scores: Float[np.ndarray, " local_ranks"]
    client_scores: Float[np.ndarray, "clients local_ranks"]
    threshold: float
    noise_variance: Float[np.ndarray, " clients"]


class _Levels(NamedTuple):
    """By number of larger directions removed: the next one's scores, and the rest's variance."""

    scores: Float[Array, "*clients levels"]
    variance: Float[Array, "*clients levels"]


class _Agreement(NamedTuple):
    """Directions in order of their agreement, against signals rotated at random."""

    basis: Float[Array, "features ranks"]
    values: Float[Array, " ranks"]
    chance: Float[Array, " ranks"]
    scores: Float[Array, " ranks"]
    subset_scores: Float[Array, "subsets ranks"]
    held: Bool[Array, " ranks"]


class _Found(NamedTuple):
    """What the compiled program returns."""

    shared: Int[Array, ""]
    local: Int[Array, ""]
    subset_shared: Int[Array, " subsets"]
    subset_local: Int[Array, " subsets"]
    total: _Levels
    agreement: _Agreement
    noise: _Levels
    local_scores: Float[Array, " ranks"]
    noise_variance: Float[Array, " clients"]


def suggest_ranks(
    clients: Clients,
    *,
    key: Key[Array, ""],
    most_shared: int = 8,
    most_local: int = 8,
    draws: int = 32,
    subsets: int = 100,
    confidence: float = 0.99,
    min_support: float = 0.5,
) -> Ranks:
    clients.layout.check_in_memory("suggest_ranks")
    data = clients.unbucketed().data
    present = np.flatnonzero(np.asarray(data.count) > 0)
    data = jax.tree.map(lambda x: x[present], data)
    features = clients.features
    least = min(features, data.values.shape[1])
    most_shared, most_local = min(most_shared, least - 1), min(most_local, least - 1)
    threshold = NormalDist().inv_cdf(1 - (1 - confidence) / (most_shared + most_local))
    found = jax.device_get(
        _found(
            data,
            checked_key("key", key),
            threshold,
            most=(most_shared, most_local),
            draws=draws,
            subsets=subsets,
        )
    )
    shared, local = int(found.shared), int(found.local)
    same = (found.subset_shared == shared) & (found.subset_local == local)
    support = float(same.mean())
    sure = support >= min_support and shared > 0 and local > 0

    def interval(ranks):
        low, high = np.quantile(ranks, [0.025, 0.975], method="inverted_cdf")
        return int(low), int(high)

    return Ranks(
        shared,
        local,
        support,
        (shared, local) if sure else None,
        interval(found.subset_shared),
        interval(found.subset_local),
        found.agreement.values,
        found.agreement.chance,
        found.agreement.scores,
        found.local_scores,
        found.noise.scores,
        threshold,
        found.noise_variance,
    )


@partial(jax.jit, static_argnames=("most", "draws", "subsets"))
def _found(data: Samples, key, threshold, *, most, draws: int, subsets: int) -> _Found:
    of_total, of_agreement, of_local, of_subsets = jax.random.split(key, 4)
    rows = data.values.astype(data.count.dtype)
    m, n, d = rows.shape
    size = min(m, max(2, round((1 - LEFT_OUT) * m)))
    order = jax.vmap(lambda k: jax.random.permutation(k, m))(jax.random.split(of_subsets, subsets))
    chosen = (jnp.argsort(order, axis=1) < size).astype(rows.dtype)

    empty = jnp.zeros((d, 0), rows.dtype)
    total = _levels(rows, data.count, empty, of_total, sum(most), draws)
    everyone = jnp.ones((1, m), rows.dtype)
    rank = _last_above(_together(total.scores, everyone)[0], threshold)
    variance = total.variance[:, jnp.minimum(rank, sum(most) - 1)]

    factors = jax.vmap(_signal)(rows, data.count, variance)
    agreement = _agreement(factors, chosen, of_agreement, most[0], draws)
    shared = _last_above(jnp.where(agreement.held, agreement.scores, -jnp.inf), threshold)
    subset_shared = jax.vmap(
        lambda z: _last_above(jnp.where(agreement.held, z, -jnp.inf), threshold)
    )(agreement.subset_scores)

    basis = agreement.basis * (jnp.arange(most[0]) < shared)
    noise = _levels(rows, data.count, basis, of_local, most[1], draws)
    scores = _together(noise.scores, everyone)[0]
    local = _last_above(scores, threshold)
    subset_local = jax.vmap(lambda z: _last_above(z, threshold))(_together(noise.scores, chosen))
    return _Found(
        shared, local, subset_shared, subset_local, total, agreement, noise, scores, variance
    )


def _last_above(scores: Float[Array, " ranks"], threshold) -> Int[Array, ""]:
    """Return the largest rank whose score is significant, or 0."""
    return jnp.max(jnp.where(scores > threshold, jnp.arange(1, len(scores) + 1), 0))


def _together(
    scores: Float[Array, "clients ranks"], chosen: Float[Array, "subsets clients"]
) -> Float[Array, "subsets ranks"]:
    """Add the scores of the chosen clients, as standard normal numbers if there is only noise."""
    limited = jnp.clip(scores, -MOST, MOST)
    return matmul(chosen, limited) / jnp.sqrt(chosen.sum(axis=1, keepdims=True))


def _levels(rows, counts, basis, key, levels: int, draws: int) -> _Levels:
    """Compare clients' singular values outside the basis with those of noise, one after another."""
    outside = rows - matmul(matmul(rows, basis), basis.T)
    triples = jax.vmap(svd)(outside)
    keys = jax.random.split(key, len(rows))

    def level(removed):
        return jax.vmap(partial(_next, basis=basis, removed=removed, draws=draws))(
            outside, counts, triples, keys
        )

    scores, variance = lax.map(level, jnp.arange(levels))
    return _Levels(scores.T, variance.T)


def _next(rows, count, triples, key, *, basis, removed, draws: int):
    """Return the score of ONE client's next singular value, and the variance of the noise."""
    left, singular, right = triples
    n, d = rows.shape
    squares = singular**2
    before = jnp.arange(len(singular)) < removed
    energy = jnp.sum(squares)
    tail = jnp.sum(jnp.where(before, 0, squares))
    rest = rows - matmul(left * jnp.where(before, singular, 0), right)
    # What is left over has less energy where the removed directions are large.
    of_rows = 1 - jnp.sum(left**2 * before, axis=1)
    of_columns = 1 - jnp.sum(right**2 * before[:, None], axis=0) - jnp.sum(basis**2, axis=1)
    rest = rest / jnp.sqrt(jnp.clip(of_rows, 0.05)[:, None] * jnp.clip(of_columns, 0.05))
    noise = rest / jnp.sqrt(jnp.maximum(jnp.sum(rest**2), jnp.finfo(rows.dtype).tiny))

    def drawn(key, spikes, size):
        signed = noise * jax.random.rademacher(key, noise.shape, noise.dtype)
        signed = signed - matmul(matmul(signed, basis), basis.T)
        sample = matmul(left * jnp.sqrt(spikes), right) + jnp.sqrt(size) * signed
        gram = matmul(sample, sample.T) if n < d else matmul(sample.T, sample)
        return jnp.linalg.eigvalsh(gram)[::-1]

    steps = jax.random.split(jax.random.fold_in(key, 0), STEP_DRAWS)

    def adjusted(_, guess):
        spikes, size = guess
        seen = lax.map(lambda k: drawn(k, spikes, size), steps, batch_size=BLOCK).mean(axis=0)
        spikes = jnp.where(before, jnp.maximum(spikes + squares - seen, 0), 0)
        wanted = tail / jnp.maximum(jnp.sum(jnp.where(before, 0, seen)), tail * 1e-3)
        return spikes, size * jnp.clip(wanted, 0.5, 2)

    floor = squares[jnp.minimum(removed, len(squares) - 1)]
    dims = count * (d - jnp.sum(basis**2))
    left_dims = jnp.maximum((count - removed) * (d - jnp.sum(basis**2) - removed), 1)
    guess = jnp.where(before, squares - floor, 0), tail * dims / left_dims
    spikes, size = lax.fori_loop(0, STEPS, adjusted, guess)

    def statistic(values):
        return jnp.log(values[removed]) - jnp.log(jnp.sum(jnp.where(before, 0, values)))

    null = lax.map(
        lambda k: statistic(drawn(k, spikes, size)),
        jax.random.split(jax.random.fold_in(key, 1), draws),
        batch_size=BLOCK,
    )
    score = (statistic(squares) - null.mean()) / null.std(ddof=1)
    room = jnp.minimum(count, d - jnp.sum(basis**2)) - removed
    known = (room > 1.5) & jnp.isfinite(score)
    return jnp.where(known, score, 0), size / dims


def _signal(rows, count, variance) -> Float[Array, "features width"]:
    """Return ONE client's directions, scaled by the roots of their weights.

    The weight is the variance relative to the edge of the noise's eigenvalues, at most 1: a strong
    direction counts no more than one that just exceeds the noise.
    """
    _, singular, right = svd(rows)
    edge = variance * (jnp.sqrt(count) + jnp.sqrt(rows.shape[1])) ** 2
    return right.T * jnp.sqrt(jnp.minimum(singular**2 / edge, 1))


def _agreement(factors, chosen, key, ranks: int, draws: int) -> _Agreement:
    m, d, width = factors.shape
    vectors, singular, _ = svd(_side_by_side(factors, jnp.ones(m)))
    basis, values = vectors[:, :ranks], singular[:ranks] ** 2
    inside = jnp.sum(jnp.einsum("mdw,dr->mwr", factors, basis) ** 2, axis=1)
    beyond = inside - jnp.sum(factors**2, axis=(1, 2))[:, None] / d
    held = jnp.median(beyond, axis=0) > jnp.mean(beyond, axis=0) / 2
    held = jnp.cumprod(held) > 0
    of_subsets = lax.map(
        lambda c: jnp.sort(_squares(_side_by_side(factors, c)))[::-1][:ranks],
        chosen,
        batch_size=BLOCK,
    )

    def level(removed):
        found = basis * (jnp.arange(ranks) < removed)
        rest = factors - jnp.einsum("dr,mrw->mdw", found, jnp.einsum("dr,mdw->mrw", found, factors))
        weights = jax.vmap(_squares)(rest)[:, ::-1]

        def drawn(keys):
            frame, subset = keys
            rows = jnp.arange(d) < d - removed
            normal = jax.random.normal(frame, (m, d, width), factors.dtype) * rows[:, None]
            rotated = jnp.linalg.qr(normal)[0] * jnp.sqrt(jnp.maximum(weights, 0))[:, None]
            return jnp.stack(
                [
                    jnp.max(_squares(_side_by_side(rotated, c)))
                    for c in (jnp.ones(m), chosen[subset])
                ]
            )

        keys = jax.random.split(jax.random.fold_in(key, removed), draws)
        null = lax.map(drawn, (keys, jnp.arange(draws) % len(chosen)), batch_size=BLOCK)
        return null.mean(axis=0), null.std(axis=0, ddof=1)

    mean, spread = lax.map(level, jnp.arange(ranks))
    return _Agreement(
        basis,
        values,
        mean[:, 0],
        (values - mean[:, 0]) / spread[:, 0],
        (of_subsets - mean[:, 1]) / spread[:, 1],
        held,
    )


def _side_by_side(factors, chosen) -> Float[Array, "features columns"]:
    """Put the chosen clients' directions side by side, such that the squares are their mean."""
    scaled = factors * jnp.sqrt(chosen / chosen.sum())[:, None, None]
    return jnp.moveaxis(scaled, 0, 1).reshape(factors.shape[1], -1)


def _squares(matrix) -> Float[Array, " k"]:
    """Return the squared singular values, ascending."""
    rows, columns = matrix.shape
    gram = matmul(matrix, matrix.T) if rows < columns else matmul(matrix.T, matrix)
    return jnp.linalg.eigvalsh(gram)
