"""KID of every client's generated digits: variance over clients and the worst client."""

from pathlib import Path

from papers.adept import _diffusion
from papers.adept._diffusion import (
    SCALE,
    clients_drawn,
    compared,
    outcome_arrays,
)
from papers.report import Found, Target, at_least
from papers.runs import Seeds

_NAMES = ("mean KID", "variance of KID over clients", "worst client's KID")


def run(seeds: Seeds, *, data: Path | None = None, scale: float = SCALE) -> Found:
    """Train every method for every seed, and compare."""
    found = _diffusion.measure(seeds, data, scale)
    return Found(
        compared(found, _NAMES, dict.fromkeys(_NAMES[1:], at_least(1.0))),
        found.notes,
        {"clients": lambda: clients_drawn(found)},
        outcome_arrays(found),
    )


TARGET = Target(
    run,
    title="Generated digits of one-digit clients: KID client by client",
    columns=("quantity", "method"),
    notes=[
        "The paper's claim is that ratios are above 1: with ADEPT-DGM the worst client is "
        "better off, and clients differ less.",
    ],
)
