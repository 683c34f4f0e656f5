"""Reports: a run as one self-contained HTML page.

A page embeds its pictures, runs no script and loads nothing; its content security policy forbids
both. It follows the reader's light or dark colour scheme.

    jf.report.write("report.html", solution, clients, names=names)
    jf.report.write("report.html", estimator, X, groups=groups)
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Shaped

from jaxfed import _names
from jaxfed._checks import (
    check_instance,
    check_number,
    check_options,
    check_texts,
    checked_path,
    refuse,
)
from jaxfed._numbers import precision_of
from jaxfed.core.clients.clients import Clients
from jaxfed.core.common.files import replacing
from jaxfed.core.run.result import Fitted, saved_of
from jaxfed.core.run.solution import Solution
from jaxfed.inference import Confidence
from jaxfed.pca.ranks import SuggestedRanks
from jaxfed.plot.projections import clients_behind
from jaxfed.report import _page, _sections


def html(
    fitted: Fitted,
    clients: Clients | Any,
    *,
    groups: Shaped[np.ndarray, " n"] | Sequence[object] | None = None,
    title: str = "A federated run",
    names: Sequence[str] | None = None,
    metadata: Shaped[Array, " m"] | Sequence[object] | None = None,
    label: str | None = None,
    image_shape: tuple[int, int] | None = None,
    feature_names: Sequence[str] | None = None,
    ranks: SuggestedRanks | None = None,
    confidence: Confidence | None = None,
    seconds: float | None = None,
    table: Sequence[Mapping[str, Any]] = (),
    pictures: Mapping[str, Any] | None = None,
) -> str:
    """Create a page on a run: data, ranks, convergence, components, clients, costs, revealed data.

    Components, scores, variances and the map of clients appear for results of PCA; for other
    results, pass `pictures`. With very many clients or samples, pictures show an even selection.
    Spectra and scores are computed from the clients' samples, which only a simulation has in one
    place. A run that protects persons (`jaxfed.privacy.release_moments`) has no scores on its page.

    Args:
        fitted: what `fit` returned, its result, what `jaxfed.load` returned, or an estimator.
            Sections that need more than these know are left out.
        clients: the clients of the run; for an estimator, also what its `fit` takes: samples as
            rows, `(n, d)`, or a list of views.
        groups: the client of each row, where `clients` are an estimator's samples.
        title: title of the page.
        names: names of the clients; their own by default, or numbers.
        metadata: values by which the map of clients is coloured, see `jaxfed.plot.client_map`; by
            default their numbers of samples.
        label: what the metadata are.
        image_shape: height and width, if features are pixels.
        feature_names: names of the features; those of the clients by default.
        ranks: what `jaxfed.pca.suggest_ranks` returned, if it was used to choose the ranks.
        confidence: the result of `jaxfed.inference.confidence` for this run, for a section with its
            intervals.
        seconds: duration of the run.
        table: rows of further results, each a dictionary from column to cell with the same columns.
        pictures: further Matplotlib figures by their captions.

    Returns:
        The page, a complete HTML document.

    Raises:
        ValueError: if arguments do not match the run, or an estimator is not fitted.
        ImportError: if Matplotlib is not installed.
    """
    clients = clients_behind(fitted, clients, groups)
    record = saved_of(fitted)
    known, number = clients.names, record.clients or len(clients)
    names = known.clients if names is None else names
    if feature_names is None and not known.of_views:
        feature_names = known.features
    if names is not None:
        check_texts("names", names)
    if feature_names is not None:
        check_texts("feature_names", feature_names)
        if len(feature_names) != clients.features:
            wanted, got = clients.features, len(feature_names)
            raise ValueError(f"feature_names: wanted {wanted}, one per feature, got {got}")
    for name, given in (("clients", clients), ("names", names), ("metadata", metadata)):
        if getattr(given, "ndim", 1) == 0:
            raise refuse(name, f"the run's {number}", given)
        if given is not None and len(given) != number:
            raise ValueError(f"{name}: wanted the run's {number}, got {len(given)}")
    if confidence is not None:
        check_instance(
            "confidence", confidence, Confidence, "the result of jaxfed.inference.confidence"
        )
        shape = len(confidence.distance.estimate), len(confidence.axes)
        if shape != (number, clients.features):
            wanted = f"that of this run, {number} clients and {clients.features} features"
            raise ValueError(f"confidence: wanted {wanted}, got {shape[0]} and {shape[1]}")
    check_number("seconds", seconds or 0, "a number of at least 0", lambda x: x >= 0)
    if any(not row or row.keys() != table[0].keys() for row in table):
        raise refuse("table", "a list of dictionaries with the same keys", table)
    run = _sections.Given(
        record=record,
        solution=fitted if isinstance(fitted, Solution) else None,
        clients=clients,
        names=tuple(names or (f"client {i}" for i in range(number))),
        metadata=metadata,
        label=label,
        image_shape=image_shape,
        feature_names=feature_names,
        ranks=ranks,
        confidence=confidence,
        seconds=seconds,
        table=tuple(table),
        pictures=dict(pictures or {}),
    )
    with precision_of(clients.weights.dtype):
        return _page.page(title, _sections.summary(run), _sections.all_of(run))


def write(
    path: str | os.PathLike[str], fitted: Fitted, clients: Clients | Any, **options: Any
) -> None:
    """Write a page on a run to a file, completely or not at all.

    Args:
        path: the file, such as `"report.html"`; an existing file is replaced.
        fitted: as in `html`.
        clients: as in `html`.
        options: those of `html`.

    Raises:
        ValueError: as in `html`.
        ImportError: if Matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    check_options(options, html, without=("fitted", "clients"))
    place = checked_path("path", path)
    text = html(fitted, clients, **options)
    with replacing(place) as part:
        part.write_text(text, encoding="utf-8")


__dir__ = _names.public_names(__name__)
