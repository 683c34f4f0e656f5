"""Personal diffusion models of one-digit clients: mean KID and FID of generated digits."""

from pathlib import Path

from papers.adept import _diffusion
from papers.adept._diffusion import (
    SCALE,
    clients_drawn,
    compared,
    outcome_arrays,
    samples_drawn,
)
from papers.report import Found, Target, at_least
from papers.runs import Seeds

_CLAIMED = ("mean KID", "mean FID", "variance of KID over clients")


def run(seeds: Seeds, *, data: Path | None = None, scale: float = SCALE) -> Found:
    """Train every method for every seed, and compare."""
    found = _diffusion.measure(seeds, data, scale)
    names = (*_CLAIMED, "mean KID of the last round")
    return Found(
        compared(found, names, dict.fromkeys(_CLAIMED, at_least(1.0))),
        found.notes,
        {"samples": lambda: samples_drawn(found), "clients": lambda: clients_drawn(found)},
        outcome_arrays(found),
    )


TARGET = Target(
    run,
    title="Generated digits of one-digit clients: KID and FID, means over clients",
    columns=("quantity", "method"),
    notes=[
        "The paper's claim is that ratios are above 1: ADEPT-DGM is best.",
    ],
)
