"""Estimated misalignment against the rank of the local components, and the start."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfed import metrics
from papers.perpca import _noiseless as noiseless
from papers.report import Found, Labels, cells
from papers.runs import Seeds

SHARE = "random: share below 0.01"


def run(seeds: Seeds, *, rounds: int = 500) -> Found:
    """All starts of a rank in one compiled call."""
    measured: dict[Labels, Any] = {}
    collapsed: dict[Labels, Any] = {}
    with jax.enable_x64(True):
        data_keys, keys = seeds.split(2)
        window, random = (
            noiseless.noiseless(data_keys),
            noiseless.noiseless(data_keys, local="random", window=None),
        )
        # Start: problem, runs per seed, shared components for given keys.
        starts: dict[str, tuple[noiseless.Problem, int, Callable]] = {
            f"cosine {cosine}": (window, times, partial(noiseless.aligned, cosine=cosine))
            for cosine, times in ((0.1, 3), (0.35, 10), (0.6, 3))
        }
        starts["random"] = window, 10, partial(noiseless.aligned, cosine=None)
        starts["spectrum"] = random, 3, partial(noiseless.spectrum, shared_rank=1)
        parts, shared, places = [], [], {}
        for name, (problem, times, start) in starts.items():
            first = sum(map(len, shared))
            parts.append(noiseless.repeated(problem, times))
            shared.append(start(parts[-1], noiseless.split(keys, times)))
            places[name] = slice(first, first + len(seeds) * times)
        # All starts side by side: one compilation per rank.
        problems = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
        shared = jnp.concatenate(shared)
        run_keys = jax.random.split(jax.random.key(seeds.at(len(seeds))), len(shared))
        for extra in noiseless.EXTRA:
            result = noiseless.descend(problems, shared, run_keys, 1 + extra, rounds=rounds).result
            theta = np.asarray(jax.vmap(metrics.misalignment)(result.local))
            rank = noiseless.rank_name("r2", extra)
            for name, place in places.items():
                measured[name, rank] = theta[place]
            gone = theta[places["random"]].reshape(len(seeds), -1) < 0.01
            if extra <= 3:
                collapsed[SHARE, rank] = gone.mean(1)

    measured = dict(sorted(measured.items(), key=lambda item: list(starts).index(item[0][0])))
    return Found(
        cells(measured, by="range") | collapsed,
        notes=[
            f"Noiseless, after {rounds} rounds at step size 0.1. The value depends on the cosine "
            "of the random start with the true shared component, and less on all else: median "
            "and range over random starts (1 to 10 per seed) are given, and a published value, "
            "which is of one start, counts as reproduced if it lies in this range."
        ],
    )
