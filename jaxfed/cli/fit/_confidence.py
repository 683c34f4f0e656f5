"""`jaxfed fit ... --bootstrap`: how sure the components are, by fits to resamples."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Key

from jaxfed import inference, plot
from jaxfed.cli import _report
from jaxfed.cli._options import option
from jaxfed.core.clients.clients import Clients
from jaxfed.core.run.solution import Solution
from jaxfed.inference.weights import FEWEST
from jaxfed.report import intervals

PICTURES = ("bands.png", "angles.png", "distances.png")
OPTIONS = [
    option(
        "--bootstrap",
        int,
        "also fit this many resamples, such as 200, to say how sure the components are; default: "
        "none",
        None,
    ),
    option("--resample", ("samples", "clients"), "what to draw again", "samples"),
]


def check(arguments: SimpleNamespace, clients: Clients) -> None:
    """Refuse what cannot be resampled, before anything is computed.

    Raises:
        ValueError: names the option.
    """
    number = getattr(arguments, "bootstrap", None)
    if number is None:
        return
    if number < 2:
        raise ValueError(f"--bootstrap: wanted at least 2, got {number}")
    fewest = int(np.min(clients.counts))
    if arguments.resample == "clients" and len(clients) < FEWEST:
        raise ValueError(f"--resample: wanted {FEWEST} clients or more, got {len(clients)}")
    if arguments.resample == "samples" and fewest < FEWEST:
        raise ValueError(
            f"--bootstrap: wanted {FEWEST} samples of each client or more to learn from, got "
            f"{fewest}"
        )


class Gaps(NamedTuple):
    """Samples with missing entries."""

    clients: Clients
    imputed: Solution  # the run that imputed them


def computed(
    arguments: SimpleNamespace,
    solution: Solution,
    clients: Clients,
    key: Key[Array, ""],
    gaps: Gaps | None = None,
) -> inference.Confidence | None:
    """Fit the resamples that were requested, unless the run has gone on without some clients.

    Args:
        arguments: values of the options.
        solution: the solution.
        clients: the clients with complete samples.
        key: random key.
        gaps: the samples before they were imputed, if some entries were missing.
    """
    if getattr(arguments, "bootstrap", None) is None:
        return None
    if len(clients) < len(solution.ids):
        print("\nNo resamples were fitted, since some clients' samples or results are not finite.")
        return None
    print(f"\nFitting {arguments.bootstrap} resamples of {arguments.resample}.")
    return inference.confidence(
        solution,
        clients if gaps is None else gaps.clients,
        impute=None if gaps is None else gaps.imputed,
        key=key,
        resamples=arguments.bootstrap,
        of=arguments.resample,
        progress=_report.on_terminal(),
    )


def show_intervals(found: inference.Confidence) -> None:
    """Print intervals of what holds for all clients together."""
    _report.show(intervals.shared_rows(found))
    for remark in found.remarks:
        print(f"\n{remark}")
    print()


def json_entry(found: inference.Confidence, names: list[str]) -> dict[str, Any]:
    """Return the entry of `result.json`."""
    rows = intervals.shared_rows(found) + intervals.client_rows(found, names)
    return {
        "level": found.level,
        "resamples": len(found.replicates),
        "of": found.of,
        "remarks": found.remarks,
        "table": rows,
    }


def figures(
    found: inference.Confidence,
    names: list[str],
    shape: tuple[int, int] | None,
    features: list[str] | None,
) -> dict[str, Any]:
    """Draw pictures, by file name."""
    bands = plot.bands(found, shape, feature_names=features)
    drawn = bands, plot.angles(found), plot.distances(found, names=names)
    return dict(zip(PICTURES, drawn, strict=True))
