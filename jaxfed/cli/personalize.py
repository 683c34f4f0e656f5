"""`jaxfed personalize`: learn local components of new clients; the shared ones stay."""

import argparse

import jax
import numpy as np

from jaxfed import pca
from jaxfed.cli import _evaluate, _report
from jaxfed.cli._command import Command
from jaxfed.cli._common import COLUMN, EARLIER_RESULT, OUTPUT, SAMPLES, files, read_samples
from jaxfed.cli._folder import Folder
from jaxfed.cli._options import option
from jaxfed.cli.transform import FitResult
from jaxfed.core.clients.clients import Clients
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.store.saved import Saved, entries
from jaxfed.pca.fitted import side_by_side


def command() -> Command:
    """Describe the command."""
    about = (
        "Learn local components for clients that took no part in the fit, each from its own "
        "samples. The shared components do not change, and nothing is sent. RESULT is the output "
        "of jaxfed fit perpca, perpca-gradient, oneshot or a method with shared components only. "
        "Pass the new result to jaxfed info or jaxfed transform."
    )
    number = "number of local components of each new client; default: as in RESULT"
    rank = option("--local-rank", int, number, None)
    options = [EARLIER_RESULT, *files(SAMPLES), COLUMN, *OUTPUT, rank]
    return Command(about, run, {"": options})


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    folder = Folder(arguments.out)
    folder.check([], force=arguments.force)
    fitted = FitResult.read(arguments.result)
    saved = fitted.saved
    rank = _rank(arguments.local_rank, saved)
    tables, names, _ = read_samples(arguments)
    own = [fitted.units_of(name, table) for name, table in zip(names, tables, strict=True)]
    units = jax.tree.map(lambda *rows: np.stack(rows), *own)
    samples = [np.asarray(each.transform(y)) for each, y in zip(own, tables, strict=True)]
    result = Personalized(*pca.fit_local(saved, samples, rank))
    rows = _table(result, names, samples)
    folder.begin()
    new = Saved(result, {}, 0, saved.status, saved.algorithm, len(names), saved.versions)
    arrays = {**entries(new._replace(preprocessing=units)), "names": names, "units": fitted.choices}
    counts = dict(zip(names, map(len, tables), strict=True))
    _report.show(rows)
    print()
    _report.finish(folder, arguments, arrays, {"samples": counts, "table": rows})


def _rank(requested: int | None, saved: Saved) -> int:
    """Return the number of local components.

    Raises:
        ValueError: if the result has no shared components that allow local ones beside them.
    """
    shared, local = side_by_side(saved)
    if shared is None:
        why = "it has no shared components"
        if saved.result.shared is not None:
            why = "its local components depend on the shared ones by a prior that is not in it"
        raise ValueError(
            f"RESULT: wanted shared components with local ones beside them, got "
            f"{saved.algorithm}: {why}; in Python, jaxfed.personalize does it from a solution"
        )
    if requested is not None:
        return requested
    if local is None:
        raise ValueError(
            "--local-rank: wanted a number of local components of each new client, since "
            f"{saved.algorithm} has none, got None"
        )
    return local.shape[-1]


def _table(result: Personalized, names: list[str], samples: list[np.ndarray]) -> list[dict]:
    shares = _evaluate.shares(result, Clients.from_samples(samples).data, per_client=True)
    return [
        {
            "client": name,
            "samples": len(table),
            "in shared components (%)": 100 * float(shares.shared[i]),
            "in its own (%)": 100 * float(shares.local[i]),
            "in neither (%)": 100 * float(shares.residual[i]),
        }
        for i, (name, table) in enumerate(zip(names, samples, strict=True))
    ]
