"""Scores of shared and local components, beside agreement by chance and beside noise."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxfed.linalg import matmul, svd
from jaxfed.linalg.blocks import map_in_blocks
from jaxfed.linalg.sums import sum_of_rows, unit_of
from jaxfed.linalg.svd import not_rounding, rounding

# A client's score counts up to this number, so that no client decides alone.
MOST = 4.0
# Steps, and draws in each, that match the null to the larger singular values.
MATCHES, MATCH_DRAWS = 3, 8
# Local components are looked for up to this share of the samples or the features.
MOST_USED = 2 / 3
# Alternations between shared and local directions.
REFINEMENTS = 4
# Each subset leaves out this share of the clients.
LEFT_OUT = 0.25
# Draws that are in memory at once, each as large as the samples.
BLOCK = 4


class Levels(NamedTuple):
    """By the number of larger directions: the score of the next, and the variance of the noise."""

    scores: Float[Array, "*clients levels"]
    variance: Float[Array, "*clients levels"]


class SampleFacts(NamedTuple):
    """ONE client's number of samples, largest rounding error, and whether its mean is zero."""

    samples: Float[Array, "*clients"]
    rounding: Float[Array, "*clients"]
    centred: Bool[Array, "*clients"]


class Agreement(NamedTuple):
    """Directions by decreasing agreement, and the scores of all clients and of subsets."""

    basis: Float[Array, "features ranks"]
    values: Float[Array, " ranks"]
    chance: Float[Array, " ranks"]
    scores: Float[Array, " ranks"]
    subset_scores: Float[Array, "subsets ranks"]


class Evidence(NamedTuple):
    """What the compiled program returns."""

    agreement: Agreement
    noise: Levels
    local_scores: Float[Array, " ranks"]
    subset_local_scores: Float[Array, "subsets ranks"]
    noise_variance: Float[Array, " clients"]


def last_above(scores, threshold):
    """Return the number of the last significant component, or 0; of NumPy's arrays or JAX's."""
    return ((scores > threshold) * np.arange(1, scores.shape[-1] + 1)).max(axis=-1)


def evidence_of(data, key, threshold, most: tuple[int, int], draws: int, subsets: int) -> Evidence:
    """Compute all scores, of all clients and of the subsets."""
    rows, counts = data.values.astype(data.count.dtype), data.count
    units = jax.vmap(unit_of)(rows)
    rows = rows / units[:, None, None]
    m, _, d = rows.shape
    most_shared, most_local = most
    of_noise, of_agreement, of_local, of_subsets = jax.random.split(key, 4)
    chosen = subsets_of(m, subsets, of_subsets).astype(rows.dtype)

    # For the noise's variance alone, few draws are enough.
    alone = _against_noise(
        rows, counts, jnp.zeros((d, 0), rows.dtype), of_noise, sum(most), draws // 2
    )
    rank = last_above(together(alone.scores, jnp.ones(m, rows.dtype)), threshold)
    variance = alone.variance[:, jnp.minimum(rank, sum(most) - 1)]

    signals = jax.vmap(_signal)(rows, counts, variance)
    agreement = against_chance(signals, chosen, of_agreement, most_shared, draws)
    shared = last_above(agreement.scores, threshold)

    basis = agreement.basis * (jnp.arange(most_shared) < shared)
    # Scale noise to variance one in every client, so that noisy clients do not outweigh others.
    scaled = rows / jnp.sqrt(jnp.where(variance > 0, variance, 1))[:, None, None]
    basis = _refined(scaled, basis, rank - shared)
    noise = _against_noise(rows, counts, basis, of_local, most_local, draws)
    scores = together(noise.scores, jnp.ones(m, rows.dtype))
    variance = variance * units * units
    return Evidence(agreement, noise, scores, together(noise.scores, chosen), variance)


def subsets_of(clients: int, number: int, key) -> Bool[Array, "subsets clients"]:
    """Draw the clients in each subset."""
    size = min(clients, max(2, round((1 - LEFT_OUT) * clients)))
    keys = jax.random.split(key, number)
    return jax.vmap(lambda k: jax.random.permutation(k, clients))(keys) < size


def together(scores, chosen):
    """Add scores of the chosen clients, each limited."""
    # Over the root of their number, a sum of independent scores has variance one under the null, as
    # each of them has. So one threshold serves single clients, all of them, and subsets.
    limited = jnp.clip(scores, -MOST, MOST)
    return matmul(chosen, limited) / jnp.sqrt(chosen.sum(axis=-1, keepdims=True))


def _reciprocal(x):
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0)


# --- against noise -------------------------------------------------------------------------------


