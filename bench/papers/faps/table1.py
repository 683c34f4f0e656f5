"""Subspace iteration and FAPS with 128 clients: rounds and errors."""

from typing import Any

import jax

from jaxfed.pca import FAPS
from papers.faps import _problems as problems
from papers.report import Found, Labels, ahead, cells
from papers.runs import Seeds


def run(seeds: Seeds, *, features: int = 250, clients: int = 128) -> Found:
    """Subspace iteration at the printed size, FAPS at a smaller one."""
    measured: dict[Labels, Any] = {}
    few = problems.few_of(seeds)
    with jax.enable_x64(True):
        problems.put(
            measured, problems.alone(20, problems.geometric(500, 1.01), seeds, 700), problems.SSI
        )
        values, sizes = problems.geometric(features, 1.01), (1000,) * clients
        beside = problems.alone(20, values, few, 700).rounds[: len(few)]
        five = problems.together(FAPS(20), values, sizes, few, 250)
        problems.put(measured, five, problems.FIVE, beside=beside)
        one = problems.together(problems.printed(20), values, sizes, few, 400)
        problems.put(measured, one, problems.PRINTED, beside=beside)
    claimed = {
        ("claim", f"{problems.PRINTED} takes fewer rounds than {problems.SSI}, by"): ahead(
            one.rounds, beside, 1
        )
    }
    return Found(
        cells(measured, by="median") | claimed,
        notes=[
            f"{problems.started(seeds)}, at the printed size (500 features of one client are the "
            "same problem).",
            f"FAPS: {len(few)} draw(s) of the data, scaled to n = {features}, with {clients} "
            "clients of 1000 samples. At most 250 rounds with 5 local steps and 400 as printed; "
            "runs that are not done count with these.",
        ],
    )
