"""Section 5.4 of Wang, Liu & Zhang (2022): synthetic problems of other sizes and spectra."""

from functools import partial

import jax

from jaxfed.pca import FAPS
from papers.faps._problems import (
    FIVE,
    POWER,
    PRINTED,
    SSI,
    Outcomes,
    alone,
    few_of,
    geometric,
    power,
    printed,
    together,
)
from papers.runs import Seeds

RATIOS = {f"ratio 1 + 10^-{x}": 1 + 10**-x for x in (1, 1.5, 2, 2.5)}

SAME = "2000 to 5000", "160000 to 256000"  # n and m, on which subspace iteration does not depend

Grid = dict[tuple[str, str, str], Outcomes]  # by group, setting and method


@jax.enable_x64(True)
def grid(seeds: Seeds) -> Grid:
    """Outcomes of section 5.4."""
    runs: Grid = {}
    slow = geometric(300, 1.01)
    for p in (10, 20, 30, 40):
        runs["p", f"p = {p}", SSI] = alone(p, slow, seeds, 700)
    runs["n", SAME[0], SSI] = runs["p", "p = 20", SSI]
    runs["m", SAME[1], SSI] = runs["p", "p = 10", SSI]
    for name, ratio in RATIOS.items():
        values = geometric(600 if ratio < 1.01 else 300, ratio)
        runs["ratio", name, SSI] = alone(10, values, seeds, 2000 if ratio < 1.01 else 700)

    few, even, scaled = few_of(seeds), (1000,) * 8, geometric(250, 1.01)
    for method, make in ((POWER, power), (PRINTED, printed), (FIVE, FAPS)):
        run = partial(together, seeds=few, rounds=600)
        runs["p", "p = 10", method] = run(make(10), scaled, even)
        runs["p", "p = 20", method] = runs["n", SAME[0], method] = run(make(20), scaled, even)
        runs["m", SAME[1], method] = run(make(10), scaled, (1625,) * 8)
        for name, ratio in list(RATIOS.items())[:2]:
            runs["ratio", name, method] = run(make(10), geometric(250, ratio), even)
    return runs


NOTES = [
    f"{SSI.capitalize()} at the printed sizes, but for features that it forgets within a few "
    "rounds: 300 of them will do, 600 for the smallest ratio. It depends neither on m nor on the "
    "split nor, for ratio 1.01, on n, so that settings which differ in these alone are one.",
    "The others scaled: 8 clients instead of 128, each with the printed number of samples (on "
    "average, where that varies), n = 250, at most 600 rounds, one start for three seeds, p up to "
    "20 and the two largest ratios. More clients make FAPS slower: its penalties add up.",
]
