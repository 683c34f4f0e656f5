"""Large sparse views: cost by bits."""

import equinox as eqx
import jax
import numpy as np
import scipy.sparse
from jaxtyping import Array, Key

from jaxfed import stack
from jaxfed.gcca import Views
from papers.gcca._linear import costs_of, first_at, saved, warm
from papers.report import Found, Labels
from papers.runs import Seeds
from papers.synthetic import gcca_synthetic

RATIO, END = "compression ratio", "end cost / full precision's"
DENSITIES = 0.01, 5e-4, 1e-3


def run(
    seeds: Seeds,
    *,
    draws: int = 5,
    rounds: int = 100,
    entities: int = 50_000,
    features: int = 2000,
    latent: int = 200,
) -> Found:
    """All draws of a seed in one compiled call for each number of bits."""
    measured: dict[Labels, list[float]] = {}
    for seed in seeds:
        keys = jax.random.split(jax.random.key(seed), draws)
        views = drawn(keys, entities=entities, features=features, latent=latent)
        start = warm(views, 50)
        means = {
            bits: costs_of(views, start, keys, bits, batch=entities // 10, rounds=rounds).mean(0)
            for bits in (None, 3, 4, 5)
        }
        goal = 1.1 * means[None].min()
        full = first_at(means[None], goal)
        for bits in (3, 4, 5):
            ratio = saved(first_at(means[bits], goal), full, bits)
            measured.setdefault((f"{bits} bits", RATIO), []).append(ratio)
            ratio = means[bits][-1] / means[None][-1]
            measured.setdefault((f"{bits} bits", END), []).append(ratio)
    return Found(
        measured, notes=[f"{draws} draws a seed, as in the paper, of {entities} entities."]
    )


def drawn(keys: Key[Array, " draws"], **sizes: int) -> Views:
    """Each draw's sparse views, in lists as long as the longest."""
    draws = []
    for key in keys:
        arrays = gcca_synthetic(key, noise=0.1, densities=DENSITIES, **sizes).views
        draws.append(Views.from_sparse([scipy.sparse.csr_array(np.asarray(x)) for x in arrays]))
    longest = max(views.data.lengths[0] for views in draws), sizes["features"]
    return stack([eqx.tree_at(lambda v: v.data, v, v.data.filled(longest)) for v in draws])
