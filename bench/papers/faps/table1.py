"""Subspace iteration and FAPS with 128 clients: rounds and errors."""

from typing import Any

import jax

from jaxfed.pca import FAPS, SubspaceIteration
from papers.faps import _problems as problems
from papers.report import Found, Labels, ahead, cells
from papers.runs import Seeds

RANK = 20


def run(seeds: Seeds, *, features: int = 2000, clients: int = 128, rounds: int = 700) -> Found:
    """Every method from the same starts, on data that are drawn for each of few seeds."""
    measured: dict[Labels, Any] = {}
    few = len(problems.few_of(seeds))
    with jax.enable_x64(True):
        values = problems.geometric(features, 1.01)
        problem = problems.large(seeds, values, RANK)
        plain = problems.as_printed(SubspaceIteration(RANK, stop="objective"), problem, rounds)
        problems.put(measured, plain, problems.SSI)
        parts = problems.parts_of(seeds, clients, 1000 * clients, values)
        for name, algorithm in (
            (problems.FIVE, FAPS(RANK, stop="objective")),
            (problems.PRINTED, problems.printed(RANK)),
        ):
            found = problems.as_printed(algorithm, problem, rounds, parts)
            problems.put(measured, found, name, beside=plain.rounds[:few])
    text = f"{problems.PRINTED} takes at most half of {problems.SSI}'s rounds, fewer by"
    printed = measured[problems.PRINTED, problems.ROUNDS]
    claimed = {("claim", text): ahead(printed, plain.rounds[:few] / 2, 0)}
    return Found(
        cells(measured, by="median") | claimed,
        notes=[
            f"{problems.started(seeds)}. FAPS: {few} draw(s) of the data, with {clients} "
            f"clients of 1000 samples and the first of these starts. At most {rounds} rounds; runs "
            "that are not done count with these."
        ],
    )
