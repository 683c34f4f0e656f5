"""Scores of shared and local components in released moments, beside chance and known noise."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxfed.linalg import matmul
from jaxfed.linalg.blocks import map_in_blocks
from jaxfed.pca._rank_evidence import (
    BLOCK,
    MOST_USED,
    Evidence,
    Levels,
    against_chance,
    last_above,
    subsets_of,
    together,
)

# Directions that are drawn for the sampling error of a moment; the error of more is scaled.
ROWS = 1000
# Draws and steps that find the variances behind the mean square of each entry of a direction.
NORMALS, STEPS = 1000, 20
OUT = 1e3  # moves directions that are left out below all others


class Released(NamedTuple):
    """Moments of directions, which have trace one but for their noise."""

    moments: Float[Array, "clients features features"]
    terms: Float[Array, " clients"]  # directions whose mean a moment is
    deviations: Float[Array, " clients"]  # of the noise of a diagonal entry


def evidence_of(
    data: Released, key, threshold, most: tuple[int, int], draws: int, subsets: int
) -> Evidence:
    """Compute all scores, of all clients and of the subsets."""
    m, d, _ = data.moments.shape
    most_shared, most_local = most
    of_normals, of_agreement, of_local, of_subsets = jax.random.split(key, 4)
    traces = jnp.trace(data.moments, axis1=1, axis2=2)
    moments = data.moments + ((1 - traces) / d)[:, None, None] * jnp.eye(d)
    everyone = jnp.ones(m, moments.dtype)
    chosen = subsets_of(m, subsets, of_subsets).astype(moments.dtype)

    signals = jax.vmap(_signal)(moments, data.terms, data.deviations)
    agreement = against_chance(signals, chosen, of_agreement, most_shared, draws)
    shared = last_above(agreement.scores, threshold)
    basis = agreement.basis * (jnp.arange(most_shared) < shared)
    # From weights, which are limited, to variances.
    for _ in range(2):
        basis = jnp.linalg.qr(matmul(moments.mean(axis=0), basis))[0]
        basis = basis * (jnp.arange(most_shared) < shared)

    normals = jax.random.normal(of_normals, (NORMALS, d), moments.dtype) ** 2
    client = partial(_next_score, basis=basis, shared=shared, normals=normals, draws=draws)
    keys = jax.random.split(of_local, m)

    def level(larger):
        return jax.vmap(partial(client, larger=larger))(*data._replace(moments=moments), keys)

    scores, variance = lax.map(level, jnp.arange(most_local))
    noise = Levels(scores.T, variance.T)
    local = together(noise.scores, everyone)
    rank = jnp.minimum(last_above(local, threshold), most_local - 1)
    return Evidence(
        agreement, noise, local, together(noise.scores, chosen), noise.variance[:, rank]
    )


def _signal(moment, terms, deviation) -> Float[Array, "features features"]:
    """Return ONE client's directions, scaled by the roots of their weights."""
    values, vectors = jnp.linalg.eigh(moment)
    centre = jnp.maximum(jnp.median(values), 0)
    # The edge of the semicircle: noise of the release, and of finitely many directions.
    largest = 2 * jnp.sqrt((deviation**2 / 2 + centre**2 / terms) * len(values))
    return vectors * jnp.sqrt(jnp.clip((values - centre) / largest, 0, 1))


def _next_score(moment, terms, deviation, key, *, basis, shared, normals, larger, draws: int):
    """Return the score of ONE client's next eigenvalue, and the variance of its noise.

    The null are directions of elliptical samples with the same larger variances and equal ones
    besides, with the noise of the release.
    """
    d = len(moment)
    place = jnp.arange(d)

    def exceeding(values):
        """How far the next eigenvalue is above the median of it and the smaller ones."""
        last = larger + d - shared - 1
        return values[larger] - (values[last // 2] + values[(last + 1) // 2]) / 2

    inside = matmul(basis, basis.T)
    outside = jnp.eye(d) - inside
    values = jnp.linalg.eigvalsh(matmul(matmul(outside, moment), outside) - OUT * inside)[::-1]
    along = jnp.sum(basis * matmul(moment, basis), axis=0)
    along = jnp.zeros(d, moment.dtype).at[: len(along)].set(along)
    spikes = jnp.where(place < shared, along, jnp.roll(values, shared))
    spikes = jnp.where(place < shared + larger, spikes, 0)
    left = jnp.maximum(d - shared - larger, 1)
    least = jnp.maximum((1 - spikes.sum()) / left, 1e-4 / d)
    squares = jnp.where(place < shared + larger, jnp.maximum(spikes, least), least)
    squares = squares / squares.sum()

    def matched(_, variances):
        each = normals * variances
        mean = (each / each.sum(axis=1, keepdims=True)).mean(axis=0)
        variances = variances * squares / jnp.maximum(mean, jnp.finfo(mean.dtype).tiny)
        return variances / variances.sum()

    variances = lax.fori_loop(0, STEPS, matched, squares)
    real = (jnp.arange(ROWS) < terms)[:, None]
    number = jnp.minimum(terms, ROWS)
    others = place >= shared

    def drawn(key):
        of_rows, of_noise = jax.random.split(key)
        rows = jax.random.normal(of_rows, (ROWS, d), moment.dtype) * jnp.sqrt(variances)
        rows = jnp.where(real, rows / jnp.linalg.norm(rows, axis=1, keepdims=True), 0)
        error = matmul(rows.T, rows) / number - jnp.diag(squares)
        noise = jax.random.normal(of_noise, (d, d), moment.dtype)
        found = jnp.diag(squares) + jnp.sqrt(number / terms) * error
        found = found + deviation * (noise + noise.T) / 2
        found = jnp.where(others & others[:, None], found, -OUT * jnp.diag(~others))
        return exceeding(jnp.linalg.eigvalsh(found)[::-1])

    null = map_in_blocks(drawn, jax.random.split(key, draws), BLOCK)
    score = (exceeding(values) - null.mean()) / null.std(ddof=1)
    measurable = (larger + 1 <= MOST_USED * (d - shared)) & jnp.isfinite(score)
    return jnp.where(measurable, score, 0), least
