"""Subspace iteration and FAPS with 128 clients: rounds and errors."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfed import Personalized
from jaxfed.pca import FAPS, SubspaceIteration
from papers.faps import _problems as problems
from papers.report import Found, Labels, ahead, cells
from papers.runs import Seeds

RANK = 20


def run(seeds: Seeds, *, features: int = 2000, clients: int = 128, rounds: int = 700) -> Found:
    """Every method from the same starts, on data that are drawn for each of few seeds."""
    measured: dict[Labels, Any] = {}
    few = problems.few_of(seeds)
    with jax.enable_x64(True):
        values = problems.shortened(problems.geometric(features, 1.01), RANK)
        pooled = jnp.diag(values**2)
        keys = problems.starts_of(seeds).keys(0)
        starts = problems.starts_in(keys, features, values, RANK)

        def solved(algorithm, matrices, count):
            first = Personalized(starts.shared[:count], None)
            return problems.solved(
                algorithm, matrices, pooled, values, keys[:count], rounds, start=first
            )

        plain = solved(SubspaceIteration(RANK), pooled[None], len(keys))
        problems.put(measured, plain, problems.SSI)
        sizes = (1000,) * clients
        matrices = jnp.stack([problems.matrices_of(key, sizes, values) for key in few.keys(1)])
        for name, algorithm in (
            (problems.FIVE, FAPS(RANK)),
            (problems.PRINTED, problems.printed(RANK)),
        ):
            found = solved(algorithm, matrices, len(few))
            problems.put(measured, found, name, beside=plain.rounds[: len(few)])
    text = f"{problems.PRINTED} takes at most half of {problems.SSI}'s rounds, fewer by"
    printed = measured[problems.PRINTED, problems.ROUNDS]
    claimed = {("claim", text): ahead(printed, plain.rounds[: len(few)] / 2, 0)}
    return Found(
        cells(measured, by="median") | claimed,
        notes=[
            f"{problems.started(seeds)}. FAPS: {len(few)} draw(s) of the data, with {clients} "
            f"clients of 1000 samples and the first of these starts. At most {rounds} rounds; runs "
            "that are not done count with these."
        ],
    )
