"""KID of every client's generated digits: variance over clients and the worst client."""

from papers.adept._diffusion import Run, clients_drawn, compared, measure, outcome_arrays
from papers.report import Found, Target, at_least

_NAMES = ("mean KID", "variance of KID over clients", "worst client's KID")


def run(found: Run) -> Found:
    """Compare what every method found for every seed."""
    return Found(
        compared(found, _NAMES, dict.fromkeys(_NAMES[1:], at_least(1.0))),
        found.notes,
        {"clients": lambda: clients_drawn(found)},
        outcome_arrays(found),
    )


TARGET = Target(
    run,
    experiment=measure,
    title="Generated digits of one-digit clients: KID client by client",
    columns=("quantity", "method"),
    notes=[
        "The paper's claim is that ratios are above 1: with ADEPT-DGM the worst client is "
        "better off, and clients differ less.",
    ],
)
