"""`jaxfed personalize`: learn local components of new clients; the shared ones stay."""

from contextlib import ExitStack
from types import SimpleNamespace

import jax
import numpy as np

from jaxfed import pca
from jaxfed.cli import _evaluate, _report
from jaxfed.cli._common import EARLIER_RESULT, OUTPUT, SAMPLES, TABLE, files, read_samples
from jaxfed.cli._folder import Folder
from jaxfed.cli._options import define, option
from jaxfed.cli.transform import FitResult
from jaxfed.core.clients.clients import Clients
from jaxfed.core.clients.names import Names
from jaxfed.core.contract.algorithm import Personalized
from jaxfed.core.store.saved import Saved, entries
from jaxfed.pca.fitted import side_by_side


def run(arguments: SimpleNamespace) -> None:
    """Run the command."""
    # The fit may have had more precise tables than these.
    with jax.enable_x64(True), ExitStack() as precision:
        _run(arguments, precision)


def _run(arguments: SimpleNamespace, precision: ExitStack) -> None:
    folder = Folder(arguments.out)
    folder.check(force=arguments.force)
    fitted = FitResult.read(arguments.result)
    saved = fitted.saved
    rank = _rank(arguments.local_rank, saved)
    tables, names, features = fitted.in_order(read_samples(arguments, precision))
    own = [fitted.units_of(name, table) for name, table in zip(names, tables, strict=True)]
    units = jax.tree.map(lambda *rows: np.stack(rows), *own)
    samples = [np.asarray(each.transform(y)) for each, y in zip(own, tables, strict=True)]
    result = Personalized(*pca.fit_local(saved, samples, rank))
    rows = _table(result, names, samples)
    folder.begin()
    new = Saved(result, {}, 0, saved.status, saved.algorithm, len(names), saved.versions)
    new = new._replace(preprocessing=units, names=Names.of_lists(names, features))
    new = new._replace(guarantees=saved.guarantees)  # of the shared ones
    arrays = {**entries(new), "names": names, "units": fitted.choices, "features": features}
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


RANK = option(
    "--local-rank",
    int,
    "number of local components of each new client; default: as in RESULT",
    None,
)
command = define(run, {"": [EARLIER_RESULT, *files(SAMPLES), *TABLE, *OUTPUT, RANK]})
