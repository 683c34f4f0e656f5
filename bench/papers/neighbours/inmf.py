"""Integrative NMF: the objective and the error of held-out entries by the number of components.

As in LIGER's choice of k (Welch et al. 2019): four clients with 200 samples of 80 features, which
are loadings of six components that differ a little between clients, and noise. Tiles of ten samples
by ten features are held out; they lie on diagonals, so that every sample and feature has observed
entries.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxfed as jf
from jaxfed.nmf import INMF, complete
from papers.drawing import curves
from papers.intervals import at_least
from papers.report import Found, Labels
from papers.runs import Seeds

TRUE, RANKS, PENALTIES, NOISE, ROUNDS = 6, (2, 4, 5, 6, 7, 8, 10), (1.0, 5.0), 0.3, 100
COUNTS, FEATURES = (200,) * 4, 80
LIGERS = 5.0  # the penalty by default
OBJECTIVE, HELD_OUT = "objective / energy", "held-out error / noise"


class Tiles(NamedTuple):
    """Samples, and which of a client's entries are held out."""

    samples: np.ndarray  # (clients, samples, features)
    held_out: np.ndarray  # (samples, features)


def draw(seed: int, counts: tuple[int, ...], features: int, rank: int = TRUE) -> list[np.ndarray]:
    """Clients' samples: loadings of components that differ a little between clients, and noise."""
    rng = np.random.default_rng(seed)
    shared, samples = rng.gamma(0.3, size=(rank, features)), []
    for count in counts:
        own = 0.3 * rng.gamma(0.3, size=shared.shape)
        signal = rng.gamma(0.5, size=(count, rank)) @ (shared + own)
        noise = NOISE * rng.normal(size=signal.shape)
        samples.append(np.maximum(signal + noise, 0).astype(np.float32))
    return samples


def tiles(seed: int) -> Tiles:
    """A draw of the experiment."""
    rows, columns = np.arange(COUNTS[0])[:, None] // 10, np.arange(FEATURES) // 10
    return Tiles(np.stack(draw(seed, COUNTS, FEATURES)), (rows + columns) % 8 == 0)


def run(
    seeds: Seeds, *, ranks: Sequence[int] = RANKS, penalties: Sequence[float] = PENALTIES
) -> Found:
    """All ranks and penalties in one compiled call."""

    def fitted(seed, rank, penalty):
        samples, mask = drawn.samples[seed], jnp.asarray(drawn.held_out[0])
        gaps = jnp.where(mask, jnp.nan, samples)
        clients = jf.Clients.from_samples(gaps, missing="mask")
        algorithm = INMF(max(ranks), penalty, active_rank=rank, start="random")
        run = jf.rollout(algorithm, clients, rounds=ROUNDS, key=jax.random.key(0))
        left = jnp.where(mask, complete(run, gaps) - samples, 0)
        energy = jnp.sum(jnp.where(mask, 0, samples) ** 2) / len(samples)
        return {
            OBJECTIVE: run.history["objective"][-1] / energy,
            HELD_OUT: jnp.sqrt(jnp.sum(left**2) / (len(samples) * jnp.sum(mask))) / NOISE,
        }

    drawn = jax.tree.map(lambda *x: jnp.stack(x), *map(tiles, seeds))
    axes = {"seed": list(range(len(seeds))), "rank": list(ranks), "penalty": list(penalties)}
    found = jf.grid(fitted, axes, runs_at_once=1)
    measured: dict[Labels, Any] = {
        (penalty, k, quantity): found[quantity].sel(rank=k, penalty=penalty).values
        for penalty in penalties
        for k in ranks
        for quantity in (OBJECTIVE, HELD_OUT)
    }
    errors = {k: measured[LIGERS, k, HELD_OUT] for k in ranks}
    objectives = np.stack([measured[LIGERS, k, OBJECTIVE] for k in ranks])
    claims = {
        "the objective falls with k, least fall": (
            -np.diff(objectives, axis=0).max(0),
            at_least(0),
        ),
        "held-out error: its fall up to the true k, by the one after it": (
            (errors[TRUE - 1] - errors[TRUE]) / (errors[TRUE] - errors[TRUE + 1]),
            at_least(1),
        ),
    }
    panels = {
        (quantity, "k", quantity): {
            f"penalty {penalty:g}": (ranks, found[quantity].sel(penalty=penalty).mean("seed"))
            for penalty in penalties
        }
        for quantity in (OBJECTIVE, HELD_OUT)
    }
    return Found(measured, claims=claims, figures={"inmf": curves(panels, ("linear", "linear"))})
