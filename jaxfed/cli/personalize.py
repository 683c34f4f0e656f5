"""`jaxfed personalize`: local components of new clients, beside shared ones that stay."""

import argparse
from pathlib import Path

import numpy as np

from jaxfed import data, pca
from jaxfed.cli import _evaluate, _report
from jaxfed.cli._folder import RESULT, Folder
from jaxfed.cli.fit import _common
from jaxfed.cli.transform import mean_of, read_components
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.store.saved import Saved, entries
from jaxfed.pca.fitted import side_by_side


def add_parser(subparsers) -> None:
    """Add the command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    about = "Learn local components for clients that took no part, each from its own samples."
    parser = subparsers.add_parser(
        "personalize",
        help="local components of new clients beside shared ones that were learned before",
        description=f"{about} The shared components stay as they are, and nothing is sent. What is "
        "written is a result like that of jaxfed fit, for jaxfed info and jaxfed transform.",
    )
    parser.add_argument(
        "result",
        type=Path,
        metavar="RESULT",
        help="what jaxfed fit perpca, varpro, oneshot or one for a single subspace wrote: a "
        "folder, or its result.npz",
    )
    _common.add_samples(parser, "results")
    parser.add_argument(
        "--local-rank",
        type=int,
        metavar="N",
        help="number of local components of each new client; default: that of the others",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Args:
        arguments: the parsed arguments.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for arguments, a result or data that do not fit.
        OSError: if a file cannot be read or written.
    """
    folder = Folder(arguments.out)
    folder.check([], force=arguments.force)
    saved, known, means = read_components(arguments.result)
    rank = _rank(arguments.local_rank, saved)
    tables, names = data.read_folder(
        arguments.data, client_column=arguments.client_column, max_bytes=arguments.max_bytes
    )
    shifts = [
        mean_of(means, known.index(name) if name in known else None, table)
        for name, table in zip(names, tables, strict=True)
    ]
    centred = [table - shift for table, shift in zip(tables, shifts, strict=True)]
    result = Personalized(*pca.personalize(saved, centred, rank))
    rows = _table(result, names, centred)
    folder.begin()
    found = Saved(result, {}, 0, saved.status, saved.algorithm, len(names), saved.versions)
    arrays = {**entries(found), "names": names, "mean": np.stack(shifts)}
    settings = {name: value for name, value in vars(arguments).items() if name != "run"}
    samples = dict(zip(names, map(len, tables), strict=True))
    _report.write(folder, arrays, {"settings": settings, "samples": samples, "table": rows})
    _report.show(rows)
    print(f"\nWritten to {folder.path}: {', '.join(RESULT)}.")
    return 0


def _rank(given: int | None, saved: Saved) -> int:
    """The number of local components.

    Raises:
        ValueError: for a result beside whose shared components no others can be.
    """
    shared, local = side_by_side(saved)
    if shared is None:
        why = "it has no shared components"
        if saved.result.shared is not None:
            why = "its local components lie around the shared ones, by a prior that is not in it"
        raise ValueError(
            f"RESULT: wanted shared components with local ones beside them, got "
            f"{saved.algorithm}: {why}; jaxfed.personalize does it from a solution in Python"
        )
    if given is not None:
        return given
    if local is None:
        raise ValueError(
            f"--local-rank: wanted how many each new client learns, since {saved.algorithm} has "
            "none"
        )
    return local.shape[-1]


def _table(result: Personalized, names: list[str], centred: list[np.ndarray]) -> list[dict]:
    found = _evaluate.shares_of_each(result, Clients.from_samples(centred).data)
    parts = zip(*(100 * np.asarray(part) for part in found), strict=True)
    return [
        {
            "client": name, "samples": len(table), "in shared components (%)": shared,
            "in its own (%)": own, "in neither (%)": rest,
        }
        for name, table, (shared, own, rest) in zip(names, centred, parts, strict=True)
    ]  # fmt: skip
