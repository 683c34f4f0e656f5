"""Pictures of digits that personal diffusion models generate, and their noise."""

import numpy as np

from papers.adept._diffusion import Run, compared, measure, methods, outcome_arrays, samples_drawn
from papers.report import Found, Target, at_least


def run(found: Run) -> Found:
    """Compare what every method found for every seed."""
    samples = {
        f"samples | {method}": found.outcomes[method][0].samples.astype(np.float16)
        for method in methods(found.size)
    }
    return Found(
        compared(found, ("noise",), {"noise": at_least(1.0)}),
        found.notes,
        {"samples": lambda: samples_drawn(found)},
        outcome_arrays(found) | samples,
    )


TARGET = Target(
    run,
    experiment=measure,
    title="Generated digits of one-digit clients, and the noise in them",
    columns=("quantity", "method"),
    notes=[
        "Noise is Immerkaer's estimate for gray values from 0 to 1. The paper's claim is that "
        "local training leaves more of it than ADEPT-DGM. It counts edges, too: where training "
        "images have more of it than what is generated, less means fainter strokes and is no "
        "merit. The picture is of the first seed, the first client of each digit.",
    ],
)
