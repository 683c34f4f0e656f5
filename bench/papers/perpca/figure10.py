"""Error of the shared component of a perturbed pair against the eigengap, and its prediction."""

from papers.perpca._pair import NOTES, against_prediction, known
from papers.report import Found, Target
from papers.runs import Seeds

GAPS = (0.05, 0.1, 0.2, 0.4, 0.8)
_THETAS = (0.25,) * len(GAPS)


def run(seeds: Seeds) -> Found:
    """All gaps in one compiled call; nothing is random, so seeds are not used."""
    del seeds
    return against_prediction("delta", _THETAS, GAPS)


_REFERENCE, _PAPER = known(_THETAS, GAPS, GAPS)
TARGET = Target(
    run,
    title="Shi & Kontar (2024), Figure 10: the shared component's error and the eigengap",
    columns=("delta", "quantity"),
    reference=_REFERENCE,
    paper=_PAPER,
    notes=[f"theta is {_THETAS[0]}.", *NOTES],
)
