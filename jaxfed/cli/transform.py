"""`jaxfed transform`: the scores of samples in components that were learned before."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from jaxfed import data, pca
from jaxfed.cli import _report
from jaxfed.cli._folder import RESULT, Folder
from jaxfed.cli.fit import _common
from jaxfed.cli.info import file_of
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.store.saved import Saved, load


def add_parser(subparsers) -> None:
    """Add the command.

    Args:
        subparsers: what `argparse.ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "transform",
        help="scores of samples in components that were learned before",
        description="Write the scores of samples in their client's components, and how far they "
        "are from them, to result.npz: `names`, and for each row `client`, `scores`, `anomaly`.",
    )
    parser.add_argument(
        "result", type=Path, metavar="RESULT", help="what jaxfed fit wrote, of the PCA family"
    )
    _common.add_samples(parser, "scores")
    parser.add_argument(
        "--personalize",
        action="store_true",
        help="learn local components for clients that were not there, from their samples alone",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: for arguments, a result or data that do not fit.
        OSError: if a file cannot be read or written.
    """
    folder = Folder(arguments.out)
    folder.check([], force=arguments.force)
    saved, known, means = read_components(arguments.result)
    tables, names = data.read_folder(
        arguments.data, client_column=arguments.client_column, max_bytes=arguments.max_bytes
    )
    rows, scores, anomalies = [], [], []
    for name, table in zip(names, tables, strict=True):
        place = known.index(name) if name in known else None
        if place is None and not arguments.personalize and saved.result.local is not None:
            raise ValueError(
                f"--data: {name} was not there when components were learned; --personalize learns "
                "its own from its samples"
            )
        centred = table - mean_of(means, place, table)
        fitted, client = _components(saved, place, centred)
        scores.append(np.asarray(pca.transform(fitted, centred, client=client)))
        anomalies.append(np.asarray(pca.anomaly_score(fitted, centred, client=client)))
        energy = np.sum(centred**2)
        rows.append(
            {
                "client": name,
                "samples": len(table),
                "known": "no" if place is None else "yes",
                "residual (% of their energy)": 100 * anomalies[-1].sum() / max(energy, 1e-30),
            }
        )
    folder.begin()
    owner = np.repeat(np.arange(len(names)), [len(table) for table in tables])
    arrays = {"names": names, "client": owner, "scores": np.concatenate(scores)}
    settings = {name: value for name, value in vars(arguments).items() if name != "run"}
    _report.write(
        folder,
        arrays | {"anomaly": np.concatenate(anomalies)},
        {"settings": settings, "table": rows},
    )
    _report.show(rows)
    print(f"\nWritten to {folder.path}: {', '.join(RESULT)}.")
    return 0


def read_components(path: Path) -> tuple[Saved, list[str], np.ndarray]:
    """What `jaxfed fit` wrote of the PCA family, with the clients' names and means.

    Raises:
        ValueError: for any other file.
        OSError: if it cannot be read.
    """
    path = file_of(path)
    saved = load(path)
    with np.load(path, allow_pickle=False) as stored:
        # Views have names, means and the numbers of their features.
        if not {"names", "mean"} <= set(stored) or "features" in stored:
            raise ValueError(
                f"{path}: wanted what jaxfed fit wrote of the PCA family, got {saved.algorithm}"
            )
        known, means = stored["names"].tolist(), stored["mean"]
    features = saved.result.shared if saved.result.shared is not None else saved.result.local
    local = np.shape(saved.result.local)[:1] or np.shape(known)  # one process holds its own alone
    if np.shape(known) != local or means.shape != (*local, features.shape[-2]):
        raise ValueError(f"{path}: its names and means are not those of its clients")
    return saved, known, means


def mean_of(means: np.ndarray, place: int | None, table: np.ndarray) -> np.ndarray:
    """What is subtracted from a client's samples, as it was from those that were learned from."""
    if place is not None:
        return means[place]
    common = (means == means[0]).all()
    return means[0] if common else table.mean(axis=0)


def _components(saved: Saved, place: int | None, table: np.ndarray) -> tuple[Any, int | None]:
    """Components for a client's samples, and the client's place among them."""
    if saved.result.local is None:
        return saved, None
    if place is not None:
        return saved, place
    rank = saved.result.local.shape[-1]
    return Personalized(*pca.personalize(saved, [table], rank)), 0
