"""Subspace iteration and FAPS with 128 clients: rounds and errors."""

from typing import Any

import jax
import numpy as np

from jaxfed.pca import FAPS
from papers.faps._problems import (
    ACCURATE,
    ERROR,
    FIVE,
    KKT,
    PRINTED,
    ROUNDS,
    SHARE,
    SSI,
    TO_KKT,
    alone,
    few_of,
    geometric,
    printed,
    put,
    starts_of,
    together,
)
from papers.report import Found, Interval, Labels, Target, about, ahead, cells, near, quartiles
from papers.runs import Seeds


def run(seeds: Seeds, *, features: int = 250, clients: int = 128) -> Found:
    """Subspace iteration at the printed size, FAPS at a smaller one."""
    measured: dict[Labels, Any] = {}
    few = few_of(seeds)
    with jax.enable_x64(True):
        put(measured, alone(20, geometric(500, 1.01), seeds, 700), SSI)
        values, sizes = geometric(features, 1.01), (1000,) * clients
        beside = alone(20, values, few, 700).rounds[: len(few)]
        five = together(FAPS(20), values, sizes, few, 250)
        put(measured, five, FIVE, beside=beside)
        one = together(printed(20), values, sizes, few, 400)
        put(measured, one, PRINTED, beside=beside)
    claimed = {
        ("claim", f"{PRINTED} takes fewer rounds than {SSI}, by"): ahead(one.rounds, beside, 1),
    }
    return Found(
        cells(measured, by="median") | claimed,
        notes=[
            f"{SSI.capitalize()}: {len(starts_of(seeds))} starts, at the printed size (500 "
            "features of one client are the same problem).",
            f"FAPS: {len(few)} draw(s) of the data, scaled to n = {features}, with {clients} "
            "clients of 1000 samples. At most 250 rounds with 5 local steps and 400 as printed; "
            "runs that are not done count with these.",
        ],
    )


TARGET = Target(
    run,
    title="Wang, Liu & Zhang (2022), Table 1: n = 2000, m = 128000, p = 20, d = 128",
    columns=("method", "quantity"),
    reference={
        (SSI, ROUNDS): quartiles(264, 295, 328),
        (SSI, TO_KKT): quartiles(197, 223, 256),
        (SSI, KKT): about(4.6e-7),
        (SSI, ERROR): about(6e-9),
        # Of one start, from which subspace iteration takes 444 rounds.
        (FIVE, SHARE): near(122 / 444, 0.08),
        # Not done there after 400.
        (PRINTED, SHARE): Interval(400 / 444, np.inf, f"> {400 / 444:.2g}"),
    },
    paper={(SSI, ROUNDS): 207.0, (SSI, ERROR): 1.09e-7, (PRINTED, ERROR): 8.04e-8},
    notes=[
        "The printed 207 rounds lie in the lowest of forty starts by rule (27), but in the "
        f"middle of those to a violation of {ACCURATE:g}; the printed errors are those of "
        "such a rule as well.",
        "As printed, FAPS takes one local step a round after about ten rounds, which makes "
        "it slower than subspace iteration; the number that the paper prints for it is not "
        "legible in the copy at hand.",
    ],
)