def _against_noise(rows, counts, basis, key, levels: int, draws: int) -> Levels:
    """Compare clients' singular values outside the basis with noise, one after another."""
    outside = rows - matmul(matmul(rows, basis), basis.T)
    triples = jax.vmap(svd)(outside)
    # By the largest singular value of all samples; what was taken out leaves its rounding.
    norms = jnp.sqrt(jax.vmap(sum_of_rows)(rows**2).sum(axis=1))
    least = jax.vmap(lambda norm: rounding(norm[None], rows.shape[1:]))(norms)
    # Noise of samples whose mean was subtracted has mean zero, too.
    means = jnp.sqrt(jnp.sum(jax.vmap(sum_of_rows)(rows) ** 2, axis=1) / counts)
    centred = means <= (64 * jnp.finfo(rows.dtype).eps) ** 0.5 * norms
    known = SampleFacts(counts, least, centred)
    # Each bit of a word is the sign of an entry in another draw; the first word is for matching.
    words = len(rows), 1 + math.ceil(draws / 32), *rows.shape[1:]
    bits = jax.random.bits(key, words, jnp.uint32)
    client = partial(_next_score, basis=basis, draws=draws)

    def level(larger):
        return jax.vmap(partial(client, larger=larger))(outside, known, triples, bits)

    scores, variance = lax.map(level, jnp.arange(levels))
    return Levels(scores.T, variance.T)


