"""`jaxfed transform`: compute scores of samples in components that were learned before."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxfed import pca
from jaxfed.cli import _report
from jaxfed.cli._command import Command
from jaxfed.cli._common import COLUMN, EARLIER_RESULT, OUTPUT, SAMPLES, files, read_samples
from jaxfed.cli._folder import Folder
from jaxfed.cli._options import option
from jaxfed.cli.info import file_of
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.store.saved import Saved, load


def command() -> Command:
    """Describe the command."""
    about = (
        "Write the scores of samples in the components of their client, and their squared distance "
        "from the subspace of these components, to result.npz: `names` of the clients, and for "
        "each sample `client`, `scores` and `anomaly`."
    )
    new = "learn local components of new clients, which took no part in the fit, from their samples"
    personalize = option("--personalize", bool, new, False)
    options = [EARLIER_RESULT, *files(SAMPLES), COLUMN, *OUTPUT, personalize]
    return Command(about, run, {"": options})


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    folder = Folder(arguments.out)
    folder.check([], force=arguments.force)
    fitted = Fitted.read(arguments.result)
    tables, names = read_samples(arguments)
    rows, scores, anomalies = [], [], []
    for name, table in zip(names, tables, strict=True):
        is_new = name not in fitted.names
        if is_new and not arguments.personalize and fitted.saved.result.local is not None:
            raise ValueError(
                f"--data: wanted clients that took part in the fit, got {name}; --personalize "
                "learns local components from its samples"
            )
        centered = table - fitted.mean_of(name, table)
        model, client = _components(fitted, name, centered)
        scores.append(np.asarray(pca.transform(model, centered, client=client)))
        anomalies.append(np.asarray(pca.anomaly_score(model, centered, client=client)))
        energy = np.sum(centered**2)
        rows.append(
            {
                "client": name,
                "samples": len(table),
                "known": "no" if is_new else "yes",
                "residual (% of their energy)": 100 * anomalies[-1].sum() / max(energy, 1e-30),
            }
        )
    folder.begin()
    arrays = {
        "names": names,
        "client": np.repeat(np.arange(len(names)), [len(table) for table in tables]),
        "scores": np.concatenate(scores),
        "anomaly": np.concatenate(anomalies),
    }
    _report.show(rows)
    print()
    _report.finish(folder, arguments, arrays, {"table": rows})


@dataclass(frozen=True)
class Fitted:
    """A result of `jaxfed fit` of the PCA family."""

    saved: Saved  # the result itself
    names: list[str]  # of the clients
    means: np.ndarray  # what was subtracted from each client's samples, `(m, d)`

    @classmethod
    def read(cls, path: Path) -> "Fitted":
        """Read a result.

        Raises:
            ValueError: for any other file.
            OSError: if it cannot be read.
        """
        path = file_of(path)
        saved = load(path)
        with np.load(path, allow_pickle=False) as stored:
            # A result of views has names and means too, and the numbers of their features.
            if not {"names", "mean"} <= set(stored) or "features" in stored:
                raise ValueError(
                    f"{path}: wanted what jaxfed fit wrote of the PCA family, got {saved.algorithm}"
                )
            names, means = stored["names"].tolist(), stored["mean"]
        shared, local = saved.result
        features = (local if shared is None else shared).shape[-2]
        # In a run of several processes, each writes the local components of its own clients.
        clients = len(names) if local is None else len(local)
        if np.shape(names) != (clients,) or means.shape != (clients, features):
            raise ValueError(f"{path}: its names and means are not those of its clients")
        return cls(saved, names, means)

    def mean_of(self, name: str, table: np.ndarray) -> np.ndarray:
        """Return what to subtract from a client's samples, chosen as it was for the fit."""
        if name in self.names:
            return self.means[self.names.index(name)]
        is_common = (self.means == self.means[0]).all()
        return self.means[0] if is_common else table.mean(axis=0)


def _components(fitted: Fitted, name: str, table: np.ndarray) -> tuple[Any, int | None]:
    """Return components for a client's samples, and the client's index among them."""
    local = fitted.saved.result.local
    if local is None:
        return fitted.saved, None
    if name in fitted.names:
        return fitted.saved, fitted.names.index(name)
    return Personalized(*pca.personalize(fitted.saved, [table], local.shape[-1])), 0
