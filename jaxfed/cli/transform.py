"""`jaxfed transform`: compute scores of samples in the components of an earlier fit."""

import csv
import io
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxfed import pca
from jaxfed.cli import _report
from jaxfed.cli._common import EARLIER_RESULT, OUTPUT, SAMPLES, TABLE, files, read_samples
from jaxfed.cli._folder import Folder
from jaxfed.cli._options import define, option
from jaxfed.cli.info import file_of
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import order_of, without_names
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.run.fit import fit
from jaxfed.core.store.arrays import opened
from jaxfed.core.store.saved import Saved, load
from jaxfed.data import ClientTables
from jaxfed.preprocess import Standardization, Standardize

SCORES = "scores.csv"


def run(arguments: SimpleNamespace) -> None:
    """Run the command."""
    # The fit may have had more precise tables than these.
    with jax.enable_x64(True), ExitStack() as precision:
        _run(arguments, precision)


def _run(arguments: SimpleNamespace, precision: ExitStack) -> None:
    folder = Folder(arguments.out)
    folder.check(force=arguments.force)
    fitted = FitResult.read(arguments.result)
    incomplete = fitted.saved.imputation is not None
    found = read_samples(arguments, precision, incomplete=incomplete)
    tables, names, features = fitted.in_order(found)
    rows, scores, anomalies = [], [], []
    for name, table in zip(names, tables, strict=True):
        is_new = name not in fitted.names
        if is_new and not arguments.personalize and fitted.saved.result.local is not None:
            raise ValueError(
                f"--data: wanted clients that took part in the fit, got {name}; --personalize "
                "learns local components from its samples"
            )
        missing = int(np.isnan(table).sum())
        table = fitted.completed(name, table)
        model, client = _components(fitted, name, table)
        scores.append(np.asarray(pca.transform(model, table, client=client)))
        anomalies.append(np.asarray(pca.anomaly_score(model, table, client=client)))
        energy = np.sum(table**2)
        rows.append(
            {
                "client": name,
                "samples": len(table),
                "known": "no" if is_new else "yes",
                "missing entries": missing,
                "residual (% of their energy)": 100 * anomalies[-1].sum() / (energy or 1),
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
    # Samples from tables get a table of scores as well.
    others = {} if features is None else {SCORES: _csv(arrays)}
    _report.finish(folder, arguments, arrays, {"table": rows}, others)


def _csv(arrays: dict[str, Any]) -> str:
    """Return scores and squared distances of the samples as a table."""
    scores, text = arrays["scores"], io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["client", *(f"score_{k + 1}" for k in range(scores.shape[1])), "anomaly"])
    owners = np.asarray(arrays["names"])[arrays["client"]]
    for owner, row, distance in zip(owners, scores, arrays["anomaly"], strict=True):
        writer.writerow([_harmless(owner), *row, distance])
    return text.getvalue()


def _harmless(cell: str) -> str:
    """Return a cell that spreadsheets show, and do not compute as a formula."""
    return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


@dataclass(frozen=True)
class FitResult:
    """A result of `jaxfed fit` of the PCA family."""

    saved: Saved  # the result itself
    names: list[str]  # of the clients
    units: Standardization  # how each client's samples were standardized
    choices: list[str]  # `--center` and `--scale` of the fit
    features: list[str] | None  # their names

    @classmethod
    def read(cls, path: Path) -> "FitResult":
        """Read a result.

        Raises:
            ValueError: if the file holds anything else.
            OSError: if it cannot be read.
        """
        path = file_of(path)
        saved = load(path)
        with opened(path) as stored:
            if not {"names", "units"} <= set(stored) or saved.preprocessing is None:
                raise ValueError(
                    f"{path}: wanted what jaxfed fit wrote of the PCA family, got {saved.algorithm}"
                )
            names, choices = stored["names"].tolist(), stored["units"].tolist()
            own = stored["features"].tolist() if "features" in stored else None
        shared, local = saved.result
        features = (local if shared is None else shared).shape[-2]
        # In a run of several processes, each process writes its own clients' local components.
        clients = len(names) if local is None else len(local)
        # Here, clients are taken by their positions in `names`.
        units = without_names(saved.preprocessing)
        means = [each.mean for each in (units, saved.imputation) if each is not None]
        shapes = {mean.shape for mean in means}
        if np.shape(names) != (clients,) or shapes != {(clients, features)}:
            raise ValueError(f"{path}: its names and means are not those of its clients")
        Standardize(*choices)  # refuses invalid choices
        return cls(saved, names, units, choices, own)

    def in_order(self, found: ClientTables) -> ClientTables:
        """Return tables with the features of the fit in its order, by the names of columns.

        Raises:
            ValueError: if tables and fit have names of features, and these differ.
        """
        if self.features is None or found.features is None or self.features == found.features:
            return found
        order = order_of(self.features, found.features, "--data, columns")
        samples = [table[:, order] for table in found.samples]
        return found._replace(samples=samples, features=self.features)

    def completed(self, name: str, table: np.ndarray) -> np.ndarray:
        """Return a client's samples, standardized and imputed as in the fit."""
        missing, models = np.isnan(table).sum(), self.saved.imputation
        if missing and name not in self.names:
            raise ValueError(
                f"--data: wanted samples without missing entries of {name}, which took no part in "
                f"the fit, got {missing} missing"
            )
        rows = self.units_of(name, table).transform(table)
        if missing and models is not None:
            rows = models.transform(rows, client=self.names.index(name))
        return np.asarray(rows)

    def units_of(self, name: str, table: np.ndarray) -> Standardization:
        """Return the standardization of a client's samples, chosen as in the fit."""
        if name in self.names:
            return jax.tree.map(lambda x: x[self.names.index(name)], self.units)
        # Common values are the same in every client's row; own values come from the samples.
        center, scale = self.choices
        mean, deviation = self.units.mean[0], self.units.scale[0]
        if center == "local":
            mean = table.mean(axis=0)
        if scale in ("local", "energy"):
            left = Clients.from_samples([table - np.asarray(mean)])
            own = fit(Standardize("none", scale), left, rounds=1, key=jax.random.key(0))
            deviation = own.result.local.scale[0]
        return Standardization(mean, deviation)


def _components(fitted: FitResult, name: str, table: np.ndarray) -> tuple[Any, int | None]:
    """Return components for a client's samples, and the client's id or position among them."""
    local = fitted.saved.result.local
    if local is None:
        return fitted.saved, None
    if name in fitted.names:
        place, ids = fitted.names.index(name), fitted.saved.ids
        return fitted.saved, place if ids is None else int(ids[place])
    return Personalized(*pca.fit_local(fitted.saved, [table], local.shape[-1])), 0


PERSONALIZE = option(
    "--personalize",
    bool,
    "learn local components of clients that took no part in the fit from their samples",
    False,
)
command = define(run, {"": [EARLIER_RESULT, *files(SAMPLES), *TABLE, *OUTPUT, PERSONALIZE]})