def _next_score(rows, known: SampleFacts, triples, bits, *, basis, larger, draws: int):
    """Return the score of ONE client's next singular value, and the variance of its noise."""
    left, singular, right = triples
    count, mean = known.samples, known.centred / known.samples
    real = (jnp.arange(len(rows)) < count)[:, None]
    squares = jnp.where(singular > known.rounding, singular, 0) ** 2
    before = jnp.arange(len(singular)) < larger
    tail = jnp.sum(jnp.where(before, 0, squares))
    rest = rows - matmul(left * (singular * before), right)
    # The larger directions have absorbed noise, more of it in the rows and columns that they fit
    # closely. An outlying entry is absorbed by its row twice, by its direction and by its size, so
    # rows are divided without a root.
    of_rows = 1 - jnp.sum(left**2 * before, axis=1) - mean
    of_columns = 1 - jnp.sum(right**2 * before[:, None], axis=0) - jnp.sum(basis**2, axis=1)
    # Rows and columns that the larger directions fit almost exactly have hardly any residual left.
    # Without a floor, rounding would be scaled up.
    row_floor, column_floor = jnp.maximum(of_rows, 0.05), jnp.maximum(of_columns, 0.05)
    rest = rest / row_floor[:, None] / jnp.sqrt(column_floor)
    noise = rest * jnp.sqrt(_reciprocal(jnp.sum(rest**2)))

    def drawn(draw, signal, energy):
        signs = 1 - 2 * ((bits[draw // 32] >> (draw % 32)) & 1).astype(noise.dtype)
        signed = noise * signs
        # As in the observed residual, the mean, if it was subtracted, and the shared directions are
        # taken out.
        signed = signed - real * jnp.sum(signed, axis=0) * mean
        signed = signed - matmul(matmul(signed, basis), basis.T)
        return _squares(matmul(left * jnp.sqrt(signal), right) + jnp.sqrt(energy) * signed)

    def matched(_, guess):
        draw = partial(drawn, signal=guess[0], energy=guess[1])
        seen = map_in_blocks(draw, jnp.arange(MATCH_DRAWS), BLOCK).mean(axis=0)
        signal, energy = guess
        signal = jnp.where(before, jnp.maximum(signal + squares - seen, 0), 0)
        factor = tail * _reciprocal(jnp.sum(jnp.where(before, 0, seen)))
        return signal, energy * jnp.clip(factor, 0.5, 2)

    features = rows.shape[1] - jnp.sum(basis**2)
    # Noise outside the larger directions has this share of its degrees of freedom. The loop then
    # matches the draws' mean singular values to the observed ones.
    room = jnp.maximum((count - larger) * (features - larger), 1)
    largest = squares[jnp.minimum(larger, len(squares) - 1)]
    guess = jnp.where(before, squares - largest, 0), tail * count * features / room
    guess = lax.fori_loop(0, MATCHES, matched, guess)

    def share(squares):
        return jnp.log(squares[larger] / jnp.sum(jnp.where(before, 0, squares)))

    # From bit 32 on: the draws that matched the null would agree with it too well.
    null = map_in_blocks(lambda draw: share(drawn(draw, *guess)), 32 + jnp.arange(draws), BLOCK)
    score = (share(squares) - null.mean()) / null.std(ddof=1)
    # With few directions left, their shares depend on how many samples and means are lost.
    measurable = (larger + 1 <= MOST_USED * jnp.minimum(count, features)) & jnp.isfinite(score)
    # Where larger directions fit a column alone, nothing is left of its noise.
    columns = jnp.sum(of_columns / column_floor)
    return jnp.where(measurable, score, 0), guess[1] / (count * columns)


# --- against chance ------------------------------------------------------------------------------


def _signal(rows, count, variance) -> Float[Array, "features width"]:
    """Return ONE client's directions, scaled by the roots of their weights."""
    _, singular, right = svd(rows)
    largest = variance * (jnp.sqrt(count) + jnp.sqrt(rows.shape[1])) ** 2
    weights = jnp.minimum(singular**2 * _reciprocal(largest), 1)
    weights = jnp.where(largest > 0, weights, not_rounding(singular, rows.shape))
    return right.T * jnp.sqrt(weights)


def against_chance(signals, chosen, key, ranks: int, draws: int) -> Agreement:
    """Compare the agreement of signals with that of signals rotated at random."""
    m, d, width = signals.shape
    everyone = jnp.ones(m, signals.dtype)
    basis, singular, _ = svd(_side_by_side(signals, everyone))
    basis, values = basis[:, :ranks], singular[:ranks] ** 2
    shares = jnp.sum(jnp.einsum("mdw,dr->mwr", signals, basis) ** 2, axis=1)
    # A direction at random captures 1/d of the energy, so only what exceeds that counts.
    shares = shares - jnp.sum(signals**2, axis=(1, 2))[:, None] / d
    # Half of the mean is not reached in most clients if fewer than half have the direction.
    by_most = jnp.cumprod(jnp.median(shares, axis=0) > jnp.mean(shares, axis=0) / 2) > 0

    def largest(signals, chosen):
        return _squares(_side_by_side(signals, chosen))[:ranks]

    of_subsets = map_in_blocks(partial(largest, signals), chosen, BLOCK)

    def level(before):
        found = basis * (jnp.arange(ranks) < before)
        inside = jnp.einsum("dr,mdw->mrw", found, signals)
        weights = jax.vmap(_squares)(signals - jnp.einsum("dr,mrw->mdw", found, inside))

        def drawn(given):
            key, subset = given
            normal = jax.random.normal(key, (m, d, width), signals.dtype)
            # Rotations of as many dimensions as the found directions leave.
            frames = jnp.linalg.qr(normal * (jnp.arange(d) < d - before)[:, None])[0]
            rotated = frames * jnp.sqrt(weights)[:, None]
            return jnp.stack([largest(rotated, everyone)[0], largest(rotated, subset)[0]])

        # Fewer clients agree more by chance, so subsets have a null of their own.
        subset = chosen[jnp.arange(draws) % len(chosen)]
        null = map_in_blocks(drawn, (jax.random.split(key, draws), subset), BLOCK)
        return null.mean(axis=0), null.std(axis=0, ddof=1)

    mean, spread = lax.map(level, jnp.arange(ranks))

    def scores(values, column):
        score = (values - mean[:, column]) / spread[:, column]
        return jnp.where(by_most & jnp.isfinite(score), score, 0)

    return Agreement(basis, values, mean[:, 0], scores(values, 0), scores(of_subsets, 1))


def _refined(rows, basis, local_rank) -> Float[Array, "features ranks"]:
    """Estimate shared directions again, from all samples without clients' local directions."""

    def without_local(rows, basis):
        right = svd(rows - matmul(matmul(rows, basis), basis.T))[2]
        right = right * (jnp.arange(len(right)) < local_rank)[:, None]
        return rows - matmul(matmul(rows, right.T), right)

    def step(_, basis):
        rest = jax.vmap(partial(without_local, basis=basis))(rows).reshape(-1, rows.shape[2])
        return svd(rest)[2][: basis.shape[1]].T * jnp.any(basis != 0, axis=0)

    return lax.fori_loop(0, REFINEMENTS, step, basis)


def _side_by_side(signals, chosen) -> Float[Array, "features columns"]:
    """Put the chosen clients' signals side by side, with the mean of their squares as squares."""
    scaled = signals * jnp.sqrt(chosen / chosen.sum())[:, None, None]
    return jnp.moveaxis(scaled, 0, 1).reshape(signals.shape[1], -1)


def _squares(matrix: Float[Array, "rows columns"]) -> Float[Array, " width"]:
    """Return the squared singular values, descending."""
    few = matrix if matrix.shape[0] < matrix.shape[1] else matrix.T
    return jnp.maximum(jnp.linalg.eigvalsh(matmul(few, few.T))[::-1], 0)
