"""Personal diffusion models of one-digit clients: mean KID and FID of generated digits."""

from papers.adept._diffusion import (
    Run,
    clients_drawn,
    compared,
    measure,
    outcome_arrays,
    samples_drawn,
)
from papers.report import Found, Target, at_least

_CLAIMED = ("mean KID", "mean FID", "variance of KID over clients")


def run(found: Run) -> Found:
    """Compare what every method found for every seed."""
    names = (*_CLAIMED, "mean KID of the last round")
    return Found(
        compared(found, names, dict.fromkeys(_CLAIMED, at_least(1.0))),
        found.notes,
        {"samples": lambda: samples_drawn(found), "clients": lambda: clients_drawn(found)},
        outcome_arrays(found),
    )


TARGET = Target(
    run,
    experiment=measure,
    title="Generated digits of one-digit clients: KID and FID, means over clients",
    columns=("quantity", "method"),
    notes=[
        "The paper's claim is that ratios are above 1: ADEPT-DGM is best.",
    ],
)
