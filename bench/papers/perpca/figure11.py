"""Error of the shared component of a perturbed pair against misalignment, and its prediction."""

from papers.perpca._pair import NOTES, against_prediction, known
from papers.report import Found, Target
from papers.runs import Seeds

THETAS = (0.05, 0.1, 0.2, 0.3, 0.45)
_GAPS = (0.5,) * len(THETAS)


def run(seeds: Seeds) -> Found:
    """All misalignments in one compiled call; nothing is random, so seeds are not used."""
    del seeds
    return against_prediction("theta", THETAS, _GAPS)


_REFERENCE, _PAPER = known(THETAS, _GAPS, THETAS)
TARGET = Target(
    run,
    title="Shi & Kontar (2024), Figure 11: the shared component's error and the misalignment",
    columns=("theta", "quantity"),
    reference=_REFERENCE,
    paper=_PAPER,
    notes=[f"delta is {_GAPS[0]}.", *NOTES],
)
