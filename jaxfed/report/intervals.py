"""The report's section on confidence, and the rows of its tables, which the command line prints."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxfed import plot
from jaxfed.inference import Confidence, Interval
from jaxfed.report._page import Section, folded, paragraph, table

TableRow = dict[str, Any]
AGAIN = {
    "samples": "each client's samples: what would other samples of these clients give?",
    "clients": "the clients: what would other clients of the same kind give?",
}


def shared_rows(confidence: Confidence) -> list[TableRow]:
    """Return what holds for all clients together; angles have upper bounds only."""
    rows = [_bound("angle of the shared subspace (degrees)", confidence.angle)]
    for group, angle in zip(confidence.groups, confidence.group_angles.tolist(), strict=True):
        first, last = group[0] + 1, group[-1] + 1
        name = f"axis {first}" if first == last else f"the span of axes {first} to {last}"
        rows.append(_bound(f"angle of {name} (degrees)", angle))
    for i, parts in enumerate(zip(*confidence.variances, strict=True)):
        rows.append(_row(f"variance along axis {i + 1}", Interval(*parts)))
    parts = (("shared", confidence.shared_energy), ("local", confidence.local_energy))
    for name, share in parts:
        rows.append(_row(f"energy in {name} components, mean over clients (%)", share, 100))
    return rows


def client_rows(confidence: Confidence, names: Sequence[str]) -> list[TableRow]:
    """Return what holds for each client."""
    return [
        _row(f"energy of {name} outside the shared subspace (%)", Interval(*parts), 100)
        for name, parts in zip(names, zip(*confidence.distance, strict=True), strict=True)
    ]


def section(
    confidence: Confidence,
    names: Sequence[str],
    image_shape: tuple[int, int] | None,
    feature_names: Sequence[str] | None,
    listed: int,
    picture: Callable[[Any, str], str],
) -> Section:
    """Make the section.

    Args:
        confidence: the intervals.
        names: names of the clients.
        image_shape: height and width, if features are pixels.
        feature_names: names of the features, or None.
        listed: the largest number of clients in a table.
        picture: returns the HTML of a figure with a caption.
    """
    text = (
        f"Intervals at {confidence.level:.0%}, from {len(confidence.replicates):,} fits to "
        f"resamples of {AGAIN[confidence.of]} Angles are those between the components of this run "
        f"and the ones that infinitely many {confidence.of} would give. Where axes form a span, "
        "their variances cannot be told apart, and only the span is determined."
    )
    drawn = {
        "Shared axes, and the standard errors of their entries": plot.bands(
            confidence, image_shape, feature_names=feature_names
        ),
        "Angles to the true components are at most this large": plot.angles(confidence),
        "Energy of each client outside the shared subspace": plot.distances(
            confidence, names=names
        ),
    }
    return Section(
        "Confidence",
        [
            paragraph(text),
            *(paragraph(remark) for remark in confidence.remarks),
            table(shared_rows(confidence)),
            *(picture(figure, caption) for caption, figure in drawn.items()),
            folded("Intervals of the clients", table(client_rows(confidence, names)[:listed])),
        ],
    )


def _bound(quantity: str, radians: float) -> TableRow:
    degrees = float(np.degrees(radians))
    return {"quantity": quantity, "estimate": None, "lower": 0.0, "upper": degrees}


def _row(quantity: str, interval: Interval, scale: float = 1) -> TableRow:
    parts = zip(interval._fields, interval, strict=True)
    return {"quantity": quantity} | {name: scale * float(value) for name, value in parts}
