"""Reports: one self-contained HTML page of a run, for those who were not there.

A page needs no network and runs no script: its pictures are within it, and its own policy forbids
both. It is light or dark as its reader's system is.

    jf.report.write("report.html", solution, clients, names=names)
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Array, Shaped

from jaxfed import _names
from jaxfed._checks import host_array
from jaxfed.core.checks import (
    check_instance,
    check_number,
    check_text,
    check_texts,
    checked_path,
    is_list,
    refuse,
)
from jaxfed.core.clients import Clients
from jaxfed.core.files import replacing
from jaxfed.core.solution import Solution
from jaxfed.pca.ranks import RankTable
from jaxfed.report import _page, _sections

__all__ = ["html", "write"]


def html(
    solution: Solution,
    clients: Clients,
    *,
    title: str = "A federated run",
    names: Sequence[str] | None = None,
    metadata: Shaped[Array, " m"] | Sequence[object] | None = None,
    label: str | None = None,
    image_shape: tuple[int, int] | None = None,
    ranks: RankTable | None = None,
    seconds: float | None = None,
    table: Sequence[Mapping[str, Any]] = (),
    pictures: Mapping[str, Any] | None = None,
) -> str:
    """A page on a run: data, ranks, convergence, components, clients, costs, what was revealed.

    Components, variances and the clients' map are there for what PCA learned; other results are
    shown by `pictures`. Pictures of very many clients show some of them, evenly chosen. Spectra are
    of the clients' samples, which only a simulation has in one place.

    Args:
        solution: what `fit` returned.
        clients: whom the run was with.
        title: of the page.
        names: of the clients; numbered by default.
        metadata: what is known of each client, by which the map is coloured, see
            `jaxfed.plot.client_map`; their numbers of samples by default.
        label: what the metadata are.
        image_shape: height and width, if features are pixels.
        ranks: what `jaxfed.pca.suggest_ranks` found, where ranks were chosen by it.
        seconds: how long the run took.
        table: rows of further results, cells by column, the same columns in each.
        pictures: further Matplotlib figures by their captions.

    Returns:
        The page, a complete HTML document.

    Raises:
        ValueError: for arguments that do not fit the run.
        ImportError: if Matplotlib is not installed.
    """
    wanted = "what fit returned"
    check_instance("solution", solution, Solution, wanted)
    if not solution._is_one:
        raise refuse("solution", "the solution of one run, not traced", solution.rounds)
    check_instance("clients", clients, Clients, "jaxfed.Clients")
    if len(clients) != len(solution.failure.clients):
        number = len(solution.failure.clients)
        raise ValueError(f"clients: wanted the run's {number}, got {len(clients)}")
    check_text("title", title)
    if names is not None:
        check_texts("names", names)
        if len(names) != len(clients):
            raise ValueError(f"names: wanted {len(clients)}, got {len(names)}")
    if metadata is not None:
        wanted = f"one for each of {len(clients)} clients"
        if host_array("metadata", metadata, wanted).shape != (len(clients),):
            raise refuse("metadata", wanted, metadata)
    if label is not None:
        check_text("label", label)
    if ranks is not None:
        check_instance("ranks", ranks, RankTable, "what jaxfed.pca.suggest_ranks returned")
    if seconds is not None:
        check_number("seconds", seconds, "a number of at least 0", lambda x: x >= 0)
    if not is_list(table) or not all(
        isinstance(row, Mapping) and row and row.keys() == table[0].keys() for row in table
    ):
        raise refuse("table", "a list of dictionaries with the same keys", table)
    if pictures is not None and not (
        isinstance(pictures, Mapping)
        and all(isinstance(k, str) and hasattr(x, "savefig") for k, x in pictures.items())
    ):
        raise refuse("pictures", "a dictionary of Matplotlib figures by their captions", pictures)
    given = _sections.Given(
        solution, clients,
        tuple(names or (f"client {i}" for i in range(len(clients)))),
        metadata, label, image_shape, ranks, seconds, tuple(table), dict(pictures or {}),
    )  # fmt: skip
    return _page.page(title, _sections.summary(given), _sections.all_of(given))


def write(
    path: str | os.PathLike[str], solution: Solution, clients: Clients, **options: Any
) -> None:
    """Write a page on a run to a file: complete or not at all.

    Args:
        path: of the file, such as `"report.html"`; one that is there is replaced.
        solution: what `fit` returned.
        clients: whom the run was with.
        options: as those of `html`.

    Raises:
        ValueError: as `html`, and for what is no path.
        ImportError: if Matplotlib is not installed.
        OSError: if it cannot be written.
    """
    place = checked_path("path", path)
    text = html(solution, clients, **options)
    with replacing(place) as part:
        part.write_text(text, encoding="utf-8")


__dir__ = _names.public_names(__name__)
